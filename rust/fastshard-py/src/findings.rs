//! Findings as Python has them: one class on both sides.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use fastshard::codes;
use fastshard::error::{
    exit_code as exit_code_of, Effect as CoreEffect, Finding as CoreFinding, Ranks, Span,
};
use fastshard::gate::Gate;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyRange, PyString, PyTuple, PyType};

use crate::plain::Given;
use crate::raise;

/// One observation about a checkpoint: what, where, expected, got, what to do. It does not change.
#[pyclass(frozen, eq, module = "fastshard", from_py_object)]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) inner: CoreFinding,
}

impl From<CoreFinding> for Finding {
    fn from(inner: CoreFinding) -> Self {
        Finding { inner }
    }
}

/// Findings for Python.
pub(crate) fn list(findings: impl IntoIterator<Item = CoreFinding>) -> Vec<Finding> {
    findings.into_iter().map(Finding::from).collect()
}

/// Findings of Python's.
pub(crate) fn core(findings: Vec<Finding>) -> Vec<CoreFinding> {
    findings.into_iter().map(|finding| finding.inner).collect()
}

/// A text. Names of files are bytes; those that are no text come with lone surrogates, which no output takes.
fn text(given: &Bound<'_, PyAny>) -> PyResult<String> {
    let given = given.cast::<PyString>()?;
    if let Ok(text) = given.to_str() {
        return Ok(text.to_string());
    }
    given.call_method1("encode", ("utf-8", "backslashreplace"))?.call_method0("decode")?.extract()
}

fn layers(given: &Bound<'_, PyAny>) -> PyResult<Span> {
    let (start, stop, step): (u64, u64, u64) = (
        given.getattr("start")?.extract()?,
        given.getattr("stop")?.extract()?,
        given.getattr("step")?.extract()?,
    );
    match step == 1 && start < stop {
        true => Ok(Span { first: start, last: stop - 1 }),
        false => Err(PyValueError::new_err("layers are a range of one layer at least, in steps of 1")),
    }
}

fn range(py: Python<'_>, layers: Span) -> PyResult<Bound<'_, PyRange>> {
    let (first, last) = (isize::try_from(layers.first)?, isize::try_from(layers.last)?);
    PyRange::new(py, first, last.saturating_add(1))
}

/// Ranks, given as numbers or ranges by dimension.
fn ranks(given: &Bound<'_, PyAny>) -> PyResult<Ranks> {
    let spans = |numbers: &Bound<'_, PyAny>| match numbers.extract::<u64>() {
        Ok(number) => Ok(vec![Span { first: number, last: number }]),
        Err(_) if numbers.is_instance_of::<PyRange>() => Ok(vec![layers(numbers)?]),
        Err(_) => numbers.try_iter()?.map(|span| layers(&span?)).collect::<PyResult<_>>(),
    };
    let read = |given: &Bound<'_, PyAny>| {
        let mut ranks = Vec::new();
        for item in given.cast::<PyDict>()?.items() {
            let (dimension, numbers): (String, Bound<'_, PyAny>) = item.extract()?;
            ranks.push((dimension, spans(&numbers)?));
        }
        PyResult::Ok(Ranks(ranks))
    };
    read(given).map_err(|_| PyTypeError::new_err("coords are numbers, or ranges of them, by dimension"))
}

/// What a finding makes impossible.
#[pyclass(frozen, eq, hash, module = "fastshard._core", from_py_object)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Effect {
    inner: CoreEffect,
}

#[pymethods]
impl Effect {
    #[new]
    #[pyo3(signature = (count, of, in_layers, layers, tensors, in_missing_layers, missing_layers))]
    fn new(
        count: u64,
        of: Option<u64>,
        in_layers: u64,
        layers: Vec<Bound<'_, PyAny>>,
        tensors: Vec<String>,
        in_missing_layers: u64,
        missing_layers: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let layers = layers.iter().map(self::layers).collect::<PyResult<_>>()?;
        let missing_layers = missing_layers.iter().map(self::layers).collect::<PyResult<_>>()?;
        let inner = CoreEffect { count, of, in_layers, layers, in_missing_layers, missing_layers, tensors };
        Ok(Effect { inner })
    }

