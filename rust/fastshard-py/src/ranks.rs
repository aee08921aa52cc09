//! Runs of several processes: ranks that meet, and parts that are made one by one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastshard::codes;
use fastshard::distributed::lending::{Lending, Root};
use fastshard::distributed::rounds::Shared;
use fastshard::distributed::{elsewhere, meeting, parts};
use fastshard::error::Finding;
use fastshard::manifest::Manifest;
use fastshard::publish::clock::Clock;
use fastshard::publish::gc;
use fastshard::publish::stored::{Stored as Result, Version};
use fastshard::write;
use pyo3::prelude::*;
use serde_json::json;

use crate::calls::{run, run_telling};
use crate::plain::{to_python, Given};
use crate::plans::Plan;
use crate::{findings, raise, to_json, Paths, RunOptions, Written};

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct About {
    rank: u32,
    world: u32,
    timeout: f64,
    #[serde(default)]
    words: BTreeMap<String, serde_json::Value>,
    #[serde(default)]
    hosts: Vec<String>,
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// A run of parts: its name, its folder, the number of its round, bytes and findings.
type Begun = (String, String, Option<u32>, Vec<u64>, Vec<findings::Finding>);

/// A rank that has met the others.
#[pyclass(frozen, module = "fastshard._core")]
pub(crate) struct Meeting {
    inner: Mutex<Option<Arc<meeting::Meeting>>>,
    lending: Mutex<Option<Lending>>,
}

impl Meeting {
    pub(crate) fn inner(&self) -> PyResult<Arc<meeting::Meeting>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        inner.ok_or_else(|| raise(Finding::new(codes::USAGE, "the meeting is over").into()))
    }
}

#[pymethods]
impl Meeting {
    /// Meets the other ranks at `out`.
    #[new]
    fn new(py: Python<'_>, out: PathBuf, about: Given<About>) -> PyResult<Self> {
        let about = about.0;
        let about = meeting::About {
            rank: about.rank,
            world: about.world,
            timeout: seconds(about.timeout),
            words: about.words,
            hosts: about.hosts,
            clock: Clock::default(),
        };
        let met = run(py, None, move |control| {
            let go_on = || !control.cancel.load(std::sync::atomic::Ordering::Relaxed);
            meeting::Meeting::begin(&out, about, &go_on).map(Arc::new)
        });
        Ok(Meeting { inner: Mutex::new(Some(met.settle(None)?)), lending: Mutex::default() })
    }

    /// What each rank said of itself: of all for rank 0, of rank 0 and this one for the others.
    fn ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let cards = self.inner()?.cards();
        let each: Vec<_> = cards
            .iter()
            .map(|card| json!({"rank": card.rank, "host": card.process.host, "pid": card.process.pid, "storage": card.storage}))
            .collect();
        to_python(py, &each)
    }

    /// Says why this rank stops, so that the others do too.
    fn stop(&self, findings: Vec<findings::Finding>) -> PyResult<()> {
        self.inner()?.stop(&findings::core(findings));
        Ok(())
    }

    /// Says that this rank has nothing left to do.
    fn done(&self) -> PyResult<()> {
        self.inner()?.published();
        Ok(())
    }

    /// Lends `files` (root and relative path) below `roots` (`folder` and `file` of each), and makes folders below
    /// `folder` that stand for the roots of the other ranks: `{"rank", "host", "there", "here", "file"}` of each root of
    /// all ranks.
    fn lend<'py>(
        &self,
        py: Python<'py>,
        roots: Given<Vec<Root>>,
        files: Vec<(u32, String)>,
        folder: PathBuf,
    ) -> PyResult<Bound<'py, PyAny>> {
        let roots = roots.0;
        let (inner, by) = (self.inner()?, std::thread::current().id());
        let begun = run(py, None, move |control| {
            let go_on = || !control.cancel.load(std::sync::atomic::Ordering::Relaxed);
            Lending::begin(&inner, roots, &files, &folder, by, &go_on)
        });
        let lending = begun.settle(None)?;
        let each: Vec<_> = lending
            .sources()
            .iter()
            .map(
                |s| json!({"rank": s.rank, "host": s.host, "there": s.there, "here": s.here, "file": s.file}),
            )
            .collect();
        *self.lending.lock().unwrap_or_else(PoisonError::into_inner) = Some(lending);
        to_python(py, &each)
    }

    /// A digest of files (rank, number of its root, path) as they were when the ranks met.
    fn stamp(&self, wanted: Vec<(u32, u32, String)>) -> String {
        let lending = self.lending.lock().unwrap_or_else(PoisonError::into_inner);
        lending.as_ref().map(|lending| lending.stamp(&wanted)).unwrap_or_default()
    }

    /// Counts the bytes that each rank has given to others by now.
    #[pyo3(name = "lent")]
    fn count_served(&self) -> BTreeMap<u32, u64> {
        let lending = self.lending.lock().unwrap_or_else(PoisonError::into_inner);
        lending.as_ref().map(Lending::count_served).unwrap_or_default()
    }

    /// Takes leave.
    fn close(&self, py: Python<'_>) {
        let lending = self.lending.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(lending));
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(inner));
    }
}

