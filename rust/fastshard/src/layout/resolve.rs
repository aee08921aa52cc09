//! From stored tensors to boxes of canonical tensors.
//!
//! Every stored tensor that a rule names becomes an [`Instance`]: for each atom of the rule, the
//! box of the canonical tensor that it holds and the affine map into its own dimensions.

mod lower;
mod named;
mod present;

use std::collections::{BTreeMap, HashMap, HashSet};

use super::axis_words;
use super::bind::{self, Group, Known, Local};
use super::expr::{Extents, Factor, Shape};
use super::names::{Match, Pattern};
use super::sets::{self, Sets};
use super::table::{stored_name, Entry, Facts, Table};
use crate::codes;
use crate::error::Finding;
use crate::few::Few;
use crate::name::Name;
use crate::tensor::Dtype;
pub(crate) use lower::Lowering;
pub use lower::{AtomBox, Lowered};
use named::{match_name, Matched, Names};
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
    pub name: Name,
    /// Local shape.
    pub shape: Few<u64>,
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

/// A tensor that a rule matches and that has no place, as an axis has no extent: rule, unit and position.
pub type Unplaced = (u32, u32, BTreeMap<String, u64>);

/// A checkpoint seen through a table.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// Stored extents of all axes, and the real extent of the vocabulary axis.
    pub extents: Extents,
    /// Positions of all sets.
    pub sets: Sets,
    /// Matched tensors.
    pub instances: Vec<Instance>,
    /// Tensors that could not be placed.
    pub unplaced: Vec<Unplaced>,
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

/// A checkpoint's tensors, and what is known of them besides.
struct Checkpoint<'a> {
    stored: &'a [Stored],
    units: &'a [Unit],
    outside: &'a Outside,
}

/// The rule of each stored tensor, if it has one.
type Rules = Vec<Option<(usize, Match, Placement)>>;

/// What the names of all tensors say.
#[derive(Default)]
struct Named {
    rules: Rules,
    /// Extents that stand in names, and the first tensor whose name has one.
    extents: HashMap<String, (u64, usize)>,
    /// Extents of generic axes.
    generic: Extents,
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
    let checkpoint = Checkpoint { stored, units, outside };
    let mut findings = checkpoint.ranks_beyond_degrees(table);
    let named = checkpoint.match_names(table, unknown, &mut findings);
    let groups = checkpoint.groups(table, &named.rules);
    let mut known = checkpoint.known_with_names(&named, &mut findings);
    let positions = named.rules.iter().enumerate().filter_map(|(t, rule)| Some((t, rule.as_ref()?)));
    let seen: Vec<Seen> = positions
        .map(|(tensor, (entry, found, _))| Seen { tensor, entry: *entry, index: &found.index })
        .collect();
    let (sets, excluded) = present::sets_of(table, outside, &mut known, &groups, &seen);
    findings.extend(excluded.into_iter().map(|(finding, t)| checkpoint.place(finding, t)));
    let (mut extents, bound) = bind::bind(table, &groups, &known);
    findings.extend(bound);
    extents.extend(named.generic);
    findings.extend(set_vocabulary(table, outside, &mut extents));
    let local = Local::new(table, &extents, &known);
    findings.extend(local.findings.iter().cloned());
    let boxes = Boxes { table, local: &local, known: &known, extents: &extents, sets: &sets };
    let (instances, unplaced) = checkpoint.instances(&boxes, registry, named.rules, &mut findings);
    Resolved { extents, sets, instances, unplaced, findings }
}

