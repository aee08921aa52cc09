//! Cards of ranks, and their folder.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::publish::clock::{Clock, Watched};
use crate::publish::disk::{self, At, Dir};
use crate::publish::process::Process;

/// A card is written again after this time, if nothing else changes.
pub(super) const BEAT_EVERY: Duration = Duration::from_millis(500);
/// Largest card, in bytes.
pub(super) const MAX_CARD: u64 = 16 << 20;

/// The progress of a rank.
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
    /// An error occurred: the findings describe it.
    Stopped,
}

/// The place of a run's parts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The run's nonce.
    pub run: String,
    /// The number of its round.
    pub round: u32,
}

/// A source file as a rank sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Its name below its root.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Modification time, nanoseconds since the epoch.
    pub mtime_ns: i64,
}

/// A rank's description of itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Card {
    /// Its number, and of how many.
    pub rank: u32,
    /// The number of ranks.
    pub world: u32,
    /// The unique name of this process.
    pub(super) nonce: String,
    /// A counter that grows as long as it lives.
    pub(super) beat: u64,
    /// Who it is.
    pub process: Process,
    /// What lies under the destination, for people.
    pub storage: String,
    /// The options that it was started with, which must be the same for all ranks.
    pub(super) words: BTreeMap<String, serde_json::Value>,
    /// Nonce of the rank 0 that it has read.
    pub(super) answers: Option<String>,
    /// For rank 0: nonces of the ranks it has seen.
    pub(super) seen: BTreeMap<u32, String>,
    /// How far it is.
    pub phase: Phase,
    /// Digest of its plan, and the sources of the plan: paths and sizes of files.
    pub(super) plan: Option<String>,
    /// The run, once it has begun.
    pub(super) opened: Option<Opened>,
    /// Why it stopped.
    pub(super) findings: Vec<Finding>,
}

#[derive(Debug)]
pub(super) struct Table {
    pub(super) base: Dir,
    pub(super) name: OsString,
    pub(super) folder: Dir,
    pub(super) clock: Clock,
    /// The time that others may be silent.
    pub(super) timeout: Duration,
    pub(super) state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) card: Card,
    /// Its content when it was last written, and the time of that.
    pub(super) written: Option<(u64, Duration)>,
    /// Counts changes of the card.
    pub(super) changes: u64,
    /// Nonce and counter of a card of this rank that was silent when it was taken over: its process may be stopped, or
    /// gone with its host.
    pub(super) silent: Option<(String, u64)>,
    /// Cards of the others that answer: rank 0 has all of them, others have that of rank 0.
    pub(super) others: BTreeMap<u32, Heard>,
    /// True once the thread is to end.
    pub(super) ended: bool,
    /// The error that stopped the thread.
    pub(super) failed: Option<Finding>,
}

/// A card as it was read last.
#[derive(Debug, Clone)]
pub(super) struct Heard {
    pub(super) card: Card,
    /// The time for which its counter did not move.
    pub(super) silent: Watched,
    /// True once the counter has moved, which that of an old card never does.
    pub(super) lives: bool,
}

impl Heard {
    /// True if this is the card that was read last.
    fn is(&self, card: &Card) -> bool {
        (&self.card.nonce, self.card.beat) == (&card.nonce, card.beat)
    }
}

pub(super) fn file_of(rank: u32) -> String {
    format!("rank-{rank:05}.json")
}

pub(super) fn sources_of(rank: u32) -> String {
    format!("sources-{rank:05}.json")
}

impl Table {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn read(&self, rank: u32) -> Option<Card> {
        // What is half written, or not there yet, is read the next time.
        let bytes = self.folder.read_small(&file_of(rank), MAX_CARD).ok().flatten()?;
        serde_json::from_slice(&bytes).ok().filter(|card: &Card| card.rank == rank)
    }

