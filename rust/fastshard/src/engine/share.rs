//! How a plan's work is divided among processes: runs of tiles of equal size in bytes, and of paddings to look at.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{budget, release, Options};
use crate::error::Result;
use crate::plan::Plan;

/// Tiles `first..end` of one output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u32, u64, u64)", into = "(u32, u64, u64)")]
pub struct TileRun {
    /// The output, by its place in the plan.
    pub output: u32,
    /// Its first tile.
    pub first: u64,
    /// One past the last.
    pub end: u64,
}

impl From<(u32, u64, u64)> for TileRun {
    fn from((output, first, end): (u32, u64, u64)) -> Self {
        TileRun { output, first, end }
    }
}

impl From<TileRun> for (u32, u64, u64) {
    fn from(run: TileRun) -> Self {
        (run.output, run.first, run.end)
    }
}

impl TileRun {
    /// How many bytes it makes.
    pub(super) fn bytes(&self, plan: &Plan, sizes: &[u64]) -> u64 {
        let output = self.output as usize;
        let (lo, hi) = self.span(sizes[output], plan.outputs[output].nbytes());
        hi - lo
    }

    /// The bytes of its output that it makes, where that has tiles of `size` bytes and is `total` bytes long.
    pub fn span(&self, size: u64, total: u64) -> (u64, u64) {
        ((self.first * size).min(total), self.end.saturating_mul(size).min(total))
    }
}

/// What one process does of a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Tiles, in the order in which they are made.
    pub tiles: Vec<TileRun>,
    /// Paddings it looks at, by their place in the plan: first, and one past the last.
    pub pads: (u32, u32),
}

impl Share {
    /// Bytes of the result that it makes.
    pub fn bytes(&self, plan: &Plan, sizes: &[u64]) -> u64 {
        bytes(plan, sizes, &self.tiles)
    }
}

/// The size in bytes of each output's tiles, as the budget of `options` allows them.
///
/// # Errors
/// `FS512` with the least that is needed.
pub fn tiling(plan: &Plan, options: &Options) -> Result<Vec<u64>> {
    budget::divide(plan, options, None).map(|(sizes, _)| sizes)
}

/// All tiles of a plan in the order in which they are made, without the outputs that `left_out` names.
pub fn all_tiles(plan: &Plan, sizes: &[u64], left_out: &dyn Fn(usize) -> bool) -> Vec<TileRun> {
    let blobs_of: Vec<Vec<u32>> = plan.outputs.iter().map(|o| super::blobs_of(plan, o)).collect();
    let whole = |output: usize| TileRun {
        output: output as u32,
        first: 0,
        end: plan.outputs[output].nbytes().div_ceil(sizes[output]),
    };
    let order = release::order(plan, &blobs_of).into_iter().filter(|output| !left_out(*output));
    order.map(whole).filter(|run| run.end > 0).collect()
}

/// Divides runs of tiles into `parts` of equal bytes, but for half a tile at each cut; what a part makes lies together
/// in the order of `tiles`.
pub fn divide(plan: &Plan, sizes: &[u64], tiles: &[TileRun], parts: usize) -> Vec<Share> {
    let total = u128::from(bytes(plan, sizes, tiles));
    let cut = |part: usize| (total * part as u128 / parts as u128) as u64;
    let pad = |part: usize| (plan.pads.len() * part / parts) as u32;
    let mut shares: Vec<Share> =
        (0..parts).map(|k| Share { tiles: Vec::new(), pads: (pad(k), pad(k + 1)) }).collect();
    // Bytes before the run, and the part that takes what comes next.
    let (mut at, mut part) = (0, 0);
    for run in tiles {
        let size = sizes[run.output as usize];
        let (lo, hi) = run.span(size, plan.outputs[run.output as usize].nbytes());
        let mut first = run.first;
        while first < run.end {
            let end = if part + 1 == parts {
                run.end
            } else {
                let wanted = cut(part + 1).saturating_sub(at) + size / 2;
                (run.first + wanted / size).clamp(first, run.end)
            };
            if end > first {
                shares[part].tiles.push(TileRun { output: run.output, first, end });
            }
            // A run that ends before the cut leaves the rest of the part to the next one.
            if end < run.end || (part + 1 < parts && at + (hi - lo) >= cut(part + 1)) {
                part += 1;
            }
            first = end;
        }
        at += hi - lo;
    }
    shares
}

/// What of `tiles` is not in `done`.
pub fn without(tiles: &[TileRun], done: &[TileRun]) -> Vec<TileRun> {
    let mut by_output: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
    for run in done {
        by_output.entry(run.output).or_default().push((run.first, run.end));
    }
    by_output.values_mut().for_each(|runs| runs.sort_unstable());
    let mut left = Vec::new();
    for run in tiles {
        let mut at = run.first;
        for &(first, end) in by_output.get(&run.output).into_iter().flatten() {
            if first > at && first < run.end {
                left.push(TileRun { output: run.output, first: at, end: first });
            }
            at = at.max(end);
        }
        if at < run.end {
            left.push(TileRun { output: run.output, first: at, end: run.end });
        }
    }
    left
}

/// Bytes that runs of tiles make.
fn bytes(plan: &Plan, sizes: &[u64], tiles: &[TileRun]) -> u64 {
    tiles.iter().map(|run| run.bytes(plan, sizes)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Fill, Output};
    use crate::tensor::Dtype;
    use proptest::prelude::*;

    fn plan(lengths: &[u64]) -> Plan {
        let output = |(i, n): (usize, &u64)| Output {
            name: format!("t{i}"),
            dtype: Dtype::U8,
            shape: vec![*n],
            parts: Vec::new(),
            fill: Fill::Zero,
            file: 0,
            offset: 0,
            key: None,
        };
        Plan { outputs: lengths.iter().enumerate().map(output).collect(), ..Plan::default() }
    }

    proptest! {
        #[test]
        fn shares_tile_the_work_evenly(
            lengths in prop::collection::vec((0u64..200_000, 10u32..16), 1..12),
            parts in 1usize..9,
        ) {
            let (lengths, sizes): (Vec<u64>, Vec<u64>) =
                lengths.into_iter().map(|(n, log)| (n, 1u64 << log)).unzip();
            let plan = plan(&lengths);
            let all = all_tiles(&plan, &sizes, &|_| false);
            let shares = divide(&plan, &sizes, &all, parts);
            prop_assert_eq!(shares.len(), parts);
            // Put together, the shares are all tiles in their order, none twice.
            let tiles = |runs: &[TileRun]| -> Vec<(u32, u64)> {
                runs.iter().flat_map(|r| (r.first..r.end).map(|t| (r.output, t))).collect()
            };
            let made: Vec<TileRun> = shares.iter().flat_map(|s| s.tiles.clone()).collect();
            prop_assert_eq!(tiles(&made), tiles(&all));
            // What some have made is taken out, and nothing else.
            let (done, left): (Vec<_>, Vec<_>) = shares.iter().enumerate().partition(|(i, _)| i % 2 == 0);
            let done: Vec<TileRun> = done.into_iter().rev().flat_map(|(_, s)| s.tiles.clone()).collect();
            let left: Vec<TileRun> = left.into_iter().flat_map(|(_, s)| s.tiles.clone()).collect();
            prop_assert_eq!(tiles(&without(&all, &done)), tiles(&left));
            let each = lengths.iter().sum::<u64>() / parts as u64;
            let largest = sizes.iter().copied().max().unwrap();
            for share in &shares {
                let bytes = share.bytes(&plan, &sizes);
                prop_assert!(bytes.abs_diff(each) <= largest + 1, "{} of {}", bytes, each);
            }
        }
    }
}
