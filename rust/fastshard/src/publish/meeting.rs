//! Ranks of one run find each other, through the directory of the destination alone.
//!
//! ```text
//!            rank 0 has seen all      all hold one plan     its round is open      all parts done
//! meeting ------------------------> met --------------> agreed ----------> working ---------> published
//!    |                               |                     |                  |
//!    +-------------------------------+---------------------+------------------+------> stopped (by any rank)
//! ```
//!
//! Each rank has one card, `rank-00000.json`, which it alone writes, whole, again and again: a counter in it is its sign
//! of life. Names are known beforehand, so that nobody depends on a listing that a file server's client has kept.
//!
//! **What is left of an earlier run proves nothing.** Each process has a nonce of its own. A rank answers with the nonce
//! of the rank 0 that it reads; rank 0 counts a rank that answers with *its* nonce; a rank has been seen once rank 0's
//! card lists the rank's own nonce. So both have read what the other wrote just now, on one storage. A rank whose disk
//! is its own sees no such card, and is seen by none.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::disk::{self, At, Dir};
use super::folder::{check_owner, entries};
use super::gc::{Fate, Leaving};
use super::mounts;
use super::place::Place;
use super::process::Process;
use super::shared::nonce;
use crate::codes;
use crate::error::{Error, Finding, Result};

/// Time between two looks at the other ranks' cards, and the most of it with very many.
const LOOK: Duration = Duration::from_millis(100);
const LOOK_AT_MOST: Duration = Duration::from_secs(1);
/// Ranks that are looked at in [`LOOK`].
const MANY: u32 = 16;
/// A card is written again after this time, if nothing else changes.
const BEAT_EVERY: Duration = Duration::from_millis(500);
/// Time in which a process that holds a rank shows that it is there.
const HELD_FOR: Duration = Duration::from_millis(2500);
/// Time that others are given to read the end of a run, before its cards are removed.
const FAREWELL: Duration = Duration::from_secs(3);
/// Time by which the others let rank 0 go first with what it has to say.
const GRACE: Duration = Duration::from_secs(1);
/// Most ranks of a run.
pub const MAX_WORLD: u32 = 100_000;
/// Largest card, in bytes.
const MAX_CARD: u64 = 16 << 20;
/// Files named of those that differ.
const NAMED: usize = 8;

/// How far a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It looks for the others.
    Meeting,
    /// Rank 0 has seen all.
    Met,
    /// All hold the same plan.
    Agreed,
    /// The run has begun.
    Working,
    /// The result is published.
    Published,
    /// Something went wrong: the findings say what.
    Stopped,
}

/// Where the parts of a run are to be found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The run's nonce.
    pub run: String,
    /// The number of its round.
    pub round: u32,
}

/// What a rank says of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Card {
    /// Its number, and of how many.
    pub rank: u32,
    /// How many ranks there are.
    pub world: u32,
    /// This process, as no other one is called.
    nonce: String,
    /// Counts up as long as it lives.
    beat: u64,
    /// Who it is.
    pub process: Process,
    /// What lies under the destination, for people.
    pub storage: String,
    /// What it was started with; must be the same for all.
    words: BTreeMap<String, serde_json::Value>,
    /// Nonce of the rank 0 that it has read.
    answers: Option<String>,
    /// Of rank 0: nonces of the ranks it has seen.
    seen: BTreeMap<u32, String>,
    /// How far it is.
    pub phase: Phase,
    /// Digest of its plan, and what it was made of: paths and sizes of files.
    plan: Option<String>,
    /// The run, once it has begun.
    opened: Option<Opened>,
    /// Why it stopped.
    findings: Vec<Finding>,
}

/// How a rank takes part.
#[derive(Debug, Clone)]
pub struct About {
    /// Its number.
    pub rank: u32,
    /// How many ranks there are.
    pub world: u32,
    /// How long it waits for the others.
    pub timeout: Duration,
    /// What it was started with; must be the same for all.
    pub words: BTreeMap<String, serde_json::Value>,
    /// Hosts by rank, as far as the launcher tells.
    pub hosts: Vec<String>,
}

