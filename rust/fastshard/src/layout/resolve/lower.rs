//! Rules lowered under known extents: the boxes of canonical tensors that a stored tensor holds.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::{Registry, Unit};
use crate::layout::axis_words;
use crate::layout::bind::Local;
use crate::layout::expr::{self, Extents, Place};
use crate::layout::sets::{Positions, Sets};
use crate::layout::table::{stored_name, Entry, Table};

/// An atom of a rule with its axes in the canonical order.
#[derive(Debug, PartialEq)]
pub struct Lowered {
    /// Canonical tensor.
    pub key: u32,
    /// Index in each dimension where the atom begins.
    pub base: Vec<u64>,
    /// Place of each canonical axis; `None` for axes bound by the name.
    pub places: Vec<Option<Place>>,
    /// First and one past the last position on a canonical axis of which the atom holds a run; empty for none.
    pub runs: BTreeMap<usize, (u64, u64)>,
}

/// The part of a canonical tensor that a stored tensor holds.
#[derive(Debug, Clone)]
pub struct AtomBox {
    /// The affine map.
    pub atom: Rc<Lowered>,
    /// First position on each canonical axis.
    pub lo: Vec<u64>,
    /// One past the last real position on each canonical axis (padding excluded).
    pub hi: Vec<u64>,
    /// Padding held as well: canonical axis, first and one past the last position.
    pub pad: Option<(usize, u64, u64)>,
}

/// Atoms of one rule.
type Atoms = Rc<Vec<Rc<Lowered>>>;

/// Lowers every entry of a table once; atoms are shared by its instances.
pub(crate) struct Lowering<'t> {
    table: &'t Table,
    local: &'t Local,
    sets: &'t Sets,
    cache: HashMap<usize, Result<Atoms, String>>,
}

impl<'t> Lowering<'t> {
    pub(crate) fn new(table: &'t Table, local: &'t Local, sets: &'t Sets) -> Self {
        Lowering { table, local, sets, cache: HashMap::new() }
    }

    fn atoms(&mut self, registry: &mut Registry, entry: usize) -> Result<Atoms, String> {
        if let Some(known) = self.cache.get(&entry) {
            return known.clone();
        }
        let result = self.lower(registry, entry).map(Rc::new);
        self.cache.insert(entry, result.clone());
        result
    }

    fn lower(&self, registry: &mut Registry, index: usize) -> Result<Vec<Rc<Lowered>>, String> {
        let entry = &self.table.entries[index];
        let shape = entry.shape.as_ref().ok_or("the entry has no shape")?;
        let atoms = shape.lower(&self.table.derived, self.local.of(&entry.class))?;
        let mut out = Vec::with_capacity(atoms.len());
        for atom in atoms {
            let mut axes: Vec<String> =
                entry.name.variables().filter(|v| !v.extent).map(|v| v.axis.clone()).collect();
            axes.extend(atom.axes.iter().map(|(axis, _)| axis.clone()));
            axes.sort();
            axes.dedup();
            let places =
                axes.iter().map(|axis| atom.axes.iter().find(|(a, _)| a == axis).map(|(_, p)| *p)).collect();
            let mut of_sets = Vec::new();
            for (i, axis) in axes.iter().enumerate() {
                of_sets.extend(self.set_of(entry, &stored_name(shape, axis))?.map(|set| (i, set)));
            }
            let key = registry.key(&entry.canonical_key(&atom.tags, &atom.derived_tags), axes)?;
            let whole = Lowered { key, base: atom.base, places, runs: BTreeMap::new() };
            out.extend(in_runs(whole, &of_sets)?.into_iter().map(Rc::new));
        }
        Ok(out)
    }

