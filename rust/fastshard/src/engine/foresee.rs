//! Sends for what a share needs of other hosts' disks, before it is needed.
//!
//! The share is made once without reading: what its tiles would read is noted, and no byte is looked at. So what is sent
//! for is what will be read, whatever the layout; what this leaves out is sent for when it is read.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use super::checksums::Checksums;
use super::gather::Sources;
use super::tile::{self, Twins, Workspace};
use super::{blobs_of, Control, Share};
use crate::error::Result;
use crate::plan::Plan;
use crate::storage::elsewhere::Rehearsal;
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
    if !files.iter().any(|file| file.is_elsewhere()) {
        return Ok(());
    }
    let notes: Vec<Arc<Rehearsal>> =
        files.iter().map(|file| Arc::new(Rehearsal::new(file.is_elsewhere()))).collect();
    let rehearsed: Vec<Arc<SourceFile>> =
        files.iter().zip(&notes).map(|(file, note)| Arc::new(file.rehearsed(note.clone()))).collect();
    let sources = Sources::new(plan, &rehearsed, PathBuf::new(), Checksums::none(plan), 0);
    let mut work = Workspace::new();
    let mut whole = vec![false; plan.blobs.len()];
    let mut pending = 0;
    let send = |pending: &mut usize| -> Result<()> {
        *pending = 0;
        files.iter().zip(&notes).try_for_each(|(file, note)| match note.take() {
            ranges if ranges.is_empty() => Ok(()),
            ranges => file.will_read(&ranges),
        })
    };
    for run in &share.tiles {
        let output = &plan.outputs[run.output as usize];
        let blobs = blobs_of(plan, output);
        if !blobs.iter().any(|b| files[plan.blobs[*b as usize].file as usize].is_elsewhere()) {
            continue;
        }
        // What is compressed cannot be read in part.
        let compressed: Vec<u32> = blobs
            .into_iter()
            .filter(|b| plan.blobs[*b as usize].deflated || plan.blobs[*b as usize].encoded)
            .collect();
        for &blob in &compressed {
            let about = &plan.blobs[blob as usize];
            if about.deflated && !std::mem::replace(&mut whole[blob as usize], true) {
                files[about.file as usize].will_read(&[(about.offset, about.offset + about.stored_len)])?;
            }
        }
        if !compressed.is_empty() {
            continue;
        }
        let (start, end) = run.span(sizes[run.output as usize], output.nbytes());
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
    send(&mut pending)
}
