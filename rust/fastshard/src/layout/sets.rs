//! Sets of positions on an axis: layers with experts, layers that predict further tokens.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Positions of one axis.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Positions {
    /// The axis.
    pub axis: String,
    /// Ascending, each once.
    pub positions: Vec<u64>,
}

/// Sets by name.
pub type Sets = BTreeMap<String, Positions>;

impl Positions {
    /// True for a position of the set.
    pub fn contains(&self, position: u64) -> bool {
        self.positions.binary_search(&position).is_ok()
    }

    /// The place of a position within the set, from 0.
    pub fn ordinal(&self, position: u64) -> Option<u64> {
        self.positions.binary_search(&position).ok().map(|at| at as u64)
    }

    /// The position at a place within the part of the set that begins at `base`.
    pub fn at(&self, ordinal: u64, base: u64) -> Option<u64> {
        let first = self.positions.partition_point(|position| *position < base);
        self.positions.get(first.checked_add(usize::try_from(ordinal).ok()?)?).copied()
    }

    /// Runs of positions that follow each other: the place of the first, the first, and one past the last.
    pub fn runs(&self) -> Vec<(u64, u64, u64)> {
        let mut runs: Vec<(u64, u64, u64)> = Vec::new();
        for (place, &position) in self.positions.iter().enumerate() {
            match runs.last_mut() {
                Some((_, _, end)) if *end == position => *end += 1,
                _ => runs.push((place as u64, position, position + 1)),
            }
        }
        runs
    }
}

/// Runs as people write them: `0-2, 5`.
pub fn written(positions: &Positions) -> String {
    let runs = positions.runs();
    let each = runs.iter().take(8).map(|(_, first, end)| match end - first {
        1 => first.to_string(),
        _ => format!("{first}-{}", end - 1),
    });
    let more = if runs.len() > 8 { ", ..." } else { "" };
    match runs.is_empty() {
        true => "none".into(),
        false => each.collect::<Vec<_>>().join(", ") + more,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_runs() {
        let set = Positions { axis: "L".into(), positions: vec![0, 1, 2, 5, 7, 8] };
        assert_eq!(set.runs(), [(0, 0, 3), (3, 5, 6), (4, 7, 9)]);
        assert_eq!(written(&set), "0-2, 5, 7-8");
        assert_eq!((set.ordinal(5), set.ordinal(6), set.contains(8)), (Some(3), None, true));
        assert_eq!(
            (set.at(0, 0), set.at(1, 3), set.at(1, 8), set.at(u64::MAX, 0)),
            (Some(0), Some(7), None, None)
        );
        let none = Positions::default();
        assert_eq!((none.runs().len(), written(&none).as_str()), (0, "none"));
    }
}
