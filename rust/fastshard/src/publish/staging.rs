//! The staging folder of a run: begin, fill, discard.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::disk::{self, At};
use super::file::{OutFile, Space};
use super::journal::Journal;
use super::lock;
use super::place::{Occupied, Place};
use super::rename::{self, Seal};
use super::Options;
use crate::codes;
use crate::error::{Error, Finding, Result};

/// A result being written. Locked against other processes as long as it lives; dropping it keeps
/// the folder, so that a later run can resume.
#[derive(Debug)]
pub struct Staging {
    pub(super) place: Place,
    pub(super) options: Options,
    pub(super) lock: File,
    pub(super) journal: Journal,
    pub(super) before: Occupied,
    pub(super) seal: Option<Seal>,
    resumed: bool,
}

impl Staging {
    /// Creates, or with `resume` finds, the staging folder of run `run_id` (hex digest of `plan`).
    ///
    /// It is the hidden sibling `.<out name>.fastshard-<first 16 digits of run_id>` of `out`, or
    /// `out/.fastshard-<16 digits>` where `out` is a mount point or its parent may not be written.
    ///
    /// Errors: `OUT_EXISTS`; `LEFTOVER_RUN` if the folder is there and `resume` is off, or holds
    /// another plan; `LOCKED` if a live process holds it; what the system says.
    pub fn begin(out: &Path, run_id: &str, plan: &[u8], options: &Options) -> Result<Staging> {
        let place = Place::find(out, run_id)?;
        let before = place.occupied()?;
        let sealed = options.resume && place.folder.join("sealed").exists();
        if let (false, Some(finding)) = (sealed, place.refused(&before, options.overwrite)) {
            return Err(finding.into());
        }
        // Twice at most: once for a folder that vanishes because its owner has just finished.
        for _ in 0..2 {
            let fresh = match disk::create_dir(&place.folder) {
                Ok(()) => true,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => false,
                Err(e) => return Err(e).at(&place.folder, "cannot create the staging folder"),
            };
            if !fresh && !options.resume {
                return Err(lock::leftover_or_locked(&place.folder));
            }
            let Some(lock) = lock::acquire(&place.folder)? else { continue };
            let folder = place.folder.clone();
            let begun = Self::open(place, lock, before, plan, options);
            return begun.map_err(|(error, lock)| {
                if fresh {
                    // Nothing of value is in there yet; if this fails too, the first error counts.
                    let _ = remove_folder(&folder, lock);
                }
                error
            });
        }
        Err(lock::locked(&place.folder))
    }

    fn open(
        place: Place,
        lock: File,
        before: Occupied,
        plan: &[u8],
        options: &Options,
    ) -> std::result::Result<Staging, (Error, File)> {
        match Self::prepare(&place, plan, options) {
            Ok((journal, seal, resumed)) => {
                Ok(Staging { place, options: *options, lock, journal, before, seal, resumed })
            }
            Err(error) => Err((error, lock)),
        }
    }

