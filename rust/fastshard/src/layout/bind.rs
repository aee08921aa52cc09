//! Fixes the extents of axes from shapes and configs.
//!
//! Each dimension of each stored tensor is one equation between axis extents and a number. Where
//! one axis of an equation is unknown it is solved; every solution is a vote, so that one shard of
//! another size is told apart from the many that agree, with or without a config.

use std::collections::BTreeMap;

use super::axis_words::Size;
use super::expr::{self, Extents, Factor};
use super::table::{Entry, Table};
use crate::codes;
use crate::error::{Finding, Severity};

/// Stored tensors of one rule and one local shape.
#[derive(Debug, Clone)]
pub struct Group {
    /// Index of the entry in the table.
    pub entry: usize,
    /// Shape as stored on one rank.
    pub shape: Vec<u64>,
    /// How many stored tensors.
    pub count: u64,
    /// A tensor of the group, for messages.
    pub witness: String,
    /// File of the witness.
    pub file: String,
}

/// What is known from outside the tensors.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// Stored extents by axis name, from configs and metadata.
    pub extents: Extents,
    /// Parallel degrees, e.g. `tp -> 2`.
    pub degrees: BTreeMap<String, u64>,
}

impl Known {
    /// The degree of a parallel dimension, 1 if not given.
    pub fn degree(&self, dimension: &str) -> u64 {
        self.degrees.get(dimension).copied().unwrap_or(1).max(1)
    }
}

/// A dimension of which several ranks share one position of an axis: each holds an equal share of the full dimension.
#[derive(Debug)]
pub struct Share {
    /// The axis, which has fewer positions than there are ranks.
    axis: String,
    /// The parallel dimension.
    pub dimension: String,
    /// Its degree.
    pub degree: u64,
}

/// Extents on one rank, per shard class: divided axes by their degree, but for those of which ranks share positions.
#[derive(Debug)]
pub struct Local {
    by_class: BTreeMap<String, (Extents, Vec<Share>)>,
    /// Axes that do not divide, as findings.
    pub findings: Vec<Finding>,
}

impl Local {
    /// Divides `extents` for every class of the table.
    pub fn new(table: &Table, extents: &Extents, known: &Known) -> Local {
        let mut findings = Vec::new();
        let mut by_class = BTreeMap::new();
        for (class, map) in &table.shards {
            let (mut local, mut shares) = (extents.clone(), Vec::new());
            for (dimension, axes) in map {
                let degree = known.degree(dimension);
                for axis in axes {
                    let Some(&extent) = extents.get(axis) else { continue };
                    let ranks_of_one = table.ranks_of_one(axis, extents).filter(|_| extent > 0);
                    if ranks_of_one.is_some_and(|most| {
                        degree > extent
                            && degree.is_multiple_of(extent)
                            && most.is_multiple_of(degree / extent)
                    }) {
                        shares.push(Share { axis: axis.clone(), dimension: dimension.clone(), degree });
                        continue;
                    }
                    if !extent.is_multiple_of(degree) {
                        findings.push(not_divisible(table, axis, extent, dimension, degree, ranks_of_one));
                    }
                    local.insert(axis.clone(), extent / degree);
                }
            }
            by_class.insert(class.clone(), (local, shares));
        }
        Local { by_class, findings }
    }

    /// Extents on one rank for entries of `class`.
    pub fn of(&self, class: &str) -> &Extents {
        &self.by_class[class].0
    }

    /// True for an axis of which ranks share positions in entries of `class`.
    pub fn is_shared(&self, class: &str, axis: &str) -> bool {
        self.by_class[class].1.iter().any(|share| share.axis == axis)
    }

    /// The share that a rank holds of a dimension, if ranks share positions of one of its axes.
    pub fn share_of(&self, table: &Table, class: &str, dim: &[Factor]) -> Option<&Share> {
        let shares = &self.by_class[class].1;
        if shares.is_empty() {
            return None;
        }
        let mut names = Vec::new();
        expr::names_in(dim, &table.derived, &mut names);
        shares.iter().find(|share| names.contains(&share.axis))
    }

