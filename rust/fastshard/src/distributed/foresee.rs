//! Sends for what a share needs of other hosts' disks, before it is needed.
//!
//! The share is made once without reading: what its tiles would read is noted, and no byte is looked at. So what is sent
//! for is what will be read, whatever the layout; what this leaves out is sent for when it is read.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use super::elsewhere::Rehearsal;
use super::share::Share;
use super::share::{reaches, Reach};
use crate::engine::checksums::Checksums;
use crate::engine::gather::Sources;
use crate::engine::tile::{self, Twins, Workspace};
use crate::engine::{blobs_of, Control};
use crate::error::Result;
use crate::plan::Plan;
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
    let lies_apart = |file: &SourceFile| file.is_elsewhere() || file.blocks_apart().is_some();
    if !files.iter().any(|file| lies_apart(file)) {
        return Ok(());
    }
    let notes: Vec<Arc<Rehearsal>> =
        files.iter().map(|file| Arc::new(Rehearsal::new(file.is_elsewhere()))).collect();
    let rehearsed: Vec<Arc<SourceFile>> =
        files.iter().zip(&notes).map(|(file, note)| Arc::new(file.rehearsed(note.clone()))).collect();
    let sources = Sources::new(plan, &rehearsed, PathBuf::new(), Checksums::none(plan), 0);
    let mut work = Workspace::new();
    let mut whole = vec![false; plan.blobs.len()];
    let mut reached: Option<(u32, Vec<Reach>)> = None;
    let mut pending = 0;
    let send = |pending: &mut usize| -> Result<()> {
        *pending = 0;
        files.iter().zip(&notes).try_for_each(|(file, note)| match note.take() {
            ranges if ranges.is_empty() => Ok(()),
            ranges => file.will_read(&ranges),
        })
    };
    let mut blocks: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    let send_blocks = |blocks: &mut BTreeMap<u32, Vec<&str>>| -> Result<()> {
        let mut stores = std::mem::take(blocks).into_iter();
        stores.try_for_each(|(file, keys)| {
            files[file as usize].blocks_apart().map_or(Ok(()), |store| store.will_read(&keys))
        })
    };
    for run in &share.tiles {
        if control.cancel.load(Ordering::Relaxed) {
            return Ok(());
        }
        let output = &plan.outputs[run.output as usize];
        let (start, end) = run.span(sizes[run.output as usize], output.nbytes());
        let blobs = blobs_of(plan, output);
        if !blobs.iter().any(|b| lies_apart(&files[plan.blobs[*b as usize].file as usize])) {
            continue;
        }
        // What is compressed cannot be read in part.
        let is_compressed = |b: u32| plan.blobs[b as usize].deflated || plan.blobs[b as usize].encoded;
        if blobs.into_iter().any(is_compressed) {
            if reached.as_ref().is_none_or(|(output, _)| *output != run.output) {
                reached = Some((run.output, reaches(plan, output)));
            }
            let reaches = reached.iter().flat_map(|(_, reaches)| reaches);
            let touched = reaches.filter(|reach| reach.meets(start, end) && is_compressed(reach.blob));
            for blob in touched.map(|reach| reach.blob as usize) {
                let about = &plan.blobs[blob];
                let file = &files[about.file as usize];
                match &about.member {
                    _ if std::mem::replace(&mut whole[blob], true) => {}
                    Some(key) if about.encoded => blocks.entry(about.file).or_default().push(key),
                    _ => file.will_read(&[(about.offset, about.offset + about.stored_len)])?,
                }
            }
            if blocks.values().map(Vec::len).sum::<usize>() >= TOGETHER {
                send_blocks(&mut blocks)?;
            }
            continue;
        }
        let mut at = start;
        while at < end {
            if control.cancel.load(Ordering::Relaxed) {
                return Ok(());
            }
            let next = (at + STEP).min(end);
            // Whatever is wrong with values that are none is wrong with this alone.
            let _ = tile::make(plan, &sources, output, at, next, Twins::Compare, &mut work);
            pending += 1;
            if pending >= TOGETHER {
                send(&mut pending)?;
            }
            at = next;
        }
    }
    send_blocks(&mut blocks)?;
    send(&mut pending)
}
