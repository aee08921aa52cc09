//! The seal of a staging folder: its result is complete and on disk, and can only be published.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::disk::{At, Dir};
use super::folder::{entries, is_data, DATA, MAX_OWN};
use super::journal::{boot_id, same_boot};
use super::place::Place;
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::manifest::{Manifest, MANIFEST_NAME};

const SEALED: &str = "sealed";

/// The remaining work of publishing, written once the result is complete and on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Seal {
    /// The folder's entry that holds the result, or after an exchange what was there before.
    #[serde(default = "usual_data")]
    pub(super) data: String,
    /// Inode of the data directory, to tell it from an old result after an exchange.
    inode: u64,
    /// Top-level names in the order in which they appear, if one by one.
    pub(super) names: Vec<String>,
    /// How many of the last names are pointers: each appears after all before it are on disk.
    pub(super) pointers: usize,
    /// True if everything was synced to disk.
    pub(super) durable: bool,
    /// Identity of the machine's run in which it was sealed.
    boot: String,
    /// True once the older result is being replaced piece by piece, as its directory cannot be moved.
    #[serde(default)]
    pub(super) piecewise: bool,
}

fn usual_data() -> String {
    DATA.into()
}

impl Seal {
    /// True if a folder has a seal.
    pub(crate) fn is_on(folder: &Dir) -> Result<bool> {
        folder.has(SEALED).at(&folder.join(SEALED), "cannot stat")
    }

    /// The seal of a folder that has lost it, as all else, to a clean-up that was cut short at the end: the manifest at
    /// the destination says that the result is there.
    pub(super) fn of_cleaned(place: &Place, folder: &Dir, durable: bool) -> Result<Option<Seal>> {
        let names = entries(folder)?;
        // A run makes its plan before all else but its lock, and removes it before the seal.
        if names.iter().any(|name| is_data(name) || name == SEALED || name.starts_with("plan")) {
            return Ok(None);
        }
        let Some(out) = place.open_out()? else { return Ok(None) };
        let path = out.join(MANIFEST_NAME);
        let stat = out.stat(OsStr::new(MANIFEST_NAME)).at(&path, "cannot stat")?;
        if !stat.is_some_and(|s| FileType::from_raw_mode(s.st_mode).is_file()) {
            return Ok(None);
        }
        let plan =
            out.read_only(MANIFEST_NAME).and_then(Manifest::published_plan).at(&path, "cannot read")?;
        if plan.is_empty() || !place.is_of(&plan) {
            return Ok(None);
        }
        let inode = out.meta().at(out.path(), "cannot stat")?.st_ino;
        let (data, boot) = (usual_data(), boot_id());
        Ok(Some(Seal { data, inode, names: Vec::new(), pointers: 0, durable, boot, piecewise: false }))
    }

    /// The seal of a folder, if it has one, of a result that may have been lost since.
    pub(super) fn find(folder: &Dir) -> Result<Option<Seal>> {
        let Some(bytes) = folder.read_small(SEALED, MAX_OWN).at(&folder.join(SEALED), "cannot read")? else {
            return Ok(None);
        };
        let unreadable = |e| unclear(folder, &format!("its seal cannot be read ({e})"));
        serde_json::from_slice(&bytes).map(Some).map_err(unreadable)
    }

    /// The seal of a folder, if it has one.
    pub(super) fn read(folder: &Dir) -> Result<Option<Seal>> {
        match Self::find(folder)? {
            Some(seal) if !seal.is_of_this_boot() => {
                Err(unclear(folder, "the machine was restarted before its data was on disk"))
            }
            seal => Ok(seal),
        }
    }

    /// False if the machine was restarted before the result was on disk.
    pub(super) fn is_of_this_boot(&self) -> bool {
        same_boot(self.durable, self.boot.as_bytes(), &boot_id())
    }