    /// The extent of each dimension of an entry's tensors on one rank; None for a dimension with an unbound axis.
    pub fn shape(&self, table: &Table, entry: &Entry) -> Option<Vec<Option<u64>>> {
        let dims = &entry.shape.as_ref()?.dims;
        let extent = |dim: &Vec<Factor>| {
            let full = expr::product(dim, &table.derived, self.of(&entry.class))?;
            Some(full / self.share_of(table, &entry.class, dim).map_or(1, |share| share.degree))
        };
        Some(dims.iter().map(extent).collect())
    }
}

#[derive(Default)]
struct Votes {
    /// value -> (tensors, distinct groups, witness)
    by_value: BTreeMap<u64, (u64, u64, String)>,
}

impl Votes {
    fn add(&mut self, value: u64, group: &Group) {
        let slot = self.by_value.entry(value).or_insert_with(|| (0, 0, group.witness.clone()));
        slot.0 += group.count;
        slot.1 += 1;
    }

    fn winner(&self) -> Option<u64> {
        self.by_value.iter().max_by_key(|(value, votes)| (votes.0, **value)).map(|(value, _)| *value)
    }
}

/// Votes of all groups on axes without extent that are alone unknown in an equation.
fn votes(table: &Table, groups: &[Group], extents: &Extents, known: &Known) -> BTreeMap<String, Votes> {
    let local = Local::new(table, extents, known);
    let mut votes: BTreeMap<String, Votes> = BTreeMap::new();
    for group in groups {
        let entry = &table.entries[group.entry];
        let Some(shape) = &entry.shape else { continue };
        if shape.dims.len() != group.shape.len() {
            continue;
        }
        let extents = local.of(&entry.class);
        for (dim, &size) in shape.dims.iter().zip(&group.shape) {
            let ranks = local.share_of(table, &entry.class, dim).map_or(1, |share| share.degree);
            let size = size.saturating_mul(ranks);
            let mut names = Vec::new();
            expr::names_in(dim, &table.derived, &mut names);
            let unknown: Vec<&String> = names.iter().filter(|n| !extents.contains_key(*n)).collect();
            let [axis] = unknown[..] else { continue };
            let degree = table.divided_by(&entry.class, axis).map_or(1, |dimension| known.degree(dimension));
            let value =
                expr::solve(dim, &table.derived, extents, axis, size).and_then(|v| v.checked_mul(degree));
            if let Some(value) = value {
                votes.entry(axis.clone()).or_default().add(value, group);
            }
        }
    }
    votes
}

/// Binds every axis that shapes or configs fix. Returns the stored extents and findings about
/// configs that the tensors contradict as one.
pub fn bind(table: &Table, groups: &[Group], known: &Known) -> (Extents, Vec<Finding>) {
    let mut extents = table.fixed.clone();
    extents.extend(known.extents.iter().map(|(k, v)| (k.clone(), *v)));
    let mut findings = Vec::new();

    // A config that all tensors contradict alike is one finding about the config, not one per tensor.
    for (axis, &given) in &known.extents {
        let mut others = extents.clone();
        others.remove(axis);
        // Shapes vote on what a derived axis is made of.
        let made_of = part_of(table, &others, axis);
        let voted = made_of.as_ref().map_or(axis, |(part, _)| part);
        let times = made_of.as_ref().map_or(1, |(_, times)| *times);
        let Some(mut votes) = votes(table, groups, &others, known).remove(voted) else { continue };
        votes.by_value =
            votes.by_value.into_iter().map(|(n, vote)| (n.saturating_mul(times), vote)).collect();
        if let [(&value, (count, distinct, witness))] = votes.by_value.iter().collect::<Vec<_>>()[..] {
            let sliced =
                value < given && table.shards.values().any(|m| m.values().flatten().any(|a| a == axis));
            if value != given && *distinct > 1 && !sliced {
                findings.push(
                    Finding::new(
                        codes::CONFIG_DISAGREES,
                        format!("{} of the {} layout", size_of(table, axis), table.name),
                    )
                    .tensor(witness)
                    .expected(
                        format!("{given} as the config says"),
                        format!("{value} in all {count} tensors that have it"),
                    )
                    .help("pass the config of this checkpoint")
                    .run("--config FILE"),
                );
                extents.insert(axis.clone(), value);
            }
        }
    }

    loop {
        let mut progress = false;
        // A derived axis of known extent is an equation over its factors.
        for (name, factors) in &table.derived {
            let Some(&size) = extents.get(name) else { continue };
            let mut names = Vec::new();
            expr::names_in(factors, &table.derived, &mut names);
            let unknown: Vec<String> = names.into_iter().filter(|n| !extents.contains_key(n)).collect();
            if let [axis] = &unknown[..] {
                if let Some(value) = expr::solve(factors, &table.derived, &extents, axis, size) {
                    extents.insert(axis.clone(), value);
                    progress = true;
                }
            }
        }
        for (axis, votes) in votes(table, groups, &extents, known) {
            if let Some(value) = votes.winner() {
                extents.insert(axis, value);
                progress = true;
            }
        }
        if !progress {
            for (name, factors) in &table.derived {
                if let Some(size) = expr::product(factors, &table.derived, &extents) {
                    extents.entry(name.clone()).or_insert(size);
                }
            }
            for (alias, of) in &table.aliases {
                if let Some(&size) = extents.get(of) {
                    extents.insert(alias.clone(), size);
                }
            }
            return (extents, findings);
        }
    }
}

