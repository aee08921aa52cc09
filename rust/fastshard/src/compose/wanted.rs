//! The wanted tensors: those that a table requires, or the source's own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Source, Target};
use crate::codes;
use crate::error::Finding;
use crate::layout::bind::Known;
use crate::layout::expr::Extents;
use crate::layout::resolve::unknown_fact;
use crate::layout::sets::Sets;
use crate::layout::table::{Entry, Table, Truth};

/// A target tensor to make.
pub(super) struct Wanted {
    pub(super) entry: usize,
    /// Its position, which the ranks that hold a part of it share.
    pub(super) index: Arc<BTreeMap<String, u64>>,
    pub(super) choices: Vec<usize>,
    /// Its rank, which the tensors of the rank share.
    pub(super) coords: Arc<BTreeMap<String, u64>>,
}

/// Maximum number of positions of one entry; above it, numbers in names or configs are implausible.
const MAX_POSITIONS: u64 = 1 << 18;
/// Maximum number of missing layers, and of missing tensors, that findings name.
pub(super) const MAX_MISSING: usize = 1000;

/// Entries with more positions than a checkpoint can have.
pub(super) fn too_many_positions(table: &Table, extents: &Extents) -> Vec<Finding> {
    let count = |entry: &Entry| {
        let axes = entry.name.variables().filter(|v| !v.extent).filter_map(|v| extents.get(&v.axis));
        axes.fold(1u64, |n, extent| n.saturating_mul(*extent))
    };
    table
        .entries
        .iter()
        .map(|entry| (entry, count(entry)))
        .filter(|(_, n)| *n > MAX_POSITIONS)
        .map(|(entry, n)| {
            Finding::new(codes::BAD_VALUE, "positions that the name stands for")
                .tensor(entry.name.text())
                .expected(format!("at most {MAX_POSITIONS}"), n)
                .help("correct the number in the tensor's name or in the config; it is far beyond any model")
        })
        .collect()
}

/// All positions on the name-bound axes of an entry; none if an extent or a set is unknown.
pub(super) fn positions(entry: &Entry, extents: &Extents, sets: &Sets) -> Option<Vec<BTreeMap<String, u64>>> {
    let mut all = vec![BTreeMap::new()];
    for variable in entry.name.variables().filter(|v| !v.extent) {
        let each = variable.positions(*extents.get(&variable.axis)?, sets)?;
        all = all
            .into_iter()
            .flat_map(|index: BTreeMap<String, u64>| {
                // An axis that stands in a name twice is at one position.
                let known = index.get(&variable.axis).copied();
                let each = each.iter().filter(move |at| known.is_none_or(|known| known == **at));
                each.map(move |at| {
                    let mut index = index.clone();
                    index.insert(variable.axis.clone(), *at);
                    index
                })
            })
            .collect();
    }
    Some(all)
}

/// All ranks of the parallel dimensions that divide (or sum) entries of a table.
pub(super) fn ranks(table: &Table, known: &Known) -> Vec<BTreeMap<String, u64>> {
    let mut dimensions: Vec<&String> = table.shards.values().flat_map(|m| m.keys()).collect();
    dimensions.sort();
    dimensions.dedup();
    let mut all = vec![BTreeMap::new()];
    for dimension in dimensions {
        all = all
            .into_iter()
            .flat_map(|coords: BTreeMap<String, u64>| {
                (0..known.degree(dimension)).map(move |r| {
                    let mut coords = coords.clone();
                    coords.insert(dimension.clone(), r);
                    coords
                })
            })
            .collect();
    }
    all
}

/// The source's own tensors as a run without parallelism would name them.
pub(super) fn own_names(source: &Source) -> Vec<Wanted> {
    let mut seen = BTreeSet::new();
    let mut wanted = Vec::new();
    let alone = Arc::default();
    for instance in &source.resolved.instances {
        let index: Vec<(String, u64)> = instance.index.iter().map(|(a, n)| (a.clone(), *n)).collect();
        let key = (instance.entry as usize, index, instance.choices.clone());
        if seen.insert(key) {
            wanted.push(Wanted {
                entry: instance.entry as usize,
                index: Arc::new(instance.index.clone()),
                choices: instance.choices.clone(),
                coords: Arc::clone(&alone),
            });
        }
    }
    wanted
}