/// A rank among others. Dropping it takes its card away.
#[derive(Debug)]
pub struct Meeting {
    about: About,
    table: Arc<Table>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Table {
    base: Dir,
    name: OsString,
    folder: Dir,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    card: Card,
    /// What it was when it was written last, and when.
    written: Option<(u64, Instant)>,
    /// Counts changes of the card.
    changes: u64,
    /// Cards of the others that answer: rank 0 has all, others have that of rank 0.
    others: BTreeMap<u32, Heard>,
    /// True once the thread is to end.
    ended: bool,
    /// What keeps the thread from going on.
    failed: Option<Finding>,
}

/// A card as it was read last.
#[derive(Debug, Clone)]
struct Heard {
    card: Card,
    /// When its counter was seen to move.
    moved: Instant,
    /// True once it has moved at all: what lies there from earlier does not.
    lives: bool,
}

fn file_of(rank: u32) -> String {
    format!("rank-{rank:05}.json")
}

fn sources_of(rank: u32) -> String {
    format!("sources-{rank:05}.json")
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, rank: u32) -> Option<Card> {
        // What is half written, or not there yet, is read the next time.
        let bytes = self.folder.read_small(&file_of(rank), MAX_CARD).ok().flatten()?;
        serde_json::from_slice(&bytes).ok().filter(|card: &Card| card.rank == rank)
    }

    /// Writes the card as it is now, whole.
    fn write(&self, state: &mut State) -> Result<()> {
        state.card.beat += 1;
        let bytes = serde_json::to_vec(&state.card).expect("plain data");
        let (name, fresh) = (file_of(state.card.rank), format!("{}.new", state.card.nonce));
        let path = self.folder.join(&fresh);
        let file = self.folder.create(OsStr::new(&fresh)).at(&path, "cannot create")?;
        disk::write_at(&file, &path, 0, &bytes).at(&path, "cannot write")?;
        if disk::is_network(&file) {
            disk::sync_data(&file, &path).at(&path, "cannot bring to disk")?;
        }
        self.folder
            .rename_over(OsStr::new(&fresh), &self.folder, OsStr::new(&name))
            .at(&self.folder.join(&name), "cannot rename into place")?;
        state.written = Some((state.changes, Instant::now()));
        Ok(())
    }

    /// One look at the others, and a sign of life.
    fn turn(&self) -> Result<()> {
        let (rank, world) = {
            let state = self.lock();
            (state.card.rank, state.card.world)
        };
        let own = self.read(rank);
        let wanted: Vec<u32> = if rank == 0 { (1..world).collect() } else { vec![0] };
        let cards: Vec<Card> = wanted.into_iter().filter_map(|other| self.read(other)).collect();
        let mut state = self.lock();
        if let Some(own) = own.filter(|own| own.nonce != state.card.nonce) {
            let holds = rank != 0
                && state
                    .others
                    .get(&0)
                    .is_some_and(|zero| zero.card.seen.get(&rank) == Some(&state.card.nonce));
            if !holds
                && !own.process.is_dead()
                && (state.card.phase > Phase::Meeting || own.nonce < state.card.nonce)
            {
                return Err(taken(&own));
            }
        }
        let now = Instant::now();
        for card in cards {
            let heard = state.others.entry(card.rank).or_insert_with(|| Heard {
                card: card.clone(),
                moved: now,
                lives: false,
            });
            if (&heard.card.nonce, heard.card.beat) != (&card.nonce, card.beat) {
                (heard.moved, heard.lives) = (now, true);
                heard.card = card;
            }
        }
        if rank == 0 {
            self.see(&mut state);
        } else if let Some(zero) = state.others.get(&0) {
            let answer = Some(zero.card.nonce.clone());
            if state.card.answers != answer {
                state.card.answers = answer;
                state.changes += 1;
            }
        }
        let due = |(changes, at): (u64, Instant)| changes != state.changes || at.elapsed() >= BEAT_EVERY;
        if state.written.is_none_or(due) {
            self.write(&mut state)?;
        }
        Ok(())
    }