    /// The set of whose positions an extent is the number. Those that a shape counts and no config tells have no place.
    fn set_of(&self, entry: &Entry, extent: &str) -> Result<Option<&'t Positions>, String> {
        let Some((axis, name)) = expr::in_set(extent) else { return Ok(None) };
        let count = self.local.of(&entry.class).get(extent).copied();
        match self.sets.get(name).filter(|set| count == Some(set.positions.len() as u64)) {
            Some(set) => Ok(Some(set)),
            None => Err(format!(
                "nothing states which {} the set {name} has",
                axis_words::noun(axis)
                    .map_or_else(|| format!("positions of axis {axis}"), |n| format!("{n}s"))
            )),
        }
    }

    /// The boxes that an instance of `entry` at `index` on `unit` holds.
    pub(crate) fn boxes(
        &mut self,
        registry: &mut Registry,
        entry: usize,
        index: &BTreeMap<String, u64>,
        unit: &Unit,
        extents: &Extents,
    ) -> Result<Vec<AtomBox>, String> {
        let atoms = self.atoms(registry, entry)?;
        let rule = &self.table.entries[entry];
        let shape = rule.shape.as_ref().ok_or("the entry has no shape")?;
        let local = self.local.of(&rule.class);
        let mut boxes = Vec::with_capacity(atoms.len());
        for atom in atoms.iter() {
            let axes = registry.axes(atom.key);
            let (mut lo, mut hi, mut pad) =
                (Vec::with_capacity(axes.len()), Vec::with_capacity(axes.len()), None);
            for (i, axis) in axes.iter().enumerate() {
                if atom.places[i].is_none() {
                    let at = *index.get(axis).ok_or_else(|| format!("no position on axis {axis}"))?;
                    lo.push(at);
                    hi.push(at + 1);
                    continue;
                }
                if let Some(&(first, end)) = atom.runs.get(&i) {
                    lo.push(first);
                    hi.push(end);
                    continue;
                }
                let stored = stored_name(shape, axis);
                let size = local[&stored];
                let divided_by = self.table.divided_by(&rule.class, &stored);
                let rank = divided_by
                    .filter(|_| !self.local.is_shared(&rule.class, &stored))
                    .map_or(0, |dimension| rank_on(unit, dimension));
                let start = rank.saturating_mul(size);
                let end = start.saturating_add(size);
                let real = extents.get(axis).copied().unwrap_or(u64::MAX);
                if stored != *axis && end > real {
                    pad = Some((i, start.max(real), end));
                }
                lo.push(start.min(real));
                hi.push(end.min(real));
            }
            boxes.push(AtomBox { atom: Rc::clone(atom), lo, hi, pad });
        }
        for (d, dim) in shape.dims.iter().enumerate() {
            let Some(share) = self.local.share_of(self.table, &rule.class, dim) else { continue };
            let Some(full) = expr::product(dim, &self.table.derived, local) else { continue };
            let len = full / share.degree;
            let first = rank_on(unit, &share.dimension).saturating_mul(len);
            boxes = boxes.iter().flat_map(|one| cut_to(one, d, first, first.saturating_add(len))).collect();
        }
        Ok(boxes)
    }
}

fn rank_on(unit: &Unit, dimension: &str) -> u64 {
    unit.coords.get(dimension).copied().unwrap_or(0)
}

/// The boxes that a box becomes in a slice of a dimension, from index `first` up to `end`.
fn cut_to(whole: &AtomBox, dim: usize, first: u64, end: u64) -> Vec<AtomBox> {
    let mut axes: Vec<(usize, u64)> = whole
        .atom
        .places
        .iter()
        .enumerate()
        .filter_map(|(i, place)| place.filter(|place| place.dim == dim).map(|place| (i, place.stride)))
        .collect();
    axes.sort_by_key(|(_, stride)| std::cmp::Reverse(*stride));
    let mut found = Vec::new();
    cut_axes(whole, &axes, whole.atom.base[dim], (dim, first, end), &mut found);
    found
}

