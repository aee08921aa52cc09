//! Seal a complete result and make it appear.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::disk::{self, At};
use super::journal::{boot_id, same_boot};
use super::place::{inode, Occupied, Place};
use super::staging::{remove_folder, Staging};
use crate::codes;
use crate::error::{Error, Finding, Result, Severity};

/// What publishing has to do, written once the result is complete and on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Seal {
    /// Inode of the data directory, to tell it from an old result after an exchange.
    inode: u64,
    /// Top-level names in the order in which they appear, if one by one.
    names: Vec<String>,
    /// How many of the last names are pointers: each appears after all before it are on disk.
    pointers: usize,
    /// True if everything was brought to disk.
    durable: bool,
    /// Identity of the machine's run in which it was sealed.
    boot: String,
}

impl Seal {
    /// The seal of a folder, if it has one.
    pub(super) fn read(folder: &Path) -> Result<Option<Seal>> {
        let path = folder.join("sealed");
        let bytes = match std::fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.at(&path, "cannot read")?,
        };
        let seal: Seal = serde_json::from_slice(&bytes)
            .map_err(|e| unclear(folder, &format!("its seal cannot be read ({e})")))?;
        if !same_boot(seal.durable, seal.boot.as_bytes(), &boot_id()) {
            return Err(unclear(folder, "the machine was restarted before its data was on disk"));
        }
        Ok(Some(seal))
    }

    /// Brings the data to disk and writes the seal.
    fn make(place: &Place, last: &[&str], durable: bool) -> Result<Seal> {
        let data = place.data();
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&data).at(&data, "cannot list")? {
            let name = entry.at(&data, "cannot list")?.file_name().into_string();
            names.push(name.map_err(|name| {
                let shown = name.to_string_lossy().into_owned();
                Finding::new(codes::UNSUPPORTED, "a file name that is not UTF-8").file(data.join(shown))
            })?);
        }
        if let Some(name) = last.iter().find(|name| !names.iter().any(|n| n == *name)) {
            return Err(Finding::new(codes::USAGE, "published last but never written")
                .file(data.join(name))
                .into());
        }
        names.sort_by_key(|name| (last.iter().position(|l| l == name).map_or(0, |i| i + 1), name.clone()));
        if durable {
            sync_tree(&data)?;
        }
        let inode = inode(&data)?.unwrap_or_default();
        let seal = Seal { inode, names, pointers: last.len(), durable, boot: boot_id() };
        let bytes = serde_json::to_vec(&seal).map_err(|e| unclear(&place.folder, &e.to_string()))?;
        disk::write_whole(&place.folder.join("sealed"), &bytes, durable)?;
        Ok(seal)
    }

    /// True if the result is at its destination already; an error if it is nowhere.
    fn published(&self, place: &Place) -> Result<bool> {
        let (data, out) = (place.data(), &place.out);
        let lost = || unclear(&place.folder, "neither it nor the destination holds what was sealed");
        if place.inside {
            let is_in = |directory: &Path, name: &String| directory.join(name).symlink_metadata().is_ok();
            if self.names.iter().any(|name| !is_in(&data, name) && !is_in(out, name)) {
                return Err(lost());
            }
            return Ok(!self.names.iter().any(|name| is_in(&data, name)));
        }
        if inode(&data)? == Some(self.inode) {
            Ok(false)
        } else if inode(out)? == Some(self.inode) {
            Ok(true)
        } else {
            Err(lost())
        }
    }
}

fn unclear(folder: &Path, why: &str) -> Error {
    Finding::new(codes::LEFTOVER_RUN, format!("an interrupted publishing cannot be continued: {why}"))
        .file(folder)
        .help("look at the destination, then remove the folder and run again")
        .into()
}

fn conflict(place: &Place) -> Error {
    Finding::new(codes::PUBLISH_CONFLICT, "the destination changed while the result was written")
        .file(&place.out)
        .help(format!(
            "the result is kept in {}: move the destination away, then --resume",
            place.folder.display()
        ))
        .into()
}

/// Seals unless done, renames unless done, cleans up.
pub(super) fn publish(staging: Staging, last: &[&str]) -> Result<Vec<Finding>> {
    let Staging { place, options, lock, journal, before, seal, .. } = staging;
    drop(journal);
    let seal = match seal {
        Some(seal) => seal,
        None => Seal::make(&place, last, options.fsync)?,
    };
    if !seal.published(&place)? {
        if place.inside {
            move_in(&place, &seal, options.fsync)?;
        } else {
            replace(&place, &before, options.overwrite)?;
        }
    }
    if options.fsync {
        let base = place.base();
        disk::sync(base).at(base, "published, but cannot bring the directory to disk")?;
    }
    Ok(clean_up(&place, lock))
}