    /// Rank 0 lists those that answer it.
    fn see(&self, state: &mut State) {
        let own = state.card.nonce.clone();
        let answering: Vec<(u32, String)> = state
            .others
            .values()
            .filter(|heard| heard.card.answers.as_ref() == Some(&own))
            .map(|heard| (heard.card.rank, heard.card.nonce.clone()))
            .collect();
        for (rank, nonce) in answering {
            if state.card.seen.get(&rank) != Some(&nonce) {
                state.card.seen.insert(rank, nonce);
                state.changes += 1;
            }
        }
    }
}

fn taken(other: &Card) -> Error {
    Finding::new(codes::LOCKED, format!("rank {} is held by another process, which is alive", other.rank))
        .rank(format!("rank {}", other.rank))
        .expected("one process for each rank", other.process.told())
        .help("give each process a rank of its own; one that was restarted takes its rank over once the first is gone")
        .into()
}

impl Meeting {
    /// Meets the other ranks at the directory of `out`: returns once rank 0 has seen all of them, and this one has seen
    /// that.
    ///
    /// # Errors
    /// `FS522` if that does not come within the timeout, with the ranks that did not come; `FS524` if ranks were started
    /// with other words; `FS509` if another process has this rank; what the system says of the directory.
    pub fn begin(out: &Path, about: About, go_on: &dyn Fn() -> bool) -> Result<Meeting> {
        if about.world == 0 || about.world > MAX_WORLD || about.rank >= about.world {
            return Err(Finding::new(codes::USAGE, "rank and number of ranks")
                .expected(
                    format!("a rank from 0 up to a number of ranks of {MAX_WORLD} at most"),
                    format!("rank {} of {}", about.rank, about.world),
                )
                .into());
        }
        let mut meeting = Meeting::open(out, about)?;
        meeting.take_rank(go_on)?;
        meeting.start();
        meeting.meet(go_on).inspect_err(|error| meeting.stop(error.findings()))?;
        Ok(meeting)
    }