impl Checkpoint<'_> {
    /// A finding about a stored tensor.
    fn place(&self, finding: Finding, tensor: usize) -> Finding {
        let tensor = &self.stored[tensor];
        let unit = &self.units[tensor.unit as usize];
        finding.file(&unit.file).tensor(&tensor.name).of_rank(&unit.coords, &unit.rank)
    }

    /// Ranks that are not below their degree: they would lie outside every divided tensor.
    fn ranks_beyond_degrees(&self, table: &Table) -> Vec<Finding> {
        let mut findings = Vec::new();
        let known = &self.outside.known;
        for unit in self.units {
            for (dimension, &rank) in &unit.coords {
                let degree = known.degree(dimension);
                let divides = |map: &BTreeMap<String, Vec<String>>| {
                    map.get(dimension).is_some_and(|axes| !axes.is_empty())
                };
                let counts = known.degrees.contains_key(dimension) || table.shards.values().any(divides);
                if counts && rank >= degree {
                    let finding = Finding::new(codes::RANKS_DISAGREE, format!("rank on {dimension}"))
                        .file(&unit.file)
                        .expected(format!("below the degree of {degree}"), rank)
                        .help("move the file away if a run with more ranks left it, or correct the degree");
                    findings.push(finding.of_rank(&unit.coords, &unit.rank));
                }
            }
        }
        findings
    }

    /// Finds the rule of each tensor by its name. A tensor that no rule names gets one of its own, where that is allowed.
    fn match_names(&self, table: &mut Table, unknown: Unknown, findings: &mut Vec<Finding>) -> Named {
        let outside = self.outside;
        let mut names = Names::of(table);
        let mut named = Named { rules: Vec::with_capacity(self.stored.len()), ..Named::default() };
        for (t, tensor) in self.stored.iter().enumerate() {
            let unit = &self.units[tensor.unit as usize];
            let refused = match match_name(table, &names, &tensor.name, &unit.bases, outside) {
                Matched::Rule { entry, found, placement } => {
                    named.note_extents(table, outside, t, tensor, entry, &found);
                    named.rules.push(Some((entry, found, placement)));
                    continue;
                }
                Matched::Nothing
                    if unknown == Unknown::Pass
                        || outside.beside.contains(&*tensor.name)
                        || table.keeps(&tensor.name) =>
                {
                    generic_entry(table, &tensor.name, &tensor.shape, None, &[]);
                    let entry = table.entries.len() - 1;
                    names.generic.insert(tensor.name.to_string(), entry);
                    let axes = tensor.shape.iter().enumerate().map(|(d, &n)| (generic_axis(entry, d), n));
                    named.generic.extend(axes);
                    named.rules.push(Some((entry, Match::default(), Placement::Parts)));
                    continue;
                }
                Matched::Ignored(reason) => Finding::new(codes::IGNORED, reason),
                Matched::Undecided(fact) => unknown_fact(&fact),
                Matched::Outside { entry, set, axis, at } => {
                    outside_of_set(table, entry, &outside.sets, &set, &axis, at)
                }
                Matched::Nothing => unknown_tensor(table),
            };
            findings.push(self.place(refused, t));
            named.rules.push(None);
        }
        named
    }

    /// Tensors of one rule and one shape: they vote for the axes together.
    fn groups(&self, table: &Table, rules: &Rules) -> Vec<Group> {
        let mut groups: HashMap<(usize, &[u64]), Group> = HashMap::new();
        for (tensor, rule) in self.stored.iter().zip(rules) {
            let Some((entry, ..)) = rule else { continue };
            if table.entries[*entry].generic {
                continue;
            }
            let group = groups.entry((*entry, &tensor.shape)).or_insert_with(|| Group {
                entry: *entry,
                shape: tensor.shape.to_vec(),
                count: 0,
                witness: tensor.name.to_string(),
                file: self.units[tensor.unit as usize].file.clone(),
            });
            group.count += 1;
        }
        let mut groups: Vec<Group> = groups.into_values().collect();
        groups.sort_by(|a, b| (a.entry, &a.shape).cmp(&(b.entry, &b.shape)));
        groups
    }

    /// What is known of axes, with the extents that names state and the positions that they count.
    fn known_with_names(&self, named: &Named, findings: &mut Vec<Finding>) -> Known {
        let mut known = self.outside.known.clone();
        for (axis, (value, witness)) in &named.extents {
            match known.extents.get(axis) {
                Some(given) if given != value => findings.push(
                    self.place(
                        Finding::new(
                            codes::CONFIG_DISAGREES,
                            format!("{} in the tensor's name", axis_words::Size(axis)),
                        )
                        .expected(given, value)
                        .help(
                            "copy the missing files of the layer, or pass this model's config with --config",
                        ),
                        *witness,
                    ),
                ),
                Some(_) => {}
                None => {
                    known.extents.insert(axis.clone(), *value);
                }
            }
        }
        // Positions in names bind an axis only where nothing else does: the last layer may be missing.
        let mut counted: BTreeMap<&String, u64> = BTreeMap::new();
        for (_, found, _) in named.rules.iter().flatten() {
            for (axis, &at) in &found.index {
                let n = counted.entry(axis).or_default();
                *n = (*n).max(at.saturating_add(1));
            }
        }
        for (axis, n) in counted {
            known.extents.entry(axis.clone()).or_insert(n);
        }
        known
    }

    /// What each tensor with a rule holds, once the axes are bound, and those of which nothing says it.
    fn instances(
        &self,
        with: &Boxes,
        registry: &mut Registry,
        rules: Rules,
        findings: &mut Vec<Finding>,
    ) -> (Vec<Instance>, Vec<Unplaced>) {
        let mut lowering = Lowering::new(with.table, with.local, with.sets);
        let mut instances = Vec::with_capacity(self.stored.len());
        let mut unbound: BTreeMap<String, usize> = BTreeMap::new();
        let mut unplaced = Vec::new();
        for (t, (tensor, rule)) in self.stored.iter().zip(rules).enumerate() {
            let Some((entry, found, placement)) = rule else { continue };
            let misfit = bind::check_shape(with.table, entry, &tensor.shape, with.local, with.known);
            if let Some(finding) = misfit.or_else(|| with.beyond_extent(&found.index)) {
                findings.push(self.place(finding, t));
                continue;
            }
            let unit = &self.units[tensor.unit as usize];
            match lowering.boxes(registry, entry, &found.index, unit, with.extents) {
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
                    unplaced.push((entry as u32, tensor.unit, found.index));
                }
            }
        }
        findings.extend(unbound.into_iter().map(|(message, t)| {
            let finding = Finding::new(codes::UNBOUND_AXIS, format!("layout {}: {message}", with.table.name))
                .help("pass the model's config")
                .run("--config FILE");
            self.place(finding, t)
        }));
        (instances, unplaced)
    }
}

