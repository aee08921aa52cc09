//! Completeness of a source by its own layout.

use std::cell::LazyCell;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::wanted::{positions, MAX_MISSING};
use super::Source;
use crate::codes;
use crate::error::{Finding, Ranks};
use crate::layout::axis_words;
use crate::layout::names::{Membership, Pattern};
use crate::layout::resolve::{partitions, Resolved};
use crate::layout::table::{Entry, Truth};

/// Rank per parallel dimension.
type Coords = BTreeMap<String, u64>;
/// Position on each axis bound by the name.
type Position = BTreeMap<String, u64>;

/// A tensor that the layout requires and no file has.
struct Missing {
    /// Its rule.
    entry: usize,
    name: String,
    position: Position,
    /// Ranks that should hold it; empty if it is not divided.
    coords: Coords,
}

/// Layers without any tensor, by axis and position, with the number of tensors that each should have.
type LostLayers<'a> = BTreeMap<(&'a str, u64), u64>;

/// The tensors that the source's own layout requires and no file has: those that some layers or ranks lack,
/// by their names with their rules.
pub(super) fn completeness(source: &Source) -> (Vec<Finding>, BTreeMap<String, usize>) {
    let missing = missing(source);
    // Whole tensors are of no rank and of no node.
    let ranked = source.units.iter().any(|unit| !unit.coords.is_empty());
    let (layers, mut findings) = lost_layers(source, &missing, ranked);
    let gone = |position: &Position| position.iter().any(|(a, n)| layers.contains_key(&(a.as_str(), *n)));
    let mut single: Vec<&Missing> = missing.iter().filter(|one| !gone(&one.position)).collect();
    if single.len() > MAX_MISSING {
        put_partial_layers_first(source, &mut single);
    }
    findings.extend(single.iter().take(MAX_MISSING).map(|one| one.finding(ranked)));
    findings.extend(in_no_half(source, gone));
    let more = layers.len().saturating_sub(MAX_MISSING) + single.len().saturating_sub(MAX_MISSING);
    if more > 0 {
        findings.push(
            Finding::new(codes::MISSING_TENSOR, format!("and {more} more layers or tensors like these"))
                .count(more as u64),
        );
    }
    (findings, missing.into_iter().map(|one| (one.name, one.entry)).collect())
}

/// Ranks that hold a tensor, by its rule and position, whatever its place.
type Present<'a> = HashMap<(usize, Vec<u64>), Vec<&'a Coords>>;

fn present<'a>(source: &Source<'a>) -> Present<'a> {
    let mut present = Present::new();
    let resolved = source.resolved;
    let placed = resolved.instances.iter().map(|i| (i.entry, i.unit, &i.index));
    for (entry, unit, index) in placed.chain(resolved.unplaced.iter().map(|(e, u, index)| (*e, *u, index))) {
        let at = index.values().copied().collect();
        let coords = &source.units[unit as usize].coords;
        present.entry((entry as usize, at)).or_default().push(coords);
    }
    present
}

/// The spelling of a rule's tensors: that of the same tensor on another rank, else that of any other tensor
/// of the rule.
struct Spellings<'a> {
    of_one: HashMap<(u32, &'a Position), &'a [usize]>,
    of_rule: HashMap<u32, &'a [usize]>,
}

impl<'a> Spellings<'a> {
    fn of(source: &Source<'a>) -> Spellings<'a> {
        let mut spellings = Spellings { of_one: HashMap::new(), of_rule: HashMap::new() };
        for instance in source.resolved.instances.iter().filter(|one| !one.choices.is_empty()) {
            spellings.of_one.entry((instance.entry, &instance.index)).or_insert(&instance.choices);
            spellings.of_rule.entry(instance.entry).or_insert(&instance.choices);
        }
        spellings
    }

    fn choices(&self, entry: usize, position: &Position) -> &'a [usize] {
        let entry = entry as u32;
        let one = self.of_one.get(&(entry, position)).or_else(|| self.of_rule.get(&entry));
        one.copied().unwrap_or(&[])
    }
}

