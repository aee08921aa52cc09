//! From stored tensors to boxes of canonical tensors.
//!
//! Every stored tensor that a rule names becomes an [`Instance`]: for each atom of the rule, the
//! box of the canonical tensor that it holds and the affine map into its own dimensions.

mod lower;
mod present;

use std::collections::{BTreeMap, HashMap, HashSet};

use super::bind::{self, Group, Known, Local};
use super::expr::{Extents, Factor, Shape};
use super::names::{Match, Membership, Pattern};
use super::sets::{self, Sets};
use super::table::{stored_name, Entry, Facts, Table, Truth};
use crate::codes;
use crate::error::Finding;
use crate::tensor::Dtype;
pub(crate) use lower::Lowering;
pub use lower::{AtomBox, Lowered};
pub(crate) use present::partitions;
use present::Seen;

/// Where a group of stored tensors lies in the parallel topology.
#[derive(Debug, Clone, Default)]
pub struct Unit {
    /// Rank per parallel dimension, e.g. `tp -> 1`.
    pub coords: BTreeMap<String, u64>,
    /// Added to positions in names (stage-local layer numbers).
    pub bases: BTreeMap<String, u64>,
    /// Root that its file lies in: the same piece from two roots is a copy, from one it is a mistake.
    pub root: u32,
    /// File, for messages.
    pub file: String,
    /// Rank in the field's words, e.g. `tp 1`, for messages.
    pub rank: Option<String>,
}

/// A stored tensor as the rules see it.
#[derive(Debug, Clone)]
pub struct Stored {
    /// Name in the layout's terms.
    pub name: String,
    /// Local shape.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: Dtype,
    /// Index of its unit.
    pub unit: u32,
}

/// Canonical tensors and their axes, shared by the two sides of a conversion.
#[derive(Debug, Default)]
pub struct Registry {
    keys: Vec<(String, Vec<String>)>,
    by_name: HashMap<String, u32>,
}

impl Registry {
    /// The key of a canonical tensor; its axes must be the same wherever it is named.
    pub(crate) fn key(&mut self, name: &str, axes: Vec<String>) -> Result<u32, String> {
        if let Some(&key) = self.by_name.get(name) {
            let known = &self.keys[key as usize].1;
            if *known != axes {
                return Err(format!(
                    "canonical tensor {name:?} has axes {known:?} in one rule and {axes:?} in another"
                ));
            }
            return Ok(key);
        }
        self.keys.push((name.to_string(), axes));
        self.by_name.insert(name.to_string(), (self.keys.len() - 1) as u32);
        Ok((self.keys.len() - 1) as u32)
    }

    /// Name of a canonical tensor.
    pub fn name(&self, key: u32) -> &str {
        &self.keys[key as usize].0
    }

    /// Axes of a canonical tensor, sorted.
    pub fn axes(&self, key: u32) -> &[String] {
        &self.keys[key as usize].1
    }

    /// The key of a name, if it occurs.
    pub fn find(&self, name: &str) -> Option<u32> {
        self.by_name.get(name).copied()
    }
}

/// How the ranks' values of one tensor make the whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// Each rank holds its part, or an equal copy.
    Parts,
    /// Values are terms of a sum over this parallel dimension.
    Sum(String),
    /// Sum or copy, depending on a fact that is not known: only all-zero values are safe.
    SumOrCopy(String, String),
}

/// A stored tensor matched to a rule.
#[derive(Debug, Clone)]
pub struct Instance {
    /// Index into the stored tensors (or outputs, on the target side).
    pub tensor: u32,
    /// Index of the rule.
    pub entry: u32,
    /// Index of the unit.
    pub unit: u32,
    /// Position per axis bound by the name.
    pub index: BTreeMap<String, u64>,
    /// Spelling taken.
    pub choices: Vec<usize>,
    /// What it holds.
    pub boxes: Vec<AtomBox>,
    /// How the ranks' values make the whole.
    pub placement: Placement,
}

/// A checkpoint seen through a table.
#[derive(Debug)]
pub struct Resolved {
    /// Stored extents of all axes, and the real extent of the vocabulary axis.
    pub extents: Extents,
    /// Positions of all sets.
    pub sets: Sets,
    /// Matched tensors.
    pub instances: Vec<Instance>,
    /// All that was found wrong or worth noting.
    pub findings: Vec<Finding>,
}