/// Begins a run of `parts` parts, or its next round: the run, its folder, the round, bytes and findings.
#[pyfunction]
#[pyo3(signature = (plan, out, options, parts, about, paths))]
pub(crate) fn begin_parts(
    py: Python<'_>,
    plan: &Plan,
    out: PathBuf,
    options: Given<RunOptions>,
    parts: usize,
    about: Given<serde_json::Value>,
    paths: Paths,
) -> PyResult<Begun> {
    plan.refuse_errors()?;
    let (copies, roots) = paths;
    let (options, about) = (options.0.writing(copies, None), about.0);
    let (plan, files) = (Arc::clone(&plan.plan), plan.files.clone());
    let begun = run(py, None, move |control| {
        let begun = parts::begin(&plan, &files, &roots, &out, &options, parts, about, control)?;
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
    options: Given<RunOptions>,
    nonce: String,
    part: u32,
    paths: Paths,
    progress: Option<Py<PyAny>>,
) -> PyResult<bool> {
    plan.refuse_errors()?;
    let (copies, roots) = paths;
    let options = options.0.writing(copies, None);
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
        parts::make_part(&plan, &files, &roots, &out, &shared, &round, part, &options, control)
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
    options: Given<RunOptions>,
    nonce: String,
    arrays: Option<Py<PyAny>>,
    paths: Paths,
    progress: Option<Py<PyAny>>,
    tell: Option<Py<PyAny>>,
) -> PyResult<Written> {
    plan.refuse_errors()?;
    let (copies, _) = paths;
    let options = options.0.writing(copies, arrays);
    let (core_plan, files) = (Arc::clone(&plan.plan), plan.files.clone());
    let ended = run_telling(py, progress, tell, {
        let out = out.clone();
        move |control| parts::commit(&core_plan, &files, &out, &nonce, &options, control)
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
pub(crate) fn is_elsewhere(path: PathBuf) -> bool {
    elsewhere::is_elsewhere(&path)
}

/// Fills bytes `lo..hi` of the file at `path` with those of what it stands for, if it does, for readers that know files
/// alone.
#[pyfunction]
pub(crate) fn bring(py: Python<'_>, path: PathBuf, lo: u64, hi: u64) -> PyResult<()> {
    if !elsewhere::is_elsewhere(&path) {
        return Ok(());
    }
    run(py, None, move |_| elsewhere::bring(&path, lo, hi)).settle(None)
}

/// Lets go of what was brought.
#[pyfunction]
pub(crate) fn let_go(py: Python<'_>, path: PathBuf, lo: u64, hi: u64) -> PyResult<()> {
    py.detach(|| elsewhere::let_go(&path, lo, hi)).map_err(raise)
}

/// Says that ranges (path, first byte, one past the last) of what files stand for will be read.
#[pyfunction]
pub(crate) fn will_read(py: Python<'_>, ranges: Vec<(PathBuf, u64, u64)>) -> PyResult<()> {
    py.detach(|| elsewhere::will_read(&ranges)).map_err(raise)
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
