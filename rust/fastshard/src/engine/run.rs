//! A run in progress: workers take tiles one after another, and check blobs after their last reader.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Builder;
use std::time::Instant;

use super::checksums::Checksums;
use super::deal::{Deal, Hand};
use super::gather::Sources;
use super::learnt::Drift;
use super::read_ahead::ReadAhead;
use super::tile::{self, Twins, Workspace};
use super::turns::Turns;
use super::{lock, place, release, Control, MemoryUse, Options, Sink, TileDone};
use crate::codes;
use crate::error::{without_panic, Error, Finding, Result, Severity};
use crate::hash::{self, TileHashes};
use crate::kernel;
use crate::plan::blobs::{blobs_of_output, blobs_of_tensor};
use crate::plan::tiles::{Share, TileRun};
use crate::plan::{Form, Output, Part, Plan};
use crate::publish::direct;
use crate::stats::Gather;
use crate::steps::Step;
use crate::storage::SourceFile;
use crate::topics;

/// Minimum bytes to write for which an additional thread that waits for the disk is worth starting.
const WORTH_WAITING: u64 = 8 << 20;

/// The progress of an output.
pub(super) struct Progress {
    pub(super) hashes: TileHashes,
    /// The hash, once every tile is done.
    pub(super) hash: Option<[u8; 32]>,
    pub(super) non_finite: u64,
    pub(super) drift: BTreeMap<usize, Drift>,
    pub(super) undecided: BTreeMap<usize, String>,
}

/// A run of a plan, or of a share of it.
pub(super) struct Run<'a> {
    pub(super) plan: &'a Plan,
    pub(super) sources: Sources<'a>,
    pub(super) sink: &'a dyn Sink,
    pub(super) control: &'a Control,
    /// Size of each output's tiles.
    pub(super) tiles: Vec<u64>,
    /// What is made, and by which worker.
    deal: Deal,
    /// Of the workers as many compute at a time as there are to be threads.
    turns: Turns,
    /// What is requested before it is read.
    read_ahead: ReadAhead<'a>,
    workers: u64,
    /// Tiles that were begun.
    begun: AtomicU64,
    /// Paddings to check.
    pub(super) pads: Vec<u32>,
    pub(super) next_pad: AtomicU32,
    pub(super) outputs: Vec<Mutex<Progress>>,
    pub(super) stats: Gather,
    /// Outputs with a tile that is not zero.
    pub(super) filled: Vec<AtomicBool>,
    pub(super) remaining: Vec<AtomicU64>,
    /// Outputs that still read a blob.
    pub(super) readers: Vec<AtomicU32>,
    /// Blobs that are also read outside this run, so data that this run has not read may still have a reader.
    pub(super) read_elsewhere: Vec<bool>,
    /// Whether this run is a share, whose evidence is judged with that of the others.
    pub(super) is_share: bool,
    pub(super) releases: release::Releases,
    pub(super) blobs_of: Vec<Vec<u32>>,
    pub(super) findings: Mutex<Vec<Finding>>,
    /// The distance of each stored tensor from its twin.
    pub(super) twins: Mutex<BTreeMap<(u32, u32), Drift>>,
    pub(super) failed: Mutex<Option<Error>>,
}

impl Progress {
    fn of(output: &Output, tile: u64) -> Mutex<Progress> {
        Mutex::new(Progress {
            hashes: TileHashes::new(tile, output.nbytes()),
            hash: None,
            non_finite: 0,
            drift: BTreeMap::new(),
            undecided: BTreeMap::new(),
        })
    }
}

fn tiles_of(output: &Output, size: u64) -> u64 {
    output.nbytes().div_ceil(size)
}

