//! Pickles of plain data as Python objects. Nothing in them is imported or called.

use std::path::PathBuf;

use fastshard::codes;
use fastshard::engine::Control;
use fastshard::error::Finding;
use fastshard::format::pickle::{parse_bytes, LIMITS};
use fastshard::storage::SourceFile;
use fastshard::value::{Value, Values};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::calls::run;
use crate::plain::SIGNALS_EVERY;
use crate::raise;

/// What a pickle holds that is plain data: dicts, lists, texts, numbers. Tuples are lists. An object that the pickle
/// mentions often is one object.
#[pyfunction]
pub(crate) fn plain_pickle(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let at = path.clone();
    let read = move |_: &Control| {
        let file = SourceFile::open(&at)?;
        if file.size() > LIMITS.stream as u64 {
            return Err(Finding::new(codes::UNSAFE_PICKLE, "bytes of the pickle")
                .file(file.path())
                .expected(format!("at most {} bytes", LIMITS.stream), file.size())
                .into());
        }
        parse_bytes(&file.read_vec(0, file.size() as usize)?, file.path())
    };
    let pickle = run(py, None, read).settle(None)?;
    to_objects(py, &pickle.values, |class| {
        raise(
            Finding::new(codes::UNSAFE_PICKLE, "the pickle holds an object, and plain data alone is read")
                .file(&path)
                .expected("dicts, lists, numbers and text", class)
                .help("do not load this file elsewhere: unpickling it may run code")
                .into(),
        )
    })
}

/// Makes an object of each value, so that shared ones are shared, and fills the containers after.
fn to_objects<'py>(
    py: Python<'py>,
    values: &Values,
    refuse: impl Fn(&str) -> PyErr,
) -> PyResult<Bound<'py, PyAny>> {
    let mut objects: Vec<Bound<'py, PyAny>> = Vec::with_capacity(values.len());
    for node in 0..values.len() {
        if node % SIGNALS_EVERY == 0 {
            py.check_signals()?;
        }
        objects.push(match values.get(node as u32) {
            Value::None => py.None().into_bound(py),
            Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
            Value::Int(value) => value.into_pyobject(py)?.into_any(),
            Value::Float(value) => value.into_pyobject(py)?.into_any(),
            Value::Str(text) => PyString::new(py, text).into_any(),
            Value::List(_) | Value::Tuple(_) => PyList::empty(py).into_any(),
            Value::Dict(_) => PyDict::new(py).into_any(),
            Value::Global(name) => return Err(refuse(name)),
            Value::Record { class, .. } => {
                return Err(refuse(&values.key_text(*class).unwrap_or_else(|| "an object".into())))
            }
            Value::Tensor(_) => return Err(refuse("a tensor")),
            Value::Bytes(_) => return Err(refuse("bytes")),
            Value::BigInt(_) => return Err(refuse("an integer beyond 64 bits")),
            Value::Set(_) => return Err(refuse("a set")),
        });
    }
    for (node, object) in objects.iter().enumerate() {
        if node % SIGNALS_EVERY == 0 {
            py.check_signals()?;
        }
        match values.get(node as u32) {
            Value::List(items) | Value::Tuple(items) => {
                let list = object.cast::<PyList>()?;
                items.iter().try_for_each(|&item| list.append(&objects[item as usize]))?;
            }
            Value::Dict(items) => {
                let dict = object.cast::<PyDict>()?;
                for &(key, value) in items {
                    match values.get(key) {
                        Value::Str(_) | Value::Int(_) | Value::Bool(_) | Value::None | Value::Float(_) => {
                            dict.set_item(&objects[key as usize], &objects[value as usize])?;
                        }
                        _ => return Err(refuse("a dict with keys that are neither numbers nor text")),
                    }
                }
            }
            _ => {}
        }
    }
    Ok(objects[values.root() as usize].clone())
}
