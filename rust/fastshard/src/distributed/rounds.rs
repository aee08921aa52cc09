//! One run by several processes, on one host or on many: one staging folder, a journal for each, no other way to talk.
//!
//! ```text
//!            begin            claim 1, share out                all parts done: claim n        seal, publish
//! (nothing) ------> files made -----------------> round 1 at work ------------------> conclude ---------> OUT
//!                                                   |      ^                            |
//!                                   some never came |      | claim n, share out         | died, or was refused
//!                                                   v      | what is left               v
//!                                                  (left for `resume`, by any number of processes)
//! ```
//!
//! | file             | written by                | holds                                                             |
//! |------------------|---------------------------|-------------------------------------------------------------------|
//! | `run.json`       | who begins, once          | the run's nonce, what it makes, the size of each output's tiles   |
//! | `claim-N`        | who begins round N, created exclusively | the round's nonce and its process                   |
//! | `state`          | the same, in place        | nonce of the round that may open files                            |
//! | `data.NONCE/`    | that round                | the files, made at full size before any part begins               |
//! | `round-N.json`   | the same, when all is ready | the parts, and the members of earlier rounds whose work counts  |
//! | `member-NONCE`   | one member                | its journal: files opened and closed, tiles, edges, signs of life |
//! | `evidence-NONCE` | that member, at its end   | what it learnt of the sources                                     |
//!
//! **Safety rests on no clock.** A process may stop at any instant and wake up when the result is published. What it can
//! still write to are descriptors that it holds. So a member (whoever makes the files for a round is one too) notes, on
//! disk, that it opens a file, looks into `state`, and only then opens it; members with a part create nothing. Whoever begins the next round (concluding is one) first creates its
//! claim, writes `state`, and moves every file into a directory of its own, so that a directory that somebody holds is
//! empty; then it reads all journals, and what a member noted to have open and not closed becomes a new file
//! ([`member::renew`]), unless that member's process is proven dead. A woken one holds files that are not published. If
//! it is woken between its note and its look, it sees the new `state`, or its note is seen. Likewise whoever seals looks
//! into `state` before it publishes, and whoever claims looks for a seal before it moves a file.
//!
//! **Signs of life decide progress only**: who is silent may be passed over, who is not is waited for. They are counted
//! on the watcher's own clock; the times of several hosts are never compared.
//!
//! **Pages.** Two hosts that write to one page of a file over a network filesystem lose each other's bytes. Bytes in
//! pages of 64 KiB that belong to several parts go into the journals, and whoever concludes writes them.
//!
//! Out of the promise: mounts on which a file opened anew does not show what others have closed (NFS with `nocto`), and
//! results that are not brought to disk (several processes always do).

mod files;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::member::{self, nonce, Log, Member, Watch, Who};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::publish::clock::{Clock, Patience, Watched};
use crate::publish::disk::{self, At, Dir};
use crate::publish::file::OutFile;
use crate::publish::folder::{check_owner, entries, CLAIM, MAX_OWN, MEMBER, ROUND, RUN, STATE};
use crate::publish::mounts;
use crate::publish::others;
use crate::publish::place::Place;
use crate::publish::process::Process;
use crate::publish::seal::Seal;

/// Bytes of `state`, which is written in place, so that processes that have it open see it too.
const STATE_BYTES: usize = 64;
/// Largest description of a round, in bytes.
const MAX_ROUND: u64 = 1 << 30;
/// Maximum number of rounds of one run.
const MAX_ROUNDS: u32 = 100_000;
/// Time between two looks at journals.
const LOOK: Duration = Duration::from_millis(50);

/// The description of a run's work; the caller's data is in `work`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunDocument {
    /// The run, as no other one is called.
    pub nonce: String,
    /// Data files: name and size in bytes.
    pub files: Vec<(String, u64)>,
    /// What is made, in the caller's words.
    pub work: serde_json::Value,
}