/// All tensors that the layout requires and no file has.
fn missing(source: &Source) -> Vec<Missing> {
    let (table, resolved) = (source.table, source.resolved);
    let present = present(source);
    let excused = excused(source);
    let spellings = Spellings::of(source);
    let mut missing = Vec::new();
    for (e, entry) in table.entries.iter().enumerate() {
        if entry.ignore.is_some()
            || entry.shape.is_none()
            || entry.generic && source.outside.known.degrees.is_empty()
        {
            continue;
        }
        let truth = entry.when.holds(&source.outside.facts);
        if truth == Truth::Fails {
            continue;
        }
        let Some(positions) = positions(entry, &resolved.extents, &resolved.sets) else { continue };
        let anywhere = positions.iter().any(|p| present.contains_key(&(e, p.values().copied().collect())));
        if !anywhere && (entry.optional || covered_by_other(source, e) || truth != Truth::Holds) {
            continue;
        }
        let wanted = holders(source, entry);
        let dimensions: Vec<&String> =
            wanted.first().map(|coords| coords.keys().collect()).unwrap_or_default();
        let spared = LazyCell::new(|| {
            let names = excused.iter().copied().chain(source.absent);
            named_by(&entry.name, names, resolved)
        });
        for position in positions {
            let key = (e, position.values().copied().collect::<Vec<u64>>());
            // By their ranks on these dimensions: there may be hundreds of both.
            let ranks = |at: &&Coords| dimensions.iter().map(|d| rank_on(at, d)).collect::<Vec<u64>>();
            let here: HashSet<_> = present.get(&key).into_iter().flatten().map(ranks).collect();
            for coords in &wanted {
                if !here.contains(&ranks(&coords)) && !spared.contains(&key.1) {
                    let choices = spellings.choices(e, &position);
                    let name = entry.name.format(&position, &resolved.extents, &resolved.sets, choices);
                    if let Some(name) = name {
                        let (position, coords) = (position.clone(), coords.clone());
                        missing.push(Missing { entry: e, name, position, coords });
                    }
                }
            }
        }
    }
    missing
}

/// Names of tensors with a finding, which are not reported as missing too.
fn excused<'a>(source: &Source<'a>) -> HashSet<&'a String> {
    source.resolved.findings.iter().filter_map(|f| f.tensor.as_ref()).collect()
}

/// The ranks that should hold a rule's tensors: all combinations of ranks on the dimensions that divide them.
fn holders(source: &Source, entry: &Entry) -> Vec<Coords> {
    let known = &source.outside.known;
    let bound: Vec<&String> = entry.name.variables().filter(|v| !v.extent).map(|v| &v.axis).collect();
    let dimensions = source.table.shards[&entry.class]
        .iter()
        .filter(|(_, axes)| bound.is_empty() || !axes.iter().any(|a| bound.contains(&a)))
        .map(|(d, _)| d)
        .filter(|d| known.degree(d) > 1);
    let mut holders = vec![Coords::new()];
    for d in dimensions {
        let ranks = |at: Coords| {
            (0..known.degree(d)).map(move |rank| {
                let mut at = at.clone();
                at.insert(d.clone(), rank);
                at
            })
        };
        holders = holders.into_iter().flat_map(ranks).collect();
    }
    holders
}

/// The rank of a unit at `at` on a dimension: one that it does not name has one rank.
fn rank_on(at: &Coords, dimension: &str) -> u64 {
    at.get(dimension).copied().unwrap_or(0)
}

/// True if a unit at `at` is one of the ranks `coords`.
fn lies_within(at: &Coords, coords: &Coords) -> bool {
    coords.iter().all(|(dimension, rank)| rank_on(at, dimension) == *rank)
}

/// Layers without any tensor: each is one finding.
fn lost_layers<'m>(source: &Source, missing: &'m [Missing], ranked: bool) -> (LostLayers<'m>, Vec<Finding>) {
    let mut layers = LostLayers::new();
    for (axis, at) in missing.iter().flat_map(|one| &one.position) {
        *layers.entry((axis, *at)).or_default() += 1;
    }
    let present: HashSet<(&str, u64)> =
        source.resolved.instances.iter().flat_map(|i| &i.index).map(|(a, n)| (a.as_str(), *n)).collect();
    layers.retain(|layer, _| !present.contains(layer));
    let finding = |(&(axis, at), count): (&(&str, u64), &u64)| {
        let n = source.resolved.extents.get(axis).copied().unwrap_or(0);
        let there = if n <= 128 {
            let each = (0..n).map(|i| if present.contains(&(axis, i)) { i.to_string() } else { "_".into() });
            each.collect::<Vec<_>>().join(",")
        } else {
            format!("{n} in all")
        };
        let word = axis_words::noun(axis).unwrap_or(axis);
        Finding::new(
            codes::MISSING_LAYER,
            format!("{word} {at} is missing: no file has any of its {count} tensors"),
        )
        .axis(axis)
        .layers(at, at)
        .count(*count)
        .expected(format!("{word}s 0 to {}", n.saturating_sub(1)), there)
        .help(if ranked {
            "copy the files of this layer from the pipeline stage that owned it"
        } else {
            "copy the files of this layer from the original checkpoint"
        })
    };
    let findings = layers.iter().take(MAX_MISSING).map(finding).collect();
    (layers, findings)
}

