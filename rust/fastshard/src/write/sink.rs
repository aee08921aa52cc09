//! Where the engine's tiles go: data files, arrays, the journal.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::arrays::Arrays;
use super::records::{self, Claims, Told};
use super::Options;
use crate::distributed::parts::Prior;
use crate::engine::{Control, Sink, TileDone};
use crate::error::Result;
use crate::format::Frame;
use crate::hash::{self, Segments};
use crate::memory;
use crate::plan::{Output, Plan};
use crate::publish::{OutFile, Staging};

/// Bytes written between two records of what is done.
pub(crate) const JOURNAL_EVERY: u64 = 256 << 20;
/// Bytes read back at a time, for a checksum over what an earlier run has written.
const CHUNK: u64 = 1 << 20;
/// Bytes written to a file before the system is asked to start writing them out.
pub(crate) const WRITEBACK_EVERY: u64 = 32 << 20;

/// Tiles that are written and not yet journalled.
#[derive(Default)]
struct Pending {
    records: Vec<Vec<u8>>,
    /// Files that the records speak of.
    files: BTreeSet<u32>,
    bytes: u64,
}

/// A staging folder as the engine sees it.
pub(super) struct StagedSink<'a> {
    outputs: &'a [Output],
    /// Files by their place in the plan; none for a store of arrays.
    pub(super) files: Vec<Option<OutFile>>,
    pub(super) arrays: Option<Arrays>,
    staging: &'a Staging,
    /// Tiles that earlier runs, or other processes of this one, have journalled.
    claims: Claims<'a>,
    pending: Mutex<Pending>,
    /// Held by the one who brings data to disk, so that the others go on writing meanwhile.
    flushing: Mutex<()>,
    written: Vec<Mutex<u64>>,
    /// The member of its file that an output lies in, where that file names its checksum.
    member_of: Vec<Option<usize>>,
    /// Checksums of what is written so far, by file and member.
    sums: Vec<Vec<Mutex<Segments>>>,
    fsync: bool,
    sparse: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> StagedSink<'a> {
    /// Tiles of `plan` go to `files` and `arrays`; what `claims` tells of is in the files already.
    pub(super) fn new(
        plan: &'a Plan,
        staging: &'a Staging,
        frames: &[Frame],
        files: Vec<Option<OutFile>>,
        arrays: Option<Arrays>,
        prior: Option<&'a Prior>,
        options: &Options,
    ) -> Result<Self> {
        let outputs = &plan.outputs;
        let told = match prior {
            Some(prior) => prior.told(),
            None => vec![Told { journal: staging.journal(), adopted: false }],
        };
        Ok(StagedSink {
            claims: Claims::of(told, outputs.len(), &|output| outputs[output].file)?,
            written: files.iter().map(|_| Mutex::new(0)).collect(),
            member_of: members_of(plan, frames),
            sums: frames.iter().map(|f| f.members.iter().map(|_| Mutex::default()).collect()).collect(),
            outputs,
            files,
            arrays,
            staging,
            pending: Mutex::default(),
            flushing: Mutex::new(()),
            fsync: options.publish.fsync,
            sparse: options.sparse,
        })
    }

    /// Brings data to disk, then says so: never the other way round.
    pub(super) fn flush(&self) -> Result<()> {
        let _one = lock(&self.flushing);
        // What is in these records was written before they were taken, so the syncs below cover it.
        let Pending { records, files, .. } = std::mem::take(&mut *lock(&self.pending));
        if records.is_empty() {
            return Ok(());
        }
        if self.fsync {
            files.iter().try_for_each(|&f| self.files[f as usize].as_ref().map_or(Ok(()), OutFile::sync))?;
        }
        records.iter().try_for_each(|record| self.staging.journal().append(record))?;
        self.staging.journal().sync()
    }

    /// True if the file of an output was there when this run began.
    fn is_there(&self, output: usize) -> bool {
        self.files[self.outputs[output].file as usize].as_ref().is_some_and(OutFile::kept)
    }

    /// Takes the checksum of a tile into that of its member.
    fn sum(&self, output: usize, tile: &TileDone) {
        let about = &self.outputs[output];
        if let (Some(member), Some(crc)) = (self.member_of[output], tile.crc32) {
            let start = tile.index * tile.size;
            let len = tile.size.min(about.nbytes() - start);
            let mut sums = lock(&self.sums[about.file as usize][member]);
            sums.add(about.offset + start, len, crc);
            sums.join(about.offset + start);
        }
    }

    /// Writes the checksums of all members into their files. What no tile of this run or of the
    /// journal covers is read back.
    pub(super) fn finish(&self, frames: &[Frame], control: &Control) -> Result<()> {
        for ((frame, file), sums) in frames.iter().zip(&self.files).zip(&self.sums) {
            let Some(file) = file else { continue };
            for (member, sums) in frame.members.iter().zip(sums) {
                let (lo, hi) = (member.offset, member.offset + member.len);
                let mut sums = lock(sums);
                for (start, end) in sums.gaps(lo, hi) {
                    let mut at = start;
                    while at < end {
                        control.check_running()?;
                        let mut bytes = memory::allocate(CHUNK.min(end - at) as usize)?;
                        file.read_at(at, &mut bytes)?;
                        sums.add(at, bytes.len() as u64, hash::crc32(&bytes));
                        sums.join(at);
                        at += bytes.len() as u64;
                    }
                }
                let crc = sums.crc(lo, hi).expect("no gap is left");
                member.crc_at.iter().try_for_each(|&at| file.write_all_at(at, &crc.to_le_bytes()))?;
            }
        }
        Ok(())
    }
}

