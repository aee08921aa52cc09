//! The holders of boxes of the source, by canonical tensor.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use super::{Source, Target};
use crate::layout::resolve::{AtomBox, Instance, Lowered, Outside, Registry};
use crate::layout::table::{Table, Tied, Truth};

/// (instance, box) of a source.
pub(super) type BoxId = (u32, u32);

/// Per box of the source, the parts that are taken; ranks of the target may take the same part.
pub(super) type Used = HashMap<BoxId, BTreeSet<(Vec<u64>, Vec<u64>)>>;

pub(super) struct Index<'a> {
    pub(super) source: &'a Source<'a>,
    aliases: &'a Aliases,
    holders: HashMap<u32, Holders>,
}

/// The holders of parts of a canonical tensor, of which there is at least one.
struct Holders {
    /// Axes bound by names, as far as all holders bind the same ones.
    axes: Vec<usize>,
    /// Sorted by the positions on these axes.
    ids: Vec<BoxId>,
}

impl Holders {
    /// Adds a holder, which may bind other axes.
    fn add(&mut self, id: BoxId, bound: &[usize]) {
        let same = self.axes.iter().zip(bound).take_while(|(a, b)| a == b).count();
        self.axes.truncate(same);
        self.ids.push(id);
    }

    fn sort<'b>(&mut self, start_of: impl Fn(BoxId) -> &'b [u64]) {
        let axes = &self.axes;
        let compare = |a: &BoxId, b: &BoxId| {
            let (a, b) = (start_of(*a), start_of(*b));
            axes.iter().map(|&axis| a[axis]).cmp(axes.iter().map(|&axis| b[axis]))
        };
        self.ids.sort_by(compare);
    }
}

/// Finds those whose positions on `axes`, by which they are sorted, lie between `lo` and `hi`.
fn find_between<'b>(
    ids: &[BoxId],
    axes: &[usize],
    (lo, hi): (&[u64], &[u64]),
    start_of: &impl Fn(BoxId) -> &'b [u64],
    found: &mut Vec<BoxId>,
) {
    let [axis, others @ ..] = axes else { return found.extend(ids) };
    let mut rest = between(ids, *axis, (lo, hi), start_of);
    while let Some(first) = rest.first() {
        let at = start_of(*first)[*axis];
        let (here, after) = rest.split_at(rest.partition_point(|h| start_of(*h)[*axis] == at));
        find_between(here, others, (lo, hi), start_of, found);
        rest = after;
    }
}

/// Those whose position on the axis by which they are sorted lies between `lo` and `hi`.
fn between<'b, 'h>(
    ids: &'h [BoxId],
    axis: usize,
    (lo, hi): (&[u64], &[u64]),
    start_of: &impl Fn(BoxId) -> &'b [u64],
) -> &'h [BoxId] {
    let before = |end: u64| ids.partition_point(|h| start_of(*h)[axis] < end);
    let (first, end) = (before(lo[axis]), before(hi[axis]));
    &ids[first..end.max(first)]
}

/// The parts of the source that outputs took.
#[derive(Default)]
pub(super) struct Ledger {
    /// Parts taken per box.
    pub(super) used: Used,
    /// See [`Composed::copies`].
    pub(super) copies: Vec<(u32, u32)>,
}

/// Canonical tensors that are others by another name.
#[derive(Default)]
pub(super) struct Aliases {
    owners: HashMap<u32, u32>,
    /// Of a tensor that each position of some axes has a copy of: the places of the owner's axes among its own.
    kept_axes: HashMap<u32, Vec<usize>>,
}

impl Aliases {
    /// The ties of both sides: the source's own; and where one side has no rule for a tensor, ties by which each position
    /// of an axis holds a copy of another one.
    pub(super) fn new(source: &Source, target: &Target, registry: &Registry) -> Aliases {
        let mut aliases = Aliases::default();
        let sides = [(Some(source.table), source.outside), (target.table, &target.outside)];
        for (i, (table, outside)) in sides.iter().enumerate() {
            let Some(table) = table else { continue };
            for tied in table.tied.iter().filter(|tied| tied.when.holds(&outside.facts) == Truth::Holds) {
                let owner = find_owner(&sides, &tied.to, registry);
                let (Some(from), Some(to)) = (registry.find(&tied.tensor), owner) else { continue };
                let has_rule = table.entries.iter().any(|entry| entry.canonical == tied.tensor);
                if registry.axes(from) == registry.axes(to) {
                    if i == 0 {
                        aliases.owners.insert(from, to);
                    }
                } else if !has_rule {
                    let place = |axis: &String| registry.axes(from).iter().position(|own| own == axis);
                    if let Some(kept) = registry.axes(to).iter().map(place).collect() {
                        aliases.owners.insert(from, to);
                        aliases.kept_axes.insert(from, kept);
                    }
                }
            }
        }
        aliases
    }