/// Sorts missing tensors, so that those of a lost file do not crowd out those of other files: first come
/// tensors in layers of which their rank holds other tensors.
fn put_partial_layers_first(source: &Source, missing: &mut [&Missing]) {
    let beside = |one: &Missing| {
        source.resolved.instances.iter().any(|i| {
            one.position.iter().all(|(axis, n)| i.index.get(axis) == Some(n))
                && lies_within(&source.units[i.unit as usize].coords, &one.coords)
        })
    };
    let mut known: BTreeMap<(&Position, &Coords), bool> = BTreeMap::new();
    missing
        .sort_by_cached_key(|one| !*known.entry((&one.position, &one.coords)).or_insert_with(|| beside(one)));
}

impl Missing {
    fn finding(&self, ranked: bool) -> Finding {
        Finding::new(codes::MISSING_TENSOR, "expected by the layout, but missing")
            .tensor(&self.name)
            .help(match (self.coords.is_empty(), ranked) {
                (false, _) => "copy the file of this rank from the node that wrote it",
                (true, true) => "copy the file that holds it from the node that wrote it",
                (true, false) => "copy the file that holds it from the original checkpoint, or save it again with this tensor",
            })
            .ranks(Ranks::one(self.coords.iter().map(|(d, at)| (d, *at))))
    }
}

/// Findings for positions that are neither in a set nor in its complement: nothing shows which tensors they
/// lack.
fn in_no_half(source: &Source, gone: impl Fn(&Position) -> bool) -> Vec<Finding> {
    let (table, resolved) = (source.table, source.resolved);
    let mut findings = Vec::new();
    for (name, other) in partitions(table) {
        let halves = [&resolved.sets[name], &resolved.sets[other]];
        let axis = &halves[0].axis;
        let Some(&extent) = resolved.extents.get(axis) else { continue };
        // A model whose tensors are all of other kinds has none of the two.
        if halves.iter().all(|half| half.positions.is_empty()) {
            continue;
        }
        let absent = (0..extent).filter(|at| halves.iter().all(|half| !half.contains(*at)));
        let lacking = |at: &u64| !gone(&BTreeMap::from([(axis.clone(), *at)]));
        findings.extend(absent.filter(lacking).take(MAX_MISSING).map(|at| {
            let message = format!("{} has tensors neither of {name} nor of {other}", axis_words::position(axis, at));
            Finding::new(codes::MISSING_TENSOR, message)
                .expected("the keys of one form", "none")
                .help("copy the files of this layer from the node that wrote them, or pass the model's config with --config")
        }));
    }
    findings
}

/// Positions that names stand for, in any of its spellings.
fn named_by<'a>(
    pattern: &Pattern,
    names: impl Iterator<Item = &'a String>,
    resolved: &Resolved,
) -> HashSet<Vec<u64>> {
    let bases = BTreeMap::new();
    let placed = |name: &String| {
        let mut found = pattern.matches(name, &bases)?;
        (pattern.place(&mut found, &bases, &resolved.sets) == Membership::Inside).then_some(found)
    };
    names
        .filter_map(placed)
        .filter(|found| found.extents.iter().all(|(axis, n)| resolved.extents.get(axis) == Some(n)))
        .map(|found| found.index.into_values().collect())
        .collect()
}

/// True if another rule's tensors hold the canonical tensors of this one (a tied or alternative form).
fn covered_by_other(source: &Source, entry: usize) -> bool {
    let rule = &source.table.entries[entry];
    source
        .table
        .tied
        .iter()
        .any(|t| t.tensor == rule.canonical && t.when.holds(&source.outside.facts) == Truth::Holds)
        || source.table.entries.iter().enumerate().any(|(i, other)| {
            i != entry
                && other.name == rule.name
                && source.resolved.instances.iter().any(|instance| instance.entry as usize == i)
        })
}
