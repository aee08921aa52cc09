//! How a result is written, and what that takes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::arrays::ArrayWriter;
use crate::engine;
use crate::gate::Gate;
use crate::plan::{Form, Output, Plan};
use crate::publish::clock::Patience;
use crate::publish::{self, Needs};
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
    /// BLAKE3 of its bytes when it was chosen, hexadecimal; None where nothing was decided by them.
    pub blake3: Option<String>,
}

/// How to write.
#[derive(Debug, Clone)]
pub struct Options {
    /// Worker threads.
    pub threads: usize,
    /// Anonymous memory that must not be exceeded, in bytes.
    pub memory: u64,
    /// How to publish.
    pub publish: publish::Options,
    /// Files copied to the result.
    pub copies: Vec<Companion>,
    /// Files of the result that come from a folder above the checkpoint: where from, by name.
    pub above: BTreeMap<String, String>,
    /// Values of the source for the manifest.
    pub values: serde_json::Value,
    /// True to leave holes where the result holds zeros; no space is reserved for it then.
    pub sparse: bool,
    /// Writes the arrays of a result that holds some.
    pub arrays: Option<Arc<dyn ArrayWriter>>,
    /// True if the manifest is to carry statistics of each tensor.
    pub stats: bool,
    /// True if the sources were compared with a manifest of theirs, so that nothing in them can be swapped.
    pub expected: bool,
    /// How long other processes of the same run are given to show a sign of life.
    pub patience: Patience,
    /// Which rank has each root of the sources on its own disk, where not all see all of them.
    pub near: Option<Vec<u32>>,
    /// How findings are judged before the result is published.
    pub gate: Gate,
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

/// Reckons the needs of a run at its destination.
pub(crate) fn needs(plan: &Plan, files: &[Arc<SourceFile>], options: &Options) -> Needs {
    let copied: u64 =
        options.copies.iter().filter_map(|c| std::fs::metadata(&c.path).ok()).map(|m| m.len()).sum();
    let each = if options.stats { 2400 } else { 400 };
    let blocks: u64 = match plan.files.iter().any(|f| matches!(f.form, Form::Arrays(_))) {
        // The manifest lists the store's files, each of a MiB or more but for the last of an array.
        true => plan.bytes() / CHUNK + plan.outputs.len() as u64,
        false => 0,
    };
    let named = plan.files.len() as u64 + blocks + options.copies.len() as u64;
    let names: u64 = plan.outputs.iter().map(|o| 2 * o.name.len() as u64).sum();
    let manifest =
        4096 + names + each * plan.outputs.len() as u64 + 200 * plan.sources.len() as u64 + 250 * named;
    let bytes = match options.sparse {
        true => 0,
        false => plan.bytes() + copied + manifest + aside(plan, options),
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

/// Gives the engine its part of the options.
pub(crate) fn engine_options(plan: &Plan, options: &Options, scratch: &Path) -> engine::Options {
    engine::Options {
        threads: options.threads,
        memory: options.memory,
        scratch_dir: scratch.to_path_buf(),
        max_decoded: None,
        encodes: largest_block(plan),
        stats: if options.stats { Level::Full } else { Level::Nothing },
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
