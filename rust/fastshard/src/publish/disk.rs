//! Every system call of this module that changes something, so that tests can fail each in turn.
//!
//! Names are looked up below directories that are held open, and links are not followed: a link that another
//! user puts into a path is seen as a link, never as its target.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    fstat, mkdirat, openat, renameat, renameat_with, statat, statx, unlinkat, Advice, AtFlags,
    FallocateFlags, FileType, Mode, OFlags, RenameFlags, Stat, StatxAttributes, StatxFlags, CWD,
};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::memory;

#[cfg(test)]
use super::fault::{gate, look};

/// The point at which tests interfere; `partial` is the effect of a call that dies halfway.
#[cfg(not(test))]
#[inline]
fn gate(_call: &'static str, _path: &Path, _partial: impl FnOnce()) -> io::Result<()> {
    Ok(())
}

/// The point at which tests let looking at something fail.
#[cfg(not(test))]
#[inline]
fn look(_path: &Path) -> io::Result<()> {
    Ok(())
}

/// Names the path in an error.
pub(crate) trait At<T> {
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

/// True for what opening a file or a link as a directory says.
fn is_no_directory(error: &io::Error) -> bool {
    let errors = [Errno::NOTDIR, Errno::LOOP];
    error.raw_os_error().is_some_and(|code| errors.iter().any(|e| e.raw_os_error() == code))
}

/// Success also where the filesystem does not know the call.
fn tolerate(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|e| if unsupported(&e) { Ok(()) } else { Err(e) })
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
}

/// Owner only: nobody else may put anything into a staging folder.
pub(crate) const PRIVATE: u32 = 0o700;
/// What the umask leaves of this.
pub(crate) const BY_UMASK: u32 = 0o777;

/// A directory that is held open.
#[derive(Debug)]
pub(crate) struct Dir {
    fd: OwnedFd,
    /// What it was opened as, for messages.
    path: PathBuf,
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Dir {
    /// Opens a directory by its path, whose links are resolved already.
    pub(crate) fn open(path: &Path) -> io::Result<Dir> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = match openat(CWD, path, flags | OFlags::RDONLY, Mode::empty()) {
            // It may be searched and written, but not listed.
            Err(Errno::ACCESS) => openat(CWD, path, flags | OFlags::PATH, Mode::empty())?,
            opened => opened?,
        };
        Ok(Dir { fd, path: path.to_path_buf() })
    }

