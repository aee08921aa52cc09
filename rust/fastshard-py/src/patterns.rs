//! Patterns that strangers wrote, with the budget of their file.

use std::sync::Arc;

use fastshard::codes;
use fastshard::error::{Error, Finding};
use fastshard::pattern;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::raise;

/// The steps that the patterns of one file may take together.
#[pyclass(frozen, module = "fastshard._core")]
pub(crate) struct PatternBudget {
    file: String,
    inner: Arc<pattern::Budget>,
}

#[pymethods]
impl PatternBudget {
    #[new]
    #[pyo3(signature = (file, steps=None))]
    fn new(file: String, steps: Option<u64>) -> Self {
        let inner = pattern::Budget::new(file.clone(), steps.unwrap_or(pattern::MOST_STEPS));
        PatternBudget { file, inner: Arc::new(inner) }
    }

    #[getter]
    fn taken(&self) -> u64 {
        self.inner.taken()
    }
}

/// Patterns of one list; they do not change.
#[pyclass(frozen, module = "fastshard._core")]
pub(crate) struct Patterns {
    inner: pattern::Patterns,
}

#[pymethods]
impl Patterns {
    #[new]
    fn new(texts: Vec<Bound<'_, PyString>>, how: &str, budget: PyRef<'_, PatternBudget>) -> PyResult<Self> {
        let how = match how {
            "start" => pattern::How::Start,
            "full" => pattern::How::Full,
            "module" => pattern::How::Module,
            _ => return Err(PyValueError::new_err(format!("no way to match: {how}"))),
        };
        let owned = |text: &Bound<'_, PyString>| text.to_str().map(str::to_string);
        let texts: Result<Vec<String>, _> = texts.iter().map(owned).collect();
        let texts = texts.map_err(|_| {
            let finding = Finding::new(codes::BAD_VALUE, "a pattern holds half of a surrogate pair");
            raise(Error::from(finding.file(&budget.file)))
        })?;
        let inner = pattern::Patterns::new(texts, how, Arc::clone(&budget.inner)).map_err(raise)?;
        Ok(Patterns { inner })
    }

    fn first(&self, name: &str) -> PyResult<Option<usize>> {
        self.inner.first(name).map_err(raise)
    }
}
