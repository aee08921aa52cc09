//! The naive oracle: canonical tensors as dense arrays over named axes, layouts as expressions of
//! its own, and an index loop that looks every stored element up.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use fastshard::tensor::Dtype;

use super::{element, mix, Dice, RankFile, Tensor};

pub type Extents = BTreeMap<String, u64>;

#[derive(Debug, Clone)]
pub enum Factor {
    Axis(String),
    /// Real and stored extent.
    Padded(String, String),
    Alternatives(Vec<(String, Vec<Factor>)>),
}

#[derive(Debug, Clone)]
pub enum Segment {
    Text(String),
    Position(String, i64),
    Extent(String, i64),
    /// Spellings; the first is the one written.
    Choice(Vec<String>),
}

#[derive(Debug, Clone)]
pub struct Rule {
    pub name: Vec<Segment>,
    pub dims: Vec<Vec<Factor>>,
    pub canonical: String,
    pub class: String,
    pub partial: bool,
    /// Which spelling the source uses.
    pub spelling: usize,
}

/// One framework's way to store the family.
#[derive(Debug, Clone, Default)]
pub struct Side {
    pub rules: Vec<Rule>,
    pub derived: BTreeMap<String, Vec<Factor>>,
    /// class -> parallel dimension -> axes
    pub shard: BTreeMap<String, BTreeMap<String, Vec<String>>>,
    pub degrees: Extents,
    pub pad_multiple: Option<u64>,
}

/// A canonical tensor, dense over its axes in the order given.
#[derive(Debug, Clone)]
pub struct Canonical {
    pub axes: Vec<String>,
    pub dtype: Dtype,
    pub bytes: Vec<u8>,
    /// The terms of which it is the sum, by rank; empty if it is none.
    pub terms: Vec<Vec<u8>>,
}

/// A model: real extents and the values of its canonical tensors.
#[derive(Debug, Clone, Default)]
pub struct World {
    pub extents: Extents,
    pub vocab: Option<String>,
    pub tensors: BTreeMap<String, Canonical>,
}

/// What stands beyond the real extent of a padded axis, and which values a partial tensor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Garbage in the padding; the terms of sums.
    Source,
    /// Zeros in the padding; a sum is its first term, the others are -0.0.
    Target,
}

fn print_dim(dim: &[Factor], out: &mut String) {
    if dim.is_empty() {
        out.push('1');
    }
    for (i, factor) in dim.iter().enumerate() {
        if i > 0 {
            out.push('*');
        }
        match factor {
            Factor::Axis(a) => out.push_str(a),
            Factor::Padded(a, p) => write!(out, "{a}~{p}").unwrap(),
            Factor::Alternatives(all) => {
                for (j, (tag, inner)) in all.iter().enumerate() {
                    write!(out, "{}{tag}:", if j == 0 { '(' } else { '|' }).unwrap();
                    print_dim(inner, out);
                }
                out.push(')');
            }
        }
    }
}

impl Rule {
    pub fn name_text(&self) -> String {
        let signed = |n: i64| if n == 0 { String::new() } else { format!("{n:+}") };
        self.name
            .iter()
            .map(|s| match s {
                Segment::Text(t) => t.clone(),
                Segment::Position(a, n) => format!("{{{a}{}}}", signed(*n)),
                Segment::Extent(a, n) => format!("{{#{a}{}}}", signed(*n)),
                Segment::Choice(all) => format!("({})", all.join("|")),
            })
            .collect()
    }

    pub fn name_axes(&self) -> Vec<String> {
        let bound = |s: &Segment| match s {
            Segment::Position(a, _) => Some(a.clone()),
            _ => None,
        };
        self.name.iter().filter_map(bound).collect()
    }

