//! Aliases: a second axis of the same extent, for what has one twice (`[H, H]`, `[H, 2H]`).
//!
//! An alias `J = "=H"` is an axis of its own in the canonical tensors and stored with the extent of `H`, so that it is
//! what `J~H` is in a shape.

use std::collections::BTreeMap;

use super::{Entry, Table};
use crate::layout::expr::Factor;

/// The name after the `=`.
pub(super) fn parse(text: &str) -> Result<String, String> {
    let name = text.trim();
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    match is_name && !name.starts_with(|c: char| c.is_ascii_digit()) {
        true => Ok(name.to_string()),
        false => Err(format!("\"={text}\": write the name of the axis that it is as long as")),
    }
}

/// Says what is wrong with the aliases of a table.
pub(super) fn check(table: &Table) -> Result<(), String> {
    for (alias, of) in &table.aliases {
        let no_base = alias == of || table.aliases.contains_key(of) || table.derived.contains_key(of);
        if no_base {
            return Err(format!("axis {alias}: {of} is an alias or derived: name an axis that is neither"));
        }
        if let Some(derived) = table.derived.iter().find(|(_, factors)| holds(factors, alias)) {
            return Err(format!("axis {}: {alias} is an alias; only a shape may have it", derived.0));
        }
        let mut divided = table.shards.values().flat_map(|map| map.values().flatten());
        if divided.any(|axis| axis == alias) {
            return Err(format!("axis {alias} is as long as {of} wherever it is stored: divide that one"));
        }
    }
    Ok(())
}

fn holds(factors: &[Factor], axis: &str) -> bool {
    factors.iter().any(|factor| match factor {
        Factor::Axis { name, padded } => name == axis || padded.as_deref() == Some(axis),
        Factor::Alternatives(all) => all.iter().any(|(_, inner)| holds(inner, axis)),
    })
}

/// Gives each alias in a rule's shape the extent that it is stored with.
pub(super) fn put(aliases: &BTreeMap<String, String>, entry: &mut Entry) {
    fn into(factors: &mut [Factor], aliases: &BTreeMap<String, String>) {
        for factor in factors {
            match factor {
                Factor::Axis { name, padded } => {
                    if padded.is_none() {
                        *padded = aliases.get(name).cloned();
                    }
                }
                Factor::Alternatives(all) => all.iter_mut().for_each(|(_, inner)| into(inner, aliases)),
            }
        }
    }
    if let Some(shape) = entry.shape.as_mut().filter(|_| !aliases.is_empty()) {
        shape.dims.iter_mut().for_each(|dim| into(dim, aliases));
    }
}
