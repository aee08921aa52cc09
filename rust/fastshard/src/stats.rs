//! Statistics of tensors, gathered from their tiles in the pass that hashes them.
//!
//! Tiles come in any order and from several threads. Counts, extremes, the histogram and the zero slabs do
//! not depend on that order. Mean and deviation are float sums: blocks of [`BLOCK`] numbers are summed in
//! f64 around their first value, and joined by Chan's formula, blocks in the order of a tile and tiles in
//! the order of the tensor. So they are the same in every run with the same tile size, and differ by
//! rounding only (about 1e-15 of the deviation) with another one.
//!
//! # The histogram
//! Its bins are fixed, so that one pass is enough and histograms of two tensors can be compared: 32
//! magnitudes for each sign. Magnitude 0 is `0 < |x| < 2^-24` (the smallest F16), magnitude `k` in 1..=30 is
//! `2^(k-25) <= |x| < 2^(k-24)`, magnitude 31 is `|x| >= 2^6`. Bin `31 - k` counts the negative numbers of
//! magnitude `k`, bin `32 + k` the positive ones: bins ascend like the numbers. Zeros, NaN and infinities
//! are counted apart.

mod accumulate;
mod gather;
mod number;
mod slabs;
mod tally;
mod zero;
mod zero_slab;

use serde::{Deserialize, Serialize};

use crate::tensor::{element_count, Dtype};

pub use accumulate::Accumulator;
pub use gather::{Gather, Level, Partial, Seen};
pub use number::Number;
pub use zero::zero_findings;
pub(crate) use zero::{non_finite, zero_slabs, zero_tensor};
pub use zero_slab::ZeroSlab;

/// Bins of a histogram.
pub const BINS: usize = 64;
/// Numbers that are summed before their sum is joined to the others.
pub const BLOCK: usize = 4096;
/// Maximum number of ranges that are kept of one dimension's zero slabs: the longest.
pub const MAX_RANGES: usize = 64;
/// Longest dimension whose slabs are distinguished, with one bit for each index.
pub const MAX_INDICES: u64 = 16 << 20;

/// Magnitudes of one sign.
const MAGNITUDES: i32 = BINS as i32 / 2;
/// Exponent of the first power of two that is an edge of bins.
const FIRST_EXPONENT: i32 = -24;

/// The 63 edges between the bins of a histogram, ascending. The first and the last bin are open.
pub fn edges() -> Vec<f64> {
    let positive = (0..MAGNITUDES - 1).map(|k| f64::from(FIRST_EXPONENT + k).exp2());
    positive.clone().rev().map(|x| -x).chain([0.0]).chain(positive).collect()
}

/// The bin of a number with this sign and unbiased exponent.
#[inline(always)]
fn bin(negative: bool, exponent: i32) -> usize {
    let magnitude = (exponent - FIRST_EXPONENT + 1).clamp(0, MAGNITUDES - 1);
    (if negative { MAGNITUDES - 1 - magnitude } else { MAGNITUDES + magnitude }) as usize
}

/// Statistics of the numbers of one tensor.
///
/// `zeros + nan + inf` and the histogram add up to `count`. Integers are summed as f64, so that the mean
/// of 64-bit ones is rounded; their extremes are exact.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorStats {
    /// Number of values: the elements, or twice that for complex ones, whose parts count as two.
    pub count: u64,
    /// Zeros, of either sign.
    pub zeros: u64,
    /// NaN.
    pub nan: u64,
    /// Infinities, of either sign.
    pub inf: u64,
    /// Smallest finite number; none if there is no finite one.
    pub min: Option<Number>,
    /// Largest finite number.
    pub max: Option<Number>,
    /// Mean of the finite numbers; none without one, or if it overflows f64.
    pub mean: Option<f64>,
    /// Standard deviation of the finite numbers (of the population: divided by their count).
    pub std: Option<f64>,
    /// [`BINS`] counts.
    #[serde(deserialize_with = "number::at_most::<_, _, BINS>")]
    pub histogram: Vec<u64>,
    /// Indices of a dimension at which everything is zero, by dimension; none for a tensor that is zero
    /// as a whole or that has fewer than two dimensions longer than 1.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "number::at_most::<_, _, MAX_RANGES>"
    )]
    pub zero_slabs: Vec<ZeroSlab>,
}

impl TensorStats {
    /// Checks whether statistics from another source are possible for such a tensor.
    ///
    /// # Errors
    /// A description of the first contradiction.
    pub fn check(&self, dtype: Dtype, shape: &[u64]) -> std::result::Result<(), String> {
        let parts = numbers_per_element(dtype);
        let count = element_count(shape).and_then(|n| n.checked_mul(parts));
        if count != Some(self.count) {
            return Err(format!("a count of {} numbers for {dtype} {shape:?}", self.count));
        }
        if self.histogram.len() != BINS {
            return Err(format!("a histogram of {} bins, not {BINS}", self.histogram.len()));
        }
        let apart = [self.zeros, self.nan, self.inf];
        let sum = self.histogram.iter().chain(&apart).try_fold(0u64, |sum, n| sum.checked_add(*n));
        if sum != Some(self.count) {
            return Err(format!("a histogram that does not add up to {}", self.count));
        }
        let finite = self.count - self.nan - self.inf;
        let ordered = match (self.min, self.max) {
            (None, None) => finite == 0,
            (Some(min), Some(max)) => finite > 0 && min.le(max),
            _ => false,
        };
        let numbers = [self.mean, self.std];
        if !ordered
            || numbers.iter().flatten().any(|x| !x.is_finite())
            || self.std.is_some_and(|std| std < 0.0)
            || (finite == 0 && numbers != [None; 2])
        {
            return Err("extremes, mean or deviation that cannot be".into());
        }
        if self.zero_slabs.windows(2).any(|pair| pair[0].dim >= pair[1].dim) {
            return Err("zero slabs that are not in the order of dimensions".into());
        }
        self.zero_slabs.iter().try_for_each(|slab| slab.check(shape))
    }
}

/// Numbers that an element holds.
fn numbers_per_element(dtype: Dtype) -> u64 {
    1 + u64::from(matches!(dtype, Dtype::C64 | Dtype::C128))
}
