//! Name patterns: literal text, index variables with an offset, alternative spellings.
//!
//! `{L}` is the position on axis `L`, `{L+2}` that position plus two, `{#L+3}` the extent of `L`
//! plus three, `(weight|scale)` alternative spellings (the first is the one written). `{L in moe}` is a
//! position of the set `moe`, `{L of moe}` its place within that set.

use std::collections::BTreeMap;

use super::sets::{Positions, Sets};

/// What a number in a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Axis.
    pub axis: String,
    /// True for `{#L}`: the extent of the axis, not a position on it.
    pub extent: bool,
    /// Added to the position or extent.
    pub offset: i64,
    /// The set of positions that it is of.
    pub set: Option<String>,
    /// True for `{L of set}`: the place within the set, not the position.
    pub ordinal: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Segment {
    Text(String),
    Variable(Variable),
    Choice(Vec<String>),
}

/// A parsed name pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    text: String,
    /// None for a name that is taken literally.
    segments: Vec<Segment>,
}

/// How a name fits a pattern.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Match {
    /// Position per axis, offsets removed.
    pub index: BTreeMap<String, u64>,
    /// Extent per axis where the pattern has `{#L}`.
    pub extents: BTreeMap<String, u64>,
    /// Places within sets, by axis, which [`Pattern::place`] makes positions of.
    ordinals: BTreeMap<String, u64>,
    /// The spelling taken at each choice.
    pub choices: Vec<usize>,
}

/// Whether a name's positions are of the sets that its pattern asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Membership<'a> {
    /// All are.
    Inside,
    /// This one is not: the set, the axis, and the number in the name.
    Outside(&'a str, &'a str, u64),
    /// The positions of this set are not known.
    Unknown(&'a str),
}

