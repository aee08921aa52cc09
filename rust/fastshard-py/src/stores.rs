//! Blocks of array stores, which Python decodes: the core asks for one at a time.

use std::path::Path;
use std::sync::Arc;

use fastshard::codes;
use fastshard::error::{Error, Finding, Result};
use fastshard::format::blocks::Store;
use fastshard::storage::BlockReader;
use fastshard::tensor::Dtype;
use fastshard::write::{Array, ArrayWriter};
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;

/// `PyBUF_WRITE`, which the bindings leave out.
const WRITABLE: std::ffi::c_int = 0x200;

/// (key, dtype, shape) of each block, what identifies the content, and the function that decodes.
pub(crate) type Listed = (Vec<(String, String, Vec<u64>)>, String, Py<PyAny>);

/// The store that a Python listing describes.
pub(crate) fn store((blocks, identity, read): Listed) -> PyResult<Store> {
    let blocks: PyResult<Vec<_>> = blocks
        .into_iter()
        .map(|(key, dtype, shape)| {
            let dtype = Dtype::from_safetensors(&dtype)
                .ok_or_else(|| PyValueError::new_err(format!("{key}: unknown dtype {dtype}")))?;
            Ok((key, dtype, shape))
        })
        .collect();
    Ok(Store { blocks: blocks?, identity, reader: Arc::new(PythonReader { read }) })
}

/// Calls `read(key, buffer)`; it returns None, or a JSON array of findings.
#[derive(Debug)]
struct PythonReader {
    read: Py<PyAny>,
}

impl BlockReader for PythonReader {
    fn read(&self, key: &str, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
        let told = Python::attach(|py| with_view(py, &mut bytes, |view| self.read.call1(py, (key, view))));
        match told {
            // What still looks at the buffer must find it there for ever.
            Err(Lent::Kept(error)) => {
                std::mem::forget(bytes);
                Err(failed(key, &error))
            }
            Err(Lent::Returned(error)) => Err(failed(key, &error)),
            Ok(told) => findings_of(told).map_or(Ok(bytes), Err),
        }
    }
}

/// Calls the methods of a writer; each returns None, or a JSON array of findings.
#[derive(Debug)]
pub(crate) struct PythonWriter {
    pub(crate) writer: Py<PyAny>,
}

impl PythonWriter {
    fn call(&self, what: &str, call: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>>) -> Result<()> {
        let told = Python::attach(|py| call(py).and_then(|told| told.extract::<Option<String>>(py)));
        match told {
            Ok(told) => findings_of(told).map_or(Ok(()), Err),
            Err(error) => Err(failed(what, &error)),
        }
    }
}

impl ArrayWriter for PythonWriter {
    fn begin(&self, folder: &Path, how: &serde_json::Value, arrays: &[Array]) -> Result<()> {
        let (how, arrays) = (how.to_string(), serde_json::json!(arrays).to_string());
        self.call("the store", |py| self.writer.call_method1(py, "begin", (folder, how, arrays)))
    }

    fn write(&self, key: &str, index: &[u64], shape: &[u64], bytes: &[u8]) -> Result<()> {
        // A copy of its own, so that Python may go on with it after the tile is used again.
        self.call(key, |py| {
            let bytes = pyo3::types::PyBytes::new(py, bytes);
            self.writer.call_method1(py, "write", (key, index.to_vec(), shape.to_vec(), bytes))
        })
    }

    fn finish(&self) -> Result<()> {
        self.call("the store", |py| self.writer.call_method0(py, "finish"))
    }

    fn abort(&self) {
        // What it failed at is told already.
        let _ = self.call("the store", |py| self.writer.call_method0(py, "abort"));
    }
}

/// Why a call with a view did not end well, and whether somebody still holds the view.
enum Lent {
    Kept(PyErr),
    Returned(PyErr),
}

/// Calls `call` with a writable memoryview of `bytes`, which it must give back.
fn with_view(
    py: Python<'_>,
    bytes: &mut [u8],
    call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<Py<PyAny>>,
) -> std::result::Result<Option<String>, Lent> {
    let len = bytes.len() as ffi::Py_ssize_t;
    // SAFETY: the view reaches over `bytes` alone, which outlives it: it is released below, and where
    // that fails the caller is told that the memory must stay.
    #[allow(unsafe_code)]
    let view = unsafe {
        let view = ffi::PyMemoryView_FromMemory(bytes.as_mut_ptr().cast(), len, WRITABLE);
        Bound::from_owned_ptr_or_err(py, view)
    };
    let view = view.map_err(Lent::Returned)?;
    let told = call(&view);
    if let Err(error) = view.call_method0("release") {
        return Err(Lent::Kept(error));
    }
    told.and_then(|told| told.extract::<Option<String>>(py)).map_err(Lent::Returned)
}

/// Findings that a callback gave as JSON.
fn findings_of(told: Option<String>) -> Option<Error> {
    let text = told?;
    Some(match serde_json::from_str::<Vec<Finding>>(&text) {
        Ok(findings) if !findings.is_empty() => Error::from(findings),
        _ => failed("a callback", &PyValueError::new_err(text)),
    })
}

fn failed(key: &str, error: &PyErr) -> Error {
    Finding::new(codes::IO, format!("a block could not be read or written: {error}"))
        .tensor(key)
        .help("look whether the store's own library reads it; if not, copy it again")
        .into()
}
