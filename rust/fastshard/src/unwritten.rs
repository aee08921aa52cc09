//! Data that nobody wrote: large holes of sparse files in the place of tensors. They would be read as zeros.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::catalog::Catalog;
use crate::codes;
use crate::error::{Finding, Severity};
use crate::plan::blobs::each_blob;
use crate::plan::{Plan, PlanFile};

/// Bytes of a file's tensors that may be holes: a few zeros are no sign of a lost write.
pub const MOST_HOLES: u64 = 1 << 30;

/// The treatment of holes in the place of tensors.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Holes {
    /// They are an error.
    #[default]
    Refuse,
    /// They are read as zeros on the user's request; a warning reports them.
    Accept,
    /// They are read, and compared with a manifest.
    Compare,
}

/// Finds files in which more than [`MOST_HOLES`] bytes of outputs were never written, without reading them.
pub(crate) fn find_unwritten(catalog: &Catalog, plan: &Plan, holes: Holes) -> Vec<Finding> {
    if holes == Holes::Compare {
        return Vec::new();
    }
    let opened = catalog.files.iter().flatten();
    let opened: BTreeMap<_, _> = opened.map(|file| ((file.root, file.path.as_str()), &file.source)).collect();
    let source_of = |source: &PlanFile| opened.get(&(source.root, source.path.as_str())).copied();
    // Ranges of smaller files need not be known.
    let is_large: Vec<bool> =
        plan.sources.iter().map(|s| source_of(s).is_some_and(|s| s.size() > MOST_HOLES)).collect();
    // File -> the ranges that are read, each with the first tensor in it.
    let mut ranges: BTreeMap<u32, BTreeMap<(u64, u64), u32>> = BTreeMap::new();
    for (stored, _) in (0u32..).zip(plan.tensors_read()).filter(|(_, is_read)| *is_read) {
        each_blob(&plan.stored[stored as usize], |blob| {
            let blob = &plan.blobs[blob as usize];
            if !blob.encoded && is_large[blob.file as usize] {
                let range = (blob.offset, blob.offset + blob.stored_len);
                ranges.entry(blob.file).or_default().entry(range).or_insert(stored);
            }
        });
    }
    let mut findings = Vec::new();
    for (file, ranges) in ranges {
        let Some(source) = source_of(&plan.sources[file as usize]) else { continue };
        let (mut unwritten, mut first) = (0, None);
        let mut ranges = ranges.into_iter().peekable();
        source.each_hole(|lo, hi| {
            while let Some(&((begin, end), stored)) = ranges.peek() {
                let inside = hi.min(end).saturating_sub(lo.max(begin));
                if inside > 0 {
                    first.get_or_insert(stored);
                    unwritten += inside;
                }
                if end > hi {
                    break;
                }
                ranges.next();
            }
            unwritten <= MOST_HOLES
        });
        if let Some(stored) = first.filter(|_| unwritten > MOST_HOLES) {
            findings.push(finding(plan, file, stored, holes));
        }
    }
    findings
}

fn finding(plan: &Plan, file: u32, stored: u32, holes: Holes) -> Finding {
    let mut finding =
        Finding::new(codes::UNWRITTEN, "more than 1 GiB of the file's tensors was never written")
            .file(plan.label(file))
            .tensor(&plan.stored[stored as usize].name)
            .expected("data", "a hole in a sparse file, which is read as zeros")
            .help(
                "copy the file again from the node that wrote it; if it holds zeros on purpose, accept them",
            )
            .run("--accept holes");
    if holes == Holes::Accept {
        finding.severity = Severity::Warning;
        finding.help = None;
        finding.run.clear();
        finding.decided = Some("accept holes".into());
    }
    finding
}
