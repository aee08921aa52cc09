//! Executes a plan: tiles of output tensors are gathered, checked, hashed and handed to a sink.
//!
//! Destination-driven: a tile is a range of one output's bytes, so memory is bounded by workers x
//! tile whatever the size of a tensor, and hashing goes in any order.

mod blocks;
mod checksums;
mod gather;
mod release;
mod scales;
mod shards;
mod tile;

use std::collections::BTreeMap;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::codes;
use crate::error::{Error, Finding, Result, Severity};
use crate::hash::{self, ChainingValue, TileHashes};
use crate::kernel;
use crate::memory::anonymous_memory;
use crate::plan::{Combine, Op, Output, Part, Plan, StoredTensor};
use crate::stats::{Gather, Level, Seen};
use crate::storage::SourceFile;

use checksums::Checksums;
use gather::Sources;
pub use release::{decoding, Decoding};
use scales::Scales;
use tile::{Drift, Twins, Workspace};

/// Smallest tile, in bytes.
const MIN_TILE: u64 = 256 << 10;
/// Tile size for runs that are read in order.
const PLAIN_TILE: u64 = 1 << 20;
/// Source runs of a transposed read should be at least this long.
const MIN_RUN: u64 = 4096;
/// The same where the source is decoded into memory first.
const MIN_RUN_IN_MEMORY: u64 = 256;
/// Most bytes of decoded blocks held, where there is memory for more.
const MAX_BLOCKS: u64 = 1 << 30;
/// Bytes of decoded blocks held where a range of one tensor is read.
const READ_BLOCKS: u64 = 64 << 20;
/// Memory that decoding a block takes, in blocks: what is stored, and the decoder's own copy of the result.
const DECODING: u64 = 2;
/// Memory that such a library takes besides.
const LIBRARY: u64 = 24 << 20;
/// Bytes of memory per byte of a name of an output, for what is written of it: headers, a manifest and its text.
const PER_NAME_BYTE: u64 = 4;
/// The same for encoding: what is handed over, the encoder's copy, and what waits until it is stored.
const ENCODING: u64 = 4;
/// Part of the memory that checksums of what is read out of order may take, and the most of it in bytes.
const CHECKSUMS_PART: u64 = 16;
const MAX_CHECKSUMS: u64 = 16 << 20;
/// Most findings of one code that are kept; the rest is counted.
const MAX_FINDINGS_PER_CODE: usize = 1000;

/// Where tiles go.
pub trait Sink: Sync {
    /// Takes bytes of an output at an offset in the output's bytes.
    ///
    /// # Errors
    /// Whatever keeps the bytes from being stored.
    fn write(&self, output: usize, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Records that a tile is done.
    ///
    /// # Errors
    /// Whatever keeps the record from being stored.
    fn done(&self, _output: usize, _tile: &TileDone) -> Result<()> {
        Ok(())
    }

    /// The record of tile `index`, of tiles of `size` bytes, that an earlier run has written. It is a claim
    /// alone: the engine hashes what [`Sink::read_back`] finds, and makes the tile anew where that is
    /// something else.
    ///
    /// # Errors
    /// Whatever keeps the records from being read.
    fn claimed(&self, _output: usize, _index: u64, _size: u64) -> Result<Option<TileDone>> {
        Ok(None)
    }

    /// Fills `bytes` with what lies in the result now, at an offset in the output's bytes. Asked for tiles
    /// that were claimed only.
    ///
    /// # Errors
    /// Whatever keeps the bytes from being read.
    fn read_back(&self, output: usize, _offset: u64, _bytes: &mut [u8]) -> Result<()> {
        Err(Finding::new(codes::INTERNAL, format!("output {output} was claimed and cannot be read back"))
            .into())
    }

    /// Takes note of a tile that an earlier run has done, that was read back and is not made again.
    fn kept(&self, _output: usize, _tile: &TileDone) {}

    /// True if the tiles of an output are to come with their CRC32.
    fn checksummed(&self, _output: usize) -> bool {
        false
    }
}

/// A tile that is gathered, hashed and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileDone {
    /// Index of the tile in its output.
    pub index: u64,
    /// Size of the output's tiles in bytes: what `index` counts.
    pub size: u64,
    /// Its chaining value.
    pub value: ChainingValue,
    /// NaN or infinite elements in it.
    pub non_finite: u64,
    /// CRC32 of its bytes, where the sink wants it.
    pub crc32: Option<u32>,
}

