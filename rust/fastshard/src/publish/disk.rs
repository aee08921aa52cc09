//! Every system call of this module that changes something, so that tests can fail each in turn.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{Advice, FallocateFlags, RenameFlags, CWD};
use rustix::io::Errno;

use crate::error::{Error, Result};

#[cfg(test)]
use super::fault::gate;

/// The point at which tests interfere; `partial` is what a call does that dies half way.
#[cfg(not(test))]
#[inline]
fn gate(_call: &'static str, _path: &Path, _partial: impl FnOnce()) -> io::Result<()> {
    Ok(())
}

/// Names the path in an error.
pub(super) trait At<T> {
    /// Turns a system error into one that says what was done to which path.
    fn at(self, path: &Path, doing: &str) -> Result<T>;
}

impl<T, E: Into<io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, path: &Path, doing: &str) -> Result<T> {
        self.map_err(|e| Error::io(path, doing, &e.into()))
    }
}

/// True for the errors by which a filesystem says that it does not know a call.
fn unsupported(error: &io::Error) -> bool {
    let unknown = [Errno::INVAL, Errno::NOSYS, Errno::NOTSUP, Errno::OPNOTSUPP];
    error.raw_os_error().is_some_and(|code| unknown.iter().any(|e| e.raw_os_error() == code))
}

/// Success also where the filesystem does not know the call.
fn tolerate(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|e| if unsupported(&e) { Ok(()) } else { Err(e) })
}

/// Creates one directory, mode by umask; an error if it exists.
pub(super) fn create_dir(path: &Path) -> io::Result<()> {
    gate("create_dir", path, || {})?;
    fs::create_dir(path)
}

/// Creates the directories of `path` below `root` that are not there yet.
pub(super) fn create_dirs(root: &Path, path: &Path) -> io::Result<()> {
    let below = path.strip_prefix(root).map_err(io::Error::other)?;
    let mut at = root.to_path_buf();
    for part in below.parent().unwrap_or(below).components() {
        at.push(part);
        match create_dir(&at) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

/// Opens for reading and writing, creates if absent (mode by umask), keeps what is there.
pub(super) fn open(path: &Path) -> io::Result<File> {
    gate("open", path, || {})?;
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

/// Creates an empty file for writing, mode by umask, in place of one that may be there.
pub(super) fn create(path: &Path) -> io::Result<File> {
    gate("create", path, || {})?;
    File::create(path)
}

/// Writes all of `bytes` at `offset`.
pub(super) fn write_at(file: &File, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
    gate("write", path, || {
        let _ = file.write_all_at(&bytes[..bytes.len() / 2], offset);
    })?;
    file.write_all_at(bytes, offset)
}

/// Fills `bytes` from `offset`.
pub(super) fn read_at(file: &File, path: &Path, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    gate("read", path, || {})?;
    file.read_exact_at(bytes, offset)
}

/// Streams `source` to the end of `file`; the number of bytes copied.
pub(super) fn copy(source: &File, file: &File, path: &Path) -> io::Result<u64> {
    gate("copy", path, || {})?;
    let (mut source, mut file) = (source, file);
    io::copy(&mut source, &mut file)
}

/// Sets the length in bytes.
pub(super) fn set_len(file: &File, path: &Path, size: u64) -> io::Result<()> {
    gate("set_len", path, || {})?;
    file.set_len(size)
}

/// Reserves `size` bytes on disk where the filesystem can; never changes content.
pub(super) fn reserve(file: &File, path: &Path, size: u64) -> io::Result<()> {
    gate("reserve", path, || {})?;
    if size == 0 {
        return Ok(());
    }
    let reserved =
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size));
    tolerate(reserved.map_err(io::Error::from))
}

/// Asks for the range's dirty pages to be written out now. Only advice, so errors are ignored.
pub(super) fn start_writeback(file: &File, offset: u64, len: u64) {
    // DONTNEED starts asynchronous writeback of the dirty pages of the range and drops the clean
    // ones; sync_file_range has no safe binding.
    if let Some(len) = std::num::NonZeroU64::new(len) {
        let _ = rustix::fs::fadvise(file, offset, Some(len), Advice::DontNeed);
    }
}

/// Brings content and size to disk.
pub(super) fn sync_data(file: &File, path: &Path) -> io::Result<()> {
    gate("sync", path, || {})?;
    tolerate(file.sync_data())
}

/// Brings a file or a directory's entries to disk.
pub(super) fn sync(path: &Path) -> io::Result<()> {
    gate("sync", path, || {})?;
    tolerate(File::open(path)?.sync_all())
}

/// Renames; an error (`AlreadyExists`) if `to` exists.
pub(super) fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    gate("rename_new", to, || {})?;
    match noreplace(from, to) {
        // NFS and others: a rename never replaces a directory that is not empty, so only a file
        // that appears between these two calls could be lost.
        Err(e) if unsupported(&e) => match fs::symlink_metadata(to) {
            Ok(_) => Err(Errno::EXIST.into()),
            Err(_) => fs::rename(from, to),
        },
        done => done,
    }
}

fn noreplace(from: &Path, to: &Path) -> io::Result<()> {
    #[cfg(test)]
    super::fault::lacking("noreplace")?;
    Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

/// Renames a directory over an empty one, or a file of the staging folder over another.
pub(super) fn rename_over(from: &Path, to: &Path) -> io::Result<()> {
    gate("rename_over", to, || {})?;
    fs::rename(from, to)
}

/// Exchanges two directories in one step; false where the filesystem cannot.
pub(super) fn exchange(a: &Path, b: &Path) -> io::Result<bool> {
    gate("exchange", b, || {})?;
    #[cfg(test)]
    if super::fault::lacking("exchange").is_err() {
        return Ok(false);
    }
    match rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).map_err(io::Error::from) {
        Err(e) if unsupported(&e) => Ok(false),
        done => done.map(|()| true),
    }
}

/// Sets the permission bits.
pub(super) fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    gate("set_mode", path, || {})?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777))
}

/// Removes a file; fine if it is not there.
pub(super) fn remove_file(path: &Path) -> io::Result<()> {
    gate("remove_file", path, || {})?;
    absent_is_fine(fs::remove_file(path))
}

/// Removes an empty directory; fine if it is not there.
pub(super) fn remove_dir(path: &Path) -> io::Result<()> {
    gate("remove_dir", path, || {})?;
    absent_is_fine(fs::remove_dir(path))
}

/// Removes a directory and all beneath it, following no link; fine if it is not there.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    gate("remove_tree", path, || {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        for entry in entries.take(1) {
            let _ = fs::remove_file(entry.path());
        }
    })?;
    absent_is_fine(fs::remove_dir_all(path))
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
}

/// Writes a file that is there whole or not at all, even after a crash.
pub(super) fn write_whole(path: &Path, bytes: &[u8], durable: bool) -> Result<()> {
    let partial = path.with_extension("new");
    let file = create(&partial).at(&partial, "cannot create")?;
    write_at(&file, &partial, 0, bytes).at(&partial, "cannot write")?;
    if durable {
        sync_data(&file, &partial).at(&partial, "cannot bring to disk")?;
    }
    rename_over(&partial, path).at(path, "cannot rename into place")?;
    match path.parent() {
        Some(folder) if durable => sync(folder).at(folder, "cannot bring to disk"),
        _ => Ok(()),
    }
}
