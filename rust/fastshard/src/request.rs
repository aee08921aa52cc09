//! From a declaration to a plan: what an adapter says of a checkpoint, put to the layout engine.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Deserializer};

mod adapted;
mod assembled;
pub(crate) mod lookalikes;
mod plain;
mod scales;
mod state;

use crate::catalog::Catalog;
use crate::codes;
use crate::compose::{self, Drafted, Replicas, Source, Target};
use crate::draft::Draft;
use crate::error::{Finding, Result};
use crate::layout::bind::Known;
use crate::layout::expr::{names_in, Extents, MAX_ATOMS};
use crate::layout::resolve::{self, generic_entry, Instance, Outside, Placement, Registry, Unknown};
use crate::layout::sets::Sets;
use crate::layout::table::Table;
use crate::plan::{PadRegion, Plan, StoredTensor, PLAN_VERSION};
use crate::tensor::Dtype;

pub use adapted::{AdaptedSide, ChangeSide};
pub(crate) use assembled::Gathered;
use assembled::Pass;
pub use assembled::{AssembledSide, AssembledTensor, Chunk, Parts, Range};

/// What an adapter declares of a checkpoint, and what is wanted of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The source.
    pub source: SourceSide,
    /// The target; absent for `merge`.
    #[serde(default)]
    pub target: Option<TargetSide>,
    /// Element type of floating outputs.
    #[serde(default)]
    pub dtype: Option<Dtype>,
    /// True to average replicas that differ.
    #[serde(default)]
    pub mean_replicas: bool,
    /// Glob patterns of output names wanted; all if empty.
    #[serde(default)]
    pub include: Vec<String>,
    /// Glob patterns of output names not wanted.
    #[serde(default)]
    pub exclude: Vec<String>,
}

/// The source's declaration.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceSide {
    /// Layout table (TOML text in JSON); none for tensors that are whole as they are.
    #[serde(default, deserialize_with = "parsed")]
    pub layout: Option<Arc<Table>>,
    /// Rules for single tensors, from a `layout.json`: name, the dimension split over tp, and the parts of the whole
    /// along it that are split each by itself.
    #[serde(default)]
    pub generic: Vec<(String, Option<usize>, Vec<u64>)>,
    /// Where each file lies in the topology.
    pub units: Vec<UnitSide>,
    /// Tensors that lie in ranges of other tensors.
    #[serde(default)]
    pub assembled: Vec<AssembledSide>,
    /// The model's own names of tensors that are stored under others, which wrappers have made: by these.
    #[serde(default)]
    pub names: HashMap<String, String>,
    /// What adapters make of tensors.
    #[serde(default)]
    pub adapted: Vec<AdaptedSide>,
    /// Stored tensors that are no outputs: factors of adapters, and what they replace.
    #[serde(default)]
    pub hidden: HashSet<String>,
    /// True if a merge gives tensors these names too.
    #[serde(default)]
    pub renamed: bool,
    /// Where a tensor is held by a file and assembled too: true to take the assembled one.
    #[serde(default)]
    pub prefer_assembled: bool,
    /// Names of tensors that the optimizer keeps nothing of.
    #[serde(default)]
    pub untrained: BTreeSet<String>,
    /// Set to give 8-bit floats the values that their scales make of them; the extents of a block, if
    /// they are stated.
    #[serde(default)]
    pub dequantise: Option<Vec<u64>>,
    /// True if the two may differ (a warning then).
    #[serde(default)]
    pub twins_may_differ: bool,
    /// True if layers may hold what other layers hold (a warning then).
    #[serde(default)]
    pub layers_may_repeat: bool,
    /// Files that say which rank they are of, and are in its place.
    #[serde(default)]
    pub placed: BTreeSet<usize>,
    /// Glob patterns of files that were copied on purpose.
    #[serde(default)]
    pub copies_accepted: Vec<String>,
    /// True if NaN and infinite values are taken as they are.
    #[serde(default)]
    pub non_finite_accepted: bool,
    /// Parallel degrees.
    #[serde(default)]
    pub degrees: BTreeMap<String, u64>,
    /// Extents known from outside.
    #[serde(default)]
    pub axes: BTreeMap<String, u64>,
    /// Facts known from outside.
    #[serde(default)]
    pub facts: BTreeMap<String, bool>,
    /// Sets of positions known from outside.
    #[serde(default)]
    pub sets: Sets,
    /// Extents of a block by storage form of the layout table.
    #[serde(default)]
    pub stored: BTreeMap<String, Vec<u64>>,
    /// True vocabulary.
    #[serde(default)]
    pub vocab_size: Option<u64>,
    /// True if tensors that no rule names are taken as they are.
    #[serde(default)]
    pub pass_unknown: bool,
}

