//! Meets two sides of a conversion: boxes that a target wants, boxes that a source holds.
//!
//! Both sides speak of canonical tensors, so a conversion is an intersection of boxes. Here it is
//! proven that every element of every output comes from exactly one place, and that every stored
//! tensor goes somewhere.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use crate::codes;
use crate::error::{Finding, Severity};
use crate::layout::bind::{Known, Local};
use crate::layout::expr::Extents;
use crate::layout::resolve::{
    unknown_fact, AtomBox, Instance, Lowering, Outside, Placement, Registry, Resolved, Stored, Unit,
};
use crate::layout::table::{Entry, Table, Truth};
use crate::plan::{Combine, Fill, Op, Output, PadRegion, Part, PartAxis};
use crate::tensor::{c_strides, Dtype};

/// What to do with copies of a replicated tensor that differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replicas {
    /// They must be bit-equal.
    Equal,
    /// Average them in float32.
    Mean,
}

/// The target side.
pub struct Target<'a> {
    /// Its layout; `None` for the source's own at degree 1 (merge).
    pub table: Option<&'a Table>,
    /// What is known of it: degrees, facts, extents that differ from the source's.
    pub outside: Outside,
    /// Multiple to which the vocabulary is padded, if the target pads it.
    pub pad_multiple: Option<u64>,
    /// Element type for floating tensors; `None` keeps the source's.
    pub dtype: Option<Dtype>,
    /// How replicas are treated.
    pub replicas: Replicas,
    /// Which outputs are wanted, by name.
    pub wanted: &'a dyn Fn(&str) -> bool,
}

/// Outputs and what was found on the way.
pub struct Composed {
    /// Outputs per target unit; one unit when nothing is sharded.
    pub outputs: Vec<(BTreeMap<String, u64>, Output)>,
    /// Regions that should be zero.
    pub pads: Vec<PadRegion>,
    /// Stored tensors that repeat another one of the same rank, from another root: (first, copy).
    pub copies: Vec<(u32, u32)>,
    /// Findings.
    pub findings: Vec<Finding>,
}

/// The source side.
pub struct Source<'a> {
    /// Its layout.
    pub table: &'a Table,
    /// What it says.
    pub resolved: &'a Resolved,
    /// Its tensors.
    pub stored: &'a [Stored],
    /// Its units.
    pub units: &'a [Unit],
    /// What is known besides.
    pub outside: &'a Outside,
}

/// (instance, box) of a source.
type Held = (u32, u32);

/// Per box of the source, which parts of it are taken; ranks of the target may take the same one.
type Used = HashMap<Held, BTreeSet<(Vec<u64>, Vec<u64>)>>;

struct Index<'a> {
    source: &'a Source<'a>,
    /// canonical tensor -> tied owner
    alias: HashMap<u32, u32>,
    /// Per key: the axis bound by names, if all its holders bind it.
    name_axis: HashMap<u32, Option<usize>>,
    held: HashMap<(u32, u64), Vec<Held>>,
    /// Per key, the first that holds a part of it.
    first: HashMap<u32, Held>,
}

/// What outputs took of the source.
#[derive(Default)]
struct Ledger {
    /// Parts taken per box.
    used: Used,
    /// See [`Composed::copies`].
    copies: Vec<(u32, u32)>,
}

const WHOLE: u64 = u64::MAX;

