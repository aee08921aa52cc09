//! Ranks that meet, and what they exchange.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastshard::codes;
use fastshard::distributed::lending::{Lending, Root};
use fastshard::distributed::meeting;
use fastshard::error::Finding;
use fastshard::publish::clock::Clock;
use pyo3::prelude::*;
use serde_json::json;

use crate::calls::run;
use crate::plain::{to_python, Given};
use crate::{findings, raise};

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

pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

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
