//! Layout tables: TOML files, the same for built-in and for users' own layouts.

mod alias;
mod configure;
mod inherit;
mod parse;
mod prefixes;
mod repeats;

use std::collections::{BTreeMap, HashSet};

use super::config::Config;
use super::expr::{self, Derived, Extents, Factor, Shape};
use super::names::Pattern;
use crate::codes;
use crate::error::{Error, Finding};
pub use repeats::Repeat;

/// Facts about a model that decide which rules hold, e.g. `tied`, `gpt_j_residual`.
pub type Facts = BTreeMap<String, bool>;

/// A conjunction of facts, e.g. `bias & !tied`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Condition {
    terms: Vec<(String, bool)>,
}

/// Whether a condition holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Truth {
    /// All facts are known and fit.
    Holds,
    /// A known fact contradicts it.
    Fails,
    /// It hangs on this fact, which is not known.
    Unknown(String),
}

impl Condition {
    fn parse(text: &str) -> std::result::Result<Condition, String> {
        let mut terms = Vec::new();
        for term in text.split('&') {
            let term = term.trim();
            let (name, value) = match term.strip_prefix('!') {
                Some(name) => (name.trim(), false),
                None => (term, true),
            };
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                return Err(format!("when = {text:?}: write facts joined by '&', each with an optional '!'"));
            }
            terms.push((name.to_string(), value));
        }
        Ok(Condition { terms })
    }

    /// This condition and another.
    fn and(mut self, other: &Condition) -> Condition {
        for term in &other.terms {
            if !self.terms.contains(term) {
                self.terms.push(term.clone());
            }
        }
        self
    }

    /// Facts that must hold.
    pub fn needed(&self) -> impl Iterator<Item = &str> {
        self.terms.iter().filter(|(_, value)| *value).map(|(name, _)| name.as_str())
    }

    /// Evaluates against the facts known.
    pub fn holds(&self, facts: &Facts) -> Truth {
        let mut unknown = None;
        for (name, value) in &self.terms {
            match facts.get(name) {
                Some(known) if known == value => {}
                Some(_) => return Truth::Fails,
                None => unknown = Some(name.clone()),
            }
        }
        unknown.map_or(Truth::Holds, Truth::Unknown)
    }
}

/// A factor applied to values: a number times a power of an axis extent.
#[derive(Debug, Clone, PartialEq)]
pub struct Scale {
    constant: f64,
    axis: Option<(Vec<Factor>, f64)>,
}

impl Scale {
    /// Parses `0.5`, `1/sqrt(d)`, `sqrt(d)` or `d^-0.5`.
    fn parse(text: &str) -> std::result::Result<Scale, String> {
        if let Ok(constant) = text.parse::<f64>() {
            return if constant.is_finite() && constant != 0.0 {
                Ok(Scale { constant, axis: None })
            } else {
                Err(format!("scale = {text:?}: must be finite and not zero"))
            };
        }
        let root =
            |text: &str| text.strip_prefix("sqrt(").and_then(|t| t.strip_suffix(')')).map(str::to_string);
        let (axis, power) = if let Some(axis) = text.strip_prefix("1/").and_then(root) {
            (axis, -0.5)
        } else if let Some(axis) = root(text) {
            (axis, 0.5)
        } else if let Some((axis, power)) = text.split_once('^') {
            (
                axis.to_string(),
                power.parse().map_err(|_| format!("scale = {text:?}: {power:?} is no number"))?,
            )
        } else {
            return Err(format!("scale = {text:?}: write a number, sqrt(AXIS), 1/sqrt(AXIS) or AXIS^POWER"));
        };
        Ok(Scale { constant: 1.0, axis: Some((expr::parse_dim(&axis)?, power)) })
    }

    /// The factor to a power.
    pub fn to_the(&self, power: f64) -> Scale {
        let axis = self.axis.as_ref().map(|(dim, own)| (dim.clone(), own * power));
        Scale { constant: self.constant.powf(power), axis }
    }

