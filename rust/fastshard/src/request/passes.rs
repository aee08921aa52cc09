//! Passes: the weights, and each slot of the optimizer, are resolved and composed by themselves.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{plain, Pass};
use crate::catalog::Catalog;
use crate::codes;
use crate::compose::{self, Drafted, Source, Target};
use crate::error::{Finding, Result};
use crate::layout::bind::Known;
use crate::layout::expr::{names_in, Extents};
use crate::layout::resolve::{self, Instance, Outside, Placement, Registry, Unknown};
use crate::layout::table::Table;
use crate::name::Name;
use crate::plan::{PadRegion, StoredTensor};
use crate::tensor::Dtype;

/// What a pass calls a tensor: its slot is part of the name.
pub(super) fn slot_name(name: &str, pass: &Pass) -> String {
    pass.slot.as_ref().map_or_else(|| name.to_string(), |slot| format!("{name}.{slot}"))
}

/// Names and sources of a pass's outputs as they are among those of all passes.
fn globally(outputs: &mut [Drafted], pass: &Pass, called: &HashMap<String, String>) {
    for Drafted { output, .. } in outputs {
        let name = called.get(&*output.name);
        if name.is_some() || pass.slot.is_some() {
            output.name = slot_name(name.map_or(&*output.name, String::as_str), pass).into();
        }
        let sources = output.parts.iter_mut().flat_map(|part| &mut part.sources);
        sources.for_each(|source| *source = pass.tensors[*source as usize]);
    }
}

/// What resolving and composing one pass needs.
pub(super) struct Resolving<'a> {
    pub(super) table: &'a mut Table,
    pub(super) units: &'a [resolve::Unit],
    pub(super) outside: &'a Outside,
    pub(super) unknown: Unknown,
    pub(super) absent: &'a BTreeSet<String>,
    pub(super) target: &'a Target<'a>,
}

/// Outputs and findings of all passes.
#[derive(Default)]
pub(super) struct PassResults {
    /// What outputs are called instead of by the names that rules give them.
    pub(super) called: HashMap<String, String>,
    pub(super) outputs: Vec<Drafted>,
    pub(super) pads: Vec<PadRegion>,
    pub(super) copies: Vec<(u32, u32)>,
    pub(super) rules: Vec<Name>,
    pub(super) axes: BTreeMap<String, u64>,
    pub(super) lost: BTreeMap<String, Option<u64>>,
    pub(super) findings: Vec<Finding>,
}

impl PassResults {
    /// Resolves and composes one pass.
    pub(super) fn pass(
        &mut self,
        with: Resolving,
        pass: &Pass,
        stored: &mut [StoredTensor],
        catalog: &Catalog,
    ) -> Result<()> {
        let Resolving { table, units, outside, unknown, absent, target } = with;
        if plain::all_plain(pass, table, outside, unknown, target) {
            self.plain(pass, target, stored);
            return Ok(());
        }
        let mut registry = Registry::default();
        let resolved = resolve::resolve(table, &mut registry, &pass.seen, units, outside, unknown);
        catalog.look(0)?;
        let first_rule = self.rules.len() as u32;
        for instance in &resolved.instances {
            let tensor = &mut stored[pass.tensors[instance.tensor as usize] as usize];
            tensor.rule = first_rule + instance.entry;
            let unit = &units[instance.unit as usize];
            let (shard, index) = division(table, instance, unit, &outside.known, &resolved.extents);
            (tensor.shard, tensor.index) = (shard, index.into());
        }
        let side = Source { table: &*table, resolved: &resolved, stored: &pass.seen, units, outside, absent };
        let composed = compose::compose(&side, target, &mut registry);
        let mut outputs = composed.outputs;
        globally(&mut outputs, pass, &self.called);
        let global = |t: u32| pass.tensors[t as usize];
        self.pads.extend(composed.pads.into_iter().map(|p| PadRegion { stored: global(p.stored), ..p }));
        self.copies.extend(composed.copies.into_iter().map(|(a, b)| (global(a), global(b))));
        for (name, elements) in composed.lost {
            let name = self.called.get(&name).cloned().unwrap_or(name);
            self.lost.insert(slot_name(&name, pass), elements);
        }
        let new_findings = resolved.findings.into_iter().chain(composed.findings).map(|mut finding| {
            finding.tensor = finding.tensor.map(|name| slot_name(&name, pass));
            finding
        });
        self.findings.extend(new_findings);
        self.findings.extend(casts(target.dtype, &outputs, stored));
        match self.outputs.is_empty() {
            true => self.outputs = outputs,
            false => self.outputs.extend(outputs),
        }
        self.rules.extend(table.entries.iter().map(|e| e.name.text().into()));
        if pass.slot.is_none() {
            let extents = resolved.extents.iter().filter(|(k, _)| !k.contains(['#', ' ']));
            self.axes = extents.map(|(k, v)| (k.clone(), *v)).collect();
        }
        Ok(())
    }

