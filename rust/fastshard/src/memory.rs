//! Memory of this process, and what of it may be used before there is a plan.
//!
//! The engine divides a budget among tiles and workers. Headers and names come before it: their memory is
//! estimated from their bytes, and refused before it is allocated.

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::{fmt, io, result};

use crate::codes;
use crate::error::{Error, Finding, Result, MORE_MEMORY};
use crate::kernel;

/// Minimum MiB that a help advises, as the work after the headers needs memory too.
const PLENTY: u64 = 256;
/// Bytes of memory per byte of a header while it is read, for the header and its content.
const PER_HEADER_BYTE: u64 = 2;
/// Minimum bytes that are kept per tensor of a file, besides its name: 200 were measured.
const PER_TENSOR_KEPT: u64 = 170;
/// Minimum bytes of a plan per byte of the tensors' names while it is made, so that no good plan is refused.
/// Its records share the names; lists of names do not.
const PER_NAME_BYTE: u64 = 1;
/// Minimum further bytes of a plan per tensor: 0.6 to 2 KiB were measured.
const PER_TENSOR: u64 = 500;

/// The error that the system has no memory left for a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoMemory {
    bytes: usize,
}

impl fmt::Display for NoMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the system has no memory left for a buffer of {} MiB", self.bytes.div_ceil(1 << 20))
    }
}

impl std::error::Error for NoMemory {}

impl From<NoMemory> for Error {
    fn from(error: NoMemory) -> Self {
        Finding::new(codes::MEMORY_BUDGET, error.to_string()).help(MORE_MEMORY).into()
    }
}

impl From<NoMemory> for io::Error {
    fn from(error: NoMemory) -> Self {
        io::Error::new(io::ErrorKind::OutOfMemory, error)
    }
}

/// Allocates a buffer of `len` zero bytes. Everything that can be large is allocated here, because elsewhere
/// a lack of memory aborts the process.
///
/// # Errors
/// [`NoMemory`] if the system has none left.
pub fn allocate(len: usize) -> result::Result<Vec<u8>, NoMemory> {
    kernel::allocate_zeros(len).ok_or(NoMemory { bytes: len })
}

/// Allocates `len` default values.
///
/// # Errors
/// [`NoMemory`] if the system has none left.
pub fn allocate_values<T: Clone + Default>(len: usize) -> result::Result<Vec<T>, NoMemory> {
    let mut values = Vec::new();
    resize(&mut values, len)?;
    Ok(values)
}

/// Resizes a buffer to `len` values: it keeps the first ones, and adds default values.
///
/// # Errors
/// [`NoMemory`] if the system has none left.
pub fn resize<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> result::Result<(), NoMemory> {
    let more = len.saturating_sub(buffer.len());
    let bytes = len.saturating_mul(size_of::<T>());
    buffer.try_reserve_exact(more).map_err(|_| NoMemory { bytes })?;
    buffer.resize(len, T::default());
    Ok(())
}

/// Grows a buffer to at least `len` values.
///
/// # Errors
/// [`NoMemory`] if the system has none left.
pub fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> result::Result<(), NoMemory> {
    if buffer.len() < len {
        resize(buffer, len)?;
    }
    Ok(())
}

/// A buffer whose first byte has the same place in a memory page as in a page of the file.
#[derive(Debug, Default)]
pub struct PageBuffer {
    memory: Vec<u8>,
    /// Bytes before the buffer.
    skipped: usize,
}

impl PageBuffer {
    /// Bytes of memory besides those of the buffer.
    pub const ROOM: usize = 4096;

    /// Grows the buffer to at least `len` bytes for data at `offset` of a file. Its old content is lost.
    ///
    /// # Errors
    /// [`NoMemory`] if the system has none left.
    pub fn place(&mut self, len: usize, offset: u64) -> result::Result<(), NoMemory> {
        grow(&mut self.memory, len.saturating_add(Self::ROOM))?;
        let beyond = offset as usize % Self::ROOM;
        self.skipped = (beyond + Self::ROOM - self.memory.as_ptr() as usize % Self::ROOM) % Self::ROOM;
        Ok(())
    }

