//! Builds one output: which pieces make it, and the proof that each element comes from one place.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::index::{first_overlap, intersect, one_per_rank, volume, BoxId, Index, Ledger};
use super::wanted::Wanted;
use super::{Replicas, Source, Target};
use crate::codes;
use crate::error::{Finding, Ranks, Result};
use crate::layout::expr::Extents;
use crate::layout::resolve::{AtomBox, Instance, Placement, Registry};
use crate::layout::table::{Entry, Table};
use crate::plan::{Combine, Fill, Op, Output, PadRegion, Part, PartAxis};
use crate::tensor::{c_strides, Dtype};

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

/// Builds outputs one after another, and records the parts that they take.
pub(super) struct Builder<'a> {
    pub(super) index: Index<'a>,
    pub(super) target: &'a Target<'a>,
    /// The target's table (the source's own when merging).
    pub(super) table: &'a Table,
    /// The target's extents.
    pub(super) extents: &'a Extents,
    pub(super) registry: &'a Registry,
    pub(super) ledger: Ledger,
}

/// An output under construction.
struct Making<'b> {
    name: &'b str,
    entry: &'b Entry,
    shape: &'b [u64],
    parts: Vec<Part>,
    /// dtype, and the first stored tensor that has it
    dtype: Option<(Dtype, String)>,
    findings: Vec<Finding>,
}

impl<'a> Builder<'a> {
    /// The output that `want` requires, made from the source's boxes.
    pub(super) fn output(
        &mut self,
        want: &Wanted,
        name: String,
        shape: Vec<u64>,
        boxes: &[AtomBox],
    ) -> std::result::Result<Output, Vec<Finding>> {
        let entry = &self.table.entries[want.entry];
        let mut making = Making {
            name: &name,
            entry,
            shape: &shape,
            parts: Vec::new(),
            dtype: None,
            findings: Vec::new(),
        };
        for part in boxes {
            self.cover(part, &mut making);
        }
        let Making { mut parts, dtype, findings, .. } = making;
        if !findings.is_empty() {
            return Err(findings);
        }
        parts.sort_by_key(|p| p.dst_base);
        let stored = dtype.map_or(Dtype::F32, |(d, _)| d);
        let cast = self.target.dtype.filter(|_| stored.is_float() && !self.target.keep.has(&name, entry));
        let dtype = cast.unwrap_or(stored);
        let mut fill = if boxes.iter().any(|b| b.pad.is_some()) { Fill::Zero } else { Fill::None };
        // The inverse of a sum: the value on rank 0, the neutral term elsewhere.
        if let Some(dimension) = &entry.partial {
            if want.coords.get(dimension).is_some_and(|r| *r > 0) {
                parts.clear();
                fill = Fill::NegativeZero;
            }
        }
        Ok(Output {
            name: name.into(),
            dtype,
            shape: shape.into(),
            parts: parts.into(),
            fill,
            file: 0,
            offset: 0,
            key: None,
        })
    }

    /// Finds what covers one wanted box, each element once.
    fn cover(&mut self, want: &AtomBox, making: &mut Making) {
        let source = self.index.source;
        let needed = volume(&want.lo, &want.hi);
        if needed == 0 {
            // A rank that holds only padding, or a tensor without elements, has its dtype all the same.
            if let (None, Some(id)) = (&making.dtype, self.index.any(want)) {
                let tensor = &source.stored[self.index.get(id).0.tensor as usize];
                making.dtype = Some((tensor.dtype, tensor.name.to_string()));
            }
            return;
        }
        // Copies of one box are replicas (or terms of a sum).
        let mut groups: BTreeMap<(Vec<u64>, Vec<u64>), Vec<BoxId>> = BTreeMap::new();
        for id in self.index.candidates(want) {
            if let Some(both) = intersect(want, self.index.get(id).1) {
                groups.entry(both).or_default().push(id);
            }
        }
        let covered: u64 = groups.keys().map(|(lo, hi)| volume(lo, hi)).sum();
        let all: Vec<_> = groups.keys().cloned().collect();
        if let Some((i, j)) = first_overlap(&all) {
            let first = |k: usize| self.index.get(groups[&all[k]][0]).0;
            making.findings.push(twice(source, making.name, first(i), first(j)));
        } else if covered < needed {
            let lacking = needed - covered;
            let key = self.registry.name(want.atom.key);
            making.findings.push(
                Finding::new(codes::MISSING_TENSOR, format!("{lacking} of {needed} elements come from no file"))
                    .tensor(making.name)
                    .expected(format!("the source's {key}"), if covered == 0 { "nothing" } else { "a part of it" })
                    .help("copy the missing file, or choose a target for the model's family; the layout of the target needs this tensor"),
            );
        } else {
            for (range, ids) in groups {
                match self.part(want, range, ids, making) {
                    Ok(part) => making.parts.push(part),
                    Err(error) => making.findings.extend(error.into_findings()),
                }
            }
        }
    }

