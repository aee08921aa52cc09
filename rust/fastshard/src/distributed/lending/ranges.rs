//! Sets of byte ranges.

use std::collections::BTreeMap;

/// Ranges that do not touch one another: first byte -> one past the last.
#[derive(Debug, Clone, Default)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// The ranges of `lo..hi` that are not in the set.
    pub(super) fn missing(&self, lo: u64, hi: u64) -> Vec<(u64, u64)> {
        let mut missing = Vec::new();
        let mut at = lo;
        if let Some((_, &end)) = self.0.range(..=lo).next_back() {
            at = at.max(end);
        }
        for (&first, &end) in self.0.range(lo..hi.max(lo)) {
            if first > at {
                missing.push((at, first));
            }
            at = at.max(end);
        }
        if at < hi {
            missing.push((at, hi));
        }
        missing
    }

    /// Adds `lo..hi`.
    pub(super) fn insert(&mut self, mut lo: u64, mut hi: u64) {
        if lo >= hi {
            return;
        }
        while let Some((&first, &end)) = self.0.range(..=hi).next_back().filter(|(_, end)| **end >= lo) {
            (lo, hi) = (lo.min(first), hi.max(end));
            self.0.remove(&first);
        }
        self.0.insert(lo, hi);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_missing_is_what_nobody_inserted(
            inserted in prop::collection::vec((0u64..100, 0u64..20), 0..12),
            lo in 0u64..110,
            len in 0u64..110,
        ) {
            let mut ranges = Ranges::default();
            let mut covered = [false; 256];
            for (first, n) in inserted {
                ranges.insert(first, first + n);
                covered[first as usize..(first + n) as usize].fill(true);
            }
            let missing = ranges.missing(lo, lo + len);
            let listed: Vec<u64> = missing.iter().flat_map(|&(a, b)| a..b).collect();
            let naive: Vec<u64> = (lo..lo + len).filter(|&i| !covered[i as usize]).collect();
            prop_assert_eq!(listed, naive);
            prop_assert!(missing.windows(2).all(|w| w[0].1 < w[1].0));
        }
    }
}
