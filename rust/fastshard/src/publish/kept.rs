//! What came into an older result while it was replaced: moved to where it can be seen, and named until the run
//! is over, whichever process ends it.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use super::disk::{At, Dir};
use super::folder::{KEPT, MAX_OWN};
use super::place::Place;
use super::seal::inode;
use crate::codes;
use crate::error::{Finding, Result};

/// Moves the entry `name` of the staging folder beside the destination, and says where to. Noted before it is moved: a process that
/// is killed in between leaves the name to the next.
pub(super) fn keep(place: &Place, folder: &Dir, name: &str, durable: bool) -> Result<Option<PathBuf>> {
    let base = if place.inside { place.out.as_os_str() } else { &place.name };
    let base = Path::new(base).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Some(tree) = inode(folder, OsStr::new(name))? else { return Ok(None) };
    for number in 1..1000 {
        let kept = format!("{base}.kept-{number}");
        if place.base.has(&kept).at(&place.base.join(&kept), "cannot stat")? {
            continue;
        }
        let mut noted = read(folder)?;
        noted.push((tree, kept.clone()));
        let bytes = serde_json::to_vec(&noted).expect("plain data");
        folder.write_whole(KEPT, &bytes, durable)?;
        match folder.rename_new(OsStr::new(name), &place.base, OsStr::new(&kept)) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            done => {
                done.at(&folder.join(name), "cannot move aside")?;
                return Ok(Some(place.base.join(kept)));
            }
        }
    }
    Err(Finding::new(codes::OUT_EXISTS, "no name is free").file(place.base.join(base)).into())
}

/// What runs of this staging folder have kept, as far as it is still there.
pub(super) fn all(place: &Place, folder: &Dir) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for (tree, kept) in read(folder)? {
        if inode(&place.base, OsStr::new(&kept))? == Some(tree) {
            all.push(place.base.join(kept));
        }
    }
    all.dedup();
    Ok(all)
}

/// Inode and name of each.
fn read(folder: &Dir) -> Result<Vec<(u64, String)>> {
    let path = folder.join(KEPT);
    let bytes = folder.read_small(KEPT, MAX_OWN).at(&path, "cannot read")?.unwrap_or_default();
    // Written whole or not at all: what cannot be read was put there by somebody else.
    Ok(serde_json::from_slice(&bytes).unwrap_or_default())
}
