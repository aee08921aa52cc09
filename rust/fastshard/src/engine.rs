//! Executes a plan: tiles of output tensors are gathered, checked, hashed and handed to a sink.
//!
//! Destination-driven: a tile is a range of one output's bytes, so memory is bounded by workers x
//! tile whatever the size of a tensor, and hashing goes in any order.

#[cfg(feature = "steps")]
mod at;
mod blocks;
pub(crate) mod budget;
mod changes;
mod checksums;
mod coded;
mod deal;
mod equal_layers;
mod evidence;
mod factors;
mod gather;
mod learnt;
mod part_samples;
mod pool;
mod read;
mod read_ahead;
mod reads;
pub(crate) mod release;
mod report;
mod run;
mod shards;
pub(crate) mod tile;
mod turns;
mod values;
mod windows;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::codes;
use crate::error::{without_panic, Finding, Result};
use crate::hash::ChainingValue;
use crate::plan::tiles::Share;
use crate::plan::Plan;
use crate::stats::{Level, Seen};
use crate::steps::{self, Step};
use crate::storage::SourceFile;

#[cfg(feature = "steps")]
pub use at::At;
pub use budget::{admit, MemoryUse};
pub use evidence::Evidence;
pub use read::read;
pub use release::{decoding, Decoding};
pub(crate) use report::{figure, place};
use run::Run;

/// Smallest tile, in bytes.
const MIN_TILE: u64 = 256 << 10;
/// Maximum number of findings of one code that are kept; the rest is counted.
const MAX_FINDINGS_PER_CODE: usize = 1000;

/// Where tiles go.
pub trait Sink: Sync {
    /// Writes bytes of an output at an offset in the output's bytes.
    ///
    /// # Errors
    /// The reason why the bytes cannot be stored.
    fn write(&self, output: usize, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Records that a tile is done.
    ///
    /// # Errors
    /// The reason why the record cannot be stored.
    fn done(&self, _output: usize, _tile: &TileDone) -> Result<()> {
        Ok(())
    }

    /// The record of tile `index`, of tiles of `size` bytes, that an earlier run has written. It is only a
    /// claim: the engine hashes the bytes from [`Sink::read_back`], and makes the tile anew if they differ.
    ///
    /// # Errors
    /// The reason why the records cannot be read.
    fn claimed(&self, _output: usize, _index: u64, _size: u64) -> Result<Option<TileDone>> {
        Ok(None)
    }

    /// The record of tile `index`, of tiles of `size` bytes, that another process has written. The run has
    /// its evidence, so it uses the record as it is.
    ///
    /// # Errors
    /// The reason why the records cannot be read.
    fn adopted(&self, _output: usize, _index: u64, _size: u64) -> Result<Option<TileDone>> {
        Ok(None)
    }

    /// Fills `bytes` with the current content of the result, at an offset in the output's bytes. The engine
    /// calls it only for claimed tiles.
    ///
    /// # Errors
    /// The reason why the bytes cannot be read.
    fn read_back(&self, output: usize, _offset: u64, _bytes: &mut [u8]) -> Result<()> {
        Err(Finding::new(codes::INTERNAL, format!("output {output} was claimed and cannot be read back"))
            .into())
    }

    /// Records a tile of an earlier run that was read back and is not made again.
    fn kept(&self, _output: usize, _tile: &TileDone) {}

    /// True if the tiles of an output must come with their CRC32.
    fn checksummed(&self, _output: usize) -> bool {
        false
    }

    /// True if threads that write to one file wait for one another.
    fn locks_files(&self) -> bool {
        false
    }

    /// The number of writes that may wait for the disk at a time, besides those of the threads that compute.
    fn count_waiting(&self) -> u64 {
        0
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
    /// CRC32 of its bytes, if the sink requires it.
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
    /// Set to stop at the next tile, comparison or file.
    pub cancel: AtomicBool,
    /// Findings to report before the end of the run.
    pub notices: Mutex<Vec<Finding>>,
    /// The action of a test at places of this run.
    #[cfg(feature = "steps")]
    pub at: At,
}

impl Control {
    /// True until the run must stop.
    pub fn is_running(&self) -> bool {
        !self.cancel.load(Ordering::Relaxed)
    }

    /// Returns an error once the run must stop.
    ///
    /// # Errors
    /// `FS510` then.
    pub fn check_running(&self) -> Result<()> {
        match self.is_running() {
            true => Ok(()),
            false => Err(Finding::new(codes::INTERRUPTED, "stopped by the user").into()),
        }
    }

    /// Says that the run has come to a place; see [`steps`].
    pub(crate) fn reach(&self, step: Step) {
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
    /// Folder for members that must be unpacked.
    pub scratch_dir: PathBuf,
    /// Maximum bytes of decoded blocks to keep, if less than the budget allows.
    pub max_decoded: Option<u64>,
    /// Largest block that the sink assembles and encodes, in bytes; 0 if there are none.
    pub encodes: u64,
    /// Statistics to gather from the tiles.
    pub stats: Level,
}

/// The result of the engine for one output.
#[derive(Debug, Clone)]
pub struct OutputReport {
    /// BLAKE3 of the logical bytes.
    pub hash: [u8; 32],
    /// NaN or infinite elements.
    pub non_finite: u64,
    /// Its statistics, as far as they were requested.
    pub seen: Seen,
}

/// The outcome of a run.
#[derive(Debug)]
pub struct Report {
    /// Per output, in the plan's order.
    pub outputs: Vec<OutputReport>,
    /// Everything found; no error among them means the content may be published.
    pub findings: Vec<Finding>,
    /// Tile sizes, budget and workers, for users.
    pub memory: MemoryUse,
    /// Bytes of decoded blocks, and of those that were stored on disk meanwhile.
    pub decoded: (u64, u64),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a plan. Findings about the content do not stop the run, so that all are reported; the
/// caller publishes nothing if one of them is an error.
///
/// # Errors
/// The reason why the run cannot finish: I/O, a changed source, a budget too small, an interrupt.
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
    let (sizes, mut memory) = budget::divide(plan, options, Some(sizes))?;
    let run = Run::new(plan, files, sink, options, sizes, &mut memory, Some(share), control);
    run.make_all(files)?;
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
    mut memory: MemoryUse,
    evidence: &[Evidence],
    control: &Control,
) -> Result<Report> {
    let mut run = Run::new(plan, files, sink, options, sizes, &mut memory, None, control);
    for evidence in evidence {
        run.learn(evidence)?;
        run.pads.retain(|pad| !evidence.has_looked_at(*pad));
    }
    run.make_all(files)?;
    without_panic(|| run.report(memory))
}
