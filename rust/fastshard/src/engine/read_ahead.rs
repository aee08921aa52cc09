//! Requests what tiles read from files of a store, before the workers come to them.
//!
//! The reads are listed by the same code that makes them, and requested in groups: two groups are under way or here at a time.
//! A worker begins a tile when its group was requested. What a list leaves out is requested when it is read.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::deal::Deal;
use super::lock;
use super::tile::{self, Twins};
use crate::plan::Plan;
use crate::storage::remote::Readers;
use crate::storage::requests::GAP;
use crate::storage::SourceFile;

/// Groups that fit into the room of a store.
const GROUPS_IN_ROOM: u64 = 2;

/// The requests of a run.
pub(super) struct ReadAhead<'a> {
    plan: &'a Plan,
    files: &'a [Arc<SourceFile>],
    /// Maximum bytes of a group's requests; 0 where no file is in a store.
    group: u64,
    /// Tiles before this place were requested as far as they are.
    passed: Mutex<u64>,
    moved: Condvar,
    /// The number of tiles that are done.
    done: AtomicU64,
}

/// Ends the waiting of workers, whatever happens.
struct Ending<'r, 'a>(&'r ReadAhead<'a>);

impl Drop for Ending<'_, '_> {
    fn drop(&mut self) {
        self.0.pass(u64::MAX);
    }
}

/// The reads of some tiles.
#[derive(Default)]
struct Group {
    /// For each file its reads: first byte, and one past the last.
    reads: BTreeMap<u32, Vec<(u64, u64)>>,
    /// The ranges that requests bring, with short gaps: file and first byte, and one past the last.
    ranges: BTreeMap<(u32, u64), u64>,
    /// Bytes of the ranges.
    bytes: u64,
}

impl Group {
    fn add(&mut self, file: u32, lo: u64, hi: u64) {
        let reads = self.reads.entry(file).or_default();
        match reads.last_mut() {
            Some(last) if last.1 == lo => last.1 = hi,
            _ => reads.push((lo, hi)),
        }
        let (mut lo, mut hi) = (lo, hi);
        let reached = (file, hi.saturating_add(GAP));
        while let Some((&(of, first), &end)) = self.ranges.range(..=reached).next_back() {
            if of != file || end.saturating_add(GAP) < lo {
                break;
            }
            self.ranges.remove(&(file, first));
            self.bytes -= end - first;
            (lo, hi) = (lo.min(first), hi.max(end));
        }
        self.ranges.insert((file, lo), hi);
        self.bytes += hi - lo;
    }

    fn append(&mut self, other: &Group) {
        for (file, reads) in &other.reads {
            reads.iter().for_each(|&(lo, hi)| self.add(*file, lo, hi));
        }
    }
}

impl<'a> ReadAhead<'a> {
    pub(super) fn new(plan: &'a Plan, files: &'a [Arc<SourceFile>]) -> ReadAhead<'a> {
        let room = files.iter().filter_map(|file| file.schedule_room()).min();
        let group = room.map_or(0, |room| room / GROUPS_IN_ROOM);
        let passed = Mutex::new(if group == 0 { u64::MAX } else { 0 });
        ReadAhead { plan, files, group, passed, moved: Condvar::new(), done: AtomicU64::new(0) }
    }

    /// True if there is something to request.
    pub(super) fn is_needed(&self) -> bool {
        self.group > 0
    }

    /// True once the tile at a place was requested.
    pub(super) fn has_passed(&self, place: u64) -> bool {
        *lock(&self.passed) > place
    }

    /// Waits until the tile at a place was requested.
    pub(super) fn wait_for(&self, place: u64) {
        let mut passed = lock(&self.passed);
        while *passed <= place {
            passed = self.moved.wait(passed).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Notes that a tile is done.
    pub(super) fn note_done(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Lets workers begin all tiles.
    pub(super) fn give_up(&self) {
        self.pass(u64::MAX);
    }

    fn pass(&self, place: u64) {
        *lock(&self.passed) = place;
        self.moved.notify_all();
    }

    /// Requests what the tiles of a run read, in their order, until `is_stopped`; but for those that are not made
    /// (`is_made(output, tile)`).
    pub(super) fn request_all(
        &self,
        deal: &Deal,
        sizes: &[u64],
        is_made: &dyn Fn(usize, u64) -> bool,
        is_stopped: &dyn Fn() -> bool,
    ) {
        let _ending = Ending(self);
        let mut factors = Default::default();
        let mut group = Group::default();
        for place in (0..deal.count_tiles()).take_while(|_| !is_stopped()) {
            let (output, tile) = deal.tile(place);
            let size = sizes[output];
            if !is_made(output, tile) {
                if group.bytes == 0 {
                    self.pass(place + 1);
                }
                continue;
            }
            let output = &self.plan.outputs[output];
            let (start, end) = (tile * size, ((tile + 1) * size).min(output.nbytes()));
            let mut reads = Group::default();
            let listed = tile::list_reads(
                self.plan,
                output,
                start,
                end,
                Twins::Compare,
                &mut factors,
                &mut |blob, at, len| {
                    let about = &self.plan.blobs[blob as usize];
                    // Data that must be decoded is not read in part.
                    if !about.encoded && !about.deflated && self.files[about.file as usize].is_stored() {
                        reads.add(about.file, about.offset + at, about.offset + at + len);
                    }
                    Ok(())
                },
            );
            // The worker that makes the tile finds the reason too. Tiles that are larger than a group are read as they come.
            let is_alone = listed.is_err() || reads.bytes > self.group;
            if is_alone || group.bytes + reads.bytes > self.group {
                self.request(std::mem::take(&mut group), is_stopped);
                self.pass(if is_alone { place + 1 } else { place });
            }
            if !is_alone {
                group.append(&reads);
            }
        }
        self.request(group, is_stopped);
    }

    /// Ends what was requested and not read.
    pub(super) fn end(&self) {
        if self.is_needed() {
            self.files.iter().for_each(|file| file.end_schedule());
        }
    }

    fn request(&self, group: Group, is_stopped: &dyn Fn() -> bool) {
        let readers = || match is_stopped() {
            true => Readers::Stopped,
            false if self.done.load(Ordering::Relaxed) >= *lock(&self.passed) => Readers::Idle,
            false => Readers::Busy,
        };
        for (file, reads) in group.reads {
            self.files[file as usize].schedule(reads, &readers);
        }
    }
}
