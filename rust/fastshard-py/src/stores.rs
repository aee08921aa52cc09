//! Blocks of array stores, which Python decodes: the core asks for one at a time.

use std::any::Any;
use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use fastshard::codes;
use fastshard::error::{Error, Finding, Result, MORE_MEMORY};
use fastshard::format::blocks::Store;
use fastshard::memory;
use fastshard::storage::remote::Registration;
use fastshard::storage::requests::{Listed, Requests, StoreFiles, StoreProvider};
use fastshard::storage::{BlockBytes, BlockReader};
use fastshard::tensor::Dtype;
use fastshard::write::{Array, ArrayWriter, BlockBuffer};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyMemoryView};

use crate::findings;
use crate::plain::{object, to_python};

/// The root of each block, and the function that sends for blocks: where some lie on other hosts.
type Apart = (Vec<u32>, Py<PyAny>);

/// (key, dtype, shape, bytes that decoding takes) of each block, what identifies the content, the function that decodes, and
/// what there is to know of blocks on other hosts, and the function that looks whether the files are as they were.
pub(crate) type ListedBlocks =
    (Vec<(String, String, Vec<u64>, u64)>, String, Py<PyAny>, Option<Apart>, Option<Py<PyAny>>);

/// The store that a Python listing describes.
pub(crate) fn store((blocks, identity, read, apart, look): ListedBlocks) -> PyResult<Store> {
    let apart = apart.map(|(roots, send)| {
        let keys = blocks.iter().map(|(key, ..)| digest(key));
        (keys.zip(roots).collect(), send)
    });
    let blocks: PyResult<Vec<_>> = blocks
        .into_iter()
        .map(|(key, dtype, shape, decoding)| {
            let dtype = Dtype::from_safetensors(&dtype)
                .ok_or_else(|| PyValueError::new_err(format!("{key}: unknown dtype {dtype}")))?;
            Ok((key, dtype, shape, decoding))
        })
        .collect();
    Ok(Store { blocks: blocks?, identity, reader: Arc::new(PythonReader { read, apart, look }) })
}

/// Calls `read(key, buffer)`; it returns None, or a list of findings.
#[derive(Debug)]
struct PythonReader {
    read: Py<PyAny>,
    /// The root of each block by a digest of its key, and `send(keys)`, which returns the same. Of two with one digest the
    /// work goes to one's host: no harm is done.
    apart: Option<(HashMap<u64, u32>, Py<PyAny>)>,
    /// `look(status)`, the same.
    look: Option<Py<PyAny>>,
}

fn digest(key: &str) -> u64 {
    let mut hasher = std::collections::hash_map::DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

/// Blocks from this many bytes on have a mapping of their own: it is given back as a whole, while holes between
/// what lives long in the allocator's memory are not.
const MAPPED: usize = 1 << 20;

/// A buffer that Python made and of which it has let go.
#[derive(Debug)]
struct PythonBytes {
    owner: Py<PyAny>,
    at: *mut u8,
    len: usize,
}

// SAFETY: `at` points into `owner`, which nobody but this value refers to, so nobody writes to it, resizes it
// or frees it on any thread while this value lives.
#[allow(unsafe_code)]
unsafe impl Send for PythonBytes {}
#[allow(unsafe_code)]
unsafe impl Sync for PythonBytes {}

impl BlockBytes for PythonBytes {
    fn bytes(&self) -> &[u8] {
        // SAFETY: as above; every byte was initialised when the buffer was made.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts(self.at, self.len)
        }
    }
}

/// Reads the reply of a function: None, or a list of findings, which is an error.
pub(crate) fn settled(py: Python<'_>, key: &str, returned: PyResult<Py<PyAny>>) -> Result<()> {
    let reply = returned.and_then(|reply| reply.extract::<Reply>(py));
    error_of(reply.map_err(|error| failed(key, &error))?).map_or(Ok(()), Err)
}

