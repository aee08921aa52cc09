//! What a model's own config says of a table's axes, facts and sets: small expressions over its keys.

mod describe;
mod eval;
mod parse;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;

use super::expr::Extents;
use parse::MAX_DEPTH;

pub use describe::Described;
pub use parse::Expression;

/// Deepest evaluation, what an expression refers to included.
const MAX_HEIGHT: usize = 512;

/// A set of positions as a table declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetRule {
    /// The axis.
    pub axis: String,
    /// True at a position of the set.
    pub holds: Expression,
    /// True if a checkpoint may lack all of its positions.
    pub optional: bool,
}

/// What a table says of configs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// The `model_type`s that the table is for.
    pub model_types: Vec<String>,
    /// True of those configs of them that it is for; of all if there is none.
    pub when: Option<Expression>,
    /// What keys stand for that a config leaves out, by its `model_type`.
    pub defaults: BTreeMap<String, BTreeMap<String, Json>>,
    /// Objects of the config in which keys are sought first, as paths with dots.
    pub within: Vec<String>,
    /// Keys that the config itself states, and none of these objects.
    pub outside: Vec<String>,
    /// Extents of axes.
    pub axes: BTreeMap<String, Expression>,
    /// Facts.
    pub facts: BTreeMap<String, Expression>,
    /// Sets of positions.
    pub sets: BTreeMap<String, SetRule>,
    /// Axes of which every model has at least one position.
    pub positive: BTreeSet<String>,
    /// True if the table has a `[config]`, or one that it extends has.
    pub is_declared: bool,
}

/// What may refer to what.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Axis,
    Fact,
    Set,
}

impl Config {
    /// The axis that a set's expression is about, where that is not stated. `others` are declared with it: their
    /// axes where these are stated, and their expressions.
    ///
    /// # Errors
    /// Says what is wrong if it is about none or about several.
    pub(super) fn axis_of(
        &self,
        holds: &Expression,
        others: &BTreeMap<String, (Option<String>, Expression)>,
        axes: &BTreeSet<String>,
    ) -> Result<String, String> {
        let mut found = BTreeSet::new();
        let mut looked = BTreeSet::new();
        let mut open = vec![holds];
        while let Some(expression) = open.pop() {
            for name in expression.names() {
                if axes.contains(name) {
                    found.insert(name.to_string());
                } else if let Some(set) = self.sets.get(name) {
                    found.insert(set.axis.clone());
                } else if let Some((axis, other)) = others.get(name).filter(|_| looked.insert(name)) {
                    match axis {
                        Some(axis) => _ = found.insert(axis.clone()),
                        None => open.push(other),
                    }
                }
            }
        }
        let all: Vec<String> = found.into_iter().collect();
        match &all[..] {
            [axis] => Ok(axis.clone()),
            [] => Err("it speaks of no axis: say `axis = \"L\"`".into()),
            _ => Err(format!(
                "it speaks of the axes {}: say which one's positions it is of (axis)",
                all.join(", ")
            )),
        }
    }

    /// Says what is wrong with the expressions. `axes` are those of the rules, `fixed` those of stated extent.
    pub(super) fn check(&self, axes: &BTreeSet<String>, fixed: &Extents) -> Result<(), String> {
        for name in self.facts.keys().chain(self.sets.keys()) {
            let axis = axes.contains(name) || self.axes.contains_key(name);
            if axis || (self.facts.contains_key(name) && self.sets.contains_key(name)) {
                return Err(format!("{name} is two of axis, fact and set"));
            }
        }
        let mut heights = BTreeMap::new();
        let all = self.axes.iter().map(|(name, e)| (Place::Axis, name, e, None));
        let all = all.chain(self.facts.iter().map(|(name, e)| (Place::Fact, name, e, None)));
        let all = all.chain(self.sets.iter().map(|(name, s)| (Place::Set, name, &s.holds, Some(&*s.axis))));
        for (place, name, expression, position) in all {
            let (kind, text) = (place.word(), expression.text());
            let fail = |e: String| format!("{kind} {name} = {text:?}: {e}");
            if place != Place::Fact && self.asks_stored(expression, &mut BTreeSet::from([name.as_str()])) {
                return Err(fail("stored() is for facts: what is stored decides no size".into()));
            }
            let others = |used: &&str| Some(*used) != position && used != name;
            for used in expression.names().into_iter().filter(others) {
                let known = self.axes.contains_key(used) || fixed.contains_key(used);
                if axes.contains(used) && !known {
                    return Err(fail(format!("no config states axis {used}")));
                }
                match self.sets.get(used) {
                    Some(_) if place != Place::Set => {
                        return Err(fail(format!("{used} is a set, which only sets are made of")))
                    }
                    Some(set) if Some(&*set.axis) != position => {
                        return Err(fail(format!("{used} is a set of positions on {}", set.axis)))
                    }
                    _ => {}
                }
            }
            self.height(name, &mut Vec::new(), &mut heights).map_err(fail)?;
        }
        Ok(())
    }

