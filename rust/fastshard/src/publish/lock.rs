//! Who owns a staging folder: the process that holds its lock, if one is alive.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{flock, FlockOperation};
use rustix::io::Errno;

use super::disk::{self, At};
use crate::codes;
use crate::error::{Error, Finding, Result};

/// Takes the folder's lock; `None` if the folder is being removed by its owner.
pub(super) fn acquire(folder: &Path) -> Result<Option<File>> {
    let path = folder.join("lock");
    let file = match disk::open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.at(&path, "cannot create")?,
    };
    // Several tries, as another process that merely asks who is there holds it for an instant.
    if !(0..5).any(|_| try_lock(&file, FlockOperation::NonBlockingLockExclusive)) {
        return Err(locked(folder));
    }
    let held = file.metadata().at(&path, "cannot stat")?.ino();
    let named = std::fs::metadata(&path).is_ok_and(|m| m.ino() == held);
    Ok(named.then_some(file))
}

/// True if the lock is held now, or if the filesystem knows no locks.
fn try_lock(file: &File, operation: FlockOperation) -> bool {
    let busy = flock(file, operation) == Err(Errno::WOULDBLOCK);
    if busy {
        std::thread::sleep(Duration::from_millis(20));
    }
    !busy
}

/// The error for a folder that is there: is its owner alive?
pub(super) fn leftover_or_locked(folder: &Path) -> Error {
    for _ in 0..5 {
        // The owner writes the plan under the lock, so with a plan a free lock means that it is gone;
        // without one it may just not have come that far. Hence first the plan, then the lock.
        let planned = folder.join("plan").exists();
        let lock = File::open(folder.join("lock"));
        if lock.is_ok_and(|file| !try_lock(&file, FlockOperation::NonBlockingLockShared)) {
            return locked(folder);
        }
        if planned {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Finding::new(codes::LEFTOVER_RUN, "an earlier run of this plan was interrupted")
        .file(folder)
        .help("--resume continues it; removing the folder starts afresh")
        .into()
}

/// The error for a folder that a live process holds.
pub(super) fn locked(folder: &Path) -> Error {
    Finding::new(codes::LOCKED, "another process is writing this result")
        .file(folder)
        .help("wait for it to finish, or choose another destination")
        .into()
}
