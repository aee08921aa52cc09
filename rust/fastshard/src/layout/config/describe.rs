//! What a table makes of a model's config, and of the names of its tensors where there is none.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::eval::{Scope, Value, Wrong};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::layout::expr::Extents;
use crate::layout::names::Pattern;
use crate::layout::sets::{Positions, Sets};
use crate::layout::table::{Facts, Table};

/// Most positions of an axis that has sets.
const MAX_POSITIONS: u64 = 1 << 18;

/// What is known of a model; what is not among it is for the tensors to tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Described {
    /// Extents of axes.
    pub extents: Extents,
    /// Facts.
    pub facts: Facts,
    /// Sets of positions.
    pub sets: Sets,
}

/// Which names a pattern is of.
fn any_of<'n>(names: &'n [String]) -> impl Fn(&Pattern) -> bool + 'n {
    let none = BTreeMap::new();
    move |pattern| names.iter().any(|name| pattern.matches(name, &none).is_some())
}

impl Table {
    /// Axes, facts and sets of a model.
    ///
    /// `names` are those of the tensors stored: on a target's side there are none. `file` is the config's, for messages.
    ///
    /// # Errors
    /// `FS211` naming the key for a config whose values do not fit.
    pub fn describe(&self, config: Option<&Json>, names: &[String], file: Option<&str>) -> Result<Described> {
        let Some(config) = config else {
            return Ok(Described { facts: self.facts_of_names(names), ..Described::default() });
        };
        let stored = any_of(names);
        let scope = Scope::new(&self.config, &self.fixed, config, &stored);
        let mut described = Described::default();
        for (name, expression) in &self.config.axes {
            let to_error = |wrong| self.explain("axis", name, expression.text(), file, wrong);
            if let Value::Int(n) = scope.named(name, expression).map_err(to_error)? {
                described.extents.insert(name.clone(), n as u64);
            }
        }
        for (name, expression) in &self.config.facts {
            let to_error = |wrong| self.explain("fact", name, expression.text(), file, wrong);
            if let Value::Bool(fact) = scope.named(name, expression).map_err(to_error)? {
                described.facts.insert(name.clone(), fact);
            }
        }
        for name in self.config.sets.keys() {
            if let Some(set) = self.set(name, &scope, &described.extents, file)? {
                described.sets.insert(name.clone(), set);
            }
        }
        Ok(described)
    }

    /// True if the table is for a model: for its `model_type`, and for configs like its own.
    ///
    /// # Errors
    /// `FS211` naming the key for a config whose values do not fit.
    pub fn is_for(&self, config: &Json, file: Option<&str>) -> Result<bool> {
        let rules = &self.config;
        let kind = config.get("model_type").and_then(Json::as_str);
        if !rules.model_types.iter().any(|known| Some(&**known) == kind) {
            return Ok(false);
        }
        let Some(when) = &rules.when else { return Ok(true) };
        let scope = Scope::new(rules, &self.fixed, config, &|_| false);
        let to_error = |wrong| self.explain("config", "when", when.text(), file, wrong);
        match scope.value("", when, None).map_err(to_error)? {
            Value::Bool(holds) => Ok(holds),
            Value::Null => Ok(false),
            other => {
                let (expected, got) = ("true or false".into(), other.shown());
                Err(to_error(Wrong { at: when.text().into(), expected, got }))
            }
        }
    }

    /// The positions of a set; none if the config does not tell.
    fn set<'a>(
        &'a self,
        name: &str,
        scope: &Scope<'a>,
        extents: &Extents,
        file: Option<&str>,
    ) -> Result<Option<Positions>> {
        let Some((name, set)) = self.config.sets.get_key_value(name) else { return Ok(None) };
        let text = set.holds.text();
        let to_error = |wrong| self.explain("set", name, text, file, wrong);
        let extent = extents.get(&set.axis).or_else(|| self.fixed.get(&set.axis));
        let Some(&extent) = extent else { return Ok(None) };
        if extent > MAX_POSITIONS {
            let most = format!("at most {MAX_POSITIONS} positions on axis {}", set.axis);
            return Err(to_error(Wrong { at: text.into(), expected: most, got: extent.to_string() }));
        }
        let mut positions = Vec::new();
        for position in 0..extent {
            match scope.value(name, &set.holds, Some((&set.axis, position))).map_err(to_error)? {
                Value::Bool(true) => positions.push(position),
                Value::Bool(false) => {}
                Value::Null => return Ok(None),
                other => {
                    let (expected, got) = ("true or false".into(), other.shown());
                    return Err(to_error(Wrong { at: text.into(), expected, got }));
                }
            }
        }
        let found = Positions { axis: set.axis.clone(), positions };
        // Absent as a whole, the axis ends before it.
        let last = found.runs().last().is_none_or(|(place, _, end)| *place == 0 && *end == extent);
        if set.optional && !last {
            let got = crate::layout::sets::written(&found);
            let expected = format!("the last positions below {extent}, as it is optional");
            return Err(to_error(Wrong { at: text.into(), expected, got }));
        }
        Ok(Some(found))
    }

    fn explain(&self, kind: &str, name: &str, text: &str, file: Option<&str>, wrong: Wrong) -> Error {
        let within = if wrong.at == text { String::new() } else { format!(" in {text:?}") };
        let message = format!("config: {}{within} ({kind} {name} of layout {})", wrong.at, self.name);
        let mut finding = Finding::new(codes::BAD_VALUE, message).expected(wrong.expected, wrong.got);
        finding.file = file.map(str::to_string);
        finding.into()
    }

    /// Facts without a config: one holds if a tensor is stored that only rules which need it have.
    fn facts_of_names(&self, names: &[String]) -> Facts {
        let bases = BTreeMap::new();
        let mut facts = Facts::new();
        for entry in &self.entries {
            facts.extend(entry.when.needed().map(|fact| (fact.to_string(), false)));
        }
        for name in names {
            let rules = self.entries.iter().filter(|entry| entry.name.matches(name, &bases).is_some());
            let rules: Vec<_> = rules.collect();
            for fact in rules.iter().flat_map(|rule| rule.when.needed()) {
                if rules.iter().all(|rule| rule.when.needed().any(|other| other == fact)) {
                    facts.insert(fact.to_string(), true);
                }
            }
        }
        facts
    }
}
