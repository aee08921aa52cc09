//! Carries a plan out: preflight, staging, engine, manifest, publish.

mod arrays;
pub(crate) mod backlog;
pub(crate) mod complete;
mod destination;
mod file_parts;
mod fill;
mod filling;
pub(crate) mod frames;
pub(crate) mod options;
mod outcome;
mod piece;
pub(crate) mod records;
pub(crate) mod resume;
pub(crate) mod sink;
mod uploads;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::PoisonError;

use crate::codes;
use crate::distributed::{meeting, parts};
use crate::engine;
use crate::error::{Finding, Result, Severity};
use crate::manifest::{Manifest, MANIFEST_NAME};
use crate::publish::{self, Staging};
use crate::topics;

pub use crate::files::INDEX_NAME;
pub use arrays::{Array, ArrayWriter, BlockBuffer};
use complete::{complete, roll_forward};
pub use destination::Destination;
pub use file_parts::FileParts;
pub use options::{document, Companion, Options, Roots, Run};
use options::{engine_options, needs};
pub use piece::write_piece;
use resume::resumable;

/// Writes and publishes a plan's result.
///
/// # Errors
/// All findings that prevent the result. Nothing is published then, unless the error says so
/// ([`crate::error::Error::is_after_publishing`]). After an interrupt, or when the system failed, the staging
/// folder stays for `resume`; otherwise it is removed.
pub fn write(run: &Run<'_>) -> Result<(Manifest, Vec<Finding>)> {
    let written = write_alone(run)?;
    if run.options.publish.resume {
        meeting::forget_dead(run.out);
    }
    Ok(written)
}

fn write_alone(run: &Run<'_>) -> Result<(Manifest, Vec<Finding>)> {
    let Run { plan, roots, out, options, control, .. } = *run;
    let digest = plan.digest();
    log::debug!(target: topics::PUBLISH, "writes plan {digest} to {out:?}: {:?}", options.publish);
    // Before anything is made for it, on disk or in memory.
    engine::admit(plan, &engine_options(run, out))?;
    publish::preflight(out, roots, &digest, &needs(run), &options.publish)?;
    let mut staging = Staging::begin(out, &digest, &document(plan), &options.publish)?;
    let mut findings = staging.left_beside(plan.version);
    let notices = || control.notices.lock().unwrap_or_else(PoisonError::into_inner);
    notices().extend(findings.iter().cloned());
    if staging.sealed() {
        let stale = stale_files(run, &staging)?;
        let folder = staging.folder().to_path_buf();
        if stale.is_empty() || !staging.unseal().map_err(|error| resumable(error, &folder))? {
            findings.extend(stale.iter().map(|name| stale_finding(out, name)));
            return roll_forward(run, staging, findings);
        }
    }
    if let Some(shared) = staging.shared()? {
        return parts::go_on_alone(run, staging, shared, findings);
    }
    notices().extend(staging.forecast());
    complete(run, staging, None, findings)
}

/// Companions of a sealed result that were changed, added or removed since.
fn stale_files(run: &Run<'_>, staging: &Staging) -> Result<Vec<String>> {
    let Run { plan, options, .. } = *run;
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
    .help("replace the old result to write it again")
    .run("--overwrite")
}
