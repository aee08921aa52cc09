//! From a declaration to a plan: what an adapter says of a checkpoint, put to the layout engine.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Deserializer};

mod adapted;
mod assembled;
mod coded;
pub(crate) mod lookalikes;
mod passes;
mod plain;
mod seen_as;
mod state;

use crate::catalog::Catalog;
use crate::codes;
use crate::compose::{Keep, Replicas, Target};
use crate::draft::Draft;
use crate::error::{Finding, Result};
use crate::layout::bind::Known;
use crate::layout::expr::MAX_ATOMS;
use crate::layout::resolve::{self, generic_entry, Outside, Unknown};
use crate::layout::sets::Sets;
use crate::layout::table::Table;
use crate::plan::{Plan, PLAN_VERSION};
use crate::steps::{self, Step};
use crate::tensor::Dtype;
use crate::unwritten::Holes;

pub use adapted::{AdaptedSide, ChangeSide};
pub(crate) use assembled::Gathered;
use assembled::Pass;
pub use assembled::{AssembledSide, AssembledTensor, Chunk, Parts, Range};
pub use coded::{CodedSide, Operand};
use passes::{slot_name, PassResults, Resolving};

/// An adapter's declaration of a checkpoint, and the requested result.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The source.
    pub source: SourceSide,
    /// The requested copy of the weights; none for the copy that the source names.
    #[serde(default)]
    pub weights: Option<Weights>,
    /// True to turn the optimizer's state into slots.
    #[serde(default)]
    pub optimizer: bool,
    /// Tensors for which the values of their codes are requested.
    #[serde(default)]
    pub coded: Vec<CodedSide>,
    /// Stored tensors that these values are made from, and that are therefore no outputs.
    #[serde(default)]
    pub left_out: HashSet<String>,
    /// The target; absent for `merge`.
    #[serde(default)]
    pub target: Option<TargetSide>,
    /// Element type of floating outputs.
    #[serde(default)]
    pub dtype: Option<Dtype>,
    /// Outputs that keep their element type.
    #[serde(default)]
    pub keep: Keep,
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

/// A copy of the weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// The parameters, which the model uses.
    #[default]
    Params,
    /// The optimizer's fp32 master weights.
    Masters,
}

/// The source's declaration: the fields of Python's `Source` that planning needs, by the same names.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceSide {
    /// The contents of the files.
    pub files: FilesSide,
    /// The names of tensors.
    #[serde(default)]
    pub names: NamesSide,
    /// The table that reads them, and the values of its letters.
    #[serde(default)]
    pub binding: BindingSide,
    /// Accepted conditions that are often an error.
    #[serde(default)]
    pub allowances: AllowancesSide,
    /// The optimizer's contents of the files.
    #[serde(default)]
    pub optimizer: OptimizerSide,
}

/// The contents of a source's files.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilesSide {
    /// The place of each file in the topology.
    pub units: Vec<UnitSide>,
    /// Tensors stored in ranges of other tensors.
    #[serde(default)]
    pub assembled: Vec<AssembledSide>,
    /// The changes that adapters make to tensors.
    #[serde(default)]
    pub adapted: Vec<AdaptedSide>,
    /// Files that state their rank and are in its place.
    #[serde(default)]
    pub placed: BTreeSet<usize>,
}

/// The names of a source's tensors.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamesSide {
    /// The prefix before the model's own names.
    #[serde(default)]
    pub prefix: String,
    /// True if the caller gave the prefix, so that a merge uses the model's own names.
    #[serde(default)]
    pub is_chosen: bool,
    /// The model's own names of tensors that wrappers have renamed, by their stored names.
    #[serde(default)]
    pub own: HashMap<String, String>,
    /// True if a merge gives tensors these names too.
    #[serde(default)]
    pub renames: bool,
    /// Stored tensors that are no outputs: factors of adapters, and the tensors that they replace.
    #[serde(default)]
    pub hidden: HashSet<String>,
    /// Names of scales and the like below the weights' prefix; they accompany the tensors that they belong
    /// to.
    #[serde(default)]
    pub beside: HashSet<String>,
}

