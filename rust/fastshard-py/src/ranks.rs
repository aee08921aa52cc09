//! Runs of several processes: parts that are made one by one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fastshard::codes;
use fastshard::distributed::parts;
use fastshard::distributed::rounds::Shared;
use fastshard::error::Finding;
use fastshard::manifest::Manifest;
use fastshard::publish::gc;
use fastshard::publish::stored::{Stored as Result, Version};
use fastshard::storage::remote;
use fastshard::write::{self, Run};
use pyo3::prelude::*;
use serde_json::json;

use crate::calls::{run, run_telling};
use crate::meetings::seconds;
use crate::options::complete;
use crate::plain::{to_python, Given};
use crate::plans::Plan;
use crate::{findings, raise, to_json, Paths, Written};

/// A run of parts: its name, its folder, the number of its round, bytes and findings.
type Begun = (String, String, Option<u32>, Vec<u64>, Vec<findings::Finding>);

/// Begins a run of `parts` parts, or its next round: the run, its folder, the round, bytes and findings.
#[pyfunction]
#[pyo3(signature = (plan, out, options, parts, about, paths))]
pub(crate) fn begin_parts(
    py: Python<'_>,
    plan: &Plan,
    out: PathBuf,
    options: Given<write::Options>,
    parts: usize,
    about: Given<serde_json::Value>,
    paths: Paths,
) -> PyResult<Begun> {
    plan.refuse_errors()?;
    let (copies, roots) = paths;
    let (options, about) = (complete(options.0, copies, None), about.0);
    let (plan, files) = (Arc::clone(&plan.plan), plan.files.clone());
    let begun = run(py, None, move |control| {
        let run = Run { plan: &plan, files: &files, roots: &roots, out: &out, options: &options, control };
        let begun = parts::begin(&run, parts, about)?;
        let folder = begun.staging.folder().display().to_string();
        Ok((
            begun.shared.run.nonce,
            folder,
            begun.round.map(|round| round.number),
            begun.bytes,
            begun.findings,
        ))
    });
    let (nonce, folder, round, bytes, found) = begun.settle(None)?;
    Ok((nonce, folder, round, bytes, findings::list(found)))
}

/// Makes a part of the run `nonce`; false if it was made before.
#[pyfunction]
#[pyo3(signature = (plan, out, options, nonce, part, paths, progress=None))]
#[allow(clippy::too_many_arguments)] // as Python passes them
pub(crate) fn make_part(
    py: Python<'_>,
    plan: &Plan,
    out: PathBuf,
    options: Given<write::Options>,
    nonce: String,
    part: u32,
    paths: Paths,
    progress: Option<Py<PyAny>>,
) -> PyResult<bool> {
    plan.refuse_errors()?;
    let (copies, roots) = paths;
    let options = complete(options.0, copies, None);
    let (plan, files) = (Arc::clone(&plan.plan), plan.files.clone());
    let ended = run(py, progress, move |control| {
        let shared = Shared::enter(&out, &plan.digest(), &write::document(&plan), Some(&nonce))?;
        let Some(round) = shared.round()? else {
            return Err(Finding::new(
                codes::LEFTOVER_RUN,
                "no round of this run is open: it was never wholly begun",
            )
            .file(shared.path())
            .help("begin it once more, with --resume")
            .into());
        };
        let run = Run { plan: &plan, files: &files, roots: &roots, out: &out, options: &options, control };
        parts::make_part(&run, &shared, &round, part)
    });
    Ok(ended.settle(None)? == parts::PartOutcome::Now)
}

/// Concludes the run `nonce`, all of whose parts are made: the manifest as JSON, and findings.
#[pyfunction]
#[pyo3(signature = (plan, out, options, nonce, arrays, paths, progress=None, tell=None))]
#[allow(clippy::too_many_arguments)] // as Python passes them
pub(crate) fn commit(
    py: Python<'_>,
    plan: &Plan,
    out: PathBuf,
    options: Given<write::Options>,
    nonce: String,
    arrays: Option<Py<PyAny>>,
    paths: Paths,
    progress: Option<Py<PyAny>>,
    tell: Option<Py<PyAny>>,
) -> PyResult<Written> {
    plan.refuse_errors()?;
    let (copies, roots) = paths;
    let options = complete(options.0, copies, arrays);
    let (core_plan, files) = (Arc::clone(&plan.plan), plan.files.clone());
    let ended = run_telling(py, progress, tell, {
        let out = out.clone();
        move |control| {
            let (plan, options) = (&*core_plan, &options);
            parts::commit(&Run { plan, files: &files, roots: &roots, out: &out, options, control }, &nonce)
        }
    });
    plan.remember(ended.collect_findings(&out, |(_, warnings): &(Manifest, Vec<Finding>)| warnings.clone()));
    let (manifest, warnings) = ended.settle(Some(&out))?;
    Ok((to_json(&manifest)?, findings::list(warnings)))
}

