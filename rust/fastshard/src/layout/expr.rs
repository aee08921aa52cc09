//! Shape expressions: dimensions as products of named axes and tagged alternatives.
//!
//! ```text
//! shape   := '[' (dim (',' dim)*)? ']'
//! dim     := factor ('*' factor)*
//! factor  := NAME | NAME '~' NAME | NAME 'in' NAME | '1' | '(' alt ('|' alt)* ')'
//! alt     := NAME ':' dim
//! ```
//! `V~P` is an axis of real extent `V` stored with extent `P`. `(q:r|k:1|v:1)` is a concatenation. `L in moe`
//! are the positions of a set, one after another: their number is an extent of that name.
//! A lowered expression is a list of [`Atom`]s: one per choice of alternatives, each an affine map
//! from named axes to the tensor's dimensions.

use std::collections::BTreeMap;
use std::fmt;

use super::axis_words::Size;

/// Extents of axes by name.
pub type Extents = BTreeMap<String, u64>;

/// Derived axes: expanded wherever they occur, so that both sides of a rule meet in primitive axes.
pub type Derived = BTreeMap<String, Vec<Factor>>;

/// Deepest nesting of parentheses and derived axes.
const MAX_DEPTH: usize = 16;
/// Most atoms of one expression.
pub const MAX_ATOMS: usize = 256;

/// One factor of a dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Factor {
    /// An axis; `padded` names the stored extent where it is larger than the real one.
    Axis {
        /// Name of the axis (its real extent).
        name: String,
        /// Name of the stored extent, for `V~P`; for `L in moe` that itself.
        padded: Option<String>,
    },
    /// Tagged alternatives, laid one after another.
    Alternatives(Vec<(String, Vec<Factor>)>),
}

/// A shape expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// One product of factors per dimension; an empty product has extent 1.
    pub dims: Vec<Vec<Factor>>,
}

/// Where an axis lies in a tensor: `index in dimension dim += stride * position on the axis`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Dimension of the tensor.
    pub dim: usize,
    /// Step in that dimension per step on the axis.
    pub stride: u64,
}

/// One choice of alternatives of an expression, lowered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Atom {
    /// Tags chosen in the expression itself, outermost first.
    pub tags: Vec<String>,
    /// Tags chosen inside derived axes.
    pub derived_tags: Vec<String>,
    /// Index in each dimension where the atom begins.
    pub base: Vec<u64>,
    /// Axes in the order of the expression, with their places.
    pub axes: Vec<(String, Place)>,
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

type Parsed<T> = Result<T, String>;

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn eat(&mut self, c: char) -> bool {
        self.skip_space();
        let hit = self.rest().starts_with(c);
        if hit {
            self.at += c.len_utf8();
        }
        hit
    }

    fn eat_in(&mut self) -> bool {
        self.skip_space();
        let hit = self.rest().strip_prefix("in").is_some_and(|rest| rest.starts_with(char::is_whitespace));
        self.at += if hit { 2 } else { 0 };
        hit
    }

    fn fail<T>(&self, wanted: &str) -> Parsed<T> {
        let rest: String = self.rest().chars().take(12).collect();
        Err(format!("{:?}: expected {wanted} at character {} ({rest:?})", self.text, self.at))
    }

    fn word(&mut self) -> Parsed<&'a str> {
        self.skip_space();
        let rest = self.rest();
        let len = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
        if len == 0 {
            return self.fail("a name");
        }
        self.at += len;
        Ok(&rest[..len])
    }

    fn dim(&mut self, depth: usize) -> Parsed<Vec<Factor>> {
        if depth > MAX_DEPTH {
            return Err(format!("{:?}: nested deeper than {MAX_DEPTH}", self.text));
        }
        let mut factors = Vec::new();
        loop {
            if self.eat('(') {
                let mut alternatives: Vec<(String, Vec<Factor>)> = Vec::new();
                loop {
                    let tag = self.word()?.to_string();
                    if !self.eat(':') {
                        return self.fail("':' after the tag");
                    }
                    if alternatives.iter().any(|(t, _)| *t == tag) {
                        return Err(format!("{:?}: the tag {tag:?} appears twice", self.text));
                    }
                    alternatives.push((tag, self.dim(depth + 1)?));
                    if !self.eat('|') {
                        break;
                    }
                }
                if !self.eat(')') {
                    return self.fail("')'");
                }
                factors.push(Factor::Alternatives(alternatives));
            } else {
                let name = self.word()?;
                if name.starts_with(|c: char| c.is_ascii_digit()) {
                    // Any other number would be an axis without a name, which no other side can match.
                    if name != "1" {
                        return Err(format!(
                            "{:?}: name the axis of extent {name} (axes: t = {name})",
                            self.text
                        ));
                    }
                } else if self.eat('~') {
                    let padded = self.word()?.to_string();
                    factors.push(Factor::Axis { name: name.to_string(), padded: Some(padded) });
                } else if self.eat_in() {
                    let padded = Some(extent_in(name, self.word()?));
                    factors.push(Factor::Axis { name: name.to_string(), padded });
                } else {
                    factors.push(Factor::Axis { name: name.to_string(), padded: None });
                }
            }
            if !self.eat('*') {
                return Ok(factors);
            }
        }
    }
}