/// What to do with tensors that no rule names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// Refuse: they would be lost or merged wrongly.
    Refuse,
    /// Take them as they are; only sound where nothing is sharded.
    Pass,
}

/// Everything that is known about a checkpoint besides its tensors.
#[derive(Debug, Clone, Default)]
pub struct Outside {
    /// Extents and degrees.
    pub known: Known,
    /// Facts.
    pub facts: Facts,
    /// Sets of positions.
    pub sets: Sets,
    /// Names of tensors that lie beside those that rules name and pass with them: scales.
    pub beside: HashSet<String>,
    /// Real vocabulary, where given.
    pub vocab_size: Option<u64>,
}

/// A rule for a tensor that no rule names: every dimension an axis of its own.
/// `divided` is the dimension split over `tp`, if any; `parts` are what the whole is made of along it, each split by
/// itself, where it is fused.
pub fn generic_entry(table: &mut Table, name: &str, shape: &[u64], divided: Option<usize>, parts: &[u64]) {
    let at = table.entries.len();
    let axis = |name: String| vec![Factor::Axis { name, padded: None }];
    let mut dims: Vec<Vec<Factor>> = (0..shape.len()).map(|d| axis(generic_axis(at, d))).collect();
    if let Some(d) = divided {
        let mut split = vec![generic_axis(at, d)];
        if !parts.is_empty() {
            split = (0..parts.len()).map(|i| format!("{}.{i}", generic_axis(at, d))).collect();
            table.fixed.extend(split.iter().cloned().zip(parts.iter().copied()));
            let alternatives = split.iter().enumerate().map(|(i, part)| (i.to_string(), axis(part.clone())));
            dims[d] = vec![Factor::Alternatives(alternatives.collect())];
        }
        table.divided.extend(split.iter().cloned());
        let default = table.shards.entry(String::new()).or_default();
        default.entry("tp".into()).or_default().extend(split);
    }
    table.entries.push(Entry {
        shape: Some(Shape { dims }),
        generic: true,
        // No rule's tensor has this canonical name, and no other generic one's.
        ..Entry::bare(Pattern::literal(name), &format!("{at}#{}", if parts.is_empty() { "" } else { "{}" }))
    });
}

/// Axis `d` of a generic rule, by the rule's place in its table: a tensor's name would be held many times over.
fn generic_axis(entry: usize, d: usize) -> String {
    format!("{entry}#{d}")
}

enum Matched {
    Rule {
        entry: usize,
        found: Match,
        placement: Placement,
    },
    Ignored(String),
    Nothing,
    Undecided(String),
    /// A rule names it, but not at this position.
    Outside {
        entry: usize,
        set: String,
        axis: String,
        at: u64,
    },
}

/// The rules of a table by what their names are.
struct Names {
    /// Rules for single tensors that no table's author wrote: by name.
    generic: HashMap<String, usize>,
    /// Rules whose names stand for themselves alone: by name, several under different facts.
    literal: HashMap<String, Vec<usize>>,
    /// All others.
    patterns: Vec<usize>,
}

impl Names {
    fn of(table: &Table) -> Names {
        let mut names = Names { generic: HashMap::new(), literal: HashMap::new(), patterns: Vec::new() };
        for (i, entry) in table.entries.iter().enumerate() {
            let name = || entry.name.text().to_string();
            if entry.generic {
                names.generic.insert(name(), i);
            } else if entry.name.is_literal() {
                names.literal.entry(name()).or_default().push(i);
            } else {
                names.patterns.push(i);
            }
        }
        names
    }

    /// Rules that may name a tensor, in the table's order.
    fn candidates(&self, name: &str) -> Vec<usize> {
        let mut found = self.literal.get(name).cloned().unwrap_or_default();
        found.extend(&self.patterns);
        found.sort_unstable();
        found
    }
}

