//! The sink for the engine's tiles: data files, arrays, the journal.

use std::sync::Mutex;

use super::arrays::Arrays;
use super::backlog::{lock, Backlog};
use super::filling::Filling;
use super::outcome;
use super::records::{self, Claims, TileJournal};
use super::uploads::Uploads;
use crate::engine::{Control, Sink, TileDone};
use crate::error::Result;
use crate::format::Frame;
use crate::hash::{self, Segments};
use crate::memory;
use crate::plan::{Output, Plan};
use crate::publish::direct::DEPTH;
use crate::publish::{OutFile, Space};

/// Bytes read back at a time, for a checksum over what an earlier run has written.
const CHUNK: u64 = 1 << 20;
/// Bytes written to a file before the system is asked to start writing them out.
pub(crate) const WRITEBACK_EVERY: u64 = 32 << 20;

/// A staging folder as the engine sees it.
pub(super) struct StagedSink<'a> {
    plan: &'a Plan,
    by_file: &'a [Vec<usize>],
    frames: &'a [Frame],
    outputs: &'a [Output],
    /// Files by their place in the plan; none for a store of arrays.
    pub(super) files: Vec<Option<OutFile>>,
    pub(super) arrays: Option<Arrays>,
    /// Tiles that earlier runs, or other processes of this one, have journalled.
    claims: Claims<'a>,
    backlog: Backlog<'a>,
    written: Vec<Mutex<u64>>,
    /// The member of its file that an output lies in, where that file names its checksum.
    member_of: Vec<Option<usize>>,
    /// Checksums of what is written so far, by file and member.
    sums: Vec<Vec<Mutex<Segments>>>,
    uploads: Option<&'a Uploads>,
    control: &'a Control,
    fsync: bool,
    space: Space,
}

impl<'a> StagedSink<'a> {
    /// A sink for the tiles of a run, with `files` and `arrays`; tiles in journals are already in the files.
    pub(super) fn new(
        filling: &Filling<'a>,
        by_file: &'a [Vec<usize>],
        frames: &'a [Frame],
        files: Vec<Option<OutFile>>,
        arrays: Option<Arrays>,
    ) -> Result<Self> {
        let Filling { run, staging, prior, uploads } = *filling;
        let (plan, options) = (run.plan, &run.options.publish);
        let outputs = &plan.outputs;
        let journals = match prior {
            Some(prior) => prior.list_journals(),
            None => vec![TileJournal { journal: staging.journal(), adopted: false }],
        };
        Ok(StagedSink {
            claims: Claims::of(journals, outputs.len(), &|output| outputs[output].file)?,
            written: files.iter().map(|_| Mutex::new(0)).collect(),
            member_of: members_of(plan, frames),
            sums: frames.iter().map(|f| f.members.iter().map(|_| Mutex::default()).collect()).collect(),
            plan,
            by_file,
            frames,
            outputs,
            files,
            arrays,
            backlog: Backlog::new(staging.journal()),
            uploads,
            control: run.control,
            fsync: options.fsync,
            space: options.space(),
        })
    }

    /// Syncs and records the written data.
    pub(super) fn flush(&self) -> Result<()> {
        self.backlog.flush(&|file| self.sync(file))
    }

    /// Runs `work`, and syncs its tiles to disk meanwhile.
    pub(super) fn flush_during<T>(&self, control: &Control, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.backlog.flush_during(&|file| self.sync(file), control, work)
    }

    fn sync(&self, file: u32) -> Result<()> {
        match &self.files[file as usize] {
            Some(file) if self.fsync => file.sync(),
            _ => Ok(()),
        }
    }

    /// True if the file of an output was there when this run began.
    fn is_there(&self, output: usize) -> bool {
        self.files[self.outputs[output].file as usize].as_ref().is_some_and(OutFile::kept)
    }

    /// Adds the checksum of a tile to that of its member.
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

    /// Writes the checksums of all members into their files, but for those that are uploaded meanwhile.
    pub(super) fn finish(&self) -> Result<()> {
        let is_uploaded = |number| self.uploads.is_some_and(|uploads| uploads.files().holds(number));
        (0..self.files.len())
            .filter(|number| !is_uploaded(*number))
            .try_for_each(|number| self.finish_file(number))
    }

    /// Writes the checksums of a file's members into it. What no tile of this run or of the journal covers is read back.
    fn finish_file(&self, number: usize) -> Result<()> {
        let (frame, sums) = (&self.frames[number], &self.sums[number]);
        let Some(file) = &self.files[number] else { return Ok(()) };
        for (member, sums) in frame.members.iter().zip(sums) {
            let (lo, hi) = (member.offset, member.offset + member.len);
            let mut sums = lock(sums);
            for (start, end) in sums.gaps(lo, hi) {
                let mut at = start;
                while at < end {
                    self.control.check_running()?;
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
        Ok(())
    }
}

impl StagedSink<'_> {
    /// Finishes a file whose tensors are all written, and lets it be uploaded.
    fn finish_for_upload(&self, number: usize, uploads: &Uploads) -> Result<()> {
        self.finish_file(number)?;
        let hashes = uploads.files().hashes(number);
        let out = self.files[number].as_ref().expect("no array");
        let about = &self.plan.files[number];
        let identity = outcome::read_back(self.plan, about, &self.by_file[number], &|i| hashes[&i], out)?;
        uploads.files().finish(number, identity);
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
        if let Some(uploads) = self.uploads {
            uploads.files().wait_for_room(self.control)?;
            if uploads.files().is_stored(about.file as usize) {
                return Ok(());
            }
        }
        let file = self.files[about.file as usize].as_ref().expect("no array");
        // What an earlier run left is no hole.
        if self.space == Space::Sparse && !file.kept() {
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
                file.start_writeback();
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
        if let Some(uploads) = self.uploads {
            // An interrupted run is continued by what the store has, not by what is here.
            let about = &self.outputs[output];
            if uploads.files().add_tile(output, about, tile)? {
                self.finish_for_upload(about.file as usize, uploads)?;
            }
            return Ok(());
        }
        let file = self.outputs[output].file;
        self.backlog.add(records::tile(output, tile), file, tile.size, &|file| self.sync(file))
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

    fn locks_files(&self) -> bool {
        // Uploads take the bytes of a file in order.
        self.uploads.is_none()
    }

    fn count_waiting(&self) -> u64 {
        if self.files.iter().flatten().any(OutFile::is_direct) {
            DEPTH
        } else {
            0
        }
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
