//! Files of this process that no directory names: what was unpacked, put aside, or made in memory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::OnceLock;

use super::{Bytes, SourceFile, Stamp};
use crate::codes;
use crate::error::{Error, Finding, Result};

impl SourceFile {
    /// A file without a name in `dir`, filled by `fill` and read back like `origin`, whose name it
    /// bears in messages. It is gone when dropped.
    pub(crate) fn unpacked(
        dir: &Path,
        origin: &Path,
        fill: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>,
    ) -> Result<Self> {
        use std::io::Write;
        let mut file = unnamed(dir).map_err(|e| Error::io(dir, "cannot make a temporary file", &e))?;
        fill(&mut |bytes| {
            file.write_all(bytes).map_err(|e| Error::io(dir, "cannot write a temporary file", &e))
        })?;
        Self::own(file, origin)
    }

    /// A file of this process, called `path` in messages.
    fn own(file: File, path: &Path) -> Result<Self> {
        let meta = file.metadata().map_err(|e| Error::io(path, "cannot stat", &e))?;
        Ok(SourceFile {
            path: path.to_path_buf(),
            bytes: Bytes::File(file),
            stamp: Stamp::of(&meta),
            network: false,
            own: true,
            map: OnceLock::new(),
            faulted: AtomicBool::new(false),
            blocks: None,
            room: None,
        })
    }

    /// A file without a name in `dir`, of `size` bytes of holes, that this process writes and reads.
    pub(crate) fn scratch(dir: &Path, size: u64) -> Result<Self> {
        let file = unnamed(dir).map_err(|e| Error::io(dir, "cannot make a temporary file", &e))?;
        file.set_len(size).map_err(|e| Error::io(dir, "cannot make a temporary file", &e))?;
        Self::own(file, dir)
    }

    /// A file in memory that stands for what is made of `origin`, whose name it bears in messages. `fill` writes: offset,
    /// bytes, and a range of what it wrote before that may become a hole.
    pub(crate) fn in_memory(
        origin: &Path,
        fill: impl FnOnce(&mut dyn FnMut(u64, &[u8], Option<(u64, u64)>) -> Result<()>) -> Result<()>,
    ) -> Result<Self> {
        use rustix::fs::{fallocate, memfd_create, FallocateFlags, MemfdFlags};
        let cannot = |e: std::io::Error| Error::io(origin, "cannot make a file in memory", &e);
        let file = File::from(memfd_create("fastshard", MemfdFlags::CLOEXEC).map_err(|e| cannot(e.into()))?);
        let mut dropped = 0;
        fill(&mut |at, bytes, spare| {
            file.write_all_at(bytes, at).map_err(cannot)?;
            if let Some((lo, hi)) = spare.map(|(lo, hi)| (lo.max(dropped), hi)).filter(|(lo, hi)| lo < hi) {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&file, hole, lo, hi - lo).map_err(|e| cannot(e.into()))?;
                dropped = hi;
            }
            Ok(())
        })?;
        Self::own(file, origin)
    }

    /// Writes into a file of [`SourceFile::scratch`]; pages of zeros stay holes.
    pub(crate) fn keep_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        for (at, run) in crate::kernel::filled(bytes) {
            let file = self.file().ok_or_else(|| Finding::new(codes::INTERNAL, "no file of this process"))?;
            file.write_all_at(run, offset + at)
                .map_err(|e| Error::io(&self.path, "cannot write a temporary file", &e))?;
        }
        Ok(())
    }

    /// Gives back the space of a range of a file of [`SourceFile::scratch`]; it reads as zeros then.
    pub(crate) fn drop_range(&self, offset: u64, len: u64) {
        use rustix::fs::{fallocate, FallocateFlags};
        // Where the filesystem cannot, the space is free at the end of the run.
        let Some(file) = self.file() else { return };
        let _ = fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len);
    }
}

/// A read-write file that no directory names.
fn unnamed(dir: &Path) -> std::io::Result<File> {
    use rustix::fs::{openat, Mode, OFlags, CWD};
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    match openat(CWD, dir, flags | OFlags::TMPFILE, Mode::RUSR | Mode::WUSR) {
        Ok(fd) => Ok(File::from(fd)),
        // Not every filesystem knows O_TMPFILE: make a name and take it away at once.
        Err(_) => {
            let path = dir.join(format!(".fastshard-unpacked-{}-{:p}", std::process::id(), &flags));
            let fd = openat(CWD, &path, flags | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR)?;
            std::fs::remove_file(&path)?;
            Ok(File::from(fd))
        }
    }
}