/// One file's place.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitSide {
    /// Index of the file in the catalog.
    pub file: u32,
    /// Keys from the file's root to the state dict.
    #[serde(default)]
    pub under: Vec<String>,
    /// The only keys wanted below it, if not all are.
    #[serde(default)]
    pub only: Option<std::collections::HashSet<String>>,
    /// Removed from the front of each name.
    #[serde(default)]
    pub strip: String,
    /// Put before each name.
    #[serde(default)]
    pub prefix: String,
    /// Rank per parallel dimension.
    #[serde(default)]
    pub coords: BTreeMap<String, u64>,
    /// Added to positions in names.
    #[serde(default)]
    pub bases: BTreeMap<String, u64>,
    /// Rank in the field's words.
    #[serde(default)]
    pub rank: Option<String>,
}

/// The target's declaration.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetSide {
    /// Name for the plan and the manifest, e.g. `hf`.
    pub name: String,
    /// Layout table (TOML text in JSON); none to keep the source's names and shapes.
    #[serde(default, deserialize_with = "parsed")]
    pub layout: Option<Arc<Table>>,
    /// Parallel degrees.
    #[serde(default)]
    pub degrees: BTreeMap<String, u64>,
    /// Extents that differ from the source's.
    #[serde(default)]
    pub axes: BTreeMap<String, u64>,
    /// Facts of the target.
    #[serde(default)]
    pub facts: BTreeMap<String, bool>,
    /// Facts that are others for the optimizer's state.
    #[serde(default)]
    pub state_facts: Option<BTreeMap<String, bool>>,
    /// Sets of positions of the target, where they differ from the source's of that name.
    #[serde(default)]
    pub sets: Sets,
    /// Multiple to which the vocabulary is padded.
    #[serde(default)]
    pub pad_multiple: Option<u64>,
    /// True if ranks hold chunks of the whole: boxes of it, and each once.
    #[serde(default)]
    pub chunks: bool,
}

fn globs(patterns: &[String]) -> Result<Vec<glob::Pattern>> {
    patterns
        .iter()
        .map(|p| {
            glob::Pattern::new(p).map_err(|e| {
                Finding::new(codes::USAGE, format!("pattern {p:?}: {e}"))
                    .help("patterns are shell globs, e.g. 'model.layers.*'")
                    .into()
            })
        })
        .collect()
}

/// Largest degree of a parallel dimension, and most ranks in all.
const MAX_RANKS: u64 = 1 << 20;
/// Largest extent of an axis.
const MAX_EXTENT: u64 = 1 << 40;

/// Refuses numbers that no run has, before anything is allocated by them.
fn believable(request: &Request) -> Result<()> {
    let refuse = |what: String, most: u64, got: u64| -> Result<()> {
        Err(Finding::new(codes::BAD_VALUE, what).expected(format!("1 to {most}"), got).into())
    };
    let target = request.target.as_ref();
    for degrees in std::iter::once(&request.source.degrees).chain(target.map(|t| &t.degrees)) {
        if let Some((dimension, &degree)) = degrees.iter().find(|(_, d)| !(1..=MAX_RANKS).contains(*d)) {
            return refuse(format!("degree of {dimension}"), MAX_RANKS, degree);
        }
        let ranks = degrees.values().fold(1u64, |n, d| n.saturating_mul(*d));
        if ranks > MAX_RANKS {
            return refuse("product of all degrees".into(), MAX_RANKS, ranks);
        }
    }
    for axes in std::iter::once(&request.source.axes).chain(target.map(|t| &t.axes)) {
        if let Some((axis, &extent)) = axes.iter().find(|(_, n)| **n > MAX_EXTENT) {
            return refuse(format!("extent of axis {axis}"), MAX_EXTENT, extent);
        }
    }
    for (name, set) in request.source.sets.iter().chain(target.iter().flat_map(|t| &t.sets)) {
        let ascending = set.positions.windows(2).all(|pair| pair[0] < pair[1]);
        let last = set.positions.last().copied().unwrap_or(0);
        if !ascending || last >= MAX_EXTENT {
            let got = if ascending { last.to_string() } else { "others".into() };
            return Err(Finding::new(codes::BAD_VALUE, format!("positions of the set {name}"))
                .expected(format!("ascending ones below {MAX_EXTENT}"), got)
                .into());
        }
    }
    let others = [request.source.vocab_size, target.and_then(|t| t.pad_multiple)];
    if let Some(&n) = others.iter().flatten().find(|n| !(1..=MAX_EXTENT).contains(*n)) {
        return refuse("vocabulary size or its multiple".into(), MAX_EXTENT, n);
    }
    Ok(())
}