    /// One part, from the pieces that hold the box `lo..hi`.
    fn part(
        &mut self,
        want: &AtomBox,
        (lo, hi): (Vec<u64>, Vec<u64>),
        mut ids: Vec<BoxId>,
        making: &mut Making,
    ) -> Result<Part> {
        let source = self.index.source;
        ids.sort_by_key(|&h| {
            let (instance, _) = self.index.get(h);
            (source.units[instance.unit as usize].coords.clone(), instance.tensor)
        });
        let taken = ids.clone();
        let ids = self.replicas(ids, making.name)?;
        let (first, first_box) = self.index.get(ids[0]);
        let tensor = &source.stored[first.tensor as usize];
        let file = &source.units[first.unit as usize].file;
        for h in taken {
            self.ledger.used.entry(h).or_default().insert((lo.clone(), hi.clone()));
        }
        for &h in &ids {
            self.same_dtype(h, making);
        }
        if let Placement::Sum(dimension) | Placement::SumOrCopy(dimension, _) = &first.placement {
            self.every_term(&ids, dimension, making.name)?;
        }
        if let Placement::Sum(dimension) = &first.placement {
            self.one_term_per_rank(&ids, dimension)?;
        }
        // Tied tensors are copies by declaration; only ranks drift.
        let ranks = ids.iter().all(|&h| self.index.get(h).0.entry == first.entry);
        let combine = match &first.placement {
            Placement::Sum(_) => Combine::Sum,
            Placement::SumOrCopy(_, fact) => Combine::Zero(fact.as_str().into()),
            Placement::Parts if ids.len() > 1 && ranks && self.target.replicas == Replicas::Mean => {
                Combine::Mean
            }
            Placement::Parts => Combine::Equal,
        };
        let rule = &source.table.entries[first.entry as usize];
        let ops =
            value_ops(source.table, rule, &source.resolved.extents, self.table, making.entry, self.extents);
        if !ops.is_empty() && !tensor.dtype.is_float() {
            return Err(Finding::new(
                codes::UNSUPPORTED,
                "values that the layouts scale or add to must be floats",
            )
            .file(file)
            .tensor(&tensor.name)
            .expected("F16, BF16, F32 or F64", tensor.dtype)
            .help("describe it without scale and add; the tensor is quantised or of another model")
            .into());
        }
        let (axes, dst_base, src_base) = make_part(making.shape, want, first_box, &lo, &hi);
        let sources = ids.iter().map(|&h| self.index.get(h).0.tensor).collect();
        Ok(Part { axes: axes.into(), dst_base, src_base: src_base.into(), sources, combine, ops: ops.into() })
    }

    /// The pieces of one box that are replicas of each other, one per rank.
    fn replicas(&mut self, ids: Vec<BoxId>, name: &str) -> Result<Vec<BoxId>> {
        let source = self.index.source;
        let (first, first_box) = self.index.get(ids[0]);
        // Two rules that fill one canonical tensor: a norm applied twice, or a stale copy.
        for &h in &ids {
            let (other, other_box) = self.index.get(h);
            if other.entry != first.entry && other_box.atom.key == first_box.atom.key {
                return Err(twice(source, name, first, other).into());
            }
        }
        // One piece per rank: the same rank's piece from another root is a copy, to be compared and
        // not to be added; from the same root it is a mistake.
        let (kept, again) = one_per_rank(source, &ids);
        for &(a, b) in &again {
            let (a, b) = (self.index.get(a).0, self.index.get(b).0);
            if source.units[a.unit as usize].root == source.units[b.unit as usize].root {
                return Err(twice(source, name, a, b).into());
            }
            self.ledger.copies.push((a.tensor, b.tensor));
        }
        // A part reads all its sources one way; a tied copy stored in another layout cannot be compared.
        for &h in &kept {
            let (other, other_box) = self.index.get(h);
            let alike = Rc::ptr_eq(&other_box.atom, &first_box.atom)
                || (other_box.atom.base == first_box.atom.base
                    && other_box.atom.places == first_box.atom.places);
            if !alike {
                return Err(twice(source, name, first, other).into());
            }
        }
        Ok(kept)
    }

