//! Tables made of other tables: rules renamed, stacked along an axis, repeated for what lies beside the weights, left out.
//!
//! Made of parsed rules, so that how a table is written makes no difference to what is derived of it.

use std::collections::BTreeMap;

use super::bind::{self, Group, Known};
use super::expr::{self, Extents, Factor};
use super::names::Pattern;
use super::table::{Condition, Entry, ShardMap, Table};
use crate::error::Result;

impl Entry {
    /// A rule for one tensor of its own name, taken literally.
    ///
    /// # Errors
    /// Says what is wrong with the shape.
    pub fn literal(name: &str, shape: &str, canonical: &str) -> std::result::Result<Entry, String> {
        Ok(Entry { shape: Some(expr::parse_shape(shape)?), ..Entry::bare(Pattern::literal(name), canonical) })
    }

    /// A rule that leaves out one tensor of whatever shape, its name taken literally.
    pub fn ignoring(name: &str, reason: &str) -> Entry {
        Entry { ignore: Some(reason.into()), ..Entry::bare(Pattern::literal(name), name) }
    }

    /// A rule that says nothing but these.
    pub(super) fn bare(name: Pattern, canonical: &str) -> Entry {
        Entry {
            name,
            shape: None,
            canonical: canonical.into(),
            when: Condition::default(),
            optional: false,
            partial: None,
            ignore: None,
            scale: None,
            add: 0.0,
            keep_dtype: false,
            is_moment: false,
            class: String::new(),
            generic: false,
            is_repeated: false,
        }
    }

    /// The rule for the same tensor under another name (a pattern).
    ///
    /// # Errors
    /// Says what is wrong with the pattern.
    pub fn renamed(&self, name: &str) -> std::result::Result<Entry, String> {
        Ok(Entry { name: Pattern::parse(name)?, ..self.clone() })
    }

    /// The rule for such tensors stacked: `axis`, or those of its positions that are in a set (`L in moe`), becomes
    /// dimension `at`. A rule without a shape stays as it is.
    ///
    /// # Errors
    /// Says what is wrong with the axis.
    pub fn stacked(&self, axis: &str, at: usize) -> std::result::Result<Entry, String> {
        let mut stacked = self.clone();
        if let Some(shape) = &mut stacked.shape {
            let added = expr::parse_shape(&format!("[{axis}]"))?;
            let at = at.min(shape.dims.len());
            shape.dims.splice(at..at, added.dims);
        }
        Ok(stacked)
    }

    /// The rule for what an optimizer keeps of each element: the canonical tensor `slot.NAME`, which keeps its element
    /// type. What it keeps goes with the `power` of the factor that the weight is stored with, and knows no addend.
    pub fn slot(&self, slot: &str, power: f64) -> Entry {
        Entry {
            canonical: format!("{slot}.{}", self.canonical),
            scale: self.scale.as_ref().map(|scale| scale.to_the(power)),
            add: 0.0,
            keep_dtype: true,
            is_moment: true,
            ..self.clone()
        }
    }

    /// The rule that leaves the same tensors out.
    pub fn left_out(&self, reason: &str) -> Entry {
        let bare = Entry::bare(self.name.clone(), self.name.text());
        Entry { when: self.when.clone(), ignore: Some(reason.into()), ..bare }
    }

    /// The dimensions as they are written, without spaces; `None` for tensors of any shape.
    pub fn dimensions(&self) -> Option<Vec<String>> {
        Some(self.shape.as_ref()?.dims.iter().map(|dim| expr::written(dim)).collect())
    }
}

impl Table {
    /// A table of rules alone.
    ///
    /// # Errors
    /// `FS210` for rules that do not fit it.
    pub fn of(name: &str, vocab: Option<&str>, shard: ShardMap, entries: Vec<Entry>) -> Result<Table> {
        let stored = |axes: Vec<String>| axes.iter().map(|a| super::table::stored_axis(a)).collect();
        let shard: ShardMap = shard.into_iter().map(|(dimension, axes)| (dimension, stored(axes))).collect();
        let table = Table {
            name: name.into(),
            family: name.into(),
            vocab: vocab.map(str::to_string),
            shards: BTreeMap::from([(String::new(), shard)]),
            ..Table::generic()
        };
        table.with(entries)
    }

    /// The same table with other rules.
    ///
    /// # Errors
    /// `FS210` naming the first rule that does not fit it.
    pub fn with(&self, entries: Vec<Entry>) -> Result<Table> {
        entries.iter().try_for_each(|entry| self.check(entry))?;
        Ok(Table { entries, ..self.clone() })
    }

    /// The first rule that names a tensor.
    pub fn rule_of(&self, name: &str) -> Option<usize> {
        let bases = BTreeMap::new();
        self.entries.iter().position(|entry| entry.name.matches(name, &bases).is_some())
    }

    /// The whole shape that a tensor has under some extents, `None` for a dimension of which they do not tell. `None` where
    /// no rule names it, or the one that does gives no shape.
    pub fn shape(&self, name: &str, extents: &Extents) -> Option<Vec<Option<u64>>> {
        let shape = self.entries[self.rule_of(name)?].shape.as_ref()?;
        let mut known = self.fixed.clone();
        known.extend(extents.iter().map(|(axis, extent)| (axis.clone(), *extent)));
        // A derived axis may be known and what it is made of not.
        let mut derived = self.derived.clone();
        derived.retain(|axis, _| !known.contains_key(axis));
        Some(shape.dims.iter().map(|dim| expr::product(dim, &derived, &known)).collect())
    }