fn parsed<'de, D: Deserializer<'de>>(text: D) -> std::result::Result<Option<Arc<Table>>, D::Error> {
    let text = Option::<String>::deserialize(text)?;
    text.map(|text| Table::parse(&text).map(Arc::new).map_err(serde::de::Error::custom)).transpose()
}

/// Drafts a plan of a catalog by a request.
///
/// # Errors
/// A layout table or pattern that cannot be used. What is wrong with the checkpoint comes as findings.
pub fn draft(catalog: &Catalog, request: &Request) -> Result<Draft> {
    let mut table = request.source.layout.as_deref().map_or_else(Table::generic, Table::clone);
    let mut target_table = request.target.as_ref().and_then(|t| t.layout.as_deref()).cloned();
    if let Some(target) = &target_table {
        if target.family != table.family {
            return Err(Finding::new(
                codes::UNSUPPORTED,
                "source and target layouts are of different model families",
            )
            .expected(&table.family, &target.family)
            .help("choose a target for this family, or give a layout of your own with --layout")
            .into());
        }
    }
    if let Some(target) = &mut target_table {
        target.share_axes(&table);
        table.share_axes(target);
    }
    if let Some(dtype) = request.dtype.filter(|d| !d.is_float()) {
        return Err(Finding::new(codes::BAD_VALUE, "element type of the result")
            .expected("F16, BF16, F32 or F64", dtype)
            .help("choose one of these with --dtype")
            .into());
    }
    believable(request)?;
    let (include, exclude) = (globs(&request.include)?, globs(&request.exclude)?);
    globs(&request.source.copies_accepted)?;
    let wanted = |name: &str| {
        (include.is_empty() || include.iter().any(|p| p.matches(name)))
            && !exclude.iter().any(|p| p.matches(name))
    };

    let Gathered { sources, blobs, mut stored, units, passes, mut findings, beside, .. } =
        Gathered::new(catalog, &request.source);
    catalog.look(0)?;
    let known_names: std::collections::HashMap<&str, &[u64]> =
        passes[0].seen.iter().map(|s| (s.name.as_str(), &s.shape[..])).collect();
    for (name, divided, parts) in &request.source.generic {
        if parts.len() > MAX_ATOMS {
            return Err(Finding::new(codes::BAD_VALUE, "parts of a dimension in layout.json")
                .tensor(name)
                .expected(format!("at most {MAX_ATOMS}"), parts.len())
                .into());
        }
        if let Some(&shape) = known_names.get(name.as_str()) {
            if divided.is_some_and(|d| d >= shape.len()) {
                return Err(Finding::new(codes::BAD_VALUE, "tp_dim in layout.json")
                    .tensor(name)
                    .expected(format!("a dimension of {shape:?}"), divided.unwrap_or(0))
                    .into());
            }
            generic_entry(&mut table, name, shape, *divided, parts);
        }
    }
    let outside = Outside {
        known: Known { extents: request.source.axes.clone(), degrees: request.source.degrees.clone() },
        facts: request.source.facts.clone(),
        sets: request.source.sets.clone(),
        beside,
        vocab_size: request.source.vocab_size,
    };
    let target_outside = request.target.as_ref().map_or_else(Outside::default, |t| Outside {
        known: Known { extents: t.axes.clone(), degrees: t.degrees.clone() },
        facts: t.facts.clone(),
        sets: t.sets.clone(),
        beside: HashSet::new(),
        vocab_size: None,
    });
    let unknown = if request.source.pass_unknown { Unknown::Pass } else { Unknown::Refuse };
    // A merge keeps the names that are stored, unless others are asked for.
    let merging = request.target.is_none() && !request.source.renamed;
    let kept = request.source.names.iter().filter(|_| merging);
    let mut made =
        Made { called: kept.map(|(stored, own)| (own.clone(), stored.clone())).collect(), ..Made::default() };
    let nothing = BTreeSet::new();
    let mut table = Some(table);
    for (i, pass) in passes.iter().enumerate() {
        // The last one's is not needed again.
        let taken = if i + 1 == passes.len() { table.take() } else { table.clone() };
        let Some(mut table) = taken else { break };
        let called = made.called.clone();
        let slotted = |name: &str| wanted(&slot_name(called.get(name).map_or(name, String::as_str), pass));
        let absent = if pass.slot.is_some() { &request.source.untrained } else { &nothing };
        let mut outside_there = target_outside.clone();
        let mut table_there = target_table.clone();
        if let Some(slot) = &pass.slot {
            findings.extend(state::scaled(slot, &table, table_there.as_ref()));
            state::keep(&mut table, slot);
            table_there.iter_mut().for_each(|table| state::keep(table, slot));
            let told = request.target.as_ref().and_then(|t| t.state_facts.as_ref());
            outside_there.facts.extend(told.into_iter().flatten().map(|(k, v)| (k.clone(), *v)));
        }
        let target = Target {
            table: table_there.as_ref(),
            outside: outside_there,
            pad_multiple: request.target.as_ref().and_then(|t| t.pad_multiple),
            dtype: request.dtype.filter(|_| pass.slot.is_none()),
            replicas: if request.mean_replicas { Replicas::Mean } else { Replicas::Equal },
            chunks: request.target.as_ref().is_some_and(|t| t.chunks),
            wanted: &slotted,
        };
        let with = Resolving {
            table: &mut table,
            units: &units,
            outside: &outside,
            unknown,
            absent,
            target: &target,
        };
        made.pass(with, pass, &mut stored, catalog)?;
        catalog.look(0)?;
    }
    findings.extend(made.findings);
    let (rules, axes) = (made.rules, made.axes);

    let plan = Plan {
        version: PLAN_VERSION,
        target: request.target.as_ref().map_or("merge", |t| &t.name).to_string(),
        sources,
        blobs,
        stored,
        rules,
        pads: made.pads,
        copies: made.copies,
        twins_may_differ: request.source.twins_may_differ,
        layers_may_repeat: request.source.layers_may_repeat,
        untied: request.source.facts.get("tied") == Some(&false),
        copies_accepted: request.source.copies_accepted.clone(),
        non_finite_accepted: request.source.non_finite_accepted,
        topology: request.source.degrees.clone(),
        axes,
        roots: catalog.root_names(),
        ..Plan::default()
    };
    findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    Ok(Draft {
        plan,
        outputs: made.outputs,
        lost: made.lost,
        placed: request.source.placed.clone(),
        findings,
    })
}

