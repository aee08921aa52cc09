//! The departure of a rank: others read how it ended before its card is removed.

use std::time::Duration;

use super::left::{is_ours, remove_if_dead};
use super::table::{file_of, Heard, Phase};
use super::{Meeting, Pauses, LOOK};
use crate::publish::clock::Watched;
use crate::publish::folder::entries;
use crate::steps::{self, Step};

/// Time for others to read the end of a run before its cards are removed.
const FAREWELL: Duration = Duration::from_secs(3);

impl Meeting {
    /// Removes this rank's card; rank 0 lets the others read how it ended, and removes everything that is
    /// left.
    pub(super) fn leave(&self) {
        let rank = self.about.rank;
        let gone = |name: &str| drop(self.table.folder.remove_file(name));
        let own = {
            let mut state = self.table.lock();
            if rank == 0 && state.written.is_some_and(|(changes, _)| changes != state.changes) {
                let _ = self.table.write(&mut state);
            }
            state.card.nonce.clone()
        };
        steps::reach(Step::Farewell);
        let clock = &self.about.clock;
        let mut waited = Watched::begin(clock.now(), FAREWELL);
        let seen = self.table.lock().card.seen.clone();
        let stays = |rank: u32, heard: &Heard| {
            // Who has answered this process lived then, though its counter was not seen to move.
            let lives = heard.lives || seen.get(&rank) == Some(&heard.card.nonce);
            let reads = lives && !heard.card.process.is_dead();
            reads && self.table.read(rank).is_some_and(|card| card.nonce == heard.card.nonce)
        };
        let others = self.table.lock().others.clone();
        let mut pauses = Pauses::new(clock, LOOK);
        while rank == 0
            && waited.look(clock.now()) < FAREWELL
            && others.iter().any(|(rank, heard)| stays(*rank, heard))
        {
            pauses.sleep();
        }
        // What one rank stopped for is read by rank 0, which tells it to all, before its card goes.
        let stopped = self.table.lock().card.phase == Phase::Stopped;
        let unread = || {
            let zero = self.table.read(0);
            zero.is_some_and(|z| {
                z.phase < Phase::Published && z.seen.get(&rank) == Some(&own) && !z.process.is_dead()
            })
        };
        while rank > 0 && stopped && waited.look(clock.now()) < FAREWELL && unread() {
            pauses.sleep();
        }
        gone(&format!("{own}.new"));
        if self.table.read(rank).is_some_and(|card| card.nonce == own) {
            gone(&file_of(rank));
            if rank == 0 {
                // Those of an earlier run with more ranks too.
                let names = entries(&self.table.folder).unwrap_or_default();
                names.iter().filter(|name| is_ours(name)).for_each(|name| gone(name));
            }
        }
        // The last one that lives does it; what it heard of others is in its memory.
        remove_if_dead(&self.table.base, &self.table.name, &self.table.folder);
    }
}
