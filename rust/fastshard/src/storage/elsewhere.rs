//! Files that lie on another host's disk and are read by way of it.
//!
//! For each there is an empty file of its name and size here, so that names can be listed and compared. Whoever opens
//! one of these by its name gets what it stands for: what it holds itself, holes, is read by nobody.

use std::fmt::Debug;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use crate::codes;
use crate::error::{Error, Finding, Result};

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

    /// Says that ranges (first byte, one past the last) will be read, in this order.
    ///
    /// # Errors
    /// What keeps that from being said.
    fn will_read(&self, ranges: &[(u64, u64)]) -> Result<()>;
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

type Folders = Vec<(PathBuf, Weak<dyn Lender>)>;

static FOLDERS: RwLock<Folders> = RwLock::new(Vec::new());

/// A folder whose files stand for others, as long as this lives.
pub struct Standing {
    folder: PathBuf,
    _lender: Arc<dyn Lender>,
}

impl Standing {
    /// Has the files below `folder`, a path without links, stand for those that `lender` gives.
    pub fn register(folder: PathBuf, lender: Arc<dyn Lender>) -> Standing {
        folders(|all| all.push((folder.clone(), Arc::downgrade(&lender))));
        Standing { folder, _lender: lender }
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        folders(|all| all.retain(|(folder, _)| *folder != self.folder));
    }
}

fn folders(change: impl FnOnce(&mut Folders)) {
    change(&mut FOLDERS.write().unwrap_or_else(PoisonError::into_inner));
}

/// The lender of what lies at `path`, if that stands for something else.
fn lender(path: &Path) -> Option<(PathBuf, Weak<dyn Lender>)> {
    let all = FOLDERS.read().unwrap_or_else(PoisonError::into_inner);
    if all.is_empty() {
        return None;
    }
    let real = path.canonicalize().ok()?;
    let (_, lender) = all.iter().find(|(folder, _)| real.starts_with(folder))?;
    Some((real, Weak::clone(lender)))
}

/// True if `path`, a file or a folder, stands for something on another host.
pub fn is_elsewhere(path: &Path) -> bool {
    lender(path).is_some()
}

/// What people call `folder`, if it is a root of a checkpoint that lies on several hosts.
pub fn name(folder: &Path) -> Option<String> {
    let all = FOLDERS.read().unwrap_or_else(PoisonError::into_inner);
    all.iter().find_map(|(_, lender)| lender.upgrade()?.name(folder))
}

/// What a file stands for, if it does.
///
/// # Errors
/// If it stands for something that nobody gives any more.
pub(super) fn find(path: &Path) -> Result<Option<Arc<dyn Elsewhere>>> {
    let Some((real, lender)) = lender(path) else { return Ok(None) };
    let file = lender.upgrade().and_then(|lender| lender.file(&real));
    file.map(Some)
        .ok_or_else(|| Finding::new(codes::NO_SUCH_PATH, "no other host has this file").file(path).into())
}

/// Fills the file at `path` with the first `most` bytes of what it stands for, for readers that know files alone;
/// nothing if it stands for itself.
///
/// # Errors
/// What keeps them from coming, or from being written.
pub fn bring(path: &Path, most: u64) -> Result<()> {
    let Some(file) = find(path)? else { return Ok(()) };
    let failed = |e: std::io::Error| Error::io(path, "cannot keep what another host has sent", &e);
    let meta = std::fs::metadata(path).map_err(failed)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    let out = std::fs::OpenOptions::new().write(true).open(path).map_err(failed)?;
    let wanted = meta.len().min(most);
    let mut bytes = vec![0; CHUNK.min(wanted as usize)];
    let mut at = 0;
    while at < wanted {
        let n = (CHUNK as u64).min(wanted - at) as usize;
        file.read(at, &mut bytes[..n])?;
        std::os::unix::fs::FileExt::write_all_at(&out, &bytes[..n], at).map_err(failed)?;
        at += n as u64;
    }
    meta.modified().and_then(|time| out.set_modified(time)).map_err(failed)
}

/// Ends all waiting for bytes of other hosts: the user has stopped the run.
pub fn interrupt() {
    let all: Vec<_> = FOLDERS.read().unwrap_or_else(PoisonError::into_inner).clone();
    all.iter().filter_map(|(_, lender)| lender.upgrade()).for_each(|lender| lender.interrupt());
}

/// Takes note of what is read, and reads nothing.
#[derive(Debug, Default)]
pub(crate) struct Rehearsal {
    ranges: Mutex<Vec<(u64, u64)>>,
    /// False for a file whose reads nobody asks for.
    noted: bool,
}

impl Rehearsal {
    pub(crate) fn new(noted: bool) -> Rehearsal {
        Rehearsal { ranges: Mutex::default(), noted }
    }

    /// What was read since this was asked last, in that order; ranges that follow on one another are one.
    pub(crate) fn take(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut *self.ranges.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Elsewhere for Rehearsal {
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        bytes.fill(0);
        self.will_read(&[(offset, offset + bytes.len() as u64)])
    }

    fn will_read(&self, ranges: &[(u64, u64)]) -> Result<()> {
        if !self.noted {
            return Ok(());
        }
        let mut all = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        for &(lo, hi) in ranges {
            match all.last_mut() {
                Some(last) if last.1 == lo => last.1 = hi,
                _ => all.push((lo, hi)),
            }
        }
        Ok(())
    }
}