    /// True if there are tensors of which each position of an axis has a copy.
    pub(super) fn has_copies(&self) -> bool {
        !self.kept_axes.is_empty()
    }

    /// A box of a tensor that is a copy of another one, on the axes of that one.
    pub(super) fn project(&self, one: &mut AtomBox) {
        let Some(kept) = self.kept_axes.get(&one.atom.key) else { return };
        let atom = &one.atom;
        one.atom = Rc::new(Lowered {
            key: atom.key,
            base: atom.base.clone(),
            places: kept.iter().map(|&axis| atom.places[axis]).collect(),
            runs: BTreeMap::new(),
        });
        let keep = |all: &[u64]| kept.iter().map(|&axis| all[axis]).collect();
        (one.lo, one.hi) = (keep(&one.lo), keep(&one.hi));
        one.pad = one.pad.and_then(|(axis, lo, hi)| Some((kept.iter().position(|&k| k == axis)?, lo, hi)));
    }

    fn key(&self, key: u32) -> u32 {
        let mut key = key;
        // A head that is the embedding has copies, too.
        for _ in 0..=self.owners.len() {
            match self.owners.get(&key) {
                Some(&owner) => key = owner,
                None => break,
            }
        }
        key
    }
}

/// The canonical tensor that stands for another one: itself, or the one that it is tied to where no side stores it, as a
/// head that is the embedding.
fn find_owner(sides: &[(Option<&Table>, &Outside)], name: &str, registry: &Registry) -> Option<u32> {
    let tied_to = || {
        sides.iter().find_map(|(table, outside)| {
            let holds = |tied: &&Tied| tied.tensor == name && tied.when.holds(&outside.facts) == Truth::Holds;
            table.and_then(|table| table.tied.iter().find(holds)).map(|tied| &tied.to)
        })
    };
    registry.find(name).or_else(|| registry.find(tied_to()?))
}

impl<'a> Index<'a> {
    pub(super) fn new(source: &'a Source<'a>, aliases: &'a Aliases) -> Index<'a> {
        let mut index = Index { source, aliases, holders: HashMap::new() };
        let mut holders: HashMap<u32, Holders> = HashMap::new();
        for (i, instance) in source.resolved.instances.iter().enumerate() {
            for (b, atom_box) in instance.boxes.iter().enumerate() {
                let places = atom_box.atom.places.iter().enumerate();
                let bound: Vec<usize> = places.filter(|(_, at)| at.is_none()).map(|(axis, _)| axis).collect();
                let new = || Holders { axes: bound.clone(), ids: Vec::new() };
                holders
                    .entry(index.key(atom_box.atom.key))
                    .or_insert_with(new)
                    .add((i as u32, b as u32), &bound);
            }
        }
        holders.values_mut().for_each(|all| all.sort(|id| index.start_of(id)));
        index.holders = holders;
        index
    }

    pub(super) fn key(&self, key: u32) -> u32 {
        self.aliases.key(key)
    }

    pub(super) fn get(&self, id: BoxId) -> (&'a Instance, &'a AtomBox) {
        let instance = &self.source.resolved.instances[id.0 as usize];
        (instance, &instance.boxes[id.1 as usize])
    }

    /// The start of a box on each canonical axis.
    fn start_of(&self, id: BoxId) -> &'a [u64] {
        &self.get(id).1.lo
    }

    /// A holder of a part of the wanted canonical tensor.
    pub(super) fn any(&self, wanted: &AtomBox) -> Option<BoxId> {
        self.holders.get(&self.key(wanted.atom.key))?.ids.first().copied()
    }

    /// True if there is a holder of a part of the wanted canonical tensor, in the same layer if names have
    /// layers.
    pub(super) fn has_like(&self, wanted: &AtomBox) -> bool {
        self.holders.get(&self.key(wanted.atom.key)).is_some_and(|all| match all.axes.first() {
            None => true,
            Some(&axis) => {
                let range = (&wanted.lo[..], &wanted.hi[..]);
                !between(&all.ids, axis, range, &|id| self.start_of(id)).is_empty()
            }
        })
    }