    /// The directory `name` in this one.
    pub(crate) fn sub(&self, name: &OsStr) -> io::Result<Dir> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Dir { fd: openat(&self.fd, name, flags, Mode::empty())?, path: self.path.join(name) })
    }

    /// The same directory once more.
    pub(crate) fn again(&self) -> io::Result<Dir> {
        Ok(Dir { fd: self.fd.try_clone()?, path: self.path.clone() })
    }

    /// The path under which it was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Path of an entry, for messages.
    pub(crate) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    /// Owner, mode and the like of the directory itself.
    pub(crate) fn meta(&self) -> io::Result<Stat> {
        Ok(fstat(&self.fd)?)
    }

    /// The status of `name`; `None` if it does not exist.
    pub(crate) fn stat(&self, name: &OsStr) -> io::Result<Option<Stat>> {
        look(&self.join(name))?;
        match statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            stat => Ok(Some(stat?)),
        }
    }

    /// True for a directory in which another filesystem, or a bind mount, begins.
    pub(crate) fn is_mount(&self, name: &OsStr) -> io::Result<bool> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        if statat(&self.fd, name, flags)?.st_dev != fstat(&self.fd)?.st_dev {
            return Ok(true);
        }
        // A bind mount of the same filesystem has the same device number. Old kernels do not say, and containers may
        // not let anybody ask.
        match statx(&self.fd, name, flags, StatxFlags::empty()) {
            Err(Errno::NOSYS | Errno::PERM) => Ok(false),
            attributes => Ok(attributes?.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)),
        }
    }

    /// True for a directory that overlayfs will neither move nor exchange, because a lower layer has it; `fresh` is
    /// one of the same filesystem that was just made. False where that cannot be told.
    pub(crate) fn is_layered(&self, fresh: &Dir) -> io::Result<bool> {
        const OVERLAYFS: u32 = 0x794c_7630;
        if rustix::fs::fstatfs(&self.fd)?.f_type as u32 != OVERLAYFS {
            return Ok(false);
        }
        // One of the lower layer alone looks like any other, until the upper layer has it too.
        let meta = self.meta()?;
        let _ = self.set_mode(meta.st_mode);
        // Of both layers: it shows one link, which other directories do on few filesystems.
        Ok(self.meta()?.st_nlink == 1 && fresh.meta()?.st_nlink != 1)
    }

    /// True if something is called `name`.
    pub(crate) fn has(&self, name: impl AsRef<OsStr>) -> io::Result<bool> {
        Ok(self.stat(name.as_ref())?.is_some())
    }

    /// Names of the entries, in order.
    pub(crate) fn entries(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name != "." && name != ".." {
                names.push(name.to_os_string());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Creates one directory; an error if it exists.
    pub(crate) fn create_dir(&self, name: &OsStr, mode: u32) -> io::Result<()> {
        gate("create_dir", &self.join(name), || {})?;
        Ok(mkdirat(&self.fd, name, Mode::from_raw_mode(mode))?)
    }

    /// The directory in which the last part of `name` lies; with `make`, those on the way are created.
    pub(crate) fn folder_of<'n>(&self, name: &'n str, make: bool) -> io::Result<(Dir, &'n OsStr)> {
        let mut parts: Vec<&OsStr> = name.split('/').map(OsStr::new).collect();
        let last = parts.pop().unwrap_or_default();
        let mut at = self.again()?;
        for part in parts {
            at = match at.sub(part) {
                Err(e) if make && e.kind() == io::ErrorKind::NotFound => {
                    at.create_dir(part, BY_UMASK)?;
                    at.sub(part)?
                }
                sub => sub?,
            };
        }
        Ok((at, last))
    }

    fn file(&self, name: &OsStr, flags: OFlags, mode: u32) -> io::Result<File> {
        let safe = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let fd = openat(&self.fd, name, flags | safe, Mode::from_raw_mode(mode))?;
        if !FileType::from_raw_mode(fstat(&fd)?.st_mode).is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        Ok(File::from(fd))
    }

    /// Opens a regular file for reading.
    pub(crate) fn read_only(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        look(&self.join(name.as_ref()))?;
        self.file(name.as_ref(), OFlags::RDONLY, 0)
    }

    /// Opens for reading and writing, creates if absent (mode by umask), keeps what is there. One that has another name
    /// too is made anew, empty: what is written to it would be written to somebody's file.
    pub(crate) fn open_or_create(&self, name: &OsStr) -> io::Result<File> {
        gate("open", &self.join(name), || {})?;
        self.of_one_name(name, OFlags::RDWR)
    }

    /// Opens an existing file for reading and writing.
    ///
    /// Errors: if it has another name too.
    pub(crate) fn open_existing(&self, name: &OsStr) -> io::Result<File> {
        gate("open", &self.join(name), || {})?;
        let file = self.file(name, OFlags::RDWR, 0)?;
        match fstat(&file)?.st_nlink > 1 {
            true => {
                Err(io::Error::other("the file has another name too (a hard link), and is not written to"))
            }
            false => Ok(file),
        }
    }

    /// Opens `file`, which is there as `name`, once more: to be written around the page cache.
    pub(crate) fn open_direct(&self, name: &OsStr, file: &File) -> io::Result<File> {
        gate("open", &self.join(name), || {})?;
        let direct = self.file(name, OFlags::WRONLY | OFlags::DIRECT, 0)?;
        let (same, other) = (fstat(file)?, fstat(&direct)?);
        match (same.st_dev, same.st_ino) == (other.st_dev, other.st_ino) {
            true => Ok(direct),
            false => Err(io::Error::other("another file has taken its place")),
        }
    }

    /// The lock of a directory, of whose file nothing but its being there counts.
    pub(crate) fn open_lock(&self, name: &OsStr) -> io::Result<File> {
        gate("open", &self.join(name), || {})?;
        self.file(name, OFlags::RDWR | OFlags::CREATE, 0o666)
    }

    fn of_one_name(&self, name: &OsStr, flags: OFlags) -> io::Result<File> {
        let file = self.file(name, flags | OFlags::CREATE, 0o666)?;
        if fstat(&file)?.st_nlink <= 1 {
            return Ok(file);
        }
        drop(file);
        unlinkat(&self.fd, name, AtFlags::empty())?;
        self.file(name, flags | OFlags::CREATE | OFlags::EXCL, 0o666)
    }

    /// True for a file that has other names too.
    pub(crate) fn is_linked(&self, name: &OsStr) -> io::Result<bool> {
        Ok(self.stat(name)?.is_some_and(|s| FileType::from_raw_mode(s.st_mode).is_file() && s.st_nlink > 1))
    }

    /// Creates a file that does not exist yet, mode by umask: only one of several concurrent attempts
    /// succeeds.
    pub(crate) fn create_new(&self, name: &OsStr) -> io::Result<File> {
        gate("create", &self.join(name), || {})?;
        self.file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, 0o666)
    }

    /// Creates an empty file for writing, mode by umask, in place of one that may be there.
    pub(crate) fn create(&self, name: &OsStr) -> io::Result<File> {
        gate("create", &self.join(name), || {})?;
        let file = self.of_one_name(name, OFlags::WRONLY)?;
        // Once it is known to be nobody else's.
        file.set_len(0)?;
        Ok(file)
    }

    /// Renames `from` to `to` in another directory; an error (`AlreadyExists`) if that exists.
    pub(crate) fn rename_new(&self, from: &OsStr, other: &Dir, to: &OsStr) -> io::Result<()> {
        gate("rename_new", &other.join(to), || {})?;
        match self.noreplace(from, other, to) {
            // NFS and others: a rename never replaces a directory that is not empty, so only a file
            // that appears between these two calls could be lost.
            Err(e) if unsupported(&e) => match other.has(to)? {
                true => Err(Errno::EXIST.into()),
                false => Ok(renameat(&self.fd, from, &other.fd, to)?),
            },
            done => done,
        }
    }

    fn noreplace(&self, from: &OsStr, other: &Dir, to: &OsStr) -> io::Result<()> {
        #[cfg(test)]
        super::fault::lacking("noreplace")?;
        #[cfg(test)]
        super::fault::other_layer(&self.join(from))?;
        Ok(renameat_with(&self.fd, from, &other.fd, to, RenameFlags::NOREPLACE)?)
    }

    /// Renames a directory over an empty one, or a file of the staging folder over another.
    pub(crate) fn rename_over(&self, from: &OsStr, other: &Dir, to: &OsStr) -> io::Result<()> {
        gate("rename_over", &other.join(to), || {})?;
        Ok(renameat(&self.fd, from, &other.fd, to)?)
    }

    /// Exchanges two directories in one step; false where the filesystem cannot.
    pub(crate) fn exchange(&self, name: &OsStr, other: &Dir, with: &OsStr) -> io::Result<bool> {
        gate("exchange", &other.join(with), || {})?;
        #[cfg(test)]
        if super::fault::lacking("exchange").is_err() {
            return Ok(false);
        }
        #[cfg(test)]
        super::fault::other_layer(&other.join(with))?;
        let done = renameat_with(&self.fd, name, &other.fd, with, RenameFlags::EXCHANGE);
        match done.map_err(io::Error::from) {
            Err(e) if unsupported(&e) => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// Sets the permission bits of the directory itself.
    pub(crate) fn set_mode(&self, mode: u32) -> io::Result<()> {
        gate("set_mode", &self.path, || {})?;
        Ok(rustix::fs::fchmod(&self.fd, Mode::from_raw_mode(mode & 0o7777))?)
    }

    /// Removes a file, if it exists.
    pub(crate) fn remove_file(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        let name = name.as_ref();
        gate("remove_file", &self.join(name), || {})?;
        absent_is_fine(unlinkat(&self.fd, name, AtFlags::empty()).map_err(io::Error::from))
    }

    /// Removes an empty directory, if it exists.
    pub(crate) fn remove_dir(&self, name: &OsStr) -> io::Result<()> {
        gate("remove_dir", &self.join(name), || {})?;
        absent_is_fine(unlinkat(&self.fd, name, AtFlags::REMOVEDIR).map_err(io::Error::from))
    }

    /// Removes a directory of this program and its contents, if it exists.
    pub(crate) fn remove_tree(&self, name: &OsStr) -> io::Result<()> {
        gate("remove_tree", &self.join(name), || {
            let sub = self.sub(name).ok();
            let first = sub.as_ref().and_then(|s| s.entries().ok()?.into_iter().next());
            if let (Some(sub), Some(first)) = (&sub, &first) {
                let _ = unlinkat(&sub.fd, first, AtFlags::empty());
            }
        })?;
        absent_is_fine(self.remove_all(name))
    }

    fn remove_all(&self, name: &OsStr) -> io::Result<()> {
        match self.sub(name) {
            // What is mounted there lies elsewhere.
            Ok(_) if self.is_mount(name)? => Err(Errno::BUSY.into()),
            Ok(sub) => {
                for entry in sub.entries()? {
                    absent_is_fine(sub.remove_all(&entry))?;
                }
                Ok(unlinkat(&self.fd, name, AtFlags::REMOVEDIR)?)
            }
            Err(e) if is_no_directory(&e) => Ok(unlinkat(&self.fd, name, AtFlags::empty())?),
            Err(e) => Err(e),
        }
    }

    /// Bytes of storage of the directory's contents, as far as they are known, without mounted filesystems.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let of = |name: &OsString| match self.sub(name) {
            Ok(_) if self.is_mount(name).unwrap_or(true) => 0,
            Ok(sub) => sub.stored_bytes(),
            // POSIX counts blocks of 512 bytes, whatever the filesystem's own are.
            Err(_) => self.stat(name).ok().flatten().map_or(0, |stat| stat.st_blocks as u64 * 512),
        };
        self.entries().unwrap_or_default().iter().map(of).sum()
    }

    /// Syncs the directory's entries to disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        gate("sync", &self.path, || {})?;
        match rustix::fs::fsync(&self.fd) {
            // Opened without the right to list it.
            Err(Errno::BADF) => Ok(()),
            done => tolerate(done.map_err(io::Error::from)),
        }
    }

    /// Syncs a file in it to disk, whoever wrote it.
    pub(crate) fn sync_file(&self, name: &OsStr) -> io::Result<()> {
        gate("sync", &self.join(name), || {})?;
        tolerate(self.read_only(name)?.sync_all())
    }

    /// Writes a file that exists completely or not at all, even after a crash.
    pub(crate) fn write_whole(&self, name: &str, bytes: &[u8], durable: bool) -> Result<()> {
        self.replace(name, bytes, durable)?;
        match durable {
            true => self.sync().at(&self.path, "cannot bring to disk"),
            false => Ok(()),
        }
    }

    /// The same, whose name is not brought to disk yet.
    pub(crate) fn replace(&self, name: &str, bytes: &[u8], durable: bool) -> Result<()> {
        let (partial, path) = (format!("{name}.new"), self.join(name));
        let file = self.create(OsStr::new(&partial)).at(&self.join(&partial), "cannot create")?;
        write_at(&file, &self.join(&partial), 0, bytes).at(&self.join(&partial), "cannot write")?;
        if durable {
            sync_data(&file, &self.join(&partial)).at(&self.join(&partial), "cannot bring to disk")?;
        }
        self.rename_over(OsStr::new(&partial), self, OsStr::new(name)).at(&path, "cannot rename into place")
    }

    /// Content of a small file of this program, at most `limit` bytes; `None` if it does not exist.
    pub(crate) fn read_small(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
        use io::Read;
        let file = match self.read_only(name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        if file.take(limit + 1).read_to_end(&mut bytes)? as u64 > limit {
            return Err(io::Error::other(format!("more than {limit} bytes")));
        }
        Ok(Some(bytes))
    }
}

