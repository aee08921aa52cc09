//! The staging folder of a run: begin, fill, discard.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FileType, Stat};

use super::disk::{self, At, Dir};
use super::file::{OutFile, Space};
use super::folder::{check_owner, entries, is_data, remove_folder, DATA, MAX_OWN};
use super::journal::{Anchor, Journal};
use super::place::{Occupied, Place};
use super::rename::{self, in_steps, Run};
use super::seal::Seal;
use super::{content, lock, others, Options};
use crate::codes;
use crate::distributed::member::Member;
use crate::distributed::rounds::{Claimed, Shared};
use crate::error::{Finding, Result};
use crate::manifest::{is_plain, ManifestFile};
use crate::memory;
use crate::topics;

/// A result being written. Locked against other processes as long as it lives; dropping it keeps
/// the folder, so that a later run can resume.
#[derive(Debug)]
pub struct Staging {
    run: Run,
    path: PathBuf,
    journal: Arc<Journal>,
    /// The member as which this process takes part in a shared run.
    member: Option<Member>,
    resumed: bool,
    /// BLAKE3 of the small files written, by name.
    hashes: Mutex<BTreeMap<String, String>>,
    /// Files of the result that are on disk with their times.
    synced: Mutex<BTreeSet<String>>,
}

/// What is in a staging folder.
struct Found {
    data: String,
    journal: Journal,
    seal: Option<Seal>,
    resumed: bool,
}

/// True if the run's staging folder holds a complete result, or what is left of its clean-up.
pub(super) fn is_sealed(place: &Place) -> Result<bool> {
    match place.base.sub(&place.folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        folder => {
            let folder = folder.at(&place.folder_path(), "cannot open the staging folder")?;
            Ok(Seal::is_on(&folder)? || Seal::of_cleaned(place, &folder, false)?.is_some())
        }
    }
}

/// True if the staging folder of run `run_id` towards `out` holds a complete result, or what is left of its clean-up.
///
/// Errors: what the system says of `out`.
pub fn waits_sealed(out: &Path, run_id: &str) -> Result<bool> {
    is_sealed(&Place::find(out, run_id)?)
}

