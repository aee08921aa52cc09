//! Decoded blocks (zarr chunks): each is decoded once, and kept in memory if it fits, else on disk.
//!
//! A block is as large as the writer made it, and if the grids of source and target differ, many tiles need a
//! part of it. A block that does not fit in memory until its last reader is done goes to an unnamed file that
//! is read through its map, so that nothing is decoded twice.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::error::Result;
use crate::plan::Plan;
use crate::standing::digest_of;
use crate::storage::{BlockBytes, SourceFile};

use super::part_samples::PartSamples;
use super::without_panic;

/// Places in the file begin on pages, so that a range can be given back.
const PAGE: u64 = 4096;
/// Maximum number of buffers kept for reuse.
const MAX_SPARE: usize = 4;

/// Runs of a block that are sampled, and bytes of each.
const SAMPLES: usize = 64;
const SAMPLE: usize = 64;
/// The sample of a block that shows only one value.
pub const CONSTANT: u64 = 1;

/// A digest of runs that are spread over a block: blocks with different ones are different.
pub fn sample_of(bytes: &[u8]) -> u64 {
    let step = (bytes.len() / SAMPLES).next_multiple_of(SAMPLE).max(SAMPLE);
    let runs = || bytes.chunks(step).map(|chunk| &chunk[..chunk.len().min(SAMPLE)]);
    // Elements have 1, 2, 4 or 8 bytes.
    let mut words = runs().flat_map(|run| run.chunks_exact(8));
    let first = words.next();
    let digest = match words.all(|word| Some(word) == first) {
        true if bytes.chunks_exact(8).all(|word| Some(word) == first) => return CONSTANT,
        // Sparse, or with columns of zeros: all of it is the sample.
        true => digest_of(bytes),
        false => digest_of(&runs().collect::<Vec<_>>().concat()),
    };
    digest.max(CONSTANT + 1)
}

/// Bytes of a block, shared by their readers.
type Bytes = Arc<Box<dyn BlockBytes>>;

fn len(bytes: &Bytes) -> u64 {
    bytes.bytes().len() as u64
}

/// A block's bytes, or their place.
pub enum Block<'b> {
    /// In memory.
    InMemory(Bytes),
    /// In the file, from this offset.
    Aside(&'b SourceFile, u64),
}

#[derive(Debug)]
enum Slot {
    /// A worker decodes it or stores it on disk.
    Busy,
    InMemory {
        bytes: Bytes,
        used: u64,
    },
    Aside,
}

#[derive(Debug, Default)]
struct State {
    slots: HashMap<u32, Slot>,
    /// Bytes in memory or being decoded.
    in_memory: u64,
    /// Buffers of blocks that are done, for the next ones: fresh pages cost more than decoding into them.
    spare: Vec<Box<dyn BlockBytes>>,
    clock: u64,
    /// Blocks that nobody needs any more, to be dropped once they are not busy.
    done: Vec<u32>,
    /// Bytes decoded, and bytes put aside.
    decoded: u64,
    aside: u64,
}

impl State {
    /// Bytes of spare buffers.
    fn spare(&self) -> u64 {
        self.spare.iter().map(|b| b.bytes().len() as u64).sum()
    }
}

/// The decoded blocks of a run.
pub struct Blocks {
    scratch_dir: PathBuf,
    capacity: u64,
    state: Mutex<State>,
    changed: Condvar,
    file: OnceLock<SourceFile>,
    making: Mutex<()>,
    /// Offset of each blob in the file, and the file's size.
    places: Vec<u64>,
    size: u64,
    /// [`sample_of`] each block that was decoded; 0 for others.
    samples: Vec<AtomicU64>,
    /// Samples of the beginnings of parts of matrices.
    pub(super) parts: PartSamples,
}

impl Blocks {
    /// Holds up to `capacity` bytes of the plan's encoded blobs; the rest goes to a file in `scratch_dir`.
    pub fn new(plan: &Plan, scratch_dir: PathBuf, capacity: u64) -> Self {
        let mut size = 0;
        let places = plan
            .blobs
            .iter()
            .map(|blob| {
                let place = size;
                if blob.encoded {
                    size += blob.len.next_multiple_of(PAGE);
                }
                place
            })
            .collect();
        Blocks {
            scratch_dir,
            capacity,
            state: Mutex::default(),
            changed: Condvar::new(),
            file: OnceLock::new(),
            making: Mutex::new(()),
            places,
            size,
            samples: plan.blobs.iter().map(|_| AtomicU64::new(0)).collect(),
            parts: PartSamples::of(plan),
        }
    }

    /// [`sample_of`] a block, if it was decoded.
    pub fn sample(&self, blob: u32) -> Option<u64> {
        Some(self.samples[blob as usize].load(Ordering::Relaxed)).filter(|sample| *sample != 0)
    }

    /// Takes over the sample of a block that another process has decoded.
    pub fn know(&self, blob: u32, sample: u64) {
        self.samples[blob as usize].store(sample, Ordering::Relaxed);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self) -> Result<&SourceFile> {
        if self.file.get().is_none() {
            let _one = self.making.lock().unwrap_or_else(PoisonError::into_inner);
            if self.file.get().is_none() {
                let _ = self.file.set(SourceFile::scratch(&self.scratch_dir, self.size)?);
            }
        }
        Ok(self.file.get().expect("set above"))
    }

