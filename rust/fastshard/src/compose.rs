//! Meets two sides of a conversion: boxes that a target wants, boxes that a source holds.
//!
//! Both sides are boxes of canonical tensors, so a conversion is an intersection of boxes. This module proves
//! that every element of every output comes from exactly one place, and that every stored tensor is used.

mod build;
mod complete;
mod index;
mod wanted;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::codes;
use crate::error::{Finding, Severity};
use crate::few::Few;
use crate::layout::bind::{Known, Local};
use crate::layout::cuts::{self, Cuts};
use crate::layout::expr::{extent_in, in_set, Extents};
use crate::layout::resolve::{AtomBox, Lowering, Outside, Registry, Resolved, Stored, Unit};
use crate::layout::sets::{Positions, Sets};
use crate::layout::table::{stored_name, Entry, Table};
use crate::plan::{Output, PadRegion};
use crate::tensor::Dtype;

use build::{pad_region, Builder};
use complete::completeness;
pub(crate) use index::first_overlap;
use index::{volume, Aliases, Index, Ledger};
use wanted::{own_names, table_names, too_many_positions, Wanted, MAX_MISSING};

/// The treatment of copies of a replicated tensor that differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replicas {
    /// They must be bit-equal.
    Equal,
    /// Average them in float32.
    Mean,
}

/// Outputs that keep their stored element type.
#[derive(Debug, Clone, Default, PartialEq, serde::Deserialize)]
pub struct Keep {
    /// Names of outputs, and last parts of names.
    #[serde(default)]
    pub names: std::collections::HashSet<String>,
    /// True to cast even the outputs that a table would keep.
    #[serde(default)]
    pub nothing: bool,
}

impl Keep {
    /// True if an output is named.
    pub(crate) fn names(&self, name: &str) -> bool {
        let last = name.rsplit('.').next().unwrap_or(name);
        !self.nothing && (self.names.contains(name) || self.names.contains(last))
    }

    fn has(&self, name: &str, entry: &Entry) -> bool {
        entry.is_moment || (entry.keep_dtype && !self.nothing) || self.names(name)
    }
}

/// The target side.
pub struct Target<'a> {
    /// Its layout; `None` for the source's own layout at degree 1 (merge).
    pub table: Option<&'a Table>,
    /// Known properties of it: degrees, facts, extents that differ from the source's.
    pub outside: Outside,
    /// Multiple to which the vocabulary is padded, if the target pads it.
    pub pad_multiple: Option<u64>,
    /// Element type for floating tensors; `None` keeps the source's.
    pub dtype: Option<Dtype>,
    /// The outputs that keep the source's element type, whatever it is.
    pub keep: &'a Keep,
    /// The treatment of replicas.
    pub replicas: Replicas,
    /// True if ranks hold chunks of the full tensor: boxes, each stored once. A tensor whose shards are not
    /// boxes is not divided.
    pub chunks: bool,
    /// The ranks that hold it; every combination by default.
    pub ranks: Option<&'a [BTreeMap<String, u64>]>,
    /// Selects the wanted outputs by name.
    pub wanted: &'a dyn Fn(&str) -> bool,
}

/// An output without a place in a file yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Drafted {
    /// Rank per parallel dimension of the target; empty if nothing is divided.
    pub coords: Arc<BTreeMap<String, u64>>,
    /// The output, as the rank holds it.
    pub output: Output,
    /// Shape of the full tensor, if it differs.
    pub whole: Option<Few<u64>>,
    /// The way in which ranks cut it; `None` if they do not hold equal shares.
    pub cuts: Option<Cuts>,
    /// Its position on each axis that its name counts.
    pub index: Arc<BTreeMap<String, u64>>,
}

