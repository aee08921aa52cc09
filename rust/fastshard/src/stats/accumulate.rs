//! The statistics of one tensor, from tiles in any order.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::slabs::Slabs;
use super::tally::{Moments, Tally};
use super::{numbers_per_element, TensorStats, ZeroSlab, BLOCK};
use crate::tensor::Dtype;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Totals {
    tally: Tally,
    numbers: u64,
    /// Bytes up to which moments are joined, and those of later tiles.
    joined: u64,
    later: BTreeMap<u64, (u64, Moments)>,
}

/// What an [`Accumulator`] holds, to be joined with that of others which had other tiles of the tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Per dimension that is looked at, a bit for each index at which something is not zero.
    slabs: Vec<Vec<u64>>,
    totals: Option<Totals>,
}

/// Gathers one tensor's statistics. Threads may add tiles at the same time.
pub struct Accumulator {
    dtype: Dtype,
    slabs: Option<Slabs>,
    /// None if only zero slabs are asked for.
    totals: Option<Mutex<Totals>>,
}

impl Totals {
    /// Joins moments in the order of the tensor, whatever the order of arrival.
    fn settle(&mut self) {
        while let Some((end, moments)) = self.later.remove(&self.joined) {
            self.joined = end;
            self.tally.moments.join(&moments);
        }
    }
}

impl Accumulator {
    /// For a tensor of this dtype and shape.
    pub fn new(dtype: Dtype, shape: &[u64]) -> Accumulator {
        Accumulator { totals: Some(Mutex::default()), ..Accumulator::of_slabs(dtype, shape) }
    }

    /// For the zero slabs alone, which cost next to nothing.
    pub fn of_slabs(dtype: Dtype, shape: &[u64]) -> Accumulator {
        Accumulator { dtype, slabs: Slabs::new(dtype, shape), totals: None }
    }

    /// Adds whole elements that start at byte `start` of the tensor's C-ordered bytes.
    ///
    /// # Panics
    /// If they are not whole elements.
    pub fn add(&self, start: u64, bytes: &[u8]) {
        let item = self.dtype.size();
        assert!(start.is_multiple_of(item as u64) && bytes.len().is_multiple_of(item), "whole elements");
        if let Some(slabs) = &self.slabs {
            let mut at = start / item as u64;
            // In blocks, so that what has been seen meanwhile is not looked for any more.
            for block in bytes.chunks(BLOCK * item) {
                slabs.add(at, block);
                at += BLOCK as u64;
            }
        }
        let Some(totals) = &self.totals else { return };
        let tally = Tally::of(self.dtype, bytes);
        let mut totals = totals.lock().unwrap_or_else(PoisonError::into_inner);
        totals.numbers += (bytes.len() / item) as u64 * numbers_per_element(self.dtype);
        totals.later.insert(start, (start + bytes.len() as u64, tally.moments));
        totals.tally.add_counts(&tally);
        totals.settle();
    }

    /// What is held now.
    pub fn state(&self) -> State {
        let totals = self.totals.as_ref().map(|t| t.lock().unwrap_or_else(PoisonError::into_inner).clone());
        State { slabs: self.slabs.as_ref().map(Slabs::words).unwrap_or_default(), totals }
    }

    /// Adds what another one held, of other tiles of the same tensor; none if it is of another tensor, or had a tile
    /// of this one's.
    pub fn join(&self, state: &State) -> Option<()> {
        match &self.slabs {
            Some(slabs) => slabs.join(&state.slabs)?,
            None if state.slabs.is_empty() => {}
            None => return None,
        }
        let (totals, other) = match (&self.totals, &state.totals) {
            (Some(totals), Some(other)) => (totals, other),
            (None, None) => return Some(()),
            _ => return None,
        };
        let mut totals = totals.lock().unwrap_or_else(PoisonError::into_inner);
        if totals.joined > 0 && other.joined > 0 {
            return None;
        }
        totals.numbers += other.numbers;
        totals.tally.add_counts(&other.tally);
        if other.joined > 0 {
            // The beginning of the tensor: nothing of this one's is joined yet.
            (totals.joined, totals.tally.moments) = (other.joined, other.tally.moments);
        }
        totals.later.extend(&other.later);
        totals.settle();
        Some(())
    }

    /// The slabs that are zero in all that was added.
    pub fn zero_slabs(&self) -> Vec<ZeroSlab> {
        self.slabs.as_ref().map(Slabs::finish).unwrap_or_default()
    }

    /// True if all that was added is zero, of a tensor whose slabs are looked at.
    pub fn is_zero(&self) -> bool {
        self.slabs.as_ref().is_some_and(Slabs::is_zero)
    }

    /// The statistics of all that was added; none if only slabs were asked for.
    pub fn finish(&self) -> Option<TensorStats> {
        let totals = self.totals.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        let tally = &totals.tally;
        let finite = |x: f64| (tally.moments.n > 0 && x.is_finite()).then_some(x);
        Some(TensorStats {
            count: totals.numbers,
            zeros: tally.zeros,
            nan: tally.nan,
            inf: tally.inf,
            min: tally.min,
            max: tally.max,
            mean: finite(tally.moments.mean),
            std: finite((tally.moments.squares / tally.moments.n as f64).sqrt()),
            histogram: tally.histogram.to_vec(),
            zero_slabs: self.zero_slabs(),
        })
    }
}