    /// The tensor's name at `at`, numbers counted from `bases`.
    pub fn name_at(&self, at: &Extents, bases: &Extents, extents: &Extents, spelling: usize) -> String {
        self.name
            .iter()
            .map(|s| match s {
                Segment::Text(t) => t.clone(),
                Segment::Position(a, n) => {
                    ((at[a] - bases.get(a).copied().unwrap_or(0)) as i64 + n).to_string()
                }
                Segment::Extent(a, n) => (extents[a] as i64 + n).to_string(),
                Segment::Choice(all) => all[spelling % all.len()].clone(),
            })
            .collect()
    }

    pub fn shape_text(&self) -> String {
        let mut out = String::from("[");
        for (i, dim) in self.dims.iter().enumerate() {
            if i > 0 {
                out.push_str(", ");
            }
            print_dim(dim, &mut out);
        }
        out.push(']');
        out
    }
}

impl Side {
    /// The layout table, as TOML.
    pub fn table(&self, name: &str, vocab: Option<&str>) -> String {
        let mut t = format!("layout = {name:?}\nfamily = \"random\"\n");
        if let Some(vocab) = vocab {
            writeln!(t, "vocab = {vocab:?}").unwrap();
        }
        t.push_str("[axes]\n");
        for (axis, dim) in &self.derived {
            let mut text = String::new();
            print_dim(dim, &mut text);
            writeln!(t, "{axis} = {text:?}").unwrap();
        }
        for (class, map) in &self.shard {
            let head = if class.is_empty() { "[shard]".into() } else { format!("[class.{class}.shard]") };
            writeln!(t, "{head}").unwrap();
            for (dimension, axes) in map {
                writeln!(t, "{dimension} = {axes:?}").unwrap();
            }
        }
        for rule in &self.rules {
            writeln!(t, "[[tensor]]\nname = {:?}\nshape = {:?}", rule.name_text(), rule.shape_text())
                .unwrap();
            writeln!(t, "as = {:?}", rule.canonical).unwrap();
            if !rule.class.is_empty() {
                writeln!(t, "class = {:?}", rule.class).unwrap();
            }
            if rule.partial {
                writeln!(t, "partial = \"tp\"").unwrap();
            }
        }
        t
    }

    pub fn degree(&self, dimension: &str) -> u64 {
        self.degrees.get(dimension).copied().unwrap_or(1)
    }

    /// The dimension that divides an axis in tensors of a class.
    fn divided_by(&self, class: &str, stored_axis: &str) -> Option<&str> {
        let map = self.shard.get(class)?;
        let divides = |axes: &[String]| axes.iter().any(|a| a.rsplit('~').next() == Some(stored_axis));
        map.iter().find(|(_, axes)| divides(axes)).map(|(d, _)| d.as_str())
    }

    pub fn padded(&self, real: u64) -> u64 {
        real.next_multiple_of(self.pad_multiple.unwrap_or(1))
    }
}

/// Everything an element's index says.
#[derive(Debug, Default, Clone)]
struct Decoded {
    tags: Vec<String>,
    derived_tags: Vec<String>,
    at: Extents,
}

struct Local<'a> {
    world: &'a World,
    side: &'a Side,
    class: &'a str,
}

