//! Layout tables and their rules, for adapters: looked up, and made of other tables.

use std::collections::BTreeMap;
use std::sync::Arc;

use fastshard::codes;
use fastshard::error::{Error, Finding};
use fastshard::layout::table::{Entry, Table as CoreTable};
use pyo3::prelude::*;

use crate::plain::to_python;
use crate::raise;

/// A parsed layout table; it does not change.
#[pyclass(frozen, module = "fastshard._core")]
pub(crate) struct Table {
    pub(crate) inner: Arc<CoreTable>,
}

/// One rule of a table; it does not change.
#[pyclass(frozen, module = "fastshard._core")]
pub(crate) struct Rule {
    inner: Entry,
}

/// Axes, facts, and sets by name: the axis and the positions.
type Description = (BTreeMap<String, u64>, BTreeMap<String, bool>, BTreeMap<String, (String, Vec<u64>)>);

fn bad(what: String) -> PyErr {
    raise(Error::from(Finding::new(codes::BAD_LAYOUT, what)))
}

fn parsed(config: &str, file: Option<&str>) -> PyResult<serde_json::Value> {
    serde_json::from_str(config).map_err(|e| {
        let mut finding = Finding::new(codes::BAD_VALUE, format!("config: not valid JSON: {e}"));
        finding.file = file.map(str::to_string);
        raise(Error::from(finding))
    })
}

fn entries(rules: &[PyRef<'_, Rule>]) -> Vec<Entry> {
    rules.iter().map(|rule| rule.inner.clone()).collect()
}

#[pymethods]
impl Table {
    #[new]
    #[pyo3(signature = (text, base=None))]
    fn new(text: &str, base: Option<PyRef<'_, Table>>) -> PyResult<Self> {
        let table = CoreTable::extending(text, base.as_deref().map(|base| &*base.inner));
        Ok(Table { inner: Arc::new(table.map_err(raise)?) })
    }

    #[staticmethod]
    fn extends_of(text: &str) -> PyResult<Option<String>> {
        CoreTable::extends_of(text).map_err(raise)
    }

    #[staticmethod]
    fn of(
        name: &str,
        vocab: Option<&str>,
        shard: BTreeMap<String, Vec<String>>,
        rules: Vec<PyRef<'_, Rule>>,
    ) -> PyResult<Self> {
        let table = CoreTable::of(name, vocab, shard, entries(&rules)).map_err(raise)?;
        Ok(Table { inner: Arc::new(table) })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    #[getter]
    fn family(&self) -> &str {
        &self.inner.family
    }

    #[getter]
    fn vocab(&self) -> Option<&str> {
        self.inner.vocab.as_deref()
    }

    #[getter]
    fn rules(&self) -> Vec<Rule> {
        self.inner.entries.iter().map(|entry| Rule { inner: entry.clone() }).collect()
    }

    fn with_rules(&self, rules: Vec<PyRef<'_, Rule>>) -> PyResult<Self> {
        Ok(Table { inner: Arc::new(self.inner.with(entries(&rules)).map_err(raise)?) })
    }

    fn rule_of(&self, name: &str) -> Option<Rule> {
        self.inner.rule_of(name).map(|i| Rule { inner: self.inner.entries[i].clone() })
    }

    #[getter]
    fn model_types(&self) -> Vec<String> {
        self.inner.config.model_types.clone()
    }

    #[getter]
    fn models<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.inner.models)
    }

    #[getter]
    fn has_config(&self) -> bool {
        self.inner.config.is_declared
    }

    #[pyo3(signature = (config, file=None))]
    fn is_for(&self, config: &str, file: Option<&str>) -> PyResult<bool> {
        self.inner.is_for(&parsed(config, file)?, file).map_err(raise)
    }

    #[pyo3(signature = (config, names, file=None))]
    fn describe(
        &self,
        config: Option<&str>,
        names: Vec<String>,
        file: Option<&str>,
    ) -> PyResult<Description> {
        let config = config.map(|config| parsed(config, file)).transpose()?;
        let description = self.inner.describe(config.as_ref(), &names, file).map_err(raise)?;
        let sets =
            description.sets.into_iter().map(|(name, set)| (name, (set.axis, set.positions))).collect();
        Ok((description.extents, description.facts, sets))
    }

    fn shape(&self, name: &str, axes: BTreeMap<String, u64>) -> Option<Vec<Option<u64>>> {
        self.inner.shape(name, &axes)
    }

    fn misfits(&self, shapes: BTreeMap<String, Vec<u64>>, axes: BTreeMap<String, u64>) -> usize {
        self.inner.misfits(&shapes, &axes)
    }
}

#[pymethods]
impl Rule {
    #[staticmethod]
    #[pyo3(signature = (name, shape, canonical, optional=false))]
    fn literal(name: &str, shape: &str, canonical: &str, optional: bool) -> PyResult<Self> {
        let entry = Entry::literal(name, shape, canonical).map_err(bad)?;
        Ok(Rule { inner: Entry { optional, ..entry } })
    }

    #[staticmethod]
    fn ignoring(name: &str, reason: &str) -> Self {
        Rule { inner: Entry::ignoring(name, reason) }
    }

    #[getter]
    fn name(&self) -> &str {
        self.inner.name.text()
    }

    #[getter]
    fn dimensions(&self) -> Option<Vec<String>> {
        self.inner.dimensions()
    }

    fn matches(&self, name: &str) -> bool {
        self.inner.name.matches(name, &BTreeMap::new()).is_some()
    }

    fn renamed(&self, name: &str) -> PyResult<Self> {
        Ok(Rule { inner: self.inner.renamed(name).map_err(bad)? })
    }

    fn stacked(&self, axis: &str, at: usize) -> PyResult<Self> {
        Ok(Rule { inner: self.inner.stacked(axis, at).map_err(bad)? })
    }

    fn slot(&self, slot: &str, power: f64) -> Self {
        Rule { inner: self.inner.slot(slot, power) }
    }

    fn left_out(&self, reason: &str) -> Self {
        Rule { inner: self.inner.left_out(reason) }
    }
}