    /// Tensors that no rule names: each has a rule of its own.
    fn plain(&mut self, pass: &Pass, target: &Target, stored: &mut [StoredTensor]) {
        self.rules.reserve_exact(pass.seen.len());
        for (seen, &tensor) in pass.seen.iter().zip(&pass.tensors) {
            stored[tensor as usize].rule = self.rules.len() as u32;
            self.rules.push(seen.name.clone());
        }
        let mut outputs = plain::outputs(pass, target);
        globally(&mut outputs, pass, &self.called);
        self.findings.extend(casts(target.dtype, &outputs, stored));
        match self.outputs.is_empty() {
            true => self.outputs = outputs,
            false => self.outputs.extend(outputs),
        }
        if pass.slot.is_none() {
            self.axes = BTreeMap::new();
        }
    }
}

/// Which part of its tensor an instance is, as a number among all ranks that divide it, and where it lies on
/// the axes that its name numbers: counted from the rank's first where ranks divide such an axis (experts), so
/// that what two ranks hold at one place are shards of one tensor.
fn division(
    table: &Table,
    instance: &Instance,
    unit: &resolve::Unit,
    known: &Known,
    extents: &Extents,
) -> (Option<u64>, Vec<u64>) {
    let entry = &table.entries[instance.entry as usize];
    let mut index = instance.index.clone();
    let (Some(shape), Placement::Parts) = (&entry.shape, &instance.placement) else {
        return (None, index.into_values().collect());
    };
    let mut names: Vec<String> = index.keys().cloned().collect();
    shape.dims.iter().for_each(|d| names_in(d, &table.derived, &mut names));
    let mut dimensions: Vec<&String> = table.shards.values().flat_map(|map| map.keys()).collect();
    dimensions.sort();
    dimensions.dedup();
    let (mut shard, mut stride) = (None, 1u64);
    for dimension in dimensions {
        let degree = known.degree(dimension);
        let divided = names.iter().find(|n| table.divided_by(&entry.class, n) == Some(dimension.as_str()));
        let rank = unit.coords.get(dimension).filter(|_| degree > 1);
        if let (Some(axis), Some(&rank)) = (divided, rank) {
            shard = Some(shard.unwrap_or(0) + rank.saturating_mul(stride));
            if let (Some(at), Some(extent)) = (index.get_mut(axis), extents.get(axis)) {
                *at = at.saturating_sub(rank.saturating_mul(extent / degree));
            }
        }
        stride = stride.saturating_mul(degree);
    }
    (shard, index.into_values().collect())
}

/// One note per kind of cast.
fn casts(wanted: Option<Dtype>, outputs: &[Drafted], stored: &[StoredTensor]) -> Vec<Finding> {
    let Some(to) = wanted else { return Vec::new() };
    let mut from: BTreeMap<Dtype, u64> = BTreeMap::new();
    for Drafted { output, .. } in outputs {
        let source = output.parts.first().and_then(|p| p.sources.first()).map(|&s| &stored[s as usize]);
        // Values of codes have no dtype of their own.
        let source = source.filter(|stored| stored.coded().is_none()).map(|stored| stored.dtype);
        if let Some(source) = source.filter(|d| *d != output.dtype) {
            *from.entry(source).or_default() += 1;
        }
    }
    from.into_iter()
        .filter(|(d, _)| !widens(*d, to))
        .map(|(d, n)| Finding::new(codes::LOSSY, format!("{n} tensors are rounded from {d} to {to}")))
        .collect()
}

