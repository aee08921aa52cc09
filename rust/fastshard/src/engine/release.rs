//! When decoded blocks are no longer needed, and the order of outputs in which they are needed for the shortest.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::plan::{Output, Part, Pieces, Plan, StoredTensor};

use super::blocks::Blocks;

/// Outputs in the order in which they are made: those of one decoded tensor together, so that its blocks
/// can go before the next one's come; else the plan's.
pub(super) fn order(plan: &Plan, blobs_of: &[Vec<u32>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..plan.outputs.len()).collect();
    let first = |i: usize| blobs_of[i].iter().find(|b| plan.blobs[**b as usize].encoded);
    if plan.blobs.iter().any(|b| b.encoded) {
        order.sort_by_key(|&i| (first(i).copied(), i));
    }
    order
}

/// What is still to be done of one output, for its blocks.
#[derive(Debug, Default)]
struct Ahead {
    /// Bytes from the start that are done without a gap.
    done: u64,
    /// Tiles done beyond that: first byte, end.
    beyond: BTreeMap<u64, u64>,
    /// (end of the last byte that needs it, block), the earliest last.
    blocks: Vec<(u64, u32)>,
}

/// Which outputs still need each block.
#[derive(Debug)]
pub(super) struct Releases {
    outputs: Vec<Mutex<Ahead>>,
    readers: Vec<AtomicU32>,
}

impl Releases {
    pub(super) fn new(plan: &Plan, blobs_of: &[Vec<u32>]) -> Self {
        let readers: Vec<AtomicU32> = plan.blobs.iter().map(|_| AtomicU32::new(0)).collect();
        let ahead = |(output, blobs): (&Output, &Vec<u32>)| {
            let mut ahead = Ahead::default();
            let encoded = |b: &u32| plan.blobs[*b as usize].encoded;
            if output.nbytes() > 0 && blobs.iter().any(encoded) {
                let mut ends = BTreeMap::new();
                for part in &output.parts {
                    for &source in &part.sources {
                        last_uses(output, part, &plan.stored[source as usize], &mut ends);
                    }
                }
                ahead.blocks = blobs
                    .iter()
                    .filter(|b| encoded(b))
                    // Twins and scales are not followed: until the output's end.
                    .map(|&b| (ends.get(&b).copied().unwrap_or(output.nbytes()), b))
                    .collect();
                ahead.blocks.sort_unstable_by_key(|(end, _)| std::cmp::Reverse(*end));
                for (_, blob) in &ahead.blocks {
                    readers[*blob as usize].fetch_add(1, Ordering::Relaxed);
                }
            }
            Mutex::new(ahead)
        };
        let outputs = plan.outputs.iter().zip(blobs_of).map(ahead).collect();
        Releases { outputs, readers }
    }

    /// Takes note of a finished tile, and drops the blocks that it was the last to need.
    pub(super) fn tile_done(&self, output: usize, start: u64, end: u64, blocks: &Blocks) {
        let mut ahead = self.outputs[output].lock().unwrap_or_else(PoisonError::into_inner);
        if ahead.blocks.is_empty() {
            return;
        }
        ahead.beyond.insert(start, end);
        while let Some(end) = {
            let done = ahead.done;
            ahead.beyond.remove(&done)
        } {
            ahead.done = end;
        }
        while let Some(&(end, blob)) = ahead.blocks.last().filter(|(end, _)| *end <= ahead.done) {
            debug_assert!(end <= ahead.done);
            ahead.blocks.pop();
            if self.readers[blob as usize].fetch_sub(1, Ordering::AcqRel) == 1 {
                blocks.release(blob);
            }
        }
    }
}

/// Per block of `stored`, the end of the last byte of the output that part of it makes, or later.
fn last_uses(output: &Output, part: &Part, stored: &StoredTensor, ends: &mut BTreeMap<u32, u64>) {
    let item = output.dtype.size() as u64;
    let Pieces::Boxes(pieces) = &stored.pieces else { return };
    if part.volume() == 0 {
        return;
    }
    let mut alone = vec![0usize; stored.shape.len()];
    for axis in &part.axes {
        alone[axis.dim as usize] += 1;
    }
    for piece in pieces {
        // The last position on each axis that can lie in the piece; an axis that shares its dimension
        // with others may reach its end.
        let mut last = part.dst_base;
        for axis in &part.axes {
            let d = axis.dim as usize;
            let mut n = axis.n - 1;
            if alone[d] == 1 && axis.step > 0 {
                let end = (piece.lo[d] + piece.len[d]).saturating_sub(1).saturating_sub(part.src_base[d]);
                n = n.min(end / axis.step);
            }
            last += n * axis.dst;
        }
        let end = ends.entry(piece.blob).or_default();
        *end = (*end).max(((last + 1) * item).min(output.nbytes()));
    }
}
