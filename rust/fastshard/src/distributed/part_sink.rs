//! The sink for the tiles of one part of a shared run: files that are opened and closed one after another,
//! edges, a journal.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::member::Member;
use super::pages::Pages;
use crate::engine::{Control, Sink, TileDone};
use crate::error::Result;
use crate::plan::tiles::Share;
use crate::plan::Plan;
use crate::publish::direct::{Io, DEPTH};
use crate::publish::{OutFile, Space};
use crate::write::backlog::Backlog;
use crate::write::frames::frames;
use crate::write::options::Run;
use crate::write::records::{self, Claims};
use crate::write::sink::{members_of, WRITEBACK_EVERY};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct Slot {
    file: Option<Arc<OutFile>>,
    /// Bytes written since the system was asked to write them out.
    since: u64,
}

/// A part of a shared run, as the engine sees it.
pub(super) struct PartSink<'a> {
    plan: &'a Plan,
    member: &'a Member,
    pages: &'a Pages,
    claims: Claims<'a>,
    /// Outputs whose tiles come with their CRC32.
    checksummed: Vec<bool>,
    slots: Vec<Mutex<Slot>>,
    /// Bytes of each file that this part must still make.
    left: Vec<AtomicU64>,
    backlog: Backlog<'a>,
    space: Space,
    io: Io,
    is_direct: bool,
}

impl<'a> PartSink<'a> {
    /// A sink for `share` of a run. It leaves holes only if it is the first to write there: otherwise, data
    /// of an earlier process would show in them.
    pub(super) fn new(
        run: &Run<'a>,
        member: &'a Member,
        pages: &'a Pages,
        claims: Claims<'a>,
        sizes: &[u64],
        share: &Share,
        is_first: bool,
    ) -> Result<Self> {
        let Run { plan, files, options, .. } = *run;
        let space = if is_first { options.publish.space() } else { Space::Reserved };
        let io = space.choose_io(options.publish.io);
        let frames = frames(plan, &plan.by_file(), files)?;
        let checksummed = members_of(plan, &frames).into_iter().map(|member| member.is_some()).collect();
        let mut left = vec![0; plan.files.len()];
        for tiles in &share.tiles {
            let output = &plan.outputs[tiles.output as usize];
            let (lo, hi) = tiles.span(sizes[tiles.output as usize], output.nbytes());
            left[output.file as usize] += hi - lo;
        }
        Ok(PartSink {
            plan,
            member,
            pages,
            claims,
            checksummed,
            slots: plan.files.iter().map(|_| Mutex::default()).collect(),
            left: left.into_iter().map(AtomicU64::new).collect(),
            backlog: Backlog::new(member.journal()),
            space,
            io,
            is_direct: member.is_direct(io),
        })
    }

    fn file(&self, number: u32) -> Result<Arc<OutFile>> {
        let mut slot = lock(&self.slots[number as usize]);
        if let Some(file) = &slot.file {
            return Ok(Arc::clone(file));
        }
        let about = &self.plan.files[number as usize];
        let file = Arc::new(self.member.open_file(number, &about.name, about.size, self.io)?);
        slot.file = Some(Arc::clone(&file));
        Ok(file)
    }

    /// Syncs and records the written data.
    pub(super) fn flush(&self) -> Result<()> {
        self.backlog.flush(&|file| self.sync(file))
    }

    /// Runs `work`, and syncs its tiles to disk meanwhile.
    pub(super) fn flush_during<T>(&self, control: &Control, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.backlog.flush_during(&|file| self.sync(file), control, work)
    }

    fn sync(&self, number: u32) -> Result<()> {
        let file = lock(&self.slots[number as usize]).file.clone();
        file.map_or(Ok(()), |file| file.sync())
    }

    /// Closes all files; the process that continues makes data anew that was written but not recorded.
    ///
    /// Errors: those of the system.
    pub(super) fn close(&self) -> Result<()> {
        self.flush()?;
        (0u32..).zip(&self.slots).try_for_each(|(number, _)| self.close_file(number))
    }

    fn close_file(&self, number: u32) -> Result<()> {
        let file = lock(&self.slots[number as usize]).file.take();
        // Nobody reads or writes any more: each worker is done with its tile.
        match file.map(Arc::try_unwrap) {
            Some(Ok(file)) => self.member.close_file(number, file),
            Some(Err(shared_file)) => {
                lock(&self.slots[number as usize]).file = Some(shared_file);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Records a tile that is on its way to disk, and closes its file if it was the last one there.
    fn count(&self, output: usize, tile: &TileDone) -> Result<()> {
        let about = &self.plan.outputs[output];
        let bytes = ((tile.index + 1) * tile.size).min(about.nbytes()) - tile.index * tile.size;
        if self.left[about.file as usize].fetch_sub(bytes, Ordering::AcqRel) == bytes {
            self.flush()?;
            self.close_file(about.file)?;
        }
        Ok(())
    }
}

impl Sink for PartSink<'_> {
    fn write(&self, output: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let about = &self.plan.outputs[output];
        let start = about.offset + offset;
        let file = self.file(about.file)?;
        self.pages.split(about.file, start, bytes, |at, bytes, shared| match shared {
            true => self.member.edge(about.file, at, bytes),
            false if self.space == Space::Sparse => crate::kernel::filled(bytes)
                .into_iter()
                .try_for_each(|(skip, run)| file.write_all_at(at + skip, run)),
            false => file.write_all_at(at, bytes),
        })?;
        let mut slot = lock(&self.slots[about.file as usize]);
        slot.since += bytes.len() as u64;
        if slot.since >= WRITEBACK_EVERY {
            slot.since = 0;
            drop(slot);
            file.start_writeback();
        }
        Ok(())
    }

    fn done(&self, output: usize, tile: &TileDone) -> Result<()> {
        let file = self.plan.outputs[output].file;
        self.backlog.add(records::tile(output, tile), file, tile.size, &|file| self.sync(file))?;
        self.count(output, tile)
    }

    fn claimed(&self, output: usize, index: u64, size: u64) -> Result<Option<TileDone>> {
        Ok(self.claims.get(output, index, size)?.map(|(tile, _)| tile))
    }

    fn read_back(&self, output: usize, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let about = &self.plan.outputs[output];
        self.file(about.file)?.read_at(about.offset + offset, bytes)
    }

    fn kept(&self, output: usize, tile: &TileDone) {
        // In this journal too: it tells of all that its part holds.
        self.backlog.add_synced(records::tile(output, tile));
        let about = &self.plan.outputs[output];
        let bytes = ((tile.index + 1) * tile.size).min(about.nbytes()) - tile.index * tile.size;
        self.left[about.file as usize].fetch_sub(bytes, Ordering::AcqRel);
    }

    fn checksummed(&self, output: usize) -> bool {
        self.checksummed[output]
    }

    fn locks_files(&self) -> bool {
        true
    }

    fn count_waiting(&self) -> u64 {
        if self.is_direct {
            DEPTH
        } else {
            0
        }
    }
}