    #[getter]
    fn count(&self) -> u64 {
        self.inner.count
    }

    #[getter]
    fn of(&self) -> Option<u64> {
        self.inner.of
    }

    #[getter]
    fn in_layers(&self) -> u64 {
        self.inner.in_layers
    }

    #[getter]
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let ranges: PyResult<Vec<_>> = self.inner.layers.iter().map(|layers| range(py, *layers)).collect();
        PyTuple::new(py, ranges?)
    }

    #[getter]
    fn in_missing_layers(&self) -> u64 {
        self.inner.in_missing_layers
    }

    #[getter]
    fn missing_layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let ranges: PyResult<Vec<_>> =
            self.inner.missing_layers.iter().map(|layers| range(py, *layers)).collect();
        PyTuple::new(py, ranges?)
    }

    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.inner.tensors)
    }

    fn __repr__(&self) -> String {
        let of = self.inner.of.map(|of| format!(" of {of}")).unwrap_or_default();
        format!("<Effect on {}{of} tensors>", self.inner.count)
    }
}

/// The kind of codes with a name.
fn kind_of(name: &str) -> PyResult<codes::Kind> {
    serde_json::from_value(name.into())
        .map_err(|_| PyValueError::new_err(format!("no kind of codes: {name}")))
}

/// Sets what keyword arguments name; None takes away.
fn set(finding: &mut CoreFinding, changes: &Bound<'_, PyDict>) -> PyResult<()> {
    for (key, given) in changes.iter() {
        let key: String = key.extract()?;
        let place = match key.as_str() {
            "code" => {
                let word = text(&given)?;
                finding.code = codes::parse(&word)
                    .ok_or_else(|| PyValueError::new_err(format!("no finding has the code {word}")))?;
                continue;
            }
            "severity" => {
                finding.severity = serde_json::from_value(text(&given)?.into())
                    .map_err(|_| PyValueError::new_err(format!("no severity: {given}")))?;
                continue;
            }
            "message" => {
                finding.message = text(&given)?;
                continue;
            }
            "layers" => {
                finding.layers = (!given.is_none()).then(|| layers(&given)).transpose()?;
                continue;
            }
            "count" => {
                finding.count = given.extract()?;
                continue;
            }
            "files" => {
                finding.files = given.try_iter()?.map(|name| text(&name?)).collect::<PyResult<_>>()?;
                if let Some(first) = finding.files.first() {
                    finding.file = Some(first.clone());
                }
                continue;
            }
            "run" => {
                finding.run = given.try_iter()?.map(|command| text(&command?)).collect::<PyResult<_>>()?;
                continue;
            }
            "parts" => {
                finding.parts = core(given.extract()?);
                continue;
            }
            "coords" => {
                finding.coords = if given.is_none() { Ranks::default() } else { ranks(&given)? };
                continue;
            }
            "effect" => {
                finding.effect = given.extract::<Option<Effect>>()?.map(|effect| effect.inner);
                continue;
            }
            "file" => &mut finding.file,
            "rank" => &mut finding.rank,
            "host" => &mut finding.host,
            "tensor" => &mut finding.tensor,
            "expected" => &mut finding.expected,
            "got" => &mut finding.got,
            "evidence" => &mut finding.evidence,
            "help" => &mut finding.help,
            "axis" => &mut finding.axis,
            "decided" => &mut finding.decided,
            "unnoticed" => &mut finding.unnoticed,
            _ => return Err(PyTypeError::new_err(format!("a finding has no field {key:?}"))),
        };
        *place = (!given.is_none()).then(|| text(&given)).transpose()?;
    }
    match (changes.contains("coords")?, changes.contains("rank")?) {
        (true, false) => finding.rank = Some(finding.coords.to_string()).filter(|text| !text.is_empty()),
        // What is of no rank any more is of none as data either.
        (false, true) if finding.rank.is_none() => finding.coords = Ranks::default(),
        _ => {}
    }
    // Commands do what their help says.
    if changes.contains("help")? && !changes.contains("run")? {
        finding.run.clear();
    }
    Ok(())
}