/// A sink that keeps nothing: for verifying.
pub struct Discard;

impl Sink for Discard {
    fn write(&self, _output: usize, _offset: u64, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// Progress and cancellation, shared with another thread.
#[derive(Debug, Default)]
pub struct Control {
    /// Output bytes done.
    pub done: AtomicU64,
    /// Output bytes in all.
    pub total: AtomicU64,
    /// Set to stop at the next tile.
    pub cancel: AtomicBool,
    /// What is to be said before the end, for whoever watches.
    pub notices: Mutex<Vec<Finding>>,
}

/// How to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Worker threads.
    pub threads: usize,
    /// Anonymous memory of the process that must not be exceeded, in bytes, baseline included.
    pub memory: u64,
    /// Folder for members that have to be unpacked.
    pub scratch_dir: PathBuf,
    /// Bytes of decoded blocks held at most, where that is less than the budget has room for.
    pub held: Option<u64>,
    /// Largest block that the sink puts together and encodes, in bytes; 0 if there are none.
    pub encodes: u64,
    /// Statistics to gather from the tiles.
    pub stats: Level,
}

/// What the engine found out about one output.
#[derive(Debug, Clone)]
pub struct OutputReport {
    /// BLAKE3 of the logical bytes.
    pub hash: [u8; 32],
    /// NaN or infinite elements.
    pub non_finite: u64,
    /// Its statistics, as far as they were asked for.
    pub seen: Seen,
}

/// The outcome of a run.
#[derive(Debug)]
pub struct Report {
    /// Per output, in the plan's order.
    pub outputs: Vec<OutputReport>,
    /// Everything found; no error among them means the content may be published.
    pub findings: Vec<Finding>,
    /// Tile sizes, budget and workers, for the reader.
    pub memory: MemoryUse,
    /// Bytes of blocks that were decoded, and of those that had to be put aside on disk meanwhile.
    pub decoded: (u64, u64),
}

/// Where the memory goes, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Anonymous memory of the process when the run began.
    pub baseline: u64,
    /// Workers that fit.
    pub workers: u64,
    /// Largest tile.
    pub tile: u64,
    /// Checksums of what is read out of order.
    pub checksums: u64,
    /// Decoded blocks held.
    pub held: u64,
    /// The same with what decoding takes besides.
    pub blocks: u64,
    /// Baseline + checksums + scales + workers x (tile + scratch) + blocks.
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
                let rows = (least / item).clamp(1, run.n);
                wanted = wanted.max((rows * run.dst * item).next_power_of_two());
            }
        }
    }
    wanted.min(output.nbytes().next_power_of_two().max(1024))
}

/// True if a tensor's elements have to be decoded.
fn encoded(plan: &Plan, stored: &StoredTensor) -> bool {
    shards::first_blob(stored).is_some_and(|b| plan.blobs[b as usize].encoded)
}

/// Checks that the memory budget holds what the plan needs, before anything is made for it.
///
/// # Errors
/// `FS512` with the least that is needed.
pub fn admit(plan: &Plan, options: &Options) -> Result<()> {
    budget(plan, options).map(|_| ())
}