fn widens(from: Dtype, to: Dtype) -> bool {
    matches!((from, to), (Dtype::F16 | Dtype::Bf16, Dtype::F32 | Dtype::F64) | (Dtype::F32, Dtype::F64))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Over all degrees: tensors are shards of one (rule, position) exactly where their ranks differ on what divides them.
    #[test]
    fn parts_of_experts_are_numbered_by_both_ranks() {
        let text = r#"
            layout = "toy"
            family = "toy"
            [shard]
            tp = ["F"]
            [class.experts]
            shard = { tp = ["F"], ep = ["E"] }
            [[tensor]]
            name = "{L}.experts.{E}"
            shape = "[F, H]"
            as = "expert"
            class = "experts"
            [[tensor]]
            name = "{L}.stacked"
            shape = "[E, F, H]"
            as = "expert"
            class = "experts"
            [[tensor]]
            name = "{L}.router"
            shape = "[E, H]"
            as = "router"
            [[tensor]]
            name = "{L}.dense"
            shape = "[F, H]"
            as = "dense"
        "#;
        let table = Table::parse(text).unwrap();
        let (layers, experts) = (2u64, 12u64);
        let extents = Extents::from([("E".into(), experts), ("L".into(), layers)]);
        let number =
            |rule: u32, index: BTreeMap<String, u64>, coords: &BTreeMap<String, u64>, known: &Known| {
                let instance = Instance {
                    tensor: 0,
                    entry: rule,
                    unit: 0,
                    index,
                    choices: Vec::new(),
                    boxes: Vec::new(),
                    placement: Placement::Parts,
                };
                let unit = resolve::Unit { coords: coords.clone(), ..Default::default() };
                division(&table, &instance, &unit, known, &extents)
            };
        for (tp, ep) in [(1, 1), (2, 1), (1, 3), (2, 3), (4, 12)] {
            let known = Known {
                extents: Extents::new(),
                degrees: [("tp".to_string(), tp), ("ep".to_string(), ep)].into(),
            };
            let local = experts / ep;
            // (layer, local expert) -> part -> rank; two ranks may not have one part.
            let mut parts: HashMap<(Vec<u64>, Option<u64>), (u64, u64)> = HashMap::new();
            for (t, e) in (0..tp).flat_map(|t| (0..ep).map(move |e| (t, e))) {
                let coords = BTreeMap::from([("tp".to_string(), t), ("ep".to_string(), e), ("pp".into(), 5)]);
                for layer in 0..layers {
                    let at = BTreeMap::from([("L".to_string(), layer)]);
                    for i in 0..local {
                        let mut at = at.clone();
                        at.insert("E".into(), e * local + i);
                        let (shard, index) = number(0, at, &coords, &known);
                        assert_eq!(index, [i, layer]);
                        assert_eq!(shard.is_some(), tp * ep > 1);
                        assert_eq!(parts.insert((index, shard), (t, e)), None);
                    }
                    let stacked = number(1, at.clone(), &coords, &known);
                    assert_eq!(stacked.1, [layer]);
                    assert!(parts.contains_key(&(vec![0, layer], stacked.0)), "numbered as its experts are");
                    assert_eq!(number(2, at.clone(), &coords, &known), (None, vec![layer]), "replicated");
                    let (dense, same) = (number(3, at.clone(), &coords, &known).0, t);
                    let other = BTreeMap::from([("tp".to_string(), same), ("ep".to_string(), 0)]);
                    assert_eq!(dense, number(3, at, &other, &known).0, "copies over ep are one part");
                    assert_eq!(dense.is_some(), tp > 1);
                }
            }
        }
    }
}
