//! Who holds what: boxes of the source by canonical tensor.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::Source;
use crate::layout::resolve::{AtomBox, Instance, Registry};
use crate::layout::table::Truth;

/// (instance, box) of a source.
pub(super) type Held = (u32, u32);

/// Per box of the source, which parts of it are taken; ranks of the target may take the same one.
pub(super) type Used = HashMap<Held, BTreeSet<(Vec<u64>, Vec<u64>)>>;

pub(super) struct Index<'a> {
    pub(super) source: &'a Source<'a>,
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
pub(super) struct Ledger {
    /// Parts taken per box.
    pub(super) used: Used,
    /// See [`Composed::copies`].
    pub(super) copies: Vec<(u32, u32)>,
}

pub(super) const WHOLE: u64 = u64::MAX;

impl<'a> Index<'a> {
    pub(super) fn new(source: &'a Source<'a>, registry: &Registry) -> Index<'a> {
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

    pub(super) fn key(&self, key: u32) -> u32 {
        self.alias.get(&key).copied().unwrap_or(key)
    }

    pub(super) fn get(&self, held: Held) -> (&'a Instance, &'a AtomBox) {
        let instance = &self.source.resolved.instances[held.0 as usize];
        (instance, &instance.boxes[held.1 as usize])
    }

    /// Something that holds a part of the wanted canonical tensor.
    pub(super) fn any(&self, wanted: &AtomBox) -> Option<Held> {
        self.first.get(&self.key(wanted.atom.key)).copied()
    }

    /// Everything that may overlap the box.
    pub(super) fn candidates(&self, wanted: &AtomBox) -> Vec<Held> {
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
pub(super) fn one_per_rank(source: &Source, held: &[Held]) -> (Vec<Held>, Vec<(Held, Held)>) {
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
