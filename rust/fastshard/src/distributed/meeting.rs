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

mod leave;
mod left;
mod pauses;
mod refusals;
mod table;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::member::nonce;
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::publish::clock::{Clock, Watched};
use crate::publish::disk::{self, At};
use crate::publish::folder::check_owner;
use crate::publish::mounts;
use crate::publish::place::Place;
use crate::publish::process::Process;
use crate::steps::{self, Step};

pub(crate) use left::collect;
pub use left::forget_dead;
pub use pauses::Pauses;
use refusals::differing;
use table::{sources_of, taken, Heard, State, Table, BEAT_EVERY};
pub use table::{Card, Opened, Phase, Seen};

/// Time between two looks at the other ranks' cards: the first one of a wait, the usual one, and the maximum
/// with very many ranks.
const FIRST_LOOK: Duration = Duration::from_millis(4);
const LOOK: Duration = Duration::from_millis(100);
const LOOK_AT_MOST: Duration = Duration::from_secs(1);
/// Ranks that are examined in [`LOOK`].
const MANY: u32 = 16;
/// Time in which a process that holds a rank shows a sign of life.
const HELD_FOR: Duration = Duration::from_millis(2500);
/// Time that the others leave rank 0 to report first.
const GRACE: Duration = Duration::from_secs(1);
/// Maximum number of ranks of a run.
pub const MAX_WORLD: u32 = 100_000;

/// The settings of a rank's participation.
#[derive(Debug, Clone)]
pub struct About {
    /// Its number.
    pub rank: u32,
    /// The number of ranks.
    pub world: u32,
    /// The time that it waits for the others.
    pub timeout: Duration,
    /// The options that it was started with, which must be the same for all ranks.
    pub words: BTreeMap<String, serde_json::Value>,
    /// Hosts by rank, as far as the launcher states them.
    pub hosts: Vec<String>,
    /// Its clock.
    pub clock: Clock,
}

/// A rank among others. Dropping it removes its card.
#[derive(Debug)]
pub struct Meeting {
    about: About,
    table: Arc<Table>,
    thread: Option<JoinHandle<()>>,
}

