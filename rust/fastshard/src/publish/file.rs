//! One data file of the result while it is written.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::OnceLock;

use super::direct::{Direct, Io};
use super::disk::{self, At, Dir};
use crate::codes;
use crate::error::{Error, Finding, Result};

/// Whether a data file's bytes are reserved on disk before they are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Reserved where the filesystem can, so that a full disk shows before hours of writing.
    Reserved,
    /// Only the length is set; unwritten ranges take no space.
    Sparse,
}

impl Space {
    /// How a file is written whose caller chooses `io`: of one with holes the system would look for space at each direct write.
    pub(crate) fn choose_io(self, io: Io) -> Io {
        match (self, io) {
            (Space::Sparse, Io::Auto) => Io::Buffered,
            _ => io,
        }
    }
}

/// A data file of fixed size, written in any order by any thread.
#[derive(Debug)]
pub struct OutFile {
    file: File,
    /// The same file, where it is written around the page cache.
    direct: Option<Direct>,
    path: PathBuf,
    size: u64,
    kept: bool,
    /// Whether data is to reach the disk: asked for, or a filesystem that reports lost writes no earlier.
    synced: bool,
    /// Whether it holds what was not brought there since.
    dirty: AtomicBool,
    /// What kept it from being brought there: the system says so once, and takes what was lost for written from then on.
    failed: OnceLock<Error>,
}

impl OutFile {
    /// Opens or creates `name` with exactly `size` bytes; content that is there stays.
    pub(crate) fn open(
        folder: &Dir,
        name: &OsStr,
        size: u64,
        space: Space,
        durable: bool,
        io: Io,
    ) -> Result<Self> {
        let path = folder.join(name);
        let file = folder.open_or_create(name).at(&path, "cannot create")?;
        let meta = file.metadata().at(&path, "cannot stat")?;
        let kept = meta.len() == size && size > 0;
        if space == Space::Reserved {
            let reserved = disk::reserve(&file, &path, size).at(&path, "cannot reserve space for the file");
            reserved.map_err(|error| error.needing(size))?;
        }
        if meta.len() != size {
            disk::set_len(&file, &path, size).at(&path, &format!("cannot set the size to {size} bytes"))?;
        }
        let synced = durable || disk::is_network(&file);
        let direct = open_direct(folder, name, &file, durable, space.choose_io(io))?;
        let (dirty, failed) = (AtomicBool::new(true), OnceLock::new());
        Ok(OutFile { file, direct, path, size, kept, synced, dirty, failed })
    }

    /// Opens `name`, which is there with exactly `size` bytes.
    pub(crate) fn existing(folder: &Dir, name: &OsStr, size: u64, io: Io) -> Result<Self> {
        let path = folder.join(name);
        let file = folder.open_existing(name).at(&path, "cannot open")?;
        let direct = open_direct(folder, name, &file, true, io)?;
        Ok(OutFile { direct, ..Self::of_size(file, path, size)? })
    }

    /// The same, for reading only.
    pub(crate) fn for_reading(folder: &Dir, name: &OsStr, size: u64) -> Result<Self> {
        let path = folder.join(name);
        let file = folder.read_only(name).at(&path, "cannot open")?;
        Self::of_size(file, path, size)
    }

    fn of_size(file: File, path: PathBuf, size: u64) -> Result<Self> {
        let len = file.metadata().at(&path, "cannot stat")?.len();
        if len == size {
            let (dirty, failed) = (AtomicBool::new(true), OnceLock::new());
            return Ok(OutFile { file, direct: None, path, size, kept: true, synced: true, dirty, failed });
        }
        Err(Finding::new(codes::WRITTEN_DIFFERS, "a file of the result has another size than it was made with")
            .file(&path)
            .expected(format!("{size} bytes"), len)
            .help("check what else writes to the staging directory, and whether the destination is the storage that you expect")
            .into())
    }

    /// Path in the staging folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// True if the file was already there with this size, so that what the journal says of its
    /// content still holds; false if it was made now and holds zeros.
    pub fn kept(&self) -> bool {
        self.kept
    }