impl BlockBuffer for PythonBytes {
    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the buffer is writable.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts_mut(self.at, self.len)
        }
    }
}

impl PythonBytes {
    /// A writable buffer of `len` bytes, initialised.
    fn new(py: Python<'_>, len: usize) -> PyResult<PythonBytes> {
        if len < MAPPED {
            let owner = PyByteArray::new_with(py, len, |_| Ok(()))?;
            return Self::of(owner.into_any(), len);
        }
        let mmap = py.import("mmap")?;
        // Private, so that it counts as the anonymous memory that it is.
        let flags = mmap.getattr("MAP_PRIVATE")?.bitor(mmap.getattr("MAP_ANONYMOUS")?)?;
        let options = PyDict::new(py);
        options.set_item("flags", flags)?;
        Self::of(mmap.call_method("mmap", (-1, len), Some(&options))?, len)
    }

    /// The buffer of `len` bytes that `owner` is, to which nobody else refers.
    fn of(owner: Bound<'_, PyAny>, len: usize) -> PyResult<PythonBytes> {
        if let Ok(bytes) = owner.cast::<PyByteArray>() {
            return Ok(PythonBytes { at: bytes.data(), len, owner: owner.unbind() });
        }
        let ctypes = owner.py().import("ctypes")?;
        let first = ctypes.getattr("c_char")?.call_method1("from_buffer", (&owner,))?;
        let at: usize = ctypes.call_method1("addressof", (first,))?.extract()?;
        Ok(PythonBytes { at: std::ptr::with_exposed_provenance_mut(at), len, owner: owner.unbind() })
    }
}

/// True if somebody else refers to a buffer: whatever looks at it, through however many views, does.
fn is_shared(owner: &Bound<'_, PyAny>) -> bool {
    // SAFETY: the object lives, and the GIL is held.
    #[allow(unsafe_code)]
    let references = unsafe { pyo3::ffi::Py_REFCNT(owner.as_ptr()) };
    references > 1
}

/// Lets `call` fill a buffer of `len` bytes, `spare` if it has that length; it returns None, or a list of findings.
fn fill(
    py: Python<'_>,
    name: &str,
    len: usize,
    spare: Option<Box<PythonBytes>>,
    call: impl FnOnce(&Bound<'_, PyMemoryView>) -> PyResult<Py<PyAny>>,
) -> Result<Box<dyn BlockBytes>> {
    let buffer = match spare.filter(|spare| spare.len == len) {
        Some(spare) => *spare,
        None => PythonBytes::new(py, len).map_err(|error| no_room(name, len, &error))?,
    };
    let view = PyMemoryView::from(buffer.owner.bind(py)).map_err(|error| failed(name, &error))?;
    let reply = call(&view);
    drop(view);
    settled(py, name, reply)?;
    // What is looked at still may be written to later, or by a thread that does not hold the GIL: then the copy counts.
    if is_shared(buffer.owner.bind(py)) {
        return copied(py, &buffer).map_err(|error| failed(name, &error));
    }
    Ok(Box::new(buffer) as Box<dyn BlockBytes>)
}

/// Calls `read(number, offset, buffer)`; it returns None, or a list of findings.
#[derive(Debug)]
struct PythonRequests {
    read: Py<PyAny>,
    spares: Arc<Spares>,
}

/// Long buffers that nobody reads any more, for the next requests of their length: fresh pages cost as much as copying.
#[derive(Debug, Default)]
struct Spares(Mutex<Vec<PythonBytes>>);

/// Buffers that are kept at most.
const SPARES: usize = 2;

impl Spares {
    fn take(&self, len: usize) -> Option<Box<PythonBytes>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|buffer| buffer.len == len)?;
        Some(Box::new(kept.remove(at)))
    }

    fn clear(&self) {
        let kept = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        drop(kept);
    }

    fn give(&self, buffer: PythonBytes) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The oldest goes: requests have grown since.
        let oldest = (kept.len() == SPARES).then(|| kept.remove(0));
        kept.push(buffer);
        drop((kept, oldest));
    }
}

