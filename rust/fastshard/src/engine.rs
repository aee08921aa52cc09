//! Executes a plan: tiles of output tensors are gathered, checked, hashed and handed to a sink.
//!
//! Destination-driven: a tile is a range of one output's bytes, so memory is bounded by workers x
//! tile whatever the size of a tensor, and hashing goes in any order.

mod blocks;
pub(crate) mod budget;
mod changes;
pub(crate) mod checksums;
mod evidence;
pub(crate) mod gather;
pub(crate) mod release;
mod report;
mod scales;
pub(crate) mod shards;
pub(crate) mod tile;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::codes;
use crate::distributed::share::{Share, TileRun};
use crate::error::{without_panic, Error, Finding, Result, Severity};
use crate::hash::{self, ChainingValue, TileHashes};
use crate::kernel;
use crate::plan::{Combine, Output, Part, Plan};
use crate::stats::{Gather, Level, Seen};
use crate::steps::{self, Step};
use crate::storage::SourceFile;

pub use budget::{admit, MemoryUse};
use checksums::Checksums;
pub use evidence::Evidence;
use gather::Sources;
pub use release::{decoding, Decoding};
pub(crate) use report::{limit, place};
use tile::{Drift, Twins, Workspace};

/// Smallest tile, in bytes.
const MIN_TILE: u64 = 256 << 10;
/// Bytes of decoded blocks held where a range of one tensor is read.
const READ_BLOCKS: u64 = 64 << 20;
/// Bytes that are worth a thread where a range of one tensor is read.
const READ_SHARE: usize = 4 << 20;
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

    /// The record of tile `index`, of tiles of `size` bytes, that another process has written and whose evidence the
    /// run was given: it is taken as it is.
    ///
    /// # Errors
    /// Whatever keeps the records from being read.
    fn adopted(&self, _output: usize, _index: u64, _size: u64) -> Result<Option<TileDone>> {
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
    /// What a test does at places of this run.
    #[cfg(feature = "steps")]
    pub at: steps::At,
}

impl Control {
    /// Says that the run has come to a place; see [`steps`].
    fn reach(&self, step: Step) {
        #[cfg(feature = "steps")]
        self.at.call(self, step);
        steps::reach(step);
    }
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
    /// Size of each output's tiles.
    tiles: Vec<u64>,
    /// What is made, in this order, and the number of tiles before each run.
    runs: Vec<TileRun>,
    first: Vec<u64>,
    total_tiles: u64,
    next: AtomicU64,
    /// Paddings that are looked at.
    pads: Vec<u32>,
    next_pad: AtomicU32,
    outputs: Vec<Mutex<Progress>>,
    stats: Gather,
    remaining: Vec<AtomicU64>,
    /// Outputs that still read a blob.
    readers: Vec<AtomicU32>,
    /// Blobs that are read beyond this run too: what it has not read of them is not known to be nobody's.
    read_elsewhere: Vec<bool>,
    /// Whether this run is a share, whose evidence is judged with that of the others.
    is_share: bool,
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
    let (mut sizes, memory) = budget::divide(plan, options, None)?;
    if let Some(tile) = tile {
        sizes.fill(tile.next_power_of_two().max(1024));
    }
    run_whole(plan, files, sink, options, sizes, memory, &[], control)
}

/// Makes one process's share of a plan, whose tiles have these sizes; what it learnt, for [`conclude`].
///
/// # Errors
/// As [`execute`]; `FS512` also if the budget does not hold a tile of the sizes given.
pub fn work(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    sink: &dyn Sink,
    options: &Options,
    sizes: &[u64],
    share: &Share,
    control: &Control,
) -> Result<Evidence> {
    plan.validate()?;
    let (sizes, memory) = budget::divide(plan, options, Some(sizes))?;
    let run = Run::new(plan, files, sink, options, sizes, &memory, Some(share), control);
    run.make_all(files, &memory)?;
    Ok(run.evidence(&share.pads))
}

/// Executes a plan of which others have made shares: what the sink says is adopted is not looked at, all else is made,
/// and everything is judged together.
///
/// # Errors
/// As [`work`].
pub fn conclude(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    sink: &dyn Sink,
    options: &Options,
    sizes: &[u64],
    evidence: &[Evidence],
    control: &Control,
) -> Result<Report> {
    plan.validate()?;
    let (sizes, memory) = budget::divide(plan, options, Some(sizes))?;
    run_whole(plan, files, sink, options, sizes, memory, evidence, control)
}