impl Pattern {
    /// Parses a pattern.
    ///
    /// # Errors
    /// Says what is wrong where.
    pub fn parse(text: &str) -> Result<Pattern, String> {
        let mut segments = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let literal = rest.find(['{', '(']).unwrap_or(rest.len());
            if literal > 0 {
                if rest[..literal].contains(['}', ')', '|']) {
                    return Err(format!("{text:?}: unbalanced bracket"));
                }
                segments.push(Segment::Text(rest[..literal].to_string()));
                rest = &rest[literal..];
                continue;
            }
            let close = if rest.starts_with('{') { '}' } else { ')' };
            let end = rest.find(close).ok_or_else(|| format!("{text:?}: no {close:?}"))?;
            let inner = &rest[1..end];
            if close == '}' {
                if matches!(segments.last(), Some(Segment::Variable(_))) {
                    return Err(format!("{text:?}: two numbers side by side cannot be separated"));
                }
                segments.push(Segment::Variable(Variable::parse(inner).ok_or_else(|| {
                    format!("{text:?}: {{{inner}}} is not an axis with an optional offset")
                })?));
            } else {
                segments.push(Segment::Choice(inner.split('|').map(str::to_string).collect()));
            }
            rest = &rest[end + 1..];
        }
        Ok(Pattern { text: text.to_string(), segments })
    }

    /// A pattern that is one name, taken literally.
    pub fn literal(name: &str) -> Pattern {
        Pattern { text: name.to_string(), segments: Vec::new() }
    }

    /// The pattern as written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Variables of the pattern.
    pub fn variables(&self) -> impl Iterator<Item = &Variable> {
        self.segments.iter().filter_map(|s| match s {
            Segment::Variable(v) => Some(v),
            _ => None,
        })
    }

    /// True for a pattern that only its own text matches.
    pub fn is_literal(&self) -> bool {
        match &self.segments[..] {
            [] => true,
            [Segment::Text(only)] => *only == self.text,
            _ => false,
        }
    }

    /// Makes positions of places within sets, and tells whether all positions are of their sets. `bases` are
    /// those of the match: a rank counts the places of a set from its first layer on.
    pub fn place(&self, found: &mut Match, bases: &BTreeMap<String, u64>, sets: &Sets) -> Membership<'_> {
        let mut unknown = None;
        for variable in self.variables() {
            let Some(set) = &variable.set else { continue };
            let axis = &variable.axis;
            let Some(positions) = sets.get(set) else {
                unknown = Some(set);
                continue;
            };
            if variable.ordinal {
                let Some(&place) = found.ordinals.get(axis) else { continue };
                let base = bases.get(axis).copied().unwrap_or(0);
                let at =
                    positions.at(place, base).filter(|at| found.index.get(axis).is_none_or(|old| old == at));
                let Some(at) = at else { return Membership::Outside(set, axis, place) };
                found.index.insert(axis.clone(), at);
            } else if let Some(&at) = found.index.get(axis).filter(|at| !positions.contains(**at)) {
                return Membership::Outside(set, axis, at);
            }
        }
        unknown.map_or(Membership::Inside, |set| Membership::Unknown(set))
    }

    /// Matches a whole name. `bases` is added to positions (stage-local layer numbers).
    pub fn matches(&self, name: &str, bases: &BTreeMap<String, u64>) -> Option<Match> {
        let mut found = Match::default();
        if self.segments.is_empty() {
            return (name == self.text).then_some(found);
        }
        self.step(&self.segments, name, bases, &mut found).then_some(found)
    }

    fn step(
        &self,
        segments: &[Segment],
        name: &str,
        bases: &BTreeMap<String, u64>,
        found: &mut Match,
    ) -> bool {
        let Some((first, others)) = segments.split_first() else { return name.is_empty() };
        match first {
            Segment::Text(text) => {
                name.strip_prefix(text.as_str()).is_some_and(|rest| self.step(others, rest, bases, found))
            }
            Segment::Choice(choices) => {
                for (i, choice) in choices.iter().enumerate() {
                    if let Some(rest) = name.strip_prefix(choice.as_str()) {
                        found.choices.push(i);
                        if self.step(others, rest, bases, found) {
                            return true;
                        }
                        found.choices.pop();
                    }
                }
                false
            }
            Segment::Variable(variable) => {
                let digits = name.len() - name.trim_start_matches(|c: char| c.is_ascii_digit()).len();
                // Numbers in names carry no leading zeros: `layers.01` would be a second name for 1.
                if digits == 0 || digits > 9 || (digits > 1 && name.starts_with('0')) {
                    return false;
                }
                let number: i64 = name[..digits].parse().expect("at most nine digits");
                let counted = variable.extent || variable.ordinal;
                let base = if counted { 0 } else { *bases.get(&variable.axis).unwrap_or(&0) };
                let Ok(value) = u64::try_from(number - variable.offset) else { return false };
                let Some(value) = value.checked_add(base) else { return false };
                let map = match (variable.extent, variable.ordinal) {
                    (true, _) => &mut found.extents,
                    (_, true) => &mut found.ordinals,
                    _ => &mut found.index,
                };
                match map.get(&variable.axis) {
                    Some(&old) if old != value => return false,
                    _ => map.insert(variable.axis.clone(), value),
                };
                self.step(others, &name[digits..], bases, found)
            }
        }
    }

    /// The name at a position. `extents` must hold every axis of a `{#L}`, `sets` every set of a `{L of set}`.
    pub fn format(
        &self,
        index: &BTreeMap<String, u64>,
        extents: &BTreeMap<String, u64>,
        sets: &Sets,
        choices: &[usize],
    ) -> Option<String> {
        if self.segments.is_empty() {
            return Some(self.text.clone());
        }
        let mut name = String::new();
        let mut choice = choices.iter();
        for segment in &self.segments {
            match segment {
                Segment::Text(text) => name.push_str(text),
                Segment::Choice(all) => {
                    name.push_str(all.get(choice.next().copied().unwrap_or(0)).unwrap_or(&all[0]));
                }
                Segment::Variable(v) => {
                    let mut value = *if v.extent { extents } else { index }.get(&v.axis)?;
                    if v.ordinal {
                        value = v.set.as_ref().and_then(|set| sets.get(set))?.ordinal(value)?;
                    }
                    name.push_str(&(i64::try_from(value).ok()? + v.offset).to_string());
                }
            }
        }
        Some(name)
    }
}

impl Variable {
    fn parse(text: &str) -> Option<Variable> {
        let (extent, text) = match text.strip_prefix('#') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let mut sides = [" in ", " of "].into_iter().enumerate().filter_map(|(i, word)| {
            let (of, set) = text.split_once(word)?;
            Some((of, Some(set.trim().to_string()), i == 1))
        });
        let (text, set, ordinal) = sides.next().unwrap_or((text, None, false));
        let split = text.find(['+', '-']).unwrap_or(text.len());
        let axis = text[..split].trim();
        let offset = text[split..].replace(' ', "");
        let offset = if offset.is_empty() { 0 } else { offset.parse::<i64>().ok()? };
        let valid = is_name(axis) && set.as_deref().is_none_or(is_name) && !(extent && set.is_some());
        let axis = axis.to_string();
        (valid && offset.abs() < 1_000_000).then_some(Variable { axis, extent, offset, set, ordinal })
    }