/// The one factor of a derived axis without extent, and the extent of the others together.
fn part_of(table: &Table, extents: &Extents, axis: &str) -> Option<(String, u64)> {
    let factors = table.derived.get(axis)?;
    let mut names = Vec::new();
    expr::names_in(factors, &table.derived, &mut names);
    let mut unknown = names.into_iter().filter(|name| !extents.contains_key(name));
    let (part, None) = (unknown.next()?, unknown.next()) else { return None };
    let mut one = extents.clone();
    one.insert(part.clone(), 1);
    Some((part, expr::product(factors, &table.derived, &one)?))
}

/// Compares one stored tensor's shape with the bound extents.
pub fn check_shape(
    table: &Table,
    entry: usize,
    shape: &[u64],
    local: &Local,
    known: &Known,
) -> Option<Finding> {
    let entry = &table.entries[entry];
    let expression = entry.shape.as_ref()?;
    let want = local.shape(table, entry)?;
    if want.len() == shape.len() && want.iter().zip(shape).all(|(w, s)| w.is_none_or(|w| w == *s)) {
        return None;
    }
    let wanted: Vec<String> =
        want.iter().map(|w| w.map_or_else(|| "?".to_string(), |w| w.to_string())).collect();
    let (code, what) = match known.extents.is_empty() {
        true => (codes::AXIS_CONFLICT, "the shape contradicts the shapes of other tensors"),
        false => (codes::SHAPE, "the shape does not fit the model"),
    };
    let finding = Finding::new(code, what).expected(format!("[{}]", wanted.join(", ")), format!("{shape:?}"));
    let misfits = want.iter().zip(shape).filter(|(want, got)| want.is_some_and(|want| want != **got)).count();
    for (d, (want, &got)) in want.iter().zip(shape).enumerate() {
        // A slice has all other sizes of the full tensor.
        let Some(want) = want.filter(|_| misfits == 1) else { continue };
        let divided = {
            let mut names = Vec::new();
            expr::names_in(&expression.dims[d], &table.derived, &mut names);
            names
                .iter()
                .find_map(|n| table.divided_by(&entry.class, n).map(|dim| (n.clone(), dim.to_string())))
        };
        if let Some((axis, dimension)) = divided {
            if let Some(slice) = explain_slice(want, got, known.degree(&dimension)) {
                let vocabulary = table.vocab.as_deref() == Some(&axis)
                    || expression
                        .to_string()
                        .contains(&format!("{}~{axis}", table.vocab.as_deref().unwrap_or("?")));
                let what = if vocabulary { "vocabulary" } else { "tensor-parallel" };
                return Some(
                    Finding { code: codes::SLICE_AS_WHOLE, ..finding }
                        .severity(Severity::Error)
                        .with_message(format!(
                            "1 of {} {what} shards was saved as the full tensor: {} of {want} {} are lost",
                            slice.shards,
                            want - got,
                            match d {
                                0 => "rows",
                                1 => "columns",
                                _ => "indices of a dimension",
                            },
                        ))
                        .evidence(format!(
                            "{} x {got} = {}{}",
                            slice.shards,
                            slice.shards * got,
                            padding(want, got, slice.shards)
                        ))
                        .help("copy the file from the original checkpoint; or merge the slices of all ranks, as tp_rank_00.safetensors, tp_rank_01.safetensors, ... in one directory with config.json; or save again with a version of the framework that gathers this tensor"),
                );
            }
        }
    }
    let help = if known.extents.is_empty() {
        "copy the files of all ranks from one run; most tensors agree on the extents expected here, but this shard is from another run or degree, or a rank is missing"
    } else {
        "copy this file again, or pass this model's config with --config; the file is from another run or degree, or the config is another model's"
    };
    Some(finding.help(help))
}