    fn open(out: &Path, about: About) -> Result<Meeting> {
        let place = Place::find(out, "0000000000000000")?;
        let name = place.meeting_name();
        let path = place.base.join(&name);
        match place.base.create_dir(&name, disk::PRIVATE) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.at(&path, "cannot create the folder in which ranks meet")?,
        }
        let folder = place.base.sub(&name).at(&path, "cannot open the folder in which ranks meet")?;
        check_owner(&place, &folder)?;
        let card = Card {
            rank: about.rank,
            world: about.world,
            nonce: nonce(),
            beat: 0,
            process: Process::own(),
            storage: mounts::told(place.base.path()),
            words: about.words.clone(),
            answers: None,
            seen: BTreeMap::new(),
            phase: Phase::Meeting,
            plan: None,
            opened: None,
            findings: Vec::new(),
        };
        let (others, failed) = (BTreeMap::new(), None);
        let state = Mutex::new(State { card, written: None, changes: 0, others, ended: false, failed });
        Ok(Meeting { about, table: Arc::new(Table { base: place.base, name, folder, state }), thread: None })
    }

    /// Waits until a process that seems to hold this rank shows no sign of life.
    fn take_rank(&self, go_on: &dyn Fn() -> bool) -> Result<()> {
        let begun = Instant::now();
        let first = self.table.read(self.about.rank);
        while let Some(first) = first.as_ref().filter(|card| !card.process.is_dead()) {
            match self.table.read(self.about.rank) {
                Some(now) if (&now.nonce, now.beat) != (&first.nonce, first.beat) => return Err(taken(&now)),
                Some(_) if begun.elapsed() < HELD_FOR && go_on() => std::thread::sleep(LOOK),
                _ => break,
            }
        }
        Ok(())
    }

    fn start(&mut self) {
        let (table, world) = (Arc::clone(&self.table), self.about.world);
        let pause = (LOOK * world.div_ceil(MANY)).min(LOOK_AT_MOST);
        let turns = move || {
            while !table.lock().ended {
                if let Err(error) = table.turn() {
                    table.lock().failed = error.into_findings().into_iter().next();
                }
                std::thread::sleep(pause);
            }
        };
        self.thread = std::thread::Builder::new().name("fastshard-ranks".into()).spawn(turns).ok();
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.about.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> u32 {
        self.about.world
    }

    /// How long it waits for others.
    pub fn timeout(&self) -> Duration {
        self.about.timeout
    }

    /// All ranks as rank 0 sees them, for whoever asks which storage they have; of others rank 0 alone.
    pub fn cards(&self) -> Vec<Card> {
        let state = self.table.lock();
        let mut cards: Vec<Card> = state.others.values().map(|heard| heard.card.clone()).collect();
        cards.push(state.card.clone());
        cards.sort_by_key(|card| card.rank);
        cards
    }

    /// Changes what this rank says of itself.
    fn say(&self, change: impl FnOnce(&mut Card)) {
        let mut state = self.table.lock();
        change(&mut state.card);
        state.changes += 1;
    }

    /// Waits for something, and for no longer than the others show signs of life.
    ///
    /// `done` is asked with the cards; `late` says who has not come once the time is over.
    fn wait<T>(
        &self,
        go_on: &dyn Fn() -> bool,
        mut done: impl FnMut(&Card, &BTreeMap<u32, Heard>) -> Option<T>,
        late: impl Fn(&Card, &BTreeMap<u32, Heard>) -> Option<Vec<Finding>>,
    ) -> Result<T> {
        loop {
            if let Some(stopped) = self.stopped() {
                return Err(stopped);
            }
            if !go_on() {
                return Err(Finding::new(codes::INTERRUPTED, "stopped by the user").into());
            }
            {
                let state = self.table.lock();
                if let Some(found) = done(&state.card, &state.others) {
                    return Ok(found);
                }
                if let Some(findings) = late(&state.card, &state.others) {
                    return Err(findings.into());
                }
            }
            std::thread::sleep(LOOK / 4);
        }
    }

    fn meet(&self, go_on: &dyn Fn() -> bool) -> Result<()> {
        let (begun, rank, world) = (Instant::now(), self.about.rank, self.about.world);
        let over = || begun.elapsed() >= self.about.timeout;
        if rank == 0 {
            self.wait(
                go_on,
                |own, _| (own.seen.len() as u32 + 1 == world).then_some(()),
                |own, others| over().then(|| self.absent(own, others)),
            )?;
            self.alike()?;
            self.say(|card| card.phase = Phase::Met);
            return Ok(());
        }
        self.wait(
            go_on,
            |own, others| {
                let zero = others.get(&0)?;
                let seen = zero.card.seen.get(&rank) == Some(&own.nonce);
                (seen && zero.card.phase >= Phase::Met).then_some(())
            },
            |own, others| {
                let differs =
                    others.get(&0).filter(|zero| zero.lives).and_then(|zero| differing(own, &zero.card));
                // If rank 0 is there it says it first: it knows best.
                let waits = others.get(&0).is_some_and(|zero| zero.lives)
                    && begun.elapsed() < self.about.timeout + GRACE;
                let stray = || (over() && !waits).then(|| self.stray(own, others));
                differs.map(|finding| vec![finding]).or_else(stray)
            },
        )?;
        self.say(|card| card.phase = Phase::Met);
        Ok(())
    }

    /// Findings for ranks that rank 0 has not seen, as its card says.
    fn absent(&self, zero: &Card, others: &BTreeMap<u32, Heard>) -> Vec<Finding> {
        let seen = zero.seen.keys().map(|rank| match others.get(rank) {
            Some(heard) => place_of(&heard.card),
            None => format!("rank {rank}"),
        });
        let seen: Vec<String> = std::iter::once(place_of(zero)).chain(seen).collect();
        let seconds = self.about.timeout.as_secs_f64();
        let finding = |rank: u32| {
            let mut finding =
                Finding::new(codes::NOT_SHARED, format!("rank {rank} never appeared within {seconds} s"))
                    .file(self.table.folder.path())
                    .rank(format!("rank {rank}"))
                    .expected(format!("{} ranks on one storage", self.about.world), seen.join(", "))
                    .help("look at what that rank says: it was not started, or its host has a disk of its own at this path; `fastshard probe` with the same ranks tells before the work");
            finding.host = self.about.hosts.get(rank as usize).cloned();
            finding
        };
        (1..self.about.world).filter(|rank| !zero.seen.contains_key(rank)).map(finding).collect()
    }

    /// Findings of a rank that rank 0 has not seen, or that has not seen rank 0.
    fn stray(&self, own: &Card, others: &BTreeMap<u32, Heard>) -> Vec<Finding> {
        let zero = others.get(&0).filter(|zero| zero.lives);
        let what = match zero {
            None => "rank 0 was never seen here",
            Some(zero) if !zero.card.seen.contains_key(&own.rank) => "rank 0 has not seen this rank",
            Some(zero) => return self.absent(&zero.card, others),
        };
        let message = format!("{what} within {} s", self.about.timeout.as_secs_f64());
        let mut finding = Finding::new(codes::NOT_SHARED, message)
            .file(self.table.folder.path())
            .rank(format!("rank {}", own.rank))
            .expected(
                match zero {
                    Some(zero) => format!("the storage of {}", place_of(&zero.card)),
                    None => format!("one storage for all {} ranks", own.world),
                },
                own.storage.clone(),
            )
            .help("this host may have a disk of its own at this path: mount the shared storage there, or choose a destination on it; --timeout SECONDS waits longer for ranks that start late");
        finding.host = Some(own.process.host.clone());
        vec![finding]
    }

    /// Refuses ranks that were started with other words than rank 0.
    fn alike(&self) -> Result<()> {
        let state = self.table.lock();
        let differing = state.others.values().filter_map(|heard| differing(&state.card, &heard.card));
        let findings: Vec<Finding> = differing.collect();
        match findings.is_empty() {
            true => Ok(()),
            false => Err(findings.into()),
        }
    }

    /// Waits until all ranks hold the same plan. `files` are the sources as this rank sees them.
    ///
    /// # Errors
    /// `FS524` with what differs; what another rank stopped for.
    pub fn agree(&self, plan: &str, files: &[(String, u64)], go_on: &dyn Fn() -> bool) -> Result<()> {
        if self.about.rank == 0 {
            let bytes = serde_json::to_vec(files).expect("plain data");
            self.table.folder.write_whole(&sources_of(0), &bytes, true)?;
        }
        self.say(|card| card.plan = Some(plan.to_string()));
        let world = self.about.world as usize;
        if self.about.rank > 0 {
            let theirs = self.wait(
                go_on,
                |_, others| {
                    let zero = others.get(&0)?;
                    (zero.card.plan.is_some()).then(|| zero.card.plan.clone())
                },
                |_, others| self.silent(others, 0),
            )?;
            if theirs.as_deref() != Some(plan) {
                let findings = vec![self.other_plan(files)];
                self.stop(&findings);
                return Err(findings.into());
            }
            return self.wait(
                go_on,
                |_, others| (others.get(&0)?.card.phase >= Phase::Agreed).then_some(()),
                |_, others| self.silent(others, 0),
            );
        }
        self.wait(
            go_on,
            |own, others| {
                let held = others.values().filter(|heard| heard.card.plan == own.plan && is_seen(own, heard));
                (held.count() + 1 == world).then_some(())
            },
            |own, others| {
                let silent = (1..self.about.world).find_map(|rank| self.silent(others, rank));
                let differs = others.values().find(|heard| {
                    is_seen(own, heard)
                        && heard.card.plan.as_ref().is_some_and(|plan| Some(plan) != own.plan.as_ref())
                });
                let told = |heard: &Heard| {
                    let mut finding = Finding::new(
                        codes::RANKS_DIFFER,
                        "this rank comes to another plan than rank 0",
                    )
                    .rank(format!("rank {}", heard.card.rank))
                    .help("its own message says what differs: the sources as it sees them, or their headers");
                    finding.host = Some(heard.card.process.host.clone());
                    vec![finding]
                };
                // It is about to say what differs.
                let told = |heard: &Heard| (heard.moved.elapsed() > BEAT_EVERY * 4).then(|| told(heard));
                differs.and_then(told).or(silent)
            },
        )?;
        self.say(|card| card.phase = Phase::Agreed);
        Ok(())
    }

    /// What of the sources differs from what rank 0 sees.
    fn other_plan(&self, files: &[(String, u64)]) -> Finding {
        let bytes = self.table.folder.read_small(&sources_of(0), 1 << 30).ok().flatten().unwrap_or_default();
        let theirs: BTreeMap<String, u64> =
            serde_json::from_slice::<Vec<(String, u64)>>(&bytes).unwrap_or_default().into_iter().collect();
        let ours: BTreeMap<String, u64> = files.iter().cloned().collect();
        let names: BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
        let size = |size: Option<&u64>| size.map_or("absent".to_string(), |size| format!("{size} bytes"));
        let mut differing = names.into_iter().filter(|name| theirs.get(*name) != ours.get(*name));
        let first: Vec<String> = differing
            .by_ref()
            .take(NAMED)
            .map(|name| format!("{name}: {} there, {} here", size(theirs.get(name)), size(ours.get(name))))
            .collect();
        let more = differing.count();
        let got = match (first.len(), more) {
            (0, _) => "the same names and sizes of files, with other headers or another config beside them"
                .to_string(),
            (_, 0) => first.join("; "),
            _ => format!("{}; and {more} more", first.join("; ")),
        };
        let mut finding = Finding::new(codes::RANKS_DIFFER, "this rank comes to another plan than rank 0")
            .rank(format!("rank {}", self.about.rank))
            .expected("the sources that rank 0 sees", got)
            .help("give all ranks the same CKPT, on storage that all of them see");
        finding.host = Some(self.table.lock().card.process.host.clone());
        finding
    }

    /// The finding for a rank that has shown no sign of life for the whole timeout, or is proven dead.
    fn silent(&self, others: &BTreeMap<u32, Heard>, rank: u32) -> Option<Vec<Finding>> {
        let heard = others.get(&rank)?;
        let dead = heard.card.process.is_dead() && heard.card.phase < Phase::Stopped;
        if !dead && heard.moved.elapsed() < self.about.timeout {
            return None;
        }
        let mut finding = Finding::new(
            codes::PART_MISSING,
            match dead {
                true => format!("rank {rank} has ended without a word"),
                false => {
                    format!("rank {rank} has shown no sign of life for {} s", heard.moved.elapsed().as_secs())
                }
            },
        )
        .rank(format!("rank {rank}"))
        .expected("a process at work", heard.card.process.told())
        .help("nothing was published; run again with --resume, with as many ranks as there are hosts");
        finding.host = Some(heard.card.process.host.clone());
        Some(vec![finding])
    }

    /// Rank 0: looks whether somebody is gone who has not done its part. Others: whether rank 0 is.
    ///
    /// # Errors
    /// Who, and since when; what another rank stopped for.
    pub fn watch(&self, done: &dyn Fn(u32) -> bool) -> Result<()> {
        if let Some(stopped) = self.stopped() {
            return Err(stopped);
        }
        let state = self.table.lock();
        let wanted: Vec<u32> = if self.about.rank == 0 { (1..self.about.world).collect() } else { vec![0] };
        for rank in wanted.into_iter().filter(|rank| !done(*rank)) {
            if let Some(findings) = self.silent(&state.others, rank) {
                return Err(findings.into());
            }
        }
        Ok(())
    }

    /// Rank 0 lets the others begin.
    pub fn open_run(&self, opened: Opened) {
        self.say(|card| (card.opened, card.phase) = (Some(opened), Phase::Working));
    }

    /// Waits until rank 0 has begun the run; none if there is nothing left to be made.
    ///
    /// # Errors
    /// What another rank stopped for; `FS523` if rank 0 is gone.
    pub fn wait_for_run(&self, go_on: &dyn Fn() -> bool) -> Result<Option<Opened>> {
        self.wait(
            go_on,
            |_, others| {
                let zero = others.get(&0)?;
                (zero.card.phase >= Phase::Working).then(|| zero.card.opened.clone())
            },
            |_, others| self.silent(others, 0),
        )
    }

    /// Waits until rank 0 has published.
    ///
    /// # Errors
    /// What another rank stopped for; `FS523` if rank 0 is gone.
    pub fn wait_for_result(&self, published: &dyn Fn() -> bool, go_on: &dyn Fn() -> bool) -> Result<()> {
        self.wait(
            go_on,
            |_, others| (others.get(&0)?.card.phase == Phase::Published || published()).then_some(()),
            |_, others| self.silent(others, 0),
        )
    }

    /// Says that the result is published.
    pub fn published(&self) {
        self.say(|card| card.phase = Phase::Published);
    }

    /// Says why this rank stops, so that the others do too.
    pub fn stop(&self, findings: &[Finding]) {
        let rank = self.about.rank;
        self.say(|card| {
            if card.phase >= Phase::Published {
                return;
            }
            card.phase = Phase::Stopped;
            card.findings = findings.to_vec();
            for finding in &mut card.findings {
                finding.rank.get_or_insert_with(|| format!("rank {rank}"));
                finding.host.get_or_insert_with(|| card.process.host.clone());
            }
        });
        // The thread may never have begun, and the process may end at once.
        let mut state = self.table.lock();
        let _ = self.table.write(&mut state);
    }

    /// What another rank stopped for, if one did; what keeps this one from taking part.
    pub fn stopped(&self) -> Option<Error> {
        let mut state = self.table.lock();
        if let Some(failed) = state.failed.take() {
            return Some(failed.into());
        }
        let own = &state.card;
        let is_current = |heard: &&Heard| {
            let of_this_run = match own.rank {
                0 => heard.card.answers.as_ref() == Some(&own.nonce),
                rank => heard.card.seen.get(&rank) == Some(&own.nonce),
            };
            of_this_run && heard.card.phase == Phase::Stopped
        };
        let mut stopped: Vec<Finding> =
            state.others.values().filter(is_current).flat_map(|heard| heard.card.findings.clone()).collect();
        stopped.dedup();
        if stopped.is_empty() {
            return None;
        }
        // What is told of an interrupt there is no interrupt here.
        for finding in stopped.iter_mut().filter(|f| f.code == codes::INTERRUPTED) {
            *finding = Finding {
                code: codes::PART_MISSING,
                message: "this rank was stopped by its user".into(),
                ..finding.clone()
            };
        }
        Some(stopped.into())
    }

    /// Takes this rank's card away; rank 0 lets the others read how it ended, and takes away all that is left.
    fn leave(&self) {
        let rank = self.about.rank;
        let gone = |name: &str| drop(self.table.folder.remove_file(name));
        let own = {
            let mut state = self.table.lock();
            if rank == 0 && state.written.is_some_and(|(changes, _)| changes != state.changes) {
                let _ = self.table.write(&mut state);
            }
            state.card.nonce.clone()
        };
        let begun = Instant::now();
        let stays = |rank: u32, heard: &Heard| {
            let reads = heard.lives && !heard.card.process.is_dead();
            reads && self.table.read(rank).is_some_and(|card| card.nonce == heard.card.nonce)
        };
        let others = self.table.lock().others.clone();
        while rank == 0
            && begun.elapsed() < FAREWELL
            && others.iter().any(|(rank, heard)| stays(*rank, heard))
        {
            std::thread::sleep(LOOK / 4);
        }
        gone(&format!("{own}.new"));
        if self.table.read(rank).is_some_and(|card| card.nonce == own) {
            gone(&file_of(rank));
            if rank == 0 {
                (1..self.about.world).for_each(|other| gone(&file_of(other)));
                gone(&sources_of(0));
            }
        }
        // The last one does it; others find it full.
        let _ = self.table.base.remove_dir(&self.table.name);
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.table.lock().ended = true;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.leave();
    }
}