    /// Writes all of `bytes` at `offset` (bytes from the start); an error if they reach past the end.
    pub fn write_all_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(Finding::new(codes::IO, "write past the end of the file")
                .file(&self.path)
                .expected(format!("at most {} bytes", self.size), format!("{} at {offset}", bytes.len()))
                .into());
        }
        let written = match &self.direct {
            Some(direct) => direct.write_at(&self.file, &self.path, offset, bytes),
            None => disk::write_at(&self.file, &self.path, offset, bytes),
        };
        let written = written.at(&self.path, "cannot write");
        // Not before: a sync that came between would not cover these bytes.
        self.dirty.store(true, Ordering::Release);
        written
    }

    /// Reads back what was written at `offset`.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        disk::read_at(&self.file, &self.path, offset, bytes).at(&self.path, "cannot read back")
    }

    /// The same file, for an upload that outlives this.
    ///
    /// # Errors
    /// Those of the system.
    pub fn for_upload(&self) -> Result<File> {
        self.file.try_clone().at(&self.path, "cannot open once more")
    }

    /// True if it is written around the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Asks the system to start writing out what the page cache has, without waiting for it. What is on disk leaves the page
    /// cache. For every so many MiB: each call costs.
    pub fn start_writeback(&self) {
        if !self.is_direct() {
            disk::start_writeback(&self.file, 0, self.size);
        }
    }

    /// The same as [`OutFile::sync`], with the file's times; after all that is written to it.
    pub fn sync_with_times(&self) -> Result<()> {
        if let Some(error) = self.failed.get() {
            return Err(error.clone());
        }
        if !self.synced {
            return Ok(());
        }
        self.dirty.store(false, Ordering::Release);
        disk::sync_all(&self.file, &self.path)
            .at(&self.path, "cannot bring to disk")
            .inspect_err(|error| drop(self.failed.set(error.clone())))
    }

    /// Waits until all bytes written are on disk; nothing with `fsync` off, but on network filesystems,
    /// where a write that failed is told by this or by nothing. Not by several threads at once.
    pub fn sync(&self) -> Result<()> {
        if let Some(error) = self.failed.get() {
            return Err(error.clone());
        }
        if !self.synced || !self.dirty.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        disk::sync_data(&self.file, &self.path)
            .at(&self.path, "cannot bring to disk")
            .inspect_err(|error| drop(self.failed.set(error.clone())))
    }
}

/// Opens `file`, which is `name`, once more to be written around the page cache, if it is to be.
fn open_direct(folder: &Dir, name: &OsStr, file: &File, durable: bool, io: Io) -> Result<Option<Direct>> {
    if !io.is_direct(file, durable) {
        return Ok(None);
    }
    match folder.open_direct(name, file) {
        Ok(direct) => Ok(Some(Direct::new(direct))),
        Err(error) if io == Io::Direct => {
            Err(Finding::new(codes::USAGE, "the file system does not write around its page cache")
                .file(folder.join(name))
                .expected("a file system with O_DIRECT", error)
                .help("let the file system decide how files are written")
                .run("--io auto")
                .into())
        }
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fault::{self, Fault};
    use super::*;

    #[test]
    fn a_file_is_synced_once_for_what_was_written_and_never_after_that_failed() {
        let folder = tempfile::tempdir().unwrap();
        let dir = Dir::open(folder.path()).unwrap();
        let file = OutFile::open(&dir, OsStr::new("data"), 8, Space::Sparse, true, Io::Auto).unwrap();
        let count_syncs = || fault::disarm().iter().filter(|(call, _)| *call == "sync").count();
        count_syncs();
        file.sync().unwrap();
        file.sync().unwrap();
        assert_eq!(count_syncs(), 1, "its size");
        file.write_all_at(0, b"1234").unwrap();
        fault::arm(0, Fault::Once(libc::EIO));
        file.sync().unwrap_err();
        file.write_all_at(4, b"5678").unwrap();
        file.sync().unwrap_err();
        assert_eq!(count_syncs(), 1, "the system would say that all is well");
    }
}