impl Named {
    /// Takes the extents that a tensor's name states, and those of a generic rule.
    fn note_extents(
        &mut self,
        table: &Table,
        outside: &Outside,
        t: usize,
        tensor: &Stored,
        entry: usize,
        found: &Match,
    ) {
        for (axis, value) in &found.extents {
            self.extents.entry(axis.clone()).or_insert((*value, t));
        }
        if table.entries[entry].generic {
            for (d, &n) in tensor.shape.iter().enumerate() {
                let axis = generic_axis(entry, d);
                let degree = table.divided_by("", &axis).map_or(1, |dim| outside.known.degree(dim));
                self.generic.entry(axis).or_insert(n * degree);
            }
        }
    }
}

/// What turns a rule into boxes: the axes are bound.
struct Boxes<'a> {
    table: &'a Table,
    local: &'a Local,
    known: &'a Known,
    extents: &'a Extents,
    sets: &'a Sets,
}

impl Boxes<'_> {
    /// The finding for a position that its axis does not have.
    fn beyond_extent(&self, index: &BTreeMap<String, u64>) -> Option<Finding> {
        let beyond = |(axis, at): &(&String, &u64)| self.extents.get(*axis).is_some_and(|n| *at >= n);
        let (axis, at) = index.iter().find(beyond)?;
        Some(
            // Layers and experts, counted from 0.
            Finding::new(
                codes::CONFIG_DISAGREES,
                match axis_words::noun(axis) {
                    Some(one) => {
                        format!("a tensor of {one} {at}, and the model has {} {one}s", self.extents[axis])
                    }
                    None => format!("index {at} is beyond axis {axis}"),
                },
            )
            .expected(format!("an index below {}", self.extents[axis]), at)
            .help(
                "pass the config of this model with --config, or move the file away if another run left it",
            ),
        )
    }
}

/// Puts the vocabulary's real extent in the place of the padded one; a finding if the stored rows are fewer.
fn set_vocabulary(table: &Table, outside: &Outside, extents: &mut Extents) -> Option<Finding> {
    let vocab = table.vocab.as_ref()?;
    let names = table.entries.iter().filter_map(|e| e.shape.as_ref()).map(|s| stored_name(s, vocab));
    let padded = names.into_iter().find(|p| p != vocab);
    let rows = padded.as_ref().and_then(|p| extents.get(p)).copied();
    let real = outside.vocab_size.or_else(|| extents.get(vocab).copied()).or(rows)?;
    extents.insert(vocab.clone(), real);
    let rows = rows.filter(|rows| real > *rows)?;
    Some(
        Finding::new(codes::BAD_VALUE, format!("{rows} of {real} rows of the vocabulary found"))
            .expected(format!("{real} rows"), rows)
            .help(
                "copy the file of the last tensor-parallel rank, which may be missing without a gap, \
                 or pass this model's size (--vocab-size, --config)",
            ),
    )
}

/// The finding for a tensor that no rule names.
fn unknown_tensor(table: &Table) -> Finding {
    Finding::new(codes::UNKNOWN_TENSOR, format!("no rule of layout {} names this tensor", table.name)).help(
        "describe it in a layout of your own (--layout FILE.toml), or give it `ignore` with a reason there",
    )
}

/// The finding for a tensor whose name a rule has, but not at its position.
fn outside_of_set(table: &Table, entry: usize, sets: &Sets, set: &str, axis: &str, at: u64) -> Finding {
    let rule = table.entries[entry].name.text();
    let positions = sets.get(set).map(sets::written).unwrap_or_default();
    Finding::new(codes::UNKNOWN_TENSOR, format!("{rule} of layout {} is not for this one: {set}", table.name))
        .expected(format!("one of {axis} {positions}"), at)
        .help("pass the config of this model with --config, or move the file away if another run left it")
}

/// The finding for a fact that decides values and is not stated.
pub fn unknown_fact(fact: &str) -> Finding {
    Finding::new(codes::FACT_UNKNOWN, format!("the result depends on `{fact}`, which is not stated"))
        .help(format!("pass the training config, which must say {fact}: true or false"))
        .run("--config FILE")
}