    /// Grows the buffer to at least `len` bytes, at the start of a page.
    ///
    /// # Errors
    /// [`NoMemory`] if the system has none left.
    pub fn grow(&mut self, len: usize) -> result::Result<(), NoMemory> {
        match self.len() < len {
            true => self.place(len, 0),
            false => Ok(()),
        }
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.skipped..]
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.skipped..]
    }
}

/// Appends `bytes` to a buffer.
///
/// # Errors
/// [`NoMemory`] if the system has none left.
pub fn append(buffer: &mut Vec<u8>, bytes: &[u8]) -> result::Result<(), NoMemory> {
    reserve(buffer, bytes.len())?;
    buffer.extend_from_slice(bytes);
    Ok(())
}

/// Makes room for `more` values at the end of a buffer.
///
/// # Errors
/// [`NoMemory`] if the system has none left.
pub fn reserve<T>(buffer: &mut Vec<T>, more: usize) -> result::Result<(), NoMemory> {
    let bytes = (buffer.len().saturating_add(more)).saturating_mul(size_of::<T>());
    buffer.try_reserve(more).map_err(|_| NoMemory { bytes })
}

/// Anonymous resident memory of this process, in bytes; 0 if the system does not state it.
pub fn anonymous_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|l| l.strip_prefix("RssAnon:"))
        .and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// The memory that remains below a limit of anonymous memory.
#[derive(Debug)]
pub struct Room {
    limit: u64,
    baseline: u64,
    /// Bytes of headers that are being read.
    reading: AtomicU64,
    /// Bytes that are kept of the headers that were read.
    kept: AtomicU64,
    /// Tensors in the headers that were read, and bytes of their names.
    tensors: AtomicU64,
    names: AtomicU64,
}

/// Room for the header of one file; given back when it is read.
#[derive(Debug)]
pub struct HeaderRoom {
    room: Arc<Room>,
    requested: AtomicU64,
}

impl HeaderRoom {
    /// Room for the header of a further file.
    pub fn of(room: &Arc<Room>) -> HeaderRoom {
        HeaderRoom { room: Arc::clone(room), requested: AtomicU64::new(0) }
    }

    /// Reserves memory for reading and parsing `bytes` more of the header of `file`.
    ///
    /// # Errors
    /// `FS512` if all headers that are being read or kept exceed the limit.
    pub fn ask(&self, file: &Path, bytes: u64) -> Result<()> {
        self.requested.fetch_add(bytes, Ordering::Relaxed);
        let reading = self.room.reading.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let kept = self.room.kept.load(Ordering::Relaxed);
        let need = reading.saturating_mul(PER_HEADER_BYTE).saturating_add(kept);
        self.room.holds(need, "the headers of the files", Some(file))
    }

    /// Counts the tensors of the file, and the bytes of their names. Returns true if there is room for these
    /// and for a plan of all counted tensors; if not, nothing of the file must be kept.
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
        self.room.reading.fetch_sub(self.requested.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Room {
    /// Room up to `limit` bytes, including the memory that the process already holds.
    pub fn up_to(limit: u64) -> Room {
        kernel::trim();
        let [reading, kept, tensors, names] = [(); 4].map(|()| AtomicU64::new(0));
        Room { limit, baseline: anonymous_memory(), reading, kept, tensors, names }
    }

    /// Checks that there is room for the headers that were read, and for planning all of their tensors.
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

    /// Checks that there is room for planning `tensors` tensors with names of `names` bytes.
    ///
    /// # Errors
    /// `FS512` if it is beyond the limit.
    pub fn plan(&self, tensors: u64, names: u64) -> Result<()> {
        let need = names.saturating_mul(PER_NAME_BYTE).saturating_add(tensors.saturating_mul(PER_TENSOR));
        self.holds(need, "the names of the tensors", None)
    }

    /// Refuses to continue if the memory in use and `more` bytes exceed the limit.
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