/// A finding that names the degrees that would work.
fn not_divisible(
    table: &Table,
    axis: &str,
    extent: u64,
    dimension: &str,
    degree: u64,
    ranks_of_one: Option<u64>,
) -> Finding {
    let divisors = |n: u64| (1..=n.min(1024)).filter(move |d| n.is_multiple_of(*d));
    let shared = divisors(ranks_of_one.unwrap_or(1)).skip(1).map(|ranks| extent.saturating_mul(ranks));
    let fits: Vec<String> = divisors(extent).chain(shared).map(|degree| degree.to_string()).collect();
    let what = match table.generic_axis(axis) {
        Some((tensor, d)) => format!("dimension {d} of {tensor}"),
        None => size_of(table, axis),
    };
    Finding::new(codes::NOT_DIVISIBLE, format!("{what}, which is {extent}, over {dimension} {degree}"))
        .expected(format!("a degree among {}", fits.join(", ")), degree)
        .help(format!("choose --{dimension} among these, or a checkpoint saved with one of them"))
}

/// How `want` rows became `shards` parts of `got`: the rules for padding a vocabulary that fit.
fn padding(want: u64, got: u64, shards: u64) -> String {
    let whole = shards * got;
    if whole == want {
        return String::new();
    }
    let fits: Vec<String> =
        multiples(want, whole, shards).take(2).map(|m| format!("{m} x {shards}")).collect();
    format!(" = {want} padded to a multiple of {}", fits.join(" or "))
}

/// What each shard of a vocabulary of `want` rows was padded to a multiple of, if `shards` of them are `whole` rows.
fn multiples(want: u64, whole: u64, shards: u64) -> impl Iterator<Item = u64> {
    // ColossalAI pads to 64 x tp, Megatron-LM and GPT-NeoX to 128 x tp, unless told otherwise.
    [128, 64, 256, 32, 512, 1024, 16, 8, 4, 2, 1]
        .into_iter()
        .filter(move |m| want.next_multiple_of(m * shards) == whole)
}

struct Slice {
    shards: u64,
}

/// Whether `got` rows look like one rank's part of `want`: equal parts, or equal parts of a padded whole.
fn explain_slice(want: u64, got: u64, degree: u64) -> Option<Slice> {
    if degree != 1 || got == 0 || got >= want {
        return None;
    }
    let shards = want.div_ceil(got);
    if shards > 4096 {
        return None;
    }
    // Equal parts exactly, or of a vocabulary that was padded as frameworks do it: any other number is another mistake.
    let whole = shards * got;
    (whole == want || multiples(want, whole, shards).next().is_some()).then_some(Slice { shards })
}

impl Finding {
    fn with_message(mut self, message: String) -> Self {
        self.message = message;
        self
    }
}

/// Names the size of an axis by the key that configs of a table have for it, or in words.
fn size_of(table: &Table, axis: &str) -> String {
    let text = table.config.axes.get(axis).map(|expression| expression.text());
    let key = text.map(|text| text.split_once(" ??").map_or(text, |(key, _)| key));
    match key.filter(|key| key.chars().all(|c| c.is_ascii_alphabetic() || c == '_')) {
        Some(key) => key.to_string(),
        None => Size(axis).to_string(),
    }
}
