//! Rules that hold again below another name: layers that are built as others are.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::{Condition, Entry, Pattern, Table};

/// `[[repeat]]`: the rules whose names begin with one of `below` hold again with `name` in the place of that beginning.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repeat {
    below: Vec<String>,
    name: String,
    when: Option<String>,
}

impl Repeat {
    /// Puts other names in the place of those for which there is one.
    pub(super) fn rename(&mut self, other: &dyn Fn(&str) -> Option<String>) {
        for name in self.below.iter_mut().chain([&mut self.name]) {
            *name = other(name).unwrap_or_else(|| name.clone());
        }
    }

    /// Refuses a name without the axes that the repeated names have: one tensor would be that of all positions.
    fn check_axes(&self) -> Result<(), String> {
        let axes = |text: &str| -> Result<BTreeSet<String>, String> {
            Ok(Pattern::parse(text)?.variables().map(|variable| variable.axis.clone()).collect())
        };
        let have = axes(&self.name)?;
        for below in &self.below {
            let wanted = axes(below)?;
            if wanted != have {
                let text =
                    |axes: &BTreeSet<String>| axes.iter().map(|a| format!("{{{a}}}")).collect::<String>();
                return Err(format!(
                    "repeat of {below:?}: {:?} has the axes {:?}, not {:?}",
                    self.name,
                    text(&have),
                    text(&wanted)
                ));
            }
        }
        Ok(())
    }
}

impl Table {
    /// Takes the repeats of its own, each in the place of an inherited one of the same `name` and `when`. Returns how many
    /// are inherited.
    pub(super) fn take_repeats(&mut self, own: Vec<Repeat>) -> usize {
        self.repeats.retain(|inherited| {
            own.iter().all(|own| (&own.name, &own.when) != (&inherited.name, &inherited.when))
        });
        let inherited = self.repeats.len();
        self.repeats.extend(own);
        inherited
    }

    /// Adds the rules that hold again. The first repeats are `inherited`: what they repeat may be dropped.
    pub(super) fn repeat_rules(&mut self, inherited: usize) -> Result<(), String> {
        let mut again: Vec<Entry> = Vec::new();
        for (i, repeat) in self.repeats.iter().enumerate() {
            repeat.check_axes()?;
            let own = repeat.when.as_deref().map(Condition::parse).transpose()?.unwrap_or_default();
            for below in &repeat.below {
                let rules = self
                    .entries
                    .iter()
                    .filter_map(|entry| Some((entry, entry.name.text().strip_prefix(below.as_str())?)));
                let before = again.len();
                for (entry, rest) in rules {
                    let entry = entry.renamed(&format!("{}{rest}", repeat.name))?;
                    again.push(Entry { is_repeated: true, when: entry.when.and(&own), ..entry });
                }
                if i >= inherited && again.len() == before {
                    return Err(format!("repeat of {below:?}: no tensor's name begins with it"));
                }
            }
        }
        let taken = again.iter().enumerate().find(|(i, rule)| {
            let others = self.entries.iter().chain(&again[..*i]);
            others.into_iter().any(|other| other.name.text() == rule.name.text() && other.when == rule.when)
        });
        if let Some((_, rule)) = taken {
            return Err(format!("repeat: {:?} has a rule", rule.name.text()));
        }
        self.entries.extend(again);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FURTHER: &str = r#"
        layout = "further"
        family = "toy"
        [config]
        axes = { L = "layers + 1" }
        [sets]
        mtp = { axis = "L", where = "L >= layers" }
        main = "not mtp"
        [[repeat]]
        below = ["model.layers.{L in main}."]
        name = "mtp.{L of mtp}."
        when = "further"
        [[tensor]]
        name = "model.layers.{L in main}.q"
        shape = "[H]"
        as = "q"
        when = "bias"
        [[tensor]]
        name = "model.norm"
        shape = "[H]"
        as = "norm"
    "#;

    fn names(table: &Table) -> Vec<&str> {
        table.entries.iter().map(|entry| entry.name.text()).collect()
    }

    #[test]
    fn rules_hold_again_and_in_tables_that_extend() {
        let table = Table::parse(FURTHER).unwrap();
        assert_eq!(names(&table), ["model.layers.{L in main}.q", "model.norm", "mtp.{L of mtp}.q"]);
        assert_eq!(table.entries[2].canonical, "q");
        assert_eq!(table.entries[2].when.needed().collect::<Vec<_>>(), ["bias", "further"]);
        let child = r#"
            layout = "child"
            family = "toy"
            extends = "further"
            drop = ["q"]
            prefix = "(text.|model.)"
            [axes]
            t = 3
            [[tensor]]
            name = "model.layers.{L in main}.qkv"
            shape = "[t, H]"
            as = "qkv"
        "#;
        let child = Table::extending(child, Some(&table)).unwrap();
        let prefixed = "(text.|model.)layers.{L in main}.qkv";
        assert_eq!(names(&child), ["(text.|model.)norm", prefixed, "mtp.{L of mtp}.qkv"]);
        // What an inherited one repeats may be dropped.
        let bare = "layout = \"bare\"\nfamily = \"toy\"\nextends = \"further\"\ndrop = [\"q\"]";
        assert_eq!(names(&Table::extending(bare, Some(&table)).unwrap()), ["model.norm"]);
    }

    #[test]
    fn what_cannot_hold_again_is_refused() {
        for (find, replace, wanted) in [
            (
                "[\"model.layers.{L in main}.\"]",
                "[\"layers.{L in main}.\"]",
                "no tensor's name begins with it",
            ),
            (
                "mtp.{L of mtp}.\"\n        when = \"further",
                "model.layers.{L in main}.\"\n        when = \"bias",
                "has a rule",
            ),
            ("\"further\"", "\"further |\"", "write facts joined by"),
            ("mtp.{L of mtp}.", "mtp.{L.", "mtp.{L."),
            ("below", "under", "unknown field"),
            ("mtp.{L of mtp}.", "mtp.", "has the axes"),
        ] {
            let message = Table::parse(&FURTHER.replace(find, replace)).unwrap_err().to_string();
            assert!(message.contains(wanted), "{wanted:?} not in {message}");
        }
    }
}