/// A buffer that goes to the spare ones.
#[derive(Debug)]
struct Returning {
    buffer: Option<Box<dyn BlockBytes>>,
    spares: Arc<Spares>,
}

impl BlockBytes for Returning {
    fn bytes(&self) -> &[u8] {
        self.buffer.as_deref().map_or(&[], BlockBytes::bytes)
    }
}

impl Drop for Returning {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if let Ok(buffer) = (buffer as Box<dyn Any>).downcast::<PythonBytes>() {
            self.spares.give(*buffer);
        }
    }
}

impl Requests for PythonRequests {
    fn request(&self, file: u32, offset: u64, len: usize) -> Result<Box<dyn BlockBytes>> {
        let spare = self.spares.take(len);
        let buffer = Python::attach(|py| {
            fill(py, "a file", len, spare, |view| self.read.call1(py, (file, offset, view)))
        })?;
        match len < MAPPED {
            true => Ok(buffer),
            false => Ok(Box::new(Returning { buffer: Some(buffer), spares: Arc::clone(&self.spares) })),
        }
    }
}

/// A folder whose files are placeholders of those of a store, until it is closed.
#[pyclass(frozen, module = "fastshard._core")]
pub(crate) struct StoreFolder {
    files: Arc<StoreFiles>,
    spares: Arc<Spares>,
    registration: Mutex<Option<Registration>>,
}

#[pymethods]
impl StoreFolder {
    /// `folder` has a placeholder for each of `files` (path, size, modification time in nanoseconds). `name` is the root for
    /// users, `room` the bytes that are kept between reads.
    #[new]
    fn new(
        folder: PathBuf,
        name: String,
        files: Vec<(String, u64, i64)>,
        room: u64,
        read: Py<PyAny>,
    ) -> PyResult<StoreFolder> {
        let folder =
            folder.canonicalize().map_err(|e| crate::raise(Error::io(&folder, "cannot open", &e)))?;
        let listed =
            files.into_iter().map(|(path, size, mtime_ns)| Listed { path, size, mtime_ns }).collect();
        let spares = Arc::new(Spares::default());
        let files = StoreFiles::new(
            folder.clone(),
            name,
            listed,
            room,
            Box::new(PythonRequests { read, spares: Arc::clone(&spares) }),
        );
        let provider = Arc::new(StoreProvider(Arc::clone(&files)));
        let registration = Mutex::new(Some(Registration::new(folder, provider)));
        Ok(StoreFolder { files, spares, registration })
    }

    /// Number of requests so far, and the bytes that they asked for.
    fn counts(&self) -> (u64, u64) {
        self.files.counts()
    }

    /// Releases the bytes that are kept between reads.
    fn forget(&self) {
        self.files.forget();
        self.spares.clear();
    }

    /// Makes the placeholders ordinary files again, and waits for requests that are under way.
    fn close(&self, py: Python<'_>) {
        drop(self.registration.lock().unwrap_or_else(PoisonError::into_inner).take());
        py.detach(|| self.files.stop());
    }
}

impl BlockReader for PythonReader {
    fn read(&self, key: &str, len: usize, spare: Option<Box<dyn BlockBytes>>) -> Result<Box<dyn BlockBytes>> {
        Python::attach(|py| {
            let spare = spare.and_then(|spare| (spare as Box<dyn Any>).downcast::<PythonBytes>().ok());
            fill(py, key, len, spare, |view| self.read.call1(py, (key, view)))
        })
    }

    fn root(&self, key: &str) -> Option<u32> {
        self.apart.as_ref()?.0.get(&digest(key)).copied()
    }

    fn lie_apart(&self) -> bool {
        self.apart.is_some()
    }

    fn will_read(&self, keys: &[&str]) -> Result<()> {
        let (Some((_, send)), Some(first)) = (&self.apart, keys.first()) else { return Ok(()) };
        Python::attach(|py| settled(py, first, send.call1(py, (keys.to_vec(),))))
    }

