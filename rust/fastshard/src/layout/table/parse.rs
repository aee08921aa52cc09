//! Reading a table, and checking what can be checked without a checkpoint.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;

use super::configure::{RawConfig, RawSet};
use super::{
    alias, bad, bad_rule, inherit, stored_axis, stored_name, Condition, Entry, Repeat, Scale, ShardMap,
    Table, Tied,
};
use crate::error::Result;
use crate::layout::expr::{self, Derived, Extents, Factor, Shape};
use crate::layout::names::Pattern;

/// Most factors of a derived axis: tables of models have a handful.
const MAX_FACTORS: u64 = 1024;

#[derive(Deserialize)]
#[serde(untagged)]
enum RawAxis {
    Extent(u64),
    Expression(String),
}

/// An axis as a table declares it.
enum Axis {
    Extent(u64),
    Derived(Vec<Factor>),
    Alias(String),
}

impl RawAxis {
    fn parsed(&self) -> std::result::Result<Axis, String> {
        match self {
            RawAxis::Extent(0) => Err("extent 0".into()),
            RawAxis::Extent(n) => Ok(Axis::Extent(*n)),
            RawAxis::Expression(text) => match text.trim().strip_prefix('=') {
                Some(of) => Ok(Axis::Alias(alias::parse(of)?)),
                None => Ok(Axis::Derived(expr::parse_dim(text)?)),
            },
        }
    }
}

fn read(text: &str) -> Result<RawTable> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let line = error.span().map(|span| 1 + text[..span.start].matches('\n').count());
        let at = line.map(|line| format!("line {line}: ")).unwrap_or_default();
        // Its own message alone: with the text that it quotes it is several lines.
        bad("file", format!("{at}{}", error.message().replace('\n', "; ")))
    })
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
    extends: Option<String>,
    #[serde(default)]
    drop: Vec<String>,
    vocab: Option<String>,
    #[serde(default)]
    axes: BTreeMap<String, RawAxis>,
    #[serde(default)]
    shard: ShardMap,
    #[serde(default)]
    shared: BTreeMap<String, String>,
    #[serde(default)]
    class: BTreeMap<String, RawClass>,
    #[serde(default)]
    tensor: Vec<RawEntry>,
    #[serde(default)]
    repeat: Vec<Repeat>,
    #[serde(default)]
    tied: Vec<RawTied>,
    config: Option<RawConfig>,
    #[serde(default)]
    sets: BTreeMap<String, RawSet>,
    prefix: Option<String>,
    #[serde(default)]
    keep: Vec<String>,
    #[serde(default)]
    model: BTreeMap<String, serde_json::Value>,
}

fn condition(text: Option<&str>) -> std::result::Result<Condition, String> {
    Ok(text.map(Condition::parse).transpose()?.unwrap_or_default())
}

impl RawEntry {
    fn parsed(&self) -> std::result::Result<Entry, String> {
        Ok(Entry {
            shape: self.shape.as_deref().map(expr::parse_shape).transpose()?,
            when: condition(self.when.as_deref())?,
            optional: self.optional,
            partial: self.partial.clone(),
            ignore: self.ignore.clone(),
            scale: self.scale.as_deref().map(Scale::parse).transpose()?,
            add: self.add,
            keep_dtype: self.keep_dtype,
            is_moment: false,
            class: self.class.clone(),
            ..Entry::bare(Pattern::parse(&self.name)?, self.canonical.as_deref().unwrap_or(&self.name))
        })
    }
}

impl Table {
    /// Parses and checks a table that extends no other.
    ///
    /// # Errors
    /// `FS210` naming the entry, all that can be checked without a checkpoint.
    pub fn parse(text: &str) -> Result<Table> {
        Table::extending(text, None)
    }

    /// The table that a text says it extends.
    ///
    /// # Errors
    /// `FS210` for a text that is no table.
    pub fn extends_of(text: &str) -> Result<Option<String>> {
        Ok(read(text)?.extends)
    }