#[pymethods]
impl Finding {
    #[new]
    #[pyo3(signature = (code, severity, message, **fields))]
    fn new(
        code: &Bound<'_, PyAny>,
        severity: &Bound<'_, PyAny>,
        message: &Bound<'_, PyAny>,
        fields: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let given = fields.cloned().unwrap_or_else(|| PyDict::new(code.py()));
        given.set_item("code", code)?;
        given.set_item("severity", severity)?;
        given.set_item("message", message)?;
        let mut inner = CoreFinding::new(codes::INTERNAL, "");
        set(&mut inner, &given)?;
        Ok(Finding { inner })
    }

    /// A finding with the code's own severity, unless another is given.
    #[classmethod]
    #[pyo3(signature = (code, message, **fields))]
    fn of(
        _cls: &Bound<'_, PyType>,
        code: &Bound<'_, PyAny>,
        message: &Bound<'_, PyAny>,
        fields: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let word = text(code)?;
        let known = codes::parse(&word)
            .ok_or_else(|| PyValueError::new_err(format!("no finding has the code {word}")))?;
        let mut inner = CoreFinding::new(known, text(message)?);
        if let Some(fields) = fields {
            if fields.get_item("severity")?.is_some_and(|severity| severity.is_none()) {
                fields.del_item("severity")?;
            }
            set(&mut inner, fields)?;
        }
        Ok(Finding { inner })
    }

    /// The finding that `to_dict` made this of; keys that it does not know are passed over.
    #[classmethod]
    fn from_dict(_cls: &Bound<'_, PyType>, data: Given<CoreFinding>) -> Self {
        Finding { inner: data.0 }
    }

