//! Equal contents that are intended, as far as names and the rest of the checkpoint show.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use super::contents::Contents;
use crate::engine::values::MIN_VALUES;
use crate::plan::blobs::each_blob;
use crate::plan::{Plan, StoredTensor};
use crate::standing::{each_use, mixed, Standing, Use};
use crate::words::{middles, renumbered, without_numbers};

/// More layers than any model has: all there are.
const ALL: usize = usize::MAX;

/// The reason why two contents are equal, the most harmless one last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Verdict {
    /// One was put in the place of the other.
    Copied,
    /// It can be intended: it is reported.
    Meant,
    /// It is so in every good checkpoint of the kind.
    Innocent,
}

/// Equal contents by tensor and name.
pub(super) struct Meant<'p> {
    plan: &'p Plan,
    contents: &'p Contents,
    /// Stored tensor of which others hold all -> where its contents lie in it, and which they are.
    tensors: HashMap<u32, BTreeMap<Vec<u64>, u64>>,
    /// Tensors of a name, in the plan's order.
    names: HashMap<&'p str, Vec<u32>>,
    /// Tensors of the experts of one layer.
    experts: HashMap<String, Vec<u32>>,
    /// Whether all tensors of two parts of names are equal, as far as it was asked.
    layers: RefCell<HashMap<(String, String), bool>>,
    /// Whether all experts of a layer are equal: by the first of their tensors, or by the array that holds all.
    all_experts: RefCell<HashMap<(u32, bool), bool>>,
    /// How many layers hold what the tensors of a name without its layer's number do.
    everywhere: RefCell<HashMap<String, usize>>,
}

impl<'p> Meant<'p> {
    pub(super) fn of(plan: &'p Plan, standing: &Standing, contents: &'p Contents) -> Self {
        let mut tensors: HashMap<u32, BTreeMap<Vec<u64>, u64>> = HashMap::new();
        let mut names: HashMap<&str, Vec<u32>> = HashMap::new();
        let mut experts: HashMap<String, Vec<u32>> = HashMap::new();
        for (i, stored) in plan.stored.iter().enumerate().filter(|(i, _)| standing.is_used(*i as u32)) {
            let (mut all, mut any) = (true, false);
            each_blob(stored, |blob| {
                all &= contents.shared(blob).is_some();
                any |= contents.class(blob).is_some();
            });
            if all && any {
                let digests = tensors.entry(i as u32).or_default();
                each_use(i as u32, stored, |blob, found| {
                    let content = u64::from(contents.shared(blob).unwrap_or_default());
                    digests.insert(
                        found.at,
                        mixed(content, if contents.is_empty(blob) { 0 } else { found.offset }),
                    );
                });
            }
            names.entry(&stored.name).or_default().push(i as u32);
            if plan.words.is_of_experts(&stored.name) {
                experts.entry(plan.words.of_any_expert(&stored.name)).or_default().push(i as u32);
            }
        }
        Meant {
            plan,
            contents,
            tensors,
            names,
            experts,
            layers: RefCell::default(),
            all_experts: RefCell::default(),
            everywhere: RefCell::default(),
        }
    }