    /// The factor under the given extents, or `None` if its axis is unbound.
    pub fn value(&self, derived: &Derived, extents: &Extents) -> Option<f64> {
        match &self.axis {
            None => Some(self.constant),
            Some((dim, power)) => {
                Some(self.constant * (expr::product(dim, derived, extents)? as f64).powf(*power))
            }
        }
    }
}

/// One stored tensor of a layout.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Name of the stored tensor.
    pub name: Pattern,
    /// Shape of the whole tensor; `None` for ignored tensors of any shape.
    pub shape: Option<Shape>,
    /// Canonical tensor, `{}` standing for the tags chosen.
    pub canonical: String,
    /// Facts under which the entry holds.
    pub when: Condition,
    /// True if a checkpoint may lack it in all layers alike.
    pub optional: bool,
    /// Parallel dimension over which the ranks' values are terms of a sum.
    pub partial: Option<String>,
    /// Reason for which the tensor is left out.
    pub ignore: Option<String>,
    /// stored = canonical * scale + add
    pub scale: Option<Scale>,
    /// See `scale`.
    pub add: f64,
    /// True if the tensor keeps its element type, whatever floating outputs are to have.
    pub keep_dtype: bool,
    /// True for what an optimizer keeps of a tensor, which has its own element type always.
    pub is_moment: bool,
    /// Shard class; empty for the default one.
    pub class: String,
    /// True for pass-through entries made for tensors that no rule names.
    pub generic: bool,
    /// True for a rule that `[[repeat]]` makes of another: a table that extends this one makes its own.
    pub is_repeated: bool,
}

impl Entry {
    /// The canonical tensor of an atom with the given tags.
    pub fn canonical_key(&self, tags: &[String], derived_tags: &[String]) -> String {
        let mut key = self.canonical.replace("{}", &tags.join("."));
        for tag in derived_tags {
            key.push('/');
            key.push_str(tag);
        }
        key
    }
}

/// A canonical tensor that stands for another under a condition.
#[derive(Debug, Clone)]
pub struct Tied {
    /// The tensor that is not stored of its own.
    pub tensor: String,
    /// The tensor it equals.
    pub to: String,
    /// When.
    pub when: Condition,
}

/// Axes divided by each parallel dimension, e.g. `tp -> [P, g, F]` (stored names).
pub type ShardMap = BTreeMap<String, Vec<String>>;

/// A layout table.
#[derive(Debug, Clone)]
pub struct Table {
    /// Name for messages.
    pub name: String,
    /// Model family: tables of one family share canonical tensors and axes.
    pub family: String,
    /// Axis that `--vocab-size` trims.
    pub vocab: Option<String>,
    /// Derived axes.
    pub derived: Derived,
    /// Axes of fixed extent.
    pub fixed: Extents,
    /// Axes of the extent of another: alias -> axis.
    pub aliases: BTreeMap<String, String>,
    /// Shard maps by class; the default one under the empty name.
    pub shards: BTreeMap<String, ShardMap>,
    /// Axes of which several ranks may share one position, each with the axis along which they divide it.
    pub shared: BTreeMap<String, String>,
    /// Axes of generic rules that `tp` divides, which are in its shard map too.
    pub divided: HashSet<String>,
    /// Stored tensors.
    pub entries: Vec<Entry>,
    /// Names below which rules hold again.
    pub repeats: Vec<Repeat>,
    /// Canonical tensors that may be the same.
    pub tied: Vec<Tied>,
    /// What it says of configs.
    pub config: Config,
    /// What precedes the model's own names: one spelling, or several as `(a|b)`.
    pub prefix: Option<String>,
    /// Names that pass as they are.
    pub keep: Vec<glob::Pattern>,
    /// What its readers say of the models of each `model_type`: the engine takes no notice of it, and no table inherits it.
    pub models: BTreeMap<String, serde_json::Value>,
}