impl Local<'_> {
    fn axis(&self, real: &str, stored: &str) -> u64 {
        let whole = if real == stored {
            self.world.extents[real]
        } else {
            self.side.padded(self.world.extents[real])
        };
        whole / self.side.divided_by(self.class, stored).map_or(1, |d| self.side.degree(d))
    }

    fn factor(&self, factor: &Factor) -> u64 {
        match factor {
            Factor::Axis(a) => match self.side.derived.get(a) {
                Some(inner) => self.dim(inner),
                None => self.axis(a, a),
            },
            Factor::Padded(a, p) => self.axis(a, p),
            Factor::Alternatives(all) => all.iter().map(|(_, inner)| self.dim(inner)).sum(),
        }
    }

    fn dim(&self, dim: &[Factor]) -> u64 {
        dim.iter().map(|f| self.factor(f)).product()
    }

    /// Reads an index along a dimension, the first factor outermost.
    fn decode(&self, dim: &[Factor], mut index: u64, coords: &Extents, derived: bool, out: &mut Decoded) {
        for (i, factor) in dim.iter().enumerate() {
            let inner = self.dim(&dim[i + 1..]);
            let mut at = index / inner;
            index %= inner;
            let mut place = |real: &str, stored: &str, at: u64| {
                let rank = self.side.divided_by(self.class, stored).map_or(0, |d| coords[d]);
                out.at.insert(real.into(), rank * self.axis(real, stored) + at);
            };
            match factor {
                Factor::Axis(a) => match self.side.derived.get(a) {
                    Some(inner) => self.decode(inner, at, coords, true, out),
                    None => place(a, a, at),
                },
                Factor::Padded(a, p) => place(a, p, at),
                Factor::Alternatives(all) => {
                    for (tag, inner) in all {
                        let size = self.dim(inner);
                        if at < size {
                            (if derived { &mut out.derived_tags } else { &mut out.tags }).push(tag.clone());
                            self.decode(inner, at, coords, derived, out);
                            break;
                        }
                        at -= size;
                    }
                }
            }
        }
    }
}

pub fn negative_zero(dtype: Dtype) -> Vec<u8> {
    let mut bytes = vec![0; dtype.size()];
    *bytes.last_mut().unwrap() = 0x80;
    bytes
}

impl World {
    /// One stored tensor on one rank: a loop over its elements.
    pub fn stored(
        &self,
        side: &Side,
        rule: &Rule,
        at: &Extents,
        coords: &Extents,
        role: Role,
    ) -> (Dtype, Vec<u64>, Vec<u8>) {
        let local = Local { world: self, side, class: &rule.class };
        let shape: Vec<u64> = rule.dims.iter().map(|d| local.dim(d)).collect();
        // What each index along each dimension stands for.
        let meaning: Vec<Vec<Decoded>> = rule
            .dims
            .iter()
            .zip(&shape)
            .map(|(dim, &n)| {
                let one = |i| {
                    let mut decoded = Decoded::default();
                    local.decode(dim, i, coords, false, &mut decoded);
                    decoded
                };
                (0..n).map(one).collect()
            })
            .collect();
        let mut bytes = Vec::new();
        let mut dtype = self.dtype_of(rule);
        for flat in 0..shape.iter().product::<u64>() {
            let mut rest = flat;
            let mut index = vec![0; shape.len()];
            for d in (0..shape.len()).rev() {
                index[d] = rest % shape[d];
                rest /= shape[d];
            }
            let mut decoded = Decoded { at: at.clone(), ..Decoded::default() };
            for (d, along) in meaning.iter().enumerate() {
                let here = &along[index[d] as usize];
                decoded.tags.extend(here.tags.iter().cloned());
                decoded.derived_tags.extend(here.derived_tags.iter().cloned());
                decoded.at.extend(here.at.iter().map(|(a, n)| (a.clone(), *n)));
            }
            let mut key = rule.canonical.replace("{}", &decoded.tags.join("."));
            decoded.derived_tags.iter().for_each(|tag| key = format!("{key}/{tag}"));
            let tensor = &self.tensors[&key];
            dtype = tensor.dtype;
            let item = dtype.size();
            let rank = coords.get("tp").copied().unwrap_or(0) as usize;
            if tensor.axes.iter().any(|a| decoded.at[a] >= self.extents[a]) {
                match role {
                    Role::Source => bytes.extend(vec![0x3c; item]),
                    // The neutral term of a sum fills padding as well.
                    Role::Target if rule.partial && rank > 0 => bytes.extend(negative_zero(dtype)),
                    Role::Target => bytes.extend(vec![0; item]),
                }
                continue;
            }
            let mut position = 0;
            for axis in &tensor.axes {
                position = position * self.extents[axis] + decoded.at[axis];
            }
            let range = position as usize * item..(position as usize + 1) * item;
            if rule.partial && role == Role::Source && side.degree("tp") > 1 {
                bytes.extend(&tensor.terms[rank][range]);
            } else if rule.partial && rank > 0 {
                bytes.extend(negative_zero(dtype));
            } else {
                bytes.extend(&tensor.bytes[range]);
            }
        }
        (dtype, shape, bytes)
    }

