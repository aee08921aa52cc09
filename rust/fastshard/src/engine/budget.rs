//! Divides the memory budget: tile sizes, workers, blocks and checksums.

use crate::codes;
use crate::error::{Finding, Result};
use crate::kernel;
use crate::memory::anonymous_memory;
use crate::plan::blobs::{first_blob, tracked_blobs};
use crate::plan::{Output, Plan, StoredTensor};
use crate::stats::Level;

use super::factors::Changes;
use super::pool::Pool;
use super::tile::Workspace;
use super::{Options, MIN_TILE};

/// Tile size for runs that are read in order.
const PLAIN_TILE: u64 = 1 << 20;
/// Source runs of a transposed read should be at least this long.
const MIN_RUN: u64 = 4096;
/// The same if the source is decoded into memory first.
const MIN_RUN_IN_MEMORY: u64 = 256;
/// Maximum bytes of decoded blocks, even if there is memory for more.
const MAX_BLOCKS: u64 = 1 << 30;
/// Memory for decoding a block, in blocks: the stored bytes, and the decoder's own copy of the result.
const DECODING: u64 = 2;
/// Further memory of such a library.
const LIBRARY: u64 = 24 << 20;
/// Bytes of memory per byte of an output's name, for headers, a manifest and its text.
const PER_NAME_BYTE: u64 = 4;
/// Further bytes of memory per output: its hash, and its entry in headers and manifest. Some 800 were
/// measured.
const PER_OUTPUT: u64 = 800;
/// The same for an output's statistics, in the core and in Python: some 2500 were measured.
const PER_STATISTICS: u64 = 2500;
/// The same for encoding: the input, the encoder's copy, and the output that waits until it is stored.
const ENCODING: u64 = 4;
/// Share of the memory for checksums of data read out of order, and its maximum in bytes.
const CHECKSUMS_PART: u64 = 16;
const MAX_CHECKSUMS: u64 = 16 << 20;

/// The use of memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Anonymous memory of the process when the run began.
    pub baseline: u64,
    /// Workers that fit.
    pub workers: u64,
    /// How many more would fit, to wait for a disk.
    pub spare: u64,
    /// What each of them takes.
    pub each: u64,
    /// Largest tile.
    pub tile: u64,
    /// Checksums of what is read out of order.
    pub checksums: u64,
    /// Decoded blocks kept.
    pub decoded: u64,
    /// The same with what decoding takes besides.
    pub blocks: u64,
    /// Baseline + checksums + workers x (tile + scratch) + blocks.
    pub bound: u64,
}

/// The tile size an output would like: long source runs for transposed reads, else cache-sized.
fn wanted_tile(plan: &Plan, output: &Output) -> u64 {
    let item = output.dtype.size() as u64;
    let mut wanted = PLAIN_TILE;
    for part in output.parts.iter().filter(|p| p.volume() > 0) {
        let stored = &plan.stored[part.sources[0] as usize];
        let steps = stored.steps(&part.axes);
        let inner = (0..steps.len()).min_by_key(|&k| part.axes[k].dst);
        if inner.is_some_and(|k| steps[k] > 1) {
            if let Some(run) = part.axes.iter().zip(&steps).find_map(|(a, &s)| (s == 1).then_some(a)) {
                let least = if encoded(plan, stored) { MIN_RUN_IN_MEMORY } else { MIN_RUN };
                // A wide type that becomes a narrow one needs no longer runs.
                let rows = (least / item.max(stored.dtype.size() as u64)).clamp(1, run.n);
                wanted = wanted.max((rows * run.dst * item).next_power_of_two());
            }
        }
    }
    wanted.min(output.nbytes().next_power_of_two().max(1024))
}

/// True if a tensor's elements must be decoded.
fn encoded(plan: &Plan, stored: &StoredTensor) -> bool {
    first_blob(stored).is_some_and(|b| plan.blobs[b as usize].encoded)
}

impl MemoryUse {
    /// Makes room for up to `waiting` more workers, which wait for a disk; returns the number that fits.
    pub(super) fn make_room(&mut self, waiting: u64) -> u64 {
        let more = waiting.min(self.spare);
        self.spare -= more;
        self.bound += more * self.each;
        more
    }
}

/// Checks that the memory budget suffices for the plan, before the run begins.
///
/// # Errors
/// `FS512` with the minimum that is needed.
pub fn admit(plan: &Plan, options: &Options) -> Result<()> {
    divide(plan, options, None).map(|_| ())
}