fn match_name(
    table: &Table,
    names: &Names,
    name: &str,
    bases: &BTreeMap<String, u64>,
    outside: &Outside,
) -> Matched {
    if let Some(&entry) = names.generic.get(name) {
        return Matched::Rule { entry, found: Match::default(), placement: Placement::Parts };
    }
    let mut candidates: Vec<(usize, Match, Option<String>)> = Vec::new();
    let (mut beyond, mut unknown_set) = (Matched::Nothing, None);
    for (i, entry) in names.candidates(name).into_iter().map(|i| (i, &table.entries[i])) {
        let Some(mut found) = entry.name.matches(name, bases) else { continue };
        let truth = entry.when.holds(&outside.facts);
        if truth == Truth::Fails {
            continue;
        }
        match entry.name.place(&mut found, bases, &outside.sets) {
            Membership::Inside => {}
            Membership::Outside(set, axis, at) => {
                beyond = Matched::Outside { entry: i, set: set.into(), axis: axis.into(), at };
                continue;
            }
            // A place within a set that is not known is no position.
            Membership::Unknown(set) if entry.name.variables().any(|v| v.ordinal) => {
                return Matched::Undecided(set.into())
            }
            Membership::Unknown(set) => unknown_set = Some(set.to_string()),
        }
        match truth {
            Truth::Unknown(fact) => candidates.push((i, found, Some(fact))),
            _ => candidates.push((i, found, None)),
        }
    }
    let Some((entry, found, _)) = candidates.first().cloned() else { return beyond };
    if let Some(set) = unknown_set.filter(|_| candidates.len() > 1) {
        return Matched::Undecided(set);
    }
    let first = &table.entries[entry];
    if candidates.len() > 1 {
        let fact = candidates.iter().find_map(|(_, _, fact)| fact.clone());
        let alike = candidates.iter().all(|(i, _, _)| {
            let other = &table.entries[*i];
            other.shape == first.shape && other.canonical == first.canonical && other.ignore.is_none()
        });
        let partial = candidates.iter().find_map(|(i, _, _)| table.entries[*i].partial.clone());
        match (fact, partial) {
            (Some(fact), Some(dimension)) if alike => {
                let placement = if outside.known.degree(&dimension) > 1 {
                    Placement::SumOrCopy(dimension, fact)
                } else {
                    Placement::Parts
                };
                return Matched::Rule { entry, found, placement };
            }
            (Some(fact), _) => return Matched::Undecided(fact),
            (None, _) => {}
        }
    }
    if let Some(reason) = &first.ignore {
        return Matched::Ignored(reason.clone());
    }
    let placement = match &first.partial {
        Some(dimension) if outside.known.degree(dimension) > 1 => Placement::Sum(dimension.clone()),
        _ => Placement::Parts,
    };
    Matched::Rule { entry, found, placement }
}