impl Meeting {
    /// Meets the other ranks at the directory of `out`. Returns once rank 0 has seen all of them, and this
    /// rank has noticed that.
    ///
    /// # Errors
    /// `FS522` if that does not happen within the timeout, with the missing ranks; `FS524` if ranks were
    /// started with other options; `FS509` if another process has this rank; errors of the system for the
    /// directory.
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
        steps::reach(Step::Met);
        Ok(meeting)
    }

    fn open(out: &Path, about: About) -> Result<Meeting> {
        let place = Place::find(out, "0000000000000000")?;
        let name = place.meeting_name();
        let path = place.base.join(&name);
        match place.base.create_dir(&name, disk::PRIVATE) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.at(&path, "cannot create the folder in which ranks meet")?,
        }
        let folder = place.base.sub(&name).at(&path, "cannot open the folder in which ranks meet")?;
        check_owner(&place, &folder)?;
        let card = Card {
            rank: about.rank,
            world: about.world,
            nonce: nonce(),
            beat: 0,
            process: Process::own(),
            storage: mounts::describe_storage(place.base.path()),
            words: about.words.clone(),
            answers: None,
            seen: BTreeMap::new(),
            phase: Phase::Meeting,
            plan: None,
            opened: None,
            findings: Vec::new(),
        };
        let (others, failed) = (BTreeMap::new(), None);
        let state = State { card, written: None, changes: 0, silent: None, others, ended: false, failed };
        let state = Mutex::new(state);
        let (clock, timeout) = (about.clock.clone(), about.timeout);
        let table = Table { base: place.base, name, folder, clock, timeout, state };
        Ok(Meeting { about, table: Arc::new(table), thread: None })
    }

    /// Waits until a process that seems to hold this rank shows no more sign of life.
    fn take_rank(&self, go_on: &dyn Fn() -> bool) -> Result<()> {
        let clock = &self.about.clock;
        let mut watched = Watched::begin(clock.now(), HELD_FOR);
        let first = self.table.read(self.about.rank);
        while let Some(first) = first.as_ref().filter(|card| !card.process.is_dead()) {
            match self.table.read(self.about.rank) {
                Some(now) if (&now.nonce, now.beat) != (&first.nonce, first.beat) => return Err(taken(&now)),
                Some(_) if watched.look(clock.now()) < HELD_FOR && go_on() => clock.sleep(LOOK),
                _ => break,
            }
        }
        self.table.lock().silent = first.map(|card| (card.nonce, card.beat));
        Ok(())
    }

    fn start(&mut self) {
        let (table, pause) = (Arc::clone(&self.table), self.pause());
        let turns = move || {
            while !table.lock().ended {
                if let Err(error) = table.turn() {
                    table.lock().failed = error.into_findings().into_iter().next();
                }
                // Woken early at the end. Counted, not measured: by a clock that stands still others are looked at too.
                let mut slept = Duration::ZERO;
                while slept < pause && !table.lock().ended {
                    table.clock.sleep(LOOK / 10);
                    slept += LOOK / 10;
                }
            }
        };
        self.thread = std::thread::Builder::new().name("fastshard-ranks".into()).spawn(turns).ok();
    }

    fn pause(&self) -> Duration {
        (LOOK * self.about.world.div_ceil(MANY)).min(LOOK_AT_MOST)
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.about.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.about.world
    }

    /// The time that it waits for others.
    pub fn timeout(&self) -> Duration {
        self.about.timeout
    }

    /// The clock by which it waits.
    pub fn clock(&self) -> &Clock {
        &self.about.clock
    }

    /// All ranks as rank 0 sees them, for checks of their storage; on other ranks, only rank 0.
    pub fn cards(&self) -> Vec<Card> {
        let state = self.table.lock();
        let mut cards: Vec<Card> = state.others.values().map(|heard| heard.card.clone()).collect();
        cards.push(state.card.clone());
        cards.sort_by_key(|card| card.rank);
        cards
    }

    /// The name of this process among the ranks.
    pub(super) fn nonce(&self) -> String {
        self.table.lock().card.nonce.clone()
    }

    /// The names of the processes that have met, by rank.
    pub(super) fn nonces(&self) -> BTreeMap<u32, String> {
        let state = self.table.lock();
        let zero = match self.about.rank {
            0 => Some(&state.card),
            _ => met(&state.card, &state.others).map(|heard| &heard.card),
        };
        let Some(zero) = zero else { return BTreeMap::new() };
        let mut nonces = zero.seen.clone();
        nonces.insert(0, zero.nonce.clone());
        nonces
    }

    /// The folder in which ranks meet.
    pub(super) fn folder(&self) -> &disk::Dir {
        &self.table.folder
    }

    /// Stops all ranks because of an error in a thread of this one.
    pub(super) fn fail(&self, error: Error) {
        self.stop(error.findings());
        self.table.lock().failed = error.into_findings().into_iter().next();
    }

    /// Changes the card of this rank.
    fn say(&self, change: impl FnOnce(&mut Card)) {
        let mut state = self.table.lock();
        change(&mut state.card);
        state.changes += 1;
        // At once: others wait for it. What keeps it from being written is met again by the thread.
        let _ = self.table.write(&mut state);
    }

    /// Waits for a condition, as long as the others show signs of life.
    ///
    /// `done` checks the cards; `late` gets the waited time, and names the missing ranks when the time is
    /// over.
    fn wait<T>(
        &self,
        go_on: &dyn Fn() -> bool,
        mut done: impl FnMut(&Card, &BTreeMap<u32, Heard>) -> Option<T>,
        late: impl Fn(&Card, &BTreeMap<u32, Heard>, Duration) -> Option<Vec<Finding>>,
    ) -> Result<T> {
        let clock = &self.about.clock;
        let mut pauses = Pauses::new(clock, self.pause());
        let mut waited = Watched::begin(clock.now(), self.about.timeout);
        loop {
            let now = clock.now();
            self.table.turn()?;
            waited.look(now);
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
                if let Some(findings) = late(&state.card, &state.others, waited.time()) {
                    return Err(findings.into());
                }
            }
            pauses.sleep();
        }
    }

    fn meet(&self, go_on: &dyn Fn() -> bool) -> Result<()> {
        let (rank, world, timeout) = (self.about.rank, self.about.world, self.about.timeout);
        if rank == 0 {
            self.wait(
                go_on,
                |own, _| (own.seen.len() as u32 + 1 == world).then_some(()),
                |own, others, waited| (waited >= timeout).then(|| self.absent(own, others)),
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
            |own, others, waited| {
                let differs =
                    others.get(&0).filter(|zero| zero.lives).and_then(|zero| differing(own, &zero.card));
                // If rank 0 is there it says it first: it knows best.
                let waits = others.get(&0).is_some_and(|zero| zero.lives) && waited < timeout + GRACE;
                let stray = || (waited >= timeout && !waits).then(|| self.stray(own, others));
                differs.map(|finding| vec![finding]).or_else(stray)
            },
        )?;
        self.say(|card| card.phase = Phase::Met);
        Ok(())
    }

    /// Waits until all ranks have the same plan. `files` are the sources as this rank sees them.
    ///
    /// # Errors
    /// `FS524` with the differences; the errors for which another rank stopped.
    pub fn agree(&self, plan: &str, files: &[Seen], go_on: &dyn Fn() -> bool) -> Result<()> {
        if self.about.rank == 0 {
            let bytes = serde_json::to_vec(files).expect("plain data");
            self.table.folder.write_whole(&sources_of(0), &bytes, true)?;
        }
        self.say(|card| card.plan = Some(plan.to_string()));
        let world = self.about.world as usize;
        if self.about.rank > 0 {
            let theirs = self.wait(
                go_on,
                |own, others| {
                    let zero = met(own, others)?;
                    (zero.card.plan.is_some()).then(|| zero.card.plan.clone())
                },
                |_, others, _| self.silent(others, 0),
            )?;
            if theirs.as_deref() != Some(plan) {
                let findings = vec![self.other_plan(files)];
                self.stop(&findings);
                return Err(findings.into());
            }
            return self.wait(
                go_on,
                |own, others| (met(own, others)?.card.phase >= Phase::Agreed).then_some(()),
                |_, others, _| self.silent(others, 0),
            );
        }
        self.wait(
            go_on,
            |own, others| {
                let agreeing =
                    others.values().filter(|heard| heard.card.plan == own.plan && is_seen(own, heard));
                (agreeing.count() + 1 == world).then_some(())
            },
            |own, others, _| {
                let silent = (1..self.about.world).find_map(|rank| self.silent(others, rank));
                let differs = others.values().find(|heard| {
                    is_seen(own, heard)
                        && heard.card.plan.as_ref().is_some_and(|plan| Some(plan) != own.plan.as_ref())
                });
                let finding = |heard: &Heard| {
                    let mut finding = Finding::new(
                        codes::RANKS_DIFFER,
                        "this rank comes to another plan than rank 0",
                    )
                    .rank(format!("rank {}", heard.card.rank))
                    .help(
                        "check the output of that rank, which states whether its sources differ or their headers",
                    );
                    finding.host = Some(heard.card.process.host.clone());
                    vec![finding]
                };
                // It is about to say what differs.
                let finding_after_wait =
                    |heard: &Heard| (heard.silent.time() > BEAT_EVERY * 4).then(|| finding(heard));
                differs.and_then(finding_after_wait).or(silent)
            },
        )?;
        self.say(|card| card.phase = Phase::Agreed);
        Ok(())
    }

    /// On rank 0, checks whether a rank is gone before it has finished its part; on others, whether rank 0 is
    /// gone.
    ///
    /// # Errors
    /// The rank that is gone, and the time since then; the errors for which another rank stopped.
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

    /// Lets the others begin; for rank 0.
    pub fn open_run(&self, opened: Opened) {
        self.say(|card| (card.opened, card.phase) = (Some(opened), Phase::Working));
    }

    /// Waits until rank 0 has begun the run; none if there is nothing left to make.
    ///
    /// # Errors
    /// The errors for which another rank stopped; `FS523` if rank 0 is gone.
    pub fn wait_for_run(&self, go_on: &dyn Fn() -> bool) -> Result<Option<Opened>> {
        self.wait(
            go_on,
            |own, others| {
                let zero = met(own, others)?;
                (zero.card.phase >= Phase::Working).then(|| zero.card.opened.clone())
            },
            |_, others, _| self.silent(others, 0),
        )
    }

    /// Waits until rank 0 has published.
    ///
    /// # Errors
    /// The errors for which another rank stopped; `FS523` if rank 0 is gone.
    pub fn wait_for_result(&self, published: &dyn Fn() -> bool, go_on: &dyn Fn() -> bool) -> Result<()> {
        self.wait(
            go_on,
            |own, others| {
                let is_published = met(own, others).is_some_and(|zero| zero.card.phase == Phase::Published);
                (is_published || published()).then_some(())
            },
            |_, others, _| self.silent(others, 0),
        )
    }

    /// Announces that the result is published.
    pub fn published(&self) {
        self.say(|card| card.phase = Phase::Published);
    }

    /// Announces why this rank stops, so that the others stop too.
    pub fn stop(&self, findings: &[Finding]) {
        let rank = self.about.rank;
        self.say(|card| {
            if card.phase >= Phase::Published {
                return;
            }
            card.phase = Phase::Stopped;
            card.findings = findings.to_vec();
            // One that names a rank speaks of that of the run that wrote the source, or of another rank of this one.
            for finding in card.findings.iter_mut().filter(|finding| finding.rank.is_none()) {
                finding.rank = Some(format!("rank {rank}"));
                finding.host.get_or_insert_with(|| card.process.host.clone());
            }
        });
    }

    /// The errors for which another rank stopped, or which keep this one from taking part, if there are any.
    pub fn stopped(&self) -> Option<Error> {
        let mut state = self.table.lock();
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
            // What came of that (cards that were taken away meanwhile) is told where nothing better is known.
            return state.failed.take().map(Error::from);
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

fn is_seen(own: &Card, heard: &Heard) -> bool {
    own.seen.get(&heard.card.rank) == Some(&heard.card.nonce)
}

/// Rank 0, if it is the process that has met this rank: one that was stopped and abandoned may write its card
/// again.
fn met<'h>(own: &Card, others: &'h BTreeMap<u32, Heard>) -> Option<&'h Heard> {
    others.get(&0).filter(|zero| zero.card.seen.get(&own.rank) == Some(&own.nonce))
}