/// Divides the memory budget: tile sizes per output, unless `fixed` states them, and the number of workers.
///
/// # Errors
/// `FS512` with the minimum that is needed.
pub(crate) fn divide(plan: &Plan, options: &Options, fixed: Option<&[u64]>) -> Result<(Vec<u64>, MemoryUse)> {
    kernel::trim();
    let baseline = anonymous_memory();
    // The library that decodes and encodes has threads and tables of its own.
    let coded = options.encodes > 0 || plan.blobs.iter().any(|b| b.encoded);
    let (coding, factors) = (Pool::memory(plan), Changes::memory(plan));
    let names = plan.outputs.iter().map(|o| o.name.len() as u64).sum::<u64>();
    let per_output = PER_OUTPUT + if options.stats == Level::Full { PER_STATISTICS } else { 0 };
    let outputs = names * PER_NAME_BYTE + plan.outputs.len() as u64 * per_output;
    let own = factors.kept + if coded { LIBRARY } else { 0 } + outputs;
    let available = options.memory.saturating_sub(baseline + own);
    // A worker reads from one block while another may be decoded.
    let block = plan.blobs.iter().filter(|b| b.encoded).map(|b| b.len).max().unwrap_or(0);
    let decoding = plan.blobs.iter().filter(|b| b.encoded).map(|b| b.stored_len).max().unwrap_or(0);
    let decoding = decoding.saturating_mul(DECODING);
    let streams = plan.blobs.iter().filter_map(|b| b.zstd.as_ref().map(|z| z.memory())).max().unwrap_or(0);
    let per_worker = decoding
        .saturating_add(streams)
        .saturating_add(block + options.encodes * (1 + ENCODING) + coding + factors.each);
    let smallest =
        fixed.map_or(MIN_TILE, |sizes| sizes.iter().copied().max().unwrap_or(MIN_TILE).max(MIN_TILE));
    let least = per_worker.saturating_add(Workspace::bytes(smallest));
    if available < least {
        let what = match per_worker {
            0 => "one tile".to_string(),
            _ => format!("one tile + what the blocks take, {} MiB", per_worker.div_ceil(1 << 20)),
        };
        return Err(Finding::new(codes::MEMORY_BUDGET, "the memory budget is too small")
            .expected(
                format!(
                    "at least {} MiB (baseline {} MiB + {what})",
                    (baseline + own + least).div_ceil(1 << 20),
                    baseline >> 20
                ),
                format!("{} MiB", options.memory >> 20),
            )
            .help("allow more memory")
            .run(format!("--memory {}MiB", (baseline + own + least).div_ceil(1 << 20)))
            .into());
    }
    let tracks = tracked_blobs(plan).contains(&true);
    let checksums = if tracks { ((available - least) / CHECKSUMS_PART).min(MAX_CHECKSUMS) } else { 0 };
    let available = available - checksums;
    let wanted: Vec<u64> = match fixed {
        Some(sizes) => sizes.to_vec(),
        None => plan.outputs.iter().map(|o| wanted_tile(plan, o)).collect(),
    };
    let largest = wanted.iter().copied().max().unwrap_or(MIN_TILE);
    // Wide tiles matter more than a worker for transposes; plain tiles are small enough for all.
    let needed = if fixed.is_some() { largest } else { largest.min(PLAIN_TILE) };
    let mut workers = options.threads.max(1) as u64;
    while workers > 1 && Workspace::bytes(needed) + per_worker > available / workers {
        workers -= 1;
    }
    // Half of what is left is for blocks, where there are any.
    let left = available - workers * per_worker;
    let for_tiles = if block > 0 { left / 2 } else { left };
    let mut cap = smallest;
    while Workspace::bytes(cap * 2) <= for_tiles / workers {
        cap *= 2;
    }
    let tiles: Vec<u64> = wanted.into_iter().map(|t| t.min(cap)).collect();
    let tile = tiles.iter().copied().max().unwrap_or(0);
    let all: u64 = plan.blobs.iter().filter(|b| b.encoded).map(|b| b.len).sum();
    let unused = left.saturating_sub(workers * Workspace::bytes(tile)).min(MAX_BLOCKS);
    let decoded = (workers * block + unused).min(all).min(options.max_decoded.unwrap_or(u64::MAX));
    let blocks = decoded + workers * (decoding + streams);
    let encodes = workers * options.encodes * (1 + ENCODING);
    let tiled = workers * (Workspace::bytes(tile) + coding);
    let bound = baseline + own + checksums + tiled + blocks + encodes;
    let each = Workspace::bytes(tile).saturating_add(per_worker);
    // Decoded blocks are held for few.
    let unused = options.memory.saturating_sub(bound + workers.saturating_mul(factors.each));
    let spare = if block > 0 { 0 } else { unused / each };
    Ok((tiles, MemoryUse { baseline, workers, spare, each, tile, checksums, decoded, blocks, bound }))
}