/// Parallel dimensions that divide an entry's tensors, or a sum over which they are.
fn dividing<'a>(table: &'a Table, entry: &'a Entry) -> BTreeSet<&'a str> {
    let mut names = Vec::new();
    let shape = entry.shape.iter().flat_map(|s| &s.dims);
    shape.for_each(|d| crate::layout::expr::names_in(d, &table.derived, &mut names));
    let divided = names.iter().filter_map(|n| table.divided_by(&entry.class, n));
    let counted = entry.name.variables().filter(|v| !v.extent);
    let numbered = counted.filter_map(|v| table.divided_by(&entry.class, &v.axis));
    divided.chain(entry.partial.as_deref()).chain(numbered).collect()
}

/// True if a rank holds the tensor at a position: of an axis that ranks divide and the name counts, each has its share.
fn is_in_share(
    table: &Table,
    entry: &Entry,
    (extents, known): (&Extents, &Known),
    index: &BTreeMap<String, u64>,
    coords: &BTreeMap<String, u64>,
) -> bool {
    index.iter().all(|(axis, at)| {
        let Some(dimension) = table.divided_by(&entry.class, axis) else { return true };
        let share = extents.get(axis).map_or(0, |extent| extent / known.degree(dimension));
        share > 0 && at / share == coords.get(dimension).copied().unwrap_or(0)
    })
}

/// Every tensor that the target's table requires.
pub(super) fn table_names(
    target: &Target,
    table: &Table,
    (extents, sets): (&Extents, &Sets),
    known: &Known,
    findings: &mut Vec<Finding>,
) -> Vec<Wanted> {
    let mut wanted = Vec::new();
    let facts = &target.outside.facts;
    let all_ranks = match target.ranks.filter(|_| !target.chunks) {
        Some(ranks) => ranks.to_vec(),
        None => ranks(table, known),
    };
    let all_ranks: Vec<Arc<_>> = all_ranks.into_iter().map(Arc::new).collect();
    for (i, entry) in table.entries.iter().enumerate() {
        if entry.ignore.is_some() || entry.shape.is_none() {
            continue;
        }
        match entry.when.holds(facts) {
            Truth::Fails => continue,
            Truth::Holds => {}
            Truth::Unknown(_) if entry.optional => {}
            Truth::Unknown(fact) => {
                findings.push(unknown_fact(&fact).tensor(entry.name.text()));
                continue;
            }
        }
        let Some(positions) = positions(entry, extents, sets) else {
            let unknown =
                entry.name.variables().filter_map(|v| v.set.as_ref()).find(|s| !sets.contains_key(*s));
            if let Some(set) = unknown.filter(|_| !entry.optional) {
                findings.push(unknown_fact(set).tensor(entry.name.text()));
            } else if !entry.optional {
                findings.push(
                    Finding::new(
                        codes::UNBOUND_AXIS,
                        format!("layout {}: the number of layers is not known", table.name),
                    )
                    .tensor(entry.name.text())
                    .help("pass the model's config")
                    .run("--config FILE"),
                );
            }
            continue;
        };
        let divided = dividing(table, entry);
        let holds = |coords: &BTreeMap<String, u64>| {
            !target.chunks || coords.iter().all(|(d, rank)| *rank == 0 || divided.contains(d.as_str()))
        };
        for index in positions.into_iter().map(Arc::new) {
            let is_here = |coords: &BTreeMap<String, u64>| {
                holds(coords) && is_in_share(table, entry, (extents, known), &index, coords)
            };
            for coords in all_ranks.iter().filter(|coords| is_here(coords)) {
                wanted.push(Wanted {
                    entry: i,
                    index: Arc::clone(&index),
                    choices: Vec::new(),
                    coords: Arc::clone(coords),
                });
            }
        }
    }
    wanted
}