/// Matches, binds, checks and lowers the tensors of a checkpoint.
pub fn resolve(
    table: &mut Table,
    registry: &mut Registry,
    stored: &[Stored],
    units: &[Unit],
    outside: &Outside,
    unknown: Unknown,
) -> Resolved {
    let mut findings = Vec::new();
    let place = |finding: Finding, tensor: &Stored| -> Finding {
        let unit = &units[tensor.unit as usize];
        let mut finding = finding.file(&unit.file);
        finding.tensor = Some(tensor.name.clone());
        finding.rank = unit.rank.clone();
        finding
    };

    // A rank beyond the degree would lie outside every divided tensor.
    for unit in units {
        for (dimension, &rank) in &unit.coords {
            let degree = outside.known.degree(dimension);
            let counts = outside.known.degrees.contains_key(dimension)
                || table.shards.values().any(|map| map.get(dimension).is_some_and(|axes| !axes.is_empty()));
            if counts && rank >= degree {
                let mut finding = Finding::new(codes::RANKS_DISAGREE, format!("rank on {dimension}"))
                    .file(&unit.file)
                    .expected(format!("below the degree of {degree}"), rank)
                    .help(
                        "the file is a leftover of a run at a larger degree, or the degree is stated wrongly",
                    );
                finding.rank = unit.rank.clone();
                findings.push(finding);
            }
        }
    }

    // 1. names -> rules
    let mut names = Names::of(table);
    let mut matched: Vec<Option<(usize, Match, Placement)>> = Vec::with_capacity(stored.len());
    let mut extents_by_name: HashMap<String, (u64, usize)> = HashMap::new();
    let mut generic = Extents::new();
    for (t, tensor) in stored.iter().enumerate() {
        let unit = &units[tensor.unit as usize];
        let result = match match_name(table, &names, &tensor.name, &unit.bases, outside) {
            Matched::Rule { entry, found, placement } => {
                for (axis, value) in &found.extents {
                    extents_by_name.entry(axis.clone()).or_insert((*value, t));
                }
                if table.entries[entry].generic {
                    for (d, &n) in tensor.shape.iter().enumerate() {
                        let axis = generic_axis(entry, d);
                        let degree = table.divided_by("", &axis).map_or(1, |dim| outside.known.degree(dim));
                        generic.entry(axis).or_insert(n * degree);
                    }
                }
                Some((entry, found, placement))
            }
            Matched::Ignored(reason) => {
                findings.push(place(Finding::new(codes::IGNORED, reason), tensor));
                None
            }
            Matched::Undecided(fact) => {
                findings.push(place(unknown_fact(&fact), tensor));
                None
            }
            Matched::Outside { entry, set, axis, at } => {
                findings.push(place(outside_of_set(table, entry, &outside.sets, &set, &axis, at), tensor));
                None
            }
            Matched::Nothing
                if unknown == Unknown::Pass
                    || outside.beside.contains(&tensor.name)
                    || table.keeps(&tensor.name) =>
            {
                generic_entry(table, &tensor.name, &tensor.shape, None, &[]);
                names.generic.insert(tensor.name.clone(), table.entries.len() - 1);
                let entry = table.entries.len() - 1;
                generic.extend(tensor.shape.iter().enumerate().map(|(d, &n)| (generic_axis(entry, d), n)));
                Some((entry, Match::default(), Placement::Parts))
            }
            Matched::Nothing => {
                let finding = Finding::new(
                    codes::UNKNOWN_TENSOR,
                    format!("no rule of layout {} names this tensor", table.name),
                )
                .help("describe it in a layout of your own (--layout FILE.toml), or give it `ignore` with a reason there");
                findings.push(place(finding, tensor));
                None
            }
        };
        matched.push(result);
    }

    // 2. shapes -> axes
    let mut groups: HashMap<(usize, &[u64]), Group> = HashMap::new();
    for (tensor, rule) in stored.iter().zip(&matched) {
        let Some((entry, ..)) = rule else { continue };
        if table.entries[*entry].generic {
            continue;
        }
        let group = groups.entry((*entry, &tensor.shape)).or_insert_with(|| Group {
            entry: *entry,
            shape: tensor.shape.clone(),
            count: 0,
            witness: tensor.name.clone(),
            file: units[tensor.unit as usize].file.clone(),
        });
        group.count += 1;
    }
    let mut groups: Vec<Group> = groups.into_values().collect();
    groups.sort_by(|a, b| (a.entry, &a.shape).cmp(&(b.entry, &b.shape)));
    let mut known = outside.known.clone();
    // Positions in names bind an axis only where nothing else does: the last layer may be missing.
    let mut counted: BTreeMap<String, u64> = BTreeMap::new();
    for (_, found, _) in matched.iter().flatten() {
        for (axis, &at) in &found.index {
            let n = counted.entry(axis.clone()).or_default();
            *n = (*n).max(at.saturating_add(1));
        }
    }
    for (axis, (value, witness)) in &extents_by_name {
        match known.extents.get(axis) {
            Some(given) if given != value => findings.push(place(
                Finding::new(codes::CONFIG_DISAGREES, format!("extent of axis {axis} in the tensor's name"))
                    .expected(given, value)
                    .help("a layer's files are missing or the config describes another model"),
                &stored[*witness],
            )),
            Some(_) => {}
            None => {
                known.extents.insert(axis.clone(), *value);
            }
        }
    }
    for (axis, n) in counted {
        known.extents.entry(axis).or_insert(n);
    }
    let positions = || matched.iter().enumerate().filter_map(|(t, rule)| Some((t, rule.as_ref()?)));
    let seen =
        positions().map(|(t, (entry, found, _))| Seen { tensor: t, entry: *entry, index: &found.index });
    let (sets, excluded) = present::sets_of(table, outside, &mut known, &groups, &seen.collect::<Vec<_>>());
    findings.extend(excluded.into_iter().map(|(finding, t)| place(finding, &stored[t])));
    let (mut extents, bound) = bind::bind(table, &groups, &known);
    findings.extend(bound);
    extents.extend(generic);

    // 3. the vocabulary's real extent
    if let Some(vocab) = table.vocab.clone() {
        let padded = table.entries.iter().filter_map(|e| e.shape.as_ref()).map(|s| stored_name(s, &vocab));
        let padded = padded.into_iter().find(|p| *p != vocab);
        let rows = padded.as_ref().and_then(|p| extents.get(p)).copied();
        let real = outside.vocab_size.or_else(|| extents.get(&vocab).copied()).or(rows);
        if let (Some(real), Some(rows)) = (real, rows) {
            if real > rows {
                findings.push(
                    Finding::new(codes::BAD_VALUE, format!("{rows} of {real} rows of the vocabulary found"))
                        .expected(format!("{real} rows"), rows)
                        .help(
                            "the last tensor-parallel rank's file may be missing: no gap shows it; \
                             or the size given is another model's (--vocab-size, --config)",
                        ),
                );
            }
        }
        if let Some(real) = real {
            extents.insert(vocab, real);
        }
    }

    // 4. rules + axes -> boxes
    let local = Local::new(table, &extents, &known);
    findings.extend(local.findings.iter().cloned());
    let table: &Table = table;
    let mut lowering = Lowering::new(table, &local, &sets);
    let mut instances = Vec::with_capacity(stored.len());
    let mut unbound: BTreeMap<String, usize> = BTreeMap::new();
    for (t, (tensor, rule)) in stored.iter().zip(matched).enumerate() {
        let Some((entry, found, placement)) = rule else { continue };
        if let Some(finding) = bind::check_shape(table, entry, &tensor.shape, &local, &known) {
            findings.push(place(finding, tensor));
            continue;
        }
        if let Some((axis, at)) =
            found.index.iter().find(|(axis, at)| extents.get(*axis).is_some_and(|n| *at >= n))
        {
            findings.push(place(
                Finding::new(codes::CONFIG_DISAGREES, format!("position on axis {axis}"))
                    .expected(format!("below {}", extents[axis]), at)
                    .help("the config describes a model with fewer layers, or the file is a leftover of another run"),
                tensor,
            ));
            continue;
        }
        let unit = &units[tensor.unit as usize];
        match lowering.boxes(registry, entry, &found.index, unit, &extents) {
            Ok(boxes) => instances.push(Instance {
                tensor: t as u32,
                entry: entry as u32,
                unit: tensor.unit,
                index: found.index,
                choices: found.choices,
                boxes,
                placement,
            }),
            Err(message) => {
                unbound.entry(message).or_insert(t);
            }
        }
    }
    for (message, t) in unbound {
        let finding = Finding::new(codes::UNBOUND_AXIS, format!("layout {}: {message}", table.name))
            .help("give the model's config with --config");
        findings.push(place(finding, &stored[t]));
    }
    Resolved { extents, sets, instances, findings }
}

/// The finding for a tensor whose name a rule has, but not at its position.
fn outside_of_set(table: &Table, entry: usize, sets: &Sets, set: &str, axis: &str, at: u64) -> Finding {
    let rule = table.entries[entry].name.text();
    let held = sets.get(set).map(sets::written).unwrap_or_default();
    Finding::new(codes::UNKNOWN_TENSOR, format!("{rule} of layout {} is not for this one: {set}", table.name))
        .expected(format!("one of {axis} {held}"), at)
        .help("the config describes another model (--config), or the file is a leftover of another run")
}

/// The finding for a fact that decides values and is stated nowhere.
pub fn unknown_fact(fact: &str) -> Finding {
    Finding::new(codes::FACT_UNKNOWN, format!("the result depends on `{fact}`, which nothing here states"))
        .help(format!("give the training config with --config (it must say {fact}: true or false)"))
}