    fn same_dtype(&self, id: BoxId, making: &mut Making) {
        let source = self.index.source;
        let tensor = &source.stored[self.index.get(id).0.tensor as usize];
        match &making.dtype {
            None => making.dtype = Some((tensor.dtype, source.units[tensor.unit as usize].file.clone())),
            Some((known, witness)) if *known != tensor.dtype => making.findings.push(
                Finding::new(codes::DTYPE, "this shard has another dtype than the shards before it")
                    .file(&source.units[tensor.unit as usize].file)
                    .tensor(&tensor.name)
                    .expected(format!("{known}, as in {witness}"), tensor.dtype)
                    .help("copy the file of this rank again: it is from another run"),
            ),
            Some(_) => {}
        }
    }

    /// Checks that all ranks hold their terms: a sum without the term of one rank is another tensor.
    fn every_term(&self, ids: &[BoxId], dimension: &str, name: &str) -> Result<()> {
        let source = self.index.source;
        let rank = |h: &BoxId| {
            let unit = &source.units[self.index.get(*h).0.unit as usize];
            unit.coords.get(dimension).copied().unwrap_or(0)
        };
        let there: BTreeSet<u64> = ids.iter().map(rank).collect();
        let degree = source.outside.known.degree(dimension);
        let Some(absent) = (0..degree).find(|rank| !there.contains(rank)) else { return Ok(()) };
        let finding = Finding::new(
            codes::MISSING_TENSOR,
            format!("a term of the sum over {dimension} comes from no file"),
        )
        .tensor(name)
        .expected(format!("{degree} terms"), there.len())
        .help("copy the file of this rank from the node that wrote it")
        .ranks(Ranks::one([(dimension, absent)]));
        Err(finding.into())
    }

    /// Terms of a sum are floats, and one per rank of the dimension summed over.
    fn one_term_per_rank(&self, ids: &[BoxId], dimension: &str) -> Result<()> {
        let source = self.index.source;
        let unit = |h: BoxId| &source.units[self.index.get(h).0.unit as usize];
        let first = &source.stored[self.index.get(ids[0]).0.tensor as usize];
        let mut ranks: Vec<_> = ids.iter().map(|&h| unit(h).coords.get(dimension)).collect();
        ranks.sort();
        ranks.dedup();
        if first.dtype.is_float() && ranks.len() == ids.len() {
            return Ok(());
        }
        let what = format!("a sum over {dimension} of integers, or with copies over another dimension");
        Err(Finding::new(codes::UNSUPPORTED, what)
            .file(&unit(ids[0]).file)
            .tensor(&first.name)
            .help("correct the rule in your layout: each rank's term would count more than once")
            .into())
    }
}

fn twice(source: &Source, name: &str, a: &Instance, b: &Instance) -> Finding {
    let (x, y) = (&source.stored[a.tensor as usize], &source.stored[b.tensor as usize]);
    let file = |instance: &Instance| source.units[instance.unit as usize].file.as_str();
    let from = |stored: &str, instance| match stored == name {
        true => file(instance).to_string(),
        false => format!("{stored} in {}", file(instance)),
    };
    let (one, two) = (from(&x.name, a), from(&y.name, b));
    Finding::new(codes::OVERLAP, "two stored tensors hold it")
        .file(file(b))
        .tensor(name)
        .expected(format!("one, as in {one}"), format!("{two} too"))
        .help("mark the stale one `ignore` in a layout, with a reason; it would be applied twice")
}

pub(super) fn pad_region(stored: u32, source_box: &AtomBox, pad_axis: usize, lo: u64, hi: u64) -> PadRegion {
    let mut src_base = source_box.atom.base.clone();
    let mut axes = Vec::new();
    for (k, place) in source_box.atom.places.iter().enumerate() {
        let Some(place) = place else { continue };
        // A rank that holds only padding has lo == hi == the real extent: its own start is then `lo`.
        let n = if k == pad_axis {
            let first = if source_box.lo[k] < source_box.hi[k] { lo - source_box.lo[k] } else { 0 };
            src_base[place.dim] += first * place.stride;
            hi - lo
        } else {
            source_box.hi[k] - source_box.lo[k]
        };
        axes.push(PartAxis { n, dst: 0, dim: place.dim as u32, step: place.stride });
    }
    PadRegion { stored, axes: axes.into(), src_base: src_base.into() }
}