    fn dtype_of(&self, rule: &Rule) -> Dtype {
        let prefix = rule.canonical.split(".{}").next().unwrap();
        let of = self.tensors.iter().find(|(k, _)| {
            k.as_str() == prefix
                || k.starts_with(&format!("{prefix}."))
                || k.starts_with(&format!("{prefix}/"))
        });
        of.expect("the rule's tensors exist").1.dtype
    }

    /// All positions on the axes bound by a rule's name.
    pub fn positions(&self, rule: &Rule) -> Vec<Extents> {
        let mut all = vec![Extents::new()];
        for axis in rule.name_axes() {
            let extend = |at: &Extents| -> Vec<Extents> {
                (0..self.extents[&axis])
                    .map(|i| at.iter().map(|(a, n)| (a.clone(), *n)).chain([(axis.clone(), i)]).collect())
                    .collect()
            };
            all = all.iter().flat_map(extend).collect();
        }
        all
    }

    /// All ranks of the parallel dimensions of a side, sorted.
    pub fn ranks(side: &Side) -> Vec<Extents> {
        let dimensions: BTreeSet<&String> = side.shard.values().flat_map(|m| m.keys()).collect();
        let mut all = vec![Extents::new()];
        for d in dimensions {
            all = all
                .iter()
                .flat_map(|c| {
                    (0..side.degree(d)).map(move |r| {
                        c.iter().map(|(k, v)| (k.clone(), *v)).chain([(d.clone(), r)]).collect()
                    })
                })
                .collect();
        }
        all
    }

    /// The files that a side writes, one per rank.
    pub fn files(&self, side: &Side, role: Role) -> Vec<RankFile> {
        World::ranks(side)
            .into_iter()
            .map(|coords| {
                let mut tensors = Vec::new();
                for rule in &side.rules {
                    for at in self.positions(rule) {
                        let (dtype, shape, bytes) = self.stored(side, rule, &at, &coords, role);
                        let spelling = if role == Role::Source { rule.spelling } else { 0 };
                        let name = rule.name_at(&at, &Extents::new(), &self.extents, spelling);
                        tensors.push(Tensor { name, dtype, shape, bytes });
                    }
                }
                RankFile { coords, bases: Extents::new(), tensors }
            })
            .collect()
    }

    /// The same cut into pipeline stages: layers in intervals, all else on a stage of its own choice.
    pub fn staged(&self, side: &Side, dice: &mut Dice) -> Vec<RankFile> {
        let layers = self.extents.get("L").copied().unwrap_or(1);
        let stages = 1 + dice.below(layers.min(3));
        let numbered_locally = dice.one_in(2);
        let mut starts: Vec<u64> = vec![0];
        for s in 1..stages {
            let low = starts[s as usize - 1] + 1;
            starts.push(low + dice.below(layers - (stages - s) - low + 1));
        }
        let mut out: Vec<RankFile> = Vec::new();
        let ranks = World::ranks(side);
        let home: Vec<u64> = side.rules.iter().map(|_| dice.below(stages)).collect();
        for stage in 0..stages as usize {
            let (lo, hi) = (starts[stage], starts.get(stage + 1).copied().unwrap_or(layers));
            for coords in &ranks {
                let mut file = RankFile { coords: coords.clone(), ..RankFile::default() };
                file.coords.insert("pp".into(), stage as u64);
                if numbered_locally {
                    file.bases.insert("L".into(), lo);
                }
                for (r, rule) in side.rules.iter().enumerate() {
                    for at in self.positions(rule) {
                        let here = at.get("L").map_or(home[r] == stage as u64, |l| (lo..hi).contains(l));
                        if here {
                            let (dtype, shape, bytes) = self.stored(side, rule, &at, coords, Role::Source);
                            let name = rule.name_at(&at, &file.bases, &self.extents, rule.spelling);
                            file.tensors.push(Tensor { name, dtype, shape, bytes });
                        }
                    }
                }
                out.push(file);
            }
        }
        dice.shuffle(&mut out);
        out
    }
}