impl Table {
    /// Takes the derived and fixed axes of another table of the family that this one does not have: where
    /// one takes an axis apart, as rope in interleaved pairs does, both must, to meet in the same axes.
    pub fn share_axes(&mut self, other: &Table) {
        for (name, factors) in &other.derived {
            if !self.derived.contains_key(name) && !self.fixed.contains_key(name) {
                self.derived.insert(name.clone(), factors.clone());
                let mut used = Vec::new();
                expr::names_in(factors, &other.derived, &mut used);
                for (axis, extent) in used.iter().filter_map(|axis| other.fixed.get_key_value(axis)) {
                    self.fixed.entry(axis.clone()).or_insert(*extent);
                }
            }
        }
    }

    /// A table without rules, to be filled with pass-through entries.
    pub fn generic() -> Table {
        Table {
            name: "generic".into(),
            family: "generic".into(),
            vocab: None,
            derived: Derived::new(),
            fixed: Extents::new(),
            aliases: BTreeMap::new(),
            shards: BTreeMap::from([(String::new(), ShardMap::new())]),
            shared: BTreeMap::new(),
            divided: HashSet::new(),
            entries: Vec::new(),
            repeats: Vec::new(),
            tied: Vec::new(),
            config: Config::default(),
            prefix: None,
            keep: Vec::new(),
            models: BTreeMap::new(),
        }
    }

    /// An axis of a tensor that only a generic rule names (`resolve::generic_entry`): the tensor, and the dimension.
    pub fn generic_axis(&self, axis: &str) -> Option<(&str, usize)> {
        let (entry, d) = axis.split_once('#')?;
        // Of a part of a fused dimension too.
        let d = d.split_once('.').map_or(d, |(d, _)| d);
        let entry = self.entries.get(entry.parse::<usize>().ok()?)?;
        Some((entry.name.text(), d.parse().ok()?))
    }

    /// The largest number of ranks that may share one position of an axis, if they may.
    pub fn ranks_of_one(&self, axis: &str, extents: &Extents) -> Option<u64> {
        extents.get(self.shared.get(axis)?).copied()
    }

    /// Degree by which the stored extent of `axis` is divided in entries of `class`, with the
    /// parallel dimension that divides it.
    pub fn divided_by(&self, class: &str, axis: &str) -> Option<&str> {
        // As many as tensors: not looked for one after another.
        if axis.contains('#') {
            return self.divided.contains(axis).then_some("tp");
        }
        let map = self.shards.get(class)?;
        map.iter().find(|(_, axes)| axes.iter().any(|a| a == axis)).map(|(dimension, _)| dimension.as_str())
    }
}

/// The stored extent's name of an axis as it stands in a shape: `P` of `V~P`.
pub(super) fn stored_axis(axis: &str) -> String {
    axis.rsplit('~').next().unwrap_or(axis).trim().to_string()
}

/// The stored extent's name of a real axis in a shape (`P` for `V` in `V~P`).
pub(crate) fn stored_name(shape: &Shape, axis: &str) -> String {
    fn find(factors: &[Factor], axis: &str) -> Option<String> {
        factors.iter().find_map(|factor| match factor {
            Factor::Axis { name, padded } if name == axis => {
                Some(padded.clone().unwrap_or_else(|| name.clone()))
            }
            Factor::Axis { .. } => None,
            Factor::Alternatives(alternatives) => {
                alternatives.iter().find_map(|(_, inner)| find(inner, axis))
            }
        })
    }
    shape.dims.iter().find_map(|dim| find(dim, axis)).unwrap_or_else(|| axis.to_string())
}

/// The error for a table.
fn bad(table: &str, message: String) -> Error {
    Finding::new(codes::BAD_LAYOUT, format!("layout {table}: {message}"))
        .help("see the rule language in docs/layouts.md")
        .into()
}

/// The error for a rule of a table.
fn bad_rule(table: &str, rule: &str, message: String) -> Error {
    bad(table, format!("tensor {rule:?}: {message}"))
}