fn slot_name(name: &str, pass: &Pass) -> String {
    pass.slot.as_ref().map_or_else(|| name.to_string(), |slot| format!("{name}.{slot}"))
}

/// Names and sources of a pass's outputs as they are among those of all passes.
fn globally(outputs: &mut [Drafted], pass: &Pass, called: &HashMap<String, String>) {
    for Drafted { output, .. } in outputs {
        output.name = slot_name(called.get(&output.name).unwrap_or(&output.name), pass);
        let sources = output.parts.iter_mut().flat_map(|part| &mut part.sources);
        sources.for_each(|source| *source = pass.tensors[*source as usize]);
    }
}

/// What resolving and composing one pass needs.
struct Resolving<'a> {
    table: &'a mut Table,
    units: &'a [resolve::Unit],
    outside: &'a Outside,
    unknown: Unknown,
    absent: &'a BTreeSet<String>,
    target: &'a Target<'a>,
}

/// Outputs and findings of all passes.
#[derive(Default)]
struct Made {
    /// What outputs are called instead of by the names that rules give them.
    called: HashMap<String, String>,
    outputs: Vec<Drafted>,
    pads: Vec<PadRegion>,
    copies: Vec<(u32, u32)>,
    rules: Vec<String>,
    axes: BTreeMap<String, u64>,
    lost: BTreeSet<String>,
    findings: Vec<Finding>,
}

