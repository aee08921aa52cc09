//! Replicas for averaging that belong to another layer or run.

use std::collections::BTreeMap;

use super::Reader;
use crate::codes;
use crate::engine::gather::Sources;
use crate::engine::{figure, place};
use crate::error::{Finding, Result, Severity};
use crate::plan::{Combine, Part, Plan};
use crate::tensor::element_count;

/// Maximum number of compared elements of one rule's copies, over all layers and ranks.
const MAX_SAMPLED: u64 = 2 << 20;

/// Replicas for averaging that belong to another layer: they are closer to another layer's copies than to
/// those of their own.
pub(in crate::engine) fn swapped(
    plan: &Plan,
    sources: &Sources,
    findings: &[Finding],
) -> Result<Vec<Finding>> {
    let drifted = |name: &str| {
        findings.iter().any(|f| f.code == codes::REPLICAS_AVERAGED && f.tensor.as_deref() == Some(name))
    };
    let mut rules: BTreeMap<u32, Vec<&Part>> = BTreeMap::new();
    for output in &plan.outputs {
        for part in &output.parts {
            if part.combine == Combine::Mean && part.sources.len() > 1 {
                rules.entry(plan.stored[part.sources[0] as usize].rule).or_default().push(part);
            }
        }
    }
    let mut reader = Reader::new(sources)?;
    let mut out = Vec::new();
    for parts in rules.values() {
        let any = plan
            .outputs
            .iter()
            .any(|o| drifted(&o.name) && o.parts.iter().any(|p| parts.iter().any(|q| std::ptr::eq(p, *q))));
        if any && plan.stored[parts[0].sources[0] as usize].dtype.is_float() {
            out.extend(Copies::read(plan, &mut reader, parts)?.strangers());
        }
    }
    Ok(out)
}

/// All layers' copies of one tensor.
struct Copies<'a> {
    plan: &'a Plan,
    parts: &'a [&'a Part],
    /// Their elements, or samples of them: [layer][rank].
    elements: Vec<Vec<Vec<f32>>>,
}

