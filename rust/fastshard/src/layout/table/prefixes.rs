//! What goes with the names of a whole table: what precedes them, and what passes beside them.

use super::{Entry, Table};
use crate::codes;
use crate::error::{Finding, Severity};
use crate::layout::names::Pattern;

/// The spellings of `(a|b)`, or the one of `a`.
fn alternatives(text: &str) -> Result<Vec<String>, String> {
    let inner = text.strip_prefix('(').and_then(|t| t.strip_suffix(')'));
    let all: Vec<String> = match inner {
        Some(inner) => inner.split('|').map(str::to_string).collect(),
        None => vec![text.to_string()],
    };
    let plain = |one: &String| !one.contains(['(', ')', '{', '}', '|']);
    match all.iter().all(plain) && all.iter().any(|one| !one.is_empty()) {
        true => Ok(all),
        false => Err(format!("{text:?}: write one spelling, or several as (a|b)")),
    }
}

/// A rule's name with all alternatives of a prefix in the place of the one that it begins with.
fn prefixed(text: &str, prefix: &str, all: &[String]) -> Option<String> {
    let longest = all.iter().filter(|one| !one.is_empty() && text.starts_with(one.as_str()));
    let begins = longest.max_by_key(|one| one.len())?;
    Some(format!("{prefix}{}", &text[begins.len()..]))
}

impl Table {
    /// Puts a prefix before the names that begin with one of its alternatives.
    pub(super) fn put_prefix(&mut self, own: Option<String>) -> Result<(), String> {
        let old = std::mem::replace(&mut self.prefix, own.clone());
        self.prefix = self.prefix.take().or_else(|| old.clone());
        let Some(prefix) = self.prefix.clone() else { return Ok(()) };
        let all = alternatives(&prefix).map_err(|e| format!("prefix {e}"))?;
        let with_prefix = |text: &str| match old.as_ref().and_then(|old| text.strip_prefix(old.as_str())) {
            Some(rest) => Some(format!("{prefix}{rest}")),
            None => prefixed(text, &prefix, &all),
        };
        let mut put = 0;
        for entry in &mut self.entries {
            if let Some(name) = with_prefix(entry.name.text()) {
                entry.name = Pattern::parse(&name)?;
                put += 1;
            }
        }
        for repeat in &mut self.repeats {
            repeat.rename(&with_prefix);
        }
        match put > 0 || own.is_none() {
            true => Ok(()),
            false => Err(format!("prefix {prefix:?}: no tensor's name begins with one of these")),
        }
    }

    /// Takes the globs of names that pass.
    pub(super) fn put_kept(&mut self, keep: &[String]) -> Result<(), String> {
        for text in keep {
            self.keep.push(glob::Pattern::new(text).map_err(|e| format!("keep {text:?}: {e}"))?);
        }
        Ok(())
    }

    /// True for a name that passes as it is where no rule has it.
    pub fn keeps(&self, name: &str) -> bool {
        self.keep.iter().any(|pattern| pattern.matches(name))
    }

    /// Says once for each glob of names that pass how many tensors of another target have no place.
    pub fn find_left_out(&self, names: &[&str], layout: &str) -> Vec<Finding> {
        let count = |pattern: &glob::Pattern| names.iter().filter(|name| pattern.matches(name)).count();
        let counts =
            self.keep.iter().map(|pattern| (pattern, count(pattern))).filter(|(_, count)| *count > 0);
        counts
            .map(|(pattern, count)| {
                let are = if count == 1 { "tensor is" } else { "tensors are" };
                let message = format!(
                    "{pattern}: {count} {are} left out: the layout {layout} holds the text model alone"
                );
                let help = "add them again after a conversion back to Hugging Face";
                Finding::new(codes::IGNORED, message)
                    .severity(Severity::Warning)
                    .help(help)
                    .run("fastshard merge TEXT_MODEL OUT --fill-from THIS_CHECKPOINT")
            })
            .collect()
    }

    /// The table with rules for tensors of another that pass by their names; none if there are none.
    pub fn keeping<'e>(&self, others: impl Iterator<Item = &'e Entry>) -> Option<Table> {
        let kept: Vec<Entry> = others.filter(|e| e.generic && self.keeps(e.name.text())).cloned().collect();
        (!kept.is_empty()).then(|| {
            let mut table = self.clone();
            table.entries.extend(kept);
            table
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VISION: &str = r#"
        layout = "vision"
        family = "toy"
        prefix = "(model.language_model.|model.)"
        keep = ["model.visual.*"]
        [config]
        axes = { L = "layers" }
        [[tensor]]
        name = "model.layers.{L}.q"
        shape = "[H]"
        [[tensor]]
        name = "lm_head"
        shape = "[V, H]"
    "#;

    #[test]
    fn a_prefix_has_alternatives() {
        let table = Table::parse(VISION).unwrap();
        let q = |name: &str| table.rule_of(name) == Some(0);
        assert!(q("model.layers.1.q") && q("model.language_model.layers.1.q") && !q("layers.1.q"));
        assert_eq!(
            (table.rule_of("lm_head"), table.entries[0].canonical.as_str()),
            (Some(1), "model.layers.{L}.q")
        );
        let child = "layout = \"child\"\nfamily = \"toy\"\nextends = \"vision\"\n";
        let own = "[[tensor]]\nname = \"model.norm\"\nshape = \"[H]\"\n";
        let same = Table::extending(&format!("{child}{own}"), Some(&table)).unwrap();
        assert_eq!(same.rule_of("model.language_model.norm"), Some(2));
        let other = format!("{child}prefix = \"(text.|model.)\"\n{own}");
        let other = Table::extending(&other, Some(&table)).unwrap();
        assert_eq!((other.rule_of("text.layers.0.q"), other.rule_of("text.norm")), (Some(0), Some(2)));
        assert_eq!(other.rule_of("model.language_model.layers.0.q"), None);
        assert!(other.keeps("model.visual.patch") && !other.keeps("model.visual"));
    }

    #[test]
    fn what_is_no_prefix_or_glob_is_refused() {
        for (find, replace, wanted) in [
            ("\"(model.language_model.|model.)\"", "\"text.\"", "no tensor's name begins"),
            ("\"(model.language_model.|model.)\"", "\"({L}|model.)\"", "write one spelling"),
            ("model.visual.*", "[", "keep \"[\""),
        ] {
            let message = Table::parse(&VISION.replace(find, replace)).unwrap_err().to_string();
            assert!(message.contains(wanted), "{wanted:?} not in {message}");
        }
    }
}