/// The table that reads the tensors of a source, and the values of its letters.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindingSide {
    /// Layout table (its text if a request is JSON); none for tensors that are stored in full.
    #[serde(rename = "toml", default, deserialize_with = "parsed")]
    pub layout: Option<Arc<Table>>,
    /// Rules for single tensors, from a `layout.json`: name, the dimension split over tp, and the parts of
    /// the full tensor along it that are split separately.
    #[serde(default)]
    pub generic: Vec<(String, Option<usize>, Vec<u64>)>,
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
    /// True vocabulary.
    #[serde(default)]
    pub vocab_size: Option<u64>,
    /// True if tensors that no rule names are kept as they are.
    #[serde(default)]
    pub pass_unknown: bool,
}

/// Accepted conditions of a source that are often an error.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllowancesSide {
    /// True if layers may be equal to other layers (which is then a warning).
    #[serde(default)]
    pub layers_may_repeat: bool,
    /// Glob patterns of files that were copied on purpose.
    #[serde(default)]
    pub copies: Vec<String>,
    /// True if NaN and infinite values are accepted.
    #[serde(default)]
    pub non_finite: bool,
    /// The treatment of large holes in the place of tensors.
    #[serde(default)]
    pub holes: Holes,
}

/// The contents of the files for an optimizer.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSide {
    /// The copy of the weights that is used unless the request names one.
    #[serde(default)]
    pub weights: Weights,
    /// Names of parameters for which it keeps no state.
    #[serde(default)]
    pub untrained: HashSet<String>,
}

impl Request {
    /// The copy of the weights that is used.
    pub(crate) fn taken(&self) -> Weights {
        self.weights.unwrap_or(self.source.optimizer.weights)
    }

    /// True if parameters and master weights may differ (which is then a warning). False if moments are
    /// converted too, as these belong to the master weights.
    fn twins_may_differ(&self) -> bool {
        self.weights == Some(Weights::Params) && !self.optimizer
    }

    /// True if a merge gives tensors the model's own names.
    fn is_renamed(&self) -> bool {
        let NamesSide { is_chosen, renames, hidden, .. } = &self.source.names;
        *is_chosen || *renames || !hidden.is_empty() || !self.source.files.adapted.is_empty()
    }

    /// The model's own names of parameters for which the optimizer keeps no state.
    fn untrained(&self) -> BTreeSet<String> {
        let own = |name: &String| self.source.names.own.get(name).unwrap_or(name).clone();
        match self.optimizer {
            true => self.source.optimizer.untrained.iter().map(own).collect(),
            false => BTreeSet::new(),
        }
    }
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
    /// Layout table (its text if a request is JSON); none to keep the source's names and shapes.
    #[serde(rename = "toml", default, deserialize_with = "parsed")]
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
    /// Facts that differ for the optimizer's state.
    #[serde(default)]
    pub state_facts: Option<BTreeMap<String, bool>>,
    /// Sets of positions of the target that differ from the source's sets of the same name.
    #[serde(default)]
    pub sets: Sets,
    /// Multiple to which the vocabulary is padded.
    #[serde(default)]
    pub pad_multiple: Option<u64>,
    /// True if ranks hold chunks of the full tensor: boxes, each stored once.
    #[serde(default)]
    pub chunks: bool,
    /// The ranks that hold it, by their ranks on each parallel dimension; every combination by default.
    #[serde(default)]
    pub ranks: Option<Vec<BTreeMap<String, u64>>>,
}

fn globs(patterns: &[String]) -> Result<Vec<glob::Pattern>> {
    patterns
        .iter()
        .map(|p| {
            glob::Pattern::new(p).map_err(|e| {
                Finding::new(codes::USAGE, format!("pattern {p:?}: {e}"))
                    .help("write shell globs, e.g. 'model.layers.*'")
                    .into()
            })
        })
        .collect()
}

/// Largest degree of a parallel dimension, and most ranks in all.
const MAX_RANKS: u64 = 1 << 20;
/// Largest extent of an axis.
const MAX_EXTENT: u64 = 1 << 40;

