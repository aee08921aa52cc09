//! What a run says at its end: the outputs' hashes, and what its parts have found, put together.

use std::collections::BTreeMap;

use crate::codes;
use crate::error::{Finding, Result, Severity};
use crate::plan::{Combine, Op, Output, Plan};
use crate::standing::Standing;

use super::shards;
use super::tile::Drift;
use super::{lock, MemoryUse, OutputReport, Report, Run, MAX_FINDINGS_PER_CODE};

/// What NaN or infinite elements of an output are: an error, unless they are accepted or the output is a buffer.
fn non_finite(plan: &Plan, output: &Output, count: u64) -> Finding {
    let mut finding = Finding::new(codes::NON_FINITE, "NaN or infinite elements")
        .tensor(&output.name)
        .expected("0", count)
        .help("use an earlier step, or take the values as they are with --accept non-finite");
    if plan.words.is_buffer(&output.name, output.shape.len()) {
        finding.severity = Severity::Note;
    } else if plan.non_finite_accepted {
        finding.severity = Severity::Warning;
        finding.help = Some("accepted as asked with --accept non-finite".into());
        finding.decided = Some("accept non-finite".into());
    }
    finding
}

/// The note that value ops of an output are not exact; the first part that has such tells of them.
fn lossy(output: &Output) -> Option<Finding> {
    let part = output.parts.iter().find(|part| part.ops.iter().any(|op| !op.is_exact()))?;
    let told = |op: &Op| match op {
        Op::Scale(x) => format!("x {x}"),
        Op::Add(x) => format!("+ {x}"),
    };
    let ops: Vec<String> = part.ops.iter().map(told).collect();
    let message = format!("values changed: {}", ops.join(" "));
    Some(Finding::new(codes::LOSSY, message).tensor(&output.name))
}