/// A round, with its division of work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Its number, from 1.
    pub number: u32,
    /// Its nonce.
    pub nonce: String,
    /// How many parts there are.
    pub parts: u32,
    /// Who makes what, in the caller's words.
    pub work: serde_json::Value,
}

#[derive(Debug, Serialize, Deserialize)]
struct Claim {
    nonce: String,
    process: Process,
}

/// A round that has begun: nobody else writes to the files any more.
#[derive(Debug)]
pub struct Claimed {
    /// Its number.
    pub number: u32,
    /// Its nonce.
    pub nonce: String,
    /// The folder's entry with the files.
    pub(crate) data: String,
    /// All journals, as they were after it began.
    pub logs: Vec<Log>,
    /// Files that somebody may still have open, which have been copied: what is said of them has to be looked at.
    pub renewed: BTreeSet<u32>,
}

/// The staging folder of a shared run.
#[derive(Debug)]
pub struct Shared {
    pub(crate) folder: Dir,
    /// What is made.
    pub run: RunDocument,
}

/// The result of taking up a part.
#[derive(Debug)]
pub enum Joined {
    /// It is now this process's part.
    Member(Member),
    /// It is done already, by this member.
    Done(String),
}

impl Shared {
    /// Records the work in a staging folder that this process holds.
    pub(crate) fn begin(folder: &Dir, files: Vec<(String, u64)>, work: serde_json::Value) -> Result<Shared> {
        let run = RunDocument { nonce: nonce(), files, work };
        folder.write_whole(RUN, &serde_json::to_vec(&run).expect("plain data"), true)?;
        Ok(Shared { folder: folder.again().at(folder.path(), "cannot open")?, run })
    }

    /// The shared run in a staging folder, if it is one.
    pub(crate) fn find(folder: &Dir) -> Result<Option<Shared>> {
        let path = folder.join(RUN);
        let Some(bytes) = folder.read_small(RUN, MAX_OWN).at(&path, "cannot read")? else { return Ok(None) };
        let run = serde_json::from_slice(&bytes).map_err(|e| unreadable(&path, &e))?;
        Ok(Some(Shared { folder: folder.again().at(folder.path(), "cannot open")?, run }))
    }

    /// Enters the existing run `run_id` (digest of `plan`) towards `out`; with `nonce`, only that very run.
    ///
    /// Errors: `NO_SUCH_PATH` if it does not exist; `LEFTOVER_RUN` if the folder has another run.
    pub fn enter(out: &Path, run_id: &str, plan: &[u8], nonce: Option<&str>) -> Result<Shared> {
        let place = Place::find(out, run_id)?;
        let path = place.folder_path();
        let absent = || {
            Finding::new(codes::NO_SUCH_PATH, "the run is missing")
                .file(&path)
                .help(format!(
                    "use the disk, the sources and the options with which the run started, unless it has ended; this is {}",
                    mounts::describe_storage(place.base.path())
                ))
        };
        let folder = match place.base.sub(&place.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(absent().into()),
            folder => folder.at(&path, "cannot open the staging folder")?,
        };
        check_owner(&place, &folder)?;
        let found = folder.read_small("plan", MAX_OWN).at(&folder.join("plan"), "cannot read")?;
        let Some(shared) = Shared::find(&folder)? else { return Err(absent().into()) };
        if found.as_deref() != Some(plan) {
            return Err(other(&folder, "of another plan, or made by another version"));
        }
        match nonce {
            Some(nonce) if !shared.run.nonce.starts_with(nonce) => {
                Err(other(&folder, &format!("called {}", shared.run.nonce)))
            }
            _ => Ok(shared),
        }
    }

