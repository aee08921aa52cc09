//! Reading a table, and checking what can be checked without a checkpoint.

use std::collections::{BTreeMap, HashSet};

use serde::Deserialize;

use super::{stored_axis, stored_name, Condition, Entry, Scale, ShardMap, Table, Tied};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::layout::expr::{self, Derived, Extents, Factor, Shape};
use crate::layout::names::Pattern;

#[derive(Deserialize)]
#[serde(untagged)]
enum RawAxis {
    Extent(u64),
    Expression(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    name: String,
    shape: Option<String>,
    #[serde(rename = "as")]
    canonical: Option<String>,
    when: Option<String>,
    #[serde(default)]
    optional: bool,
    partial: Option<String>,
    ignore: Option<String>,
    scale: Option<String>,
    #[serde(default)]
    add: f64,
    #[serde(default)]
    keep_dtype: bool,
    #[serde(default)]
    class: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTied {
    tensor: String,
    to: String,
    when: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawClass {
    shard: ShardMap,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTable {
    layout: String,
    family: String,
    /// Where the facts come from; for readers of the file.
    #[serde(default, rename = "source")]
    _source: String,
    vocab: Option<String>,
    #[serde(default)]
    axes: BTreeMap<String, RawAxis>,
    #[serde(default)]
    shard: ShardMap,
    #[serde(default)]
    class: BTreeMap<String, RawClass>,
    #[serde(default)]
    tensor: Vec<RawEntry>,
    #[serde(default)]
    tied: Vec<RawTied>,
}

fn bad(table: &str, message: String) -> Error {
    Finding::new(codes::BAD_LAYOUT, format!("layout {table}: {message}"))
        .help("see the rule language in docs/layouts.md")
        .into()
}

fn bad_rule(table: &str, rule: &str, message: String) -> Error {
    bad(table, format!("tensor {rule:?}: {message}"))
}

impl Table {
    /// Parses and checks a table.
    ///
    /// # Errors
    /// `FS210` naming the entry, all that can be checked without a checkpoint.
    pub fn parse(text: &str) -> Result<Table> {
        let raw: RawTable = toml::from_str(text).map_err(|e| bad("file", e.to_string()))?;
        let fail = |message: String| bad(&raw.layout, message);
        let mut derived = Derived::new();
        let mut fixed = Extents::new();
        for (name, axis) in &raw.axes {
            match axis {
                RawAxis::Extent(0) => return Err(fail(format!("axis {name}: extent 0"))),
                RawAxis::Extent(n) => {
                    fixed.insert(name.clone(), *n);
                }
                RawAxis::Expression(text) => {
                    derived.insert(name.clone(), expr::parse_dim(text).map_err(fail)?);
                }
            }
        }
        for name in derived.keys() {
            if cyclic(name, &derived, &mut Vec::new()) {
                return Err(fail(format!("axis {name} is derived from itself")));
            }
        }
        check_derived(&derived).map_err(fail)?;
        // A shard map names the factor as it stands in the shapes; what is divided is its stored extent.
        let stored = |map: &ShardMap| -> ShardMap {
            map.iter().map(|(k, v)| (k.clone(), v.iter().map(|a| stored_axis(a)).collect())).collect()
        };
        let mut shards = BTreeMap::from([(String::new(), stored(&raw.shard))]);
        shards.extend(raw.class.iter().map(|(name, class)| (name.clone(), stored(&class.shard))));

        for map in shards.values() {
            let divided =
                || map.iter().flat_map(|(dimension, axes)| axes.iter().map(move |a| (dimension, a)));
            for (i, (dimension, axis)) in divided().enumerate() {
                if derived.contains_key(axis) {
                    return Err(fail(format!(
                        "axis {axis} is derived: divide one of its factors over {dimension}"
                    )));
                }
                if let Some((other, _)) = divided().take(i).find(|(_, a)| *a == axis) {
                    return Err(fail(format!("axis {axis} is divided by {other} and by {dimension}")));
                }
            }
        }

        let mut entries = Vec::with_capacity(raw.tensor.len());
        for entry in &raw.tensor {
            let fail = |message: String| bad_rule(&raw.layout, &entry.name, message);
            let shape = entry.shape.as_deref().map(expr::parse_shape).transpose().map_err(fail)?;
            entries.push(Entry {
                name: Pattern::parse(&entry.name).map_err(fail)?,
                shape,
                canonical: entry.canonical.clone().unwrap_or_else(|| entry.name.clone()),
                when: entry
                    .when
                    .as_deref()
                    .map(Condition::parse)
                    .transpose()
                    .map_err(fail)?
                    .unwrap_or_default(),
                optional: entry.optional,
                partial: entry.partial.clone(),
                ignore: entry.ignore.clone(),
                scale: entry.scale.as_deref().map(Scale::parse).transpose().map_err(fail)?,
                add: entry.add,
                keep_dtype: entry.keep_dtype,
                class: entry.class.clone(),
                generic: false,
            });
        }
        let mut tied = Vec::new();
        for t in &raw.tied {
            let when = t.when.as_deref().map(Condition::parse).transpose().map_err(fail)?.unwrap_or_default();
            tied.push(Tied { tensor: t.tensor.clone(), to: t.to.clone(), when });
        }
        let table = Table {
            name: raw.layout,
            family: raw.family,
            vocab: raw.vocab,
            derived,
            fixed,
            shards,
            divided: HashSet::new(),
            entries,
            tied,
        };
        table.entries.iter().try_for_each(|entry| table.check(entry))?;
        Ok(table)
    }

    /// Checks a rule as far as that can be done without a checkpoint.
    ///
    /// # Errors
    /// `FS210` naming it.
    pub(in crate::layout) fn check(&self, entry: &Entry) -> Result<()> {
        let fail = |message: String| bad_rule(&self.name, entry.name.text(), message);
        let Some(shards) = self.shards.get(&entry.class) else {
            return Err(fail(format!("there is no [class.{}]", entry.class)));
        };
        match (&entry.shape, &entry.ignore) {
            (None, None) => return Err(fail("it needs a shape, or `ignore` with a reason".into())),
            (_, Some(reason)) if reason.trim().is_empty() => {
                return Err(fail("`ignore` needs a reason".into()))
            }
            _ => {}
        }
        if let Some(shape) = &entry.shape {
            let derived = &self.derived;
            let padded = shape
                .dims
                .iter()
                .find_map(|dim| padded_in(dim, &|a, p| derived.contains_key(a) || derived.contains_key(p)));
            if let Some(axis) = padded {
                return Err(fail(format!("{axis}: a derived axis cannot be padded")));
            }
            check_shape(shape, &entry.name, &entry.canonical, derived, shards).map_err(fail)?;
        }
        if let Some(dimension) = &entry.partial {
            if !shards.contains_key(dimension) {
                return Err(fail(format!("partial = {dimension:?} is not a parallel dimension in [shard]")));
            }
        }
        if !entry.add.is_finite() {
            return Err(fail("add must be finite".into()));
        }
        Ok(())
    }
}

/// The first padded axis of a product that `wanted` accepts, by its real and stored names.
fn padded_in(factors: &[Factor], wanted: &dyn Fn(&str, &str) -> bool) -> Option<String> {
    factors.iter().find_map(|factor| match factor {
        Factor::Axis { name, padded: Some(p) } => wanted(name, p).then(|| format!("{name}~{p}")),
        Factor::Axis { .. } => None,
        Factor::Alternatives(all) => all.iter().find_map(|(_, inner)| padded_in(inner, wanted)),
    })
}

fn check_derived(derived: &Derived) -> std::result::Result<(), String> {
    for (name, factors) in derived {
        if let Some(axis) = padded_in(factors, &|_, _| true) {
            return Err(format!("axis {name}: {axis} is padded; only a shape of its own may say so"));
        }
    }
    Ok(())
}

/// True if expanding `name` would come back to a name on the way.
fn cyclic(name: &str, derived: &Derived, way: &mut Vec<String>) -> bool {
    fn names(factors: &[Factor], out: &mut Vec<String>) {
        for factor in factors {
            match factor {
                Factor::Axis { name, .. } => out.push(name.clone()),
                Factor::Alternatives(all) => all.iter().for_each(|(_, inner)| names(inner, out)),
            }
        }
    }
    let Some(inner) = derived.get(name) else { return false };
    if way.iter().any(|n| n == name) {
        return true;
    }
    way.push(name.to_string());
    let mut used = Vec::new();
    names(inner, &mut used);
    let found = used.iter().any(|n| cyclic(n, derived, way));
    way.pop();
    found
}

fn check_shape(
    shape: &Shape,
    name: &Pattern,
    canonical: &str,
    derived: &Derived,
    shards: &ShardMap,
) -> std::result::Result<(), String> {
    let mut names = Vec::new();
    shape.dims.iter().for_each(|dim| expr::names_in(dim, derived, &mut names));
    // Any extents will do: which atoms there are does not depend on them.
    let ones: Extents = names.iter().map(|n| (n.clone(), 1)).collect();
    let atoms = shape.lower(derived, &ones)?;
    let mut keys = Vec::new();
    for atom in &atoms {
        if atom.tags.is_empty() == canonical.contains("{}") {
            return Err("`as` holds {} exactly where the shape has tagged alternatives".into());
        }
        let key = (atom.tags.clone(), atom.derived_tags.clone());
        if keys.contains(&key) {
            return Err(format!("the tags {:?} are chosen twice", atom.tags));
        }
        keys.push(key);
        for (axis, _) in &atom.axes {
            if name.variables().any(|v| v.axis == *axis && !v.extent) {
                return Err(format!("axis {axis} stands both in the name and in the shape"));
            }
        }
        for (dimension, axes) in shards {
            let divided: Vec<&String> = axes
                .iter()
                .filter(|divided| {
                    atom.axes
                        .iter()
                        .any(|(axis, _)| axis == *divided || stored_name(shape, axis) == **divided)
                })
                .collect();
            if divided.len() > 1 {
                return Err(format!("{dimension} divides two axes of one tensor: {divided:?}"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::table::{Facts, Truth};

    const GOOD: &str = r#"
        layout = "toy"
        family = "toy"
        vocab = "V"
        [axes]
        t = 2
        d = "t*c"
        [shard]
        tp = ["V~P", "g"]
        [[tensor]]
        name = "embed.(weight|w)"
        shape = "[V~P, H]"
        as = "embed"
        [[tensor]]
        name = "layers.{L}.qkv"
        shape = "[g*(q:r|k:1|v:1)*d, H]"
        as = "attn.{}"
        when = "bias & !tied"
        scale = "1/sqrt(d)"
        [[tensor]]
        name = "layers.{L}.inv_freq"
        ignore = "recomputed"
    "#;

    #[test]
    fn parses_a_table() {
        let table = Table::parse(GOOD).unwrap();
        assert_eq!(table.entries.len(), 3);
        assert_eq!(table.divided_by("", "P"), Some("tp"));
        let scale = table.entries[1].scale.as_ref().unwrap();
        let extents = Extents::from([("t".into(), 2), ("c".into(), 8)]);
        assert_eq!(scale.value(&table.derived, &extents), Some(0.25));
        let facts = Facts::from([("bias".into(), true)]);
        assert_eq!(table.entries[1].when.holds(&facts), Truth::Unknown("tied".into()));
    }

    #[test]
    fn takes_axes_apart_like_the_other_table() {
        let plain = "layout = \"plain\"\nfamily = \"toy\"\n[axes]\nr = 1\n";
        let (mut plain, good) = (Table::parse(plain).unwrap(), Table::parse(GOOD).unwrap());
        plain.share_axes(&good);
        assert_eq!(plain.derived, good.derived);
        assert_eq!(plain.fixed, Extents::from([("r".into(), 1), ("t".into(), 2)]));
        // What a table says itself stays.
        let mut own = Table::parse(&GOOD.replace("t*c", "c*t").replace("t = 2", "t = 4")).unwrap();
        own.share_axes(&good);
        assert_ne!(own.derived, good.derived);
        assert_eq!(own.fixed["t"], 4);
    }

    #[test]
    fn refuses_bad_tables() {
        for (find, replace, wanted) in [
            ("[V~P, H]", "[V~P, H", "expected ']'"),
            ("as = \"attn.{}\"", "as = \"attn\"", "`as` holds {}"),
            ("\"[V~P, H]\"", "\"[V~P, g]\"", "divides two axes"),
            ("layers.{L}.qkv", "layers.{g}.qkv", "both in the name and in the shape"),
            ("ignore = \"recomputed\"", "", "it needs a shape"),
            ("t = 2", "t = 2\nunknown_axis = \"(\"", "expected"),
            ("when = ", "whenn = ", "unknown field"),
            ("d = \"t*c\"", "d = \"t*d\"", "derived from itself"),
        ] {
            let text = GOOD.replace(find, replace);
            let message = Table::parse(&text).unwrap_err().to_string();
            assert!(message.contains(wanted), "{wanted:?} not in {message}");
        }
    }
}
