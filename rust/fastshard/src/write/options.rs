//! The options of writing a result, and its needs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use super::arrays::ArrayWriter;
use super::destination::Destination;
use crate::engine::{self, Control};
use crate::gate::Gate;
use crate::plan::{Form, Output, Plan};
use crate::publish::clock::Patience;
use crate::publish::{self, Needs, Space};
use crate::stats::Level;
use crate::storage::SourceFile;

/// Bytes copied at a time.
pub(super) const CHUNK: u64 = 1 << 20;

/// A file that is copied to a result.
#[derive(Debug, Clone)]
pub struct Companion {
    /// Its name in the result.
    pub name: String,
    /// Where it lies.
    pub path: PathBuf,
    /// BLAKE3 of its bytes when it was chosen, hexadecimal; None if no decision depended on them.
    pub blake3: Option<String>,
}

/// How to write.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    /// Worker threads.
    pub threads: usize,
    /// Anonymous memory that must not be exceeded, in bytes.
    pub memory: u64,
    /// The caller's choices.
    #[serde(default)]
    pub publish: publish::Options,
    /// Files copied to the result.
    #[serde(skip)]
    pub copies: Vec<Companion>,
    /// The origins of files of the result that come from a folder above the checkpoint, by name.
    #[serde(default)]
    pub above: BTreeMap<String, String>,
    /// Values of the source for the manifest.
    #[serde(default)]
    pub values: serde_json::Value,
    /// Writer of the arrays of a result, if it has any.
    #[serde(skip)]
    pub arrays: Option<Arc<dyn ArrayWriter>>,
    /// The store that the result is published in; without one it appears at the destination on this machine.
    #[serde(skip)]
    pub store: Option<Arc<dyn Destination>>,
    /// True if the sources were compared with a manifest of theirs, so that nothing in them can be swapped.
    #[serde(default)]
    pub expected: bool,
    /// The time for other processes of the same run to show a sign of life.
    #[serde(default = "usual_patience")]
    pub patience: Patience,
    /// The rank that has each root of the sources on its own disk, if not all ranks see all roots.
    #[serde(default)]
    pub near: Option<Vec<u32>>,
    /// The rules for judging findings before the result is published.
    #[serde(default)]
    pub gate: Gate,
}

fn usual_patience() -> Patience {
    Duration::from_secs(5).into()
}

/// One run: the plan that is carried out, the files that it reads, and where and how its result is written.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    /// The outputs and the bytes that they are made from.
    pub plan: &'a Plan,
    /// The plan's sources, open.
    pub files: &'a [Arc<SourceFile>],
    /// The places of the sources.
    pub roots: &'a Roots,
    /// The destination.
    pub out: &'a Path,
    /// How to write.
    pub options: &'a Options,
    /// Stops the run, and reports its progress.
    pub control: &'a Control,
}

/// Roots of the sources, for the check that the destination is not among them.
pub type Roots = [PathBuf];

/// Writes the record of a plan in its staging folder.
pub fn document(plan: &Plan) -> Vec<u8> {
    let document = serde_json::json!({
        "plan": plan.digest(), "version": plan.version, "target": plan.target, "outputs": plan.outputs.len(), "records": RECORDS_VERSION,
    });
    serde_json::to_vec(&document).expect("plain data")
}

/// Version of the journal's records: those of another are not continued.
const RECORDS_VERSION: u32 = 2;

/// Computes the needs of a run at its destination.
pub(crate) fn needs(run: &Run<'_>) -> Needs {
    let Run { plan, files, options, .. } = *run;
    let copied: u64 =
        options.copies.iter().filter_map(|c| std::fs::metadata(&c.path).ok()).map(|m| m.len()).sum();
    let each = if options.publish.stats { 2400 } else { 400 };
    let blocks: u64 = match plan.files.iter().any(|f| matches!(f.form, Form::Arrays(_))) {
        // The manifest lists the store's files, each of a MiB or more but for the last of an array.
        true => plan.bytes() / CHUNK + plan.outputs.len() as u64,
        false => 0,
    };
    let named = plan.files.len() as u64 + blocks + options.copies.len() as u64;
    let names: u64 = plan.outputs.iter().map(|o| 2 * o.name.len() as u64).sum();
    let manifest =
        4096 + names + each * plan.outputs.len() as u64 + 200 * plan.sources.len() as u64 + 250 * named;
    let bytes = match options.publish.space() {
        Space::Sparse => 0,
        Space::Reserved => plan.bytes() + copied + manifest + aside(plan, options),
    };
    Needs {
        bytes,
        files: (plan.files.len() + plan.texts.len() + folders(plan) + options.copies.len() + 2) as u64,
        open_files: (files.len() + plan.files.len() + 64) as u64,
    }
}

/// Bytes of decoded blocks that may have to lie on disk at a time.
fn aside(plan: &Plan, options: &Options) -> u64 {
    // What memory will hold of them is known only once the run has begun: half of the budget at least is not theirs.
    engine::decoding(plan).live.saturating_sub(options.memory / 4)
}

/// Number of folders of the result.
fn folders(plan: &Plan) -> usize {
    let names = plan.files.iter().map(|f| &f.name).chain(plan.texts.keys());
    let folders: BTreeSet<&str> =
        names.flat_map(|name| name.match_indices('/').map(|(end, _)| &name[..end])).collect();
    folders.len()
}

/// Gives the engine its part of a run's options.
pub(crate) fn engine_options(run: &Run<'_>, scratch: &Path) -> engine::Options {
    let Run { plan, options, .. } = *run;
    engine::Options {
        threads: options.threads,
        memory: options.memory,
        scratch_dir: scratch.to_path_buf(),
        max_decoded: None,
        encodes: largest_block(plan),
        stats: if options.publish.stats { Level::Full } else { Level::Nothing },
    }
}

/// Bytes of the largest block of the arrays that are written.
fn largest_block(plan: &Plan) -> u64 {
    let block = |o: &Output| match &plan.files[o.file as usize].form {
        Form::Arrays(store) => {
            let block = store.blocks.get(o.key())?;
            let elements: u64 = block.iter().zip(&o.shape).map(|(b, n)| b.min(n)).product();
            Some(elements * o.dtype.size() as u64)
        }
        _ => None,
    };
    plan.outputs.iter().filter_map(block).max().unwrap_or(0)
}
