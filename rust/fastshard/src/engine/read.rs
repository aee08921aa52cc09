//! Reads a range of one output, for callers that want a tensor instead of a result.

use std::sync::Arc;
use std::thread::Builder;

use super::checksums::Checksums;
use super::gather::Sources;
use super::tile::{self, Twins, Workspace};
use super::{place, MIN_TILE};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::plan::blobs::blobs_of_output;
use crate::plan::{Combine, Plan};
use crate::storage::SourceFile;

/// Bytes of decoded blocks that are kept while a range of one tensor is read.
const READ_BLOCKS: u64 = 64 << 20;
/// Bytes that are worth a separate thread when a range of one tensor is read.
const READ_SHARE: usize = 4 << 20;

/// Reads bytes of one output from byte `start` (an integer of elements) into `bytes`, on as many threads as there is work
/// for, `threads` at most.
///
/// It compares copies that must be equal, and checks regions that must be zero. [`super::execute`] makes the
/// checks that need all sources, such as checksums.
///
/// # Errors
/// I/O, and a range that leaves the output.
pub fn read(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    output: usize,
    start: u64,
    bytes: &mut [u8],
    scratch_dir: &std::path::Path,
    threads: usize,
) -> Result<()> {
    let about = &plan.outputs[output];
    let item = about.dtype.size() as u64;
    if !start.is_multiple_of(item) || start + bytes.len() as u64 > about.nbytes() {
        return Err(Finding::new(codes::USAGE, "bytes asked for")
            .tensor(&about.name)
            .expected(
                format!("whole elements within {} bytes", about.nbytes()),
                format!("{} from {start}", bytes.len()),
            )
            .into());
    }
    let scratch_dir = scratch_dir.to_path_buf();
    let sources = Sources::new(plan, files, scratch_dir, Checksums::none(plan), READ_BLOCKS, None);
    let share = bytes.len().div_ceil(threads.max(1)).max(READ_SHARE).next_multiple_of(MIN_TILE as usize);
    let mut shares = bytes.chunks_mut(share).zip((start..).step_by(share));
    let fill = |(bytes, at)| read_run(plan, &sources, output, at, bytes);
    let first = shares.next();
    std::thread::scope(|scope| {
        let start = |other| Builder::new().spawn_scoped(scope, move || fill(other));
        let others: Vec<_> = shares.map(start).collect();
        let own = first.map_or(Ok(()), fill);
        let rest = others.into_iter().map(|other| match other {
            Ok(other) => other.join().expect("a read does not panic"),
            Err(error) => Err(Error::thread(&error)),
        });
        std::iter::once(own).chain(rest).collect::<Result<()>>()
    })?;
    for blob in blobs_of_output(plan, about) {
        files[plan.blobs[blob as usize].file as usize].unchanged()?;
    }
    Ok(())
}

/// Reads a run of bytes of one output on this thread.
fn read_run(plan: &Plan, sources: &Sources<'_>, output: usize, start: u64, bytes: &mut [u8]) -> Result<()> {
    let about = &plan.outputs[output];
    let mut work = Workspace::new()?;
    let mut at = start;
    for chunk in bytes.chunks_mut(MIN_TILE as usize) {
        let seen = tile::make(plan, sources, about, at, at + chunk.len() as u64, Twins::Leave, &mut work)?;
        for (part, drift) in seen.drift {
            if drift.differing > 0 && about.parts[part].combine == Combine::Equal {
                let stored = about.parts[part].sources[drift.source];
                return Err(place(
                    plan,
                    stored,
                    Finding::new(codes::REPLICAS_DIFFER, "copies of this tensor differ"),
                )
                .into());
            }
        }
        if let Some((_, fact)) = seen.undecided.first() {
            return Err(crate::layout::resolve::unknown_fact(fact).tensor(&about.name).into());
        }
        chunk.copy_from_slice(&work.tile[..chunk.len()]);
        at += chunk.len() as u64;
    }
    Ok(())
}