// --- random worlds ---------------------------------------------------------------------------

struct Leaf {
    tags: Vec<&'static str>,
    own: Vec<String>,
}

struct Group {
    id: usize,
    common: Vec<String>,
    leaves: Vec<Leaf>,
    partial: bool,
}

/// A case: a model and two ways to store it.
#[derive(Debug)]
pub struct Case {
    pub world: World,
    pub source: Side,
    pub target: Side,
}

fn strings(all: &[&str]) -> Vec<String> {
    all.iter().map(|s| s.to_string()).collect()
}

fn axis_factors(axes: &[String], padded: bool) -> Vec<Factor> {
    let factor = |a: &String| match a.as_str() {
        "V" if padded => Factor::Padded("V".into(), "P".into()),
        _ => Factor::Axis(a.clone()),
    };
    axes.iter().map(factor).collect()
}

/// Distributes factors over some dimensions, in their order.
fn distribute(dice: &mut Dice, factors: Vec<Factor>) -> Vec<Vec<Factor>> {
    let n = 1 + dice.below(4.min(factors.len() as u64 + 1)) as usize;
    let mut dims: Vec<Vec<Factor>> = vec![Vec::new(); n];
    if factors.is_empty() && dice.one_in(2) {
        return Vec::new();
    }
    let mut cut: Vec<usize> = factors.iter().map(|_| dice.below(n as u64) as usize).collect();
    cut.sort_unstable();
    for (d, f) in cut.into_iter().zip(factors) {
        dims[d].push(f);
    }
    dims
}

/// Alternatives of leaves; tags of two words nest.
fn alternatives(dice: &mut Dice, leaves: &[&Leaf], depth: usize, inside: &[String], padded: bool) -> Factor {
    let mut all: Vec<(String, Vec<Factor>)> = Vec::new();
    let mut tags: Vec<&str> = Vec::new();
    leaves.iter().for_each(|l| {
        if !tags.contains(&l.tags[depth]) {
            tags.push(l.tags[depth])
        }
    });
    dice.shuffle(&mut tags);
    for tag in tags {
        let here: Vec<&Leaf> = leaves.iter().copied().filter(|l| l.tags[depth] == tag).collect();
        if here.len() == 1 && here[0].tags.len() == depth + 1 {
            let mut axes = inside.to_vec();
            axes.extend(here[0].own.iter().cloned());
            dice.shuffle(&mut axes);
            all.push((tag.into(), axis_factors(&axes, padded)));
        } else {
            let mut factors = vec![alternatives(dice, &here, depth + 1, &[], padded)];
            let mut axes = inside.to_vec();
            dice.shuffle(&mut axes);
            for factor in axis_factors(&axes, padded) {
                let at = dice.below(factors.len() as u64 + 1) as usize;
                factors.insert(at, factor);
            }
            all.push((tag.into(), factors));
        }
    }
    Factor::Alternatives(all)
}

