//! `[config]` and `[sets]` of a table: parsed, put on what is inherited, and checked.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::{Entry, ShardMap, Table};
use crate::layout::config::{Expression, SetRule};
use crate::layout::expr::{self, Factor};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawConfig {
    #[serde(default)]
    model_type: Vec<String>,
    within: Option<Vec<String>>,
    #[serde(default)]
    axes: BTreeMap<String, String>,
    #[serde(default)]
    facts: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "an expression, or a table of `where`, `axis` and `optional`")]
pub(super) enum RawSet {
    Where(String),
    Stated(StatedSet),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StatedSet {
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
    /// Takes what a table says of configs, and checks it.
    pub(super) fn configure(
        &mut self,
        raw: Option<RawConfig>,
        sets: &BTreeMap<String, RawSet>,
    ) -> Result<(), String> {
        let axes = self.axes();
        let config = &mut self.config;
        if let Some(raw) = raw {
            config.stated = true;
            config.model_types = raw.model_type;
            config.within = raw.within.unwrap_or(std::mem::take(&mut config.within));
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
                RawSet::Stated(set) => (&set.holds, set.axis.clone(), set.optional),
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
        self.config.check(&axes, &self.fixed)
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
        fn into(factors: &[Factor], found: &mut BTreeSet<String>) {
            for factor in factors {
                match factor {
                    Factor::Axis { name, padded } => {
                        let padded = padded.iter().filter(|stored| expr::in_set(stored).is_none());
                        found.extend([name].into_iter().chain(padded).cloned());
                    }
                    Factor::Alternatives(all) => all.iter().for_each(|(_, inner)| into(inner, found)),
                }
            }
        }
        let mut found = BTreeSet::new();
        let shapes = self.entries.iter().filter_map(|entry| entry.shape.as_ref());
        shapes.flat_map(|shape| &shape.dims).for_each(|dim| into(dim, &mut found));
        self.derived.values().for_each(|factors| into(factors, &mut found));
        found.extend(self.entries.iter().flat_map(|entry| entry.name.variables()).map(|v| v.axis.clone()));
        found
    }
}
