//! Seal a complete result and make it appear.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::disk::{At, Dir};
use super::folder::{remove_bookkeeping, MAX_OWN, OLD, OLDER};
use super::kept;
use super::older::{self, Removed};
use super::place::{Occupied, Place};
use super::seal::{inode, subdirectory, Seal};
use super::Options;
use crate::codes;
use crate::error::{Error, Finding, Result, Severity};
use crate::manifest::{Manifest, MANIFEST_NAME};
use crate::steps::{self, Step};
use crate::topics;

fn conflict(place: &Place, got: Option<String>) -> Error {
    let mut finding =
        Finding::new(codes::PUBLISH_CONFLICT, "the destination changed while the result was written")
            .file(&place.out)
            .help(format!(
                "move the files that are in the way, then continue the run; the result is kept in {}",
                place.folder_path().display()
            ))
            .run("--resume");
    finding.got = got;
    finding.into()
}

/// The warning that the destination is not replaced in one step.
pub(super) fn in_steps(place: &Place) -> Finding {
    Finding::new(
        codes::IN_STEPS,
        "a lower layer of overlayfs has the destination: it is replaced file by file",
    )
    .file(&place.out)
    .help("let nobody read it until the command ends, or choose a new destination, which appears in one step")
}

/// A run whose staging folder is held and locked.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) place: Place,
    pub(super) folder: Dir,
    /// Its entry that holds what becomes the result.
    pub(super) data: String,
    pub(super) options: Options,
    pub(super) lock: File,
    /// What was at the destination when the run began.
    pub(super) before: Occupied,
    pub(super) seal: Option<Seal>,
}

/// Adds to an error that the destination is neither the older nor the new result.
fn in_between(place: &Place, error: Error) -> Error {
    let mut findings = error.into_findings();
    findings.push(
        Finding::new(codes::PUBLISH_CONFLICT, "the destination is incomplete now")
            .file(&place.out)
            .help(format!(
                "do not remove {}: the new result is complete there, and what the destination held before lies \
                 there if it is not at its place; finish the run",
                place.folder_path().display()
            ))
            .run("--resume"),
    );
    Error::from(findings)
}

/// Seals unless done, renames unless done, cleans up.
///
/// Files of `synced` are on disk. `is_shared`: several processes make the run. `may_publish` is asked once the seal is
/// there: from then on nobody may take the files over who has not before.
pub(super) fn publish(
    run: Run,
    last: &[&str],
    synced: &BTreeSet<String>,
    is_shared: bool,
    may_publish: &dyn Fn() -> Result<()>,
    go_on: &dyn Fn() -> bool,
) -> Result<Vec<Finding>> {
    let Run { place, folder, data, options, lock, before, seal } = run;
    let mut seal = match seal {
        Some(seal) => seal,
        None => {
            let seal = Seal::make(&folder, &data, last, options.fsync, synced, is_shared, go_on)?;
            may_publish()?;
            log::debug!(
                target: topics::PUBLISH,
                "sealed: {} entries of {:?} are complete{}",
                seal.names.len(),
                folder.join(&seal.data),
                if seal.durable { " and on disk" } else { "" },
            );
            seal
        }
    };
    steps::reach(Step::Sealed);
    if options.fsync && !matches!(before, Occupied::Absent) {
        // What was at the destination may go through the folder, which a power failure must not take.
        place.base.sync().at(place.base.path(), "cannot bring the directory to disk")?;
    }
    let is_published = seal.is_published(&place, &folder)?;
    if !is_published {
        let done = if place.inside {
            move_in(&place, &folder, &seal)
        } else if seal.piecewise {
            replace_piecewise(&place, &folder, &seal)
        } else {
            replace(&place, &folder, &before, options.overwrite, &mut seal)
        };
        if let Err(error) = done {
            // The answer to a rename can be lost on its way from a file server.
            if !seal.is_published(&place, &folder).unwrap_or(false) {
                return Err(if seal.piecewise { in_between(&place, error) } else { error });
            }
        }
    }
    log::debug!(
        target: topics::PUBLISH,
        "the result is at {:?}: {}",
        place.out,
        match (is_published, place.inside || seal.piecewise) {
            (true, _) => "an earlier run has put it there",
            (false, true) => "its entries were moved one by one",
            (false, false) => "its directory was renamed",
        },
    );
    steps::reach(Step::Published);
    if options.fsync {
        // Until this is on disk the older result is not touched: a power failure may bring it back.
        let synced = place.base.sync().at(place.base.path(), "cannot bring the directory to disk");
        synced.map_err(|error| error.after_publishing(&place.out))?;
    }
    let steps = seal.piecewise.then(|| in_steps(&place));
    let replaced = !matches!(before, Occupied::Absent);
    let left = clean_up(&place, &folder, &seal.data, lock, (options.fsync, replaced), go_on);
    log::debug!(target: topics::PUBLISH, "cleaned up, with {} warnings", left.len());
    Ok(steps.into_iter().chain(left).collect())
}