/// Takes away the cards of ranks that are gone, and the folder if none is left.
pub(super) fn collect(
    place: &Place,
    patience: Duration,
    dry: bool,
    go_on: &dyn Fn() -> bool,
) -> Result<Option<Leaving>> {
    let name = place.meeting_name();
    let path = place.base.join(&name);
    let folder = match place.base.sub(&name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        folder => folder.at(&path, "cannot open")?,
    };
    let left = |fate| Some(Leaving { path: path.clone(), run: None, fate });
    if check_owner(place, &folder).is_err() {
        return Ok(left(Fate::Foreign));
    }
    let is_ours = |name: &String| {
        ["rank-", "sources-"].iter().any(|prefix| name.starts_with(prefix)) && name.ends_with(".json")
            || name.strip_suffix(".new").is_some_and(|nonce| nonce.len() == 32)
    };
    let cards = || -> Result<BTreeMap<String, (String, u64, bool)>> {
        let names = entries(&folder)?.into_iter().filter(|name| name.starts_with("rank-"));
        let read = |name: String| {
            let card: Card = serde_json::from_slice(&folder.read_small(&name, MAX_CARD).ok()??).ok()?;
            Some((name, (card.nonce, card.beat, card.process.is_dead())))
        };
        Ok(names.filter_map(read).collect())
    };
    let (first, begun) = (cards()?, Instant::now());
    while first.values().any(|(.., dead)| !dead) && begun.elapsed() < patience && go_on() {
        std::thread::sleep(LOOK);
        let moved = |(name, card): (&String, &(String, u64, bool))| first.get(name) != Some(card);
        if cards()?.iter().any(moved) {
            return Ok(left(Fate::AtWork));
        }
    }
    if !dry {
        for name in entries(&folder)?.iter().filter(|name| is_ours(name)) {
            folder.remove_file(name).at(&folder.join(name), "cannot remove")?;
        }
        match place.base.remove_dir(&name) {
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => return Ok(left(Fate::Foreign)),
            removed => removed.at(&path, "cannot remove")?,
        }
    }
    Ok(left(Fate::Removed))
}

