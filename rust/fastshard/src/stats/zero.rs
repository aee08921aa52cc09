//! What is told of outputs that are zero where a good checkpoint is not: what a lost shard leaves.

use std::collections::HashSet;

use super::{Seen, ZeroSlab};
use crate::boxes::SubBox;
use crate::codes;
use crate::engine::place;
use crate::error::{Finding, Severity};
use crate::plan::{Output, Plan};
use crate::tensor::c_strides;
use crate::words::{without_numbers, Words};

/// Warnings about outputs of a run that are zero, or of which a slab is.
///
/// Floating tensors only, and not the padding of a vocabulary whose true size the plan knows. A matrix may be zero as a
/// whole unless the same one of another layer is not, or its name says that training fills it.
pub fn zero_findings(plan: &Plan, seen: &[&Seen]) -> Vec<Finding> {
    if let Some(finding) = all_zero(plan, seen) {
        return vec![finding];
    }
    let floating = |output: &Output| output.dtype.is_float() || output.dtype.is_f8();
    let outputs = || plan.outputs.iter().zip(seen).filter(|(output, _)| floating(output));
    let filled: HashSet<String> = match outputs().any(|(_, seen)| seen.is_zero()) {
        true => outputs().filter(|(_, s)| !s.is_zero()).map(|(o, _)| without_numbers(&o.name)).collect(),
        false => HashSet::new(),
    };
    let findings = outputs().filter_map(|(output, seen)| match seen.is_zero() {
        true => zero(plan, output, filled.contains(&without_numbers(&output.name))),
        false => slabs(plan, output, seen.zero_slabs()),
    });
    findings.collect()
}

/// The warning that every matrix is zero that a good model fills, of two or more.
fn all_zero(plan: &Plan, seen: &[&Seen]) -> Option<Finding> {
    let is_matrix = |o: &Output| o.shape.iter().filter(|n| **n > 1).count() > 1;
    let filled = |o: &Output| is_matrix(o) && !plan.words.may_be_zero(&o.name, o.shape.len());
    let mut matrices = plan.outputs.iter().zip(seen).filter(|(output, _)| filled(output)).peekable();
    let (first, _) = *matrices.peek()?;
    let count = matrices.try_fold(0, |count, (_, seen)| seen.is_zero().then_some(count + 1))?;
    let finding = Finding::new(codes::ZERO_SLAB, format!("all {count} matrices are zero"))
        .tensor(&first.name)
        .count(count)
        .expected("values of a trained or initialised model", "zeros in every matrix")
        .help("save the model again after its weights are loaded or gathered, or copy the files again");
    let stored = first.parts.iter().find_map(|part| part.sources.first())?;
    (count > 1).then(|| place(plan, *stored, finding))
}

fn zero(plan: &Plan, output: &Output, has_sister: bool) -> Option<Finding> {
    // What no file gives is padding.
    let stored = output.parts.iter().find_map(|part| part.sources.first())?;
    let finding = zero_tensor(&plan.words, &output.name, &output.shape, has_sister)?;
    Some(place(plan, *stored, finding))
}

/// The warning about a tensor all of whose values are zero; `None` where a good model has that.
pub(crate) fn zero_tensor(words: &Words, name: &str, shape: &[u64], has_sister: bool) -> Option<Finding> {
    if words.may_be_zero(name, shape.len()) || !(has_sister || words.is_table_head_or_projection(name)) {
        return None;
    }
    let others = if has_sister { "; the same tensor of other layers is not" } else { "" };
    let finding = Finding::new(codes::ZERO_SLAB, format!("all values of this tensor are zero{others}"))
        .tensor(name)
        .expected(format!("values in {shape:?}"), "zeros")
        .help("compare with the files of the ranks, or with `fastshard diff`; a tensor that was never loaded or gathered looks like that");
    Some(finding)
}

