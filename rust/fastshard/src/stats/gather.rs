//! Statistics of a run's outputs: what the engine hands its tiles to.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::accumulate::State;
use super::{Accumulator, TensorStats, ZeroSlab};
use crate::plan::Output;

/// What is gathered while outputs are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Level {
    /// Nothing.
    #[default]
    Nothing,
    /// Slabs that are zero.
    ZeroSlabs,
    /// All statistics.
    Full,
}

/// What was gathered about an output.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub enum Seen {
    /// Nothing was asked for.
    #[default]
    Nothing,
    /// Its zero slabs.
    ZeroSlabs(Vec<ZeroSlab>),
    /// That all of it is zero, a matrix or more.
    Zero,
    /// All statistics.
    Stats(Box<TensorStats>),
}

impl Seen {
    /// The zero slabs, as far as they were asked for.
    pub fn zero_slabs(&self) -> &[ZeroSlab] {
        match self {
            Seen::Nothing | Seen::Zero => &[],
            Seen::ZeroSlabs(slabs) => slabs,
            Seen::Stats(stats) => &stats.zero_slabs,
        }
    }

    /// True if it is a matrix or more, and zero throughout.
    pub fn is_zero(&self) -> bool {
        match self {
            Seen::Nothing | Seen::ZeroSlabs(_) => false,
            Seen::Zero => true,
            Seen::Stats(stats) => stats.zeros == stats.count && stats.count > 0,
        }
    }

    /// The statistics, if they were asked for.
    pub fn stats(&self) -> Option<&TensorStats> {
        match self {
            Seen::Stats(stats) => Some(stats),
            _ => None,
        }
    }
}

/// What one process has gathered about an output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Partial {
    /// From all of its tiles.
    Whole(Seen),
    /// From some of them: their bytes, and what is to be joined with what others have.
    Part(u64, Box<State>),
}

/// An output whose tiles are coming in.
#[derive(Default)]
struct Slot {
    accumulator: Option<Arc<Accumulator>>,
    bytes: u64,
    seen: Seen,
}

/// Gathers statistics of outputs, each for as long as its tiles are made: bits for the slabs of all
/// outputs at once would not be bounded.
pub struct Gather {
    level: Level,
    slots: Vec<Mutex<Slot>>,
}

impl Gather {
    /// For that many outputs.
    pub fn new(level: Level, outputs: usize) -> Gather {
        let slots = if level == Level::Nothing { 0 } else { outputs };
        Gather { level, slots: (0..slots).map(|_| Mutex::default()).collect() }
    }

    /// True if every tile must be seen.
    pub fn wanted(&self) -> bool {
        self.level != Level::Nothing
    }

    fn slot(&self, index: usize) -> Option<MutexGuard<'_, Slot>> {
        self.slots.get(index).map(|slot| slot.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn accumulator(&self, output: &Output) -> Accumulator {
        match self.level {
            Level::Full => Accumulator::new(output.dtype, &output.shape),
            _ => Accumulator::of_slabs(output.dtype, &output.shape),
        }
    }

    fn finished(&self, accumulator: &Accumulator) -> Seen {
        match accumulator.finish() {
            Some(stats) => Seen::Stats(Box::new(stats)),
            None if accumulator.is_zero() => Seen::Zero,
            None => Seen::ZeroSlabs(accumulator.zero_slabs()),
        }
    }

    /// Adds a tile: bytes of an output from byte `start` on.
    pub fn add(&self, index: usize, output: &Output, start: u64, bytes: &[u8]) {
        let Some(mut slot) = self.slot(index) else { return };
        let accumulator =
            Arc::clone(slot.accumulator.get_or_insert_with(|| Arc::new(self.accumulator(output))));
        drop(slot);
        accumulator.add(start, bytes);
        let Some(mut slot) = self.slot(index) else { return };
        slot.bytes += bytes.len() as u64;
        if slot.bytes == output.nbytes() {
            slot.seen = self.finished(&accumulator);
            slot.accumulator = None;
        }
    }

    /// What was gathered about an output, for another process; none if no tile of it was added.
    pub fn partial(&self, index: usize, output: &Output) -> Option<Partial> {
        let slot = self.slot(index)?;
        match &slot.accumulator {
            Some(accumulator) => Some(Partial::Part(slot.bytes, Box::new(accumulator.state()))),
            None if slot.bytes > 0 && slot.bytes == output.nbytes() => {
                Some(Partial::Whole(slot.seen.clone()))
            }
            None => None,
        }
    }

    /// Takes over what another process has gathered; none if it is of another output, or of tiles that were seen
    /// already.
    pub fn join(&self, index: usize, output: &Output, partial: &Partial) -> Option<()> {
        let Some(mut slot) = self.slot(index) else { return Some(()) };
        match partial {
            Partial::Whole(seen) if slot.bytes == 0 => {
                (slot.bytes, slot.seen) = (output.nbytes(), seen.clone());
            }
            Partial::Part(bytes, state) if slot.bytes + bytes <= output.nbytes() => {
                let accumulator =
                    Arc::clone(slot.accumulator.get_or_insert_with(|| Arc::new(self.accumulator(output))));
                accumulator.join(state)?;
                slot.bytes += bytes;
                if slot.bytes == output.nbytes() {
                    slot.seen = self.finished(&accumulator);
                    slot.accumulator = None;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// What was gathered about an output, once all its tiles were added.
    pub fn take(&self, index: usize, output: &Output) -> Seen {
        match self.slot(index) {
            None => Seen::Nothing,
            // Without a byte it has no tile that could be its last.
            Some(_) if output.nbytes() == 0 => self.finished(&self.accumulator(output)),
            Some(mut slot) => std::mem::take(&mut slot.seen),
        }
    }
}