    /// The block `blob`, decoded from `source` unless it was decoded before.
    pub fn get(&self, plan: &Plan, blob: u32, source: &SourceFile) -> Result<Block<'_>> {
        let about = &plan.blobs[blob as usize];
        let mut state = self.state();
        loop {
            state.clock += 1;
            let now = state.clock;
            match state.slots.get_mut(&blob) {
                Some(Slot::InMemory { bytes, used }) => {
                    *used = now;
                    return Ok(Block::InMemory(Arc::clone(bytes)));
                }
                Some(Slot::Aside) => {
                    drop(state);
                    return Ok(Block::Aside(self.file()?, self.places[blob as usize]));
                }
                Some(Slot::Busy) => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                None => break,
            }
        }
        state.slots.insert(blob, Slot::Busy);
        state.in_memory += about.len;
        let len = about.len as usize;
        let spare =
            state.spare.iter().position(|b| b.bytes().len() == len).map(|i| state.spare.swap_remove(i));
        if state.in_memory + state.spare() > self.capacity {
            state.spare.clear();
        }
        let key = about.member.as_deref().unwrap_or("");
        // Whoever waits for the block must not wait for ever.
        let decoded =
            self.make_room(state).and_then(|()| without_panic(|| source.read_block(key, len, spare)));
        if let Ok(bytes) = &decoded {
            self.samples[blob as usize].store(sample_of(bytes.bytes()), Ordering::Relaxed);
            self.parts.take(blob, bytes.bytes());
        }
        let mut state = self.state();
        let result = match decoded {
            Ok(bytes) => {
                let bytes = Arc::new(bytes);
                state.clock += 1;
                state.decoded += about.len;
                let used = state.clock;
                state.slots.insert(blob, Slot::InMemory { bytes: Arc::clone(&bytes), used });
                Ok(Block::InMemory(bytes))
            }
            Err(error) => {
                state.slots.remove(&blob);
                state.in_memory -= about.len;
                Err(error)
            }
        };
        self.settle(&mut state);
        drop(state);
        self.changed.notify_all();
        result
    }

    /// Stores blocks on disk, the least recently used ones first, until the others fit.
    fn make_room<'s>(&'s self, mut state: MutexGuard<'s, State>) -> Result<()> {
        while state.in_memory > self.capacity {
            // One that a worker reads from cannot go; then there is no more to be done.
            let oldest = state
                .slots
                .iter()
                .filter_map(|(blob, slot)| match slot {
                    Slot::InMemory { bytes, used } if Arc::strong_count(bytes) == 1 => Some((*used, *blob)),
                    _ => None,
                })
                .min();
            let Some((_, blob)) = oldest else { return Ok(()) };
            let Some(Slot::InMemory { bytes, .. }) = state.slots.insert(blob, Slot::Busy) else {
                unreachable!("found above")
            };
            drop(state);
            let keep = || self.file()?.keep_at(self.places[blob as usize], bytes.bytes());
            let kept = without_panic(keep);
            state = self.state();
            state.in_memory -= len(&bytes);
            match kept {
                Ok(()) => {
                    state.aside += len(&bytes);
                    state.slots.insert(blob, Slot::Aside);
                    self.reuse(&mut state, bytes);
                }
                Err(error) => {
                    state.slots.remove(&blob);
                    self.changed.notify_all();
                    return Err(error);
                }
            }
            self.settle(&mut state);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Drops a block: its last reader is done.
    pub fn release(&self, blob: u32) {
        let mut state = self.state();
        state.done.push(blob);
        self.settle(&mut state);
    }

    fn settle(&self, state: &mut State) {
        let mut waiting = Vec::new();
        for blob in std::mem::take(&mut state.done) {
            match state.slots.remove(&blob) {
                Some(Slot::Busy) => {
                    state.slots.insert(blob, Slot::Busy);
                    waiting.push(blob);
                }
                Some(Slot::InMemory { bytes, .. }) => {
                    state.in_memory -= len(&bytes);
                    self.reuse(state, bytes);
                }
                Some(Slot::Aside) => {
                    if let Some(file) = self.file.get() {
                        let place = self.places[blob as usize];
                        let next = self.places.get(blob as usize + 1).copied().unwrap_or(self.size);
                        file.drop_range(place, next - place);
                    }
                }
                None => {}
            }
        }
        state.done = waiting;
    }

    /// Keeps the buffer of a block that is done, if nobody reads from it and there is room.
    fn reuse(&self, state: &mut State, bytes: Bytes) {
        if state.in_memory + state.spare() + len(&bytes) <= self.capacity && state.spare.len() < MAX_SPARE {
            state.spare.extend(Arc::try_unwrap(bytes));
        }
    }

    /// Bytes decoded, and bytes stored on disk so far.
    pub fn traffic(&self) -> (u64, u64) {
        let state = self.state();
        (state.decoded, state.aside)
    }
}