fn is_seen(own: &Card, heard: &Heard) -> bool {
    own.seen.get(&heard.card.rank) == Some(&heard.card.nonce)
}

/// A rank and where it is, for people.
fn place_of(card: &Card) -> String {
    format!("rank {} on {} ({})", card.rank, card.process.host, card.storage)
}

/// The finding for two ranks that were not started alike, named for the first one.
fn differing(own: &Card, other: &Card) -> Option<Finding> {
    let told = |expected: String, got: String| {
        let named = if own.rank == 0 { other } else { own };
        let mut finding = Finding::new(codes::RANKS_DIFFER, "ranks of one run were not started alike")
            .rank(format!("rank {}", named.rank))
            .expected(expected, got)
            .help("start all ranks with the same command and the same version");
        finding.host = Some(named.process.host.clone());
        finding
    };
    let (zero, rank) = if own.rank == 0 { (own, other) } else { (other, own) };
    if zero.world != rank.world {
        return Some(told(format!("{} ranks, as rank 0 says", zero.world), format!("{} ranks", rank.world)));
    }
    let names: BTreeSet<&String> = zero.words.keys().chain(rank.words.keys()).collect();
    let shown = |value: Option<&serde_json::Value>| value.map_or("nothing".into(), ToString::to_string);
    let differing: Vec<(String, String)> = names
        .into_iter()
        .filter(|name| zero.words.get(*name) != rank.words.get(*name))
        .map(|name| {
            (
                format!("{name} {}", shown(zero.words.get(name))),
                format!("{name} {}", shown(rank.words.get(name))),
            )
        })
        .collect();
    if differing.is_empty() {
        return None;
    }
    let (expected, got): (Vec<String>, Vec<String>) = differing.into_iter().unzip();
    Some(told(format!("as rank 0: {}", expected.join(", ")), got.join(", ")))
}