/// Puts the data directory at the destination, if that is still what it was.
fn replace(place: &Place, before: &Occupied, overwrite: bool) -> Result<()> {
    let (data, out) = (place.data(), &place.out);
    let in_the_way = |e: io::Error| match e.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotADirectory => {
            conflict(place)
        }
        _ => Error::io(out, "cannot rename the result into place", &e),
    };
    // Only where it differs: not every filesystem lets modes be changed.
    let keep_mode = |mode: u32| match std::fs::metadata(&data) {
        Ok(meta) if meta.mode() == mode => Ok(()),
        _ => disk::set_mode(&data, mode).at(&data, "cannot set the mode"),
    };
    match (inode(out)?, before) {
        (None, _) => disk::rename_new(&data, out).map_err(in_the_way),
        (Some(now), Occupied::Empty { inode, mode }) if now == *inode => {
            keep_mode(*mode)?;
            disk::rename_over(&data, out).map_err(in_the_way)
        }
        (Some(now), Occupied::Full { inode, mode, .. }) if now == *inode && overwrite => {
            keep_mode(*mode)?;
            if disk::exchange(&data, out).at(out, "cannot exchange with the result")? {
                return Ok(());
            }
            let old = place.folder.join("old");
            disk::rename_new(out, &old).at(out, "cannot move the old result aside")?;
            disk::rename_new(&data, out).map_err(|e| {
                // The old result goes back; should that fail too, it is still whole in the folder.
                let _ = disk::rename_new(&old, out);
                in_the_way(e)
            })
        }
        _ => Err(conflict(place)),
    }
}

/// Moves the result's entries into the destination one by one, the pointers last.
fn move_in(place: &Place, seal: &Seal, durable: bool) -> Result<()> {
    let (data, out) = (place.data(), &place.out);
    let waiting = |name: &str| data.join(name).symlink_metadata().is_ok();
    for entry in std::fs::read_dir(out).at(out, "cannot list")? {
        let name = entry.at(out, "cannot list")?.file_name();
        let moved = name.to_str().is_some_and(|n| seal.names.iter().any(|s| s == n) && !waiting(n));
        if !moved && Some(&*name) != place.folder.file_name() {
            return Err(conflict(place));
        }
    }
    let pointers = seal.names.len() - seal.pointers.min(seal.names.len());
    for (i, name) in seal.names.iter().enumerate() {
        if i >= pointers && durable {
            disk::sync(out).at(out, "cannot bring to disk")?;
        }
        if !waiting(name) {
            continue;
        }
        if let Err(error) = disk::rename_new(&data.join(name), &out.join(name)) {
            // Back again, so that a refused result leaves nothing at the destination.
            for name in seal.names[..i].iter().rev() {
                let _ = disk::rename_new(&out.join(name), &data.join(name));
            }
            return match error.kind() {
                io::ErrorKind::AlreadyExists => Err(conflict(place)),
                _ => Err(error).at(&out.join(name), "cannot rename into place"),
            };
        }
    }
    Ok(())
}

/// Removes the folder, the old result in it; what stays behind is a warning, not an error.
fn clean_up(place: &Place, lock: File) -> Vec<Finding> {
    let left = remove_folder(&place.folder, lock).err().map_or(vec![], Error::into_findings);
    left.into_iter()
        .map(|cause| {
            Finding::new(codes::LEFTOVER_RUN, format!("published, but not cleaned up: {}", cause.message))
                .severity(Severity::Warning)
                .file(&place.folder)
                .help("remove the folder")
        })
        .collect()
}

/// Brings a directory with all beneath it to disk, files before the directory that names them.
fn sync_tree(directory: &Path) -> Result<()> {
    for entry in std::fs::read_dir(directory).at(directory, "cannot list")? {
        let entry = entry.at(directory, "cannot list")?;
        let path = entry.path();
        if entry.file_type().at(&path, "cannot stat")?.is_dir() {
            sync_tree(&path)?;
        } else {
            disk::sync(&path).at(&path, "cannot bring to disk")?;
        }
    }
    disk::sync(directory).at(directory, "cannot bring to disk")
}
