//! The statistics of one tensor, from tiles in any order.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::slabs::Slabs;
use super::tally::{Moments, Tally};
use super::{numbers_per_element, TensorStats, ZeroSlab, BLOCK};
use crate::tensor::Dtype;

#[derive(Default)]
struct Totals {
    tally: Tally,
    numbers: u64,
    /// Bytes up to which moments are joined, and those of later tiles.
    joined: u64,
    later: BTreeMap<u64, (u64, Moments)>,
}

/// Gathers one tensor's statistics. Threads may add tiles at the same time.
pub struct Accumulator {
    dtype: Dtype,
    slabs: Option<Slabs>,
    /// None if only zero slabs are asked for.
    totals: Option<Mutex<Totals>>,
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
        // In the order of the tensor, whatever the order of arrival.
        let Totals { tally: all, joined, later, .. } = &mut *totals;
        while let Some((end, moments)) = later.remove(joined) {
            *joined = end;
            all.moments.join(&moments);
        }
    }

    /// The slabs that are zero in all that was added.
    pub fn zero_slabs(&self) -> Vec<ZeroSlab> {
        self.slabs.as_ref().map(Slabs::finish).unwrap_or_default()
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