/// Outputs, and the findings of composing them.
#[derive(Default)]
pub struct Composed {
    /// Outputs of every rank of the target.
    pub outputs: Vec<Drafted>,
    /// Regions that should be zero.
    pub pads: Vec<PadRegion>,
    /// Stored tensors that repeat another one of the same rank, from another root: (first, copy).
    pub copies: Vec<(u32, u32)>,
    /// Incomplete tensors that the source must hold or the target requires, with the number of elements of
    /// each if the layout states it.
    pub lost: BTreeMap<String, Option<u64>>,
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
    /// Further known properties.
    pub outside: &'a Outside,
    /// Names that the layout lists and that may be missing.
    pub absent: &'a BTreeSet<String>,
}

/// The sets of the target, fitted to the extents: the source's sets of the same names, and those that the
/// target states.
fn target_sets(source: &Source, target: &Target, table: &Table, extents: &mut Extents) -> Sets {
    let of = |sets: &Sets| -> Sets {
        let fits = |(name, set): &(&String, &Positions)| {
            table.config.sets.get(*name).is_some_and(|s| s.axis == set.axis)
        };
        sets.iter().filter(fits).map(|(name, set)| (name.clone(), set.clone())).collect()
    };
    let mut sets = of(&source.resolved.sets);
    sets.extend(of(&target.outside.sets));
    extents.retain(|extent, _| in_set(extent).is_none());
    for (name, set) in &mut sets {
        // An optional set that the source lacks has ended the axis.
        if let Some(&extent) = extents.get(&set.axis) {
            set.positions.retain(|at| *at < extent);
        }
        extents.insert(extent_in(&set.axis, name), set.positions.len() as u64);
    }
    sets
}

/// The extents of the target: the source's, those that the target states, and the padding of its vocabulary.
fn target_extents(source: &Source, target: &Target, table: &Table) -> Extents {
    let mut extents = source.resolved.extents.clone();
    extents.extend(target.outside.known.extents.iter().map(|(k, v)| (k.clone(), *v)));
    let vocab = table.vocab.as_ref();
    let Some((vocab, real)) = vocab.and_then(|vocab| Some((vocab, *extents.get(vocab)?))) else {
        return extents;
    };
    let padded = target.pad_multiple.map_or(real, |multiple| real.next_multiple_of(multiple.max(1)));
    let stored = table.entries.iter().filter_map(|entry| Some(stored_name(entry.shape.as_ref()?, vocab)));
    extents.extend(stored.filter(|stored| stored != vocab).map(|stored| (stored, padded)));
    extents
}

/// Composes source and target.
pub fn compose(source: &Source, target: &Target, registry: &mut Registry) -> Composed {
    let kept = target.table.and_then(|table| table.keeping(source.table.entries.iter()));
    let table = kept.as_ref().or(target.table).unwrap_or(source.table);
    let absurd = too_many_positions(source.table, &source.resolved.extents);
    if !absurd.is_empty() {
        return Composed { findings: absurd, ..Composed::default() };
    }
    let (mut findings, lost) = completeness(source);
    let mut extents = target_extents(source, target, table);
    let sets = target_sets(source, target, table, &mut extents);
    let absurd = too_many_positions(table, &extents);
    if !absurd.is_empty() {
        findings.extend(absurd);
        return Composed { findings, ..Composed::default() };
    }
    let known = Known { extents: Extents::new(), degrees: target.outside.known.degrees.clone() };
    let boxed = if target.chunks { cuts::in_boxes(table, &extents, &known) } else { None };
    let table = boxed.as_ref().unwrap_or(table);
    let local = Local::new(table, &extents, &known);
    findings.extend(local.findings.iter().cloned());
    let wanted = match target.table {
        None => own_names(source),
        Some(_) => table_names(target, table, (&extents, &sets), &known, &mut findings),
    };
    let whole = Local::new(table, &extents, &Known::default());
    let ranks = TargetRanks { target, table, extents: &extents, sets: &sets, local, whole };
    let elements = |entry| match target.table {
        None => ranks.elements(entry, &ranks.whole),
        // The rules are not those of the names.
        Some(_) => None,
    };
    let lost = lost.into_iter().map(|(name, entry)| (name, elements(&source.table.entries[entry]))).collect();
    let mut composed = Composed { findings, lost, ..Composed::default() };
    let judge = composed.is_sound(source);
    // Registers the target's keys before ties are looked up.
    let mut lowered = ranks.lower(wanted, registry, &mut composed.findings);
    let aliases = Aliases::new(source, target, registry);
    let projected;
    let (mut with_copies, mut source) = (None, source);
    if aliases.has_copies() {
        lowered.iter_mut().flat_map(|(_, boxes)| boxes).for_each(|one| aliases.project(one));
        let resolved = with_copies.insert(source.resolved.clone());
        resolved
            .instances
            .iter_mut()
            .flat_map(|instance| &mut instance.boxes)
            .for_each(|one| aliases.project(one));
        projected = Source { resolved, ..*source };
        source = &projected;
    }
    let index = Index::new(source, &aliases);
    let builder = Builder { index, target, table, extents: &extents, registry, ledger: Ledger::default() };
    let ledger = ranks.outputs(&lowered, builder, judge, &mut composed);
    composed.account(source, &ranks, ledger);
    composed
}