impl Made {
    fn pass(
        &mut self,
        with: Resolving,
        pass: &Pass,
        stored: &mut [StoredTensor],
        catalog: &Catalog,
    ) -> Result<()> {
        let Resolving { table, units, outside, unknown, absent, target } = with;
        if plain::all_plain(pass, table, outside, unknown, target) {
            self.plain(pass, target, stored);
            return Ok(());
        }
        let mut registry = Registry::default();
        let resolved = resolve::resolve(table, &mut registry, &pass.seen, units, outside, unknown);
        catalog.look(0)?;
        let first_rule = self.rules.len() as u32;
        for instance in &resolved.instances {
            let tensor = &mut stored[pass.tensors[instance.tensor as usize] as usize];
            tensor.rule = first_rule + instance.entry;
            let unit = &units[instance.unit as usize];
            (tensor.shard, tensor.index) = division(table, instance, unit, &outside.known, &resolved.extents);
        }
        let side = Source { table: &*table, resolved: &resolved, stored: &pass.seen, units, outside, absent };
        let composed = compose::compose(&side, target, &mut registry);
        let mut outputs = composed.outputs;
        globally(&mut outputs, pass, &self.called);
        let global = |t: u32| pass.tensors[t as usize];
        self.pads.extend(composed.pads.into_iter().map(|p| PadRegion { stored: global(p.stored), ..p }));
        self.copies.extend(composed.copies.into_iter().map(|(a, b)| (global(a), global(b))));
        let lost = composed.lost.into_iter().map(|name| self.called.get(&name).cloned().unwrap_or(name));
        self.lost.extend(lost.map(|name| slot_name(&name, pass)));
        let told = resolved.findings.into_iter().chain(composed.findings).map(|mut finding| {
            finding.tensor = finding.tensor.map(|name| slot_name(&name, pass));
            finding
        });
        self.findings.extend(told);
        self.findings.extend(casts(target.dtype, &outputs, stored));
        self.outputs.extend(outputs);
        self.rules.extend(table.entries.iter().map(|e| e.name.text().to_string()));
        if pass.slot.is_none() {
            let extents = resolved.extents.iter().filter(|(k, _)| !k.contains(['#', ' ']));
            self.axes = extents.map(|(k, v)| (k.clone(), *v)).collect();
        }
        Ok(())
    }
}

impl Made {
    /// Tensors that no rule names: each has a rule of its own.
    fn plain(&mut self, pass: &Pass, target: &Target, stored: &mut [StoredTensor]) {
        for (seen, &tensor) in pass.seen.iter().zip(&pass.tensors) {
            stored[tensor as usize].rule = self.rules.len() as u32;
            self.rules.push(seen.name.clone());
        }
        let mut outputs = plain::outputs(pass, target);
        globally(&mut outputs, pass, &self.called);
        self.findings.extend(casts(target.dtype, &outputs, stored));
        self.outputs.extend(outputs);
        if pass.slot.is_none() {
            self.axes = BTreeMap::new();
        }
    }
}

/// Which part of its tensor an instance is, as a number among all ranks that divide it, and where it lies on
/// the axes that its name numbers: counted from the rank's first where ranks divide such an axis (experts), so
/// that what two ranks hold at one place are shards of one tensor.
fn division(
    table: &Table,
    instance: &Instance,
    unit: &resolve::Unit,
    known: &Known,
    extents: &Extents,
) -> (Option<u64>, Vec<u64>) {
    let entry = &table.entries[instance.entry as usize];
    let mut index = instance.index.clone();
    let (Some(shape), Placement::Parts) = (&entry.shape, &instance.placement) else {
        return (None, index.into_values().collect());
    };
    let mut names: Vec<String> = index.keys().cloned().collect();
    shape.dims.iter().for_each(|d| names_in(d, &table.derived, &mut names));
    let mut dimensions: Vec<&String> = table.shards.values().flat_map(|map| map.keys()).collect();
    dimensions.sort();
    dimensions.dedup();
    let (mut shard, mut stride) = (None, 1u64);
    for dimension in dimensions {
        let degree = known.degree(dimension);
        let divided = names.iter().find(|n| table.divided_by(&entry.class, n) == Some(dimension.as_str()));
        let rank = unit.coords.get(dimension).filter(|_| degree > 1);
        if let (Some(axis), Some(&rank)) = (divided, rank) {
            shard = Some(shard.unwrap_or(0) + rank.saturating_mul(stride));
            if let (Some(at), Some(extent)) = (index.get_mut(axis), extents.get(axis)) {
                *at = at.saturating_sub(rank.saturating_mul(extent / degree));
            }
        }
        stride = stride.saturating_mul(degree);
    }
    (shard, index.into_values().collect())
}

