//! CRC32 of source blobs, computed from the data that views read, in any order and within bounds.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::hash::{crc32, Segments};
use crate::plan::blobs::{cuts, tracked_blobs};
use crate::plan::Plan;

use super::learnt::Segment;

/// Memory of a segment, in bytes: an entry of a tree whose nodes are half full.
const SEGMENT: u64 = 80;
/// Segments that every blob may have, whatever the others use.
const FEW: usize = 8;

/// Whether a checksum must be computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Note {
    /// If there is room: ranges that are left out are read again at the end.
    Spare,
    /// In any case.
    Needed,
}

/// Checksums of the tracked blobs of a plan.
pub struct Checksums {
    tracked: Vec<bool>,
    /// Where segments are not joined, sorted.
    cuts: Vec<Vec<u64>>,
    segments: Vec<Mutex<Segments>>,
    /// Segments of all blobs, and how many there may be.
    count: AtomicUsize,
    most: usize,
}

impl Checksums {
    /// For the blobs that a plan verifies and compares, in about `memory` bytes.
    pub fn new(plan: &Plan, memory: u64) -> Self {
        let tracked = tracked_blobs(plan);
        Checksums {
            cuts: cuts(plan, &tracked),
            segments: tracked.iter().map(|_| Mutex::default()).collect(),
            tracked,
            count: AtomicUsize::new(0),
            most: (memory / SEGMENT) as usize,
        }
    }

    /// Of nothing.
    pub fn none(plan: &Plan) -> Self {
        let n = plan.blobs.len();
        Checksums {
            tracked: vec![false; n],
            cuts: Vec::new(),
            segments: Vec::new(),
            count: AtomicUsize::new(0),
            most: 0,
        }
    }

    fn of(&self, blob: u32) -> MutexGuard<'_, Segments> {
        self.segments[blob as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether checksums are kept for a blob.
    pub fn is_tracked(&self, blob: u32) -> bool {
        self.tracked[blob as usize]
    }

    /// The CRC32 of a range of a blob, as far as it is known.
    pub fn crc(&self, blob: u32, lo: u64, hi: u64) -> Option<u32> {
        self.is_tracked(blob).then(|| self.of(blob).crc(lo, hi))?
    }

    /// The segments of a blob whose checksum is known.
    pub fn segments(&self, blob: u32) -> Vec<Segment> {
        if !self.is_tracked(blob) {
            return Vec::new();
        }
        self.of(blob).all().collect()
    }

    /// Takes over the checksums of a blob from another process, as far as there is room.
    pub fn know(&self, blob: u32, segments: &[Segment]) {
        if self.is_tracked(blob) {
            segments.iter().for_each(|&(offset, len, crc)| self.note(blob, offset, len, crc, Note::Spare));
        }
    }

    /// Adds the checksum of `bytes` at `offset` of a blob, if the blob is tracked.
    pub fn add(&self, blob: u32, offset: u64, bytes: &[u8], note: Note) {
        if !self.is_tracked(blob) {
            return;
        }
        self.note(blob, offset, bytes.len() as u64, crc32(bytes), note);
    }

    fn note(&self, blob: u32, offset: u64, len: u64, crc: u32, note: Note) {
        let cuts = &self.cuts[blob as usize];
        let mut segments = self.of(blob);
        let before = segments.len();
        let full = before >= FEW && self.count.load(Ordering::Relaxed) >= self.most;
        if full && note == Note::Spare && !segments.would_join(offset, len, cuts) {
            return;
        }
        segments.add(offset, len, crc);
        segments.join_between(offset, cuts);
        // Wraps around where segments were joined, which is what is meant.
        self.count.fetch_add(segments.len().wrapping_sub(before), Ordering::Relaxed);
    }

    /// The first run of bytes from `at` on without a known checksum, up to the next cut or `end`: its start
    /// and length.
    pub fn gap(&self, blob: u32, at: u64, end: u64) -> Option<(u64, u64)> {
        let (lo, hi) = self.of(blob).gap(at, end)?;
        let cuts = &self.cuts[blob as usize];
        let cut = cuts.get(cuts.partition_point(|c| *c <= lo)).copied().unwrap_or(hi);
        Some((lo, hi.min(cut) - lo))
    }
}