    fn unchanged(&self, status: bool) -> Result<()> {
        let Some(look) = &self.look else { return Ok(()) };
        Python::attach(|py| settled(py, "", look.call1(py, (status,))))
    }
}

/// Calls the methods of a writer; each returns None, or a list of findings.
#[derive(Debug)]
pub(crate) struct PythonWriter {
    pub(crate) writer: Py<PyAny>,
}

impl PythonWriter {
    fn call(&self, what: &str, call: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>>) -> Result<()> {
        let reply = Python::attach(|py| call(py).and_then(|reply| reply.extract::<Reply>(py)));
        match reply {
            Ok(reply) => error_of(reply).map_or(Ok(()), Err),
            Err(error) => Err(failed(what, &error)),
        }
    }
}

impl ArrayWriter for PythonWriter {
    fn begin(&self, folder: &Path, how: &serde_json::Value, arrays: &[Array]) -> Result<()> {
        self.call("the store", |py| {
            self.writer.call_method1(py, "begin", (folder, object(py, how)?, to_python(py, &arrays)?))
        })
    }

    fn buffer(&self, len: usize) -> Result<Box<dyn BlockBuffer>> {
        Python::attach(|py| {
            let spare = self.writer.call_method1(py, "take_spare", (len,))?.into_bound(py);
            match spare.is_none() || is_shared(&spare) {
                true => PythonBytes::new(py, len),
                false => PythonBytes::of(spare, len),
            }
        })
        .map(|buffer| Box::new(buffer) as Box<dyn BlockBuffer>)
        .map_err(|error| failed("a block", &error))
    }

    fn write(&self, key: &str, index: &[u64], shape: &[u64], block: Box<dyn BlockBuffer>) -> Result<()> {
        let block = (block as Box<dyn Any>).downcast::<PythonBytes>().expect("a buffer of this writer");
        self.call(key, |py| {
            self.writer.call_method1(py, "write", (key, index.to_vec(), shape.to_vec(), block.owner))
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

/// What is in a buffer now, taken by Python: others may shrink or close what they refer to.
fn copied(py: Python<'_>, buffer: &PythonBytes) -> PyResult<Box<dyn BlockBytes>> {
    let view = PyMemoryView::from(buffer.owner.bind(py))?;
    let bytes = view.call_method0("tobytes")?.cast_into::<PyBytes>()?;
    let bytes = bytes.as_bytes();
    let mut own = memory::allocate(bytes.len()).map_err(|error| PyMemoryError::new_err(error.to_string()))?;
    own.copy_from_slice(bytes);
    Ok(Box::new(own))
}

/// The reply of a callback: None, or findings, one at least.
type Reply = Option<Vec<findings::Finding>>;

/// The error that a callback tells of.
fn error_of(reply: Reply) -> Option<Error> {
    let found = findings::core(reply?);
    Some(match found.is_empty() {
        true => failed("a callback", &PyValueError::new_err("an error without findings")),
        false => Error::from(found),
    })
}

fn no_room(key: &str, len: usize, error: &PyErr) -> Error {
    Finding::new(codes::MEMORY_BUDGET, format!("a chunk that does not fit in memory: {error}"))
        .tensor(key)
        .expected("what this machine has", format!("{} MiB", len >> 20))
        .help("copy the array's metadata again; it is damaged, or the array was written with chunks for larger machines")
        .into()
}

pub(crate) fn failed(key: &str, error: &PyErr) -> Error {
    if Python::attach(|py| error.is_instance_of::<PyMemoryError>(py)) {
        return Finding::new(codes::MEMORY_BUDGET, "the system has no memory left for a block")
            .tensor(key)
            .help(MORE_MEMORY)
            .into();
    }
    Finding::new(codes::IO, format!("a block could not be read or written: {error}"))
        .tensor(key)
        .help("check whether the store's own library reads it; if not, copy the file again")
        .into()
}