    /// The run towards `out` whose nonce begins with `nonce`, whatever its plan.
    ///
    /// Errors: `NO_SUCH_PATH` if there is no such run.
    pub fn called(out: &Path, nonce: &str) -> Result<Shared> {
        let place = Place::find(out, &"0".repeat(16))?;
        let absent = || {
            Finding::new(codes::NO_SUCH_PATH, format!("no run called {nonce} is here"))
                .file(&place.out)
                .expected(
                    "the run where it was begun",
                    format!("nothing of it on {}", mounts::describe_storage(place.base.path())),
                )
                .help("use a host that sees the disk on which the run started, unless the run has ended")
        };
        if nonce.len() < 8 {
            return Err(Finding::new(codes::USAGE, "a run is called by 8 digits at least")
                .expected("as it was printed", nonce)
                .into());
        }
        for name in others::folders(&place)? {
            let folder = match place.base.sub(&name) {
                // Gone meanwhile, or another user's.
                Err(e) if [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied].contains(&e.kind()) => {
                    continue
                }
                folder => folder.at(&place.base.join(&name), "cannot open")?,
            };
            check_owner(&place, &folder)?;
            match Shared::find(&folder)? {
                Some(shared) if shared.run.nonce.starts_with(nonce) => return Ok(shared),
                _ => {}
            }
        }
        Err(absent().into())
    }

    /// Path of the staging folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The round that has begun last, once it is ready.
    ///
    /// Errors: those of the system.
    pub fn round(&self) -> Result<Option<Round>> {
        for number in (1..=self.claims()?).rev() {
            let name = format!("{ROUND}{number}.json");
            let path = self.folder.join(&name);
            if let Some(bytes) = self.folder.read_small(&name, MAX_ROUND).at(&path, "cannot read")? {
                return serde_json::from_slice(&bytes).map(Some).map_err(|e| unreadable(&path, &e));
            }
        }
        Ok(None)
    }

    /// Number of claims so far: they are numbered without gaps.
    fn claims(&self) -> Result<u32> {
        let mut number = 0;
        while number < MAX_ROUNDS {
            let name = format!("{CLAIM}{}", number + 1);
            if !self.folder.has(&name).at(&self.folder.join(&name), "cannot stat")? {
                break;
            }
            number += 1;
        }
        Ok(number)
    }

    /// All journals as they are now.
    ///
    /// Errors: those of the system.
    pub fn logs(&self) -> Result<Vec<Log>> {
        let names = entries(&self.folder)?;
        names
            .iter()
            .filter(|name| name.starts_with(MEMBER))
            .map(|name| Log::read(&self.folder, name))
            .collect()
    }

    /// Parts of a round that are finished.
    ///
    /// Errors: those of the system.
    pub fn done_parts(&self, round: u32) -> Result<BTreeSet<u32>> {
        let mut done = BTreeSet::new();
        for name in entries(&self.folder)?.iter().filter(|name| name.starts_with(MEMBER)) {
            if let (Some(who), true) = member::glance(&self.folder, name)? {
                done.extend(who.part.filter(|_| who.round == round));
            }
        }
        Ok(done)
    }

    /// The evidence of a member.
    ///
    /// Errors: as for reading it; `IO` if it is not as the member wrote it.
    pub fn evidence(&self, log: &Log) -> Result<Vec<u8>> {
        log.evidence(&self.folder)
    }

    /// Members that may be at work: their journal does not say that they have ended, their process is not
    /// proven dead, and they show a sign of life within `patience`.
    ///
    /// Errors: those of the system.
    pub fn alive(&self, patience: &Patience, go_on: &dyn Fn() -> bool) -> Result<Vec<Who>> {
        self.alive_of(&|_| true, patience, go_on)
    }