    /// Parses and checks a table, which extends `base` if it says so.
    ///
    /// # Errors
    /// `FS210` naming the entry, all that can be checked without a checkpoint; and if `base` is not the table that it extends.
    pub fn extending(text: &str, base: Option<&Table>) -> Result<Table> {
        let raw = read(text)?;
        let fail = |message: String| bad(&raw.layout, message);
        let mut table = inherit::inherited(&raw.layout, raw.extends.as_deref(), &raw.drop, base)?;
        table.name = raw.layout.clone();
        table.family = raw.family;
        table.vocab = raw.vocab.or(table.vocab);
        table.models = raw.model;
        for (name, axis) in &raw.axes {
            let axis = axis.parsed().map_err(|e| fail(format!("axis {name}: {e}")))?;
            table.declare(name, axis);
        }
        // A shard map names the factor as it stands in the shapes; what is divided is its stored extent.
        let stored = |map: &ShardMap| -> ShardMap {
            map.iter().map(|(k, v)| (k.clone(), v.iter().map(|a| stored_axis(a)).collect())).collect()
        };
        table.shards.entry(String::new()).or_default().extend(stored(&raw.shard));
        table.shards.extend(raw.class.iter().map(|(name, class)| (name.clone(), stored(&class.shard))));

        table.shared.extend(raw.shared);
        let inherited = table.entries.len();
        for entry in &raw.tensor {
            table.entries.push(entry.parsed().map_err(|e| bad_rule(&raw.layout, &entry.name, e))?);
        }
        table.tied.retain(|base| raw.tied.iter().all(|own| own.tensor != base.tensor));
        for t in &raw.tied {
            let when = condition(t.when.as_deref()).map_err(fail)?;
            table.tied.push(Tied { tensor: t.tensor.clone(), to: t.to.clone(), when });
        }
        table.check_axes().map_err(fail)?;
        let inherited_repeats = table.take_repeats(raw.repeat);
        table.put_prefix(raw.prefix).map_err(fail)?;
        table.repeat_rules(inherited_repeats).map_err(fail)?;
        let own = table.configure(raw.config, &raw.sets).map_err(fail)?;
        table.put_kept(&raw.keep).map_err(fail)?;
        table.leave_out(own);
        table.entries.iter_mut().for_each(|entry| alias::put(&table.aliases, entry));
        table.entries.iter().try_for_each(|entry| table.check(entry))?;
        table.check_redeclared(inherited)?;
        Ok(table)
    }

    /// Declares an axis, in the place of an inherited one of that name.
    fn declare(&mut self, name: &str, axis: Axis) {
        self.fixed.remove(name);
        self.derived.remove(name);
        self.aliases.remove(name);
        self.config.axes.remove(name);
        match axis {
            Axis::Extent(extent) => _ = self.fixed.insert(name.into(), extent),
            Axis::Derived(factors) => _ = self.derived.insert(name.into(), factors),
            Axis::Alias(of) => _ = self.aliases.insert(name.into(), of),
        }
    }

    /// Checks the axes and what divides them.
    fn check_axes(&self) -> std::result::Result<(), String> {
        let mut known = HashMap::new();
        for name in self.derived.keys() {
            match expanded(name, &self.derived, &mut known) {
                None => return Err(format!("axis {name} is derived from itself")),
                Some(count) if count > MAX_FACTORS => {
                    return Err(format!(
                        "axis {name} has more than {MAX_FACTORS} factors once it is expanded"
                    ))
                }
                Some(_) => {}
            }
        }
        check_derived(&self.derived)?;
        alias::check(self)?;
        for (axis, by) in &self.shared {
            if !self.shards.values().flat_map(ShardMap::values).flatten().any(|divided| divided == axis) {
                return Err(format!("[shared] axis {axis} is divided by no parallel dimension"));
            }
            if by == axis || self.derived.contains_key(by) {
                return Err(format!(
                    "[shared] {axis} = {by:?}: name another axis, and one that is not derived"
                ));
            }
        }
        for map in self.shards.values() {
            let divided =
                || map.iter().flat_map(|(dimension, axes)| axes.iter().map(move |a| (dimension, a)));
            for (i, (dimension, axis)) in divided().enumerate() {
                if self.derived.contains_key(axis) {
                    return Err(format!(
                        "axis {axis} is derived: divide one of its factors over {dimension}"
                    ));
                }
                if let Some((other, _)) = divided().take(i).find(|(_, a)| *a == axis) {
                    return Err(format!("axis {axis} is divided by {other} and by {dimension}"));
                }
            }
        }
        Ok(())
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
        self.check_sets(entry, shards).map_err(fail)?;
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
            return Err(format!("axis {name}: {axis} is padded; only a separate shape may say so"));
        }
    }
    Ok(())
}

