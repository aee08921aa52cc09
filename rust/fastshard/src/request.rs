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

/// What an adapter declares of a checkpoint, and what is wanted of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The source.
    pub source: SourceSide,
    /// Which copy of the weights is wanted; none for the one that the source names.
    #[serde(default)]
    pub weights: Option<Weights>,
    /// True to make slots of the optimizer's state.
    #[serde(default)]
    pub optimizer: bool,
    /// Tensors that are wanted as the values of their codes.
    #[serde(default)]
    pub coded: Vec<CodedSide>,
    /// Stored tensors that those values are made of, and that are no outputs therefore.
    #[serde(default)]
    pub left_out: HashSet<String>,
    /// The target; absent for `merge`.
    #[serde(default)]
    pub target: Option<TargetSide>,
    /// Element type of floating outputs.
    #[serde(default)]
    pub dtype: Option<Dtype>,
    /// Outputs that keep theirs.
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
    /// Those that the model was trained with.
    #[default]
    Params,
    /// The optimizer's fp32 masters.
    Masters,
}

/// The source's declaration: of `Source` of Python's, what plans are made of, by the same names.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceSide {
    /// What lies in which file.
    pub files: FilesSide,
    /// What tensors are called.
    #[serde(default)]
    pub names: NamesSide,
    /// By which table they are read, and what binds its letters.
    #[serde(default)]
    pub binding: BindingSide,
    /// What is taken although it is often an error.
    #[serde(default)]
    pub allowances: AllowancesSide,
    /// What the files hold of the optimizer.
    #[serde(default)]
    pub optimizer: OptimizerSide,
}

/// What lies in which file of a source.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilesSide {
    /// Where each file lies in the topology.
    pub units: Vec<UnitSide>,
    /// Tensors that lie in ranges of other tensors.
    #[serde(default)]
    pub assembled: Vec<AssembledSide>,
    /// What adapters make of tensors.
    #[serde(default)]
    pub adapted: Vec<AdaptedSide>,
    /// Files that say which rank they are of, and are in its place.
    #[serde(default)]
    pub placed: BTreeSet<usize>,
}

/// What tensors of a source are called.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamesSide {
    /// Where the model's own names begin.
    #[serde(default)]
    pub prefix: String,
    /// True if the caller said where the model begins, so that a merge has its own names.
    #[serde(default)]
    pub is_chosen: bool,
    /// The model's own names of tensors that are stored under others, which wrappers have made: by these.
    #[serde(default)]
    pub own: HashMap<String, String>,
    /// True if a merge gives tensors these names too.
    #[serde(default)]
    pub renames: bool,
    /// Stored tensors that are no outputs: factors of adapters, and what they replace.
    #[serde(default)]
    pub hidden: HashSet<String>,
    /// Names of scales and the like below the weights' prefix; they pass beside the tensors that they are of.
    #[serde(default)]
    pub beside: HashSet<String>,
}

/// By which table the tensors of a source are read, and what binds its letters.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindingSide {
    /// Layout table (its text where a request is JSON); none for tensors that are whole as they are.
    #[serde(rename = "toml", default, deserialize_with = "parsed")]
    pub layout: Option<Arc<Table>>,
    /// Rules for single tensors, from a `layout.json`: name, the dimension split over tp, and the parts of the whole
    /// along it that are split each by itself.
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
    /// True if tensors that no rule names are taken as they are.
    #[serde(default)]
    pub pass_unknown: bool,
}

/// What is taken of a source although it is often an error.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllowancesSide {
    /// True if layers may hold what other layers hold (a warning then).
    #[serde(default)]
    pub layers_may_repeat: bool,
    /// Glob patterns of files that were copied on purpose.
    #[serde(default)]
    pub copies: Vec<String>,
    /// True if NaN and infinite values are taken as they are.
    #[serde(default)]
    pub non_finite: bool,
    /// What is made of large holes in the place of tensors.
    #[serde(default)]
    pub holes: Holes,
}

/// What the files hold of an optimizer.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSide {
    /// Which copy of the weights is taken unless one is asked for.
    #[serde(default)]
    pub weights: Weights,
    /// Names of parameters that it keeps nothing of.
    #[serde(default)]
    pub untrained: HashSet<String>,
}

impl Request {
    /// The copy of the weights that is taken.
    pub(crate) fn taken(&self) -> Weights {
        self.weights.unwrap_or(self.source.optimizer.weights)
    }

    /// True if parameters and masters may differ (a warning then): moments are those of the masters, so not where they go along.
    fn twins_may_differ(&self) -> bool {
        self.weights == Some(Weights::Params) && !self.optimizer
    }

    /// True if a merge gives tensors the model's own names.
    fn is_renamed(&self) -> bool {
        let NamesSide { is_chosen, renames, hidden, .. } = &self.source.names;
        *is_chosen || *renames || !hidden.is_empty() || !self.source.files.adapted.is_empty()
    }

    /// The model's own names of parameters that the optimizer keeps nothing of.
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
    /// Layout table (its text where a request is JSON); none to keep the source's names and shapes.
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

/// Refuses an element type and numbers that no run has, before anything is allocated by them.
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
/// A layout table or pattern that cannot be used. What is wrong with the checkpoint comes as findings.
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

/// What a pass has of the target, and what is said of its slot: for a slot, both tables say how the optimizer keeps it.
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

/// Stored names by own names: a merge keeps the names that are stored, unless others are asked for.
fn called(request: &Request) -> HashMap<String, String> {
    match request.target.is_none() && !request.is_renamed() {
        true => request.source.names.own.iter().map(|(stored, own)| (own.clone(), stored.clone())).collect(),
        false => HashMap::new(),
    }
}

/// Begins the plan, with what the request itself says of it.
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