    /// The same for the given members only: the function does not wait for a sign of life of the others.
    fn alive_of(
        &self,
        wanted: &dyn Fn(&Option<Who>) -> bool,
        patience: &Patience,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Vec<Who>> {
        let open = |log: &Log| !log.has_ended() && wanted(&log.who);
        let mut watch = Watch::default();
        let mut suspects: Vec<Log> = self.logs()?.into_iter().filter(open).collect();
        let mut alive = Vec::new();
        suspects.iter().for_each(|log| {
            watch.moves(&self.folder, &log.nonce);
        });
        // From now on: to read the journals of a large run takes a while, in which nobody was watched.
        let Patience { time, clock } = patience;
        let mut watched = Watched::begin(clock.now(), *time);
        while !suspects.is_empty() && watched.time() < *time && go_on() {
            clock.sleep(LOOK.min(*time));
            let now = clock.now();
            suspects.retain(|log| {
                let beats = watch.moves(&self.folder, &log.nonce);
                if beats {
                    alive.extend(log.who.clone());
                }
                !beats
            });
            watched.look(now);
        }
        Ok(alive)
    }

    /// Begins the next round: from now on no other process writes to the files of the result.
    ///
    /// Errors: `LOCKED` if another process does so at the same time; errors of the system.
    pub fn claim(&self) -> Result<Claimed> {
        self.refuse_sealed()?;
        let number = self.claims()? + 1;
        let claim = Claim { nonce: nonce(), process: Process::own() };
        let (name, nonce) = (format!("{CLAIM}{number}"), claim.nonce.clone());
        let path = self.folder.join(&name);
        let file = match self.folder.create_new(OsStr::new(&name)) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(Finding::new(codes::LOCKED, "another process is taking this run over")
                    .file(self.folder.path())
                    .help("check its output; one such process is enough")
                    .into())
            }
            file => file.at(&path, "cannot create")?,
        };
        disk::write_at(&file, &path, 0, &serde_json::to_vec(&claim).expect("plain data"))
            .at(&path, "cannot write")?;
        disk::sync_data(&file, &path).at(&path, "cannot bring to disk")?;
        self.folder.sync().at(self.folder.path(), "cannot bring to disk")?;
        self.refuse_later(number)?;
        self.set_state(&nonce)?;
        // Whoever seals looks into `state` afterwards: one of the two sees the other.
        self.refuse_sealed()?;
        let data = format!("data.{nonce}");
        self.gather(number, &data)?;
        let logs = self.logs()?;
        let mut renewed = BTreeSet::new();
        for log in logs.iter().filter(|log| !log.is_dead()) {
            renewed.extend(log.open.iter().copied());
        }
        self.renew(&data, &mut renewed)?;
        self.folder.sync().at(self.folder.path(), "cannot bring to disk")?;
        Ok(Claimed { number, nonce, data, logs, renewed })
    }

    fn set_state(&self, nonce: &str) -> Result<()> {
        let path = self.folder.join(STATE);
        let file = self.folder.open_or_create(OsStr::new(STATE)).at(&path, "cannot create")?;
        let text = format!("{nonce:<width$}\n", width = STATE_BYTES - 1);
        disk::write_at(&file, &path, 0, text.as_bytes()).at(&path, "cannot write")?;
        disk::sync_data(&file, &path).at(&path, "cannot bring to disk")
    }

    /// True unless another process has begun the last round; then this process must not remove the folder.
    pub(crate) fn is_own(&self) -> Result<bool> {
        let number = self.claims()?;
        let name = format!("{CLAIM}{number}");
        let bytes = self.folder.read_small(&name, MAX_OWN).at(&self.folder.join(&name), "cannot read")?;
        // One that was cut short is of this process, whose error is the reason to ask, or has moved nothing yet.
        let claim = bytes.and_then(|bytes| serde_json::from_slice::<Claim>(&bytes).ok());
        Ok(claim.is_none_or(|claim| claim.process == Process::own()))
    }

    /// Refuses to take files from a process that is about to publish them.
    fn refuse_sealed(&self) -> Result<()> {
        if !Seal::is_on(&self.folder)? {
            return Ok(());
        }
        Err(Finding::new(codes::LOCKED, "another process is publishing this run")
            .file(self.folder.path())
            .help("check its output; if that process is gone, put the result in place")
            .run("--resume")
            .into())
    }

    /// True if the last round has another directory than `data`, so that the seal there is obsolete.
    ///
    /// Errors: those of the system.
    pub(crate) fn is_overtaken(&self, data: &str) -> Result<bool> {
        let name = format!("{CLAIM}{}", self.claims()?);
        let bytes = self.folder.read_small(&name, MAX_OWN).at(&self.folder.join(&name), "cannot read")?;
        let claim = bytes.and_then(|bytes| serde_json::from_slice::<Claim>(&bytes).ok());
        // One that was cut short has moved nothing.
        Ok(claim.is_some_and(|claim| data != format!("data.{}", claim.nonce)))
    }

    /// Refuses to continue a round after which another one has begun.
    fn refuse_later(&self, number: u32) -> Result<()> {
        if self.claims()? == number {
            return Ok(());
        }
        Err(Finding::new(codes::LOCKED, "another process has taken this run over")
            .file(self.folder.path())
            .help("check its output; one such process is enough")
            .into())
    }

    /// Lets the parts of a round begin.
    ///
    /// Errors: those of the system.
    pub fn open_round(&self, claimed: &Claimed, parts: u32, work: serde_json::Value) -> Result<Round> {
        let round = Round { number: claimed.number, nonce: claimed.nonce.clone(), parts, work };
        let name = format!("{ROUND}{}.json", round.number);
        self.folder.write_whole(&name, &serde_json::to_vec(&round).expect("plain data"), true)?;
        Ok(round)
    }

    /// Takes up a part of a round. A part that another process has begun is taken over if that process shows
    /// no sign of life for `patience`.
    ///
    /// Errors: `LOCKED` if another process is at work on it; errors of the system.
    pub fn join(
        &self,
        round: &Round,
        part: u32,
        patience: &Patience,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Joined> {
        let of_part = |who: &Option<Who>| {
            who.as_ref().is_some_and(|who| (who.round, who.part) == (round.number, Some(part)))
        };
        let done = self.logs()?.into_iter().find(|log| of_part(&log.who) && log.is_done);
        if let Some(done) = done {
            return Ok(Joined::Done(done.nonce));
        }
        let who = Who { round: round.number, part: Some(part), process: Process::own() };
        if let Some(other) = self.alive_of(&of_part, patience, go_on)?.into_iter().next() {
            return Err(Finding::new(codes::LOCKED, format!("part {part} is being made by another process"))
                .file(self.folder.path())
                .rank(format!("rank {part}"))
                .expected("one process for each part", other.process.describe())
                .help("start each process with its own rank; a rank that died can be started again once it shows no sign of life")
                .into());
        }
        Member::begin(&self.folder, &round.nonce, &who, &patience.clock).map(Joined::Member)
    }

    /// A data file as the parts have written it, for reading.
    ///
    /// Errors: those of the system.
    pub fn written(&self, claimed: &Claimed, name: &str, size: u64) -> Result<OutFile> {
        let path = self.folder.join(&claimed.data);
        let data = self.folder.sub(OsStr::new(&claimed.data)).at(&path, "cannot open")?;
        let (folder, last) = data.folder_of(name, false).at(&path.join(name), "cannot open the folder of")?;
        OutFile::for_reading(&folder, last, size)
    }

    /// Takes up the work of a single process in a round: making the files before the parts begin, or
    /// concluding the run.
    ///
    /// Errors: those of the system.
    pub fn preside(&self, claimed: &Claimed, clock: &Clock) -> Result<Member> {
        Member::begin(
            &self.folder,
            &claimed.nonce,
            &Who { round: claimed.number, part: None, process: Process::own() },
            clock,
        )
    }
}

fn unreadable(path: &Path, error: &serde_json::Error) -> Error {
    Finding::new(codes::LEFTOVER_RUN, format!("what is written of the run cannot be read ({error})"))
        .file(path)
        .help("start afresh: remove the staging directory")
        .into()
}

fn other(folder: &Dir, what: &str) -> Error {
    Finding::new(codes::LEFTOVER_RUN, format!("the staging folder holds another run: {what}"))
        .file(folder.path())
        .help("start the run again, and pass the printed id to its parts")
        .into()
}