fn rules(dice: &mut Dice, group: &Group, side: &Side, nameable: &[&str], padded: bool) -> Vec<Rule> {
    let plain = group.leaves[0].tags.is_empty();
    let fused = !plain && dice.one_in(2);
    let sets: Vec<Vec<&Leaf>> = if fused {
        vec![group.leaves.iter().collect()]
    } else {
        group.leaves.iter().map(|l| vec![l]).collect()
    };
    let spell = dice.one_in(4);
    let mut out = Vec::new();
    for set in sets {
        let mut common = group.common.clone();
        // `d` may stand for its factors.
        if side.derived.get("d").is_some_and(|f| f.len() == 2) && dice.one_in(2) {
            if let Some(i) = common.iter().position(|a| a == "d") {
                common.splice(i..=i, strings(&["t", "c"]));
            }
        }
        let mut named: Vec<String> = Vec::new();
        for axis in nameable {
            if let Some(i) = common.iter().position(|a| a == axis) {
                if dice.one_in(2) {
                    named.push(common.remove(i));
                }
            }
        }
        let tags = if fused { "all".to_string() } else { set[0].tags.join("_") };
        let mut name = vec![Segment::Text(format!("g{}_{tags}", group.id))];
        for axis in &named {
            name.push(Segment::Text(".".into()));
            name.push(Segment::Position(axis.clone(), dice.below(4) as i64));
        }
        if dice.one_in(6) && group.common.iter().any(|a| a == "L") {
            name.push(Segment::Text(".of.".into()));
            name.push(Segment::Extent("L".into(), dice.below(4) as i64 - 1));
        }
        if spell {
            name.push(Segment::Choice(strings(&[".weight", ".w", ".scale"])));
        }
        let (dims, canonical) = if fused {
            let (mut inside, mut outside) = (Vec::new(), Vec::new());
            for axis in common {
                if dice.one_in(3) {
                    inside.push(axis)
                } else {
                    outside.push(axis)
                }
            }
            dice.shuffle(&mut outside);
            let mut factors = axis_factors(&outside, padded);
            let at = dice.below(factors.len() as u64 + 1) as usize;
            factors.insert(at, alternatives(dice, &set, 0, &inside, padded));
            (distribute(dice, factors), format!("c{}.{{}}", group.id))
        } else {
            let mut axes = common;
            axes.extend(set[0].own.iter().cloned());
            dice.shuffle(&mut axes);
            let key = if plain {
                format!("c{}", group.id)
            } else {
                format!("c{}.{}", group.id, set[0].tags.join("."))
            };
            (distribute(dice, axis_factors(&axes, padded)), key)
        };
        out.push(Rule {
            name,
            dims,
            canonical,
            class: String::new(),
            partial: group.partial,
            spelling: if spell { dice.below(3) as usize } else { 0 },
        });
    }
    out
}

fn axes_in(dim: &[Factor], derived: &BTreeMap<String, Vec<Factor>>, out: &mut BTreeSet<String>) {
    for f in dim {
        match f {
            Factor::Axis(a) => match derived.get(a) {
                Some(inner) => axes_in(inner, derived, out),
                None => {
                    out.insert(a.clone());
                }
            },
            Factor::Padded(a, p) => {
                out.insert(a.clone());
                out.insert(format!("{a}~{p}"));
            }
            Factor::Alternatives(all) => all.iter().for_each(|(_, inner)| axes_in(inner, derived, out)),
        }
    }
}

/// Chooses which axes each parallel dimension divides.
fn shard(dice: &mut Dice, world: &World, side: &mut Side) {
    let tp = dice.pick(&[1u64, 2, 4, 2]);
    let ep = dice.pick(&[1u64, 1, 1, 2]);
    let any_partial = side.rules.iter().any(|r| r.partial);
    // A sum over one dimension with copies over another is refused.
    let ep = if any_partial && tp > 1 { 1 } else { ep };
    side.degrees = [("tp".to_string(), tp), ("ep".to_string(), ep)].into();
    let classes = if dice.one_in(3) { vec!["", "other"] } else { vec![""] };
    for rule in &mut side.rules {
        rule.class = dice.pick(&classes).to_string();
    }
    for class in classes {
        let mut map: BTreeMap<String, Vec<String>> = [("tp".into(), vec![]), ("ep".into(), vec![])].into();
        let mut candidates = strings(&["A", "B", "C", "F", "V", "V~P", "c", "p", "L"]);
        dice.shuffle(&mut candidates);
        let sets: Vec<(BTreeSet<String>, Vec<String>, bool)> = side
            .rules
            .iter()
            .filter(|r| r.class == class)
            .map(|r| {
                let mut set = BTreeSet::new();
                r.dims.iter().for_each(|d| axes_in(d, &side.derived, &mut set));
                (set, r.name_axes(), r.partial)
            })
            .collect();
        for axis in candidates {
            let dimension = dice.pick(&["tp", "ep", "tp"]);
            let real = axis.split('~').next().unwrap();
            let Some(&extent) = world.extents.get(real) else { continue };
            let padded_somewhere = sets.iter().any(|(s, ..)| s.contains("V~P"));
            let stored = if axis.contains('~') { side.padded(extent) } else { extent };
            let bad = (real == "V" && padded_somewhere != axis.contains('~'))
                || stored % side.degree(dimension) != 0
                || sets.iter().any(|(set, named, partial)| {
                    named.iter().any(|n| n == real)
                        || set.contains(real)
                            && (*partial && dimension == "tp"
                                || map[dimension].iter().any(|a| set.contains(a)))
                });
            if !bad && !dice.one_in(4) {
                map.get_mut(dimension).unwrap().push(axis);
            }
        }
        side.shard.insert(class.into(), map);
    }
}