/// The target's ranks, whose outputs are made.
struct TargetRanks<'a> {
    target: &'a Target<'a>,
    /// The source's own when merging.
    table: &'a Table,
    extents: &'a Extents,
    sets: &'a Sets,
    /// What one of them holds.
    local: Local,
    /// What all of them hold together.
    whole: Local,
}

impl TargetRanks<'_> {
    /// The boxes that each wanted tensor consists of.
    fn lower(
        &self,
        wanted: Vec<Wanted>,
        registry: &mut Registry,
        findings: &mut Vec<Finding>,
    ) -> Vec<(Wanted, Vec<AtomBox>)> {
        let mut lowering = Lowering::new(self.table, &self.local, self.sets);
        let mut lowered = Vec::with_capacity(wanted.len());
        for want in wanted {
            let unit = Unit { coords: (*want.coords).clone(), ..Unit::default() };
            let entry = &self.table.entries[want.entry];
            match lowering.boxes(registry, want.entry, &want.index, &unit, self.extents) {
                Ok(boxes) => lowered.push((want, boxes)),
                // An axis that only it has is bound by no tensor: the source has none of its kind.
                Err(_) if entry.optional => {}
                Err(message) => findings.push(
                    Finding::new(codes::UNBOUND_AXIS, format!("layout {}: {message}", self.table.name))
                        .tensor(entry.name.text())
                        .help("pass the model's config")
                        .run("--config FILE"),
                ),
            }
        }
        lowered
    }

    /// Makes the outputs, and records what they took from the source. It reports missing tensors if `judge`;
    /// after another error, they are only a consequence.
    fn outputs(
        &self,
        lowered: &[(Wanted, Vec<AtomBox>)],
        mut builder: Builder,
        judge: bool,
        composed: &mut Composed,
    ) -> Ledger {
        let source = builder.index.source;
        let may_lack = self.target.table.is_none() || !source.absent.is_empty();
        let mut unmade = 0;
        let mut cut: BTreeMap<usize, Option<Cuts>> = BTreeMap::new();
        for (want, boxes) in lowered {
            let entry = &self.table.entries[want.entry];
            let Some(shape) = self.shape(entry, &self.local) else { continue };
            let named = entry.name.format(&want.index, self.extents, self.sets, &want.choices);
            let Some(name) = named else { continue };
            let present = boxes.iter().any(|b| builder.index.has_like(b));
            // Of a parameter that the optimizer keeps nothing of there is no part: that others are lacking was found above.
            if !present && (entry.optional || may_lack) {
                continue;
            }
            let keep = (self.target.wanted)(&name);
            match builder.output(want, name.clone(), shape, boxes) {
                Ok(output) if keep => {
                    let cuts = cut
                        .entry(want.entry)
                        .or_insert_with(|| cuts::of(self.table, entry, &self.whole, &self.local));
                    composed.outputs.push(self.drafted(want, output, cuts.clone()));
                }
                Err(found) if keep => {
                    composed.lost.insert(name, self.elements(entry, &self.local));
                    unmade += 1;
                    if unmade <= MAX_MISSING {
                        let new_findings =
                            found.into_iter().filter(|f| judge || f.code != codes::MISSING_TENSOR);
                        composed.findings.extend(new_findings);
                    }
                }
                Ok(_) | Err(_) => {}
            }
        }
        if unmade > MAX_MISSING && judge {
            let more = unmade - MAX_MISSING;
            let message = format!("and {more} more tensors like these");
            composed.findings.push(Finding::new(codes::MISSING_TENSOR, message).count(more as u64));
        }
        builder.ledger
    }

    /// The shape of a rule's tensors, if the rule has one.
    fn shape(&self, entry: &Entry, of: &Local) -> Option<Vec<u64>> {
        Some(of.shape(self.table, entry)?.into_iter().map(|n| n.unwrap_or(0)).collect())
    }

    /// The number of elements of a rule's tensors, if all of their extents are known.
    fn elements(&self, entry: &Entry, of: &Local) -> Option<u64> {
        of.shape(self.table, entry)?.into_iter().try_fold(1u64, |all, extent| all.checked_mul(extent?))
    }

    fn drafted(&self, want: &Wanted, output: Output, cuts: Option<Cuts>) -> Drafted {
        let is_uncut = cuts.as_ref().is_some_and(|cuts| cuts.is_empty());
        let whole = match is_uncut {
            true => None,
            false => self.shape(&self.table.entries[want.entry], &self.whole),
        };
        let whole = whole.filter(|whole| *whole != output.shape);
        Drafted {
            coords: Arc::clone(&want.coords),
            output,
            whole: whole.map(Few::from),
            cuts,
            index: Arc::clone(&want.index),
        }
    }
}