impl<'a> Index<'a> {
    fn new(source: &'a Source<'a>, registry: &Registry) -> Index<'a> {
        let mut alias = HashMap::new();
        for tied in &source.table.tied {
            if tied.when.holds(&source.outside.facts) == Truth::Holds {
                if let (Some(from), Some(to)) = (registry.find(&tied.tensor), registry.find(&tied.to)) {
                    if registry.axes(from) == registry.axes(to) {
                        alias.insert(from, to);
                    }
                }
            }
        }
        let mut index =
            Index { source, alias, name_axis: HashMap::new(), held: HashMap::new(), first: HashMap::new() };
        let each = |visit: &mut dyn FnMut(u32, u32, &AtomBox)| {
            for (i, instance) in source.resolved.instances.iter().enumerate() {
                for (b, held) in instance.boxes.iter().enumerate() {
                    visit(i as u32, b as u32, held);
                }
            }
        };
        let mut name_axis: HashMap<u32, Option<usize>> = HashMap::new();
        each(&mut |_, _, held| {
            let bound = held.atom.places.iter().position(Option::is_none);
            let slot = name_axis.entry(index.key(held.atom.key)).or_insert(bound);
            if *slot != bound {
                *slot = None;
            }
        });
        index.name_axis = name_axis;
        let mut all: HashMap<(u32, u64), Vec<Held>> = HashMap::new();
        let mut first: HashMap<u32, Held> = HashMap::new();
        each(&mut |i, b, held| {
            let key = index.key(held.atom.key);
            first.entry(key).or_insert((i, b));
            let at = index.name_axis[&key].map_or(WHOLE, |axis| held.lo[axis]);
            all.entry((key, at)).or_default().push((i, b));
        });
        index.held = all;
        index.first = first;
        index
    }

    fn key(&self, key: u32) -> u32 {
        self.alias.get(&key).copied().unwrap_or(key)
    }

    fn get(&self, held: Held) -> (&'a Instance, &'a AtomBox) {
        let instance = &self.source.resolved.instances[held.0 as usize];
        (instance, &instance.boxes[held.1 as usize])
    }

    /// Something that holds a part of the wanted canonical tensor.
    fn any(&self, wanted: &AtomBox) -> Option<Held> {
        self.first.get(&self.key(wanted.atom.key)).copied()
    }

    /// Everything that may overlap the box.
    fn candidates(&self, wanted: &AtomBox) -> Vec<Held> {
        let key = self.key(wanted.atom.key);
        let Some(&axis) = self.name_axis.get(&key) else { return Vec::new() };
        match axis {
            None => self.held.get(&(key, WHOLE)).cloned().unwrap_or_default(),
            Some(axis) => (wanted.lo[axis]..wanted.hi[axis])
                .flat_map(|at| self.held.get(&(key, at)).into_iter().flatten().copied())
                .collect(),
        }
    }
}

fn volume(lo: &[u64], hi: &[u64]) -> u64 {
    lo.iter().zip(hi).map(|(l, h)| h.saturating_sub(*l)).product()
}

fn intersect(a: &AtomBox, b: &AtomBox) -> Option<(Vec<u64>, Vec<u64>)> {
    let lo: Vec<u64> = a.lo.iter().zip(&b.lo).map(|(x, y)| *x.max(y)).collect();
    let hi: Vec<u64> = a.hi.iter().zip(&b.hi).map(|(x, y)| *x.min(y)).collect();
    lo.iter().zip(&hi).all(|(l, h)| l < h).then_some((lo, hi))
}