    /// Under the lock: plan, data directory and journal, found or made.
    fn prepare(place: &Place, plan: &[u8], options: &Options) -> Result<(Journal, Option<Seal>, bool)> {
        let folder = &place.folder;
        let seal = Seal::read(folder)?;
        let path = folder.join("plan");
        let mut resumed = seal.is_some();
        match std::fs::read(&path) {
            Ok(found) if found == plan => resumed = true,
            Ok(_) => {
                return Err(Finding::new(codes::LEFTOVER_RUN, "the staging folder holds another plan")
                    .file(folder)
                    .help("the sources or options changed since: remove the folder to start afresh")
                    .into())
            }
            // A sealed run whose clean-up was cut short has no plan any more.
            Err(e) if e.kind() == io::ErrorKind::NotFound && resumed => {}
            // The plan comes before all data: without it nothing else is there.
            Err(e) if e.kind() == io::ErrorKind::NotFound => disk::write_whole(&path, plan, options.fsync)?,
            Err(e) => return Err(e).at(&path, "cannot read"),
        }
        if let (None, true, Some(finding)) = (&seal, place.inside, place.refused(&place.occupied()?, true)) {
            // Another run has begun in the same directory at the same time: better now than at the end.
            return Err(finding.into());
        }
        let data = place.data();
        if seal.is_none() {
            match disk::create_dir(&data) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(e).at(&data, "cannot create")
                }
                _ => {}
            }
        }
        let journal = Journal::open(folder.join("journal"), options.fsync)?;
        if options.fsync {
            for directory in [folder.as_path(), place.base()] {
                disk::sync(directory).at(directory, "cannot bring to disk")?;
            }
        }
        Ok((journal, seal, resumed))
    }

    /// The staging folder, for messages.
    pub fn folder(&self) -> &Path {
        &self.place.folder
    }

    /// The directory whose content becomes the result. Writers that take a path (zarr) write here;
    /// what they leave, subdirectories too, is synced and published with the rest.
    pub fn path(&self) -> PathBuf {
        self.place.data()
    }

    /// True if an earlier run of the plan is continued.
    pub fn resumed(&self) -> bool {
        self.resumed
    }

    /// True if an earlier run was interrupted while it published: its result is complete, nothing
    /// may be written any more, and [`Staging::publish`] finishes it.
    pub fn sealed(&self) -> bool {
        self.seal.is_some()
    }

    /// What is done so far, and what the earlier runs recorded.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Opens or creates the data file `name` with exactly `size` bytes.
    ///
    /// Errors: `UNSAFE_PATH` unless `name` stays below the result; `NO_SPACE`; what the system says.
    pub fn file(&self, name: &str, size: u64, space: Space) -> Result<OutFile> {
        OutFile::open(self.target(name)?, size, space, self.options.fsync)
    }

    /// Writes a small file (index, config) whole, replacing one that an earlier run left.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.target(name)?;
        let file = disk::create(&path).at(&path, "cannot create")?;
        disk::write_at(&file, &path, 0, bytes).at(&path, "cannot write")
    }

    /// Copies the file `source` (tokenizer files and the like); mode by umask, not the source's.
    ///
    /// Errors: `SOURCE_CHANGED` if its length changes meanwhile.
    pub fn copy_in(&self, name: &str, source: &Path) -> Result<()> {
        let path = self.target(name)?;
        let from = File::open(source).at(source, "cannot open")?;
        let meta = from.metadata().at(source, "cannot stat")?;
        if !meta.is_file() {
            return Err(Finding::new(codes::UNSUPPORTED, "not a regular file").file(source).into());
        }
        let to = disk::create(&path).at(&path, "cannot create")?;
        let copied = disk::copy(&from, &to, &path).at(&path, &format!("cannot copy {}", source.display()))?;
        if copied != meta.len() {
            return Err(Finding::new(codes::SOURCE_CHANGED, "changed while it was copied")
                .file(source)
                .expected(format!("{} bytes", meta.len()), format!("{copied} bytes"))
                .into());
        }
        Ok(())
    }

    /// Makes the result appear at its destination, the top-level names in `last` after all others
    /// where it cannot appear at once; the final one is the pointer readers start from.
    ///
    /// Gives warnings about what could not be cleaned up. On an error the folder is kept.
    /// Errors: `PUBLISH_CONFLICT` if the destination is not what it was at [`Staging::begin`];
    /// `USAGE` if a name in `last` was not written; what the system says.
    pub fn publish(self, last: &[&str]) -> Result<Vec<Finding>> {
        rename::publish(self, last)
    }

    /// Removes the folder with all that was written. Refused (`USAGE`) once sealed.
    pub fn discard(self) -> Result<()> {
        if self.sealed() {
            return Err(sealed(&self.place.folder));
        }
        drop(self.journal);
        remove_folder(&self.place.folder, self.lock)
    }

    fn target(&self, name: &str) -> Result<PathBuf> {
        if self.sealed() {
            return Err(sealed(&self.place.folder));
        }
        // Plain parts only: a part that a system reads in another way has no place in a result.
        let plain = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0']);
        if !name.split('/').all(plain) {
            return Err(Finding::new(codes::UNSAFE_PATH, "name of a result file")
                .file(&self.place.out)
                .expected("a relative path without `..`", name)
                .into());
        }
        let (data, path) = (self.path(), self.path().join(name));
        disk::create_dirs(&data, &path).at(&path, "cannot create the folders of")?;
        Ok(path)
    }
}

/// Removes a staging folder: the journal first, as it speaks of data; the seal last, as it tells
/// that a clean-up was cut short.
pub(super) fn remove_folder(folder: &Path, lock: File) -> Result<()> {
    let gone = |name: &str| {
        let path = folder.join(name);
        disk::remove_file(&path).at(&path, "cannot remove")
    };
    gone("journal")?;
    for tree in ["data", "old"].map(|name| folder.join(name)) {
        disk::remove_tree(&tree).at(&tree, "cannot remove")?;
    }
    for name in ["plan", "plan.new", "sealed.new", "lock"] {
        gone(name)?;
    }
    // NFS keeps a removed file in the directory as long as it is open.
    drop(lock);
    gone("sealed")?;
    match disk::remove_dir(folder) {
        // Another process has taken the folder over as soon as the lock was gone.
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty && folder.join("lock").exists() => Ok(()),
        done => done.at(folder, "cannot remove"),
    }
}

fn sealed(folder: &Path) -> Error {
    Finding::new(codes::USAGE, "the result is complete and half published; it can only be published")
        .file(folder)
        .into()
}