    /// Brings what `name` holds to disk, but for the files of `synced`, which are there, and writes the seal. The run
    /// `is_shared` if several processes make it.
    pub(super) fn make(
        folder: &Dir,
        name: &str,
        last: &[&str],
        durable: bool,
        synced: &BTreeSet<String>,
        is_shared: bool,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Seal> {
        let path = folder.join(name);
        let data = folder.sub(OsStr::new(name)).at(&path, "cannot open")?;
        let data_name = name;
        let mut names = Vec::new();
        for name in data.entries().at(&path, "cannot list")? {
            names.push(name.into_string().map_err(|name| {
                let shown = name.to_string_lossy().into_owned();
                Finding::new(codes::UNSUPPORTED, "a file name that is not UTF-8").file(path.join(shown))
            })?);
        }
        if let Some(name) = last.iter().find(|name| !names.iter().any(|n| n == *name)) {
            return Err(Finding::new(codes::USAGE, "listed as the last file but never written")
                .file(path.join(name))
                .into());
        }
        names.sort_by_key(|name| (last.iter().position(|l| l == name).map_or(0, |i| i + 1), name.clone()));
        if durable {
            sync_tree(&data, "", synced, go_on)?;
        }
        let inode = data.meta().at(&path, "cannot stat")?.st_ino;
        let pointers = last.len();
        let data = data_name.to_string();
        let seal = Seal { data, inode, names, pointers, durable, boot: boot_id(), piecewise: false };
        // Others enter a shared run by its plan. Of all else the plan has no use from here on; while it is there, whoever
        // loses the seal takes it for that of a run that has made nothing yet.
        seal.write(folder, !is_shared)?;
        Ok(seal)
    }

    /// Writes the seal, and removes the plan.
    fn write(&self, folder: &Dir, ends_plan: bool) -> Result<()> {
        let bytes = serde_json::to_vec(self).map_err(|e| unclear(folder, &e.to_string()))?;
        folder.replace(SEALED, &bytes, self.durable)?;
        if ends_plan {
            // One that cannot be removed now is removed with the folder.
            let _ = folder.remove_file("plan");
        }
        match self.durable {
            true => folder.sync().at(folder.path(), "cannot bring to disk"),
            false => Ok(()),
        }
    }

    /// Writes the seal anew.
    pub(super) fn rewrite(&self, folder: &Dir) -> Result<()> {
        self.write(folder, false)
    }

    /// True if the data folder is still the result's, whatever has been moved out of it.
    pub(super) fn is_in(&self, folder: &Dir, inside: bool) -> Result<bool> {
        Ok(inside || self.piecewise || inode(folder, OsStr::new(&self.data))? == Some(self.inode))
    }

    /// True as long as nothing of the result has appeared.
    pub(super) fn is_untouched(&self, place: &Place, folder: &Dir) -> Result<bool> {
        if self.piecewise || inode(folder, OsStr::new(&self.data))? != Some(self.inode) {
            return Ok(false);
        }
        let data = folder.sub(OsStr::new(&self.data)).at(&folder.join(&self.data), "cannot open")?;
        Ok(!place.inside || self.all_wait(&data)?)
    }

    /// True if all of the result's entries are in `data` still.
    pub(super) fn all_wait(&self, data: &Dir) -> Result<bool> {
        let waits = |name: &String| data.has(name).at(&data.join(name), "cannot stat");
        Ok(self.names.iter().map(waits).collect::<Result<Vec<_>>>()?.into_iter().all(|waits| waits))
    }

    /// True if the result is at its destination already; an error if it is nowhere.
    pub(super) fn is_published(&self, place: &Place, folder: &Dir) -> Result<bool> {
        let lost = || unclear(folder, "neither it nor the destination holds what was sealed");
        self.has_appeared(place, folder)?.ok_or_else(lost)
    }

    /// Whether the result is at its destination already; `None` if it is nowhere.
    pub(super) fn has_appeared(&self, place: &Place, folder: &Dir) -> Result<Option<bool>> {
        if place.inside || self.piecewise {
            let data = subdirectory(folder, &self.data)?;
            let out = place.open_out()?;
            let is_in = |directory: &Option<Dir>, name: &String| match directory {
                Some(directory) => directory.has(name).at(&directory.join(name), "cannot stat"),
                None => Ok(false),
            };
            let mut all = true;
            for name in &self.names {
                let waits = is_in(&data, name)?;
                if !waits && !is_in(&out, name)? {
                    return Ok(None);
                }
                all &= !waits;
            }
            return Ok(Some(all));
        }
        if inode(folder, OsStr::new(&self.data))? == Some(self.inode) {
            return Ok(Some(false));
        }
        Ok((inode(&place.base, &place.name)? == Some(self.inode)).then_some(true))
    }

    /// Removes the seal.
    pub(super) fn remove(folder: &Dir) -> Result<()> {
        folder.remove_file(SEALED).at(&folder.join(SEALED), "cannot remove")?;
        folder.sync().at(folder.path(), "cannot bring to disk")
    }
}

/// Inode number of an entry.
pub(super) fn inode(directory: &Dir, name: &OsStr) -> Result<Option<u64>> {
    Ok(directory.stat(name).at(&directory.join(name), "cannot stat")?.map(|stat| stat.st_ino))
}

/// A directory in `folder`, if it is there.
pub(super) fn subdirectory(folder: &Dir, name: &str) -> Result<Option<Dir>> {
    match folder.sub(OsStr::new(name)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.at(&folder.join(name), "cannot open").map(Some),
    }
}

fn unclear(folder: &Dir, why: &str) -> Error {
    Finding::new(codes::LEFTOVER_RUN, format!("an interrupted publishing cannot be continued: {why}"))
        .file(folder.path())
        .help("check the destination and the directory, which may hold the previous files; then remove it and run again")
        .into()
}

/// Brings a directory with all beneath it to disk, files before the directory that names them.
fn sync_tree(
    directory: &Dir,
    prefix: &str,
    synced: &BTreeSet<String>,
    go_on: &dyn Fn() -> bool,
) -> Result<()> {
    for name in directory.entries().at(directory.path(), "cannot list")? {
        if !go_on() {
            return Err(Finding::new(codes::INTERRUPTED, "stopped by the user").into());
        }
        let path = directory.join(&name);
        let stat = directory.stat(&name).at(&path, "cannot stat")?;
        if stat.is_some_and(|s| FileType::from_raw_mode(s.st_mode).is_dir()) {
            let sub = directory.sub(&name).at(&path, "cannot open")?;
            sync_tree(&sub, &format!("{prefix}{}/", name.to_string_lossy()), synced, go_on)?;
        } else if !synced.contains(&format!("{prefix}{}", name.to_string_lossy())) {
            directory.sync_file(&name).at(&path, "cannot bring to disk")?;
        }
    }
    directory.sync().at(directory.path(), "cannot bring to disk")
}
