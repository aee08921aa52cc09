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
                let rank = match self.table.divided_by(&rule.class, &stored) {
                    Some(dimension) => unit.coords.get(dimension).copied().unwrap_or(0),
                    None => 0,
                };
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
        Ok(boxes)
    }
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

    proptest! {
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
