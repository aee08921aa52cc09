//! Requests the data that a share needs from other hosts' disks, before it is needed.
//!
//! The engine lists the reads of a share's tiles by the same code with which it makes them. So the requests
//! match the reads, whatever the layout. Data that a list leaves out is requested when it is read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::share::{reaches, Reach};
use crate::engine::tile::{self, Twins};
use crate::engine::Control;
use crate::error::Result;
use crate::plan::blobs::blobs_of_output;
use crate::plan::tiles::{Share, TileRun};
use crate::plan::Plan;
use crate::storage::SourceFile;

/// Ranges that are requested together.
const RANGES: usize = 64 << 10;
/// Blocks that are requested together.
const BLOCKS: usize = 1024;

/// Requests the data that `share` reads from files on other hosts.
///
/// # Errors
/// The reason why the announcement fails.
pub fn foresee(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    sizes: &[u64],
    share: &Share,
    control: &Control,
) -> Result<()> {
    if !files.iter().any(|file| lies_apart(file)) {
        return Ok(());
    }
    let mut ranges = Ranges { files, found: vec![Vec::new(); files.len()], count: 0 };
    let mut factors = BTreeSet::new();
    let mut whole =
        Whole { plan, files, sent: vec![false; plan.blobs.len()], reached: None, blocks: BTreeMap::new() };
    for run in &share.tiles {
        if !control.is_running() {
            return Ok(());
        }
        let (output, size) = (&plan.outputs[run.output as usize], sizes[run.output as usize]);
        let blobs = blobs_of_output(plan, output);
        if !blobs.iter().any(|b| lies_apart(&files[plan.blobs[*b as usize].file as usize])) {
            continue;
        }
        if blobs.iter().any(|b| is_compressed(plan, *b)) {
            let (start, end) = run.span(size, output.nbytes());
            whole.find(run.output, start, end)?;
        } else {
            for tile in (run.first..run.end).take_while(|_| control.is_running()) {
                let (start, end) = TileRun { first: tile, end: tile + 1, ..*run }.span(size, output.nbytes());
                let twins = Twins::Compare;
                tile::list_reads(plan, output, start, end, twins, &mut factors, &mut |blob, offset, len| {
                    let blob = &plan.blobs[blob as usize];
                    ranges.add(blob.file as usize, blob.offset + offset, len)
                })?;
            }
        }
    }
    if !control.is_running() {
        return Ok(());
    }
    whole.send_blocks()?;
    ranges.send()
}

fn lies_apart(file: &SourceFile) -> bool {
    file.is_lent() || file.blocks_apart().is_some()
}

/// True for data that cannot be read in part.
fn is_compressed(plan: &Plan, blob: u32) -> bool {
    let blob = &plan.blobs[blob as usize];
    blob.deflated || blob.encoded
}

/// Ranges of files to request.
struct Ranges<'a> {
    files: &'a [Arc<SourceFile>],
    /// The ranges of each file, in the order in which they are read, and their total number.
    found: Vec<Vec<(u64, u64)>>,
    count: usize,
}

impl Ranges<'_> {
    /// Adds `len` bytes of a file, if it is on another host; adjacent ranges become one.
    fn add(&mut self, file: usize, lo: u64, len: u64) -> Result<()> {
        if !self.files[file].is_lent() {
            return Ok(());
        }
        match self.found[file].last_mut() {
            Some(last) if last.1 == lo => last.1 += len,
            _ => {
                if self.count >= RANGES {
                    self.send()?;
                }
                self.found[file].push((lo, lo + len));
                self.count += 1;
            }
        }
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        self.count = 0;
        self.files.iter().zip(&mut self.found).try_for_each(|(file, found)| match std::mem::take(found) {
            ranges if ranges.is_empty() => Ok(()),
            ranges => file.will_read(&ranges),
        })
    }
}

/// Compressed members and blocks, each requested once and completely.
struct Whole<'a> {
    plan: &'a Plan,
    files: &'a [Arc<SourceFile>],
    /// Blobs that were requested.
    sent: Vec<bool>,
    /// The ranges of blobs that the last examined output takes.
    reached: Option<(u32, Vec<Reach>)>,
    /// Blocks to request, by the file that represents their store.
    blocks: BTreeMap<u32, Vec<&'a str>>,
}

impl Whole<'_> {
    /// Finds the data that bytes `start..end` of an output take, and requests it.
    fn find(&mut self, output: u32, start: u64, end: u64) -> Result<()> {
        let plan = self.plan;
        if self.reached.as_ref().is_none_or(|(reached, _)| *reached != output) {
            self.reached = Some((output, reaches(plan, &plan.outputs[output as usize])));
        }
        let reaches = self.reached.iter().flat_map(|(_, reaches)| reaches);
        let touched = reaches.filter(|reach| reach.meets(start, end) && is_compressed(plan, reach.blob));
        for blob in touched.map(|reach| reach.blob as usize) {
            let about = &plan.blobs[blob];
            match &about.member {
                _ if std::mem::replace(&mut self.sent[blob], true) => {}
                Some(key) if about.encoded => self.blocks.entry(about.file).or_default().push(key),
                _ => self.files[about.file as usize]
                    .will_read(&[(about.offset, about.offset + about.stored_len)])?,
            }
        }
        if self.blocks.values().map(Vec::len).sum::<usize>() >= BLOCKS {
            self.send_blocks()?;
        }
        Ok(())
    }

    fn send_blocks(&mut self) -> Result<()> {
        std::mem::take(&mut self.blocks).into_iter().try_for_each(|(file, keys)| {
            let store = self.files[file as usize].blocks_apart();
            store.map_or(Ok(()), |store| store.will_read(&keys))
        })
    }
}

#[cfg(test)]
pub(crate) mod recorded;
#[cfg(test)]
mod tests;
