//! When decoded blocks are no longer needed, and the order of outputs in which they are needed for the shortest.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::plan::blobs::{blobs_of_output, tracked_blobs};
use crate::plan::{Output, Part, Pieces, Plan, StoredTensor};

use super::blocks::Blocks;
use crate::plan::tiles::TileRun;

/// Outputs in the order in which they are made: those of one decoded tensor together, so that its blocks
/// can go before the next one's come, and those that read one tracked blob together, so that the checksums
/// of what each reads soon become one; else the plan's.
pub(crate) fn order(plan: &Plan, blobs_of: &[Vec<u32>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..plan.outputs.len()).collect();
    if plan.blobs.iter().any(|b| b.encoded) {
        let first = |i: usize| blobs_of[i].iter().find(|b| plan.blobs[**b as usize].encoded);
        order.sort_by_key(|&i| (first(i).copied(), i));
        return order;
    }
    let tracked = tracked_blobs(plan);
    let mut readers = vec![usize::MAX; plan.blobs.len()];
    for (i, blobs) in blobs_of.iter().enumerate() {
        blobs.iter().for_each(|&b| readers[b as usize] = readers[b as usize].min(i));
    }
    let leader = |i: usize| {
        let tracked = blobs_of[i].iter().filter(|b| tracked[**b as usize]);
        tracked.map(|&b| readers[b as usize]).min().unwrap_or(i)
    };
    order.sort_by_key(|&i| (leader(i), i));
    order
}

/// The remaining work for one output, for the release of its blocks.
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
    /// For the tiles that are made, by output; all others need no block.
    pub(super) fn new(plan: &Plan, blobs_of: &[Vec<u32>], sizes: &[u64], runs: &[TileRun]) -> Self {
        let mut tile_spans: Vec<Vec<Span>> = vec![Vec::new(); plan.outputs.len()];
        for run in runs {
            let output = run.output as usize;
            tile_spans[output].push(run.span(sizes[output], plan.outputs[output].nbytes()));
        }
        let readers: Vec<AtomicU32> = plan.blobs.iter().map(|_| AtomicU32::new(0)).collect();
        let ahead = |((output, blobs), tiles): ((&Output, &Vec<u32>), &mut Vec<Span>)| {
            let mut ahead = Ahead::default();
            let encoded = |b: &u32| plan.blobs[*b as usize].encoded;
            if !tiles.is_empty() && blobs.iter().any(encoded) {
                let spans = spans(plan, output);
                tiles.sort_unstable();
                let mut at = 0;
                for &mut (lo, hi) in tiles {
                    if at < lo {
                        ahead.beyond.insert(at, lo);
                    }
                    at = hi;
                }
                if at < output.nbytes() {
                    ahead.beyond.insert(at, output.nbytes());
                }
                ahead.blocks = blobs
                    .iter()
                    .filter(|b| encoded(b))
                    // Twins and scales are not followed: until the output's end.
                    .map(|&b| (spans.get(&b).map_or(output.nbytes(), |s| s.1), b))
                    .collect();
                ahead.blocks.sort_unstable_by_key(|(end, _)| std::cmp::Reverse(*end));
                for (_, blob) in &ahead.blocks {
                    readers[*blob as usize].fetch_add(1, Ordering::Relaxed);
                }
            }
            Mutex::new(ahead)
        };
        let outputs = plan.outputs.iter().zip(blobs_of).zip(&mut tile_spans).map(ahead).collect();
        Releases { outputs, readers }
    }

    /// Records a finished tile, and drops the blocks that it was the last to need.
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

/// First and end of the bytes of an output.
type Span = (u64, u64);

/// Per block of `stored`, the span of the output's bytes that are made from it.
fn uses(output: &Output, part: &Part, stored: &StoredTensor, spans: &mut BTreeMap<u32, Span>) {
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
        // The first and last position on each axis that can lie in the piece; an axis that shares its
        // dimension with others may reach its ends.
        let (mut first, mut last) = (part.dst_base, part.dst_base);
        for axis in &part.axes {
            let d = axis.dim as usize;
            let (mut low, mut high) = (0, axis.n - 1);
            if alone[d] == 1 && axis.step > 0 {
                let end = (piece.lo[d] + piece.len[d]).saturating_sub(1).saturating_sub(part.src_base[d]);
                high = high.min(end / axis.step);
                low = piece.lo[d].saturating_sub(part.src_base[d]).div_ceil(axis.step).min(high);
            }
            first += low * axis.dst;
            last += high * axis.dst;
        }
        let (first, end) = (first * item, ((last + 1) * item).min(output.nbytes()));
        let span = spans.entry(piece.blob).or_insert((first, end));
        *span = (span.0.min(first), span.1.max(end));
    }
}

/// The resources for decoding, by the plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Decoding {
    /// Blocks; each is decoded once.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of the largest.
    pub largest: u64,
    /// Bytes of blocks that are needed at a time, at most: what memory cannot hold of them is put aside on disk.
    pub live: u64,
}

/// The resources for decoding the blocks of a plan.
pub fn decoding(plan: &Plan) -> Decoding {
    if !plan.blobs.iter().any(|b| b.encoded) {
        return Decoding::default();
    }
    let blobs_of: Vec<Vec<u32>> = plan.outputs.iter().map(|o| blobs_of_output(plan, o)).collect();
    let mut lives: BTreeMap<u32, Span> = BTreeMap::new();
    let mut base = 0;
    for index in order(plan, &blobs_of) {
        let (output, blobs) = (&plan.outputs[index], &blobs_of[index]);
        let spans = spans(plan, output);
        for &blob in blobs.iter().filter(|b| plan.blobs[**b as usize].encoded) {
            let (first, end) = spans.get(&blob).copied().unwrap_or((0, output.nbytes()));
            let life = lives.entry(blob).or_insert((base + first, base + end));
            *life = (life.0.min(base + first), life.1.max(base + end));
        }
        base += output.nbytes();
    }
    let len = |blob: &u32| plan.blobs[*blob as usize].len;
    // At one position what begins is there before what ends is gone: a tile needs both.
    let mut events: Vec<(u64, bool, u64)> = Vec::with_capacity(2 * lives.len());
    for (blob, (first, end)) in &lives {
        events.push((*first, false, len(blob)));
        events.push((*end, true, len(blob)));
    }
    events.sort_unstable();
    let (mut now, mut live) = (0u64, 0u64);
    for (_, ends, bytes) in events {
        now = if ends { now - bytes } else { now + bytes };
        live = live.max(now);
    }
    Decoding {
        blocks: lives.len() as u64,
        bytes: lives.keys().map(len).sum(),
        largest: lives.keys().map(len).max().unwrap_or(0),
        live,
    }
}

fn spans(plan: &Plan, output: &Output) -> BTreeMap<u32, Span> {
    let mut spans = BTreeMap::new();
    for part in &output.parts {
        for &source in &part.sources {
            uses(output, part, &plan.stored[source as usize], &mut spans);
        }
    }
    spans
}
