//! How the ranks of parallel dimensions cut a tensor: along which of its dimensions, and in what parts.

use std::sync::Arc;

use super::bind::{Known, Local};
use super::expr::{names_in, product, Derived, Extents, Factor, MAX_ATOMS};
use super::table::{Entry, ShardMap, Table};

/// One dimension of a tensor that the ranks of a parallel dimension share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// Dimension of the tensor.
    pub dim: usize,
    /// The parallel dimension, e.g. `tp`.
    pub by: String,
    /// Extents of the parts that the whole is made of along it, in their order: each rank holds its equal share of
    /// each. One part where shares lie one after another; several where tensors are fused.
    pub parts: Vec<u64>,
}

/// Cuts of the tensors of a rule, dimension by dimension.
pub type Cuts = Arc<[Cut]>;

/// The class of rules that no rank divides. No table can name it: names of classes that it could are TOML keys.
const UNDIVIDED: &str = " undivided";

/// Runs of a product: extent of each, and whether ranks share it. `None` if an axis is unbound, or runs are shared twice
/// over or too many.
fn runs(factors: &[Factor], derived: &Derived, whole: &Extents, local: &Extents) -> Option<Vec<(u64, bool)>> {
    let mut inner = vec![(1u64, false)];
    for factor in factors.iter().rev() {
        let outer = match factor {
            Factor::Axis { name, padded } => match derived.get(name) {
                Some(made_of) => runs(made_of, derived, whole, local)?,
                None => {
                    let extent = padded.as_ref().unwrap_or(name);
                    let n = *whole.get(extent)?;
                    vec![(n, n != *local.get(extent)?)]
                }
            },
            Factor::Alternatives(all) => {
                let each: Option<Vec<_>> =
                    all.iter().map(|(_, one)| runs(one, derived, whole, local)).collect();
                each?.concat()
            }
        };
        inner = times(&merged(outer)?, &inner)?;
    }
    merged(inner)
}

/// Runs one after another, those that no rank shares as one.
fn merged(runs: Vec<(u64, bool)>) -> Option<Vec<(u64, bool)>> {
    let mut all: Vec<(u64, bool)> = Vec::with_capacity(runs.len());
    for (n, shared) in runs {
        match all.last_mut() {
            Some((last, false)) if !shared => *last = last.checked_add(n)?,
            _ => all.push((n, shared)),
        }
    }
    (all.len() <= MAX_ATOMS).then_some(all)
}

/// Runs of a product of two.
fn times(outer: &[(u64, bool)], inner: &[(u64, bool)]) -> Option<Vec<(u64, bool)>> {
    match (outer, inner) {
        (_, [(n, false)]) => outer.iter().map(|(m, shared)| Some((m.checked_mul(*n)?, *shared))).collect(),
        ([(m, false)], _) if (*m).saturating_mul(inner.len() as u64) <= MAX_ATOMS as u64 => {
            Some(inner.repeat(*m as usize))
        }
        _ => None,
    }
}

/// How ranks cut the tensors of a rule; `None` where they do not hold equal shares of parts one after another.
pub fn of(table: &Table, entry: &Entry, whole: &Local, local: &Local) -> Option<Cuts> {
    let shape = entry.shape.as_ref()?;
    let mut cuts = Vec::new();
    let shares = local;
    let (whole, local) = (whole.of(&entry.class), local.of(&entry.class));
    for (dim, factors) in shape.dims.iter().enumerate() {
        if let Some(share) = shares.share_of(table, &entry.class, factors) {
            let parts = vec![product(factors, &table.derived, whole)?];
            cuts.push(Cut { dim, by: share.dimension.clone(), parts });
            continue;
        }
        let extents = [whole, local].map(|of| product(factors, &table.derived, of));
        if extents[0]? == extents[1]? {
            continue;
        }
        let parts = runs(factors, &table.derived, whole, local)?;
        if parts.iter().any(|(_, shared)| !shared) {
            return None;
        }
        let mut names = Vec::new();
        names_in(factors, &table.derived, &mut names);
        let shared = names.iter().filter(|name| whole.get(*name) != local.get(*name));
        let mut by = shared.filter_map(|name| table.divided_by(&entry.class, name));
        let first = by.next()?;
        if by.any(|other| other != first) {
            return None;
        }
        let parts = parts.into_iter().map(|(n, _)| n).collect();
        cuts.push(Cut { dim, by: first.to_string(), parts });
    }
    Some(cuts.into())
}

/// True where what a rank holds is one box of the whole.
fn is_box(cuts: &[Cut]) -> bool {
    cuts.iter().all(|cut| cut.parts.len() == 1)
}