/// The first pair of boxes that share an element, by a sweep along the axis with most distinct starts.
fn first_overlap(boxes: &[(Vec<u64>, Vec<u64>)]) -> Option<(usize, usize)> {
    let rank = boxes.first()?.0.len();
    let distinct = |axis: usize| {
        let mut starts: Vec<u64> = boxes.iter().map(|b| b.0[axis]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let axis = (0..rank).max_by_key(|&a| distinct(a));
    let mut order: Vec<usize> = (0..boxes.len()).collect();
    if let Some(axis) = axis {
        order.sort_by_key(|&i| boxes[i].0[axis]);
    }
    for (n, &i) in order.iter().enumerate() {
        for &j in &order[n + 1..] {
            if let Some(axis) = axis {
                if boxes[j].0[axis] >= boxes[i].1[axis] {
                    break;
                }
            }
            let (a, b) = (&boxes[i], &boxes[j]);
            if (0..rank).all(|k| a.0[k] < b.1[k] && b.0[k] < a.1[k]) {
                return Some((i, j));
            }
        }
    }
    None
}

/// Parts of an output axis by axis; axes of extent 1 only move the bases.
fn make_part(
    shape: &[u64],
    want: &AtomBox,
    have: &AtomBox,
    lo: &[u64],
    hi: &[u64],
) -> (Vec<PartAxis>, u64, Vec<u64>) {
    let strides = c_strides(shape);
    let mut dst_base: u64 = want.atom.base.iter().zip(&strides).map(|(b, s)| b * s).sum();
    let mut src_base = have.atom.base.clone();
    let mut axes = Vec::new();
    for k in 0..lo.len() {
        let n = hi[k] - lo[k];
        let dst = want.atom.places[k].map_or(0, |p| p.stride * strides[p.dim]);
        dst_base += (lo[k] - want.lo[k]) * dst;
        if let Some(place) = have.atom.places[k] {
            src_base[place.dim] += (lo[k] - have.lo[k]) * place.stride;
            if n > 1 {
                axes.push(PartAxis { n, dst, dim: place.dim as u32, step: place.stride });
            }
        }
    }
    axes.sort_by_key(|a| std::cmp::Reverse(a.dst));
    (axes, dst_base, src_base)
}

fn value_ops(
    source: &Table,
    from: &Entry,
    from_extents: &Extents,
    target: &Table,
    to: &Entry,
    to_extents: &Extents,
) -> Vec<Op> {
    let factor = |table: &Table, entry: &Entry, extents: &Extents| {
        entry.scale.as_ref().and_then(|s| s.value(&table.derived, extents)).unwrap_or(1.0)
    };
    let (undo, redo) = (factor(source, from, from_extents), factor(target, to, to_extents));
    let mut ops = Vec::new();
    if undo == redo && from.add == to.add {
        return ops;
    }
    if undo == redo && undo == 1.0 {
        ops.push(Op::Add((to.add - from.add) as f32));
        return ops;
    }
    if from.add != 0.0 {
        ops.push(Op::Add(-from.add as f32));
    }
    if undo != redo {
        ops.push(Op::Scale((redo / undo) as f32));
    }
    if to.add != 0.0 {
        ops.push(Op::Add(to.add as f32));
    }
    ops
}

/// A target tensor to be made.
struct Wanted {
    entry: usize,
    index: BTreeMap<String, u64>,
    choices: Vec<usize>,
    coords: BTreeMap<String, u64>,
}

/// All positions on the name-bound axes of an entry.
fn positions(entry: &Entry, extents: &Extents) -> Option<Vec<BTreeMap<String, u64>>> {
    let mut all = vec![BTreeMap::new()];
    for variable in entry.name.variables().filter(|v| !v.extent) {
        let n = *extents.get(&variable.axis)?;
        all = all
            .into_iter()
            .flat_map(|index| {
                (0..n).map(move |at| {
                    let mut index = index.clone();
                    index.insert(variable.axis.clone(), at);
                    index
                })
            })
            .collect();
    }
    Some(all)
}

/// All ranks of the parallel dimensions that divide (or sum) entries of a table.
fn ranks(table: &Table, known: &Known) -> Vec<BTreeMap<String, u64>> {
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

/// Composes source and target.
pub fn compose(source: &Source, target: &Target, registry: &mut Registry) -> Composed {
    let mut findings = completeness(source);
    let table = target.table.unwrap_or(source.table);

    // Target extents: the source's, the real vocabulary, and what the target pads it to.
    let mut extents = source.resolved.extents.clone();
    extents.extend(target.outside.known.extents.iter().map(|(k, v)| (k.clone(), *v)));
    if let Some(vocab) = &table.vocab {
        if let Some(&real) = extents.get(vocab) {
            let padded = match target.pad_multiple {
                Some(multiple) => real.next_multiple_of(multiple.max(1)),
                None => real,
            };
            for entry in &table.entries {
                if let Some(shape) = &entry.shape {
                    let stored = crate::layout::table::stored_name(shape, vocab);
                    if stored != *vocab {
                        extents.insert(stored, padded);
                    }
                }
            }
        }
    }
    let merging = target.table.is_none();
    let known = Known { extents: Extents::new(), degrees: target.outside.known.degrees.clone() };
    let local = Local::new(table, &extents, &known);
    findings.extend(local.findings.iter().cloned());

    let facts = if merging { &source.outside.facts } else { &target.outside.facts };
    let wanted =
        if merging { own_names(source) } else { table_names(table, facts, &extents, &known, &mut findings) };

    // Where something is wrong or missing already, what is left over or lacking is only its echo.
    let judge = findings.iter().chain(&source.resolved.findings).all(|f| f.severity != Severity::Error);

    let mut lowering = Lowering::new(table, &local);
    // Registers the target's keys before ties are looked up.
    let mut lowered: Vec<(Wanted, Vec<AtomBox>)> = Vec::with_capacity(wanted.len());
    for want in wanted {
        let unit = Unit { coords: want.coords.clone(), ..Unit::default() };
        match lowering.boxes(registry, want.entry, &want.index, &unit, &extents) {
            Ok(boxes) => lowered.push((want, boxes)),
            Err(message) => {
                let entry = &table.entries[want.entry];
                findings.push(
                    Finding::new(codes::UNBOUND_AXIS, format!("layout {}: {message}", table.name))
                        .tensor(entry.name.text())
                        .help("give the model's config with --config"),
                );
            }
        }
    }

    let index = Index::new(source, registry);
    let mut ledger = Ledger::default();
    let mut outputs = Vec::with_capacity(lowered.len());
    for (want, boxes) in &lowered {
        let entry = &table.entries[want.entry];
        let Some(name) = entry.name.format(&want.index, &extents, &want.choices) else { continue };
        let present = boxes.iter().any(|b| !index.candidates(b).is_empty());
        if !present && (entry.optional || merging) {
            continue;
        }
        let keep = (target.wanted)(&name);
        let shape: Vec<u64> = match &entry.shape {
            Some(shape) => shape
                .extents(&table.derived, local.of(&entry.class))
                .into_iter()
                .map(|n| n.unwrap_or(0))
                .collect(),
            None => continue,
        };
        let built =
            build(&index, target, table, entry, &extents, registry, &name, &shape, boxes, &mut ledger);
        match built {
            Ok((parts, dtype)) if keep => {
                let output = finish(target, entry, &want.coords, name, shape, boxes, parts, dtype);
                outputs.push((want.coords.clone(), output));
            }
            Ok(_) => {}
            Err(found) if keep => {
                findings.extend(found.into_iter().filter(|f| judge || f.code != codes::MISSING_TENSOR));
            }
            Err(_) => {}
        }
    }

    let mut pads = Vec::new();
    // Where something is missing already, what is left over is only its echo.
    let judge_leftovers =
        findings.iter().chain(&source.resolved.findings).all(|f| f.severity != Severity::Error);
    for (i, instance) in source.resolved.instances.iter().enumerate() {
        let stored = &source.stored[instance.tensor as usize];
        for (b, held) in instance.boxes.iter().enumerate() {
            let whole = volume(&held.lo, &held.hi);
            let parts = ledger.used.get(&(i as u32, b as u32));
            let taken: u64 = parts.into_iter().flatten().map(|(lo, hi)| volume(lo, hi)).sum();
            if taken < whole && judge_leftovers {
                let unit = &source.units[instance.unit as usize];
                let mut finding = Finding::new(
                    codes::UNKNOWN_TENSOR,
                    format!("the target layout {} has no place for {} of its elements", table.name, whole - taken),
                )
                .file(&unit.file)
                .tensor(&stored.name)
                .help("choose the target that fits this model, or leave the tensor out on purpose with --exclude");
                finding.rank = unit.rank.clone();
                findings.push(finding);
            }
            if let Some((axis, lo, hi)) = held.pad {
                pads.push(pad_region(instance.tensor, held, axis, lo, hi));
            }
        }
    }
    ledger.copies.sort_unstable();
    ledger.copies.dedup();
    Composed { outputs, pads, copies: ledger.copies, findings }
}

fn pad_region(stored: u32, held: &AtomBox, pad_axis: usize, lo: u64, hi: u64) -> PadRegion {
    let mut src_base = held.atom.base.clone();
    let mut axes = Vec::new();
    for (k, place) in held.atom.places.iter().enumerate() {
        let Some(place) = place else { continue };
        // A rank that holds only padding has lo == hi == the real extent: its own start is then `lo`.
        let n = if k == pad_axis {
            let first = if held.lo[k] < held.hi[k] { lo - held.lo[k] } else { 0 };
            src_base[place.dim] += first * place.stride;
            hi - lo
        } else {
            held.hi[k] - held.lo[k]
        };
        axes.push(PartAxis { n, dst: 0, dim: place.dim as u32, step: place.stride });
    }
    PadRegion { stored, axes, src_base }
}

/// The source's own tensors as a run without parallelism would name them.
fn own_names(source: &Source) -> Vec<Wanted> {
    let mut seen: BTreeMap<(usize, Vec<(String, u64)>, Vec<usize>), usize> = BTreeMap::new();
    let mut wanted = Vec::new();
    for instance in &source.resolved.instances {
        let index: Vec<(String, u64)> = instance.index.iter().map(|(a, n)| (a.clone(), *n)).collect();
        let key = (instance.entry as usize, index, instance.choices.clone());
        if let std::collections::btree_map::Entry::Vacant(slot) = seen.entry(key) {
            slot.insert(wanted.len());
            wanted.push(Wanted {
                entry: instance.entry as usize,
                index: instance.index.clone(),
                choices: instance.choices.clone(),
                coords: BTreeMap::new(),
            });
        }
    }
    wanted
}

/// Every tensor that the target's table calls for.
fn table_names(
    table: &Table,
    facts: &BTreeMap<String, bool>,
    extents: &Extents,
    known: &Known,
    findings: &mut Vec<Finding>,
) -> Vec<Wanted> {
    let mut wanted = Vec::new();
    let all_ranks = ranks(table, known);
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
        let Some(positions) = positions(entry, extents) else {
            if !entry.optional {
                findings.push(
                    Finding::new(
                        codes::UNBOUND_AXIS,
                        format!("layout {}: the number of layers is not known", table.name),
                    )
                    .tensor(entry.name.text())
                    .help("give the model's config with --config"),
                );
            }
            continue;
        };
        for index in positions {
            for coords in &all_ranks {
                wanted.push(Wanted {
                    entry: i,
                    index: index.clone(),
                    choices: Vec::new(),
                    coords: coords.clone(),
                });
            }
        }
    }
    wanted
}

#[allow(clippy::too_many_arguments)]
fn build(
    index: &Index,
    target: &Target,
    table: &Table,
    entry: &Entry,
    extents: &Extents,
    registry: &Registry,
    name: &str,
    shape: &[u64],
    boxes: &[AtomBox],
    ledger: &mut Ledger,
) -> Result<(Vec<Part>, Option<Dtype>), Vec<Finding>> {
    let source = index.source;
    let mut findings = Vec::new();
    let mut parts = Vec::new();
    let mut dtype: Option<(Dtype, String)> = None;
    for want in boxes {
        let needed = volume(&want.lo, &want.hi);
        if needed == 0 {
            // A rank that holds only padding, or a tensor without elements, has its dtype all the same.
            if let (None, Some(held)) = (&dtype, index.any(want)) {
                let tensor = &source.stored[index.get(held).0.tensor as usize];
                dtype = Some((tensor.dtype, tensor.name.clone()));
            }
            continue;
        }
        // Copies of one box are replicas (or terms of a sum).
        let mut groups: BTreeMap<(Vec<u64>, Vec<u64>), Vec<Held>> = BTreeMap::new();
        for held in index.candidates(want) {
            if let Some(both) = intersect(want, index.get(held).1) {
                groups.entry(both).or_default().push(held);
            }
        }
        let covered: u64 = groups.keys().map(|(lo, hi)| volume(lo, hi)).sum();
        let all: Vec<_> = groups.keys().cloned().collect();
        if let Some((i, j)) = first_overlap(&all) {
            let first = |k: usize| index.get(groups[&all[k]][0]).0;
            findings.push(twice(source, name, first(i), first(j)));
            continue;
        }
        if covered < needed {
            findings.push(
                Finding::new(codes::MISSING_TENSOR, format!("{} of {needed} elements come from no file", needed - covered))
                    .tensor(name)
                    .expected(format!("the source's {}", registry.name(want.atom.key)), if covered == 0 { "nothing" } else { "a part of it" })
                    .help("the layout of the target needs this tensor; a file is missing or the model is of another family"),
            );
            continue;
        }
        for ((lo, hi), mut held) in groups {
            held.sort_by_key(|&h| {
                let (instance, _) = index.get(h);
                (source.units[instance.unit as usize].coords.clone(), instance.tensor)
            });
            let (first, first_box) = index.get(held[0]);
            let rule = &source.table.entries[first.entry as usize];
            if let Some(other) = held
                .iter()
                .map(|&h| index.get(h))
                .find(|(other, b)| other.entry != first.entry && b.atom.key == first_box.atom.key)
            {
                findings.push(twice(source, name, first, other.0));
                continue;
            }
            // One piece per rank: the same rank's piece from another root is a copy, to be compared and
            // not to be added; from the same root it is a mistake.
            let (kept, again) = one_per_rank(source, &held);
            if let Some((a, b)) = again.iter().find(|(a, b)| root_of(source, a.0) == root_of(source, b.0)) {
                findings.push(twice(source, name, index.get(*a).0, index.get(*b).0));
                continue;
            }
            for (_, h) in &again {
                ledger.used.entry(*h).or_default().insert((lo.clone(), hi.clone()));
            }
            ledger.copies.extend(again.iter().map(|(a, b)| (index.get(*a).0.tensor, index.get(*b).0.tensor)));
            let held = kept;
            // Two spellings of one name on one rank are no replicas.
            let mut pairs = held.windows(2).map(|w| (index.get(w[0]), index.get(w[1])));
            if let Some(((a, _), (b, _))) =
                pairs.find(|((a, x), (b, y))| a.unit == b.unit && x.atom.key == y.atom.key)
            {
                findings.push(twice(source, name, a, b));
                continue;
            }
            if let Placement::Sum(dimension) = &first.placement {
                let rank = |h: Held| source.units[index.get(h).0.unit as usize].coords.get(dimension);
                let numbers = source.stored[first.tensor as usize].dtype.is_float();
                if !numbers
                    || held.iter().enumerate().any(|(n, &h)| held[..n].iter().any(|&o| rank(o) == rank(h)))
                {
                    let stored = &source.stored[first.tensor as usize];
                    findings.push(
                        Finding::new(
                            codes::UNSUPPORTED,
                            format!("a sum over {dimension} of integers, or with copies over another dimension"),
                        )
                        .file(&source.units[first.unit as usize].file)
                        .tensor(&stored.name)
                        .help("each rank's term would count more than once; describe the tensor otherwise in a layout of your own"),
                    );
                    continue;
                }
            }
            for &h in &held {
                ledger.used.entry(h).or_default().insert((lo.clone(), hi.clone()));
                let tensor = &source.stored[index.get(h).0.tensor as usize];
                match &dtype {
                    None => dtype = Some((tensor.dtype, tensor.name.clone())),
                    Some((known, witness)) if *known != tensor.dtype => {
                        let unit = &source.units[tensor.unit as usize];
                        findings.push(
                            Finding::new(codes::DTYPE, "dtype of a shard")
                                .file(&unit.file)
                                .tensor(&tensor.name)
                                .expected(format!("{known} like {witness}"), tensor.dtype)
                                .help("the file belongs to another run or step"),
                        );
                    }
                    Some(_) => {}
                }
            }
            // Tied tensors are copies by declaration; only ranks drift.
            let ranks = held.iter().all(|&h| index.get(h).0.entry == first.entry);
            let combine = match &first.placement {
                Placement::Sum(_) => Combine::Sum,
                Placement::SumOrCopy(_, fact) => Combine::Zero(fact.clone()),
                Placement::Parts if held.len() > 1 && ranks && target.replicas == Replicas::Mean => {
                    Combine::Mean
                }
                Placement::Parts => Combine::Equal,
            };
            // A part reads all its sources one way; a tied copy stored in another layout cannot be compared.
            if let Some(&h) = held.iter().find(|&&h| {
                let other = index.get(h).1;
                !Rc::ptr_eq(&other.atom, &first_box.atom)
                    && (other.atom.base != first_box.atom.base || other.atom.places != first_box.atom.places)
            }) {
                findings.push(twice(source, name, first, index.get(h).0));
                continue;
            }
            let (axes, dst_base, src_base) = make_part(shape, want, first_box, &lo, &hi);
            let ops = value_ops(source.table, rule, &source.resolved.extents, table, entry, extents);
            let stored = &source.stored[first.tensor as usize];
            if !ops.is_empty() && !stored.dtype.is_float() {
                findings.push(
                    Finding::new(codes::UNSUPPORTED, "values that the layouts scale or add to must be floats")
                        .file(&source.units[first.unit as usize].file)
                        .tensor(&stored.name)
                        .expected("F16, BF16, F32 or F64", stored.dtype)
                        .help("the tensor is quantised or of another model; describe it without scale and add"),
                );
                continue;
            }
            let sources: Vec<u32> = held.iter().map(|&h| index.get(h).0.tensor).collect();
            parts.push(Part { axes, dst_base, src_base, sources, combine, ops });
        }
    }
    if findings.is_empty() {
        parts.sort_by_key(|p| p.dst_base);
        Ok((parts, dtype.map(|(d, _)| d)))
    } else {
        Err(findings)
    }
}

fn root_of(source: &Source, instance: u32) -> u32 {
    source.units[source.resolved.instances[instance as usize].unit as usize].root
}

/// The first piece of each rule and rank, and the others with the one they repeat.
fn one_per_rank(source: &Source, held: &[Held]) -> (Vec<Held>, Vec<(Held, Held)>) {
    let mut first: HashMap<(u32, &BTreeMap<String, u64>), Held> = HashMap::new();
    let (mut kept, mut again) = (Vec::new(), Vec::new());
    for &h in held {
        let instance = &source.resolved.instances[h.0 as usize];
        let key = (instance.entry, &source.units[instance.unit as usize].coords);
        match first.entry(key) {
            std::collections::hash_map::Entry::Occupied(slot) => again.push((*slot.get(), h)),
            std::collections::hash_map::Entry::Vacant(slot) => {
                slot.insert(h);
                kept.push(h);
            }
        }
    }
    (kept, again)
}

fn twice(source: &Source, name: &str, a: &Instance, b: &Instance) -> Finding {
    let (x, y) = (&source.stored[a.tensor as usize], &source.stored[b.tensor as usize]);
    Finding::new(codes::OVERLAP, "filled by more than one stored tensor")
        .file(&source.units[b.unit as usize].file)
        .tensor(name)
        .expected(format!("only {}", x.name), format!("{} as well", y.name))
        .help("one of the two is stale or would be applied twice; name it in a layout with `ignore` and a reason")
}

#[allow(clippy::too_many_arguments)]
fn finish(
    target: &Target,
    entry: &Entry,
    coords: &BTreeMap<String, u64>,
    name: String,
    shape: Vec<u64>,
    boxes: &[AtomBox],
    mut parts: Vec<Part>,
    dtype: Option<Dtype>,
) -> Output {
    let stored = dtype.unwrap_or(Dtype::F32);
    let dtype = match target.dtype {
        Some(wanted) if stored.is_float() => wanted,
        _ => stored,
    };
    let mut fill = if boxes.iter().any(|b| b.pad.is_some()) { Fill::Zero } else { Fill::None };
    // The inverse of a sum: the value on rank 0, the neutral term elsewhere.
    if let Some(dimension) = &entry.partial {
        if coords.get(dimension).is_some_and(|r| *r > 0) {
            parts.clear();
            fill = Fill::NegativeZero;
        }
    }
    Output { name, dtype, shape, parts, fill, file: 0, offset: 0 }
}

/// What the source's own layout calls for and no file has: tensors absent in some layers or ranks.
fn completeness(source: &Source) -> Vec<Finding> {
    let table = source.table;
    let known = &source.outside.known;
    let mut findings = Vec::new();
    // (entry, position) -> ranks present
    let mut present: HashMap<(usize, Vec<u64>), Vec<&BTreeMap<String, u64>>> = HashMap::new();
    for instance in &source.resolved.instances {
        let at: Vec<u64> = instance.index.values().copied().collect();
        present
            .entry((instance.entry as usize, at))
            .or_default()
            .push(&source.units[instance.unit as usize].coords);
    }
    // A shape finding already says what is wrong with a tensor; it is not missing besides.
    let excused: Vec<&String> = source.resolved.findings.iter().filter_map(|f| f.tensor.as_ref()).collect();

    let mut missing: Vec<(String, BTreeMap<String, u64>, BTreeMap<String, u64>)> = Vec::new();
    for (e, entry) in table.entries.iter().enumerate() {
        if entry.ignore.is_some() || entry.shape.is_none() || entry.generic && known.degrees.is_empty() {
            continue;
        }
        let truth = entry.when.holds(&source.outside.facts);
        if truth == Truth::Fails {
            continue;
        }
        let Some(positions) = positions(entry, &source.resolved.extents) else { continue };
        let anywhere = positions.iter().any(|p| present.contains_key(&(e, p.values().copied().collect())));
        let alternative = !anywhere && covered_by_other(source, e);
        if !anywhere && (entry.optional || alternative || truth != Truth::Holds) {
            continue;
        }
        let bound: Vec<&String> = entry.name.variables().filter(|v| !v.extent).map(|v| &v.axis).collect();
        let dimensions: Vec<&String> = table.shards[&entry.class]
            .iter()
            .filter(|(_, axes)| !axes.iter().any(|a| bound.contains(&a)))
            .map(|(d, _)| d)
            .filter(|d| known.degree(d) > 1)
            .collect();
        let mut wanted: Vec<BTreeMap<String, u64>> = vec![BTreeMap::new()];
        for d in dimensions {
            wanted = wanted
                .into_iter()
                .flat_map(|c| {
                    (0..known.degree(d)).map(move |r| {
                        let mut c = c.clone();
                        c.insert(d.clone(), r);
                        c
                    })
                })
                .collect();
        }
        for position in positions {
            let key = (e, position.values().copied().collect::<Vec<u64>>());
            let here = present.get(&key);
            for coords in &wanted {
                let found = here.is_some_and(|all| {
                    all.iter().any(|c| coords.iter().all(|(d, r)| c.get(d).copied().unwrap_or(0) == *r))
                });
                if !found {
                    if let Some(name) = entry.name.format(&position, &source.resolved.extents, &[]) {
                        if !excused.contains(&&name) {
                            missing.push((name, position.clone(), coords.clone()));
                        }
                    }
                }
            }
        }
    }

    // A layer of which nothing is there is one finding.
    let mut layers: BTreeMap<(String, u64), u64> = BTreeMap::new();
    for (_, position, _) in &missing {
        if let Some((axis, at)) = position.iter().next() {
            *layers.entry((axis.clone(), *at)).or_default() += 1;
        }
    }
    let has_any =
        |axis: &str, at: u64| source.resolved.instances.iter().any(|i| i.index.get(axis) == Some(&at));
    let mut gone: Vec<(String, u64)> = Vec::new();
    for ((axis, at), count) in layers {
        if !has_any(&axis, at) {
            let n = source.resolved.extents.get(&axis).copied().unwrap_or(0);
            let held: Vec<String> =
                (0..n).map(|i| if has_any(&axis, i) { i.to_string() } else { "_".into() }).collect();
            let held = if n <= 128 { held.join(",") } else { format!("{n} positions") };
            findings.push(
                Finding::new(
                    codes::MISSING_LAYER,
                    format!("position {at} on axis {axis}: none of its {count} tensors is there"),
                )
                .expected(format!("{axis} 0..{n}"), held)
                .help("copy the files of this layer from the pipeline stage that owned it"),
            );
            gone.push((axis, at));
        }
    }
    for (name, position, coords) in missing {
        if position.iter().next().is_some_and(|(a, n)| gone.contains(&(a.clone(), *n))) {
            continue;
        }
        let rank: Vec<String> = coords.iter().map(|(d, r)| format!("{d} {r}")).collect();
        let mut finding = Finding::new(codes::MISSING_TENSOR, "expected by the layout, in no file")
            .tensor(name)
            .help("copy the file of this rank from the node that wrote it");
        finding.rank = (!rank.is_empty()).then(|| rank.join(", "));
        findings.push(finding);
    }
    findings
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