impl<'a> Copies<'a> {
    fn read(plan: &'a Plan, reader: &mut Reader, parts: &'a [&'a Part]) -> Result<Copies<'a>> {
        let count: u64 = parts.iter().map(|p| p.sources.len() as u64).sum();
        let most = (MAX_SAMPLED / count).max(1);
        let mut layer = |part: &&Part| -> Result<Vec<Vec<f32>>> {
            part.sources.iter().map(|&s| reader.floats(&plan.stored[s as usize], most)).collect()
        };
        let elements = parts.iter().map(&mut layer).collect::<Result<_>>()?;
        Ok(Copies { plan, parts, elements })
    }

    /// Copies that are closer to another layer than to their own, or too far from all.
    fn strangers(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        for (l, layer) in self.elements.iter().enumerate() {
            let scale = layer.iter().flatten().map(|x| f64::from(x.abs())).sum::<f64>()
                / layer.iter().map(Vec::len).sum::<usize>().max(1) as f64;
            let own: Vec<f64> =
                (0..layer.len()).map(|r| distance_to_others(&layer[r], layer, Some(r))).collect();
            // Two copies are as far from each other whichever is wrong: another layer must be much closer.
            let less = if layer.len() == 2 { 0.5 } else { 1.0 };
            let elsewhere = |r: usize| {
                self.closest_other(l, r).filter(|(distance, _)| own[r] > 0.0 && *distance < less * own[r])
            };
            let closer: Vec<_> = (0..layer.len()).filter_map(|r| Some((r, elsewhere(r)?))).collect();
            if layer.len() == 2 && closer.len() != 1 {
                if !closer.is_empty() || own[0] > 0.5 * scale {
                    found.push(self.either(l, !closer.is_empty(), scale, own[0]));
                }
                continue;
            }
            // Copies that most others equal are right.
            let alike = |r: usize| layer.iter().filter(|copy| **copy == layer[r]).count();
            for (r, own) in own.into_iter().enumerate() {
                if 2 * alike(r) > layer.len() {
                    continue;
                }
                let finding = match closer.iter().find(|(one, _)| *one == r) {
                    Some((_, (distance, other))) => {
                        let theirs = &self.plan.stored[self.parts[*other].sources[0] as usize].name;
                        belongs_elsewhere(theirs, *distance, own)
                    }
                    None if own > 0.5 * scale && layer.len() > 2 => too_far(scale, own),
                    None => continue,
                };
                found.push(place(self.plan, self.parts[l].sources[r], finding));
            }
        }
        found
    }

    /// The finding for two copies, one of which is from another layer or run.
    fn either(&self, l: usize, swapped: bool, scale: f64, apart: f64) -> Finding {
        let [one, two] = [0, 1].map(|r| self.parts[l].sources[r]);
        let rank = |stored: u32| self.plan.stored[stored as usize].rank.clone().unwrap_or_default();
        let (code, what) = match swapped {
            true => (codes::SWAPPED_SHARD, "are of different layers: the files of one rank are swapped"),
            false => (codes::REPLICAS_DIFFER, "are too far apart to be drift"),
        };
        let finding = Finding::new(code, format!("the copies of {} and {} {what}", rank(one), rank(two)))
            .severity(Severity::Error)
            .expected(limit(scale), figure(apart as f32))
            .help("copy the files of both ranks again, from the nodes that ran them; nothing here says which rank is wrong");
        let mut finding = place(self.plan, two, finding);
        finding.rank = None;
        finding
    }

    /// The other layer whose copies are closest to that of layer `l` on rank `r`, and how close they are.
    fn closest_other(&self, l: usize, r: usize) -> Option<(f64, usize)> {
        let size = |l: usize| element_count(&self.plan.stored[self.parts[l].sources[0] as usize].shape);
        let copy = &self.elements[l][r];
        (0..self.elements.len())
            .filter(|&other| other != l && size(other) == size(l))
            .map(|other| (distance_to_others(copy, &self.elements[other], Some(r)), other))
            .min_by(|a, b| a.0.total_cmp(&b.0))
    }
}

/// The maximum distance of copies that have drifted, in words.
fn limit(scale: f64) -> String {
    format!("a mean difference below half the mean magnitude {}", figure(scale as f32))
}

fn belongs_elsewhere(theirs: &str, distance: f64, own: f64) -> Finding {
    let what = format!("this copy is closer to {theirs} than to the other ranks' copies");
    Finding::new(codes::SWAPPED_SHARD, what)
        .expected(format!("a mean difference of {} or less", figure(distance as f32)), figure(own as f32))
        .help("copy the file of this rank from the node that ran it; this one is of another layer")
}

fn too_far(scale: f64, own: f64) -> Finding {
    Finding::new(codes::REPLICAS_DIFFER, "this copy is too far from the others to be drift")
        .severity(Severity::Error)
        .expected(limit(scale), figure(own as f32))
        .help("copy the file of this rank again: it is from another run, and averaging would hide it")
}

/// Mean absolute difference between `copy` and the mean of `layer` without rank `skip`.
fn distance_to_others(copy: &[f32], layer: &[Vec<f32>], skip: Option<usize>) -> f64 {
    let others: Vec<&Vec<f32>> =
        layer.iter().enumerate().filter(|(r, _)| Some(*r) != skip).map(|(_, c)| c).collect();
    if others.is_empty() || copy.is_empty() {
        return 0.0;
    }
    let sum: f64 = (0..copy.len())
        .map(|i| {
            let mean = others.iter().map(|o| f64::from(o[i])).sum::<f64>() / others.len() as f64;
            (f64::from(copy[i]) - mean).abs()
        })
        .sum();
    sum / copy.len() as f64
}
