//! The evidence about sources and result that a process gathered while it made its share. It is recorded, so
//! that the process that combines the shares judges them as if it had made all tiles itself.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::learnt::{Drift, Segment};
use super::{lock, Run};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::plan::Plan;
use crate::stats::Partial;

/// Evidence besides the tiles.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// Copies that differ, by output and part of it.
    drift: Vec<(u32, u32, Drift)>,
    /// Values that must be zero and are not, by output and part, with the fact they hang on.
    undecided: Vec<(u32, u32, String)>,
    /// Stored tensors against their twins.
    twins: Vec<(u32, u32, Drift)>,
    /// Checksums of what was read, by blob.
    segments: Vec<(u32, Vec<Segment>)>,
    /// Samples of blocks that were decoded.
    samples: Vec<(u32, u64)>,
    /// Samples of parts of matrices, by number.
    #[serde(default)]
    parts: Vec<(u32, u64)>,
    /// Paddings that were looked at.
    pads: Vec<(u32, u32)>,
    /// Runs of outputs of which it has made a tile that is not zero: first, end.
    #[serde(default)]
    filled: Vec<(u32, u32)>,
    /// Statistics of outputs, or of parts of them.
    stats: Vec<(u32, Partial)>,
    /// What was found.
    findings: Vec<Finding>,
}

impl Evidence {
    /// True for a padding that need not be examined again.
    pub(super) fn has_looked_at(&self, pad: u32) -> bool {
        self.pads.iter().any(|&(first, end)| (first..end).contains(&pad))
    }

    /// Checks that it refers to items of `plan`.
    fn check(&self, plan: &Plan) -> Result<()> {
        let part = |output: u32, part: u32| {
            plan.outputs.get(output as usize).is_some_and(|o| (part as usize) < o.parts.len())
        };
        let stored = |i: u32| (i as usize) < plan.stored.len();
        let blob = |i: u32| (i as usize) < plan.blobs.len();
        let good = self.drift.iter().all(|(o, p, _)| part(*o, *p))
            && self.undecided.iter().all(|(o, p, _)| part(*o, *p))
            && self.twins.iter().all(|(a, b, _)| stored(*a) && stored(*b))
            && self.segments.iter().all(|(b, _)| blob(*b))
            && self.samples.iter().all(|(b, _)| blob(*b))
            && self.pads.iter().all(|(_, end)| *end as usize <= plan.pads.len())
            && self.filled.iter().all(|(_, end)| *end as usize <= plan.outputs.len())
            && self.stats.iter().all(|(o, _)| (*o as usize) < plan.outputs.len());
        match good {
            true => Ok(()),
            false => Err(foreign()),
        }
    }
}

fn foreign() -> Error {
    Finding::new(codes::INTERNAL, "what a process noted of its share does not fit the plan").into()
}

impl Run<'_> {
    /// The evidence of this run.
    pub(super) fn evidence(&self, pads: &[(u32, u32)]) -> Evidence {
        let mut evidence = Evidence { pads: pads.to_vec(), ..Evidence::default() };
        for (i, filled) in (0u32..).zip(&self.filled) {
            match evidence.filled.last_mut() {
                _ if !filled.load(Ordering::Relaxed) => {}
                Some((_, end)) if *end == i => *end += 1,
                _ => evidence.filled.push((i, i + 1)),
            }
        }
        for (i, (output, progress)) in (0u32..).zip(self.plan.outputs.iter().zip(&self.outputs)) {
            let progress = lock(progress);
            evidence.drift.extend(progress.drift.iter().map(|(p, d)| (i, *p as u32, d.clone())));
            evidence
                .undecided
                .extend(progress.undecided.iter().map(|(p, fact)| (i, *p as u32, fact.clone())));
            evidence.stats.extend(self.stats.partial(i as usize, output).map(|partial| (i, partial)));
        }
        evidence.twins = lock(&self.twins).iter().map(|((a, b), d)| (*a, *b, d.clone())).collect();
        for blob in 0..self.plan.blobs.len() as u32 {
            let segments = self.sources.segments(blob);
            if !segments.is_empty() {
                evidence.segments.push((blob, segments));
            }
            evidence.samples.extend(self.sources.blocks.sample(blob).map(|sample| (blob, sample)));
        }
        evidence.parts = self.sources.blocks.parts.seen().collect();
        evidence.findings = std::mem::take(&mut *lock(&self.findings));
        evidence
    }

    /// Takes over the evidence of other processes.
    ///
    /// # Errors
    /// If it is not about this plan.
    pub(super) fn learn(&self, evidence: &Evidence) -> Result<()> {
        evidence.check(self.plan)?;
        for &(first, end) in &evidence.filled {
            (first..end).for_each(|output| self.filled[output as usize].store(true, Ordering::Relaxed));
        }
        for (output, part, drift) in &evidence.drift {
            lock(&self.outputs[*output as usize]).drift.entry(*part as usize).or_default().merge(drift);
        }
        for (output, part, fact) in &evidence.undecided {
            lock(&self.outputs[*output as usize]).undecided.insert(*part as usize, fact.clone());
        }
        for (stored, twin, drift) in &evidence.twins {
            lock(&self.twins).entry((*stored, *twin)).or_default().merge(drift);
        }
        for (blob, segments) in &evidence.segments {
            self.sources.know(*blob, segments);
        }
        for (blob, sample) in &evidence.samples {
            self.sources.blocks.know(*blob, *sample);
        }
        for (number, digest) in &evidence.parts {
            self.sources.blocks.parts.know(*number, *digest).then_some(()).ok_or_else(foreign)?;
        }
        for (output, partial) in &evidence.stats {
            let about = &self.plan.outputs[*output as usize];
            self.stats.join(*output as usize, about, partial).ok_or_else(foreign)?;
        }
        lock(&self.findings).extend(evidence.findings.iter().cloned());
        Ok(())
    }
}