impl Staging {
    /// Creates, or with `resume` finds, the staging folder of run `run_id` (hex digest of `plan`).
    ///
    /// It is the hidden sibling `.<out name>.fastshard-<first 16 digits of run_id>` of `out`, or
    /// `out/.fastshard-<16 digits>` where `out` is a mount point, holds the working directory, or its
    /// parent may not be written. Nobody but its owner may enter it.
    ///
    /// Errors: `OUT_EXISTS`; `LEFTOVER_RUN` if the folder is there and `resume` is off, or holds
    /// another plan; `LOCKED` if a live process holds it; `PERMISSION` if others may write to it; what
    /// the system says.
    pub fn begin(out: &Path, run_id: &str, plan: &[u8], options: &Options) -> Result<Staging> {
        let place = Place::find(out, run_id)?;
        let before = place.occupied()?;
        if !(options.resume && is_sealed(&place)?) {
            if let Some(finding) = place.refused(&before, options.overwrite)? {
                return Err(finding.into());
            }
        }
        let path = place.folder_path();
        // Twice at most: once for a folder that vanishes because its owner has just finished.
        for _ in 0..2 {
            let fresh = match place.base.create_dir(&place.folder, disk::PRIVATE) {
                Ok(()) => true,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => false,
                Err(e) => return Err(e).at(&path, "cannot create the staging folder"),
            };
            let folder = match place.base.sub(&place.folder) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                folder => folder.at(&path, "cannot open the staging folder")?,
            };
            if let Err(error) = check_owner(&place, &folder) {
                if fresh {
                    let _ = place.base.remove_dir(&place.folder);
                }
                return Err(error);
            }
            if !fresh && !options.resume {
                return Err(lock::leftover_or_locked(&folder));
            }
            let Some(lock) = lock::acquire(&folder)? else { continue };
            let now = if fresh { place.occupied() } else { Ok(before.clone()) };
            if now.as_ref().ok() != Some(&before) {
                // Another process has published since, and its folder is gone: this would be a run of its own.
                let _ = remove_folder(&place, &folder, &[], lock);
                return Err(now.err().unwrap_or_else(|| lock::locked(&path)));
            }
            return match Self::prepare(&place, &folder, plan, options, fresh) {
                Ok(Found { data, journal, seal, resumed }) => {
                    log::debug!(
                        target: topics::PUBLISH,
                        "staging directory {path:?}: {}; destination {before:?}",
                        match (&seal, resumed) {
                            (Some(_), _) => "sealed by an earlier run",
                            (None, true) => "an earlier run is continued",
                            (None, false) => "new",
                        },
                    );
                    Ok(Staging {
                        run: Run { place, folder, data, options: *options, lock, before, seal },
                        path,
                        journal: Arc::new(journal),
                        member: None,
                        resumed,
                        hashes: Mutex::default(),
                        synced: Mutex::default(),
                    })
                }
                Err(error) => {
                    if fresh {
                        // Nothing of value is in there yet; if this fails too, the first error counts.
                        let _ = remove_folder(&place, &folder, &[DATA.into()], lock);
                    }
                    Err(error)
                }
            };
        }
        Err(lock::locked(&path))
    }

    /// Under the lock: plan, data directory and journal, found or made.
    fn prepare(place: &Place, folder: &Dir, plan: &[u8], options: &Options, fresh: bool) -> Result<Found> {
        let mut seal = Seal::read(folder)?;
        if seal.is_none() && !fresh {
            seal = Seal::of_cleaned(place, folder, options.fsync)?;
        }
        let present = entries(folder)?.into_iter().find(|name| is_data(name));
        if let (Some(stale), Some(present)) = (&seal, &present) {
            // Of a process that was taken over by another one before it could publish: what it sealed is in `present`.
            let gone = stale.data != *present && stale.has_appeared(place, folder)? != Some(true);
            // Sealed, and overtaken before any of it appeared: files may have been moved away since.
            let overtaken = || -> Result<bool> {
                let shared = Shared::find(folder)?;
                Ok(shared.map_or(Ok(false), |shared| shared.is_overtaken(&stale.data))?
                    && stale.is_untouched(place, folder)?)
            };
            if gone || overtaken()? {
                Seal::remove(folder)?;
                log::debug!(target: topics::PUBLISH, "removes the seal of {:?}: another process took over", stale.data);
                seal = None;
            }
        }
        let path = folder.join("plan");
        // A power failure may have taken the plan of a run that has recorded nothing, or left a part of it.
        let mut resumed = seal.is_some() || present.is_some();
        match folder.read_small("plan", MAX_OWN).at(&path, "cannot read")? {
            Some(found) if found == plan => resumed = true,
            Some(_) if Journal::has_records(folder, "journal")? || Shared::find(folder)?.is_some() => {
                return Err(Finding::new(codes::LEFTOVER_RUN, "the staging folder holds another plan")
                    .file(folder.path())
                    .help("start afresh: remove the directory; the sources or options have changed")
                    .into())
            }
            // A sealed run whose clean-up was cut short has no plan any more.
            None if seal.is_some() => {}
            _ => folder.write_whole("plan", plan, false)?,
        }
        if seal.is_none() && place.inside {
            if let Some(finding) = place.refused(&place.occupied()?, true)? {
                // Another run has begun in the same directory at the same time: better now than at the end.
                return Err(finding.into());
            }
        }
        let sealed = seal.as_ref().map(|seal| seal.data.clone());
        if seal.is_none() && present.is_none() {
            folder.create_dir(OsStr::new(DATA), disk::BY_UMASK).at(&folder.join(DATA), "cannot create")?;
        }
        let journal = Journal::open(folder, "journal", options.fsync)?;
        resumed |= journal.holds_records();
        let journal = match options.fsync && seal.is_none() {
            true => {
                let again = |dir: &Dir| dir.again().at(dir.path(), "cannot open");
                journal.anchored(Anchor { folder: again(folder)?, base: again(&place.base)? })
            }
            false => journal,
        };
        let data = sealed.or(present).unwrap_or_else(|| DATA.into());
        Ok(Found { data, journal, seal, resumed })
    }

    /// The shared run whose folder this is, if it is one's.
    ///
    /// Errors: those of the system.
    pub fn shared(&self) -> Result<Option<Shared>> {
        Shared::find(&self.run.folder)
    }

    /// Makes this the folder of a shared run that makes `files` (name and size in bytes).
    ///
    /// Errors: those of the system.
    pub fn share(&self, files: Vec<(String, u64)>, work: serde_json::Value) -> Result<Shared> {
        self.journal.secure()?;
        Shared::begin(&self.run.folder, files, work)
    }

    /// Goes on with the files of a round that this process has begun, and notes what it does in the journal of a member
    /// of it, if there is one.
    pub fn enter(&mut self, claimed: &Claimed, member: Option<&Member>) {
        self.run.data.clone_from(&claimed.data);
        if let Some(member) = member {
            self.journal = Arc::clone(member.journal());
        }
    }

    /// Keeps a member at work as long as this lives.
    pub fn accompany(&mut self, member: Member) {
        self.member = Some(member);
    }

    /// Opens the data file `name`, which is there, for reading only.
    ///
    /// Errors: those of the system.
    pub fn read_only(&self, name: &str, size: u64) -> Result<OutFile> {
        self.check(name)?;
        let (folder, last) =
            self.data()?.folder_of(name, false).at(&self.path().join(name), "cannot open")?;
        OutFile::for_reading(&folder, last, size)
    }

    /// The staging folder, for messages.
    pub fn folder(&self) -> &Path {
        &self.path
    }

    /// The directory whose content becomes the result. Writers that take a path (zarr) write here;
    /// what they leave, subdirectories too, is synced and published with the rest.
    pub fn path(&self) -> PathBuf {
        self.path.join(&self.run.data)
    }

    /// True if an earlier run of the plan is continued.
    pub fn resumed(&self) -> bool {
        self.resumed
    }

    /// True if an earlier run was interrupted while it published: its result is complete, nothing
    /// may be written any more, and [`Staging::publish`] finishes it.
    pub fn sealed(&self) -> bool {
        self.run.seal.is_some()
    }

    /// True if the manifest in [`Staging::path`] is that of the result that was sealed: after an exchange the
    /// older result lies there.
    ///
    /// Errors: those of the system.
    pub fn holds_sealed(&self) -> Result<bool> {
        self.run.seal.as_ref().map_or(Ok(false), |seal| seal.is_in(&self.run.folder, self.run.place.inside))
    }

    /// Takes the seal off, so that the result can be written to again; false where a part of it has appeared
    /// already.
    ///
    /// Errors: those of the system.
    pub fn unseal(&mut self) -> Result<bool> {
        let Some(seal) = &self.run.seal else { return Ok(true) };
        if !seal.is_untouched(&self.run.place, &self.run.folder)? {
            return Ok(false);
        }
        Seal::remove(&self.run.folder)?;
        log::debug!(target: topics::PUBLISH, "removes the seal of {:?}: its companion files changed", self.path);
        if let Some(finding) = self.run.place.refused(&self.run.before, self.run.options.overwrite)? {
            return Err(finding.into());
        }
        self.run.seal = None;
        Ok(true)
    }

    /// What can be told before the work of the way the older result will be replaced: a warning if that cannot be one
    /// step. What keeps it from being looked at is for the end to say.
    pub fn forecast(&self) -> Option<Finding> {
        let run = &self.run;
        let replaces = matches!(run.before, Occupied::Full { .. }) && !run.place.inside;
        let older = run.place.open_out().ok()?.filter(|_| replaces)?;
        older.is_layered(&run.folder).unwrap_or(false).then(|| in_steps(&run.place))
    }

    /// Warnings about what interrupted runs of other plans have left at the same destination.
    pub fn left_beside(&self, version: u32) -> Vec<Finding> {
        others::left(&self.run.place, Some(version))
    }

    /// What is done so far, and what the earlier runs recorded.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    fn data(&self) -> Result<Dir> {
        self.run.folder.sub(OsStr::new(&self.run.data)).at(&self.path(), "cannot open")
    }

    /// Removes whatever an earlier run left but the files `names`: what this run does not write must not be
    /// published with it.
    ///
    /// Errors: those of the system.
    pub fn keep_only(&self, names: &BTreeSet<&str>) -> Result<()> {
        self.refuse_sealed()?;
        content::prune(&self.data()?, "", names)
    }

    /// True if the data file `name` is there with this size, and has no other name: else it is made anew.
    ///
    /// Errors: as [`Staging::file`].
    pub fn has(&self, name: &str, size: u64) -> Result<bool> {
        self.check(name)?;
        let (folder, last) = match self.data()?.folder_of(name, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            found => found.at(&self.path().join(name), "cannot open the folder of")?,
        };
        let stat = folder.stat(last).at(&self.path().join(name), "cannot stat")?;
        let is_own = |s: Stat| {
            FileType::from_raw_mode(s.st_mode).is_file() && s.st_size as u64 == size && s.st_nlink <= 1
        };
        Ok(stat.is_some_and(is_own))
    }

    /// Opens or creates the data file `name` with exactly `size` bytes.
    ///
    /// Errors: `UNSAFE_PATH` unless `name` stays below the result; `NO_SPACE`; errors of the system.
    pub fn file(&self, name: &str, size: u64, space: Space) -> Result<OutFile> {
        let (folder, last) = self.target(name)?;
        OutFile::open(&folder, last, size, space, self.run.options.fsync, self.run.options.io)
    }

    /// Creates the file `name`, empty, and what its data is brought to disk by.
    fn small(&self, name: &str) -> Result<(File, PathBuf)> {
        let (folder, last) = self.target(name)?;
        let path = folder.join(last);
        let file = folder.create(last).at(&path, "cannot create")?;
        Ok((file, path))
    }

    /// Brings a file's data to disk, if that is asked for or the filesystem reports lost writes no earlier.
    ///
    /// Errors: those of the system.
    pub fn sync(&self, file: &File, path: &Path) -> Result<()> {
        match self.run.options.fsync || disk::is_network(file) {
            true => disk::sync_all(file, path).at(path, "cannot bring to disk"),
            false => Ok(()),
        }
    }

    /// Takes note of a file of the result that was brought to disk with its times, after all that was written to it.
    pub fn note_synced(&self, name: &str) {
        self.synced.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_string());
    }

    /// Ends the writing of a small file: its data on disk, its hash noted for the manifest.
    fn written(&self, name: &str, file: &File, path: &Path, hash: blake3::Hash) -> Result<()> {
        self.sync(file, path)?;
        self.note_synced(name);
        let mut hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        hashes.insert(name.to_string(), hash.to_hex().to_string());
        Ok(())
    }

    /// Writes a small file (index, config) whole, replacing one that an earlier run left.
    ///
    /// Errors: as [`Staging::file`].
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (file, path) = self.small(name)?;
        disk::write_at(&file, &path, 0, bytes).at(&path, "cannot write")?;
        self.written(name, &file, &path, blake3::hash(bytes))
    }

    /// Copies the file `source` (tokenizer files and the like); mode by umask, not the source's. `each` is told of bytes as they
    /// are copied, and may stop it.
    ///
    /// Errors: `SOURCE_CHANGED` if its length changes meanwhile, or its BLAKE3 is another than the one expected; `UNSUPPORTED` if it is no regular file.
    pub fn copy_in(
        &self,
        name: &str,
        source: &Path,
        expected: Option<&str>,
        each: &dyn Fn(u64) -> Result<()>,
    ) -> Result<()> {
        let mut from = content::companion(source)?;
        let meta = from.metadata().at(source, "cannot stat")?;
        let (file, path) = self.small(name)?;
        let (mut hasher, mut copied) = (blake3::Hasher::new(), 0);
        let mut buffer = memory::allocate(256 << 10)?;
        // One byte more than it had tells that it grew.
        while copied <= meta.len() {
            let n = match from.read(&mut buffer).at(source, "cannot read")? {
                0 => break,
                n => n,
            };
            hasher.update(&buffer[..n]);
            let doing = format!("cannot copy {}", source.display());
            disk::write_at(&file, &path, copied, &buffer[..n]).at(&path, &doing)?;
            copied += n as u64;
            each(n as u64)?;
        }
        if copied != meta.len() {
            return Err(Finding::new(codes::SOURCE_CHANGED, "changed while it was copied")
                .file(source)
                .expected(format!("{} bytes", meta.len()), format!("{copied} bytes"))
                .into());
        }
        let hash = hasher.finalize();
        if let Some(expected) = expected.filter(|expected| *expected != hash.to_hex().as_str()) {
            // It may be a file that nobody meant to pass on.
            file.set_len(0).at(&path, "cannot empty")?;
            return Err(Finding::new(codes::SOURCE_CHANGED, "other bytes than when the run began")
                .file(source)
                .expected(format!("blake3 {expected}"), format!("blake3 {hash}"))
                .help("run again once nothing writes to the checkpoint")
                .into());
        }
        self.written(name, &file, &path, hash)
    }

    /// Every file of the result as it lies here, by name, as the manifest lists it: small ones by their
    /// hash, large ones by size and time. The manifest itself is left out.
    ///
    /// Errors: those of the system.
    pub fn listing(&self) -> Result<Vec<ManifestFile>> {
        let hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut files = Vec::new();
        content::list(&self.data()?, "", &hashes, &mut files)?;
        Ok(files)
    }

    /// Makes the result appear at its destination, the top-level names in `last` after all others
    /// where it cannot appear at once; the final one is the pointer readers start from. When `go_on` says
    /// no, what can be left to a later run is.
    ///
    /// Gives warnings about what could not be cleaned up. On an error the folder is kept.
    /// Errors: `PUBLISH_CONFLICT` if the destination is not what it was at [`Staging::begin`];
    /// `USAGE` if a name in `last` was not written; `INTERRUPTED`; errors of the system. One that comes
    /// after the result appeared says so ([`Error::is_after_publishing`]).
    pub fn publish(self, last: &[&str], go_on: &dyn Fn() -> bool) -> Result<Vec<Finding>> {
        let is_shared = self.run.seal.is_none() && self.shared()?.is_some();
        drop(self.journal);
        let member = self.member;
        let synced = self.synced.into_inner().unwrap_or_else(PoisonError::into_inner);
        let may_publish = || member.as_ref().map_or(Ok(()), Member::still_writes);
        rename::publish(self.run, last, &synced, is_shared, &may_publish, go_on)
    }

    /// Removes the folder with all that was written, unless another process has taken the run over. Refused (`USAGE`)
    /// once sealed.
    pub fn discard(self) -> Result<()> {
        self.refuse_sealed()?;
        // Before it is asked who owns the folder: a later round makes its directory after its claim.
        let mut data = entries(&self.run.folder)?;
        data.retain(|name| is_data(name));
        if self.shared()?.is_some_and(|shared| !shared.is_own().unwrap_or(false)) {
            return Ok(());
        }
        drop(self.journal);
        log::debug!(target: topics::PUBLISH, "removes the staging directory {:?}", self.path);
        remove_folder(&self.run.place, &self.run.folder, &data, self.run.lock)
    }

    fn refuse_sealed(&self) -> Result<()> {
        match self.run.seal {
            None => Ok(()),
            Some(_) => Err(Finding::new(
                codes::USAGE,
                "the result is complete and partly in place; it can only be put in place",
            )
            .file(&self.path)
            .into()),
        }
    }

    fn check(&self, name: &str) -> Result<()> {
        if is_plain(name) {
            return Ok(());
        }
        Err(Finding::new(codes::UNSAFE_PATH, "name of a result file")
            .file(&self.run.place.out)
            .expected("a relative path without `..`", name)
            .into())
    }

    fn target<'n>(&self, name: &'n str) -> Result<(Dir, &'n OsStr)> {
        self.refuse_sealed()?;
        self.check(name)?;
        self.data()?.folder_of(name, true).at(&self.path().join(name), "cannot create the folders of")
    }
}