    /// Says what is wrong with an expression that is none of an axis, a fact or a set, and `decides` something.
    pub(super) fn check_other(&self, other: &Expression, decides: &str) -> Result<(), String> {
        if self.asks_stored(other, &mut BTreeSet::new()) {
            return Err(format!("stored() is for facts: what is stored decides no {decides}"));
        }
        match other.names().into_iter().find(|name| self.sets.contains_key(*name)) {
            Some(set) => Err(format!("{set} is a set, which only sets are made of")),
            None => Ok(()),
        }
    }

    /// Leaves out the axes and facts that are not among `used`, nor what any of these is made of.
    pub(super) fn keep(&mut self, used: BTreeSet<String>) {
        let mut open: Vec<String> = used.into_iter().collect();
        let others = self.sets.values().map(|set| &set.holds).chain(&self.when);
        open.extend(others.flat_map(Expression::names).map(str::to_string));
        let mut kept = BTreeSet::new();
        while let Some(name) = open.pop() {
            if let Some(expression) = self.axes.get(&name).or_else(|| self.facts.get(&name)) {
                if !kept.contains(&name) {
                    open.extend(expression.names().into_iter().map(str::to_string));
                }
            }
            kept.insert(name);
        }
        self.axes.retain(|name, _| kept.contains(name));
        self.facts.retain(|name, _| kept.contains(name));
    }

    fn named(&self, name: &str) -> Option<&Expression> {
        let set = || self.sets.get(name).map(|set| &set.holds);
        self.axes.get(name).or_else(|| self.facts.get(name)).or_else(set)
    }

    fn asks_stored<'a>(&'a self, expression: &'a Expression, looked: &mut BTreeSet<&'a str>) -> bool {
        expression.asks_stored()
            || expression.names().into_iter().any(|name| {
                looked.insert(name) && self.named(name).is_some_and(|inner| self.asks_stored(inner, looked))
            })
    }

    /// How deep the evaluation of an axis, a fact or a set goes.
    fn height<'a>(
        &'a self,
        name: &'a str,
        way: &mut Vec<&'a str>,
        known: &mut BTreeMap<&'a str, usize>,
    ) -> Result<usize, String> {
        if let Some(&height) = known.get(name) {
            return Ok(height);
        }
        let Some(expression) = self.named(name) else { return Ok(0) };
        let position = self.sets.get(name).map(|set| &*set.axis);
        if way.contains(&name) {
            return Err(format!("{name} is made of itself"));
        }
        way.push(name);
        if way.len() > MAX_DEPTH {
            return Err(format!("made of what is made of what ... deeper than {MAX_DEPTH}"));
        }
        let mut inner = 0;
        // A name in its own expression is a key.
        for used in expression.names().into_iter().filter(|used| Some(*used) != position && *used != name) {
            inner = inner.max(self.height(used, way, known)?);
        }
        way.pop();
        let height = inner + expression.height();
        if height > MAX_HEIGHT {
            return Err(format!("nested deeper than {MAX_HEIGHT}, with what it is made of"));
        }
        known.insert(name, height);
        Ok(height)
    }
}

impl Place {
    fn word(self) -> &'static str {
        match self {
            Place::Axis => "axis",
            Place::Fact => "fact",
            Place::Set => "set",
        }
    }
}
