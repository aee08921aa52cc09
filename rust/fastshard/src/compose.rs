//! Meets two sides of a conversion: boxes that a target wants, boxes that a source holds.
//!
//! Both sides speak of canonical tensors, so a conversion is an intersection of boxes. Here it is
//! proven that every element of every output comes from exactly one place, and that every stored
//! tensor goes somewhere.

mod build;
mod complete;
mod index;
mod wanted;

use std::collections::{BTreeMap, BTreeSet};

use crate::codes;
use crate::error::{Finding, Severity};
use crate::layout::bind::{Known, Local};
use crate::layout::cuts::{self, Cuts};
use crate::layout::expr::{extent_in, in_set, Extents};
use crate::layout::resolve::{AtomBox, Lowering, Outside, Registry, Resolved, Stored, Unit};
use crate::layout::sets::{Positions, Sets};
use crate::layout::table::Table;
use crate::plan::{Output, PadRegion};
use crate::tensor::Dtype;

use build::{pad_region, Builder};
use complete::completeness;
pub(crate) use index::first_overlap;
use index::{volume, Index, Ledger};
use wanted::{own_names, table_names, too_many_positions, Wanted, MAX_MISSING};

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
    /// True if ranks hold chunks of the whole: boxes of it, and each once. What is no box is not divided.
    pub chunks: bool,
    /// Which outputs are wanted, by name.
    pub wanted: &'a dyn Fn(&str) -> bool,
}

/// An output before it has its place in a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Drafted {
    /// Rank per parallel dimension of the target; empty where nothing is divided.
    pub coords: BTreeMap<String, u64>,
    /// The output, as the rank holds it.
    pub output: Output,
    /// Shape of the whole tensor, where it is another.
    pub whole: Option<Vec<u64>>,
    /// How ranks cut it; `None` where they do not hold equal shares.
    pub cuts: Option<Cuts>,
}

/// Outputs and what was found on the way.
pub struct Composed {
    /// Outputs of every rank of the target.
    pub outputs: Vec<Drafted>,
    /// Regions that should be zero.
    pub pads: Vec<PadRegion>,
    /// Stored tensors that repeat another one of the same rank, from another root: (first, copy).
    pub copies: Vec<(u32, u32)>,
    /// Names of tensors that the source must hold, or the target call for, and that are not whole.
    pub lost: BTreeSet<String>,
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
    /// Names that the layout calls for and that need not be there.
    pub absent: &'a BTreeSet<String>,
}

/// The sets of the target: the source's of its names, and those that it states; put to the extents.
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

/// Composes source and target.
pub fn compose(source: &Source, target: &Target, registry: &mut Registry) -> Composed {
    let kept = target.table.and_then(|table| table.keeping(source.table.entries.iter()));
    let table = kept.as_ref().or(target.table).unwrap_or(source.table);
    let refused = |findings| Composed {
        outputs: Vec::new(),
        pads: Vec::new(),
        copies: Vec::new(),
        lost: BTreeSet::new(),
        findings,
    };
    let findings = too_many_positions(source.table, &source.resolved.extents);
    if !findings.is_empty() {
        return refused(findings);
    }
    let (mut findings, mut lost) = completeness(source);

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
    let sets = target_sets(source, target, table, &mut extents);
    let merging = target.table.is_none();
    let absurd = too_many_positions(table, &extents);
    if !absurd.is_empty() {
        findings.extend(absurd);
        return refused(findings);
    }
    let known = Known { extents: Extents::new(), degrees: target.outside.known.degrees.clone() };
    let boxed = if target.chunks { cuts::in_boxes(table, &extents, &known) } else { None };
    let table = boxed.as_ref().unwrap_or(table);
    let (local, whole) =
        (Local::new(table, &extents, &known), Local::new(table, &extents, &Known::default()));
    findings.extend(local.findings.iter().cloned());

    let wanted = if merging {
        own_names(source)
    } else {
        table_names(target, table, (&extents, &sets), &known, &mut findings)
    };

    // Where something is wrong or missing already, what is left over or lacking is only its echo.
    let judge = findings.iter().chain(&source.resolved.findings).all(|f| f.severity != Severity::Error);

    let mut lowering = Lowering::new(table, &local, &sets);
    // Registers the target's keys before ties are looked up.
    let mut lowered: Vec<(Wanted, Vec<AtomBox>)> = Vec::with_capacity(wanted.len());
    for want in wanted {
        let unit = Unit { coords: want.coords.clone(), ..Unit::default() };
        match lowering.boxes(registry, want.entry, &want.index, &unit, &extents) {
            Ok(boxes) => lowered.push((want, boxes)),
            // An axis that only it has is bound by no tensor: the source has none of its kind.
            Err(_) if table.entries[want.entry].optional => {}
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

    let registry: &Registry = registry;
    let index = Index::new(source, registry);
    let mut builder =
        Builder { index, target, table, extents: &extents, registry, ledger: Ledger::default() };
    let mut unmade = 0;
    let mut outputs = Vec::with_capacity(lowered.len());
    let mut cut: BTreeMap<usize, Option<Cuts>> = BTreeMap::new();
    for (want, boxes) in &lowered {
        let entry = &table.entries[want.entry];
        let Some(shape) = &entry.shape else { continue };
        let Some(name) = entry.name.format(&want.index, &extents, &sets, &want.choices) else { continue };
        let present = boxes.iter().any(|b| !builder.index.candidates(b).is_empty());
        // Of a parameter that the optimizer keeps nothing of there is no part: that others are lacking was found above.
        if !present && (entry.optional || merging || !source.absent.is_empty()) {
            continue;
        }
        let keep = (target.wanted)(&name);
        let extents_of = |of: &Local| -> Vec<u64> {
            let shape = shape.extents(&table.derived, of.of(&entry.class));
            shape.into_iter().map(|n| n.unwrap_or(0)).collect()
        };
        match builder.output(want, name.clone(), extents_of(&local), boxes).map_err(|found| (name, found)) {
            Ok(output) if keep => {
                let cuts = cut.entry(want.entry).or_insert_with(|| {
                    cuts::of(table, entry, whole.of(&entry.class), local.of(&entry.class))
                });
                let uncut = cuts.as_ref().is_some_and(|cuts| cuts.is_empty());
                let whole = (!uncut).then(|| extents_of(&whole)).filter(|whole| *whole != output.shape);
                outputs.push(Drafted { coords: want.coords.clone(), output, whole, cuts: cuts.clone() });
            }
            Ok(_) => {}
            Err((name, found)) if keep => {
                lost.insert(name);
                unmade += 1;
                if unmade <= MAX_MISSING {
                    findings.extend(found.into_iter().filter(|f| judge || f.code != codes::MISSING_TENSOR));
                }
            }
            Err(_) => {}
        }
    }
    if unmade > MAX_MISSING && judge {
        let more = unmade - MAX_MISSING;
        let told = format!("and {more} more tensors like these");
        findings.push(Finding::new(codes::MISSING_TENSOR, told).count(more as u64));
    }
    let mut ledger = builder.ledger;

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
            // What is left out by name has no place, as was asked.
            if taken < whole && judge_leftovers && (target.wanted)(&stored.name) {
                let unit = &source.units[instance.unit as usize];
                let mut finding = Finding::new(
                    codes::UNKNOWN_TENSOR,
                    format!("the target layout {} has no place for {} of its elements", table.name, whole - taken),
                )
                .file(&unit.file)
                .tensor(&stored.name)
                .help("choose the target that fits this model, leave the tensor out on purpose (--exclude), or keep all under their own names (merge)");
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
    Composed { outputs, pads, copies: ledger.copies, lost, findings }
}