/// Writes all of `bytes` at `offset`.
pub(crate) fn write_at(file: &File, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
    gate("write", path, || {
        let _ = file.write_all_at(&bytes[..bytes.len() / 2], offset);
    })?;
    file.write_all_at(bytes, offset)
}

/// Fills `bytes` from `offset`.
pub(crate) fn read_at(file: &File, path: &Path, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    gate("read", path, || {})?;
    file.read_exact_at(bytes, offset)
}

/// Bytes copied at a time.
const COPIED: usize = 1 << 20;

/// Makes `to`, which is empty, a copy of `from`: of its blocks where the filesystem can share them, else of its bytes,
/// holes left out.
pub(crate) fn copy(from: &File, to: &File, path: &Path, size: u64) -> io::Result<()> {
    gate("copy", path, || {})?;
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    to.set_len(size)?;
    let mut bytes = memory::allocate(COPIED)?;
    let mut at = 0;
    while at < size {
        let n = (COPIED as u64).min(size - at) as usize;
        from.read_exact_at(&mut bytes[..n], at)?;
        if bytes[..n].iter().any(|b| *b != 0) {
            to.write_all_at(&bytes[..n], at)?;
        }
        at += n as u64;
    }
    Ok(())
}

/// Sets the length in bytes.
pub(crate) fn set_len(file: &File, path: &Path, size: u64) -> io::Result<()> {
    gate("set_len", path, || {})?;
    file.set_len(size)
}

