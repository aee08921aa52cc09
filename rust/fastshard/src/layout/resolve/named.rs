//! Which rule a tensor's name has.

use std::collections::{BTreeMap, HashMap};

use super::super::names::{Match, Membership};
use super::super::table::{Entry, Table, Truth};
use super::{Outside, Placement};

/// What the rules say of a name.
pub(super) enum Matched {
    Rule {
        entry: usize,
        found: Match,
        placement: Placement,
    },
    /// A rule leaves it out, for this reason.
    Ignored(String),
    Nothing,
    /// It depends on this fact or set, which is not known.
    Undecided(String),
    /// A rule names it, but not at this position.
    Outside {
        entry: usize,
        set: String,
        axis: String,
        at: u64,
    },
}

/// The rules of a table by what their names are.
pub(super) struct Names {
    /// Rules for single tensors that no table's author wrote: by name.
    pub(super) generic: HashMap<String, usize>,
    /// Rules whose names stand for themselves alone: by name, several under different facts.
    literal: HashMap<String, Vec<usize>>,
    /// All others.
    patterns: Vec<usize>,
}

impl Names {
    pub(super) fn of(table: &Table) -> Names {
        let mut names = Names { generic: HashMap::new(), literal: HashMap::new(), patterns: Vec::new() };
        for (i, entry) in table.entries.iter().enumerate() {
            let name = || entry.name.text().to_string();
            if entry.generic {
                names.generic.insert(name(), i);
            } else if entry.name.is_literal() {
                names.literal.entry(name()).or_default().push(i);
            } else {
                names.patterns.push(i);
            }
        }
        names
    }

    /// Rules that may name a tensor, in the table's order.
    fn candidates(&self, name: &str) -> Vec<usize> {
        let mut found = self.literal.get(name).cloned().unwrap_or_default();
        found.extend(&self.patterns);
        found.sort_unstable();
        found
    }
}

/// A rule that a name may have, with the fact that decides whether it holds, where that is not known.
type Candidate = (usize, Match, Option<String>);

/// The rule of a tensor called `name`, in a unit with these bases.
pub(super) fn match_name(
    table: &Table,
    names: &Names,
    name: &str,
    bases: &BTreeMap<String, u64>,
    outside: &Outside,
) -> Matched {
    if let Some(&entry) = names.generic.get(name) {
        return Matched::Rule { entry, found: Match::default(), placement: Placement::Parts };
    }
    let mut candidates: Vec<Candidate> = Vec::new();
    let (mut beyond, mut unknown_set) = (Matched::Nothing, None);
    for (i, entry) in names.candidates(name).into_iter().map(|i| (i, &table.entries[i])) {
        let Some(mut found) = entry.name.matches(name, bases) else { continue };
        let truth = entry.when.holds(&outside.facts);
        if truth == Truth::Fails {
            continue;
        }
        match entry.name.place(&mut found, bases, &outside.sets) {
            Membership::Inside => {}
            Membership::Outside(set, axis, at) => {
                beyond = Matched::Outside { entry: i, set: set.into(), axis: axis.into(), at };
                continue;
            }
            // A place within a set that is not known is no position.
            Membership::Unknown(set) if entry.name.variables().any(|v| v.ordinal) => {
                return Matched::Undecided(set.into())
            }
            Membership::Unknown(set) => unknown_set = Some(set.to_string()),
        }
        match truth {
            Truth::Unknown(fact) => candidates.push((i, found, Some(fact))),
            _ => candidates.push((i, found, None)),
        }
    }
    if candidates.len() > 1 {
        if let Some(undecided) =
            unknown_set.map(Matched::Undecided).or_else(|| by_fact(table, &candidates, outside))
        {
            return undecided;
        }
    }
    let Some((entry, found, _)) = candidates.into_iter().next() else { return beyond };
    let rule = &table.entries[entry];
    if let Some(reason) = &rule.ignore {
        return Matched::Ignored(reason.clone());
    }
    let placement = match &rule.partial {
        Some(dimension) if outside.known.degree(dimension) > 1 => Placement::Sum(dimension.clone()),
        _ => Placement::Parts,
    };
    Matched::Rule { entry, found, placement }
}

/// What is said where a fact that is not known decides between several rules; nothing if none does. Rules that differ in
/// whether ranks hold terms of a sum need no decision yet: values that are all zero are the same either way.
fn by_fact(table: &Table, candidates: &[Candidate], outside: &Outside) -> Option<Matched> {
    let fact = candidates.iter().find_map(|(_, _, fact)| fact.clone())?;
    let (entry, found, _) = &candidates[0];
    let first = &table.entries[*entry];
    let is_alike = |other: &Entry| {
        other.shape == first.shape && other.canonical == first.canonical && other.ignore.is_none()
    };
    let rules = || candidates.iter().map(|(i, _, _)| &table.entries[*i]);
    let partial = rules().find_map(|rule| rule.partial.clone()).filter(|_| rules().all(is_alike));
    let Some(dimension) = partial else { return Some(Matched::Undecided(fact)) };
    let placement = match outside.known.degree(&dimension) > 1 {
        true => Placement::SumOrCopy(dimension, fact),
        false => Placement::Parts,
    };
    Some(Matched::Rule { entry: *entry, found: found.clone(), placement })
}
