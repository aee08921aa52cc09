//! Sends for what a share needs of other hosts' disks, before it is needed.
//!
//! The share is made once without reading: what its tiles would read is noted, and no byte is looked at. So what is sent
//! for is what will be read, whatever the layout; what this leaves out is sent for when it is read.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::elsewhere::Rehearsal;
use super::share::Share;
use super::share::{reaches, Reach};
use crate::engine::checksums::Checksums;
use crate::engine::gather::Sources;
use crate::engine::tile::{self, Twins, Workspace};
use crate::engine::{blobs_of, Control};
use crate::error::Result;
use crate::plan::{Output, Plan};
use crate::storage::SourceFile;

/// Bytes of a tile that are rehearsed at a time.
const STEP: u64 = 1 << 20;
/// Ranges that are sent for together.
const TOGETHER: usize = 1024;

/// Sends for what `share` reads of files that lie on other hosts.
///
/// # Errors
/// What keeps that from being said.
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
    let notes: Vec<Arc<Rehearsal>> =
        files.iter().map(|file| Arc::new(Rehearsal::new(file.is_elsewhere()))).collect();
    let rehearsed: Vec<Arc<SourceFile>> =
        files.iter().zip(&notes).map(|(file, note)| Arc::new(file.rehearsed(note.clone()))).collect();
    let sources = Sources::new(plan, &rehearsed, PathBuf::new(), Checksums::none(plan), 0, Some(control));
    let mut ranges = Ranges { plan, files, notes: &notes, sources, work: Workspace::new()?, pending: 0 };
    let mut whole =
        Whole { plan, files, sent: vec![false; plan.blobs.len()], reached: None, blocks: BTreeMap::new() };
    for run in &share.tiles {
        if !control.is_running() {
            return Ok(());
        }
        let output = &plan.outputs[run.output as usize];
        let (start, end) = run.span(sizes[run.output as usize], output.nbytes());
        let blobs = blobs_of(plan, output);
        if !blobs.iter().any(|b| lies_apart(&files[plan.blobs[*b as usize].file as usize])) {
            continue;
        }
        if blobs.iter().any(|b| is_compressed(plan, *b)) {
            whole.rehearse(run.output, start, end)?;
        } else {
            ranges.rehearse(output, start, end, control)?;
        }
    }
    if !control.is_running() {
        return Ok(());
    }
    whole.send_blocks()?;
    ranges.send()
}

fn lies_apart(file: &SourceFile) -> bool {
    file.is_elsewhere() || file.blocks_apart().is_some()
}

/// True for what cannot be read in part.
fn is_compressed(plan: &Plan, blob: u32) -> bool {
    let blob = &plan.blobs[blob as usize];
    blob.deflated || blob.encoded
}

/// Ranges of files, noted while tiles are made without reading.
struct Ranges<'a> {
    plan: &'a Plan,
    files: &'a [Arc<SourceFile>],
    notes: &'a [Arc<Rehearsal>],
    /// The files, which note what is read of them.
    sources: Sources<'a>,
    work: Workspace,
    /// Steps since ranges were sent for.
    pending: usize,
}

impl Ranges<'_> {
    /// Rehearses bytes `start..end` of an output.
    fn rehearse(&mut self, output: &Output, start: u64, end: u64, control: &Control) -> Result<()> {
        let mut at = start;
        while at < end && control.is_running() {
            let next = (at + STEP).min(end);
            // Whatever is wrong with values that are none is wrong with this alone.
            let _ = tile::make(self.plan, &self.sources, output, at, next, Twins::Compare, &mut self.work);
            self.pending += 1;
            if self.pending >= TOGETHER {
                self.send()?;
            }
            at = next;
        }
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        self.pending = 0;
        self.files.iter().zip(self.notes).try_for_each(|(file, note)| match note.take() {
            ranges if ranges.is_empty() => Ok(()),
            ranges => file.will_read(&ranges),
        })
    }
}

/// Compressed members and blocks, each sent for once and whole.
struct Whole<'a> {
    plan: &'a Plan,
    files: &'a [Arc<SourceFile>],
    /// Blobs that were sent for.
    sent: Vec<bool>,
    /// What the output that was looked at last takes of blobs.
    reached: Option<(u32, Vec<Reach>)>,
    /// Blocks that are to be sent for, by the file that stands for their store.
    blocks: BTreeMap<u32, Vec<&'a str>>,
}

impl Whole<'_> {
    /// Sends for what bytes `start..end` of an output take.
    fn rehearse(&mut self, output: u32, start: u64, end: u64) -> Result<()> {
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
        if self.blocks.values().map(Vec::len).sum::<usize>() >= TOGETHER {
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