/// A small number in a float dtype, and its exact value.
fn small(seed: u64, dtype: Dtype) -> (Vec<u8>, f32) {
    let value = match mix(seed) % 8 {
        0 => -0.0,
        1 => 0.0,
        _ => ((mix(seed) >> 20) % 509) as f32 / 16.0 - 15.0,
    };
    encode(dtype, value)
}

/// Rounds to a dtype with the `half` crate; returns the bytes and the value that they stand for.
pub fn encode(dtype: Dtype, value: f32) -> (Vec<u8>, f32) {
    match dtype {
        Dtype::F16 => {
            (half::f16::from_f32(value).to_le_bytes().to_vec(), half::f16::from_f32(value).to_f32())
        }
        Dtype::Bf16 => {
            (half::bf16::from_f32(value).to_le_bytes().to_vec(), half::bf16::from_f32(value).to_f32())
        }
        _ => (value.to_le_bytes().to_vec(), value),
    }
}

/// A random case.
pub fn case(dice: &mut Dice) -> Case {
    let mut world = World::default();
    let mut extent = |name: &str, n: u64| {
        world.extents.insert(name.into(), n);
    };
    for axis in ["A", "B", "F"] {
        extent(axis, dice.pick(&[4, 8, 1, 12]));
    }
    extent("C", dice.pick(&[2, 4, 3]));
    extent("r", 1 + dice.below(3));
    extent("s", 1 + dice.below(4));
    extent("L", dice.pick(&[3, 1, 2, 4]));
    extent("E", 1 + dice.below(3));
    extent("V", 3 + dice.below(14));
    extent("t", 2);
    extent("c", dice.pick(&[2, 4, 3]));
    extent("p", dice.pick(&[4, 1, 2]));
    world.vocab = Some("V".into());

    let rotary = dice.one_in(2);
    let derive = |dice: &mut Dice| -> Vec<Factor> {
        let mut pair = strings(&["t", "c"]);
        dice.shuffle(&mut pair);
        let pair: Vec<Factor> = pair.into_iter().map(Factor::Axis).collect();
        if !rotary {
            return pair;
        }
        let mut all = vec![("rot".to_string(), pair), ("pass".to_string(), vec![Factor::Axis("p".into())])];
        dice.shuffle(&mut all);
        vec![Factor::Alternatives(all)]
    };
    let mut sides = [Side::default(), Side::default()];
    for side in &mut sides {
        side.derived.insert("d".into(), derive(dice));
        side.pad_multiple = dice.pick(&[Some(4), Some(8), None, Some(12)]);
    }

    let mut groups = Vec::new();
    for id in 0..1 + dice.below(4) as usize {
        let mut common = Vec::new();
        for axis in ["A", "B", "C", "d", "L", "E", "V", "s"] {
            if dice.one_in(3) && common.len() < 5 {
                common.push(axis.to_string());
            }
        }
        let leaves = match dice.below(4) {
            0 => vec![Leaf { tags: vec![], own: vec![] }],
            1 => vec![
                Leaf { tags: vec!["q"], own: strings(&["r"]) },
                Leaf { tags: vec!["k"], own: vec![] },
                Leaf { tags: vec!["v"], own: vec![] },
            ],
            2 => vec![
                Leaf { tags: vec!["gate"], own: strings(&["F"]) },
                Leaf { tags: vec!["up"], own: strings(&["F"]) },
            ],
            _ => vec![
                Leaf { tags: vec!["x"], own: strings(&["F"]) },
                Leaf { tags: vec!["y", "a"], own: strings(&["r"]) },
                Leaf { tags: vec!["y", "b"], own: vec![] },
            ],
        };
        // Enough elements for several tiles, few enough for the oracle.
        let size = |axes: &[String]| -> u64 {
            let n = |a: &String| if a == "d" { 2 * world.extents["c"] } else { world.extents[a] };
            axes.iter().map(n).product::<u64>() * 12
        };
        let most = if dice.one_in(12) { 16_000 } else { 2000 };
        while size(&common) > most {
            common.pop();
        }
        let partial = leaves.len() == 1 && dice.one_in(3);
        groups.push(Group { id, common, leaves, partial });
    }
    for side in &mut sides {
        let padded = dice.one_in(2);
        for group in &groups {
            let rules = rules(dice, group, side, &["L", "E"], padded);
            side.rules.extend(rules);
        }
        if !padded {
            side.pad_multiple = None;
        }
        dice.shuffle(&mut side.rules);
        shard(dice, &world, side);
    }
    let [source, target] = sides;

    // Canonical tensors, painted so that no two elements of one case are alike for wide dtypes.
    let mut seed = 1 + dice.below(1 << 30);
    for group in &groups {
        let dtype = if group.partial {
            dice.pick(&[Dtype::F32, Dtype::Bf16, Dtype::F16])
        } else {
            dice.pick(&[Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::I64, Dtype::U8, Dtype::F64, Dtype::C64])
        };
        for leaf in &group.leaves {
            let key = std::iter::once(format!("c{}", group.id))
                .chain(leaf.tags.iter().map(|t| t.to_string()))
                .collect::<Vec<_>>()
                .join(".");
            let mut axes = group.common.clone();
            axes.extend(leaf.own.iter().cloned());
            let mut parts: Vec<(String, Vec<String>)> = vec![(key, axes.clone())];
            if let Some(i) = axes.iter().position(|a| a == "d") {
                let with = |more: &[&str]| -> Vec<String> {
                    let mut axes = axes.clone();
                    axes.splice(i..=i, strings(more));
                    axes
                };
                let key = parts[0].0.clone();
                parts = if rotary {
                    vec![(format!("{key}/rot"), with(&["t", "c"])), (format!("{key}/pass"), with(&["p"]))]
                } else {
                    vec![(key, with(&["t", "c"]))]
                };
            }
            for (key, axes) in parts {
                let n: u64 = axes.iter().map(|a| world.extents[a]).product();
                let (mut bytes, mut terms) = (Vec::new(), Vec::new());
                if group.partial && source.degree("tp") > 1 {
                    terms = vec![Vec::new(); source.degree("tp") as usize];
                    for _ in 0..n {
                        let mut sum = None;
                        for term in &mut terms {
                            seed += 1;
                            let (bits, value) = small(seed, dtype);
                            term.extend(bits);
                            sum = Some(sum.map_or(value, |s: f32| s + value));
                        }
                        bytes.extend(encode(dtype, sum.unwrap()).0);
                    }
                } else {
                    for _ in 0..n {
                        seed += 1;
                        bytes.extend(if group.partial { small(seed, dtype).0 } else { element(seed, dtype) });
                    }
                }
                world.tensors.insert(key, Canonical { axes, dtype, bytes, terms });
            }
        }
    }
    Case { world, source, target }
}