/// Reserves `size` bytes on disk where the filesystem can; never changes content. In memory it looks whether they are free:
/// to reserve them there takes one thread as long as several take to write.
pub(crate) fn reserve(file: &File, path: &Path, size: u64) -> io::Result<()> {
    gate("reserve", path, || {})?;
    if size == 0 {
        return Ok(());
    }
    if is_in_memory(file) {
        let fs = rustix::fs::fstatvfs(file)?;
        let missing = size.saturating_sub(fstat(file)?.st_blocks as u64 * 512);
        // Without a limit it has no blocks.
        return match fs.f_blocks > 0 && missing > fs.f_bavail.saturating_mul(fs.f_frsize) {
            true => Err(Errno::NOSPC.into()),
            false => Ok(()),
        };
    }
    let reserved =
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size));
    tolerate(reserved.map_err(io::Error::from))
}

/// Asks for the range's dirty pages to be written out now. Only advice, so errors are ignored.
pub(crate) fn start_writeback(file: &File, offset: u64, len: u64) {
    // DONTNEED starts asynchronous writeback of the dirty pages of the range and drops the clean
    // ones; sync_file_range has no safe binding.
    if let Some(len) = std::num::NonZeroU64::new(len) {
        let _ = rustix::fs::fadvise(file, offset, Some(len), Advice::DontNeed);
    }
}

/// Syncs content and size to disk.
pub(crate) fn sync_data(file: &File, path: &Path) -> io::Result<()> {
    gate("sync", path, || {})?;
    tolerate(file.sync_data())
}

/// Syncs content, size and times to disk.
pub(crate) fn sync_all(file: &File, path: &Path) -> io::Result<()> {
    gate("sync", path, || {})?;
    tolerate(file.sync_all())
}

/// True on a file system that keeps its files in memory.
pub(crate) fn is_in_memory(file: impl AsFd) -> bool {
    const TMPFS: u32 = 0x0102_1994;
    rustix::fs::fstatfs(file).is_ok_and(|s| s.f_type as u32 == TMPFS)
}

/// True if errors of writing may come as late as the sync: filesystems behind a network.
pub(crate) fn is_network(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|s| crate::storage::is_network_filesystem(s.f_type as u32))
}
