//! Seal a complete result and make it appear.

use std::ffi::OsStr;
use std::fs::File;
use std::io;

use rustix::fs::FileType;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::disk::{self, At, Dir};
use super::journal::{boot_id, same_boot};
use super::older::{self, Removed};
use super::place::{Occupied, Place};
use super::staging::{remove_bookkeeping, Staging, DATA, MAX_OWN};
use crate::codes;
use crate::error::{Error, Finding, Result, Severity};

/// Where an older result goes that cannot be exchanged with the new one.
const OLD: &str = "old";
const SEALED: &str = "sealed";

/// What publishing has to do, written once the result is complete and on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Seal {
    /// Inode of the data directory, to tell it from an old result after an exchange.
    inode: u64,
    /// Top-level names in the order in which they appear, if one by one.
    names: Vec<String>,
    /// How many of the last names are pointers: each appears after all before it are on disk.
    pointers: usize,
    /// True if everything was brought to disk.
    durable: bool,
    /// Identity of the machine's run in which it was sealed.
    boot: String,
    /// True once the older result is being replaced piece by piece, as its directory cannot be moved.
    #[serde(default)]
    piecewise: bool,
}

impl Seal {
    /// The seal of a folder, if it has one.
    pub(super) fn read(folder: &Dir) -> Result<Option<Seal>> {
        let Some(bytes) = folder.read_small(SEALED, MAX_OWN).at(&folder.join(SEALED), "cannot read")? else {
            return Ok(None);
        };
        let seal: Seal = serde_json::from_slice(&bytes)
            .map_err(|e| unclear(folder, &format!("its seal cannot be read ({e})")))?;
        if !same_boot(seal.durable, seal.boot.as_bytes(), &boot_id()) {
            return Err(unclear(folder, "the machine was restarted before its data was on disk"));
        }
        Ok(Some(seal))
    }

    /// Brings the data to disk and writes the seal.
    fn make(folder: &Dir, last: &[&str], durable: bool, go_on: &dyn Fn() -> bool) -> Result<Seal> {
        let path = folder.join(DATA);
        let data = folder.sub(OsStr::new(DATA)).at(&path, "cannot open")?;
        let mut names = Vec::new();
        for name in data.entries().at(&path, "cannot list")? {
            names.push(name.into_string().map_err(|name| {
                let shown = name.to_string_lossy().into_owned();
                Finding::new(codes::UNSUPPORTED, "a file name that is not UTF-8").file(path.join(shown))
            })?);
        }
        if let Some(name) = last.iter().find(|name| !names.iter().any(|n| n == *name)) {
            return Err(Finding::new(codes::USAGE, "published last but never written")
                .file(path.join(name))
                .into());
        }
        names.sort_by_key(|name| (last.iter().position(|l| l == name).map_or(0, |i| i + 1), name.clone()));
        if durable {
            sync_tree(&data, go_on)?;
        }
        let inode = data.meta().at(&path, "cannot stat")?.st_ino;
        let pointers = last.len();
        let seal = Seal { inode, names, pointers, durable, boot: boot_id(), piecewise: false };
        seal.write(folder)?;
        Ok(seal)
    }

    fn write(&self, folder: &Dir) -> Result<()> {
        let bytes = serde_json::to_vec(self).map_err(|e| unclear(folder, &e.to_string()))?;
        folder.write_whole(SEALED, &bytes, self.durable)
    }

    /// True if the data folder is still the result's, whatever has been moved out of it.
    pub(super) fn is_in(&self, folder: &Dir, inside: bool) -> Result<bool> {
        Ok(inside || self.piecewise || inode(folder, OsStr::new(DATA))? == Some(self.inode))
    }

    /// True as long as nothing of the result has appeared.
    pub(super) fn is_untouched(&self, place: &Place, folder: &Dir) -> Result<bool> {
        if self.piecewise || inode(folder, OsStr::new(DATA))? != Some(self.inode) {
            return Ok(false);
        }
        let data = folder.sub(OsStr::new(DATA)).at(&folder.join(DATA), "cannot open")?;
        let waits = |name: &String| data.has(name).at(&data.join(name), "cannot stat");
        Ok(!place.inside || self.names.iter().map(waits).collect::<Result<Vec<_>>>()?.into_iter().all(|w| w))
    }