/// Parses a product of factors, e.g. `(rot:t*c|pass:p)`.
pub fn parse_dim(text: &str) -> Parsed<Vec<Factor>> {
    let mut parser = Parser { text, at: 0 };
    let dim = parser.dim(0)?;
    parser.skip_space();
    if parser.rest().is_empty() {
        Ok(dim)
    } else {
        parser.fail("the end")
    }
}

/// Parses a shape, e.g. `[g*(q:r|k:1|v:1)*d, H]`.
pub fn parse_shape(text: &str) -> Parsed<Shape> {
    let mut parser = Parser { text, at: 0 };
    if !parser.eat('[') {
        return parser.fail("'['");
    }
    let mut dims = Vec::new();
    if !parser.eat(']') {
        loop {
            dims.push(parser.dim(0)?);
            if !parser.eat(',') {
                break;
            }
        }
        if !parser.eat(']') {
            return parser.fail("']'");
        }
    }
    parser.skip_space();
    if !parser.rest().is_empty() {
        return parser.fail("the end");
    }
    Ok(Shape { dims })
}

/// What the number of an axis's positions in a set is called among the extents.
pub fn extent_in(axis: &str, set: &str) -> String {
    format!("{axis} in {set}")
}

/// The axis and the set of such an extent.
pub fn in_set(extent: &str) -> Option<(&str, &str)> {
    extent.split_once(" in ")
}

/// The stored extent of an axis factor.
fn stored<'a>(name: &'a str, padded: &'a Option<String>) -> &'a str {
    padded.as_deref().unwrap_or(name)
}

/// A product as it is written, without spaces.
pub fn written(factors: &[Factor]) -> String {
    let factor = |factor: &Factor| match factor {
        Factor::Axis { name, padded: None } => name.clone(),
        Factor::Axis { padded: Some(of), .. } if in_set(of).is_some() => of.clone(),
        Factor::Axis { name, padded: Some(padded) } => format!("{name}~{padded}"),
        Factor::Alternatives(all) => {
            let all: Vec<String> =
                all.iter().map(|(tag, inner)| format!("{tag}:{}", written(inner))).collect();
            format!("({})", all.join("|"))
        }
    };
    match factors {
        [] => "1".into(),
        factors => factors.iter().map(factor).collect::<Vec<_>>().join("*"),
    }
}

/// The extent of a product under `extents`, or `None` if an axis is unbound or it overflows.
pub fn product(factors: &[Factor], derived: &Derived, extents: &Extents) -> Option<u64> {
    factors.iter().try_fold(1u64, |n, factor| {
        let extent = match factor {
            Factor::Axis { name, padded } => match derived.get(name) {
                Some(inner) => product(inner, derived, extents)?,
                None => *extents.get(stored(name, padded))?,
            },
            Factor::Alternatives(alternatives) => alternatives
                .iter()
                .try_fold(0u64, |sum, (_, inner)| sum.checked_add(product(inner, derived, extents)?))?,
        };
        n.checked_mul(extent)
    })
}

/// Names of the stored extents that a product depends on, derived axes expanded.
pub fn names_in(factors: &[Factor], derived: &Derived, out: &mut Vec<String>) {
    for factor in factors {
        match factor {
            Factor::Axis { name, padded } => match derived.get(name) {
                Some(inner) => names_in(inner, derived, out),
                None => {
                    let name = stored(name, padded).to_string();
                    if !out.contains(&name) {
                        out.push(name);
                    }
                }
            },
            Factor::Alternatives(alternatives) => {
                alternatives.iter().for_each(|(_, inner)| names_in(inner, derived, out));
            }
        }
    }
}