    /// The positions that it may stand for, of those below an extent; none if its set is not known.
    pub fn positions(&self, extent: u64, sets: &Sets) -> Option<Vec<u64>> {
        match &self.set {
            None => Some((0..extent).collect()),
            Some(set) => {
                let Positions { positions, .. } = sets.get(set)?;
                Some(positions.iter().copied().filter(|at| *at < extent).collect())
            }
        }
    }
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && !text.starts_with(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_and_formats_back() {
        let p = Pattern::parse("{L+2}.mlp.(linear1|dense_h_to_4h).(weight|bias)").unwrap();
        let m = p.matches("5.mlp.dense_h_to_4h.weight", &BTreeMap::new()).unwrap();
        assert_eq!(m.index["L"], 3);
        assert_eq!(m.choices, [1, 0]);
        let name = p.format(&m.index, &m.extents, &Sets::new(), &m.choices);
        assert_eq!(name.unwrap(), "5.mlp.dense_h_to_4h.weight");
        for wrong in
            ["1.mlp.linear1.weight", "05.mlp.linear1.weight", "5.mlp.linear1.weightx", "x.mlp.linear1.bias"]
        {
            assert!(p.matches(wrong, &BTreeMap::new()).is_none(), "{wrong}");
        }
    }

    #[test]
    fn extents_and_bases() {
        let p = Pattern::parse("{#L+3}.norm.weight").unwrap();
        assert_eq!(p.matches("6.norm.weight", &BTreeMap::new()).unwrap().extents["L"], 3);
        let p = Pattern::parse("layers.{L}.w").unwrap();
        let base = BTreeMap::from([("L".to_string(), 12)]);
        assert_eq!(p.matches("layers.1.w", &base).unwrap().index["L"], 13);
        for bad in ["{L}{E}", "{L in }", "{L in a b}", "{#L in moe}", "{L of 2}", "{in moe}"] {
            assert!(Pattern::parse(bad).is_err(), "{bad}");
        }
        assert!(Pattern::parse("a{L").is_err());
        assert!(Pattern::parse("a)").is_err());
    }

    #[test]
    fn positions_of_sets() {
        let moe = Positions { axis: "L".into(), positions: vec![1, 3, 4, 7] };
        let sets = Sets::from([("moe".to_string(), moe)]);
        let (none, base) = (BTreeMap::new(), BTreeMap::from([("L".to_string(), 3)]));
        let placed = |text: &str, name: &str, bases: &BTreeMap<String, u64>| {
            let pattern = Pattern::parse(text).unwrap();
            let mut found = pattern.matches(name, bases).unwrap();
            match pattern.place(&mut found, bases, &sets) {
                Membership::Inside => Ok(found.index["L"]),
                Membership::Outside(_, _, at) => Err(at),
                Membership::Unknown(_) => Err(u64::MAX),
            }
        };
        assert_eq!(placed("h.{L in moe}.w", "h.3.w", &none), Ok(3));
        assert_eq!(placed("h.{L in moe}.w", "h.2.w", &none), Err(2));
        // Membership is that of the position in the whole model.
        assert_eq!(placed("h.{L in moe}.w", "h.1.w", &base), Ok(4));
        assert_eq!(placed("h.{L+1 in moe}.w", "h.2.w", &none), Ok(1));
        assert_eq!(placed("h.{L of moe}.w", "h.3.w", &none), Ok(7));
        assert_eq!(placed("h.{L of moe}.w", "h.1.w", &base), Ok(4));
        assert_eq!(placed("h.{L of moe}.w", "h.4.w", &none), Err(4));
        assert_eq!(placed("h.{L of moe}.{L}", "h.1.3", &none), Ok(3));
        assert_eq!(placed("h.{L of moe}.{L}", "h.1.4", &none), Err(1));
        assert_eq!(placed("h.{L of other}.w", "h.1.w", &none), Err(u64::MAX));
        let pattern = Pattern::parse("h.{L+2 of moe}.w").unwrap();
        let at = |position| pattern.format(&BTreeMap::from([("L".to_string(), position)]), &none, &sets, &[]);
        assert_eq!((at(4).as_deref(), at(5)), (Some("h.4.w"), None));
        let variable = pattern.variables().next().unwrap();
        assert_eq!(
            (variable.positions(5, &sets), variable.positions(5, &Sets::new())),
            (Some(vec![1, 3, 4]), None)
        );
    }
}
