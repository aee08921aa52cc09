//! Which positions there are: sets that no config tells are those seen, and an optional set may be absent as a whole.

use std::collections::{BTreeMap, BTreeSet};

use super::Outside;
use crate::codes;
use crate::error::Finding;
use crate::layout::axis_words;
use crate::layout::bind::{self, Group, Known, Local};
use crate::layout::expr;
use crate::layout::sets::{Positions, Sets};
use crate::layout::table::Table;

/// A stored tensor with its rule and the positions in its name.
pub(super) struct Seen<'a> {
    pub(super) tensor: usize,
    pub(super) entry: usize,
    pub(super) index: &'a BTreeMap<String, u64>,
}

/// The sets of a checkpoint, their extents put to what is `known`; and what excludes each other, with the tensor.
pub(super) fn sets_of(
    table: &Table,
    outside: &Outside,
    known: &mut Known,
    groups: &[Group],
    seen: &[Seen],
) -> (Sets, Vec<(Finding, usize)>) {
    let declared = &table.config.sets;
    let matching =
        outside.sets.iter().filter(|(name, set)| declared.get(*name).is_some_and(|d| d.axis == set.axis));
    let mut sets: Sets = matching.map(|(name, set)| (name.clone(), set.clone())).collect();
    shorten(table, &mut sets, known, groups, seen);
    for (name, set) in &sets {
        known.extents.insert(expr::extent_in(&set.axis, name), set.positions.len() as u64);
    }
    // The rest is what is seen, with a tensor that shows it.
    let mut shown: BTreeMap<(&str, u64), usize> = BTreeMap::new();
    for one in seen {
        for variable in table.entries[one.entry].name.variables() {
            let Some(set) = variable.set.as_deref().filter(|set| !sets.contains_key(*set)) else { continue };
            if let Some(&at) = one.index.get(&variable.axis) {
                shown.entry((set, at)).or_insert(one.tensor);
            }
        }
    }
    let unknown: Vec<&String> = declared.keys().filter(|name| !sets.contains_key(*name)).collect();
    for &name in &unknown {
        let positions = shown.keys().filter(|(set, _)| set == name).map(|(_, at)| *at).collect();
        sets.insert(name.clone(), Positions { axis: declared[name].axis.clone(), positions });
    }
    let mut excluded = Vec::new();
    for (name, other) in partitions(table).filter(|(name, _)| unknown.contains(name)) {
        for at in sets[name].positions.iter().filter(|at| sets[other].contains(**at)) {
            let message = format!(
                "{} has tensors of {name} and of {other}",
                axis_words::position(&sets[name].axis, *at)
            );
            let finding =
                Finding::new(codes::UNKNOWN_TENSOR, message).expected("the keys of one form", "both").help(
                    "move the file of the other model away, or pass the config of this model with --config",
                );
            excluded.push((finding, shown[&(name.as_str(), *at)]));
        }
    }
    (sets, excluded)
}

/// Sets that are the rest of another: `moe` and `dense` for `moe = "not dense"`.
pub(crate) fn partitions(table: &Table) -> impl Iterator<Item = (&String, &String)> {
    table.config.sets.iter().filter_map(|(name, set)| {
        let (other, _) = table.config.sets.get_key_value(set.holds.rest_of()?)?;
        Some((name, other))
    })
}

/// Ends an axis before an optional set of which nothing is there.
fn shorten(table: &Table, sets: &mut Sets, known: &mut Known, groups: &[Group], seen: &[Seen]) {
    let optional: Vec<&String> =
        table.config.sets.iter().filter(|(_, s)| s.optional).map(|(n, _)| n).collect();
    // The shortest first: of two that end an axis, one may be there.
    let mut ends: BTreeSet<(String, u64)> = BTreeSet::new();
    for set in optional.iter().filter_map(|name| sets.get(*name)) {
        ends.extend(set.positions.first().map(|first| (set.axis.clone(), *first)));
    }
    for (axis, end) in ends.into_iter().rev() {
        if known.extents.get(&axis).is_none_or(|extent| *extent <= end) {
            continue;
        }
        let named = seen.iter().any(|one| one.index.get(&axis).is_some_and(|at| *at >= end));
        let short = shortened(sets, &axis, end);
        let fewer = Known {
            extents: known
                .extents
                .iter()
                .map(|(k, n)| (k.clone(), if *k == axis { end } else { *n }))
                .collect(),
            degrees: known.degrees.clone(),
        };
        if named || misfits(table, groups, &fewer, &short) > misfits(table, groups, known, sets) {
            continue;
        }
        *known = fewer;
        *sets = short;
    }
}

fn shortened(sets: &Sets, axis: &str, end: u64) -> Sets {
    let cut = |set: &Positions| Positions {
        axis: set.axis.clone(),
        positions: set.positions.iter().copied().filter(|at| set.axis != axis || *at < end).collect(),
    };
    sets.iter().map(|(name, set)| (name.clone(), cut(set))).collect()
}

/// How many groups of stored tensors have another shape than their rule gives them.
fn misfits(table: &Table, groups: &[Group], known: &Known, sets: &Sets) -> usize {
    let mut known = known.clone();
    let counts =
        sets.iter().map(|(name, set)| (expr::extent_in(&set.axis, name), set.positions.len() as u64));
    known.extents.extend(counts);
    let (mut extents, _) = bind::bind(table, groups, &known);
    // What all shapes contradict is for them to tell; here it is the question.
    extents.extend(known.extents.clone());
    let local = Local::new(table, &extents, &known);
    let misfit =
        |group: &&Group| bind::check_shape(table, group.entry, &group.shape, &local, &known).is_some();
    groups.iter().filter(misfit).count()
}
