//! Rosters: what a model must hold, for whoever knows it.

use std::collections::{HashMap, HashSet};

use fastshard::codes;
use fastshard::draft::Draft;
use fastshard::error::Finding;
use fastshard::roster::{Entry, PresentTensor, Roster as CoreRoster};
use fastshard::tensor::Dtype;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::raise;

/// Extents, as far as they are known.
type Known = Option<Vec<Option<u64>>>;
/// Name, shape, dtype, and if a model may be without it.
type Listed = (String, Known, Option<String>, bool);

/// The tensors that a model must hold; it does not change.
#[pyclass(frozen, module = "fastshard._core")]
pub(crate) struct Roster {
    inner: CoreRoster,
}

fn entry((name, shape, dtype, optional): Listed) -> PyResult<Entry> {
    let dtype = match dtype {
        None => None,
        Some(given) => Some(Dtype::from_safetensors(&given).ok_or_else(|| {
            let message = format!("a roster gives a dtype that there is not: {given}");
            raise(Finding::new(codes::USAGE, message).tensor(&name).into())
        })?),
    };
    Ok(Entry { name, shape, dtype, optional })
}

#[pymethods]
impl Roster {
    #[new]
    #[pyo3(signature = (entries, any_of=Vec::new()))]
    fn new(entries: Vec<Listed>, any_of: Vec<Vec<String>>) -> PyResult<Self> {
        let entries = entries.into_iter().map(entry).collect::<PyResult<Vec<_>>>()?;
        Ok(Roster { inner: CoreRoster::new(entries, &any_of).map_err(raise)? })
    }

    fn __len__(&self) -> usize {
        self.inner.entries().len()
    }

    fn entries(&self) -> Vec<Listed> {
        let listed = self.inner.entries().iter();
        listed
            .map(|e| (e.name.clone(), e.shape.clone(), e.dtype.map(|dtype| dtype.to_string()), e.optional))
            .collect()
    }
}

/// What the tensors of a draft differ in from a roster, each tensor taken once and whole, whatever the ranks that hold it.
pub(crate) fn compared<'py>(
    py: Python<'py>,
    draft: &Draft,
    roster: &Roster,
    names: &HashMap<String, String>,
    outer: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let mut seen = HashSet::new();
    let present = draft.outputs.iter().filter_map(|one| {
        let stored = one.output.name.as_str();
        let own = names.get(stored).map_or(stored, String::as_str).strip_prefix(outer)?;
        let shape = one.whole.as_deref().unwrap_or(&one.output.shape);
        let is_first = one.coords.is_empty() || seen.insert(stored);
        is_first.then_some(PresentTensor { stored, own, shape, dtype: one.output.dtype })
    });
    let found = roster.inner.compared(present);
    let result = PyDict::new(py);
    let missing: Vec<(&str, &Known)> = found.missing.iter().map(|e| (e.name.as_str(), &e.shape)).collect();
    let differing: Vec<(&str, &[u64], &Known)> =
        found.differing.iter().map(|&(name, got, e)| (name, got, &e.shape)).collect();
    let dtypes: Vec<(&str, &str, &str)> = found
        .dtypes
        .iter()
        .map(|&(name, got, expected)| (name, got.safetensors_name(), expected.safetensors_name()))
        .collect();
    let kinds: HashMap<(&str, &str), usize> = found
        .kinds
        .iter()
        .map(|(&(got, expected), &n)| ((got.safetensors_name(), expected.safetensors_name()), n))
        .collect();
    result.set_item("missing", missing)?;
    result.set_item("differing", differing)?;
    result.set_item("dtypes", dtypes)?;
    result.set_item("further", found.further)?;
    result.set_item("same", found.same)?;
    result.set_item("kinds", kinds)?;
    Ok(result)
}