#[allow(clippy::too_many_arguments)]
fn run_whole(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    sink: &dyn Sink,
    options: &Options,
    sizes: Vec<u64>,
    memory: MemoryUse,
    evidence: &[Evidence],
    control: &Control,
) -> Result<Report> {
    let mut run = Run::new(plan, files, sink, options, sizes, &memory, None, control);
    for evidence in evidence {
        run.learn(evidence)?;
        run.pads.retain(|pad| !evidence.has_looked_at(*pad));
    }
    run.make_all(files, &memory)?;
    without_panic(|| run.report(memory))
}

pub(crate) fn blobs_of(plan: &Plan, output: &Output) -> Vec<u32> {
    let mut blobs: Vec<u32> = output
        .parts
        .iter()
        .flat_map(|p| &p.sources)
        .flat_map(|&s| {
            let stored = &plan.stored[s as usize];
            let scale = stored.scale.as_ref().map(|scale| scale.stored);
            let factors = stored.changes.iter().flat_map(crate::plan::Change::needs);
            std::iter::once(s).chain(stored.twins.iter().copied()).chain(scale).chain(factors)
        })
        .flat_map(|s| shards::blobs_of(&plan.stored[s as usize]))
        .collect();
    blobs.sort_unstable();
    blobs.dedup();
    blobs
}

impl<'a> Run<'a> {
    /// A run of the whole plan, or of a share of it.
    #[allow(clippy::too_many_arguments)]
    fn new(
        plan: &'a Plan,
        files: &'a [Arc<SourceFile>],
        sink: &'a dyn Sink,
        options: &Options,
        sizes: Vec<u64>,
        memory: &MemoryUse,
        share: Option<&Share>,
        control: &'a Control,
    ) -> Run<'a> {
        let blobs_of: Vec<Vec<u32>> = plan.outputs.iter().map(|o| blobs_of(plan, o)).collect();
        let count = |o: &Output, size: u64| o.nbytes().div_ceil(size);
        let (runs, pads) = match share {
            Some(share) => {
                (share.tiles.clone(), share.pads.iter().flat_map(|&(first, end)| first..end).collect())
            }
            None => {
                let whole =
                    |i: usize| TileRun { output: i as u32, first: 0, end: count(&plan.outputs[i], sizes[i]) };
                // An empty output has no tiles.
                let order = release::order(plan, &blobs_of).into_iter().map(whole);
                (order.filter(|run| run.end > 0).collect(), (0..plan.pads.len() as u32).collect::<Vec<_>>())
            }
        };
        let mut remaining = vec![0; plan.outputs.len()];
        let mut first = Vec::with_capacity(runs.len());
        let mut total_tiles = 0;
        for run in &runs {
            first.push(total_tiles);
            total_tiles += run.end - run.first;
            remaining[run.output as usize] += run.end - run.first;
        }
        let readers: Vec<AtomicU32> = (0..plan.blobs.len()).map(|_| AtomicU32::new(0)).collect();
        let mut read_elsewhere = vec![false; plan.blobs.len()];
        for (i, blobs) in blobs_of.iter().enumerate() {
            let all = count(&plan.outputs[i], sizes[i]);
            for &blob in blobs {
                readers[blob as usize].fetch_add(u32::from(remaining[i] > 0), Ordering::Relaxed);
                read_elsewhere[blob as usize] |= remaining[i] < all;
            }
        }
        let progress = |o: &Output, size: u64| {
            Mutex::new(Progress {
                hashes: TileHashes::new(size, o.nbytes()),
                hash: None,
                non_finite: 0,
                drift: BTreeMap::new(),
                undecided: BTreeMap::new(),
            })
        };
        let checksums = Checksums::new(plan, memory.checksums);
        let sources = Sources::new(plan, files, options.scratch_dir.clone(), checksums, memory.held);
        let releases = release::Releases::new(plan, &blobs_of, &sizes, &runs);
        control.total.store(runs.iter().map(|run| run.bytes(plan, &sizes)).sum(), Ordering::Relaxed);
        control.done.store(0, Ordering::Relaxed);
        Run {
            plan,
            sources,
            releases,
            sink,
            control,
            runs,
            first,
            total_tiles,
            next: AtomicU64::new(0),
            pads,
            next_pad: AtomicU32::new(0),
            outputs: plan.outputs.iter().zip(&sizes).map(|(o, &size)| progress(o, size)).collect(),
            stats: Gather::new(options.stats, plan.outputs.len()),
            remaining: remaining.into_iter().map(AtomicU64::new).collect(),
            tiles: sizes,
            readers,
            read_elsewhere,
            is_share: share.is_some(),
            blobs_of,
            findings: Mutex::new(Vec::new()),
            twins: Mutex::default(),
            failed: Mutex::new(None),
        }
    }

    /// Makes all that is to be made, on as many threads as the budget allows, and looks at the sources once more.
    fn make_all(&self, files: &[Arc<SourceFile>], memory: &MemoryUse) -> Result<()> {
        self.control.reach(Step::Opened);
        std::thread::scope(|scope| {
            for _ in 1..memory.workers {
                scope.spawn(|| self.work());
            }
            self.work();
        });
        self.control.reach(Step::Made);
        if let Some(error) = lock(&self.failed).take() {
            return Err(error);
        }
        if self.control.cancel.load(Ordering::Relaxed) {
            return Err(Finding::new(codes::INTERRUPTED, "stopped by the user")
                .help("run again with --resume to continue")
                .into());
        }
        for file in files {
            file.unchanged()?;
            file.blocks_unchanged()?;
            if let Some(warning) = file.touched()? {
                self.find(warning);
            }
        }
        Ok(())
    }

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
            self.control.reach(Step::Tile(global));
            // The last run that starts at or before this tile.
            let place = self.first.partition_point(|f| *f <= global) - 1;
            let run = self.runs[place];
            self.tile(run.output as usize, run.first + global - self.first[place], work)?;
        }
        Ok(())
    }

    fn tile(&self, index: usize, tile: u64, work: &mut Workspace) -> Result<()> {
        let output = &self.plan.outputs[index];
        let (size, total) = (self.tiles[index], output.nbytes());
        let (start, end) = (tile * size, ((tile + 1) * size).min(total));
        match self.keep(index, tile, start, end, work)? {
            // Of a share, whoever puts it together with the others takes the tiles from the sink.
            Some(_) if self.is_share => {}
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
        if let Some(done) = self.sink.adopted(index, tile, size)? {
            self.sink.kept(index, &done);
            return Ok(Some(done));
        }
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
        if !self.is_share {
            progress.hashes.add(tile, value);
            progress.non_finite += non_finite;
        }
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
        if !self.read_elsewhere[blob as usize] {
            self.verify_blob(blob, work)?;
        }
        self.sources.release(blob);
        Ok(())
    }

    fn verify_blob(&self, blob: u32, work: &mut Workspace) -> Result<()> {
        if !self.sources.is_tracked(blob) {
            return Ok(());
        }
        self.sources.finish(blob, work.span())?;
        if self.is_share {
            // Whoever has all the checksums compares them.
            return Ok(());
        }
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
                .help("the file was damaged after it was written: copy the file again from the node that wrote it");
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
            let Some(&pad) = self.pads.get(next) else { return Ok(()) };
            if self.stopped() {
                return Ok(());
            }
            let pad = &self.plan.pads[pad as usize];
            if let Some(finding) = tile::check_pad(self.plan, &self.sources, pad, work)? {
                self.find(self.place(pad.stored, finding));
            }
        }
    }

    /// Names the file and rank of a stored tensor in a finding.
    fn place(&self, stored: u32, finding: Finding) -> Finding {
        place(self.plan, stored, finding)
    }
}