    /// How many of some whole tensors have another shape than their rule gives them, under the extents that are known and
    /// those that most of the tensors agree on.
    pub fn misfits(&self, shapes: &BTreeMap<String, Vec<u64>>, known: &Extents) -> usize {
        let named = shapes.iter().filter_map(|(name, shape)| Some((self.rule_of(name)?, name, shape)));
        let groups: Vec<Group> = named
            .map(|(entry, name, shape)| Group {
                entry,
                shape: shape.clone(),
                count: 1,
                witness: name.clone(),
                file: String::new(),
            })
            .collect();
        let known = Known { extents: known.clone(), degrees: BTreeMap::new() };
        let (extents, _) = bind::bind(self, &groups, &known);
        let fits = |group: &&Group| {
            let Some(shape) = &self.entries[group.entry].shape else { return true };
            let product = |dim: &Vec<Factor>| expr::product(dim, &self.derived, &extents);
            shape.dims.len() == group.shape.len()
                && shape.dims.iter().zip(&group.shape).all(|(dim, n)| product(dim).is_none_or(|m| m == *n))
        };
        groups.len() - groups.iter().filter(fits).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = r#"
        layout = "toy"
        family = "toy"
        vocab = "V"
        [axes]
        t = 2
        d = "t*c"
        [shard]
        tp = ["V~P"]
        [[tensor]]
        name = "embed"
        shape = "[V~P, H]"
        as = "embed"
        [[tensor]]
        name = "layers_{L}.q"
        shape = "[H, h * d]"
        as = "q"
        scale = "d^-0.5"
        add = 1.0
        when = "bias"
        [[tensor]]
        name = "layers_{L}.freq"
        ignore = "recomputed"
    "#;

    fn shapes(of: &[(&str, &[u64])]) -> BTreeMap<String, Vec<u64>> {
        of.iter().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect()
    }

    #[test]
    fn rules_are_derived() {
        let table = Table::parse(TABLE).unwrap();
        let q = &table.entries[1];
        assert_eq!(q.dimensions().unwrap(), ["H", "h*d"]);
        let stacked = q.stacked("L", 1).unwrap().renamed("layers.q").unwrap();
        assert_eq!(stacked.dimensions().unwrap(), ["H", "L", "h*d"]);
        assert_eq!(q.stacked("L", 9).unwrap().dimensions().unwrap(), ["H", "h*d", "L"]);
        assert_eq!(q.stacked("L in moe", 0).unwrap().dimensions().unwrap(), ["L in moe", "H", "h*d"]);
        assert!(q.stacked("L in", 0).is_err());
        let moment = stacked.slot("nu", -2.0);
        assert_eq!((moment.canonical.as_str(), moment.add, moment.keep_dtype), ("nu.q", 0.0, true));
        let extents = Extents::from([("t".into(), 2), ("c".into(), 8)]);
        assert_eq!(moment.scale.as_ref().unwrap().value(&table.derived, &extents), Some(16.0));
        assert_eq!(moment.when, q.when);
        let out = q.left_out("why");
        assert_eq!((out.shape.is_none(), out.ignore.as_deref(), &out.when), (true, Some("why"), &q.when));
        let derived = table.with(vec![stacked, moment.renamed("mu.layers.q").unwrap()]).unwrap();
        assert_eq!(derived.rule_of("mu.layers.q"), Some(1));
        assert_eq!(derived.rule_of("layers_0.q"), None);
        // The layer's number in the name and its axis in the shape contradict each other.
        let error = table.with(vec![q.stacked("L", 0).unwrap()]).unwrap_err().to_string();
        assert!(error.contains("both in the name and in the shape"), "{error}");
        assert!(q.renamed("layers_{L").is_err());
    }

    #[test]
    fn shapes_are_told_and_judged() {
        let table = Table::parse(TABLE).unwrap();
        let extents = Extents::from([("H".into(), 4), ("h".into(), 3), ("c".into(), 5)]);
        assert_eq!(table.shape("layers_7.q", &extents), Some(vec![Some(4), Some(30)]));
        let head = Extents::from([("H".into(), 4), ("h".into(), 3), ("d".into(), 7)]);
        assert_eq!(table.shape("layers_7.q", &head), Some(vec![Some(4), Some(21)]));
        assert_eq!(table.shape("embed", &extents), Some(vec![None, Some(4)]));
        assert_eq!(table.shape("layers_7.freq", &extents), None);
        assert_eq!(table.shape("other", &extents), None);
        let good = shapes(&[("embed", &[9, 4]), ("layers_0.q", &[4, 30]), ("layers_1.q", &[4, 30])]);
        assert_eq!(table.misfits(&good, &Extents::from([("d".into(), 10)])), 0);
        let bad = shapes(&[("embed", &[9, 4]), ("layers_0.q", &[30, 4]), ("layers_1.q", &[4, 30, 1])]);
        assert_eq!(table.misfits(&bad, &extents), 2);
    }

    #[test]
    fn literal_names_need_no_pattern() {
        let rule = Entry::literal("a{b}(c)|", "[V~P, H0]", "a{b}(c)|").unwrap();
        let shard = ShardMap::from([("tp".to_string(), vec!["V~P".to_string()])]);
        let table = Table::of("mine", Some("V"), shard, vec![rule]).unwrap();
        assert_eq!((table.rule_of("a{b}(c)|"), table.rule_of("ab")), (Some(0), None));
        assert_eq!(table.divided_by("", "P"), Some("tp"));
    }
}