/// For each blob, the number of outputs of this run that read it, and whether it is also read outside this
/// run.
fn readers(
    plan: &Plan,
    sizes: &[u64],
    blobs_of: &[Vec<u32>],
    remaining: &[u64],
) -> (Vec<AtomicU32>, Vec<bool>) {
    let mut readers = vec![0; plan.blobs.len()];
    let mut elsewhere = vec![false; plan.blobs.len()];
    for (i, blobs) in blobs_of.iter().enumerate() {
        let all = tiles_of(&plan.outputs[i], sizes[i]);
        for &blob in blobs {
            readers[blob as usize] += u32::from(remaining[i] > 0);
            elsewhere[blob as usize] |= remaining[i] < all;
        }
    }
    (readers.into_iter().map(AtomicU32::new).collect(), elsewhere)
}

/// True if tiles in another order would take more memory or time: for data that is decoded, unpacked,
/// assembled or changed by factors, few of which are kept, and for bytes that are requested from another
/// host or a store in advance.
fn is_made_in_order(plan: &Plan, files: &[Arc<SourceFile>]) -> bool {
    plan.blobs.iter().any(|blob| blob.encoded || blob.deflated)
        || plan.stored.iter().any(|stored| !stored.changes.is_empty())
        || plan.files.iter().any(|file| matches!(file.form, Form::Arrays(_)))
        || files.iter().any(|file| file.is_lent() || file.is_stored() || file.blocks_apart().is_some())
}

/// The number of additional workers that are worth having to wait for a disk: few if there is little to
/// write.
fn count_waiting(plan: &Plan, sink: &dyn Sink, sizes: &[u64], runs: &[TileRun]) -> u64 {
    let most = sink.count_waiting();
    if most == 0 {
        return 0;
    }
    let is_long = |run: &&TileRun| sizes[run.output as usize] >= direct::LEAST;
    let bytes: u64 = runs.iter().filter(is_long).map(|run| run.bytes(plan, sizes)).sum();
    most.min(bytes / WORTH_WAITING)
}

/// All tiles of all outputs, in the order in which decoded blocks are needed for the shortest time.
fn all_runs(plan: &Plan, sizes: &[u64], blobs_of: &[Vec<u32>]) -> Vec<TileRun> {
    let whole = |i: usize| TileRun { output: i as u32, first: 0, end: tiles_of(&plan.outputs[i], sizes[i]) };
    // An empty output has no tiles.
    release::order(plan, blobs_of).into_iter().map(whole).filter(|run| run.end > 0).collect()
}