/// Cuts a box whose first element has index `at` along its axes on a dimension, the one with the longest stride first.
fn cut_axes(
    part: &AtomBox,
    axes: &[(usize, u64)],
    at: u64,
    slice: (usize, u64, u64),
    found: &mut Vec<AtomBox>,
) {
    let (dim, first, end) = slice;
    let len = |axis: usize| part.hi[axis] - part.lo[axis];
    let span = 1 + axes.iter().map(|&(axis, stride)| len(axis).saturating_sub(1) * stride).sum::<u64>();
    if axes.iter().any(|&(axis, _)| len(axis) == 0) || at >= end || at + span <= first {
        return;
    }
    if at >= first && at + span <= end {
        let atom = Lowered {
            key: part.atom.key,
            base: part
                .atom
                .base
                .iter()
                .enumerate()
                .map(|(d, n)| if d == dim { at - first } else { *n })
                .collect(),
            places: part.atom.places.clone(),
            runs: part.atom.runs.clone(),
        };
        found.push(AtomBox { atom: Rc::new(atom), ..part.clone() });
        return;
    }
    let Some((&(axis, stride), inner)) = axes.split_first() else { return };
    let inner_span = span - (len(axis) - 1) * stride;
    // Positions that lie in the slice as a whole stay together.
    let from = first.saturating_sub(at).div_ceil(stride).min(len(axis));
    let to = (end.saturating_sub(at) + stride).saturating_sub(inner_span) / stride;
    let to = to.clamp(from, len(axis));
    let mut cut = |lo: u64, hi: u64, inner: &[(usize, u64)]| {
        let mut one = part.clone();
        (one.lo[axis], one.hi[axis]) = (part.lo[axis] + lo, part.lo[axis] + hi);
        cut_axes(&one, inner, at + lo * stride, slice, found);
    };
    (0..from).rev().take_while(|i| at + i * stride + inner_span > first).for_each(|i| cut(i, i + 1, inner));
    if from < to {
        cut(from, to, axes);
    }
    (to..len(axis)).take_while(|i| at + i * stride < end).for_each(|i| cut(i, i + 1, inner));
}

/// Most runs of positions that one atom is cut into.
const MAX_RUNS: usize = 1 << 16;

