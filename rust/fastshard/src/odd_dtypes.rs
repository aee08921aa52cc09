//! Tensors of a few layers that have another floating dtype than the same tensors of all others.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::codes;
use crate::draft::Draft;
use crate::engine::place;
use crate::error::{Finding, Severity};
use crate::plan::Output;
use crate::tensor::Dtype;
use crate::words::{layer, without_numbers};

/// Maximum number of layers that a finding names.
const NAMED: usize = 4;

/// A layer's stack without numbers, its odd dtype, and the dtype of the others.
type Kind = (String, Dtype, Dtype);

/// Warnings about tensors whose dtype is odd: one for each stack of layers and two dtypes.
///
/// Codes of quantised weights do not count, and neither do a first and a last layer that differ completely.
pub fn find_odd_dtypes(draft: &Draft) -> Vec<Finding> {
    let outputs = draft.outputs.iter().map(|one| &one.output);
    let in_layers: Vec<(&str, &Output)> =
        outputs.filter_map(|output| Some((layer(&output.name)?, output))).collect();
    let mut roles: HashMap<String, Vec<(&str, &Output)>> = HashMap::new();
    for &(layer, output) in &in_layers {
        roles.entry(without_numbers(&output.name)).or_default().push((layer, output));
    }
    let mut odd: BTreeMap<Kind, BTreeMap<u64, Vec<&Output>>> = BTreeMap::new();
    let mut usual: HashSet<&str> = HashSet::new();
    for tensors in roles.values().filter(|tensors| tensors.iter().all(|(_, one)| one.dtype.is_float())) {
        let common = most_common(tensors);
        let (same, others): (Vec<_>, Vec<_>) = tensors.iter().partition(|(_, one)| one.dtype == common);
        usual.extend(same.iter().map(|(layer, _)| *layer));
        let is_odd = others.len() * 4 <= tensors.len() || (others.len() == 1 && tensors.len() > 2);
        if !is_odd {
            continue;
        }
        for (layer, output) in others {
            let (stack, number) = numbered(layer);
            let kind = (without_numbers(stack), output.dtype, common);
            odd.entry(kind).or_default().entry(number).or_default().push(output);
        }
    }
    if odd.is_empty() {
        return Vec::new();
    }
    let mut ends: HashMap<String, BTreeSet<u64>> = HashMap::new();
    for (layer, _) in &in_layers {
        let (stack, number) = numbered(layer);
        ends.entry(without_numbers(stack)).or_default().insert(number);
    }
    let findings = odd.into_iter().filter_map(|((stack, dtype, common), mut layers)| {
        let numbers = &ends[&stack];
        let is_end = |number: &u64| Some(number) == numbers.first() || Some(number) == numbers.last();
        let is_usual = |one: &&Output| layer(&one.name).is_some_and(|layer| usual.contains(layer));
        layers.retain(|number, tensors| !is_end(number) || tensors.iter().any(is_usual));
        let (_, tensors) = layers.first_key_value()?;
        let (first, count) = (tensors[0], layers.values().map(Vec::len).sum::<usize>());
        let named: Vec<String> = layers.keys().take(NAMED).map(u64::to_string).collect();
        let more = match layers.len().saturating_sub(NAMED) {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        let which = if layers.len() == 1 { "layer" } else { "layers" };
        let what = if count == 1 { "1 tensor".into() } else { format!("{count} tensors") };
        let message = format!(
            "{what} of {which} {}{more} {} another dtype than in the other layers",
            named.join(", "),
            if count == 1 { "has" } else { "have" },
        );
        let finding = Finding::new(codes::DTYPE, message)
            .severity(Severity::Warning)
            .tensor(&first.name)
            .count(count as u64)
            .expected(format!("{common}, as in the other layers"), dtype)
            .help("copy the file that holds it again, or cast all tensors to one dtype; if they are mixed on purpose, ignore the warning")
            .run(format!("--dtype {}", common.to_string().to_lowercase()))
            .run("--ignore FS202");
        Some(match first.parts.iter().find_map(|part| part.sources.first()) {
            Some(&stored) => place(&draft.plan, stored, finding),
            None => finding,
        })
    });
    findings.collect()
}

/// The dtype that most of the tensors have.
fn most_common(tensors: &[(&str, &Output)]) -> Dtype {
    let mut counts: BTreeMap<Dtype, usize> = BTreeMap::new();
    for (_, one) in tensors {
        *counts.entry(one.dtype).or_default() += 1;
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map_or(Dtype::F32, |(dtype, _)| dtype)
}

/// A layer's name up to its number, and the number.
fn numbered(layer: &str) -> (&str, u64) {
    let stack = layer.trim_end_matches(|c: char| c.is_ascii_digit());
    (stack, layer[stack.len()..].parse().unwrap_or(u64::MAX))
}