/// Refuses an element type and numbers that no run has, before they determine an allocation.
fn believable(request: &Request) -> Result<()> {
    if let Some(dtype) = request.dtype.filter(|d| !d.is_float()) {
        return Err(Finding::new(codes::BAD_VALUE, "element type of the result")
            .expected("F16, BF16, F32 or F64", dtype)
            .help("choose one of these with --dtype")
            .into());
    }
    let refuse = |what: String, most: u64, got: u64| -> Result<()> {
        Err(Finding::new(codes::BAD_VALUE, what).expected(format!("1 to {most}"), got).into())
    };
    let target = request.target.as_ref();
    for degrees in std::iter::once(&request.source.binding.degrees).chain(target.map(|t| &t.degrees)) {
        if let Some((dimension, &degree)) = degrees.iter().find(|(_, d)| !(1..=MAX_RANKS).contains(*d)) {
            return refuse(format!("degree of {dimension}"), MAX_RANKS, degree);
        }
        let ranks = degrees.values().fold(1u64, |n, d| n.saturating_mul(*d));
        if ranks > MAX_RANKS {
            return refuse("product of all degrees".into(), MAX_RANKS, ranks);
        }
    }
    for axes in std::iter::once(&request.source.binding.axes).chain(target.map(|t| &t.axes)) {
        if let Some((axis, &extent)) = axes.iter().find(|(_, n)| **n > MAX_EXTENT) {
            return refuse(format!("extent of axis {axis}"), MAX_EXTENT, extent);
        }
    }
    for (name, set) in request.source.binding.sets.iter().chain(target.iter().flat_map(|t| &t.sets)) {
        let ascending = set.positions.windows(2).all(|pair| pair[0] < pair[1]);
        let last = set.positions.last().copied().unwrap_or(0);
        if !ascending || last >= MAX_EXTENT {
            let got = if ascending { last.to_string() } else { "others".into() };
            return Err(Finding::new(codes::BAD_VALUE, format!("positions of the set {name}"))
                .expected(format!("ascending ones below {MAX_EXTENT}"), got)
                .into());
        }
    }
    let others = [request.source.binding.vocab_size, target.and_then(|t| t.pad_multiple)];
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
/// A layout table or pattern that cannot be used. Problems of the checkpoint are findings.
pub fn draft(catalog: &Catalog, request: &Request) -> Result<Draft> {
    steps::reach(Step::Draft);
    let (mut table, target_table) = tables(request)?;
    believable(request)?;
    let (include, exclude) = (globs(&request.include)?, globs(&request.exclude)?);
    globs(&request.source.allowances.copies)?;
    let wanted = |name: &str| {
        (include.is_empty() || include.iter().any(|p| p.matches(name)))
            && !exclude.iter().any(|p| p.matches(name))
    };
    let Gathered { sources, blobs, mut stored, units, passes, mut findings, .. } =
        Gathered::new(catalog, request, request.taken() == Weights::Masters);
    catalog.look(0)?;
    add_generic_rules(&mut table, &request.source, &passes[0].seen)?;
    let outside = outside_of_source(&request.source);
    let mut results = PassResults { called: called(request), ..PassResults::default() };
    let (nothing, untrained) = (BTreeSet::new(), request.untrained());
    let mut table = Some(table);
    for (i, pass) in passes.iter().enumerate() {
        // The last one's is not needed again.
        let taken = if i + 1 == passes.len() { table.take() } else { table.clone() };
        let Some(mut table) = taken else { break };
        let called = results.called.clone();
        let slotted = |name: &str| wanted(&slot_name(called.get(name).map_or(name, String::as_str), pass));
        let (target_table, target_outside, finding) = for_pass(request, pass, &mut table, &target_table);
        findings.extend(finding);
        let target = Target {
            table: target_table.as_ref(),
            outside: target_outside,
            pad_multiple: request.target.as_ref().and_then(|t| t.pad_multiple),
            dtype: request.dtype.filter(|_| pass.slot.is_none()),
            keep: &request.keep,
            replicas: if request.mean_replicas { Replicas::Mean } else { Replicas::Equal },
            chunks: request.target.as_ref().is_some_and(|t| t.chunks),
            ranks: request.target.as_ref().and_then(|t| t.ranks.as_deref()),
            wanted: &slotted,
        };
        let with = Resolving {
            table: &mut table,
            units: &units,
            outside: &outside,
            unknown: if request.source.binding.pass_unknown { Unknown::Pass } else { Unknown::Refuse },
            absent: if pass.slot.is_some() { &untrained } else { &nothing },
            target: &target,
        };
        results.pass(with, pass, &mut stored, catalog)?;
        catalog.look(0)?;
    }
    findings.extend(results.findings);
    findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    let plan = Plan {
        sources,
        blobs,
        stored,
        rules: results.rules,
        pads: results.pads,
        copies: results.copies,
        axes: results.axes,
        ..begin_plan(catalog, request)
    };
    let (placed, holes) = (request.source.files.placed.clone(), request.source.allowances.holes);
    Ok(Draft { plan, outputs: results.outputs, lost: results.lost, placed, holes, findings })
}

/// The tables of the source and of the target, with their axes in common.
fn tables(request: &Request) -> Result<(Table, Option<Table>)> {
    let mut table = request.source.binding.layout.as_deref().map_or_else(Table::generic, Table::clone);
    let mut target = request.target.as_ref().and_then(|t| t.layout.as_deref()).cloned();
    if let Some(target) = &mut target {
        if target.family != table.family {
            return Err(Finding::new(
                codes::UNSUPPORTED,
                "source and target layouts are of different model families",
            )
            .expected(&table.family, &target.family)
            .help("choose a target for this family, or pass a layout of your own with --layout")
            .into());
        }
        target.share_axes(&table);
        table.share_axes(target);
    }
    Ok((table, target))
}

/// The target of a pass, and the properties of its slot: both tables state how the optimizer keeps a slot.
fn for_pass(
    request: &Request,
    pass: &Pass,
    table: &mut Table,
    target: &Option<Table>,
) -> (Option<Table>, Outside, Option<Finding>) {
    let mut target = target.clone();
    let mut outside = request.target.as_ref().map_or_else(Outside::default, outside_of_target);
    let Some(slot) = &pass.slot else { return (target, outside, None) };
    let finding = state::scaled(slot, table, target.as_ref());
    state::keep(table, slot);
    target.iter_mut().for_each(|table| state::keep(table, slot));
    let facts = request.target.as_ref().and_then(|t| t.state_facts.as_ref());
    outside.facts.extend(facts.into_iter().flatten().map(|(k, v)| (k.clone(), *v)));
    (target, outside, finding)
}

/// Adds rules for the tensors that the source describes one by one.
fn add_generic_rules(table: &mut Table, source: &SourceSide, seen: &[resolve::Stored]) -> Result<()> {
    let shapes: HashMap<&str, &[u64]> = seen.iter().map(|s| (s.name.as_str(), &s.shape[..])).collect();
    for (name, divided, parts) in &source.binding.generic {
        if parts.len() > MAX_ATOMS {
            return Err(Finding::new(codes::BAD_VALUE, "parts of a dimension in layout.json")
                .tensor(name)
                .expected(format!("at most {MAX_ATOMS}"), parts.len())
                .into());
        }
        if let Some(&shape) = shapes.get(name.as_str()) {
            if divided.is_some_and(|d| d >= shape.len()) {
                return Err(Finding::new(codes::BAD_VALUE, "tp_dim in layout.json")
                    .tensor(name)
                    .expected(format!("a dimension of {shape:?}"), divided.unwrap_or(0))
                    .into());
            }
            generic_entry(table, name, shape, *divided, parts);
        }
    }
    Ok(())
}

fn outside_of_source(source: &SourceSide) -> Outside {
    Outside {
        known: Known { extents: source.binding.axes.clone(), degrees: source.binding.degrees.clone() },
        facts: source.binding.facts.clone(),
        sets: source.binding.sets.clone(),
        beside: source.names.beside.iter().map(|name| format!("{}{name}", source.names.prefix)).collect(),
        vocab_size: source.binding.vocab_size,
    }
}

fn outside_of_target(target: &TargetSide) -> Outside {
    Outside {
        known: Known { extents: target.axes.clone(), degrees: target.degrees.clone() },
        facts: target.facts.clone(),
        sets: target.sets.clone(),
        ..Outside::default()
    }
}

/// Stored names by own names: a merge keeps the stored names unless others are requested.
fn called(request: &Request) -> HashMap<String, String> {
    match request.target.is_none() && !request.is_renamed() {
        true => request.source.names.own.iter().map(|(stored, own)| (own.clone(), stored.clone())).collect(),
        false => HashMap::new(),
    }
}

/// Begins the plan with the properties that the request itself states.
fn begin_plan(catalog: &Catalog, request: &Request) -> Plan {
    Plan {
        version: PLAN_VERSION,
        target: request.target.as_ref().map_or("merge", |t| &t.name).to_string(),
        twins_may_differ: request.twins_may_differ(),
        layers_may_repeat: request.source.allowances.layers_may_repeat,
        untied: request.source.binding.facts.get("tied") == Some(&false),
        copies_accepted: request.source.allowances.copies.clone(),
        non_finite_accepted: request.source.allowances.non_finite,
        topology: request.source.binding.degrees.clone(),
        roots: catalog.root_names(),
        words: catalog.words.clone(),
        ..Plan::default()
    }
}
