//! Tables that extend others: what is taken over, what is dropped, and that nothing is replaced silently.

use std::collections::{BTreeMap, BTreeSet};

use super::{bad, bad_rule, Entry, Table};
use crate::error::Result;
use crate::layout::expr::Extents;

/// What a table begins with: the one that it extends, less what it drops.
pub(super) fn inherited(
    name: &str,
    extends: Option<&str>,
    drop: &[String],
    base: Option<&Table>,
) -> Result<Table> {
    let fail = |message: String| bad(name, message);
    let base = match (extends, base) {
        (None, None) => None,
        (Some(wanted), Some(base)) if base.name == wanted => Some(base),
        (Some(wanted), _) => return Err(fail(format!("extends {wanted:?}, which is no registered layout"))),
        (None, Some(base)) => return Err(fail(format!("does not extend {}", base.name))),
    };
    let Some(base) = base else {
        return match drop.first() {
            None => Ok(Table::generic()),
            Some(_) => Err(fail("`drop` is of what a table `extends`".into())),
        };
    };
    let mut table = base.clone();
    table.config.model_types.clear();
    table.config.when = None;
    table.entries.retain(|entry| !entry.is_repeated);
    for text in drop {
        let pattern = glob::Pattern::new(text).map_err(|e| fail(format!("drop {text:?}: {e}")))?;
        // A rule may be named by two of the globs, so each looks at all that is inherited.
        if !base.entries.iter().any(|entry| pattern.matches(&entry.canonical)) {
            return Err(fail(format!("drop {text:?}: {} has no tensor of that name", base.name)));
        }
        table.entries.retain(|entry| !pattern.matches(&entry.canonical));
    }
    Ok(table)
}

impl Table {
    /// Canonical tensors of a rule, whatever the extents are; none of one that is left out.
    fn canonical_names(&self, entry: &Entry) -> BTreeSet<String> {
        let Some(shape) = &entry.shape else { return BTreeSet::new() };
        let mut axes = Vec::new();
        shape.dims.iter().for_each(|dim| crate::layout::expr::names_in(dim, &self.derived, &mut axes));
        let ones: Extents = axes.into_iter().map(|axis| (axis, 1)).collect();
        let atoms = shape.lower(&self.derived, &ones).unwrap_or_default();
        atoms.iter().map(|atom| entry.canonical_key(&atom.tags, &atom.derived_tags)).collect()
    }

    /// Refuses rules of its own (those from `inherited` on) for what is inherited and was not dropped.
    pub(super) fn check_redeclared(&self, inherited: usize) -> Result<()> {
        let (old, new) = self.entries.split_at(inherited);
        let own = new.iter().filter(|entry| !entry.is_repeated);
        let names: BTreeSet<&str> = old.iter().map(|entry| entry.name.text()).collect();
        let mut tensors: BTreeMap<String, &Entry> = BTreeMap::new();
        for entry in old.iter().filter(|_| !new.is_empty()) {
            tensors.extend(self.canonical_names(entry).into_iter().map(|name| (name, entry)));
        }
        for entry in own {
            let again =
                self.canonical_names(entry).into_iter().find_map(|name| Some((tensors.get(&name)?, name)));
            let (canonical, by) = match again {
                Some((other, name)) => (name, other.name.text()),
                None if names.contains(entry.name.text()) => (entry.canonical.clone(), entry.name.text()),
                None => continue,
            };
            let message = format!("{canonical} is inherited (of {by:?}): drop it first");
            return Err(bad_rule(&self.name, entry.name.text(), message));
        }
        Ok(())
    }
}