/// Puts the data directory at the destination, if that is still what it was.
fn replace(place: &Place, folder: &Dir, before: &Occupied, overwrite: bool, seal: &mut Seal) -> Result<()> {
    let data_name = seal.data.clone();
    let (data, base, name) = (OsStr::new(&data_name), &place.base, &*place.name);
    let in_the_way = |e: io::Error| match e.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotADirectory => {
            conflict(place, None)
        }
        _ => Error::io(&place.out, "cannot rename the result into place", &e),
    };
    // Only where it differs: not every filesystem lets modes be changed.
    let keep_mode = |mode: u32| {
        let ours = folder.sub(data).at(&folder.join(data), "cannot open")?;
        match ours.meta() {
            Ok(meta) if meta.st_mode == mode => Ok(()),
            _ => ours.set_mode(mode).at(ours.path(), "cannot set the mode"),
        }
    };
    match (inode(base, name)?, before) {
        (None, _) => folder.rename_new(data, base, name).map_err(in_the_way),
        (Some(now), Occupied::Empty { inode, mode }) if now == *inode => {
            keep_mode(*mode)?;
            folder.rename_over(data, base, name).map_err(in_the_way)
        }
        (Some(now), Occupied::Full { inode, mode, .. }) if now == *inode && overwrite => {
            refuse_besides(place)?;
            keep_mode(*mode)?;
            match folder.exchange(data, base, name) {
                Ok(true) => return Ok(()),
                Err(e) if of_another_layer(&e) => return begin_piecewise(place, folder, seal),
                done => done.at(&place.out, "cannot exchange with the result")?,
            };
            let old = OsStr::new(OLD);
            match base.rename_new(name, folder, old) {
                Err(e) if of_another_layer(&e) => return begin_piecewise(place, folder, seal),
                done => done.at(&folder.join(old), "cannot move the old result aside")?,
            }
            folder.rename_new(data, base, name).map_err(|e| {
                // The old result goes back; should that fail too, it is still whole in the folder.
                match folder.rename_new(old, base, name) {
                    Ok(()) => in_the_way(e),
                    Err(_) => in_between(place, in_the_way(e)),
                }
            })
        }
        _ => Err(conflict(place, None)),
    }
}

/// Refuses to replace a destination that holds more than an older result by now.
fn refuse_besides(place: &Place) -> Result<()> {
    let Some(out) = place.open_out()? else { return Ok(()) };
    let besides = older::besides(&out, place.own())?;
    match besides.is_nothing() {
        true => Ok(()),
        false => Err(conflict(place, Some(besides.describe()))),
    }
}

/// True for what overlayfs says to moving a directory that a lower layer has.
fn of_another_layer(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::XDEV.raw_os_error())
}

/// Notes that the destination is replaced piece by piece, then does it: from the first piece on the run
/// can only go forward.
fn begin_piecewise(place: &Place, folder: &Dir, seal: &mut Seal) -> Result<()> {
    seal.piecewise = true;
    seal.rewrite(folder)?;
    replace_piecewise(place, folder, seal)
}

/// Removes the files of the older result, its manifest first, and moves those of the new one in. The older
/// one is not moved: to move a file of a lower layer is to copy it.
fn replace_piecewise(place: &Place, folder: &Dir, seal: &Seal) -> Result<()> {
    let Some(out) = place.open_out()? else { return Err(conflict(place, None)) };
    let Some(data) = subdirectory(folder, &seal.data)? else { return Ok(()) };
    // What accounts for the older result's files, kept for a run that goes on with this.
    let path = folder.join(OLDER);
    if !folder.has(OLDER).at(&path, "cannot stat")? {
        let manifest = out.read_small(MANIFEST_NAME, MAX_OWN).at(&out.join(MANIFEST_NAME), "cannot read")?;
        folder.write_whole(OLDER, &manifest.unwrap_or_default(), seal.durable)?;
    }
    let files = folder.read_only(OLDER).and_then(Manifest::published_files).at(&path, "cannot read")?;
    if let Ok(files) = files {
        // What is in already was moved by a run that was cut short: the older result is out then.
        if seal.all_wait(&data)? {
            out.remove_file(MANIFEST_NAME).at(&out.join(MANIFEST_NAME), "cannot remove")?;
            older::clear(&out, &files, &|| true)?;
        }
    }
    refuse_others(place, &data, &out, seal)?;
    move_names(place, &data, &out, seal)
}

