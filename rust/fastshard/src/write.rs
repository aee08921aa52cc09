//! Carries a plan out: preflight, staging, engine, manifest, publish.

mod arrays;
pub(crate) mod backlog;
mod fill;
mod frames;
mod outcome;
mod piece;
pub(crate) mod records;
pub(crate) mod sink;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use crate::codes;
use crate::distributed::meeting;
use crate::distributed::parts::{self, Prior};
use crate::engine::{self, Control};
use crate::error::{Error, Finding, Result, Severity};
use crate::gate::Gate;
use crate::manifest::{Manifest, MANIFEST_NAME};
use crate::plan::{Form, Output, Plan};
use crate::publish::clock::Patience;
use crate::publish::{self, Needs, Staging};
use crate::stats::Level;
use crate::storage::SourceFile;

pub use crate::files::INDEX_NAME;
pub use arrays::{Array, ArrayWriter, BlockBuffer};
use fill::Filling;
pub(crate) use frames::frames;
pub use piece::write_piece;

/// Bytes copied at a time.
const CHUNK: u64 = 1 << 20;

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

/// Writes and publishes a plan's result.
///
/// # Errors
/// All findings that keep the result from being published. Nothing is published then, unless the error
/// says so ([`Error::is_after_publishing`]). After an interrupt, or when the system failed, the staging
/// folder stays for `resume`; otherwise it is removed.
pub fn write(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    roots: &Roots,
    out: &Path,
    options: &Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let written = write_alone(plan, files, roots, out, options, control)?;
    if options.publish.resume {
        meeting::forget_dead(out);
    }
    Ok(written)
}

fn write_alone(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    roots: &Roots,
    out: &Path,
    options: &Options,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let run = plan.digest();
    // Before anything is made for it, on disk or in memory.
    engine::admit(plan, &engine_options(plan, options, out))?;
    publish::preflight(out, roots, &run, &needs(plan, files, options), &options.publish)?;
    let mut staging = Staging::begin(out, &run, &document(plan), &options.publish)?;
    let mut findings = staging.left_beside(plan.version);
    let notices = || control.notices.lock().unwrap_or_else(PoisonError::into_inner);
    notices().extend(findings.iter().cloned());
    if staging.sealed() {
        let stale = stale_files(&staging, plan, options)?;
        let folder = staging.folder().to_path_buf();
        if stale.is_empty() || !staging.unseal().map_err(|error| resumable(error, &folder))? {
            findings.extend(stale.iter().map(|name| stale_finding(out, name)));
            return roll_forward(staging, plan, out, findings, control);
        }
    }
    if let Some(shared) = staging.shared()? {
        return parts::go_on_alone(plan, files, roots, staging, shared, out, options, findings, control);
    }
    notices().extend(staging.forecast());
    complete(plan, files, staging, options, None, findings, control)
}

/// Makes what is not made yet, judges all of it, and publishes.
pub(crate) fn complete(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    staging: Staging,
    options: &Options,
    prior: Option<&Prior>,
    mut findings: Vec<Finding>,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    let folder = staging.folder().to_path_buf();
    let done =
        Filling { plan, files, staging: &staging, options, prior, control }.fill().and_then(|filled| {
            // The last look at the sources: what was read is what is there.
            files.iter().try_for_each(|f| f.unchanged())?;
            let (manifest, found) = filled;
            findings.extend(found);
            // What was noticed at the destination too.
            Ok((manifest, options.gate.pass(std::mem::take(&mut findings))?))
        });
    match done {
        Ok((manifest, mut findings)) => {
            let published = staging.publish(&last_names(plan), &|| control.is_running());
            findings.extend(published.map_err(|error| match error.is_after_publishing() {
                true => error,
                false => resumable(error, &folder),
            })?);
            Ok((manifest, findings))
        }
        Err(error)
            if keeps(&error, options) && (error.is_interrupt() || staging.journal().holds_records()) =>
        {
            Err(resumable(error, &folder))
        }
        Err(error) => {
            // What cannot be removed must not hide why it should be.
            match staging.discard() {
                Ok(()) => Err(error),
                Err(second) => {
                    let mut findings = error.into_findings();
                    findings.extend(second.into_findings());
                    Err(Error::from(findings))
                }
            }
        }
    }
}

/// What a staging folder says of its plan.
pub fn document(plan: &Plan) -> Vec<u8> {
    let document = serde_json::json!({
        "plan": plan.digest(), "version": plan.version, "target": plan.target, "outputs": plan.outputs.len(), "records": RECORDS_VERSION,
    });
    serde_json::to_vec(&document).expect("plain data")
}

/// Version of the journal's records: those of another are not continued.
const RECORDS_VERSION: u32 = 2;

/// What the run will need at its destination.
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