/// Divides the memory budget: tile sizes per output and the number of workers.
fn budget(plan: &Plan, options: &Options) -> Result<(Vec<u64>, MemoryUse)> {
    kernel::trim();
    let baseline = anonymous_memory();
    // The library that decodes and encodes has threads and tables of its own.
    let coded = options.encodes > 0 || plan.blobs.iter().any(|b| b.encoded);
    let scales = Scales::memory(plan);
    let names = plan.outputs.iter().map(|o| o.name.len() as u64).sum::<u64>();
    let own = scales.kept + if coded { LIBRARY } else { 0 } + names * PER_NAME_BYTE;
    let available = options.memory.saturating_sub(baseline + own);
    // A worker reads from one block while another may be decoded.
    let block = plan.blobs.iter().filter(|b| b.encoded).map(|b| b.len).max().unwrap_or(0);
    let decoding = plan.blobs.iter().filter(|b| b.encoded).map(|b| b.stored_len).max().unwrap_or(0);
    let decoding = decoding.saturating_mul(DECODING);
    let per_worker = decoding.saturating_add(block + options.encodes * (1 + ENCODING) + scales.each);
    let least = per_worker.saturating_add(Workspace::bytes(MIN_TILE));
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
            .help("raise --memory")
            .into());
    }
    let tracks = shards::tracked(plan).contains(&true);
    let checksums = if tracks { ((available - least) / CHECKSUMS_PART).min(MAX_CHECKSUMS) } else { 0 };
    let available = available - checksums;
    let wanted: Vec<u64> = plan.outputs.iter().map(|o| wanted_tile(plan, o)).collect();
    let largest = wanted.iter().copied().max().unwrap_or(MIN_TILE);
    // Wide tiles matter more than a worker for transposes; plain tiles are small enough for all.
    let mut workers = options.threads.max(1) as u64;
    while workers > 1 && Workspace::bytes(largest.min(PLAIN_TILE)) + per_worker > available / workers {
        workers -= 1;
    }
    // Half of what is left is for blocks, where there are any.
    let left = available - workers * per_worker;
    let for_tiles = if block > 0 { left / 2 } else { left };
    let mut cap = MIN_TILE;
    while Workspace::bytes(cap * 2) <= for_tiles / workers {
        cap *= 2;
    }
    let tiles: Vec<u64> = wanted.into_iter().map(|t| t.min(cap)).collect();
    let tile = tiles.iter().copied().max().unwrap_or(0);
    let all: u64 = plan.blobs.iter().filter(|b| b.encoded).map(|b| b.len).sum();
    let spare = left.saturating_sub(workers * Workspace::bytes(tile)).min(MAX_BLOCKS);
    let held = (workers * block + spare).min(all).min(options.held.unwrap_or(u64::MAX));
    let blocks = held + workers * decoding;
    let encodes = workers * options.encodes * (1 + ENCODING);
    let tiled = workers * (Workspace::bytes(tile) + scales.each);
    let bound = baseline + own + checksums + tiled + blocks + encodes;
    Ok((tiles, MemoryUse { baseline, workers, tile, checksums, held, blocks, bound }))
}

/// A panic as an error, so that it stops the run as any other: workers, staging and all.
fn without_panic<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    // What it leaves is not looked at again: the run ends.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Finding::new(codes::INTERNAL, format!("a worker panicked: {text}"))
            .help("this is a defect of fastshard: please report it with what was printed")
            .into())
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Progress {
    hashes: TileHashes,
    /// The hash, once every tile is done.
    hash: Option<[u8; 32]>,
    non_finite: u64,
    drift: BTreeMap<usize, Drift>,
    undecided: BTreeMap<usize, String>,
}

struct Run<'a> {
    plan: &'a Plan,
    sources: Sources<'a>,
    sink: &'a dyn Sink,
    control: &'a Control,
    tiles: Vec<u64>,
    /// Outputs in the order in which they are made, and the first global tile index of each.
    order: Vec<usize>,
    first: Vec<u64>,
    total_tiles: u64,
    next: AtomicU64,
    next_pad: AtomicU32,
    outputs: Vec<Mutex<Progress>>,
    stats: Gather,
    remaining: Vec<AtomicU64>,
    /// Outputs that still read a blob.
    readers: Vec<AtomicU32>,
    releases: release::Releases,
    blobs_of: Vec<Vec<u32>>,
    findings: Mutex<Vec<Finding>>,
    /// Per stored tensor and twin, how far they are apart.
    twins: Mutex<BTreeMap<(u32, u32), Drift>>,
    failed: Mutex<Option<Error>>,
}

/// Runs a plan. Findings about the content do not stop the run, so that all are reported; the
/// caller publishes nothing if one of them is an error.
///
/// # Errors
/// What keeps the run from finishing: I/O, a changed source, a budget too small, an interrupt.
pub fn execute(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    sink: &dyn Sink,
    options: &Options,
    control: &Control,
) -> Result<Report> {
    execute_tiled(plan, files, sink, options, None, control)
}

