//! Memory of this process, and what of it may be used before there is a plan.
//!
//! The engine divides a budget among tiles and workers. Headers and names are there before it: what they take is
//! reckoned from their bytes and refused before it is taken.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use crate::codes;
use crate::error::{Finding, Result};
use crate::kernel;

/// MiB that a help advises at least: what comes after the headers needs some, too.
const PLENTY: u64 = 256;
/// Bytes that a header takes per byte of it while it is read: itself and what it says.
const PER_HEADER_BYTE: u64 = 2;
/// Bytes that are kept of a file per tensor at least, besides its name: 300 were measured.
const PER_TENSOR_KEPT: u64 = 250;
/// Bytes that a plan takes at least per byte of the tensors' names, while it is made: no good plan is refused.
const PER_NAME_BYTE: u64 = 4;
/// Bytes that a plan takes at least per tensor besides: 1.5 to 5 KiB were measured.
const PER_TENSOR: u64 = 1200;

/// Anonymous resident memory of this process, in bytes; 0 where the system does not tell.
pub fn anonymous_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|l| l.strip_prefix("RssAnon:"))
        .and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// What may be taken until a limit of anonymous memory is reached.
#[derive(Debug)]
pub struct Room {
    limit: u64,
    baseline: u64,
    /// Bytes of headers that are being read.
    reading: AtomicU64,
    /// Bytes that are kept of those that were.
    kept: AtomicU64,
    /// Tensors in the headers that were read, and bytes of their names.
    tensors: AtomicU64,
    names: AtomicU64,
}

/// Room for the header of one file; given back when it is read.
#[derive(Debug)]
pub struct HeaderRoom {
    room: Arc<Room>,
    asked: AtomicU64,
}

impl HeaderRoom {
    /// Room for the header of a further file.
    pub fn of(room: &Arc<Room>) -> HeaderRoom {
        HeaderRoom { room: Arc::clone(room), asked: AtomicU64::new(0) }
    }

    /// Asks for what reading and parsing `bytes` more of the header of `file` takes.
    ///
    /// # Errors
    /// `FS512` if all headers that are being read or kept are beyond the limit.
    pub fn ask(&self, file: &Path, bytes: u64) -> Result<()> {
        self.asked.fetch_add(bytes, Ordering::Relaxed);
        let reading = self.room.reading.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let kept = self.room.kept.load(Ordering::Relaxed);
        let need = reading.saturating_mul(PER_HEADER_BYTE).saturating_add(kept);
        self.room.holds(need, "the headers of the files", Some(file))
    }

    /// Counts the tensors of the file, and the bytes of their names. True if these, and a plan of all that were counted, may
    /// be kept; of a file for which it is false nothing is to be kept.
    pub fn keep(&self, tensors: u64, names: u64) -> bool {
        let room = &self.room;
        room.tensors.fetch_add(tensors, Ordering::Relaxed);
        room.names.fetch_add(names, Ordering::Relaxed);
        let may_be_kept = room.plan_all().is_ok();
        if may_be_kept {
            room.kept.fetch_add(names + tensors * PER_TENSOR_KEPT, Ordering::Relaxed);
        }
        may_be_kept
    }
}

impl Drop for HeaderRoom {
    fn drop(&mut self) {
        self.room.reading.fetch_sub(self.asked.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Room {
    /// Room up to `limit` bytes, what the process holds already included.
    pub fn up_to(limit: u64) -> Room {
        kernel::trim();
        let [reading, kept, tensors, names] = [(); 4].map(|()| AtomicU64::new(0));
        Room { limit, baseline: anonymous_memory(), reading, kept, tensors, names }
    }

    /// Asks for what the headers that were read take, and planning for all of their tensors.
    ///
    /// # Errors
    /// `FS512` if it is beyond the limit.
    pub fn plan_all(&self) -> Result<()> {
        let (tensors, names) = (self.tensors.load(Ordering::Relaxed), self.names.load(Ordering::Relaxed));
        let need = |per_name: u64, per_tensor: u64| {
            names.saturating_mul(per_name).saturating_add(tensors.saturating_mul(per_tensor))
        };
        self.holds(need(1 + PER_NAME_BYTE, PER_TENSOR_KEPT + PER_TENSOR), "the names of the tensors", None)
    }

    /// Asks for what planning takes for `tensors` tensors with names of `names` bytes.
    ///
    /// # Errors
    /// `FS512` if it is beyond the limit.
    pub fn plan(&self, tensors: u64, names: u64) -> Result<()> {
        let need = names.saturating_mul(PER_NAME_BYTE).saturating_add(tensors.saturating_mul(PER_TENSOR));
        self.holds(need, "the names of the tensors", None)
    }

    /// Refuses to go on where what is in use already, and `more` bytes, are too much.
    ///
    /// # Errors
    /// `FS512` if the process would hold more than the limit.
    pub fn look(&self, more: u64) -> Result<()> {
        if anonymous_memory().saturating_add(more) <= self.limit {
            return Ok(());
        }
        // What was freed meanwhile does not count.
        kernel::trim();
        let used = anonymous_memory().saturating_sub(self.baseline);
        self.holds(used.saturating_add(more), "planning", None)
    }

    fn holds(&self, need: u64, what: &str, file: Option<&Path>) -> Result<()> {
        let all = self.baseline.saturating_add(need);
        if all <= self.limit {
            return Ok(());
        }
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let finding =
            Finding::new(codes::MEMORY_BUDGET, format!("the memory budget is too small for {what}"))
                .expected(
                    format!("at least {} MiB (baseline {} MiB)", mib(all), mib(self.baseline)),
                    format!("{} MiB", self.limit >> 20),
                )
                .help("allow more memory")
                .run(format!("--memory {}MiB", mib(all).max(PLENTY)));
        Err(match file {
            Some(file) => finding.file(file).into(),
            None => finding.into(),
        })
    }
}
