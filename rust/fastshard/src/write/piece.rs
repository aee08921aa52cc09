//! A host's part of a checkpoint, copied as it is and hashed, for hosts that share no storage: put together later, every
//! byte is compared with what its host has read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Companion, Options, Roots, Run};
use crate::catalog::raise_open_files;
use crate::codes;
use crate::engine::Control;
use crate::error::{Error, Finding, Result};
use crate::manifest::Manifest;
use crate::plan::{Plan, PlanFile, PLAN_VERSION};
use crate::storage::{SourceFile, Stamp};

/// What the manifest of such a part says that it is of.
pub(super) const PIECE: &str = "piece";

/// The limit of such a manifest.
pub(super) const NOT_CHECKED: &str =
    "that the checkpoint is complete, or of one step: this is a host's part of it";

/// Writes and publishes copies of `files` (name in the result, path).
///
/// # Errors
/// As [`super::write`].
pub fn write_piece(
    files: Vec<(String, PathBuf)>,
    roots: &Roots,
    out: &Path,
    options: Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    raise_open_files(files.len() as u64);
    let (mut sources, mut opened) = (Vec::with_capacity(files.len()), Vec::with_capacity(files.len()));
    for (name, path) in &files {
        let source = SourceFile::open(path)?;
        let stamp = source.stamp();
        let (size, mtime_ns) = (stamp.size, stamp.mtime_ns as i64);
        sources.push(PlanFile { path: name.clone(), root: 0, size, mtime_ns, header: String::new() });
        opened.push(Arc::new(source));
    }
    let plan = Plan { version: PLAN_VERSION, target: PIECE.into(), sources, ..Plan::default() };
    // Each is held open, and compared with what lies there once it is copied.
    let copies = files.into_iter().map(|(name, path)| Companion { name, path, blake3: None }).collect();
    let options = Options { copies, ..options };
    super::write(&Run { plan: &plan, files: &opened, roots, out, options: &options, control })
}

/// Refuses a file that took the place of the one that was opened: a save that renames its files over those of the last.
///
/// # Errors
/// `FS506`.
pub(super) fn still_named(path: &Path, opened: &SourceFile) -> Result<()> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io(path, "cannot stat", &e))?;
    let (now, then) = (Stamp::of(&meta), opened.stamp());
    if (now.inode, now.device, now.size, now.mtime_ns) == (then.inode, then.device, then.size, then.mtime_ns)
    {
        return Ok(());
    }
    Err(Finding::new(codes::SOURCE_CHANGED, "another file has taken its place while it was copied")
        .file(path)
        .help("wait until the save is complete, then run again")
        .into())
}