/// Refuses a destination that holds anything but what was moved there from `data`.
fn refuse_others(place: &Place, data: &Dir, out: &Dir, seal: &Seal) -> Result<()> {
    for name in out.entries().at(out.path(), "cannot list")? {
        let waits = data.has(&name).at(data.path(), "cannot stat")?;
        let moved = name.to_str().is_some_and(|n| seal.names.iter().any(|s| s == n) && !waits);
        if !moved && !place.is_own(&name) {
            return Err(conflict(place, Some(name.to_string_lossy().into_owned())));
        }
    }
    Ok(())
}

/// Moves the result's entries into the destination one by one, if nothing else is there.
fn move_in(place: &Place, folder: &Dir, seal: &Seal) -> Result<()> {
    let Some(out) = place.open_out()? else { return Err(conflict(place, None)) };
    let Some(data) = subdirectory(folder, &seal.data)? else { return Ok(()) };
    refuse_others(place, &data, &out, seal)?;
    move_names(place, &data, &out, seal).inspect_err(|_| {
        // Back again, so that a refused result leaves nothing at the destination.
        for name in seal.names.iter().rev().map(OsStr::new) {
            if !data.has(name).unwrap_or(true) {
                let _ = out.rename_new(name, &data, name);
            }
        }
    })
}

/// Moves what is still in `data` to `out`, the pointers last.
fn move_names(place: &Place, data: &Dir, out: &Dir, seal: &Seal) -> Result<()> {
    let pointers = seal.names.len() - seal.pointers.min(seal.names.len());
    for (i, name) in seal.names.iter().enumerate() {
        if i >= pointers && seal.durable {
            out.sync().at(out.path(), "cannot bring to disk")?;
        }
        let path = out.join(name);
        if data.has(name).at(&data.join(name), "cannot stat")? {
            match data.rename_new(OsStr::new(name), out, OsStr::new(name)) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    return Err(conflict(place, Some(name.clone())))
                }
                done => done.at(&path, "cannot rename into place")?,
            }
        }
    }
    match seal.durable {
        // The last of them too: nothing else brings it to disk.
        true => out.sync().at(out.path(), "cannot bring to disk"),
        false => Ok(()),
    }
}

/// Removes the older result and the folder; what stays behind is a warning, not an error.
fn clean_up(
    place: &Place,
    folder: &Dir,
    data: &str,
    lock: File,
    (durable, replaced): (bool, bool),
    go_on: &dyn Fn() -> bool,
) -> Vec<Finding> {
    let left = |what: String, at: &dyn AsRef<Path>, help: &str| {
        Finding::new(codes::LEFTOVER_RUN, what).severity(Severity::Warning).file(at.as_ref()).help(help)
    };
    let failed = |error: Error| {
        let cause = error.into_findings().swap_remove(0);
        let at = cause.file.map_or_else(|| folder.path().to_path_buf(), PathBuf::from);
        let help = format!("run it again, or look into {} and remove it", folder.path().display());
        left(format!("complete, but not cleaned up: {}", cause.message), &at, &help).run("--resume")
    };
    let aside = |kept: &PathBuf| {
        left(
            "complete; new files came into the older result, which is kept".into(),
            kept,
            "look what is in it before you remove it",
        )
    };
    let mut now = Vec::new();
    let removed = remove_older(place, folder, data, durable, go_on, &mut now);
    let kept = removed.and_then(|all| all.then(|| kept::all(place, folder)).transpose());
    let warning = match kept {
        Ok(Some(all)) => {
            let mut warnings: Vec<Finding> = all.iter().map(aside).collect();
            warnings.extend(remove_bookkeeping(place, folder, lock, durable, replaced).err().map(failed));
            return warnings;
        }
        Ok(None) => left(
            "complete; the removal of the older result was stopped".into(),
            &folder.path(),
            "continue it, or remove the folder",
        )
        .run("--resume"),
        Err(error) => failed(error),
    };
    let mut warnings: Vec<Finding> = now.iter().map(aside).collect();
    warnings.push(warning);
    warnings
}

/// Removes the older result. What is not its own is kept aside, and named in `kept`. False if it was stopped.
fn remove_older(
    place: &Place,
    folder: &Dir,
    data: &str,
    durable: bool,
    go_on: &dyn Fn() -> bool,
    kept: &mut Vec<PathBuf>,
) -> Result<bool> {
    for name in [data, OLD] {
        match older::remove(folder, OsStr::new(name), go_on)? {
            Removed::Whole => {}
            Removed::Stopped => return Ok(false),
            Removed::NotAll => kept.extend(kept::keep(place, folder, name, durable)?),
        }
    }
    Ok(true)
}
