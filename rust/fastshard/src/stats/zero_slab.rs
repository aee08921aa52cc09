//! Zero slabs as they are told of.

use serde::{Deserialize, Serialize};

use super::MAX_RANGES;

/// Indices of one dimension at which every element is zero.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZeroSlab {
    /// The dimension.
    pub dim: usize,
    /// How many of its indices.
    pub indices: u64,
    /// Them as `[start, end)`, ascending; the longest [`MAX_RANGES`] if there are more.
    #[serde(deserialize_with = "super::number::at_most::<_, _, MAX_RANGES>")]
    pub ranges: Vec<[u64; 2]>,
}

impl ZeroSlab {
    /// Words for people: `rows 32-63`, `columns 0-7`, `indices 4-7 of dim 2`.
    pub fn text(&self, rank: usize) -> String {
        let (what, of) = match (rank, self.dim) {
            (2, 0) => ("row", String::new()),
            (2, 1) => ("column", String::new()),
            (_, dim) => ("index", format!(" of dim {dim}")),
        };
        let what = match (what, self.indices) {
            (one, 1) => one.to_string(),
            ("index", _) => "indices".to_string(),
            (one, _) => format!("{one}s"),
        };
        let range = |r: &[u64; 2]| match r[1] - r[0] {
            1 => r[0].to_string(),
            _ => format!("{}-{}", r[0], r[1] - 1),
        };
        let shown: Vec<String> = self.ranges.iter().take(4).map(range).collect();
        let shown_indices: u64 = self.ranges.iter().take(4).map(|r| r[1] - r[0]).sum();
        let more = if shown_indices < self.indices {
            format!(" and {} more", self.indices - shown_indices)
        } else {
            String::new()
        };
        format!("{what} {}{more}{of}", shown.join(", "))
    }

    pub(super) fn check(&self, shape: &[u64]) -> Result<(), String> {
        let bad = || Err(format!("zero slabs that do not lie in {shape:?}"));
        let Some(&extent) = shape.get(self.dim) else { return bad() };
        let ascending = self.ranges.windows(2).all(|pair| pair[0][1] < pair[1][0]);
        let within = self.ranges.iter().all(|[start, end]| start < end && *end <= extent);
        if self.ranges.is_empty() || self.ranges.len() > MAX_RANGES || !ascending || !within {
            return bad();
        }
        let total: u64 = self.ranges.iter().map(|[start, end]| end - start).sum();
        if total > self.indices || self.indices >= extent {
            return bad();
        }
        Ok(())
    }
}