/// Factors of a derived axis once all others in it are expanded; none if it is derived from itself. Each is looked at once.
fn expanded<'d>(
    name: &'d str,
    derived: &'d Derived,
    known: &mut HashMap<&'d str, Option<u64>>,
) -> Option<u64> {
    fn names<'d>(factors: &'d [Factor], out: &mut Vec<&'d str>) {
        for factor in factors {
            match factor {
                Factor::Axis { name, .. } => out.push(name),
                Factor::Alternatives(all) => all.iter().for_each(|(_, inner)| names(inner, out)),
            }
        }
    }
    let Some(inner) = derived.get(name) else { return Some(1) };
    if let Some(count) = known.get(name) {
        return *count;
    }
    // Who comes back to it on the way finds this.
    known.insert(name, None);
    let mut used = Vec::new();
    names(inner, &mut used);
    let count = used
        .into_iter()
        .try_fold(0u64, |sum, axis| Some(sum.saturating_add(expanded(axis, derived, known)?)));
    known.insert(name, count);
    count
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

    const CHILD: &str = r#"
        layout = "child"
        family = "other"
        extends = "toy"
        drop = ["attn.*"]
        [axes]
        t = 4
        J = "=H"
        [shard]
        tp = ["g"]
        [[tensor]]
        name = "layers.{L}.qkv"
        shape = "[g*d, H]"
        as = "attn.whole"
        [[tensor]]
        name = "layers.{L}.join"
        shape = "[H, (embed:J|hidden:J)]"
        as = "join.{}"
    "#;

    #[test]
    fn a_table_extends_another() {
        let base = Table::parse(GOOD).unwrap();
        assert_eq!(Table::extends_of(CHILD).unwrap().as_deref(), Some("toy"));
        assert_eq!(Table::extends_of(GOOD).unwrap(), None);
        let child = Table::extending(CHILD, Some(&base)).unwrap();
        assert_eq!((child.name.as_str(), child.family.as_str()), ("child", "other"));
        assert_eq!((child.vocab.as_deref(), child.fixed["t"]), (Some("V"), 4));
        assert_eq!(child.derived, base.derived);
        assert_eq!((child.divided_by("", "P"), child.divided_by("", "g")), (None, Some("tp")));
        let names: Vec<&str> = child.entries.iter().map(|entry| entry.name.text()).collect();
        assert_eq!(names, ["embed.(weight|w)", "layers.{L}.inv_freq", "layers.{L}.qkv", "layers.{L}.join"]);
        // And a table that extends that one.
        let third = "layout = \"third\"\nfamily = \"toy\"\nextends = \"child\"\ndrop = [\"join.*\"]";
        assert_eq!(Table::extending(third, Some(&child)).unwrap().entries.len(), 3);
    }

    #[test]
    fn refuses_what_cannot_be_extended() {
        let base = Table::parse(GOOD).unwrap();
        for (find, replace, wanted) in [
            ("drop = [\"attn.*\"]", "", "attn.whole"),
            ("attn.whole", "embed", "embed is inherited (of \"embed.(weight|w)\"): drop it first"),
            ("drop = [\"attn.*\"]", "drop = [\"attn.*\", \"mlp.*\"]", "drop \"mlp.*\": toy has no tensor"),
            ("\"attn.*\"", "\"[\"", "drop \"[\""),
            ("extends = \"toy\"", "extends = \"toys\"", "no registered layout"),
            ("extends = \"toy\"", "", "does not extend toy"),
            ("\"=H\"", "\"=d\"", "d is an alias or derived"),
            ("\"=H\"", "\"=J\"", "J is an alias or derived"),
            ("\"=H\"", "\"= 2\"", "write the name of the axis"),
            ("tp = [\"g\"]", "tp = [\"J\"]", "divide that one"),
            ("t = 4", "t = 4\nx = \"t*J\"", "only a shape may have it"),
        ] {
            let text = CHILD.replace(find, replace);
            // Without the drop the inherited rule of the name is what is in the way.
            let wanted = if wanted == "attn.whole" { "drop it first" } else { wanted };
            let message = Table::extending(&text, Some(&base)).unwrap_err().to_string();
            assert!(message.contains(wanted), "{wanted:?} not in {message}");
        }
        assert!(Table::parse(CHILD).unwrap_err().to_string().contains("no registered layout"));
        let drops = GOOD.replace("family", "drop = [\"x\"]\nfamily");
        assert!(Table::parse(&drops).unwrap_err().to_string().contains("`drop` is of"));
    }

    #[test]
    fn an_alias_is_an_axis_of_its_own() {
        let base = Table::parse(GOOD).unwrap();
        let child = Table::extending(CHILD, Some(&base)).unwrap();
        let join = child.entries.last().unwrap().shape.as_ref().unwrap();
        let atoms = join.lower(&child.derived, &Extents::from([("H".into(), 8)])).unwrap();
        assert_eq!(atoms[1].base, [0, 8]);
        let axes: Vec<&str> = atoms[1].axes.iter().map(|(axis, _)| axis.as_str()).collect();
        assert_eq!(axes, ["H", "J"]);
    }
}