/// One note per kind of cast.
fn casts(wanted: Option<Dtype>, outputs: &[Drafted], stored: &[StoredTensor]) -> Vec<Finding> {
    let Some(to) = wanted else { return Vec::new() };
    let mut from: BTreeMap<Dtype, u64> = BTreeMap::new();
    for Drafted { output, .. } in outputs {
        let source = output.parts.first().and_then(|p| p.sources.first()).map(|&s| stored[s as usize].dtype);
        if let Some(source) = source.filter(|d| *d != output.dtype) {
            *from.entry(source).or_default() += 1;
        }
    }
    from.into_iter()
        .filter(|(d, _)| !widens(*d, to))
        .map(|(d, n)| Finding::new(codes::LOSSY, format!("{n} tensors are rounded from {d} to {to}")))
        .collect()
}

fn widens(from: Dtype, to: Dtype) -> bool {
    matches!((from, to), (Dtype::F16 | Dtype::Bf16, Dtype::F32 | Dtype::F64) | (Dtype::F32, Dtype::F64))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Over all degrees: tensors are shards of one (rule, position) exactly where their ranks differ on what divides them.
    #[test]
    fn parts_of_experts_are_numbered_by_both_ranks() {
        let text = r#"
            layout = "toy"
            family = "toy"
            [shard]
            tp = ["F"]
            [class.experts]
            shard = { tp = ["F"], ep = ["E"] }
            [[tensor]]
            name = "{L}.experts.{E}"
            shape = "[F, H]"
            as = "expert"
            class = "experts"
            [[tensor]]
            name = "{L}.stacked"
            shape = "[E, F, H]"
            as = "expert"
            class = "experts"
            [[tensor]]
            name = "{L}.router"
            shape = "[E, H]"
            as = "router"
            [[tensor]]
            name = "{L}.dense"
            shape = "[F, H]"
            as = "dense"
        "#;
        let table = Table::parse(text).unwrap();
        let (layers, experts) = (2u64, 12u64);
        let extents = Extents::from([("E".into(), experts), ("L".into(), layers)]);
        let number =
            |rule: u32, index: BTreeMap<String, u64>, coords: &BTreeMap<String, u64>, known: &Known| {
                let instance = Instance {
                    tensor: 0,
                    entry: rule,
                    unit: 0,
                    index,
                    choices: Vec::new(),
                    boxes: Vec::new(),
                    placement: Placement::Parts,
                };
                let unit = resolve::Unit { coords: coords.clone(), ..Default::default() };
                division(&table, &instance, &unit, known, &extents)
            };
        for (tp, ep) in [(1, 1), (2, 1), (1, 3), (2, 3), (4, 12)] {
            let known = Known {
                extents: Extents::new(),
                degrees: [("tp".to_string(), tp), ("ep".to_string(), ep)].into(),
            };
            let local = experts / ep;
            // (layer, local expert) -> part -> rank; two ranks may not have one part.
            let mut parts: HashMap<(Vec<u64>, Option<u64>), (u64, u64)> = HashMap::new();
            for (t, e) in (0..tp).flat_map(|t| (0..ep).map(move |e| (t, e))) {
                let coords = BTreeMap::from([("tp".to_string(), t), ("ep".to_string(), e), ("pp".into(), 5)]);
                for layer in 0..layers {
                    let at = BTreeMap::from([("L".to_string(), layer)]);
                    for i in 0..local {
                        let mut at = at.clone();
                        at.insert("E".into(), e * local + i);
                        let (shard, index) = number(0, at, &coords, &known);
                        assert_eq!(index, [i, layer]);
                        assert_eq!(shard.is_some(), tp * ep > 1);
                        assert_eq!(parts.insert((index, shard), (t, e)), None);
                    }
                    let stacked = number(1, at.clone(), &coords, &known);
                    assert_eq!(stacked.1, [layer]);
                    assert!(parts.contains_key(&(vec![0, layer], stacked.0)), "numbered as its experts are");
                    assert_eq!(number(2, at.clone(), &coords, &known), (None, vec![layer]), "replicated");
                    let (dense, same) = (number(3, at.clone(), &coords, &known).0, t);
                    let other = BTreeMap::from([("tp".to_string(), same), ("ep".to_string(), 0)]);
                    assert_eq!(dense, number(3, at, &other, &known).0, "copies over ep are one part");
                    assert_eq!(dense.is_some(), tp > 1);
                }
            }
        }
    }
}
