//! Stores that a result is published in, by a Python object.

use std::collections::BTreeMap;
use std::path::Path;

use fastshard::error::Result;
use fastshard::write;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::raise;
use crate::stores::{failed, settled};

/// The bytes of a file for its upload, in order.
#[pyclass(frozen, module = "fastshard._core")]
pub(crate) struct FileParts {
    parts: write::FileParts,
}

#[pymethods]
impl FileParts {
    /// Size of the file in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.parts.size()
    }

    /// True once the run has ended, so that nobody waits for the upload any more.
    #[getter]
    fn has_ended(&self) -> bool {
        self.parts.has_ended()
    }

    /// Takes the next `length` bytes, fewer at the end; None after it. Waits until they are made.
    fn take<'py>(&self, py: Python<'py>, length: usize) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let bytes = py.detach(|| self.parts.take(length)).map_err(raise)?;
        Ok(bytes.map(|bytes| PyBytes::new(py, &bytes)))
    }
}

/// Calls the methods of a destination; each returns None, or a list of findings.
#[derive(Debug)]
pub(crate) struct PythonDestination {
    pub(crate) destination: Py<PyAny>,
}

impl PythonDestination {
    fn call(&self, about: &str, call: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>>) -> Result<()> {
        Python::attach(|py| settled(py, about, call(py)))
    }
}

impl write::Destination for PythonDestination {
    fn list_complete(&self) -> Result<BTreeMap<String, String>> {
        Python::attach(|py| {
            let complete = self.destination.getattr(py, "complete").and_then(|found| found.extract(py));
            complete.map_err(|error| failed("the store", &error))
        })
    }

    fn upload(&self, name: &str, parts: write::FileParts) -> Result<()> {
        self.call(name, |py| self.destination.call_method1(py, "upload", (name, FileParts { parts })))
    }

    fn record(&self, name: &str, content: &str) -> Result<()> {
        self.call(name, |py| self.destination.call_method1(py, "record", (name, content)))
    }

    fn check(&self, files: &[(&str, u64)]) -> Result<()> {
        self.call("the store", |py| self.destination.call_method1(py, "check", (files.to_vec(),)))
    }

    fn put_last(&self, name: &str, path: &Path) -> Result<()> {
        self.call(name, |py| self.destination.call_method1(py, "put_last", (name, path)))
    }
}