/// [`execute`] with every tile of `tile` bytes (a power of two of at least 1024), whatever the
/// budget says: for tests, which want many tiles of small tensors.
///
/// # Errors
/// As [`execute`].
#[doc(hidden)]
pub fn execute_tiled(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    sink: &dyn Sink,
    options: &Options,
    tile: Option<u64>,
    control: &Control,
) -> Result<Report> {
    plan.validate()?;
    let (mut tiles, memory) = budget(plan, options)?;
    if let Some(tile) = tile {
        tiles.fill(tile.next_power_of_two().max(1024));
    }
    let blobs_of: Vec<Vec<u32>> = plan.outputs.iter().map(|o| blobs_of(plan, o)).collect();
    let readers: Vec<AtomicU32> = (0..plan.blobs.len()).map(|_| AtomicU32::new(0)).collect();
    // An empty output has no tile that could be its last.
    for (blobs, _) in blobs_of.iter().zip(&plan.outputs).filter(|(_, o)| o.nbytes() > 0) {
        blobs.iter().for_each(|&b| {
            readers[b as usize].fetch_add(1, Ordering::Relaxed);
        });
    }
    let mut first = Vec::with_capacity(plan.outputs.len());
    let mut total_tiles = 0;
    let count = |o: &Output, t: u64| o.nbytes().div_ceil(t);
    let order = release::order(plan, &blobs_of);
    for &index in &order {
        first.push(total_tiles);
        total_tiles += count(&plan.outputs[index], tiles[index]);
    }
    let progress = |o: &Output, t: u64| {
        Mutex::new(Progress {
            hashes: TileHashes::new(t, o.nbytes()),
            hash: None,
            non_finite: 0,
            drift: BTreeMap::new(),
            undecided: BTreeMap::new(),
        })
    };
    let run = Run {
        plan,
        sources: Sources::new(
            plan,
            files,
            options.scratch_dir.clone(),
            Checksums::new(plan, memory.checksums),
            memory.held,
        ),
        releases: release::Releases::new(plan, &blobs_of),
        sink,
        control,
        order,
        first,
        total_tiles,
        next: AtomicU64::new(0),
        next_pad: AtomicU32::new(0),
        outputs: plan.outputs.iter().zip(&tiles).map(|(o, &t)| progress(o, t)).collect(),
        stats: Gather::new(options.stats, plan.outputs.len()),
        remaining: plan.outputs.iter().zip(&tiles).map(|(o, &t)| AtomicU64::new(count(o, t))).collect(),
        tiles,
        readers,
        blobs_of,
        findings: Mutex::new(Vec::new()),
        twins: Mutex::default(),
        failed: Mutex::new(None),
    };
    control.total.store(plan.outputs.iter().map(Output::nbytes).sum(), Ordering::Relaxed);
    control.done.store(0, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for _ in 1..memory.workers {
            scope.spawn(|| run.work());
        }
        run.work();
    });
    if let Some(error) = lock(&run.failed).take() {
        return Err(error);
    }
    if control.cancel.load(Ordering::Relaxed) {
        return Err(Finding::new(codes::INTERRUPTED, "stopped by the user")
            .help("run again with --resume to continue")
            .into());
    }
    for file in files {
        file.unchanged()?;
        if let Some(warning) = file.touched()? {
            run.find(warning);
        }
    }
    without_panic(|| run.report(memory))
}

fn blobs_of(plan: &Plan, output: &Output) -> Vec<u32> {
    let mut blobs: Vec<u32> = output
        .parts
        .iter()
        .flat_map(|p| &p.sources)
        .flat_map(|&s| {
            let stored = &plan.stored[s as usize];
            let scale = stored.scale.as_ref().map(|scale| scale.stored);
            std::iter::once(s).chain(stored.twins.iter().copied()).chain(scale)
        })
        .flat_map(|s| shards::blobs_of(&plan.stored[s as usize]))
        .collect();
    blobs.sort_unstable();
    blobs.dedup();
    blobs
}