/// True for errors that say nothing against what is written so far: the system's, and a companion's.
fn keeps(error: &Error, options: &Options) -> bool {
    let of_system =
        [codes::IO, codes::NO_SPACE, codes::PERMISSION, codes::TOO_MANY_FILES, codes::INTERRUPTED];
    let of_companion = |f: &Finding| {
        let named = |c: &Companion| f.file.as_deref() == Some(&*c.path.display().to_string());
        options.copies.iter().any(named)
    };
    let errors = error.findings().iter().filter(|f| f.severity == Severity::Error);
    errors.into_iter().all(|f| of_system.contains(&f.code) || of_companion(f))
}

/// Says how a run that stopped can be continued.
pub(crate) fn resumable(error: Error, folder: &Path) -> Error {
    let mut findings = error.into_findings();
    if findings.iter().any(|f| f.code == codes::PUBLISH_CONFLICT) {
        return Error::from(findings); // It says itself where things are.
    }
    let way = |f: &Finding| match f.code {
        // Of the sources as they are now it is another run.
        codes::SOURCE_CHANGED => format!("start afresh by removing {}", folder.display()),
        _ => format!("remove {}, or continue the run", folder.display()),
    };
    // Where another process is at work it may have published, and its folder is not to be removed. What another rank
    // stopped for says it already.
    let says = |f: &Finding| f.help.as_ref().is_some_and(|help| help.ends_with(&way(f)));
    let needs_help = |f: &&mut Finding| f.severity == Severity::Error && f.code != codes::LOCKED && !says(f);
    for f in findings.iter_mut().filter(needs_help) {
        f.help = Some(match f.help.take().filter(|_| f.code != codes::INTERRUPTED) {
            Some(help) => format!("{help}; {}", way(f)),
            None => way(f),
        });
        if f.code != codes::SOURCE_CHANGED {
            f.run = vec!["--resume".into()];
        }
    }
    Error::from(findings)
}

/// Finishes publishing what an earlier run has completed.
pub(crate) fn roll_forward(
    staging: Staging,
    plan: &Plan,
    out: &Path,
    mut findings: Vec<Finding>,
    control: &Control,
) -> Result<(Manifest, Vec<Finding>)> {
    findings.extend(staging.publish(&last_names(plan), &|| control.is_running())?);
    match Manifest::read(&out.join(MANIFEST_NAME)) {
        Ok(manifest) => Ok((manifest, findings)),
        Err(error) => {
            // What was said on the way, of what is kept for one, is not said again.
            let mut all_findings = error.after_publishing(out).into_findings();
            all_findings.extend(findings);
            Err(Error::from(all_findings))
        }
    }
}

/// Companions of a sealed result that are not what they are now: changed, added or gone since.
fn stale_files(staging: &Staging, plan: &Plan, options: &Options) -> Result<Vec<String>> {
    if !staging.holds_sealed()? {
        return Ok(Vec::new());
    }
    // Moved to its place already, as one of the last.
    let Ok(manifest) = Manifest::read(&staging.path().join(MANIFEST_NAME)) else { return Ok(Vec::new()) };
    let of_plan = |name: &str| {
        plan.index.as_deref() == Some(name)
            || plan.texts.contains_key(name)
            || plan.files.iter().any(|f| f.name == name || name.starts_with(&format!("{}/", f.name)))
    };
    let mut sealed: BTreeMap<&str, Option<&String>> = manifest
        .files
        .iter()
        .filter(|f| !of_plan(&f.name))
        .map(|f| (f.name.as_str(), f.blake3.as_ref()))
        .collect();
    let mut stale = Vec::new();
    for Companion { name, path, .. } in &options.copies {
        let now = publish::hash_of_file(path)?;
        if sealed.remove(name.as_str()).flatten() != Some(&now) {
            stale.push(name.clone());
        }
    }
    stale.extend(sealed.into_keys().map(String::from));
    Ok(stale)
}

fn stale_finding(out: &Path, name: &str) -> Finding {
    Finding::new(
        codes::SOURCE_CHANGED,
        "changed since the interrupted run completed its result, which is kept as it was",
    )
    .severity(Severity::Warning)
    .file(out.join(name))
    .help("replace it to have it as it is now")
    .run("--overwrite")
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

/// Top-level names that appear after all others; the last one is where readers start.
fn last_names(plan: &Plan) -> Vec<&str> {
    std::iter::once(MANIFEST_NAME).chain(plan.pointers.iter().map(String::as_str)).collect()
}

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

/// Errors if the status of a file alone changed, where some lie on other hosts: these would give what they have lent once
/// more, which proves nothing.
pub(crate) fn only_read(files: &[Arc<SourceFile>]) -> Result<()> {
    match files.iter().any(|file| file.is_elsewhere() || file.blocks_apart().is_some()) {
        true => files.iter().try_for_each(|file| file.untouched()),
        false => Ok(()),
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
