//! The staging folder itself: its entries, its owner, and its removal.

use std::ffi::OsStr;
use std::fs::File;
use std::io;

use super::disk::{self, At, Dir};
use super::place::Place;
use crate::codes;
use crate::error::{Finding, Result};

/// The folder's entry whose content becomes the result.
pub(super) const DATA: &str = "data";
/// The entry for an older result that cannot be exchanged with the new one.
pub(super) const OLD: &str = "old";
/// The manifest of an older result that is replaced piece by piece.
pub(super) const OLDER: &str = "older.json";
/// Names of what was moved out of an older result's way because it is not this program's to remove.
pub(super) const KEPT: &str = "kept";
/// Largest of the folder's own small files, in bytes.
pub(crate) const MAX_OWN: u64 = 64 << 20;

/// The description of a run of several processes.
pub(crate) const RUN: &str = "run.json";
/// The round of such a run that may write.
pub(crate) const STATE: &str = "state";
/// The process that has begun a round.
pub(crate) const CLAIM: &str = "claim-";
/// The division of work in a round.
pub(crate) const ROUND: &str = "round-";
/// Journals of members.
pub(crate) const MEMBER: &str = "member-";
/// The evidence of members.
pub(crate) const EVIDENCE: &str = "evidence-";

/// Refuses a folder that anybody except this user may write to: its contents prove nothing, and its links may
/// lead anywhere.
pub(crate) fn check_owner(place: &Place, folder: &Dir) -> Result<()> {
    refused_owner(place, folder)?.map_or(Ok(()), |finding| Err(finding.into()))
}

/// The reason why a folder is not used, if anybody except this user may write to it.
pub(super) fn refused_owner(place: &Place, folder: &Dir) -> Result<Option<Finding>> {
    let path = folder.path();
    let loose = |mode: u32| mode & 0o022;
    let meta = folder.meta().at(path, "cannot stat")?;
    if meta.st_uid == rustix::process::geteuid().as_raw() && loose(meta.st_mode) == 0 {
        return Ok(None);
    }
    // Some file servers give files to a user of their own, or know no modes: what do they make of a
    // directory that is made now?
    let probe = format!(".fastshard-probe-{}", std::process::id());
    let name = OsStr::new(&probe);
    place.base.create_dir(name, disk::PRIVATE).at(&place.base.join(name), "cannot create")?;
    let probe_meta = place.base.sub(name).and_then(|probe| probe.meta());
    place.base.remove_dir(name).at(&place.base.join(name), "cannot remove")?;
    let probe_meta = probe_meta.at(path, "cannot stat")?;
    if meta.st_uid == probe_meta.st_uid && loose(meta.st_mode) & !loose(probe_meta.st_mode) == 0 {
        return Ok(None);
    }
    Ok(Some(Finding::new(codes::PERMISSION, "the staging folder of this run is not this user's alone: nothing in it is used")
        .file(path)
        .expected(
            format!("owner {}, writable by nobody else", probe_meta.st_uid),
            format!("owner {}, mode {:o}", meta.st_uid, meta.st_mode & 0o7777),
        )
        .help("check it and remove it, or choose a destination in your own directory; somebody else made or opened it")))
}

/// True for the name of an entry that holds what becomes the result: in a run of several processes it has the name of
/// the round that may write to it.
pub(crate) fn is_data(name: &str) -> bool {
    name == DATA
        || name.strip_prefix("data.").is_some_and(|nonce| nonce.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// True for the name of a file that only a run of several processes has.
fn is_of_shared_run(name: &str) -> bool {
    [RUN, "run.json.new", STATE].contains(&name)
        || [CLAIM, ROUND, MEMBER, EVIDENCE].iter().any(|prefix| name.starts_with(prefix))
}

/// Names of the folder's entries, as far as they can be this program's.
pub(crate) fn entries(folder: &Dir) -> Result<Vec<String>> {
    let names = folder.entries().at(folder.path(), "cannot list")?;
    Ok(names.into_iter().filter_map(|name| name.into_string().ok()).collect())
}

/// Removes a staging folder with its entries `data`, which are this program's own: the journal first, as it speaks of
/// them.
pub(super) fn remove_folder(place: &Place, folder: &Dir, data: &[String], lock: File) -> Result<()> {
    folder.remove_file("journal").at(&folder.join("journal"), "cannot remove")?;
    for name in data {
        folder.remove_tree(OsStr::new(name)).at(&folder.join(name), "cannot remove")?;
    }
    remove_bookkeeping(place, folder, lock, false, false)
}

/// Removes a staging folder that holds no data any more: the seal last, as it tells that a clean-up was
/// cut short. With `durable`, by a power failure too, where something was `replaced` or a plan is left.
pub(super) fn remove_bookkeeping(
    place: &Place,
    folder: &Dir,
    lock: File,
    durable: bool,
    replaced: bool,
) -> Result<()> {
    let has_plan = folder.has("plan").at(&folder.join("plan"), "cannot stat")?;
    let gone = |name: &str| folder.remove_file(name).at(&folder.join(name), "cannot remove");
    for name in entries(folder)?.iter().filter(|name| is_of_shared_run(name)) {
        gone(name)?;
    }
    for name in ["journal", OLDER, "older.json.new", "plan", "plan.new", "sealed.new", "kept.new", "lock"] {
        gone(name)?;
    }
    // NFS keeps a removed file in the directory as long as it is open.
    drop(lock);
    if durable && (replaced || has_plan) {
        // An older result without a seal looks like one that is being made. A plan without a seal looks like a run that has made nothing yet.
        folder.sync().at(folder.path(), "cannot bring to disk")?;
    }
    gone("sealed")?;
    // As long as anything of the run is there it can be told what was kept.
    gone(KEPT)?;
    for _ in 0..10 {
        match place.base.remove_dir(&place.folder) {
            // Another process has taken the folder over as soon as the lock was gone, or made it anew.
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => {
                let (own, now) = (folder.meta(), place.base.sub(&place.folder));
                let others = |now: &Dir| {
                    now.has("lock").unwrap_or(false)
                        || now.meta().is_ok_and(|now| own.is_ok_and(|own| own.st_ino != now.st_ino))
                };
                if now.is_ok_and(|now| others(&now)) {
                    return Ok(());
                }
            }
            done => return done.at(folder.path(), "cannot remove"),
        }
    }
    place.base.remove_dir(&place.folder).at(folder.path(), "cannot remove")
}
