//! Runs of the tiles of a plan's outputs, and the share of them that one process makes.

use serde::{Deserialize, Serialize};

use super::Plan;

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
    /// Counts the bytes that it makes.
    pub(crate) fn bytes(&self, plan: &Plan, sizes: &[u64]) -> u64 {
        let output = self.output as usize;
        let (lo, hi) = self.span(sizes[output], plan.outputs[output].nbytes());
        hi - lo
    }

    /// The bytes of its output that it makes, where that has tiles of `size` bytes and is `total` bytes long.
    pub fn span(&self, size: u64, total: u64) -> (u64, u64) {
        ((self.first * size).min(total), self.end.saturating_mul(size).min(total))
    }
}

/// The work of one process on a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Tiles, in the order in which they are made.
    pub tiles: Vec<TileRun>,
    /// Paddings it looks at, by their place in the plan: first, and one past the last, of each run of them.
    pub pads: Vec<(u32, u32)>,
}

impl Share {
    /// Counts the bytes of the result that it makes.
    pub fn bytes(&self, plan: &Plan, sizes: &[u64]) -> u64 {
        bytes(plan, sizes, &self.tiles)
    }
}

/// Counts the bytes that runs of tiles make.
pub(crate) fn bytes(plan: &Plan, sizes: &[u64], tiles: &[TileRun]) -> u64 {
    tiles.iter().map(|run| run.bytes(plan, sizes)).sum()
}
