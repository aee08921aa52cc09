//! Removal of what ended runs have left at a destination, and of nothing else.

use std::path::{Path, PathBuf};

use super::clock::Patience;
use super::disk::{At, Dir};
use super::folder::{entries, is_data, refused_owner, remove_folder, OLD};
use super::lock;
use super::others;
use super::place::Place;
use super::seal::Seal;
use super::stored::{self, Stored};
use crate::codes;
use crate::distributed::meeting;
use crate::distributed::rounds::Shared;
use crate::error::{Error, Finding, Result};

/// The fate of something that was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It was removed, or would be.
    Removed,
    /// It can be continued with `--resume`.
    Resumable,
    /// A process is at work on it.
    AtWork,
    /// Its result is complete: `--resume` or `commit` publishes it, or ends its clean-up. The folder may hold an older one.
    Complete,
    /// It has contents that this program must not remove.
    Foreign,
}

/// Something that a run has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaving {
    /// Its path.
    pub path: PathBuf,
    /// The id of the run: the digits of its folder, and the nonce of a run of several processes.
    pub run: Option<String>,
    /// Its fate.
    pub fate: Fate,
    /// Bytes of storage that it takes, or took.
    pub bytes: u64,
    /// Complete results in it, and what is left of such.
    pub results: Vec<Stored>,
}

/// Takes away what runs towards `out` have left that nobody can go on with, and the run `abandon` (digits of its folder,
/// or of its nonce) though one could. Whoever may be at work is watched for `patience`. With `dry`, nothing is removed.
///
/// # Errors
/// What the system says; `FS501` if the run to be abandoned is not there.
pub fn collect(
    out: &Path,
    abandon: Option<&str>,
    patience: &Patience,
    dry: bool,
    go_on: &dyn Fn() -> bool,
) -> Result<Vec<Leaving>> {
    let place = Place::find(out, &"0".repeat(16))?;
    let mut leavings = Vec::new();
    let mut found = false;
    for name in others::folders(&place)? {
        let path = place.base.join(&name);
        let folder = match place.base.sub(&name) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            folder => folder.at(&path, "cannot open")?,
        };
        let digits = name.to_string_lossy();
        let digits = digits[digits.len() - 16..].to_string();
        if refused_owner(&place, &folder)?.is_some() {
            leavings.push(Leaving {
                path,
                run: Some(digits),
                fate: Fate::Foreign,
                bytes: folder.stored_bytes(),
                results: Vec::new(),
            });
            continue;
        }
        let shared = Shared::find(&folder).unwrap_or(None);
        let nonce = shared.as_ref().map(|shared| shared.run.nonce.clone());
        let is_meant = |called: &str| {
            called.len() >= 8
                && (digits.starts_with(called) || nonce.as_ref().is_some_and(|n| n.starts_with(called)))
        };
        let is_abandoned = abandon.is_some_and(is_meant);
        found |= is_abandoned;
        let alive = match &shared {
            Some(shared) => !shared.alive(patience, go_on)?.is_empty(),
            None => false,
        };
        // One that cannot be read proves nothing.
        let seal = Seal::find(&folder).unwrap_or(None);
        let fate = fate_of(&place, &folder, seal.as_ref(), alive, is_abandoned)?;
        let results = match &seal {
            // What a process is at work on changes meanwhile.
            Some(seal) if fate == Fate::Complete => stored::results(&place, &folder, seal)?,
            _ => Vec::new(),
        };
        let bytes = folder.stored_bytes();
        if fate == Fate::Removed && !dry {
            let place = Place::find(out, &digits)?;
            if let Some(lock) = lock::acquire(&folder)? {
                let data: Vec<String> = entries(&folder)?.into_iter().filter(|name| is_data(name)).collect();
                remove_folder(&place, &folder, &data, lock)?;
            }
        }
        leavings.push(Leaving { path, run: Some(nonce.unwrap_or(digits)), fate, bytes, results });
    }
    leavings.extend(meeting::collect(&place, patience, dry, go_on)?);
    if let (Some(run), false) = (abandon, found) {
        return Err(absent(&place, run));
    }
    Ok(leavings)
}

/// What becomes of a run's folder. `seal`: that on the folder, if it can be read. `alive`: one of its
/// processes shows a sign of life.
fn fate_of(
    place: &Place,
    folder: &Dir,
    seal: Option<&Seal>,
    alive: bool,
    is_abandoned: bool,
) -> Result<Fate> {
    let names = entries(folder)?;
    let holds = |wanted: &[&str]| names.iter().any(|name| wanted.contains(&name.as_str()));
    let is_empty = !names.iter().any(|name| is_data(name)) && !holds(&["plan", OLD]);
    // Without a lock file it has just been made, or its clean-up was cut short; where the filesystem knows no locks
    // whoever gives the run up must know.
    let is_held = holds(&["lock"]) && lock::is_held(folder)?.unwrap_or(!is_abandoned);
    Ok(if alive || is_held {
        Fate::AtWork
    } else if let Some(seal) = seal {
        let is_bare = !names.iter().any(|name| is_data(name)) && !holds(&[OLD, "kept"]);
        match is_bare && (is_abandoned || matches!(seal.has_appeared(place, folder), Ok(None))) {
            // Somebody took the results out of it, so that nobody can go on with it.
            true => Fate::Removed,
            false => Fate::Complete,
        }
    } else if Seal::is_on(folder)? || holds(&[OLD, "kept"]) {
        Fate::Foreign
    } else if is_empty || is_abandoned {
        Fate::Removed
    } else {
        Fate::Resumable
    })
}

fn absent(place: &Place, run: &str) -> Error {
    Finding::new(codes::NO_SUCH_PATH, format!("no run called {run} has left anything here"))
        .file(&place.out)
        .help("run `fastshard clean` without --abandon to list what is there")
        .into()
}