impl<'a> Run<'a> {
    /// A run of the whole plan, or of a share of it.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        plan: &'a Plan,
        files: &'a [Arc<SourceFile>],
        sink: &'a dyn Sink,
        options: &Options,
        sizes: Vec<u64>,
        memory: &mut MemoryUse,
        share: Option<&Share>,
        control: &'a Control,
    ) -> Run<'a> {
        let blobs_of: Vec<Vec<u32>> = plan.outputs.iter().map(|o| blobs_of_output(plan, o)).collect();
        let (runs, pads) = match share {
            Some(share) => {
                (share.tiles.clone(), share.pads.iter().flat_map(|&(first, end)| first..end).collect())
            }
            None => (all_runs(plan, &sizes, &blobs_of), (0..plan.pads.len() as u32).collect()),
        };
        let mut remaining = vec![0; plan.outputs.len()];
        runs.iter().for_each(|run| remaining[run.output as usize] += run.end - run.first);
        let (readers, read_elsewhere) = readers(plan, &sizes, &blobs_of, &remaining);
        let checksums = Checksums::new(plan, memory.checksums);
        let sources =
            Sources::new(plan, files, options.scratch_dir.clone(), checksums, memory.decoded, Some(control));
        let releases = release::Releases::new(plan, &blobs_of, &sizes, &runs);
        control.total.store(runs.iter().map(|run| run.bytes(plan, &sizes)).sum(), Ordering::Relaxed);
        control.done.store(0, Ordering::Relaxed);
        let waiting = memory.make_room(count_waiting(plan, sink, &sizes, &runs));
        let in_order = is_made_in_order(plan, files);
        log::debug!(
            target: topics::ENGINE,
            "{} sources: {} on network filesystems, read by ranges, {} on other hosts; the others also by maps; tiles {}",
            files.len(),
            files.iter().filter(|file| file.is_network() && !file.is_lent()).count(),
            files.iter().filter(|file| file.is_lent()).count(),
            if in_order { "in order" } else { "by files of the result" },
        );
        log::debug!(
            target: topics::ENGINE,
            "{} workers and {waiting} that wait for the disk, tiles of {} bytes at most, {} of {} MiB of memory at most",
            memory.workers,
            memory.tile,
            memory.bound.div_ceil(1 << 20),
            options.memory >> 20,
        );
        let file_of = |output: usize| plan.outputs[output].file;
        let file_of: Option<&dyn Fn(usize) -> u32> = match sink.locks_files() && !in_order {
            true => Some(&file_of),
            false => None,
        };
        Run {
            plan,
            sources,
            releases,
            sink,
            control,
            // Those that wait help the others: what is written lies together.
            deal: Deal::new(runs, memory.workers, file_of),
            turns: Turns::new(memory.workers),
            read_ahead: ReadAhead::new(plan, files),
            workers: memory.workers + waiting,
            begun: AtomicU64::new(0),
            pads,
            next_pad: AtomicU32::new(0),
            outputs: plan.outputs.iter().zip(&sizes).map(|(o, &size)| Progress::of(o, size)).collect(),
            stats: Gather::new(options.stats, plan.outputs.len()),
            filled: plan.outputs.iter().map(|_| AtomicBool::new(false)).collect(),
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

    /// Makes all tiles on as many threads as the budget allows, and then examines the sources once more.
    pub(super) fn make_all(&self, files: &[Arc<SourceFile>]) -> Result<()> {
        self.control.reach(Step::Opened);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            if self.read_ahead.is_needed() {
                let request = || {
                    let (is_made, is_stopped) =
                        (|output, tile| !self.may_keep(output, tile), || self.stopped());
                    let all = || {
                        self.read_ahead.request_all(&self.deal, &self.tiles, &is_made, &is_stopped);
                        Ok(())
                    };
                    without_panic(all).unwrap_or_else(|error| self.fail(error));
                };
                if Builder::new().spawn_scoped(scope, request).is_err() {
                    self.read_ahead.give_up();
                }
            }
            for _ in 1..self.workers {
                // Where the system starts no more threads, those that it has started do the work.
                let _ = Builder::new().spawn_scoped(scope, || self.work());
            }
            self.work();
        });
        self.read_ahead.end();
        self.control.reach(Step::TilesMade);
        log::debug!(
            target: topics::ENGINE,
            "made {} of {} bytes in {:.3} s",
            self.control.done.load(Ordering::Relaxed),
            self.control.total.load(Ordering::Relaxed),
            begun.elapsed().as_secs_f64(),
        );
        if let Some(error) = lock(&self.failed).take() {
            return Err(error);
        }
        if !self.control.is_running() {
            return Err(Finding::new(codes::INTERRUPTED, "stopped by the user")
                .help("continue the run")
                .run("--resume")
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
        !self.control.is_running() || lock(&self.failed).is_some()
    }

    fn fail(&self, error: Error) {
        lock(&self.failed).get_or_insert(error);
    }

    pub(super) fn find(&self, finding: Finding) {
        lock(&self.findings).push(finding);
    }

    fn work(&self) {
        let all = || {
            let _turn = self.turns.begin();
            let mut work = Workspace::new()?;
            self.work_tiles(&mut work).and_then(|()| self.work_pads(&mut work))
        };
        if let Err(error) = without_panic(all) {
            self.fail(error);
        }
    }

    fn work_tiles(&self, work: &mut Workspace) -> Result<()> {
        let mut hand = Hand::default();
        while let Some(place) = self.deal.take(&mut hand).filter(|_| !self.stopped()) {
            if !self.read_ahead.has_passed(place) {
                self.turns.wait(|| self.read_ahead.wait_for(place));
            }
            let (output, tile) = self.deal.tile(place);
            self.control.reach(Step::Tile(self.begun.fetch_add(1, Ordering::Relaxed)));
            self.tile(output, tile, work)?;
            self.read_ahead.note_done();
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

    /// True if an earlier run's record of an output's tile says all: comparisons of copies and statistics are in none.
    fn takes_claims(&self, output: &Output) -> bool {
        let alone =
            |p: &Part| p.sources.len() == 1 && self.plan.stored[p.sources[0] as usize].twins.is_empty();
        !self.stats.wanted() && output.parts.iter().all(alone)
    }

    /// True if there is a record of a tile, which is not made again if its bytes are still in the result.
    fn may_keep(&self, index: usize, tile: u64) -> bool {
        let size = self.tiles[index];
        let is_there = |found: Result<Option<TileDone>>| matches!(found, Ok(Some(_)));
        is_there(self.sink.adopted(index, tile, size))
            || self.takes_claims(&self.plan.outputs[index]) && is_there(self.sink.claimed(index, tile, size))
    }

    /// The record of a tile of an earlier run, if its bytes are still in the result.
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
        if !self.takes_claims(output) {
            return Ok(None);
        }
        let Some(claim) = self.sink.claimed(index, tile, size)? else { return Ok(None) };
        if (claim.index, claim.size) != (tile, size) {
            return Ok(None);
        }
        let bytes = work.tile_bytes((end - start) as usize)?;
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
        work.tile.place((end - start) as usize, output.offset + start)?;
        let seen = tile::make(self.plan, &self.sources, output, start, end, Twins::Compare, work)?;
        let bytes = work.tile_bytes((end - start) as usize)?;
        let value = hash::tile_value(bytes, tile, size, output.nbytes());
        let non_finite = kernel::count_non_finite(output.dtype, bytes);
        let crc32 = self.sink.checksummed(index).then(|| hash::crc32(bytes));
        self.stats.add(index, output, start, bytes);
        if !self.filled[index].load(Ordering::Relaxed) && !kernel::is_zero(bytes) {
            self.filled[index].store(true, Ordering::Relaxed);
        }
        self.turns.wait(|| self.sink.write(index, start, bytes))?;
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
                self.find(self.damaged(blob, want, got));
            }
        }
        Ok(())
    }

    /// The finding for a blob whose checksum differs from the one that its file states.
    fn damaged(&self, blob: u32, want: u32, got: Option<u32>) -> Finding {
        let about = &self.plan.blobs[blob as usize];
        let member = about.member.as_deref().unwrap_or("?");
        let got = got.map_or("none".into(), |got| format!("{got:08x}"));
        let mut finding = Finding::new(codes::CRC, format!("the CRC32 of member {member} does not match"))
            .file(self.plan.label(about.file))
            .expected(format!("{want:08x}"), got)
            .help("copy the file again from the node that wrote it; it was damaged after it was written");
        let stored = self.plan.stored.iter();
        let holders: Vec<&str> =
            stored.filter(|s| blobs_of_tensor(s).contains(&blob)).map(|s| s.name.as_str()).collect();
        finding.tensor = holders.first().map(|name| match holders.len() {
            1 => (*name).to_string(),
            n => format!("{name} and {} more in the same storage", n - 1),
        });
        if self.plan.twins_may_differ && !self.is_taken(blob) {
            finding.severity = Severity::Warning;
        }
        finding
    }

    /// True if an output has data of a blob; comparing it alone does not count.
    fn is_taken(&self, blob: u32) -> bool {
        let parts = self.plan.outputs.iter().flat_map(|output| &output.parts);
        let mut taken = parts.flat_map(|part| &part.sources);
        taken.any(|&stored| blobs_of_tensor(&self.plan.stored[stored as usize]).contains(&blob))
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
    pub(super) fn place(&self, stored: u32, finding: Finding) -> Finding {
        place(self.plan, stored, finding)
    }
}
