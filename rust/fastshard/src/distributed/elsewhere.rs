//! Files that lie on another host's disk and are read by way of it.
//!
//! For each there is an empty file of its name and size here, so that names can be listed and compared. Whoever opens
//! one of these by its name gets what it stands for: what it holds itself, holes, is read by nobody.

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

/// A file on another host.
pub trait Elsewhere: Debug + Send + Sync {
    /// Its size and modification time (nanoseconds since the epoch) on its host.
    fn identity(&self) -> Option<(u64, i64)> {
        None
    }

    /// Fills `bytes` from `offset`.
    ///
    /// # Errors
    /// Whatever keeps them from coming.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()>;

    /// Says that ranges (first byte, one past the last) will be read, in this order; without `now` it is known that more will
    /// be said.
    ///
    /// # Errors
    /// What keeps that from being said.
    fn will_read(&self, ranges: &[(u64, u64)], now: bool) -> Result<()>;
}

/// Gives the files of folders that stand for others.
pub trait Lender: Send + Sync {
    /// The file that `path` stands for.
    fn file(&self, path: &Path) -> Option<Arc<dyn Elsewhere>>;

    /// What people call `folder`, if it is one of the checkpoint's roots: its host, and its path there.
    fn name(&self, folder: &Path) -> Option<String>;

    /// Ends all waiting for bytes: the user has stopped the run.
    fn interrupt(&self);
}

/// A folder whose files stand for others, whose they are, and the thread that the user may stop.
#[derive(Clone)]
struct Folder {
    path: PathBuf,
    lender: Weak<dyn Lender>,
    by: ThreadId,
}

static FOLDERS: RwLock<Vec<Folder>> = RwLock::new(Vec::new());

/// A folder whose files stand for others, as long as this lives.
pub struct Standing {
    folder: PathBuf,
    _lender: Arc<dyn Lender>,
}

impl Standing {
    /// Has the files below `folder`, a path without links, stand for those that `lender` gives, in a run of thread `by`.
    pub fn register(folder: PathBuf, lender: Arc<dyn Lender>, by: ThreadId) -> Standing {
        folders(|all| all.push(Folder { path: folder.clone(), lender: Arc::downgrade(&lender), by }));
        Standing { folder, _lender: lender }
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        folders(|all| all.retain(|folder| folder.path != self.folder));
    }
}

fn folders(change: impl FnOnce(&mut Vec<Folder>)) {
    change(&mut FOLDERS.write().unwrap_or_else(PoisonError::into_inner));
}

/// The lender of what lies at `path`, if that stands for something else.
fn lender(path: &Path) -> Option<(PathBuf, Weak<dyn Lender>)> {
    let all = FOLDERS.read().unwrap_or_else(PoisonError::into_inner);
    if all.is_empty() {
        return None;
    }
    let real = path.canonicalize().ok()?;
    let folder = all.iter().find(|folder| real.starts_with(&folder.path))?;
    Some((real, Weak::clone(&folder.lender)))
}

/// True if `path`, a file or a folder, stands for something on another host.
pub fn is_elsewhere(path: &Path) -> bool {
    lender(path).is_some()
}

/// What people call `folder`, if it is a root of a checkpoint that lies on several hosts.
pub fn name(folder: &Path) -> Option<String> {
    let all = FOLDERS.read().unwrap_or_else(PoisonError::into_inner);
    all.iter().find_map(|standing| standing.lender.upgrade()?.name(folder))
}

/// What a file stands for, if it does.
///
/// # Errors
/// If it stands for something that nobody gives any more.
pub(crate) fn find(path: &Path) -> Result<Option<Arc<dyn Elsewhere>>> {
    let Some((real, lender)) = lender(path) else { return Ok(None) };
    let file = lender.upgrade().and_then(|lender| lender.file(&real));
    file.map(Some)
        .ok_or_else(|| Finding::new(codes::NO_SUCH_PATH, "no other host has this file").file(path).into())
}

/// Fills bytes `lo..hi` of the file at `path` with those of what it stands for, as far as it goes, for readers that know
/// files alone; nothing if it stands for itself.
///
/// # Errors
/// What keeps them from coming, or from being written.
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

/// Lets go of what [`bring`] has put there; nothing if the file stands for itself.
///
/// # Errors
/// What keeps the file from being opened.
pub fn let_go(path: &Path, lo: u64, hi: u64) -> Result<()> {
    let Some(file) = find(path)?.filter(|_| lo < hi) else { return Ok(()) };
    let (out, _) = stand_in(path)?;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // A filesystem that cannot keeps it.
    let _ = rustix::fs::fallocate(&out, flags, lo, hi - lo);
    keep_time(path, &out, &*file)
}

/// Says that ranges (path, first byte, one past the last) of what files stand for will be read, in this order; nothing of those that
/// stand for themselves.
///
/// # Errors
/// What keeps that from being said.
pub fn will_read(ranges: &[(PathBuf, u64, u64)]) -> Result<()> {
    let mut ranges = ranges.iter().peekable();
    while let Some((path, lo, hi)) = ranges.next() {
        if let Some(file) = find(path)? {
            file.will_read(&[(*lo, *hi)], ranges.peek().is_none())?;
        }
    }
    Ok(())
}

/// The file that stands for another, for writing.
fn stand_in(path: &Path) -> Result<(File, Metadata)> {
    let opened = || {
        let meta = std::fs::metadata(path)?;
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok((std::fs::OpenOptions::new().write(true).open(path)?, meta))
    };
    opened().map_err(|e| not_kept(path, &e))
}

/// Gives what stands for a file its time, which writing has changed; others may be writing as well.
fn keep_time(path: &Path, out: &File, file: &dyn Elsewhere) -> Result<()> {
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
    Error::io(path, "cannot keep what another host has sent", error)
}

/// Ends all waiting for bytes of other hosts in runs of thread `by`: the user has stopped what it does.
pub fn interrupt(by: ThreadId) {
    let all: Vec<_> = FOLDERS.read().unwrap_or_else(PoisonError::into_inner).clone();
    let stopped = all.iter().filter(|folder| folder.by == by).filter_map(|folder| folder.lender.upgrade());
    stopped.for_each(|lender| lender.interrupt());
}