/// Path and version of a result, and whether all of it is there.
type Stored = (String, &'static str, bool);
/// Path, run and fate of what a run has left, the bytes that it takes up, and the results in it.
type Left = (String, Option<String>, &'static str, u64, Vec<Stored>);

/// Takes away what runs that are over have left.
#[pyfunction]
pub(crate) fn collect(
    py: Python<'_>,
    out: PathBuf,
    abandon: Option<String>,
    patience: f64,
    dry: bool,
) -> PyResult<Vec<Left>> {
    let collected = run(py, None, move |control| {
        let go_on = || !control.cancel.load(std::sync::atomic::Ordering::Relaxed);
        gc::collect(&out, abandon.as_deref(), &seconds(patience).into(), dry, &go_on)
    });
    let fate = |fate| match fate {
        gc::Fate::Removed => "removed",
        gc::Fate::Resumable => "resumable",
        gc::Fate::AtWork => "at_work",
        gc::Fate::Complete => "complete",
        gc::Fate::Foreign => "foreign",
    };
    let left = collected.settle(None)?.into_iter();
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let version = |version| match version {
        Version::Older => "older",
        Version::Newer => "newer",
    };
    let stored = |one: &Result| (text(&one.path), version(one.version), one.is_complete);
    Ok(left
        .map(|left| {
            let results = left.results.iter().map(stored).collect();
            (text(&left.path), left.run, fate(left.fate), left.bytes, results)
        })
        .collect())
}

/// True if `path` stands for something on another host.
#[pyfunction]
pub(crate) fn is_remote(path: PathBuf) -> bool {
    remote::is_remote(&path)
}

/// Fills bytes `lo..hi` of the file at `path` with those of what it stands for, if it does, for readers that know files
/// alone.
#[pyfunction]
pub(crate) fn bring(py: Python<'_>, path: PathBuf, lo: u64, hi: u64) -> PyResult<()> {
    if !remote::is_remote(&path) {
        return Ok(());
    }
    run(py, None, move |_| remote::bring(&path, lo, hi)).settle(None)
}

/// Lets go of what was brought.
#[pyfunction]
pub(crate) fn let_go(py: Python<'_>, path: PathBuf, lo: u64, hi: u64) -> PyResult<()> {
    py.detach(|| remote::let_go(&path, lo, hi)).map_err(raise)
}

/// Says that ranges (path, first byte, one past the last) of what files stand for will be read.
#[pyfunction]
pub(crate) fn will_read(py: Python<'_>, ranges: Vec<(PathBuf, u64, u64)>) -> PyResult<()> {
    py.detach(|| remote::will_read(&ranges)).map_err(raise)
}

/// The storage that a path lies on, for people.
#[pyfunction]
pub(crate) fn storage_of(path: PathBuf) -> String {
    let real = path.canonicalize().unwrap_or(path);
    fastshard::publish::describe_storage(&real)
}

/// What is written of the run `nonce` (or the beginning of it) towards `out`: `{"run", "folder", "about", "parts", "missing"}`.
#[pyfunction]
pub(crate) fn shared_run<'py>(py: Python<'py>, out: PathBuf, nonce: &str) -> PyResult<Bound<'py, PyAny>> {
    let shared = Shared::called(&out, nonce).map_err(raise)?;
    let round = shared.round().map_err(raise)?;
    let missing =
        round.as_ref().map(|round| parts::missing_parts(&shared, round)).transpose().map_err(raise)?;
    to_python(
        py,
        &json!({
            "run": shared.run.nonce, "folder": shared.path().to_string_lossy(), "about": shared.run.work["about"],
            "parts": round.map(|round| round.parts), "missing": missing,
        }),
    )
}