/// What NaN or infinite elements of a tensor are: an error, unless they are accepted or the tensor is a buffer.
pub(crate) fn non_finite(words: &Words, name: &str, shape: &[u64], count: u64, is_accepted: bool) -> Finding {
    let mut finding = Finding::new(codes::NON_FINITE, "NaN or infinite elements")
        .tensor(name)
        .expected("0", count)
        .help("use an earlier step, or accept the values")
        .run("--accept non-finite");
    if words.is_buffer(name, shape.len()) {
        finding.severity = Severity::Note;
    } else if is_accepted {
        finding.severity = Severity::Warning;
        finding.help = None;
        finding.run.clear();
        finding.decided = Some("accept non-finite".into());
    }
    finding
}

fn slabs(plan: &Plan, output: &Output, slabs: &[ZeroSlab]) -> Option<Finding> {
    let slabs: Vec<&ZeroSlab> = slabs.iter().filter(|slab| !is_padding(plan, output, slab)).collect();
    let finding = part_of(&output.name, &output.shape, &slabs)?;
    Some(match holder(output, slabs[0]) {
        Some(stored) => place(plan, stored, finding),
        None => finding,
    })
}

/// The warning about the slabs of a tensor of no plan that are zero; `None` where these are the padding of a vocabulary.
pub(crate) fn zero_slabs(words: &Words, name: &str, shape: &[u64], slabs: &[ZeroSlab]) -> Option<Finding> {
    let slabs: Vec<&ZeroSlab> =
        slabs.iter().filter(|slab| !is_unstated_padding(words, name, shape, slab)).collect();
    part_of(name, shape, &slabs)
}

fn part_of(name: &str, shape: &[u64], slabs: &[&ZeroSlab]) -> Option<Finding> {
    let texts: Vec<String> = slabs.iter().map(|slab| slab.text(shape.len())).collect();
    let finding = Finding::new(codes::ZERO_SLAB, "a part of this tensor is zero")
        .tensor(name)
        .expected(format!("values all over {shape:?}"), format!("zeros in {}", texts.join(" and ")))
        .help("compare with the files of the ranks, or with `fastshard diff`; a shard that was lost, or never gathered, looks like that; pruned weights and tokens never trained are zero too");
    (!slabs.is_empty()).then_some(finding)
}

/// True for the last rows of a vocabulary whose sizes nothing states: a shard divides all rows, and so few that do not are padding.
fn is_unstated_padding(words: &Words, name: &str, shape: &[u64], slab: &ZeroSlab) -> bool {
    let extent = shape[slab.dim];
    let [[start, end]] = slab.ranges[..] else { return false };
    let len = end - start;
    let is_table = slab.dim == 0 && words.is_table_head_or_projection(name);
    end == extent && is_table && len < extent / 8 && !extent.is_multiple_of(len)
}

/// Rows that a vocabulary is padded to a multiple of, for each tensor-parallel rank (Megatron-LM, GPT-NeoX).
const PADDING: u64 = 128;

/// True for the last rows of a vocabulary, where they are its padding: those beyond the true size (`V`) of
/// a padded one (`P`), or if only one size is known, so few that no rank's shard can be lost in them.
fn is_padding(plan: &Plan, output: &Output, slab: &ZeroSlab) -> bool {
    let extent = output.shape[slab.dim];
    let axis = |name: &str| plan.axes.get(name).copied();
    let (real, padded) = (axis("V"), axis("P"));
    let [[start, end]] = slab.ranges[..] else { return false };
    if end != extent {
        return false;
    }
    if real.is_none() && padded.is_none() {
        return is_unstated_padding(&plan.words, &output.name, &output.shape, slab);
    }
    if !(padded == Some(extent) || real == Some(extent)) {
        return false;
    }
    match real {
        Some(real) if real < extent => start >= real,
        _ => {
            let tp = plan.topology.get("tp").copied().unwrap_or(1).max(1);
            end - start < (PADDING * tp).min(extent / tp).min(extent / 8)
        }
    }
}

/// The stored tensor that the first element of a slab comes from.
fn holder(output: &Output, slab: &ZeroSlab) -> Option<u32> {
    let first = slab.ranges.first()?[0] * c_strides(&output.shape)[slab.dim];
    let part = output.parts.iter().filter(|part| part.volume() > 0).find(|part| {
        let mut is_inside = false;
        part.dst().cut(&SubBox::whole(&part.extents()), first, first + 1, &mut |_| is_inside = true);
        is_inside
    })?;
    part.sources.first().copied()
}