/// Reads bytes of one output from byte `start` (a whole number of elements) into `bytes`, on as many threads as there is work
/// for, `threads` at most.
///
/// Copies that must be equal are compared, and what must be zero is looked at; what takes a look at all of the sources, checksums
/// among it, is for [`run`].
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
    let sources = Sources::new(plan, files, scratch_dir.to_path_buf(), Checksums::none(plan), READ_BLOCKS);
    let share = bytes.len().div_ceil(threads.max(1)).max(READ_SHARE).next_multiple_of(MIN_TILE as usize);
    let mut shares = bytes.chunks_mut(share).zip((start..).step_by(share));
    let made = |(bytes, at)| read_run(plan, &sources, output, at, bytes);
    let first = shares.next();
    std::thread::scope(|scope| {
        let others: Vec<_> = shares.map(|other| scope.spawn(move || made(other))).collect();
        let own = first.map_or(Ok(()), made);
        let rest = others.into_iter().map(|other| other.join().expect("a read does not panic"));
        std::iter::once(own).chain(rest).collect::<Result<()>>()
    })?;
    for blob in blobs_of(plan, about) {
        files[plan.blobs[blob as usize].file as usize].unchanged()?;
    }
    Ok(())
}

/// Reads a run of bytes of one output on this thread.
fn read_run(plan: &Plan, sources: &Sources<'_>, output: usize, start: u64, bytes: &mut [u8]) -> Result<()> {
    let about = &plan.outputs[output];
    let mut work = Workspace::new();
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