/// Solves `product(factors) == size` for the one axis in `unknown`: products are linear in each axis.
/// `None` if there is no whole, positive solution.
pub fn solve(
    factors: &[Factor],
    derived: &Derived,
    extents: &Extents,
    unknown: &str,
    size: u64,
) -> Option<u64> {
    let mut trial = extents.clone();
    let mut at = |value: u64| {
        trial.insert(unknown.to_string(), value);
        product(factors, derived, &trial)
    };
    let constant = at(0)?;
    let slope = at(1)?.checked_sub(constant)?;
    let rest = size.checked_sub(constant)?;
    if slope == 0 || rest % slope != 0 {
        return None;
    }
    Some(rest / slope)
}

#[derive(Clone, Default)]
struct Partial {
    tags: Vec<String>,
    derived_tags: Vec<String>,
    base: u64,
    /// (axis, stride), innermost first
    axes: Vec<(String, u64)>,
}

/// All atoms of a product, and its extent; factors are walked from the innermost outwards.
fn lower_product(
    factors: &[Factor],
    derived: &Derived,
    extents: &Extents,
    inside_derived: bool,
    depth: usize,
) -> Parsed<(Vec<Partial>, u64)> {
    if depth > MAX_DEPTH {
        return Err(format!("derived axes nested deeper than {MAX_DEPTH}: do they refer to themselves?"));
    }
    let too_large = || "the extents of the expression overflow".to_string();
    let mut partials = vec![Partial::default()];
    let mut size = 1u64;
    for factor in factors.iter().rev() {
        let alternatives: Vec<(Option<&str>, Vec<Partial>, u64)> = match factor {
            Factor::Axis { name, padded } => {
                if let Some(inner) = derived.get(name) {
                    let (inner, extent) = lower_product(inner, derived, extents, true, depth + 1)?;
                    vec![(None, inner, extent)]
                } else {
                    let key = stored(name, padded);
                    let extent = *extents.get(key).ok_or_else(|| format!("{} is not known", Size(key)))?;
                    let axis = Partial { axes: vec![(name.clone(), 1)], ..Partial::default() };
                    vec![(None, vec![axis], extent)]
                }
            }
            Factor::Alternatives(alternatives) => alternatives
                .iter()
                .map(|(tag, inner)| {
                    let (inner, extent) = lower_product(inner, derived, extents, inside_derived, depth + 1)?;
                    Ok((Some(tag.as_str()), inner, extent))
                })
                .collect::<Parsed<_>>()?,
        };
        let mut next = Vec::new();
        let mut offset = 0u64;
        for (tag, inner, extent) in &alternatives {
            for choice in inner {
                for outer in &partials {
                    let mut merged = outer.clone();
                    merged.base += (offset + choice.base).checked_mul(size).ok_or_else(too_large)?;
                    for (axis, stride) in &choice.axes {
                        merged.axes.push((axis.clone(), stride.checked_mul(size).ok_or_else(too_large)?));
                    }
                    let mut tags: Vec<String> = choice.tags.clone();
                    let mut derived_tags: Vec<String> = choice.derived_tags.clone();
                    if let Some(tag) = tag {
                        let list = if inside_derived { &mut derived_tags } else { &mut tags };
                        list.insert(0, (*tag).to_string());
                    }
                    merged.tags.splice(0..0, tags);
                    merged.derived_tags.splice(0..0, derived_tags);
                    next.push(merged);
                }
            }
            offset = offset.checked_add(*extent).ok_or_else(too_large)?;
            if next.len() > MAX_ATOMS {
                return Err(format!("more than {MAX_ATOMS} combinations of alternatives"));
            }
        }
        partials = next;
        size = size.checked_mul(offset).ok_or_else(too_large)?;
    }
    Ok((partials, size))
}

impl Shape {
    /// Extents of the dimensions, `None` where an axis is unbound.
    pub fn extents(&self, derived: &Derived, extents: &Extents) -> Vec<Option<u64>> {
        self.dims.iter().map(|dim| product(dim, derived, extents)).collect()
    }