    /// Writes the complete current card.
    pub(super) fn write(&self, state: &mut State) -> Result<()> {
        // The time before others can see it: the next one is due by that.
        let now = self.clock.now();
        state.card.beat += 1;
        let bytes = serde_json::to_vec(&state.card).expect("plain data");
        let (name, fresh) = (file_of(state.card.rank), format!("{}.new", state.card.nonce));
        let path = self.folder.join(&fresh);
        let file = match self.folder.create(OsStr::new(&fresh)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(taken_away(&state.card, self.folder.path()))
            }
            file => file.at(&path, "cannot create")?,
        };
        disk::write_at(&file, &path, 0, &bytes).at(&path, "cannot write")?;
        if disk::is_network(&file) {
            disk::sync_data(&file, &path).at(&path, "cannot bring to disk")?;
        }
        self.folder
            .rename_over(OsStr::new(&fresh), &self.folder, OsStr::new(&name))
            .at(&self.folder.join(&name), "cannot rename into place")?;
        state.written = Some((state.changes, now));
        Ok(())
    }

    /// Reads the cards of the others once, and gives a sign of life.
    pub(super) fn turn(&self) -> Result<()> {
        let (rank, world) = {
            let state = self.lock();
            (state.card.rank, state.card.world)
        };
        // Before the look: what comes meanwhile counts as seen.
        let now = self.clock.now();
        let own = self.read(rank);
        let wanted: Vec<u32> = if rank == 0 { (1..world).collect() } else { vec![0] };
        let cards: Vec<(u32, Option<Card>)> =
            wanted.into_iter().map(|other| (other, self.read(other))).collect();
        let mut state = self.lock();
        if let Some(own) = own.filter(|own| own.nonce != state.card.nonce) {
            let holds = rank != 0
                && state
                    .others
                    .get(&0)
                    .is_some_and(|zero| zero.card.seen.get(&rank) == Some(&state.card.nonce));
            let still_silent = state.silent.as_ref() == Some(&(own.nonce.clone(), own.beat));
            if !holds
                && !still_silent
                && !own.process.is_dead()
                && (state.card.phase > Phase::Meeting || own.nonce < state.card.nonce)
            {
                return Err(taken(&own));
            }
        }
        for (other, card) in cards {
            match (state.others.get_mut(&other), card) {
                (Some(heard), Some(card)) if !heard.is(&card) => {
                    heard.silent.found(now);
                    (heard.card, heard.lives) = (card, true);
                }
                // What cannot be read, or was taken away, is silence too.
                (Some(heard), _) => drop(heard.silent.look(now)),
                (None, Some(card)) => {
                    let silent = Watched::begin(now, self.timeout);
                    state.others.insert(other, Heard { card, silent, lives: false });
                }
                (None, None) => {}
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
        let due =
            |(changes, at): (u64, Duration)| changes != state.changes || self.clock.elapsed(at) >= BEAT_EVERY;
        if state.written.is_none_or(due) {
            self.write(&mut state)?;
        }
        Ok(())
    }

    /// Lists the ranks that answer rank 0.
    pub(super) fn see(&self, state: &mut State) {
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

/// The error of a rank whose place a living process has.
pub(super) fn taken(other: &Card) -> Error {
    Finding::new(codes::LOCKED, format!("rank {} is held by another process, which is alive", other.rank))
        .rank(format!("rank {}", other.rank))
        .expected("one process for each rank", other.process.describe())
        .help("start each process with its own rank; a restarted process takes over its rank when the first one is gone")
        .into()
}

/// The error of a rank that finds the others gone, with the folder in which they met.
fn taken_away(own: &Card, folder: &Path) -> Error {
    let mut finding =
        Finding::new(codes::PART_MISSING, "the other ranks have ended, before this one had read how")
            .file(folder)
            .rank(format!("rank {}", own.rank))
            .help("check the output of rank 0, then continue with --resume");
    finding.host = Some(own.process.host.clone());
    finding.into()
}
