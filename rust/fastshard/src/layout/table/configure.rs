//! `[config]` and `[sets]` of a table: parsed, put on what is inherited, and checked.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value as Json;

use super::{Entry, ShardMap, Table};
use crate::layout::config::{Expression, SetRule};
use crate::layout::expr::{self, Factor};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawConfig {
    #[serde(default)]
    model_type: Vec<String>,
    when: Option<String>,
    #[serde(default)]
    defaults: BTreeMap<String, BTreeMap<String, Json>>,
    within: Option<Vec<String>>,
    outside: Option<Vec<String>>,
    #[serde(default)]
    axes: BTreeMap<String, String>,
    #[serde(default)]
    facts: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "an expression, or a table of `where`, `axis` and `optional`")]
pub(super) enum RawSet {
    Where(String),
    Table(SetTable),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SetTable {
    #[serde(rename = "where")]
    holds: String,
    axis: Option<String>,
    #[serde(default)]
    optional: bool,
}

fn read((name, text): (&String, &String)) -> Result<(String, Expression), String> {
    Ok((name.clone(), Expression::parse(text).map_err(|e| format!("{name}: {e}"))?))
}

impl Table {
    /// Takes what a table says of configs, and checks it. Returns the axes and facts of its own.
    pub(super) fn configure(
        &mut self,
        raw: Option<RawConfig>,
        sets: &BTreeMap<String, RawSet>,
    ) -> Result<BTreeSet<String>, String> {
        let axes = self.axes();
        self.config.positive = self.positive();
        let config = &mut self.config;
        let mut own_names = BTreeSet::new();
        if let Some(raw) = raw {
            config.is_declared = true;
            config.model_types = raw.model_type;
            config.outside = raw.outside.unwrap_or(std::mem::take(&mut config.outside));
            config.within = raw.within.unwrap_or(std::mem::take(&mut config.within));
            config.when =
                raw.when.map(|text| Expression::parse(&text)).transpose().map_err(|e| format!("when {e}"))?;
            if config.when.is_some() && config.model_types.is_empty() {
                return Err("`when` is of the configs of a model_type, and there is none".into());
            }
            own_names.extend(raw.axes.keys().chain(raw.facts.keys()).cloned());
            for (kind, keys) in raw.defaults {
                // An object that keys are sought in has a type of its own; one of no type is given by the user.
                let has_types = !config.model_types.is_empty() && config.within.is_empty();
                if has_types && !config.model_types.contains(&kind) {
                    return Err(format!("defaults of {kind}, which is no model_type of the table"));
                }
                config.defaults.entry(kind).or_default().extend(keys);
            }
            for (name, expression) in raw.axes.iter().map(read).collect::<Result<Vec<_>, _>>()? {
                if self.aliases.contains_key(&name) {
                    return Err(format!("axis {name} has its extent from another"));
                }
                config.axes.insert(name, expression);
            }
            config.facts.extend(raw.facts.iter().map(read).collect::<Result<Vec<_>, _>>()?);
        }
        let parsed = |(name, set): (&String, &RawSet)| {
            let (text, axis, optional) = match set {
                RawSet::Where(text) => (text, None, false),
                RawSet::Table(set) => (&set.holds, set.axis.clone(), set.optional),
            };
            let (name, holds) = read((name, text))?;
            Ok(((name.clone(), (axis, holds)), (name, optional)))
        };
        let all: Vec<_> = sets.iter().map(parsed).collect::<Result<_, String>>()?;
        let (holds, optional): (BTreeMap<_, _>, BTreeMap<_, _>) = all.into_iter().unzip();
        let known: BTreeSet<String> =
            axes.iter().chain(config.axes.keys()).chain(self.fixed.keys()).cloned().collect();
        // Those of its own have no axis yet that others of them could be told by.
        holds.keys().for_each(|name| _ = config.sets.remove(name));
        let mut own = Vec::new();
        for (name, (axis, expression)) in &holds {
            let found = axis.clone().map_or_else(|| config.axis_of(expression, &holds, &known), Ok);
            let axis = found.map_err(|e| format!("set {name}: {e}"))?;
            own.push((name.clone(), SetRule { axis, holds: expression.clone(), optional: optional[name] }));
        }
        config.sets.extend(own);
        if let Some(when) = &config.when {
            config.check_other(when, "table").map_err(|e| format!("when {:?}: {e}", when.text()))?;
        }
        self.config.check(&axes, &self.fixed)?;
        Ok(own_names)
    }