    /// Lowers to atoms. `extents` are the stored (local) extents of every axis in the expression.
    ///
    /// # Errors
    /// An axis without extent, an axis twice in one atom, or more combinations than allowed.
    pub fn lower(&self, derived: &Derived, extents: &Extents) -> Result<Vec<Atom>, String> {
        let mut atoms =
            vec![Atom { tags: Vec::new(), derived_tags: Vec::new(), base: Vec::new(), axes: Vec::new() }];
        for (d, dim) in self.dims.iter().enumerate() {
            let (choices, _) = lower_product(dim, derived, extents, false, 0)?;
            let mut next = Vec::with_capacity(atoms.len() * choices.len());
            for atom in &atoms {
                for choice in &choices {
                    let mut merged = atom.clone();
                    merged.tags.extend(choice.tags.iter().cloned());
                    merged.derived_tags.extend(choice.derived_tags.iter().cloned());
                    merged.base.push(choice.base);
                    for (axis, stride) in choice.axes.iter().rev() {
                        if merged.axes.iter().any(|(a, _)| a == axis) {
                            return Err(format!("{self}: axis {axis} appears twice in one alternative"));
                        }
                        merged.axes.push((axis.clone(), Place { dim: d, stride: *stride }));
                    }
                    next.push(merged);
                }
            }
            if next.len() > MAX_ATOMS {
                return Err(format!("{self}: more than {MAX_ATOMS} combinations of alternatives"));
            }
            atoms = next;
        }
        Ok(atoms)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dim) in self.dims.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            f.write_str(&written(dim))?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents(pairs: &[(&str, u64)]) -> Extents {
        pairs.iter().map(|(n, v)| (n.to_string(), *v)).collect()
    }

    #[test]
    fn parses_and_prints() {
        for text in [
            "[]",
            "[V~P, H]",
            "[g*(q:r|k:1|v:1)*d, H]",
            "[(q:g*r|k:g|v:g)*d]",
            "[(a:(x:b|y:c)|z:1)]",
            "[L in moe, (a:L in b|c:1)]",
        ] {
            assert_eq!(parse_shape(text).unwrap().to_string(), text);
        }
        for bad in
            ["", "[", "[H", "[2*H]", "[(q:r|q:k)]", "[H]]", "[H,]", "[(q r)]", "[H*]", "[L in]", "[L inn]"]
        {
            assert!(parse_shape(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn megatron_qkv_atoms() {
        let e = extents(&[("g", 4), ("r", 2), ("d", 8), ("H", 64)]);
        let shape = parse_shape("[g*(q:r|k:1|v:1)*d, H]").unwrap();
        assert_eq!(shape.extents(&Derived::new(), &e), vec![Some(128), Some(64)]);
        let atoms = shape.lower(&Derived::new(), &e).unwrap();
        assert_eq!(atoms.len(), 3);
        let k = atoms.iter().find(|a| a.tags == ["k"]).unwrap();
        assert_eq!(k.base, [16, 0]);
        let names: Vec<&str> = k.axes.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(names, ["g", "d", "H"]);
        assert_eq!(k.axes[0].1, Place { dim: 0, stride: 32 });
    }

    #[test]
    fn derived_axes_with_alternatives() {
        let derived: Derived = [("d".to_string(), parse_dim("(rot:t*c|pass:p)").unwrap())].into();
        let e = extents(&[("h", 2), ("t", 2), ("c", 3), ("p", 4)]);
        let atoms = parse_shape("[h*(q:1|k:1)*d]").unwrap().lower(&derived, &e).unwrap();
        let find = |tag: &str, inner: &str| {
            atoms.iter().find(|a| a.tags == [tag] && a.derived_tags == [inner]).unwrap().clone()
        };
        assert_eq!(atoms.len(), 4);
        assert_eq!(find("k", "pass").base, [16]);
        assert_eq!(find("q", "rot").axes[1], ("t".to_string(), Place { dim: 0, stride: 3 }));
    }

    #[test]
    fn solves_linear_equations() {
        let shape = parse_shape("[(q:g*r|k:g|v:g)*d]").unwrap();
        let e = extents(&[("r", 2), ("d", 8)]);
        assert_eq!(solve(&shape.dims[0], &Derived::new(), &e, "g", 128), Some(4));
        assert_eq!(solve(&shape.dims[0], &Derived::new(), &e, "g", 130), None);
    }
}