impl Sink for StagedSink<'_> {
    fn write(&self, output: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        if let Some(arrays) = &self.arrays {
            if arrays.write(output, offset, bytes)? {
                return Ok(());
            }
        }
        let about = &self.outputs[output];
        let file = self.files[about.file as usize].as_ref().expect("no array");
        // What an earlier run left is no hole.
        if self.sparse && !file.kept() {
            for (at, run) in crate::kernel::filled(bytes) {
                file.write_all_at(about.offset + offset + at, run)?;
            }
        } else {
            file.write_all_at(about.offset + offset, bytes)?;
        }
        if self.fsync {
            let mut since = lock(&self.written[about.file as usize]);
            *since += bytes.len() as u64;
            if *since >= WRITEBACK_EVERY {
                *since = 0;
                drop(since);
                let end = about.offset + offset + bytes.len() as u64;
                file.start_writeback(end.saturating_sub(2 * WRITEBACK_EVERY), 2 * WRITEBACK_EVERY);
            }
        }
        Ok(())
    }

    fn done(&self, output: usize, tile: &TileDone) -> Result<()> {
        self.sum(output, tile);
        // An encoded block cannot be continued in its midst: arrays are made anew.
        if self.arrays.as_ref().is_some_and(|arrays| arrays.holds(output)) {
            return Ok(());
        }
        let mut pending = lock(&self.pending);
        pending.records.push(records::tile(output, tile));
        pending.files.insert(self.outputs[output].file);
        pending.bytes += tile.size;
        if pending.bytes < JOURNAL_EVERY {
            return Ok(());
        }
        drop(pending);
        self.flush()
    }

    fn claimed(&self, output: usize, index: u64, size: u64) -> Result<Option<TileDone>> {
        match self.is_there(output) {
            true => Ok(self.claims.get(output, index, size)?.map(|(tile, _)| tile)),
            false => Ok(None),
        }
    }

    fn adopted(&self, output: usize, index: u64, size: u64) -> Result<Option<TileDone>> {
        match self.claims.adopts() && self.is_there(output) {
            true => Ok(self
                .claims
                .get(output, index, size)?
                .filter(|(_, adopted)| *adopted)
                .map(|(tile, _)| tile)),
            false => Ok(None),
        }
    }

    fn read_back(&self, output: usize, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let about = &self.outputs[output];
        let file = self.files[about.file as usize].as_ref().expect("no array");
        file.read_at(about.offset + offset, bytes)
    }

    fn kept(&self, output: usize, tile: &TileDone) {
        self.sum(output, tile);
    }

    fn checksummed(&self, output: usize) -> bool {
        self.member_of[output].is_some()
    }
}

/// The member of its file that each output lies in.
pub(crate) fn members_of(plan: &Plan, frames: &[Frame]) -> Vec<Option<usize>> {
    let member = |output: &Output| {
        let members = &frames[output.file as usize].members;
        let (lo, hi) = (output.offset, output.offset + output.nbytes());
        let at = members.partition_point(|m| m.offset <= lo).checked_sub(1)?;
        (hi > lo && hi <= members[at].offset + members[at].len).then_some(at)
    };
    plan.outputs.iter().map(member).collect()
}
