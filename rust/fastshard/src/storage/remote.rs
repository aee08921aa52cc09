//! Files that are on no file system of this host: on another host's disk, or in a store.
//!
//! Each has a placeholder here: a sparse file of its name and size, so that names can be listed and compared.
//! Opening a placeholder by its name opens the original: nobody reads the holes of the placeholder.

use std::fmt::Debug;
use std::fs::{File, Metadata, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::thread::ThreadId;
use std::time::{Duration, SystemTime};

use rustix::fs::FallocateFlags;

use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::memory;

/// Bytes that are copied at a time.
const CHUNK: usize = 1 << 20;

/// A file that is read by ranges.
pub trait Ranges: Debug + Send + Sync {
    /// Its size and modification time (nanoseconds since the epoch), as its host or its store states them.
    fn identity(&self) -> Option<(u64, i64)> {
        None
    }

    /// True if another host lends it, to be read once and in the order that was announced; false if it can be read again.
    fn is_lent(&self) -> bool;

    /// Fills `bytes` from `offset`.
    ///
    /// # Errors
    /// The reason why they do not arrive.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()>;

    /// Announces that ranges (first byte, one past the last) will be read, in this order; without `now`, more
    /// announcements follow.
    ///
    /// # Errors
    /// The reason why the announcement fails.
    fn will_read(&self, ranges: &[(u64, u64)], now: bool) -> Result<()>;

    /// Errors if the content that was read so far is not the one that its store states.
    ///
    /// # Errors
    /// `FS308`.
    fn is_as_stated(&self) -> Result<()> {
        Ok(())
    }

    /// Maximum bytes that [`Self::schedule`] has under way and here at a time; none for files that have no requests.
    fn schedule_room(&self) -> Option<u64> {
        None
    }

    /// Requests what certain reads (first byte, one past the last) take, each of which follows once, in any order. Waits for
    /// room while the readers are busy.
    fn schedule(&self, _reads: Vec<(u64, u64)>, _readers: &dyn Fn() -> Readers) {}

    /// Ends all schedules: no read follows any more.
    fn end_schedule(&self) {}
}

/// What those do who read what was scheduled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readers {
    /// They read.
    Busy,
    /// They have read all that was scheduled before.
    Idle,
    /// They read no more.
    Stopped,
}

/// Provides the files that the placeholders in a folder stand for.
pub trait Provider: Send + Sync {
    /// The file that `path` stands for.
    fn file(&self, path: &Path) -> Option<Arc<dyn Ranges>>;

    /// The name of `folder` for users, if it is one of the checkpoint's roots: its host, and its path there.
    fn name(&self, folder: &Path) -> Option<String>;

    /// Ends all waiting for bytes: the user has stopped the run.
    fn interrupt(&self);
}

/// A folder with placeholders, and their provider.
#[derive(Clone)]
struct Folder {
    path: PathBuf,
    provider: Weak<dyn Provider>,
    /// The thread whose run waits for the provider; the user may stop it.
    by: Option<ThreadId>,
}

static FOLDERS: RwLock<Vec<Folder>> = RwLock::new(Vec::new());

/// A registration of a folder with placeholders, which ends when it is dropped.
pub struct Registration {
    folder: PathBuf,
    _provider: Arc<dyn Provider>,
}

impl Registration {
    /// Makes the files below `folder`, a path without links, placeholders of those that `provider` provides.
    pub fn new(folder: PathBuf, provider: Arc<dyn Provider>) -> Registration {
        Self::register(folder, provider, None)
    }

    /// Does the same for a run of thread `by`: [`interrupt`] ends its waiting.
    pub fn of_run(folder: PathBuf, provider: Arc<dyn Provider>, by: ThreadId) -> Registration {
        Self::register(folder, provider, Some(by))
    }

    fn register(folder: PathBuf, provider: Arc<dyn Provider>, by: Option<ThreadId>) -> Registration {
        folders(|all| all.push(Folder { path: folder.clone(), provider: Arc::downgrade(&provider), by }));
        Registration { folder, _provider: provider }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        folders(|all| all.retain(|folder| folder.path != self.folder));
    }
}

fn folders(change: impl FnOnce(&mut Vec<Folder>)) {
    change(&mut FOLDERS.write().unwrap_or_else(PoisonError::into_inner));
}

/// The provider for `path`, if a placeholder has this path.
fn provider(path: &Path) -> Option<(PathBuf, Weak<dyn Provider>)> {
    let all = FOLDERS.read().unwrap_or_else(PoisonError::into_inner);
    if all.is_empty() {
        return None;
    }
    let real = path.canonicalize().ok()?;
    let folder = all.iter().find(|folder| real.starts_with(&folder.path))?;
    Some((real, Weak::clone(&folder.provider)))
}