    /// True if the result is at its destination already; an error if it is nowhere.
    fn published(&self, place: &Place, folder: &Dir) -> Result<bool> {
        let lost = || unclear(folder, "neither it nor the destination holds what was sealed");
        if place.inside || self.piecewise {
            let data = subdirectory(folder, DATA)?;
            let out = place.open_out()?;
            let is_in = |directory: &Option<Dir>, name: &String| match directory {
                Some(directory) => directory.has(name).at(&directory.join(name), "cannot stat"),
                None => Ok(false),
            };
            let mut all = true;
            for name in &self.names {
                let waits = is_in(&data, name)?;
                if !waits && !is_in(&out, name)? {
                    return Err(lost());
                }
                all &= !waits;
            }
            return Ok(all);
        }
        if inode(folder, OsStr::new(DATA))? == Some(self.inode) {
            Ok(false)
        } else if inode(&place.base, &place.name)? == Some(self.inode) {
            Ok(true)
        } else {
            Err(lost())
        }
    }
}

/// Takes the seal off.
pub(super) fn remove_seal(folder: &Dir) -> Result<()> {
    folder.remove_file(SEALED).at(&folder.join(SEALED), "cannot remove")?;
    folder.sync().at(folder.path(), "cannot bring to disk")
}

/// Inode number of an entry.
fn inode(directory: &Dir, name: &OsStr) -> Result<Option<u64>> {
    Ok(directory.stat(name).at(&directory.join(name), "cannot stat")?.map(|stat| stat.st_ino))
}

/// A directory in `folder`, if it is there.
fn subdirectory(folder: &Dir, name: &str) -> Result<Option<Dir>> {
    match folder.sub(OsStr::new(name)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.at(&folder.join(name), "cannot open").map(Some),
    }
}

fn unclear(folder: &Dir, why: &str) -> Error {
    Finding::new(codes::LEFTOVER_RUN, format!("an interrupted publishing cannot be continued: {why}"))
        .file(folder.path())
        .help("look at the destination and into the folder, which may hold what was there before; then remove it and run again")
        .into()
}

fn conflict(place: &Place, got: Option<String>) -> Error {
    let mut finding =
        Finding::new(codes::PUBLISH_CONFLICT, "the destination changed while the result was written")
            .file(&place.out)
            .help(format!(
                "the result is kept in {}: move what is in the way, then run the same command with --resume",
                place.folder_path().display()
            ));
    finding.got = got;
    finding.into()
}

/// Seals unless done, renames unless done, cleans up.
pub(super) fn publish(staging: Staging, last: &[&str], go_on: &dyn Fn() -> bool) -> Result<Vec<Finding>> {
    let Staging { place, folder, options, lock, journal, before, seal, .. } = staging;
    drop(journal);
    let mut seal = match seal {
        Some(seal) => seal,
        None => Seal::make(&folder, last, options.fsync, go_on)?,
    };
    if !seal.published(&place, &folder)? {
        let done = if place.inside {
            move_in(&place, &folder, &seal)
        } else if seal.piecewise {
            replace_piecewise(&place, &folder, &seal)
        } else {
            replace(&place, &folder, &before, options.overwrite, &mut seal)
        };
        if let Err(error) = done {
            // The answer to a rename can be lost on its way from a file server.
            if !seal.published(&place, &folder).unwrap_or(false) {
                return Err(error);
            }
        }
    }
    if options.fsync {
        // Until this is on disk the older result is not touched: a power failure may bring it back.
        let synced = place.base.sync().at(place.base.path(), "cannot bring the directory to disk");
        synced.map_err(|error| error.after_publishing(&place.out))?;
    }
    Ok(clean_up(&place, &folder, lock, go_on))
}

/// Puts the data directory at the destination, if that is still what it was.
fn replace(
    place: &Place,
    folder: &Dir,
    before: &Occupied,
    overwrite: bool,
    seal: &mut Seal,
) -> Result<()> {
    let (data, base, name) = (OsStr::new(DATA), &place.base, &*place.name);
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
                let _ = folder.rename_new(old, base, name);
                in_the_way(e)
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
        false => Err(conflict(place, Some(besides.told()))),
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
    seal.write(folder)?;
    replace_piecewise(place, folder, seal)
}

