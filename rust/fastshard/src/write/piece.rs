//! A host's part of a checkpoint, copied as it is and hashed, for hosts that share no storage: put together later, every
//! byte is compared with what its host has read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Options, Roots};
use crate::catalog::raise_open_files;
use crate::engine::Control;
use crate::error::{Finding, Result};
use crate::manifest::Manifest;
use crate::plan::{Plan, PlanFile, PLAN_VERSION};
use crate::storage::SourceFile;

/// What the manifest of such a part says that it is of.
pub(super) const PIECE: &str = "piece";

/// What such a manifest does not prove.
pub(super) const NOT_PROVEN: &str =
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
    super::write(&plan, &opened, roots, out, &Options { copies: files, ..options }, control)
}