impl Composed {
    /// True if there is no error so far.
    fn is_sound(&self, source: &Source) -> bool {
        self.findings.iter().chain(&source.resolved.findings).all(|f| f.severity != Severity::Error)
    }

    /// Accounts for everything that the source holds: tensors that no output took, and regions that should be
    /// zero.
    fn account(&mut self, source: &Source, ranks: &TargetRanks, mut ledger: Ledger) {
        // Where something is missing already, what is left over is only its echo.
        let judge = self.is_sound(source);
        let mut left_out = Vec::new();
        for (i, instance) in source.resolved.instances.iter().enumerate() {
            let stored = &source.stored[instance.tensor as usize];
            for (b, source_box) in instance.boxes.iter().enumerate() {
                let whole = volume(&source_box.lo, &source_box.hi);
                let parts = ledger.used.get(&(i as u32, b as u32));
                let taken: u64 = parts.into_iter().flatten().map(|(lo, hi)| volume(lo, hi)).sum();
                // What is left out by name has no place, as was asked.
                if taken < whole && judge && (ranks.target.wanted)(&stored.name) {
                    let is_generic = source.table.entries[instance.entry as usize].generic;
                    if is_generic && source.table.keeps(&stored.name) {
                        left_out.push(&*stored.name);
                        continue;
                    }
                    let unit = &source.units[instance.unit as usize];
                    self.findings.push(no_place(&ranks.table.name, whole - taken, &stored.name, unit));
                }
                if let Some((axis, lo, hi)) = source_box.pad {
                    self.pads.push(pad_region(instance.tensor, source_box, axis, lo, hi));
                }
            }
        }
        self.findings.extend(source.table.find_left_out(&left_out, &ranks.table.name));
        ledger.copies.sort_unstable();
        ledger.copies.dedup();
        self.copies = ledger.copies;
    }
}

/// The finding for elements of a stored tensor for which the target has no place.
fn no_place(layout: &str, elements: u64, tensor: &str, unit: &Unit) -> Finding {
    let message = format!("the target layout {layout} has no place for {elements} of its elements");
    let help = "choose the target that fits this model, leave the tensor out on purpose (--exclude), or keep all under their own names (merge)";
    let finding = Finding::new(codes::UNKNOWN_TENSOR, message).file(&unit.file).tensor(tensor).help(help);
    finding.of_rank(&unit.coords, &unit.rank)
}