/// True if `path`, a file or a folder, stands for something on another host.
pub fn is_remote(path: &Path) -> bool {
    provider(path).is_some()
}

/// The name of `folder` for users, if it is a root of a checkpoint on several hosts.
pub fn name(folder: &Path) -> Option<String> {
    let all = FOLDERS.read().unwrap_or_else(PoisonError::into_inner);
    all.iter().find_map(|standing| standing.provider.upgrade()?.name(folder))
}

/// The file that a placeholder stands for; none for other files.
///
/// # Errors
/// If nobody lends the original any more.
pub(crate) fn find(path: &Path) -> Result<Option<Arc<dyn Ranges>>> {
    let Some((real, provider)) = provider(path) else { return Ok(None) };
    let file = provider.upgrade().and_then(|provider| provider.file(&real));
    file.map(Some)
        .ok_or_else(|| Finding::new(codes::NO_SUCH_PATH, "what provides this file is gone").file(path).into())
}

/// Fills bytes `lo..hi` of the placeholder at `path` with those of the original, up to its end, for readers
/// that only know files; does nothing for other files.
///
/// # Errors
/// The reason why they do not arrive, or cannot be written.
pub fn bring(path: &Path, lo: u64, hi: u64) -> Result<()> {
    let Some(file) = find(path)? else { return Ok(()) };
    let (out, meta) = stand_in(path)?;
    let hi = meta.len().min(hi);
    let mut bytes = memory::allocate(CHUNK.min(hi.saturating_sub(lo) as usize))?;
    let mut at = lo;
    while at < hi {
        let n = (CHUNK as u64).min(hi - at) as usize;
        file.read(at, &mut bytes[..n])?;
        std::os::unix::fs::FileExt::write_all_at(&out, &bytes[..n], at).map_err(|e| not_kept(path, &e))?;
        at += n as u64;
    }
    keep_time(path, &out, &*file)
}

/// Removes the bytes that [`bring`] has written; does nothing for files that are not placeholders.
///
/// # Errors
/// The reason why the file cannot be opened.
pub fn let_go(path: &Path, lo: u64, hi: u64) -> Result<()> {
    let Some(file) = find(path)?.filter(|_| lo < hi) else { return Ok(()) };
    let (out, _) = stand_in(path)?;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // A filesystem that cannot keeps it.
    let _ = rustix::fs::fallocate(&out, flags, lo, hi - lo);
    keep_time(path, &out, &*file)
}

/// Announces that ranges (path, first byte, one past the last) of the originals will be read, in this order;
/// skips files that are not placeholders.
///
/// # Errors
/// The reason why the announcement fails.
pub fn will_read(ranges: &[(PathBuf, u64, u64)]) -> Result<()> {
    let mut ranges = ranges.iter().peekable();
    while let Some((path, lo, hi)) = ranges.next() {
        if let Some(file) = find(path)? {
            file.will_read(&[(*lo, *hi)], ranges.peek().is_none())?;
        }
    }
    Ok(())
}

/// The placeholder, for writing.
fn stand_in(path: &Path) -> Result<(File, Metadata)> {
    let opened = || {
        let meta = std::fs::metadata(path)?;
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok((std::fs::OpenOptions::new().write(true).open(path)?, meta))
    };
    opened().map_err(|e| not_kept(path, &e))
}

/// Restores the time of a placeholder, which writing has changed; others may be writing as well.
fn keep_time(path: &Path, out: &File, file: &dyn Ranges) -> Result<()> {
    let Some((_, mtime_ns)) = file.identity() else { return Ok(()) };
    out.set_modified(time_of(mtime_ns)).map_err(|e| not_kept(path, &e))
}

/// The time that is so many nanoseconds after the epoch.
pub(crate) fn time_of(mtime_ns: i64) -> SystemTime {
    let since = Duration::from_nanos(mtime_ns.unsigned_abs());
    match mtime_ns >= 0 {
        true => SystemTime::UNIX_EPOCH + since,
        false => SystemTime::UNIX_EPOCH - since,
    }
}

fn not_kept(path: &Path, error: &std::io::Error) -> Error {
    Error::io(path, "cannot keep what was fetched", error)
}

/// Ends all waiting for bytes of other hosts in runs of thread `by`, because the user has stopped it.
pub fn interrupt(by: ThreadId) {
    let all: Vec<_> = FOLDERS.read().unwrap_or_else(PoisonError::into_inner).clone();
    let stopped =
        all.iter().filter(|folder| folder.by == Some(by)).filter_map(|folder| folder.provider.upgrade());
    stopped.for_each(|provider| provider.interrupt());
}