/// The table with rules undivided of whose tensors a rank would hold no box; `None` if there are none.
pub fn in_boxes(table: &Table, extents: &Extents, known: &Known) -> Option<Table> {
    let (whole, local) = (Local::new(table, extents, &Known::default()), Local::new(table, extents, known));
    let divides = |entry: &Entry| {
        entry.shape.is_some() && of(table, entry, &whole, &local).is_none_or(|cuts| !is_box(&cuts))
    };
    let found: Vec<usize> = (0..table.entries.len()).filter(|&i| divides(&table.entries[i])).collect();
    if found.is_empty() {
        return None;
    }
    let mut boxed = table.clone();
    boxed.shards.insert(UNDIVIDED.into(), ShardMap::new());
    found.into_iter().for_each(|i| boxed.entries[i].class = UNDIVIDED.into());
    Some(boxed)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn table(shape: &str) -> Table {
        let name = if shape.contains('|') { "x.{}" } else { "x" };
        let rule = format!("[[tensor]]\nname = 'x'\nshape = '{shape}'\nas = '{name}'\n");
        Table::parse(&format!("layout = 't'\nfamily = 't'\n[shard]\ntp = ['F', 'g']\n{rule}")).unwrap()
    }

    fn cut(shape: &str, axes: &[(&str, u64)], tp: u64) -> Option<Vec<Cut>> {
        let table = table(shape);
        let extents: Extents = axes.iter().map(|(axis, n)| (axis.to_string(), *n)).collect();
        let known = Known { extents: Extents::new(), degrees: BTreeMap::from([("tp".to_string(), tp)]) };
        let (whole, local) =
            (Local::new(&table, &extents, &Known::default()), Local::new(&table, &extents, &known));
        let entry = &table.entries[0];
        of(&table, entry, &whole, &local).map(|cuts| cuts.to_vec())
    }

    #[test]
    fn fused_tensors_are_cut_part_by_part() {
        let axes = [("F", 12), ("g", 4), ("r", 3), ("d", 5), ("H", 7), ("K", 9)];
        let tp = |shape: &str| cut(shape, &axes, 2);
        let by_tp = |dim, parts: &[u64]| Some(vec![Cut { dim, by: "tp".into(), parts: parts.to_vec() }]);
        assert_eq!(tp("[H, F]"), by_tp(1, &[12]));
        assert_eq!(tp("[g*(q:r|k:1|v:1)*d, H]"), by_tp(0, &[100]));
        assert_eq!(tp("[(q:g*r|k:g|v:g)*d, H]"), by_tp(0, &[60, 20, 20]));
        assert_eq!(tp("[r, (gate:F|up:F), H]"), by_tp(1, &[12, 12]));
        assert_eq!(tp("[H*r*F]"), by_tp(0, &[12; 21]));
        assert_eq!(tp("[H, (a:d|b:r)]"), Some(vec![]));
        assert_eq!(cut("[(gate:F|up:F), H]", &axes, 1), Some(vec![]));
        assert_eq!(tp("[(a:F|b:K), H]"), None);
    }

    proptest! {
        /// By the places of single elements: each rank's share of each part, one after another, is what it holds.
        #[test]
        fn shares_are_what_ranks_hold(
            shape in prop::sample::select(vec![
                "[F, H]", "[H, F]", "[g*r]", "[r*g]", "[(a:F|b:g)]", "[(a:F|b:F)*r, H]", "[H, r*(a:g*d|b:F|c:F)]",
            ]),
            (f, g, r, d, tp) in (1u64..4, 1u64..4, 1u64..4, 1u64..4, 1u64..4),
        ) {
            use crate::layout::resolve::{Lowering, Registry, Unit};
            let table = table(shape);
            let axes = [("F", f * tp), ("g", g * tp), ("r", r), ("d", d), ("H", 2)];
            let extents: Extents = axes.iter().map(|(axis, n)| (axis.to_string(), *n)).collect();
            let places = |degree: u64, rank: u64| {
                let known = Known { extents: Extents::new(), degrees: BTreeMap::from([("tp".to_string(), degree)]) };
                let local = Local::new(&table, &extents, &known);
                let mut registry = Registry::default();
                let sets = Default::default();
                let mut lowering = Lowering::new(&table, &local, &sets);
                let unit = Unit { coords: BTreeMap::from([("tp".to_string(), rank)]), ..Unit::default() };
                let boxes = lowering.boxes(&mut registry, 0, &BTreeMap::new(), &unit, &extents).unwrap();
                let mut found: BTreeMap<Vec<u64>, (u32, Vec<u64>)> = BTreeMap::new();
                for atom_box in &boxes {
                    let mut all = vec![atom_box.lo.clone()];
                    for axis in 0..atom_box.lo.len() {
                        all = all.into_iter().flat_map(|at| (atom_box.lo[axis]..atom_box.hi[axis]).map(move |n| {
                            let mut at = at.clone();
                            at[axis] = n;
                            at
                        })).collect();
                    }
                    for at in all {
                        let mut index = atom_box.atom.base.clone();
                        for (axis, place) in atom_box.atom.places.iter().enumerate() {
                            let place = place.unwrap();
                            index[place.dim] += (at[axis] - atom_box.lo[axis]) * place.stride;
                        }
                        found.insert(index, (atom_box.atom.key, at));
                    }
                }
                found
            };
            let whole = places(1, 0);
            let Some(cuts) = cut(shape, &axes, tp) else { panic!("cut") };
            for rank in 0..tp {
                for (index, expected) in places(tp, rank) {
                    let mut there = index.clone();
                    for cut in &cuts {
                        let (mut at, mut first) = (index[cut.dim], 0);
                        for part in &cut.parts {
                            let share = part / tp;
                            if at < share {
                                there[cut.dim] = first + rank * share + at;
                                break;
                            }
                            (at, first) = (at - share, first + part);
                        }
                    }
                    prop_assert_eq!(&whole[&there], &expected);
                }
            }
        }
    }
}