/// An atom cut where the positions of a set do not follow each other: one for each run.
fn in_runs(whole: Lowered, of_sets: &[(usize, &Positions)]) -> Result<Vec<Lowered>, String> {
    let mut all = vec![whole];
    for (axis, set) in of_sets {
        let runs = set.runs();
        if all.len().saturating_mul(runs.len()) > MAX_RUNS {
            return Err(format!("more than {MAX_RUNS} runs of positions"));
        }
        let cut = |atom: Lowered| {
            let run = |&(place, first, end): &(u64, u64, u64)| {
                let mut run = Lowered {
                    runs: atom.runs.clone(),
                    base: atom.base.clone(),
                    places: atom.places.clone(),
                    ..atom
                };
                if let Some(at) = atom.places[*axis] {
                    run.base[at.dim] += place * at.stride;
                }
                run.runs.insert(*axis, (first, end));
                run
            };
            runs.iter().map(run).collect::<Vec<_>>()
        };
        all = all.into_iter().flat_map(cut).collect();
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::bind::Known;

    /// What lies where in the tensor of a rank: canonical tensor and position by the index of an element.
    fn places(
        table: &Table,
        extents: &Extents,
        degree: u64,
        rank: u64,
    ) -> BTreeMap<Vec<u64>, (u32, Vec<u64>)> {
        let known = Known { degrees: BTreeMap::from([("tp".to_string(), degree)]), ..Known::default() };
        let local = Local::new(table, extents, &known);
        assert!(local.findings.is_empty(), "{:?}", local.findings);
        let sets = Sets::default();
        let mut lowering = Lowering::new(table, &local, &sets);
        let unit = Unit { coords: BTreeMap::from([("tp".to_string(), rank)]), ..Unit::default() };
        let boxes = lowering.boxes(&mut Registry::default(), 0, &BTreeMap::new(), &unit, extents).unwrap();
        let mut found = BTreeMap::new();
        for one in &boxes {
            let len: Vec<u64> = one.lo.iter().zip(&one.hi).map(|(lo, hi)| hi - lo).collect();
            for i in 0..len.iter().product() {
                let steps = crate::tensor::c_strides(&len);
                let within: Vec<u64> = steps.iter().zip(&len).map(|(step, n)| i / step % n).collect();
                let mut index = one.atom.base.clone();
                for (place, at) in one.atom.places.iter().zip(&within) {
                    let place = place.unwrap();
                    index[place.dim] += at * place.stride;
                }
                let position = one.lo.iter().zip(&within).map(|(lo, at)| lo + at).collect();
                assert!(found.insert(index, (one.atom.key, position)).is_none(), "an element in two boxes");
            }
        }
        let shape: Vec<u64> =
            local.shape(table, &table.entries[0]).unwrap().into_iter().map(Option::unwrap).collect();
        assert_eq!(found.len() as u64, shape.iter().product::<u64>());
        found
    }

    proptest! {
        /// Ranks that share a position hold equal slices of the full dimension, one after another.
        #[test]
        fn ranks_that_share_a_position_hold_slices(
            shape in prop::sample::select(vec![
                "[g*(q:r|k:1|v:1)*d, H]", "[H, g*r*d]", "[g*(q:r*2|k:1|v:1)*d]", "[g*r*d, 1*(a:H|b:H)]", "[(q:g*r|k:g|v:g)*d]",
            ]),
            (g, m, r, d) in (1u64..4, 2u64..4, 1u64..3, 1u64..5),
        ) {
            let name = if shape.contains('|') { "x.{}" } else { "x" };
            let text = format!(
                "layout = 't'\nfamily = 't'\n[shard]\ntp = ['g']\n[shared]\ng = 'r'\n[[tensor]]\nname = 'x'\nshape = '{}'\nas = '{name}'\n",
                shape.replace("r*2", "r*t").replace("1*(", "("),
            );
            let text = text.replace("[shard]", "[axes]\nt = 2\n[shard]");
            let table = Table::parse(&text).unwrap();
            let tp = g * m;
            let extents: Extents =
                [("g".into(), g), ("r".into(), r * m), ("d".into(), d * m), ("H".into(), 2), ("t".into(), 2)].into();
            let full = places(&table, &extents, 1, 0);
            let dim = usize::from(shape.starts_with("[H"));
            let len = (full.keys().map(|index| index[dim]).max().unwrap() + 1) / tp;
            let mut seen = 0;
            for rank in 0..tp {
                for (mut index, held) in places(&table, &extents, tp, rank) {
                    index[dim] += rank * len;
                    prop_assert_eq!(&full[&index], &held);
                    seen += 1;
                }
            }
            prop_assert_eq!(seen, full.len());
        }

        /// Each position of a set lies at its place within it, in one box, whatever its runs are.
        #[test]
        fn positions_lie_at_their_places(positions in prop::collection::btree_set(0u64..24, 0..24), first in 0usize..3) {
            let dims = ["L in s", "a", "b"];
            let shape = format!("{}, {}, {}", dims[first], dims[(first + 1) % 3], dims[(first + 2) % 3]);
            let text = format!(
                "layout = 't'\nfamily = 't'\n[sets]\ns = 'L > 0'\n[[tensor]]\nname = 'x'\nshape = '[{shape}]'\n"
            );
            let table = Table::parse(&text).unwrap();
            let positions: Vec<u64> = positions.into_iter().collect();
            let n = positions.len() as u64;
            let extents: Extents = [("a".into(), 3), ("b".into(), 2), ("L in s".into(), n), ("L".into(), 24)].into();
            let local = Local::new(&table, &extents, &Known::default());
            let sets = Sets::from([("s".to_string(), Positions { axis: "L".into(), positions: positions.clone() })]);
            let mut registry = Registry::default();
            let mut lowering = Lowering::new(&table, &local, &sets);
            let boxes = lowering.boxes(&mut registry, 0, &BTreeMap::new(), &Unit::default(), &extents).unwrap();
            let mut found = Vec::new();
            for atom_box in &boxes {
                let axis = registry.axes(atom_box.atom.key).iter().position(|axis| axis == "L").unwrap();
                let place = atom_box.atom.places[axis].unwrap();
                prop_assert_eq!(place.dim, (3 - first) % 3);
                let at = atom_box.atom.base[place.dim];
                found.extend((atom_box.lo[axis]..atom_box.hi[axis]).map(|p| (p, at + (p - atom_box.lo[axis]) * place.stride)));
            }
            let wanted: Vec<(u64, u64)> = positions.into_iter().zip(0..n).collect();
            prop_assert_eq!(found, wanted);
            // Of a set that is another one than the shape counts nothing is held.
            let other = Sets::from([("s".to_string(), Positions { axis: "L".into(), positions: vec![0; n as usize + 1] })]);
            let mut lowering = Lowering::new(&table, &local, &other);
            let refused = lowering.boxes(&mut Registry::default(), 0, &BTreeMap::new(), &Unit::default(), &extents);
            prop_assert!(refused.unwrap_err().contains("the set s"));
        }
    }
}