impl Run<'_> {
    fn stopped(&self) -> bool {
        self.control.cancel.load(Ordering::Relaxed) || lock(&self.failed).is_some()
    }

    fn fail(&self, error: Error) {
        lock(&self.failed).get_or_insert(error);
    }

    fn find(&self, finding: Finding) {
        lock(&self.findings).push(finding);
    }

    fn work(&self) {
        let all = || {
            let mut work = Workspace::new();
            self.work_tiles(&mut work).and_then(|()| self.work_pads(&mut work))
        };
        if let Err(error) = without_panic(all) {
            self.fail(error);
        }
    }

    fn work_tiles(&self, work: &mut Workspace) -> Result<()> {
        loop {
            let global = self.next.fetch_add(1, Ordering::Relaxed);
            if global >= self.total_tiles || self.stopped() {
                break;
            }
            // The last output that starts at or before this tile; empty outputs have no tiles.
            let place = self.first.partition_point(|f| *f <= global) - 1;
            self.tile(self.order[place], global - self.first[place], work)?;
        }
        Ok(())
    }

    fn tile(&self, index: usize, tile: u64, work: &mut Workspace) -> Result<()> {
        let output = &self.plan.outputs[index];
        let (size, total) = (self.tiles[index], output.nbytes());
        let (start, end) = (tile * size, ((tile + 1) * size).min(total));
        match self.keep(index, tile, start, end, work)? {
            Some(kept) => {
                let mut progress = lock(&self.outputs[index]);
                progress.hashes.add(tile, kept.value);
                progress.non_finite += kept.non_finite;
            }
            None => self.make(index, tile, start, end, work)?,
        }
        self.releases.tile_done(index, start, end, &self.sources.blocks);
        self.control.done.fetch_add(end - start, Ordering::Relaxed);
        if self.remaining[index].fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut progress = lock(&self.outputs[index]);
            progress.hash = progress.hashes.finish();
            progress.hashes = TileHashes::new(size, 0);
            drop(progress);
            for &blob in &self.blobs_of[index] {
                if self.readers[blob as usize].fetch_sub(1, Ordering::AcqRel) == 1 {
                    self.finish_blob(blob, work)?;
                }
            }
        }
        Ok(())
    }

    /// The record of a tile that an earlier run has written, if its bytes are in the result still.
    fn keep(
        &self,
        index: usize,
        tile: u64,
        start: u64,
        end: u64,
        work: &mut Workspace,
    ) -> Result<Option<TileDone>> {
        let (size, output) = (self.tiles[index], &self.plan.outputs[index]);
        // Comparisons of copies and statistics are not in a record.
        let alone =
            |p: &Part| p.sources.len() == 1 && self.plan.stored[p.sources[0] as usize].twins.is_empty();
        if self.stats.wanted() || !output.parts.iter().all(alone) {
            return Ok(None);
        }
        let Some(claim) = self.sink.claimed(index, tile, size)? else { return Ok(None) };
        if (claim.index, claim.size) != (tile, size) {
            return Ok(None);
        }
        let bytes = work.tile_bytes((end - start) as usize);
        self.sink.read_back(index, start, bytes)?;
        if hash::tile_value(bytes, tile, size, output.nbytes()) != claim.value {
            return Ok(None);
        }
        self.sink.kept(index, &claim);
        Ok(Some(claim))
    }

    /// Makes a tile, hashes it and gives it to the sink.
    fn make(&self, index: usize, tile: u64, start: u64, end: u64, work: &mut Workspace) -> Result<()> {
        let (size, output) = (self.tiles[index], &self.plan.outputs[index]);
        let seen = tile::make(self.plan, &self.sources, output, start, end, Twins::Compare, work)?;
        let bytes = work.tile_bytes((end - start) as usize);
        let value = hash::tile_value(bytes, tile, size, output.nbytes());
        let non_finite = kernel::count_non_finite(output.dtype, bytes);
        let crc32 = self.sink.checksummed(index).then(|| hash::crc32(bytes));
        self.stats.add(index, output, start, bytes);
        self.sink.write(index, start, bytes)?;
        self.sink.done(index, &TileDone { index: tile, size, value, non_finite, crc32 })?;
        let mut progress = lock(&self.outputs[index]);
        progress.hashes.add(tile, value);
        progress.non_finite += non_finite;
        for (part, drift) in &seen.drift {
            progress.drift.entry(*part).or_default().merge(drift);
        }
        progress.undecided.extend(seen.undecided);
        drop(progress);
        if !seen.twins.is_empty() {
            let mut all = lock(&self.twins);
            for (pair, drift) in &seen.twins {
                all.entry(*pair).or_default().merge(drift);
            }
        }
        Ok(())
    }

    /// Verifies a blob's checksum once its last reader is done.
    fn finish_blob(&self, blob: u32, work: &mut Workspace) -> Result<()> {
        self.verify_blob(blob, work)?;
        self.sources.release(blob);
        Ok(())
    }

    fn verify_blob(&self, blob: u32, work: &mut Workspace) -> Result<()> {
        if !self.sources.is_tracked(blob) {
            return Ok(());
        }
        self.sources.finish(blob, work.span())?;
        let about = &self.plan.blobs[blob as usize];
        if let Some(want) = about.crc32 {
            let got = self.sources.crc(blob, 0, about.len);
            if got != Some(want) {
                let got = got.map_or("none".into(), |got| format!("{got:08x}"));
                let file = self.plan.label(about.file);
                let mut finding = Finding::new(
                    codes::CRC,
                    format!("CRC32 of member {}", about.member.as_deref().unwrap_or("?")),
                )
                .file(file)
                .expected(format!("{want:08x}"), got)
                .help("the file was damaged after it was written: copy it again from the node that wrote it");
                let holders: Vec<&str> = self
                    .plan
                    .stored
                    .iter()
                    .filter(|s| shards::blobs_of(s).contains(&blob))
                    .map(|s| s.name.as_str())
                    .collect();
                finding.tensor = holders.first().map(|name| match holders.len() {
                    1 => (*name).to_string(),
                    n => format!("{name} and {} more in the same storage", n - 1),
                });
                if self.plan.twins_may_differ && !self.is_taken(blob) {
                    finding.severity = Severity::Warning;
                }
                self.find(finding);
            }
        }
        Ok(())
    }

    /// True if something of a blob is in an output; what is compared only is not.
    fn is_taken(&self, blob: u32) -> bool {
        let parts = self.plan.outputs.iter().flat_map(|output| &output.parts);
        let mut taken = parts.flat_map(|part| &part.sources);
        taken.any(|&stored| shards::blobs_of(&self.plan.stored[stored as usize]).contains(&blob))
    }

    fn work_pads(&self, work: &mut Workspace) -> Result<()> {
        loop {
            let next = self.next_pad.fetch_add(1, Ordering::Relaxed) as usize;
            let Some(pad) = self.plan.pads.get(next) else { return Ok(()) };
            if self.stopped() {
                return Ok(());
            }
            if let Some(finding) = tile::check_pad(self.plan, &self.sources, pad, work)? {
                self.find(self.place(pad.stored, finding));
            }
        }
    }

    /// Names the file and rank of a stored tensor in a finding.
    fn place(&self, stored: u32, finding: Finding) -> Finding {
        place(self.plan, stored, finding)
    }

    fn report(&self, memory: MemoryUse) -> Result<Report> {
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
                self.find(
                    Finding::new(codes::NON_FINITE, "NaN or infinite elements")
                        .tensor(&output.name)
                        .expected("0", progress.non_finite)
                        .help(
                            "look at the run that wrote this checkpoint: such a model usually cannot be used",
                        ),
                );
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
            for part in &output.parts {
                if part.ops.iter().any(|op| !op.is_exact()) {
                    let ops: Vec<String> = part
                        .ops
                        .iter()
                        .map(|op| match op {
                            Op::Scale(x) => format!("x {x}"),
                            Op::Add(x) => format!("+ {x}"),
                        })
                        .collect();
                    self.find(
                        Finding::new(codes::LOSSY, format!("values changed: {}", ops.join(" ")))
                            .tensor(&output.name),
                    );
                    break;
                }
            }
        }
        for (&pair, drift) in lock(&self.twins).iter().filter(|(_, d)| d.differing > 0) {
            self.find(self.twin_finding(pair, drift));
        }
        let mut findings = std::mem::take(&mut *lock(&self.findings));
        findings.extend(shards::copies(self.plan, &self.sources)?);
        findings.extend(shards::duplicates(self.plan, &self.sources)?);
        findings.extend(shards::repeated_layers(self.plan, &self.sources)?);
        findings.extend(shards::swapped(self.plan, &self.sources, &findings)?);
        let (files, blocks) = shards::copied(self.plan, &self.sources)?;
        findings.extend(blocks);
        shards::told_once(&mut findings, files);
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
            format!("the fp32 master rounded to {narrow} is not the parameter"),
        )
        .expected(
            format!("{} equal elements", crate::tensor::element_count(&tensor.shape).unwrap_or(0)),
            format!("{} that differ, by up to {:e}", drift.differing, drift.largest),
        )
        .help("one of the two is stale: --weights params takes the parameters, `fastshard masters --repair OUT` rebuilds the masters from them; if the parameters are the damaged ones, restore their file");
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
            .help("correct the config (tied or not), or take the right file");
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
                .help("a file of another step or layer: copy the right one; if the run let replicas drift, --replicas mean averages them");
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
                    .severity(Severity::Note),
            );
        }
    }
    out
}

/// Reads bytes of one output from byte `start` (a whole number of elements) into `bytes`.
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
    let sources = Sources::new(plan, files, scratch_dir.to_path_buf(), Checksums::none(plan), READ_BLOCKS);
    let mut work = Workspace::new();
    let mut at = start;
    for chunk in bytes.chunks_mut(MIN_TILE as usize) {
        let seen = tile::make(plan, &sources, about, at, at + chunk.len() as u64, Twins::Leave, &mut work)?;
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
    for blob in blobs_of(plan, about) {
        files[plan.blobs[blob as usize].file as usize].unchanged()?;
    }
    Ok(())
}