    /// Plain data, without empty fields.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        crate::plain::to_python(py, &self.inner)
    }

    /// The same with other fields.
    #[pyo3(signature = (**changes))]
    fn replace(&self, changes: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut inner = self.inner.clone();
        if let Some(changes) = changes {
            set(&mut inner, changes)?;
        }
        Ok(Finding { inner })
    }

    /// For `copy.replace`.
    #[pyo3(signature = (**changes))]
    fn __replace__(&self, changes: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        self.replace(changes)
    }

    /// Tells whether the table has its code under one of some kinds.
    #[pyo3(signature = (*kinds))]
    fn is_a(&self, kinds: Vec<String>) -> PyResult<bool> {
        for kind in kinds {
            if self.inner.code.is_a(kind_of(&kind)?) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    #[getter]
    fn code(&self) -> String {
        self.inner.code.to_string()
    }

    #[getter]
    fn severity(&self) -> &'static str {
        self.inner.severity.word()
    }

    #[getter]
    fn message(&self) -> &str {
        &self.inner.message
    }

    #[getter]
    fn file(&self) -> Option<&str> {
        self.inner.file.as_deref()
    }

    #[getter]
    fn files<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        match self.inner.files.is_empty() {
            true => PyTuple::new(py, &self.inner.file),
            false => PyTuple::new(py, &self.inner.files),
        }
    }

    #[getter]
    fn rank(&self) -> Option<&str> {
        self.inner.rank.as_deref()
    }

    #[getter]
    fn coords<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let coords = PyDict::new(py);
        for (dimension, spans) in &self.inner.coords.0 {
            let ranges: PyResult<Vec<_>> = spans.iter().map(|span| range(py, *span)).collect();
            coords.set_item(dimension, PyTuple::new(py, ranges?)?)?;
        }
        Ok(coords)
    }

    #[getter]
    fn host(&self) -> Option<&str> {
        self.inner.host.as_deref()
    }

    #[getter]
    fn tensor(&self) -> Option<&str> {
        self.inner.tensor.as_deref()
    }

    #[getter]
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyRange>>> {
        self.inner.layers.map(|layers| range(py, layers)).transpose()
    }

    #[getter]
    fn axis(&self) -> Option<&str> {
        self.inner.axis.as_deref()
    }

    #[getter]
    fn count(&self) -> Option<u64> {
        self.inner.count
    }

    #[getter]
    fn expected(&self) -> Option<&str> {
        self.inner.expected.as_deref()
    }

    #[getter]
    fn got(&self) -> Option<&str> {
        self.inner.got.as_deref()
    }

    #[getter]
    fn evidence(&self) -> Option<&str> {
        self.inner.evidence.as_deref()
    }

    #[getter]
    fn effect(&self) -> Option<Effect> {
        self.inner.effect.clone().map(|inner| Effect { inner })
    }

    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, list(self.inner.parts.iter().cloned()))
    }

    #[getter]
    fn title(&self) -> &'static str {
        codes::info(self.inner.code).title
    }

    #[getter]
    fn headline(&self) -> String {
        self.inner.headline()
    }

    #[getter]
    fn help(&self) -> Option<&str> {
        self.inner.help.as_deref()
    }

    #[getter]
    fn run<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.inner.run)
    }

    #[getter]
    fn advice(&self) -> Option<String> {
        self.inner.advice()
    }

    #[getter]
    fn decided(&self) -> Option<&str> {
        self.inner.decided.as_deref()
    }

    #[getter]
    fn unnoticed(&self) -> Option<&str> {
        self.inner.unnoticed.as_deref()
    }

    fn __str__(&self) -> String {
        self.inner.to_string()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let dict = self.to_dict(py)?.cast_into::<PyDict>()?;
        let fields: PyResult<Vec<_>> =
            dict.iter().map(|(key, value)| Ok(format!("{key}={}", value.repr()?))).collect();
        Ok(format!("Finding({})", fields?.join(", ")))
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.inner.hash(&mut hasher);
        hasher.finish()
    }

    /// The finding that pickle makes of its parts.
    #[classmethod]
    fn _restore(
        _cls: &Bound<'_, PyType>,
        data: Given<CoreFinding>,
        coords: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        Ok(Finding { inner: CoreFinding { coords: ranks(coords)?, ..data.0 } })
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let make = py.get_type::<Finding>().getattr("_restore")?;
        Ok((make, PyTuple::new(py, [self.to_dict(py)?, self.coords(py)?.into_any()])?))
    }
}

/// A row of the table of codes: code, name, severity, exit code, title, meaning, help and check.
type Row = (String, &'static str, &'static str, u8, &'static str, &'static str, &'static str, &'static str);

/// The table of finding codes, in order.
#[pyfunction]
pub(crate) fn codes_table() -> Vec<Row> {
    let row = |row: &codes::CodeInfo| {
        let exit = match row.exit {
            codes::Exit::Problem => 1,
            codes::Exit::CouldNotRun => 2,
            codes::Exit::Incomplete => 3,
        };
        (
            row.code.to_string(),
            row.name,
            row.severity.word(),
            exit,
            row.title,
            row.meaning,
            row.help,
            row.check.word(),
        )
    };
    codes::TABLE.iter().map(row).collect()
}

/// The exit code that findings stand for.
#[pyfunction]
pub(crate) fn exit_code(findings: Vec<Finding>) -> u8 {
    exit_code_of(&core(findings))
}

/// Findings as a gate judges them.
#[pyfunction]
pub(crate) fn judge(findings: Vec<Finding>, gate: Given<Gate>) -> PyResult<Vec<Finding>> {
    let mut findings = core(findings);
    gate.0.judge(&mut findings).map_err(raise)?;
    Ok(list(findings))
}