    /// Leaves out the axes and facts that are inherited and not used any more; `own` are not inherited.
    pub(super) fn leave_out(&mut self, own: BTreeSet<String>) {
        let mut used = own;
        used.extend(self.axes());
        used.extend(self.aliases.values().cloned());
        let scales = self.entries.iter().filter_map(|entry| entry.scale.as_ref()?.axis.as_ref());
        scales.for_each(|(dim, _)| axes_in(dim, &mut used));
        let conditions =
            self.entries.iter().map(|entry| &entry.when).chain(self.tied.iter().map(|t| &t.when));
        used.extend(conditions.flat_map(|when| &when.terms).map(|(fact, _)| fact.clone()));
        self.config.keep(used);
    }

    /// Checks the sets that a rule is of.
    pub(super) fn check_sets(&self, entry: &Entry, shards: &ShardMap) -> Result<(), String> {
        let named = entry.name.variables().filter_map(|v| Some((v.axis.as_str(), v.set.as_deref()?)));
        let mut used: Vec<(&str, &str, bool)> = named.map(|(axis, set)| (axis, set, false)).collect();
        let mut extents = Vec::new();
        let dims = entry.shape.iter().flat_map(|shape| &shape.dims);
        dims.for_each(|dim| expr::names_in(dim, &self.derived, &mut extents));
        used.extend(extents.iter().filter_map(|e| expr::in_set(e)).map(|(axis, set)| (axis, set, true)));
        for (axis, set, in_shape) in used {
            match self.config.sets.get(set) {
                None => return Err(format!("there is no set {set}")),
                Some(known) if known.axis != axis => {
                    return Err(format!("{set} is a set of positions on {}, not on {axis}", known.axis))
                }
                Some(_) => {}
            }
            if in_shape && shards.values().flatten().any(|divided| divided == axis) {
                return Err(format!("axis {axis} is divided, so that a rank has no set of its positions"));
            }
        }
        Ok(())
    }

    /// All axes of the rules, real and stored ones.
    fn axes(&self) -> BTreeSet<String> {
        let mut found = self.axes_of(&mut self.entries.iter());
        self.derived.values().for_each(|factors| axes_in(factors, &mut found));
        found
    }

    /// Axes of rules that hold for every model: none of them is empty.
    fn positive(&self) -> BTreeSet<String> {
        let of_a_set = |entry: &&Entry| {
            let mut extents = Vec::new();
            let dims = entry.shape.iter().flat_map(|shape| &shape.dims);
            dims.for_each(|dim| expr::names_in(dim, &self.derived, &mut extents));
            entry.name.variables().any(|v| v.set.is_some())
                || extents.iter().any(|e| expr::in_set(e).is_some())
        };
        let always =
            |entry: &&Entry| entry.when.terms.is_empty() && !entry.optional && entry.ignore.is_none();
        self.axes_of(&mut self.entries.iter().filter(always).filter(|entry| !of_a_set(entry)))
    }

    /// Axes of some rules, those that they are derived of included.
    fn axes_of(&self, entries: &mut dyn Iterator<Item = &Entry>) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for entry in entries {
            let dims = entry.shape.iter().flat_map(|shape| &shape.dims);
            dims.for_each(|dim| axes_in(dim, &mut found));
            found.extend(entry.name.variables().map(|v| v.axis.clone()));
        }
        let mut open: Vec<String> = found.iter().cloned().collect();
        while let Some(factors) = open.pop().map(|name| self.derived.get(&name)) {
            let mut inner = BTreeSet::new();
            axes_in(factors.map_or(&[], Vec::as_slice), &mut inner);
            open.extend(inner.difference(&found).cloned());
            found.extend(inner);
        }
        found
    }
}

/// Axes of a product, real and stored ones.
fn axes_in(factors: &[Factor], found: &mut BTreeSet<String>) {
    for factor in factors {
        match factor {
            Factor::Axis { name, padded } => {
                let padded = padded.iter().filter(|stored| expr::in_set(stored).is_none());
                found.extend([name].into_iter().chain(padded).cloned());
            }
            Factor::Alternatives(all) => all.iter().for_each(|(_, inner)| axes_in(inner, found)),
        }
    }
}