impl Run<'_> {
    pub(super) fn report(&self, memory: MemoryUse) -> Result<Report> {
        let mut outputs = Vec::with_capacity(self.plan.outputs.len());
        for (index, output) in self.plan.outputs.iter().enumerate() {
            let progress = lock(&self.outputs[index]);
            // An empty output has no tile that could be its last.
            let hash = progress.hash.or_else(|| progress.hashes.finish());
            outputs.push(OutputReport {
                hash: hash.expect("every tile is done"),
                non_finite: progress.non_finite,
                seen: self.stats.take(index, output),
            });
            if progress.non_finite > 0 {
                self.find(non_finite(self.plan, output, progress.non_finite));
            }
            for (&p, drift) in &progress.drift {
                if drift.differing > 0 {
                    self.find(self.drift_finding(output, p, drift));
                }
            }
            for (&p, fact) in &progress.undecided {
                let finding = crate::layout::resolve::unknown_fact(fact);
                let stored = output.parts[p].sources[0];
                self.find(self.place(stored, finding).tensor(&output.name));
            }
            if let Some(finding) = lossy(output) {
                self.find(finding);
            }
        }
        for (&pair, drift) in lock(&self.twins).iter().filter(|(_, d)| d.differing > 0) {
            self.find(self.twin_finding(pair, drift));
        }
        let mut findings = std::mem::take(&mut *lock(&self.findings));
        findings.extend(shards::copies(self.plan, &self.sources)?);
        findings.extend(shards::duplicates(self.plan, &self.sources)?);
        findings.extend(shards::repeated_layers(self.plan, &self.sources)?);
        let standing = Standing::of(self.plan);
        if let Some(standing) = &standing {
            findings.extend(shards::repeated_parts(self.plan, &self.sources, standing)?);
        }
        findings.extend(shards::swapped(self.plan, &self.sources, &findings)?);
        if let Some(standing) = &standing {
            let (files, blocks) = shards::copied(self.plan, &self.sources, standing)?;
            findings.extend(blocks);
            shards::told_once(&mut findings, files);
        }
        findings.iter_mut().for_each(|finding| shards::accept(self.plan, finding));
        let decoded = self.sources.blocks.traffic();
        Ok(Report { outputs, findings: limit(findings), memory, decoded })
    }

    /// A parameter and its master that are not the same tensor. The finding names the master's file.
    fn twin_finding(&self, (stored, twin): (u32, u32), drift: &Drift) -> Finding {
        let tensor = &self.plan.stored[stored as usize];
        let other = &self.plan.stored[twin as usize];
        let (master, parameter) =
            if other.dtype.size() > tensor.dtype.size() { (twin, stored) } else { (stored, twin) };
        let narrow = self.plan.stored[parameter as usize].dtype;
        let finding = Finding::new(
            codes::MASTERS_DIFFER,
            format!("the fp32 master weight, rounded to {narrow}, differs from the parameter"),
        )
        .expected(
            format!("{} equal elements", crate::tensor::element_count(&tensor.shape).unwrap_or(0)),
            format!("{} that differ, by up to {:e}", drift.differing, drift.largest),
        )
        .help("if you evaluated the parameters: --weights params takes them, `fastshard master-weights CKPT --repair OUT` rebuilds the master weights; if the parameters are damaged, restore their file");
        let severity = if self.plan.twins_may_differ { Severity::Warning } else { Severity::Error };
        self.place(master, finding.severity(severity))
    }

    fn drift_finding(&self, output: &Output, p: usize, drift: &Drift) -> Finding {
        let part = &output.parts[p];
        let (first, other) = (part.sources[0], part.sources[drift.source]);
        let names = (&self.plan.stored[first as usize].name, &self.plan.stored[other as usize].name);
        if names.0 != names.1 {
            let finding = Finding::new(
                codes::TIED_DIFFER,
                format!("differs from {} though the config ties them", names.0),
            )
            .expected(
                "equal values",
                format!("{} elements differ by up to {:e}", drift.differing, drift.largest),
            )
            .help("correct the config (tied or not), or restore the file that is wrong");
            return self.place(other, finding);
        }
        let what = format!("{} elements differ by up to {:e}", drift.differing, drift.largest);
        let against =
            self.plan.stored[first as usize].rank.clone().unwrap_or_else(|| "the first copy".into());
        // What is no number cannot be averaged: its first copy was taken.
        if part.combine == Combine::Mean && self.plan.stored[first as usize].dtype.is_float() {
            Finding::new(
                codes::REPLICAS_AVERAGED,
                format!("copies differ from {against}'s; averaged in float32"),
            )
            .tensor(&output.name)
            .expected("equal copies", what)
        } else {
            let finding = Finding::new(codes::REPLICAS_DIFFER, format!("this copy differs from {against}'s"))
                .expected("equal copies", what)
                .help("copy the file of that rank again: it is from another step or layer; if replicas drifted in this run: --replicas mean");
            self.place(other, finding)
        }
    }
}

/// Names tensor, file and rank of a stored tensor in a finding.
pub(crate) fn place(plan: &Plan, stored: u32, mut finding: Finding) -> Finding {
    let tensor = &plan.stored[stored as usize];
    finding.tensor.get_or_insert_with(|| tensor.name.clone());
    if finding.rank.is_none() {
        finding.rank = tensor.rank.clone();
    }
    if let Some(blob) = shards::blobs_of(tensor).first() {
        let file = plan.blobs[*blob as usize].file;
        finding.file.get_or_insert_with(|| plan.label(file));
    }
    finding
}

/// Keeps the first findings of each code and counts the rest.
pub(crate) fn limit(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.sort_by(|a, b| {
        (std::cmp::Reverse(a.severity), a.code, &a.file, &a.tensor).cmp(&(
            std::cmp::Reverse(b.severity),
            b.code,
            &b.file,
            &b.tensor,
        ))
    });
    let mut counts: BTreeMap<codes::Code, usize> = BTreeMap::new();
    let mut out: Vec<Finding> = Vec::new();
    for finding in findings {
        let n = counts.entry(finding.code).or_default();
        *n += 1;
        if *n <= MAX_FINDINGS_PER_CODE {
            out.push(finding);
        }
    }
    for (code, n) in counts {
        if n > MAX_FINDINGS_PER_CODE {
            out.push(
                Finding::new(code, format!("and {} more like these", n - MAX_FINDINGS_PER_CODE))
                    .count((n - MAX_FINDINGS_PER_CODE) as u64)
                    .severity(Severity::Note),
            );
        }
    }
    out
}
