//! The report of a run at its end: the outputs' hashes, and the combined findings of its parts.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;

use crate::codes;
use crate::error::{Finding, Result, Severity};
use crate::plan::blobs::blobs_of_tensor;
use crate::plan::{Combine, Op, Output, Plan};
use crate::standing::Standing;
use crate::stats::{self, Seen};
use crate::tensor::element_count;

use super::equal_layers::tells_of;
use super::learnt::Drift;
use super::shards;
use super::{lock, Control, MemoryUse, OutputReport, Report, Run, MAX_FINDINGS_PER_CODE};

/// Number of tensors with NaN or infinite values for which the shards with these values are looked up.
const LOCATED: usize = 20;

/// The note that value ops of an output are not exact, from the first part that has such ops.
fn lossy(output: &Output) -> Option<Finding> {
    let part = output.parts.iter().find(|part| part.ops.iter().any(|op| !op.is_exact()))?;
    let describe = |op: &Op| match op {
        Op::Scale(x) => format!("x {x}"),
        Op::Add(x) => format!("+ {x}"),
    };
    let ops: Vec<String> = part.ops.iter().map(describe).collect();
    let message = format!("values changed: {}", ops.join(" "));
    Some(Finding::new(codes::LOSSY, message).tensor(&output.name))
}

impl Run<'_> {
    pub(super) fn report(&self, memory: MemoryUse) -> Result<Report> {
        let mut outputs = Vec::with_capacity(self.plan.outputs.len());
        let mut zeros = Zeros::default();
        let mut located = 0;
        for (index, output) in self.plan.outputs.iter().enumerate() {
            let progress = lock(&self.outputs[index]);
            // An empty output has no tile that could be its last.
            let hash = progress.hash.or_else(|| progress.hashes.finish());
            let hash = hash.expect("every tile is done");
            let seen = match self.stats.take(index, output) {
                Seen::Nothing
                    if self.may_be_zero(index) && zeros.has(output.nbytes(), &hash, self.control)? =>
                {
                    Seen::Zero
                }
                seen => seen,
            };
            outputs.push(OutputReport { hash, non_finite: progress.non_finite, seen });
            if progress.non_finite > 0 {
                let (words, accepted) = (&self.plan.words, self.plan.non_finite_accepted);
                let finding =
                    stats::non_finite(words, &output.name, &output.shape, progress.non_finite, accepted);
                // What is accepted or no parameter is not read again.
                located += usize::from(finding.severity == Severity::Error);
                let sought = finding.severity == Severity::Error && located <= LOCATED;
                self.find(if sought { self.located(output, finding)? } else { finding });
            }
            for (&p, drift) in &progress.drift {
                if drift.differing > 0 {
                    self.drift_findings(output, p, drift)?.into_iter().for_each(|found| self.find(found));
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
        let repeated = shards::repeated_layers(self.plan, &self.sources)?;
        let (copied, mut equal): (Vec<_>, Vec<_>) =
            repeated.into_iter().partition(|finding| finding.code == codes::DUPLICATED_SHARD);
        findings.extend(copied);
        let standing = Standing::of(self.plan);
        if let Some(standing) = &standing {
            findings.extend(shards::repeated_parts(self.plan, &self.sources, standing)?);
        }
        findings.extend(shards::swapped(self.plan, &self.sources, &findings)?);
        if let Some(standing) = &standing {
            let (files, blocks) = shards::copied(self.plan, &self.sources, standing)?;
            findings.extend(blocks);
            shards::told_once(&mut findings, files);
            let layers = self.equal_layers(&outputs, &findings)?;
            equal.retain(|one| !findings.iter().any(|known| tells_of(known, one)));
            // Where a target stacks the layers, the sources alone tell.
            findings.extend(if layers.is_empty() { equal } else { layers });
        } else {
            findings.extend(equal);
        }
        findings.iter_mut().for_each(|finding| shards::accept(self.plan, finding));
        let seen: Vec<_> = outputs.iter().map(|output: &OutputReport| &output.seen).collect();
        findings.extend(stats::zero_findings(self.plan, &seen));
        let decoded = self.sources.blocks.traffic();
        Ok(Report { outputs, findings: limit(findings), memory, decoded })
    }

    /// Names the shards with values that are not finite; if all shards are finite, reports that a cast made
    /// these values.
    fn located(&self, output: &Output, mut finding: Finding) -> Result<Finding> {
        let Some((all, found)) = shards::not_finite(self.plan, &self.sources, output)? else {
            return Ok(finding);
        };
        match found[..] {
            [] => {
                finding.message = format!("values that are too large for {}", output.dtype);
                finding.evidence = Some("the stored values are finite".into());
                finding.help = Some("choose a dtype with a larger range, e.g. --dtype bf16".into());
                return Ok(finding);
            }
            [one] => finding = self.place(one, finding),
            _ => {
                finding = self.place(found[0], finding);
                finding.files = found.iter().filter_map(|&stored| file_label(self.plan, stored)).collect();
                finding.files.dedup();
                finding.rank = None;
                if found.len() < all.len() {
                    finding.message += &format!(" in {} of {} shards", found.len(), all.len());
                }
            }
        }
        // Several shards of one file are that file's.
        if finding.files.len() < 2 {
            finding.files.clear();
        }
        Ok(finding)
    }

    /// The finding for a parameter that differs from its master weight. It names the file of the master
    /// weight.
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
        .expected("equal elements", differing(drift, element_count(&tensor.shape).unwrap_or(0)))
        .help("restore the parameters' file if they are damaged; if you evaluated them, rebuild the master weights, or take the parameters alone")
        .run("fastshard master-weights CKPT --repair OUT")
        .run("--weights params");
        let severity = if self.plan.twins_may_differ { Severity::Warning } else { Severity::Error };
        self.place(master, finding.severity(severity))
    }

    /// True for a tensor of at least two dimensions of which every seen tile is zero.
    fn may_be_zero(&self, index: usize) -> bool {
        let output = &self.plan.outputs[index];
        output.shape.len() > 1 && output.nbytes() > 0 && !self.filled[index].load(Ordering::Relaxed)
    }

    /// The findings for copies of a part that differ: tied tensors, averaged copies, or replicas.
    fn drift_findings(&self, output: &Output, p: usize, drift: &Drift) -> Result<Vec<Finding>> {
        let part = &output.parts[p];
        let (first, other) = (part.sources[0], part.sources[drift.source]);
        let (one, two) = (&self.plan.stored[first as usize], &self.plan.stored[other as usize]);
        let what = match part.sources.len() {
            2 => differing(drift, element_count(&one.shape).unwrap_or(0)),
            // Of several pairs the elements are counted each time.
            _ => format!("elements differ, by up to {}", figure(drift.largest)),
        };
        if one.name != two.name {
            let message = format!("differs from {} though both are one tensor of the model", one.name);
            let finding = Finding::new(codes::TIED_DIFFER, message)
                .expected("equal values", what)
                .help("correct the config (tied or not), or restore the file that is wrong");
            return Ok(vec![self.place(other, finding)]);
        }
        // What is no number cannot be averaged: its first copy was taken.
        if part.combine == Combine::Mean && one.dtype.is_float() {
            let against = one.rank.as_deref().unwrap_or("the first copy");
            let message = format!("copies differ from {against}'s; averaged in float32");
            let finding = Finding::new(codes::REPLICAS_AVERAGED, message).tensor(&output.name);
            return Ok(vec![finding.expected("equal copies", what)]);
        }
        let odd = shards::odd_ones(self.plan, &self.sources, &part.sources)?;
        if odd.is_empty() {
            return Ok(vec![self.replicas(&part.sources, (first, other), what)]);
        }
        let others = part.sources.len() - odd.len();
        let finding = |stored: u32| {
            let message = format!("this copy differs from those of {others} other ranks");
            let finding = Finding::new(codes::REPLICAS_DIFFER, message)
                .expected("equal copies", &what)
                .help("copy the file of this rank again: it is from another step or layer; if replicas drifted in this run, take their mean")
                .run("--replicas mean");
            self.place(stored, finding)
        };
        Ok(odd.into_iter().map(finding).collect())
    }

    /// The finding for replicas that differ if no majority shows which one is wrong.
    fn replicas(&self, all: &[u32], (first, other): (u32, u32), what: String) -> Finding {
        let rank = |stored: u32| self.plan.stored[stored as usize].rank.clone();
        let ranks = match (all.len(), rank(first), rank(other)) {
            (2, Some(one), Some(two)) => format!("{one} and {two}"),
            (count, ..) => format!("{count} ranks"),
        };
        let finding = Finding::new(codes::REPLICAS_DIFFER, format!("the copies of {ranks} differ"))
            .expected("equal copies", what)
            .help("copy the files of these ranks again; one of them is from another step or layer, and nothing here says which; if replicas drifted in this run, take their mean")
            .run("--replicas mean");
        let mut finding = self.place(other, finding);
        finding.rank = None;
        finding.files = all.iter().filter_map(|&stored| file_label(self.plan, stored)).collect();
        finding
    }
}

/// The number of elements that differ, and the size of the differences, in words.
fn differing(drift: &Drift, count: u64) -> String {
    let of = match (drift.differing, count) {
        (n, all) if n == all && n > 1 => format!("all {n} elements differ"),
        (1, _) => format!("1 of {count} elements differs"),
        (n, _) => format!("{n} of {count} elements differ"),
    };
    format!("{of}, by up to {}", figure(drift.largest))
}

/// A number with four significant digits.
pub(crate) fn figure(x: f32) -> String {
    match x.abs() {
        size if size == 0.0 || (1e-3..1e6).contains(&size) => {
            let digits = if size == 0.0 { 0 } else { (3 - size.log10().floor() as i32).max(0) as usize };
            let text = format!("{x:.digits$}");
            match text.contains('.') {
                true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
                false => text,
            }
        }
        _ => format!("{x:.3e}"),
    }
}

/// The name in messages of the file in which a stored tensor begins.
fn file_label(plan: &Plan, stored: u32) -> Option<String> {
    let blob = *blobs_of_tensor(&plan.stored[stored as usize]).first()?;
    Some(plan.label(plan.blobs[blob as usize].file))
}

/// Hashes of zeros, by their number.
#[derive(Default)]
struct Zeros(HashMap<u64, [u8; 32]>);

impl Zeros {
    /// True if this number of bytes with this hash is all zeros.
    ///
    /// # Errors
    /// `FS510` once the run must stop.
    fn has(&mut self, count: u64, hash: &[u8; 32], control: &Control) -> Result<bool> {
        if let Some(of_zeros) = self.0.get(&count) {
            return Ok(of_zeros == hash);
        }
        let mut hasher = blake3::Hasher::new();
        let page = [0; 1 << 14];
        let mut left = count;
        while left > 0 {
            control.check_running()?;
            let n = left.min(page.len() as u64);
            hasher.update(&page[..n as usize]);
            left -= n;
        }
        let of_zeros = *hasher.finalize().as_bytes();
        self.0.insert(count, of_zeros);
        Ok(of_zeros == *hash)
    }
}

/// Names tensor, file and rank of a stored tensor in a finding.
pub(crate) fn place(plan: &Plan, stored: u32, mut finding: Finding) -> Finding {
    let tensor = &plan.stored[stored as usize];
    finding.tensor.get_or_insert_with(|| tensor.name.to_string());
    if finding.rank.is_none() {
        finding.rank = tensor.rank.as_deref().map(str::to_string);
    }
    if let Some(blob) = blobs_of_tensor(tensor).first() {
        let file = plan.blobs[*blob as usize].file;
        finding.file.get_or_insert_with(|| plan.label(file));
    }
    finding
}

/// Keeps the first findings of each code and counts the rest.
fn limit(mut findings: Vec<Finding>) -> Vec<Finding> {
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
