//! Who owns a staging folder: the process that holds its lock, if one is alive.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{flock, FlockOperation};
use rustix::io::Errno;

use super::disk::{At, Dir};
use crate::codes;
use crate::error::{Error, Finding, Result};

const LOCK: &str = "lock";

/// Takes the folder's lock; `None` if the folder is being removed by its owner.
pub(super) fn acquire(folder: &Dir) -> Result<Option<File>> {
    let path = folder.join(LOCK);
    let file = match folder.open_lock(OsStr::new(LOCK)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.at(&path, "cannot create")?,
    };
    // Several tries, as another process that merely asks who is there holds it for an instant.
    if !(0..5).any(|_| try_lock(&file, FlockOperation::NonBlockingLockExclusive)) {
        return Err(locked(folder.path()));
    }
    let inode = file.metadata().at(&path, "cannot stat")?.ino();
    let named = folder.stat(OsStr::new(LOCK)).at(&path, "cannot stat")?;
    Ok(named.is_some_and(|m| m.st_ino == inode).then_some(file))
}

/// True if the lock is held now, or if the filesystem knows no locks.
fn try_lock(file: &File, operation: FlockOperation) -> bool {
    let busy = flock(file, operation) == Err(Errno::WOULDBLOCK);
    if busy {
        std::thread::sleep(Duration::from_millis(20));
    }
    !busy
}

/// The error for a folder of our own that is there: is its owner alive?
pub(super) fn leftover_or_locked(folder: &Dir) -> Error {
    find_error(folder).unwrap_or_else(|error| error)
}

fn find_error(folder: &Dir) -> Result<Error> {
    let has = |name: &str| folder.has(name).at(&folder.join(name), "cannot stat");
    for _ in 0..5 {
        // The owner writes the plan under the lock, so with a plan a free lock means that it is gone;
        // without one it may just not have come that far. Hence first the plan, then the lock.
        let planned = has("plan")?;
        let is_locked = match folder.read_only(LOCK) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            file => {
                let file = file.at(&folder.join(LOCK), "cannot open")?;
                !try_lock(&file, FlockOperation::NonBlockingLockShared)
            }
        };
        if is_locked {
            return Ok(locked(folder.path()));
        }
        if planned {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let help = match has("sealed")? {
        // It may hold what was at the destination before.
        true => "put its result in place, which is complete",
        false => "continue it, or remove the folder to start afresh",
    };
    let finding = Finding::new(codes::LEFTOVER_RUN, "an earlier run of this plan was interrupted");
    Ok(finding.file(folder.path()).help(help).run("--resume").into())
}

/// True if the folder's owner has come so far as to lock it.
pub(super) fn is_there(folder: &Dir) -> Result<bool> {
    folder.has(LOCK).at(&folder.join(LOCK), "cannot stat")
}

/// Whether a live process holds the folder, or has just made it; `None` where the filesystem knows no locks.
pub(super) fn is_held(folder: &Dir) -> Result<Option<bool>> {
    let file = match folder.read_only(LOCK) {
        // Its owner makes the lock before all else.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Some(true)),
        file => file.at(&folder.join(LOCK), "cannot open")?,
    };
    for _ in 0..5 {
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => return Ok(Some(false)),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(20)),
            Err(_) => return Ok(None),
        }
    }
    Ok(Some(true))
}

/// The error for a folder that a live process holds.
pub(super) fn locked(folder: &Path) -> Error {
    Finding::new(codes::LOCKED, "another process is writing this result")
        .file(folder)
        .help("wait for it to finish, or choose another destination")
        .into()
}