/// Moves the files of the older result aside and those of the new one in. Between the two the destination
/// holds no manifest.
fn replace_piecewise(place: &Place, folder: &Dir, seal: &Seal) -> Result<()> {
    let Some(out) = place.open_out()? else { return Err(conflict(place, None)) };
    let aside = OsStr::new(OLD);
    if !folder.has(aside).at(&folder.join(aside), "cannot stat")? {
        folder.create_dir(aside, disk::BY_UMASK).at(&folder.join(aside), "cannot create")?;
    }
    let old = folder.sub(aside).at(&folder.join(aside), "cannot open")?;
    let Some(data) = subdirectory(folder, DATA)? else { return Ok(()) };
    // What is in already was moved by a run that was cut short: the older result is out then.
    let begun = seal.names.iter().any(|name| !data.has(name).unwrap_or(true));
    if !begun {
        older::move_out(&out, &old, None)?;
    }
    move_names(place, &data, &out, seal)
}

/// Moves the result's entries into the destination one by one, if nothing else is there.
fn move_in(place: &Place, folder: &Dir, seal: &Seal) -> Result<()> {
    let Some(out) = place.open_out()? else { return Err(conflict(place, None)) };
    let Some(data) = subdirectory(folder, DATA)? else { return Ok(()) };
    for name in out.entries().at(out.path(), "cannot list")? {
        let waits = data.has(&name).at(data.path(), "cannot stat")?;
        let moved = name.to_str().is_some_and(|n| seal.names.iter().any(|s| s == n) && !waits);
        if !moved && Some(&*name) != place.own() {
            return Err(conflict(place, Some(name.to_string_lossy().into_owned())));
        }
    }
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
    Ok(())
}

/// Removes the older result and the folder; what stays behind is a warning, not an error.
fn clean_up(place: &Place, folder: &Dir, lock: File, go_on: &dyn Fn() -> bool) -> Vec<Finding> {
    let left = |what: String, at: &dyn AsRef<std::path::Path>, help: &str| {
        Finding::new(codes::LEFTOVER_RUN, what).severity(Severity::Warning).file(at.as_ref()).help(help)
    };
    let mut warnings = Vec::new();
    let failed = |error: Error| {
        let cause = error.into_findings().swap_remove(0);
        left(
            format!("published, but not cleaned up: {}", cause.message),
            &folder.path(),
            "the same command with --resume tries again; or look into the folder and remove it",
        )
    };
    for name in [DATA, OLD] {
        match older::remove(folder, OsStr::new(name), go_on) {
            Ok(Removed::Whole) => {}
            Ok(Removed::Stopped) => {
                return vec![left(
                    "published; the removal of the older result was stopped".into(),
                    &folder.path(),
                    "the same command with --resume goes on with it; or remove the folder",
                )]
            }
            Ok(Removed::NotAll) => match keep(place, folder, name) {
                Ok(kept) => warnings.push(left(
                    "published; something that was not there before came into the older result, which is kept"
                        .into(),
                    &kept,
                    "look what is in it before you remove it",
                )),
                Err(error) => return vec![failed(error)],
            },
            Err(error) => return vec![failed(error)],
        }
    }
    if let Err(error) = remove_bookkeeping(place, folder, lock) {
        warnings.push(failed(error));
    }
    warnings
}

/// Moves what is left of an older result out of the staging folder, to where it can be seen.
fn keep(place: &Place, folder: &Dir, name: &str) -> Result<std::path::PathBuf> {
    let base = if place.inside { place.out.as_os_str() } else { &place.name };
    let base = std::path::Path::new(base).file_name().unwrap_or_default().to_string_lossy().into_owned();
    for number in 1..1000 {
        let kept = format!("{base}.kept-{number}");
        match folder.rename_new(OsStr::new(name), &place.base, OsStr::new(&kept)) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            done => return done.at(&folder.join(name), "cannot move aside").map(|()| place.base.join(kept)),
        }
    }
    Err(Finding::new(codes::OUT_EXISTS, "no name is free").file(place.base.join(base)).into())
}

/// Brings a directory with all beneath it to disk, files before the directory that names them.
fn sync_tree(directory: &Dir, go_on: &dyn Fn() -> bool) -> Result<()> {
    for name in directory.entries().at(directory.path(), "cannot list")? {
        if !go_on() {
            return Err(Finding::new(codes::INTERRUPTED, "stopped by the user").into());
        }
        let path = directory.join(&name);
        let stat = directory.stat(&name).at(&path, "cannot stat")?;
        if stat.is_some_and(|s| FileType::from_raw_mode(s.st_mode).is_dir()) {
            sync_tree(&directory.sub(&name).at(&path, "cannot open")?, go_on)?;
        } else {
            directory.sync_file(&name).at(&path, "cannot bring to disk")?;
        }
    }
    directory.sync().at(directory.path(), "cannot bring to disk")
}