    /// Everything that may overlap the box.
    pub(super) fn candidates(&self, wanted: &AtomBox) -> Vec<BoxId> {
        let mut found = Vec::new();
        if let Some(all) = self.holders.get(&self.key(wanted.atom.key)) {
            let range = (&wanted.lo[..], &wanted.hi[..]);
            find_between(&all.ids, &all.axes, range, &|id| self.start_of(id), &mut found);
        }
        found
    }
}

pub(super) fn volume(lo: &[u64], hi: &[u64]) -> u64 {
    lo.iter().zip(hi).map(|(l, h)| h.saturating_sub(*l)).product()
}

pub(super) fn intersect(a: &AtomBox, b: &AtomBox) -> Option<(Vec<u64>, Vec<u64>)> {
    let lo: Vec<u64> = a.lo.iter().zip(&b.lo).map(|(x, y)| *x.max(y)).collect();
    let hi: Vec<u64> = a.hi.iter().zip(&b.hi).map(|(x, y)| *x.min(y)).collect();
    lo.iter().zip(&hi).all(|(l, h)| l < h).then_some((lo, hi))
}

/// The first pair of boxes that share an element, by a sweep along the axis with most distinct starts.
pub(crate) fn first_overlap(boxes: &[(Vec<u64>, Vec<u64>)]) -> Option<(usize, usize)> {
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

/// The first piece of each rule and rank, and the others with the one they repeat.
pub(super) fn one_per_rank(source: &Source, ids: &[BoxId]) -> (Vec<BoxId>, Vec<(BoxId, BoxId)>) {
    let mut first: HashMap<_, BoxId> = HashMap::new();
    let (mut kept, mut again) = (Vec::new(), Vec::new());
    for &h in ids {
        let instance = &source.resolved.instances[h.0 as usize];
        let key = (instance.entry, &instance.index, &source.units[instance.unit as usize].coords);
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RANK: usize = 3;

    fn range() -> impl Strategy<Value = (u64, u64)> {
        (0u64..5, 0u64..4).prop_map(|(lo, n)| (lo, lo + n))
    }

    proptest! {
        /// Against a look at each of them: what is found is what lies between on the axes that all bind.
        #[test]
        fn what_may_overlap_is_found(
            boxes in prop::collection::vec((prop::collection::vec(range(), RANK), 0usize..8), 1..40),
            bound in 0usize..8,
            wanted in prop::collection::vec(range(), RANK),
        ) {
            let axes_of = |bits: usize| (0..RANK).filter(|axis| bits >> axis & 1 == 1).collect::<Vec<_>>();
            let starts: Vec<Vec<u64>> =
                boxes.iter().map(|(ranges, _)| ranges.iter().map(|range| range.0).collect()).collect();
            let start_of = |id: BoxId| &starts[id.0 as usize][..];
            let mut all = Holders { axes: axes_of(bound), ids: Vec::new() };
            // Most bind the same ones.
            for (i, (_, bits)) in (0u32..).zip(&boxes) {
                all.add((i, 0), &axes_of(bound | (bits & bits >> 1)));
            }
            all.sort(start_of);
            let (lo, hi): (Vec<u64>, Vec<u64>) = wanted.iter().copied().unzip();
            let mut found = Vec::new();
            find_between(&all.ids, &all.axes, (&lo, &hi), &start_of, &mut found);
            found.sort_unstable();
            let inside = |start: &[u64]| all.axes.iter().all(|&axis| (lo[axis]..hi[axis]).contains(&start[axis]));
            let naive: Vec<BoxId> =
                (0..boxes.len() as u32).map(|i| (i, 0)).filter(|id| inside(start_of(*id))).collect();
            prop_assert_eq!(found, naive);
        }
    }

    #[test]
    fn axes_are_those_that_all_bind_in_order() {
        let mut all = Holders { axes: vec![0, 1, 2], ids: Vec::new() };
        all.add((0, 0), &[0, 1, 2]);
        all.add((1, 0), &[0, 2]);
        assert_eq!(all.axes, [0]);
        all.add((2, 0), &[1]);
        assert!(all.axes.is_empty());
    }
}