    fn stored(&self, i: u32) -> &'p StoredTensor {
        &self.plan.stored[i as usize]
    }

    /// True if two tensors of one shape hold the same.
    fn same(&self, a: u32, b: u32) -> bool {
        let (x, y) = (self.stored(a), self.stored(b));
        (&x.shape, x.dtype) == (&y.shape, y.dtype)
            && self.tensors.get(&a).is_some_and(|content| self.tensors.get(&b) == Some(content))
    }

    /// The reason why two contents are equal. `alone` states whether each is in a separate file or block, so
    /// that those of one layer were not all copied at once.
    pub(super) fn verdict(&self, a: &Use, b: &Use, alone: bool) -> Verdict {
        let (t, u) = (self.stored(a.stored), self.stored(b.stored));
        let words = &self.plan.words;
        let of_experts = words.is_of_experts(&t.name) && words.is_of_experts(&u.name);
        if of_experts && self.all_experts(a.stored, b.stored) {
            return Verdict::Meant;
        }
        if a.stored == b.stored && words.is_periodic(&t.name) {
            return Verdict::Innocent;
        }
        if a.stored == b.stored || a.at != b.at || t.name == u.name {
            return Verdict::Copied;
        }
        let layers = self.everywhere(a.stored, b.stored);
        if words.are_one_buffer(&t.name, &u.name) && self.same(a.stored, b.stored) {
            return if layers > 2 { Verdict::Innocent } else { Verdict::Meant };
        }
        let of_one = words.moments(&t.name).eq(words.moments(&u.name));
        let untied = self.plan.untied || !of_one;
        let one = (!untied && words.may_be_tied(&t.name, &u.name))
            || (of_one && words.are_one_table(&t.name, &u.name));
        let whole = t.shape.len() > 1 || words.is_bias(&t.name);
        let tied = one && whole && self.same(a.stored, b.stored);
        let doubled = || alone && self.doubled(&t.name, &u.name);
        match words.of_copies(&t.name, &u.name) || tied || (alone && layers == ALL) || doubled() {
            true => Verdict::Meant,
            false => Verdict::Copied,
        }
    }

    /// The number of layers in which the tensor equals the two, whose names differ only in the layer's
    /// number; [`ALL`] if it does in all layers, three or more.
    fn everywhere(&self, a: u32, b: u32) -> usize {
        let (one, other) = (&self.stored(a).name, &self.stored(b).name);
        let position = one.split('.').zip(other.split('.')).take_while(|(x, y)| x == y).count();
        match &middles(one, other) {
            (x, y) if x.len() == 1 && y.len() == 1 && renumbered(x[0], y[0]) => {}
            _ => return 0,
        }
        let pattern = |name: &str| {
            let parts = name.split('.').enumerate().map(|(i, part)| match i == position {
                true => without_numbers(part),
                false => part.to_string(),
            });
            parts.collect::<Vec<String>>().join(".")
        };
        let wanted = pattern(one);
        let key = format!("{position}:{wanted}");
        if let Some(known) = self.everywhere.borrow().get(&key) {
            return *known;
        }
        let (mut equal, mut others) = (0, 0);
        for (name, tensors) in &self.names {
            if name.len() + 8 > wanted.len() && pattern(name) == wanted {
                match tensors.iter().all(|&i| self.same(i, a)) {
                    true => equal += 1,
                    false => others += 1,
                }
            }
        }
        let found = if others == 0 && equal > 2 { ALL } else { equal };
        self.everywhere.borrow_mut().insert(key, found);
        found
    }

    /// True if the experts of a layer, three or more, are equal: they were made from one. The modules next to
    /// them that all tokens pass may have been made from it too.
    fn all_experts(&self, a: u32, b: u32) -> bool {
        let family = |i: u32| self.experts.get(&self.plan.words.of_any_expert(&self.stored(i).name));
        let (Some(own), Some(other)) = (family(a), family(b)) else { return false };
        if !std::ptr::eq(own, other) {
            let made_of_one = |family: &[u32]| family.len() > 2 && self.all_experts(family[0], family[1]);
            return self.same(a, b) && (made_of_one(own) || made_of_one(other));
        }
        let key = (if a == b { a } else { own[0] }, a == b);
        if let Some(known) = self.all_experts.borrow().get(&key) {
            return *known;
        }
        let found = if a == b { self.all_in_one_array(a) } else { self.all_of_a_family(own) };
        self.all_experts.borrow_mut().insert(key, found);
        found
    }

    /// All experts in one array: equal along one of its dimensions.
    fn all_in_one_array(&self, array: u32) -> bool {
        let Some(contents) = self.tensors.get(&array) else { return false };
        let rank = contents.keys().map(Vec::len).min().unwrap_or(0);
        (0..rank).any(|dim| {
            let mut lines: HashMap<Vec<u64>, Vec<u64>> = HashMap::new();
            for (at, content) in contents {
                let mut line = at.clone();
                line[dim] = 0;
                lines.entry(line).or_default().push(*content);
            }
            lines.values().all(|line| line.len() > 2 && line.iter().all(|content| *content == line[0]))
        })
    }

    /// All experts in separate tensors. Ranks that divide an expert hold a part each: as many of one part as
    /// of another.
    fn all_of_a_family(&self, family: &[u32]) -> bool {
        let mut parts: HashMap<&BTreeMap<Vec<u64>, u64>, usize> = HashMap::new();
        for i in family {
            let Some(content) = self.tensors.get(i) else { return false };
            *parts.entry(content).or_default() += 1;
        }
        let each = family.len() / parts.len();
        each > 2 && parts.values().all(|n| *n == each)
    }

    /// True if all tensors of one layer, or of one part of the model, are equal to those of another: the part
    /// in which the two names differ. That takes at least two tensors for layers, whose numbers differ, and
    /// four for other parts, which no accident copies one by one.
    fn doubled(&self, a: &str, b: &str) -> bool {
        let (x, y) = middles(a, b);
        let of_layers = x.len() == 1 && y.len() == 1 && renumbered(x[0], y[0]);
        let position = a.split('.').zip(b.split('.')).take_while(|(x, y)| x == y).count();
        let at_end = position + x.len() == a.split('.').count();
        let (start, end) = match at_end {
            // One of two things that are kept of each parameter: `X.exp_avg_sq`, `X.max_exp_avg_sq`.
            true => (String::new(), [".", &x.join(".")].concat()),
            false => {
                let start: String = a.split('.').take(position).map(|part| format!("{part}.")).collect();
                (start + &x.iter().map(|part| format!("{part}.")).collect::<String>(), String::new())
            }
        };
        let key = (format!("{start}|{end}"), y.join("."));
        if let Some(known) = self.layers.borrow().get(&key) {
            return *known;
        }
        let theirs: String = a.split('.').take(position).map(|part| format!("{part}.")).collect();
        let (mut equal, mut other) = (0u64, 0u64);
        for (name, tensors) in &self.names {
            let partner = match (at_end, name.strip_prefix(start.as_str()), name.strip_suffix(end.as_str())) {
                (true, _, Some(rest)) => format!("{rest}.{}", key.1),
                (false, Some(rest), _) if y.is_empty() => format!("{theirs}{rest}"),
                (false, Some(rest), _) => format!("{theirs}{}.{rest}", key.1),
                _ => continue,
            };
            let Some(others) = self.names.get(partner.as_str()) else { continue };
            for (&a, &b) in tensors.iter().zip(others) {
                match self.same(a, b) {
                    true => equal += 1,
                    false if self.says_nothing(a) && self.says_nothing(b) => {}
                    false => other += 1,
                }
            }
        }
        let doubled = other == 0 && equal >= if of_layers { 2 } else { 4 };
        self.layers.borrow_mut().insert(key, doubled);
        doubled
    }

    /// True if a tensor is constant, or too small.
    fn says_nothing(&self, stored: u32) -> bool {
        let tensor = self.stored(stored);
        let small = crate::tensor::element_count(&tensor.shape).unwrap_or(0) < MIN_VALUES as u64;
        let mut empty = true;
        each_blob(tensor, |blob| empty &= self.contents.is_empty(blob));
        small || empty
    }
}
