//! `fastshard._core`: the Python face of the core crate.
//!
//! Thin: records go in and out as classes, tuples and dicts whose keys `_core.pyi` states; long calls run
//! without the GIL and stay interruptible; every error becomes the one exception that carries findings.

mod calls;
mod destinations;
mod drafts;
mod findings;
mod logging;
mod meetings;
mod options;
mod patterns;
mod pickles;
mod plain;
mod plans;
mod processes;
mod ranks;
mod rosters;
mod stores;
mod tables;

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use fastshard::catalog::{Catalog as CoreCatalog, Wanted};
use fastshard::draft::Planned;
use fastshard::engine::Control;
use fastshard::error::Error;
use fastshard::format::stand_in;
use fastshard::manifest::Manifest;
use fastshard::request::Request;
use fastshard::stats;
use fastshard::storage::SourceFile;
use fastshard::tensor::Dtype;
use fastshard::words::Words;
use fastshard::write::Companion;
use fastshard::writer::Ending;
use fastshard::{publish, verify, write};
use numpy::PyReadonlyArray1;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyIndexError, PyRuntimeWarning, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde_json::json;

use calls::{compute, detach, run, run_telling};
use options::RunOptions;
use plain::{object, to_python, Given};
use plans::{with_files, Plan};

/// Lets tests see what a run leaves that is denied memory.
#[cfg(feature = "steps")]
#[global_allocator]
static ALLOCATOR: fastshard::steps::Failing = fastshard::steps::Failing::new();

create_exception!(_core, CoreError, PyException, "Findings that stopped an operation, a list of them.");

/// What writing came to: the manifest as JSON, which is its format, and findings.
type Written = (String, Vec<findings::Finding>);

fn to_json<T: serde::Serialize>(value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// The one place where a core error becomes an exception.
fn raise(error: Error) -> PyErr {
    CoreError::new_err((findings::list(error.into_findings()),))
}

/// Files of one checkpoint, opened and parsed; no payload byte has been read.
#[pyclass(frozen, module = "fastshard._core")]
struct Catalog {
    inner: Arc<CoreCatalog>,
}

impl Catalog {
    fn with_files(&self, planned: Planned) -> Plan {
        with_files(&self.inner, planned)
    }
}

#[pymethods]
impl Catalog {
    #[new]
    #[pyo3(signature = (roots, files, threads, records=None, blocks=None, memory=None, words=None))]
    // Python gives them by their names.
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        roots: Vec<PathBuf>,
        files: Vec<(u32, String)>,
        threads: usize,
        records: Option<HashMap<usize, Vec<fastshard::format::dcp::Range>>>,
        blocks: Option<HashMap<usize, stores::ListedBlocks>>,
        memory: Option<u64>,
        words: Option<Given<Words>>,
    ) -> PyResult<Self> {
        let (mut records, mut blocks) = (records.unwrap_or_default(), blocks.unwrap_or_default());
        let mut parts = Vec::with_capacity(files.len());
        for (i, (root, path)) in files.into_iter().enumerate() {
            let wanted = match (records.remove(&i), blocks.remove(&i)) {
                (_, Some(listed)) => Wanted::Blocks(stores::store(listed)?),
                (Some(records), None) => Wanted::Records(records),
                (None, None) => Wanted::Whole,
            };
            parts.push((root, path, wanted));
        }
        let opened =
            run(py, None, move |control| CoreCatalog::open_parts(roots, &parts, threads, memory, control));
        let words = words.map_or_else(Words::default, |words| words.0);
        Ok(Catalog { inner: Arc::new(opened.settle(None)?.told_by(words)) })
    }

    fn reads_store(&self) -> bool {
        self.inner.files.iter().flatten().any(|file| file.source.is_stored())
    }

    fn findings(&self) -> Vec<findings::Finding> {
        findings::list(self.inner.findings.iter().cloned())
    }

    fn files<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let files: Vec<_> = self
            .inner
            .files
            .iter()
            .map(|file| {
                file.as_ref().map(|f| {
                    json!({
                        "path": f.path, "root": f.root, "format": f.parsed.format,
                        "checksums": f.parsed.blobs.iter().all(|blob| blob.crc32.is_some()),
                        "size": f.source.size(), "tensors": f.parsed.named().count(), "archive": f.parsed.archive,
                        "partial": f.parsed.partial().next().map(|part| part.path.join(".")),
                    })
                })
            })
            .collect();
        to_python(py, &files)
    }

    fn values<'py>(&self, py: Python<'py>, file: usize) -> PyResult<(Bound<'py, PyAny>, bool)> {
        let value =
            self.inner.files.get(file).and_then(|f| f.as_ref()).map(|f| f.parsed.values.to_json_whole());
        let (value, whole) = value.unwrap_or((serde_json::Value::Null, true));
        Ok((object(py, &value)?, whole))
    }

    fn tensors(&self, file: usize) -> StoredTensors {
        let opened = self.inner.files.get(file).and_then(|file| file.as_ref());
        let count = opened.map_or(0, |file| file.parsed.named_count());
        StoredTensors { catalog: Arc::clone(&self.inner), file, count }
    }

    fn distributed<'py>(&self, py: Python<'py>, file: usize) -> PyResult<Bound<'py, PyAny>> {
        let file = self.inner.files.get(file).and_then(|f| f.as_ref());
        to_python(py, &file.map(|f| &f.parsed.distributed))
    }

    /// Bytes of a small tensor, at most `limit` of them.
    fn tensor_bytes<'py>(
        &self,
        py: Python<'py>,
        file: usize,
        tensor: usize,
        limit: u64,
    ) -> PyResult<Bound<'py, pyo3::types::PyBytes>> {
        let bytes = self.inner.tensor_bytes(file, tensor, limit).map_err(raise)?;
        Ok(pyo3::types::PyBytes::new(py, &bytes))
    }

    /// An object that a file holds as bytes, read inertly.
    fn packed<'py>(
        &self,
        py: Python<'py>,
        file: usize,
        path: Vec<String>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(Some(file)) = self.inner.files.get(file) else { return Ok(None) };
        let packed = py
            .detach(|| fastshard::format::packed::read(&file.source, &file.parsed, &path))
            .map_err(raise)?;
        packed.map(|packed| object(py, &packed.to_json())).transpose()
    }

    fn names<'py>(&self, py: Python<'py>, file: usize) -> PyResult<Bound<'py, PyList>> {
        let file = self.inner.files.get(file).and_then(|f| f.as_ref());
        plain::list(py, file.into_iter().flat_map(|f| f.parsed.named()).map(|t| t.path.joined().to_string()))
    }

    fn dtypes(&self, file: usize) -> BTreeSet<String> {
        let file = self.inner.files.get(file).and_then(|f| f.as_ref());
        file.map_or_else(BTreeSet::new, |f| f.parsed.named().map(|t| t.value_dtype().to_string()).collect())
    }

    fn named(&self) -> (u64, u64) {
        self.inner.named()
    }

    fn within(&self, memory: Option<u64>) -> PyResult<()> {
        self.inner.within(memory).map_err(raise)
    }

    #[pyo3(signature = (request, source=None, target=None))]
    fn draft(
        &self,
        py: Python<'_>,
        request: Given<Request>,
        source: Option<PyRef<'_, tables::Table>>,
        target: Option<PyRef<'_, tables::Table>>,
    ) -> PyResult<drafts::Draft> {
        let mut request = request.0;
        if let Some(table) = source {
            request.source.binding.layout = Some(Arc::clone(&table.inner));
        }
        if let (Some(side), Some(table)) = (&mut request.target, target) {
            side.layout = Some(Arc::clone(&table.inner));
        }
        let catalog = Arc::clone(&self.inner);
        let drafted = compute(py, {
            let catalog = Arc::clone(&catalog);
            move || fastshard::request::draft(&catalog, &request)
        })?;
        Ok(drafts::Draft::new(drafted.map_err(raise)?, catalog))
    }

    fn compare(&self, py: Python<'_>, request: Given<Request>) -> PyResult<Plan> {
        let catalog = Arc::clone(&self.inner);
        Ok(self.with_files(compute(py, move || fastshard::repair::compare(&catalog, &request.0))?))
    }

    fn repair(
        &self,
        py: Python<'_>,
        request: Given<Request>,
        repair: Given<fastshard::repair::Repair>,
    ) -> PyResult<Plan> {
        let catalog = Arc::clone(&self.inner);
        let planned = compute(py, move || fastshard::repair::plan(&catalog, &request.0, &repair.0))?;
        Ok(self.with_files(planned.map_err(raise)?))
    }

    #[pyo3(signature = (options, progress=None))]
    fn inventory(
        &self,
        py: Python<'_>,
        options: Given<RunOptions>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Written> {
        let options = options.0.engine();
        let catalog = Arc::clone(&self.inner);
        let (manifest, found) =
            run(py, progress, move |control| verify::inventory(&catalog, &options, control)).settle(None)?;
        Ok((to_json(&manifest)?, findings::list(found)))
    }

    #[pyo3(signature = (manifest, own_roots, options, progress=None, checked=None))]
    fn against(
        &self,
        py: Python<'_>,
        manifest: PathBuf,
        own_roots: u32,
        options: Given<RunOptions>,
        progress: Option<Py<PyAny>>,
        checked: Option<PyRef<'_, Plan>>,
    ) -> PyResult<Vec<findings::Finding>> {
        let known = checked.map_or_else(verify::Hashed::new, |plan| plan.hashed().clone());
        let options = options.0;
        let manifest = Manifest::read(&manifest).map_err(raise)?;
        let catalog = Arc::clone(&self.inner);
        let found = run(py, progress, move |control| {
            let selection = verify::Selection { subset: options.subset(), only: options.only.as_ref() };
            verify::against(&catalog, &manifest, own_roots, &selection, &known, &options.engine(), control)
        })
        .settle(None)?;
        Ok(findings::list(found))
    }
}

/// The tensors that a file lists, in its order. Each is made an object of when it is asked for: a file may have millions.
#[pyclass(frozen, sequence, module = "fastshard._core")]
struct StoredTensors {
    catalog: Arc<CoreCatalog>,
    file: usize,
    count: usize,
}

#[pymethods]
impl StoredTensors {
    fn __len__(&self) -> usize {
        self.count
    }

    fn __getitem__<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Bound<'py, PyDict>> {
        let file = self.catalog.files.get(self.file).and_then(|file| file.as_ref());
        let Some(parsed) = file.filter(|_| number < self.count).map(|file| &file.parsed) else {
            return Err(PyIndexError::new_err(number));
        };
        // Scales, which are no tensors of a model, are the last ones.
        let tensor = &parsed.tensors[number];
        let blob = &parsed.blobs[tensor.blob as usize];
        let object = PyDict::new(py);
        object.set_item(intern!(py, "path"), plain::list(py, tensor.path.iter().map(|key| key.as_str()))?)?;
        object.set_item(intern!(py, "dtype"), tensor.value_dtype().to_string())?;
        object.set_item(intern!(py, "torch_dtype"), tensor.value_dtype().torch_name())?;
        object.set_item(intern!(py, "shape"), &tensor.shape[..])?;
        object.set_item(intern!(py, "storage"), tensor.blob)?;
        object.set_item(intern!(py, "offset"), tensor.offset)?;
        object.set_item(intern!(py, "strides"), &tensor.strides[..])?;
        object.set_item(intern!(py, "storage_bytes"), blob.len)?;
        object.set_item(intern!(py, "storage_crc32"), blob.crc32)?;
        Ok(object)
    }
}

/// Files that go along with a result, by their names there; and what its destination must lie apart from.
type Paths = (Vec<CopiedFile>, Vec<PathBuf>);

/// A file that goes along: its name in the result, its path, and the BLAKE3 of its bytes when it was chosen.
type CopiedFile = (String, PathBuf, Option<String>);

fn companions(copies: Vec<CopiedFile>) -> Vec<Companion> {
    copies.into_iter().map(|(name, path, blake3)| Companion { name, path, blake3 }).collect()
}

/// Copies files (name, path) below `roots` to `out` as a host's part of a checkpoint.
#[pyfunction]
#[pyo3(signature = (files, roots, out, options, progress=None, tell=None))]
fn write_piece(
    py: Python<'_>,
    files: Vec<(String, PathBuf)>,
    roots: Vec<PathBuf>,
    out: PathBuf,
    options: Given<write::Options>,
    progress: Option<Py<PyAny>>,
    tell: Option<Py<PyAny>>,
) -> PyResult<Written> {
    let options = options.0;
    let ended = run_telling(py, progress, tell, {
        let out = out.clone();
        move |control| write::write_piece(files, &roots, &out, options, control)
    });
    let (manifest, found) = ended.settle(Some(&out))?;
    Ok((to_json(&manifest)?, findings::list(found)))
}

/// A result written tensor by tensor.
#[pyclass(frozen, module = "fastshard._core")]
struct ResultWriter {
    // Mutex: the class is frozen, and two threads of a script may write at once.
    inner: Mutex<fastshard::writer::ResultWriter>,
}

#[pymethods]
impl ResultWriter {
    #[new]
    fn new(
        py: Python<'_>,
        out: PathBuf,
        nbytes: u64,
        max_shard_size: u64,
        overwrite: bool,
        fsync: bool,
    ) -> PyResult<Self> {
        let options = publish::Options { overwrite, fsync, ..Default::default() };
        let begin = || fastshard::writer::ResultWriter::begin(&out, nbytes, max_shard_size, &options);
        let inner = detach(py, begin)?.map_err(raise)?;
        Ok(ResultWriter { inner: Mutex::new(inner) })
    }

    fn add(
        &self,
        py: Python<'_>,
        name: &str,
        dtype: &str,
        shape: Vec<u64>,
        data: PyReadonlyArray1<'_, u8>,
    ) -> PyResult<()> {
        let dtype = Dtype::from_safetensors(dtype)
            .ok_or_else(|| PyValueError::new_err(format!("{name}: unknown dtype {dtype}")))?;
        let bytes = data.as_slice().map_err(|e| PyValueError::new_err(e.to_string()))?;
        py.detach(|| {
            self.inner.lock().unwrap_or_else(PoisonError::into_inner).add(name, dtype, &shape, bytes)
        })
        .map_err(raise)
    }

    fn finish(
        &self,
        py: Python<'_>,
        texts: std::collections::BTreeMap<String, String>,
        copies: Vec<CopiedFile>,
        values: Given<serde_json::Value>,
        words: Given<Words>,
        non_finite_accepted: bool,
    ) -> PyResult<Written> {
        let copies = companions(copies);
        let ending = Ending { texts, copies, values: values.0, words: words.0, non_finite_accepted };
        let finish = || self.inner.lock().unwrap_or_else(PoisonError::into_inner).finish(ending);
        let (manifest, found) = detach(py, finish)?.map_err(raise)?;
        Ok((to_json(&manifest)?, findings::list(found)))
    }

    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        detach(py, || self.inner.lock().unwrap_or_else(PoisonError::into_inner).abort())?.map_err(raise)
    }
}

/// What a `.metadata` file of torch.distributed.checkpoint says.
#[pyfunction]
fn dcp_metadata(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let read = move |_: &Control| {
        let file = SourceFile::open(&path)?;
        fastshard::format::dcp::metadata(&file).map_err(|e| stand_in::explained(&file, e))
    };
    to_python(py, &run(py, None, read).settle(None)?)
}

/// The value of a record of a `.distcp` file that is no tensor.
#[pyfunction]
fn dcp_object(py: Python<'_>, path: PathBuf, offset: u64, len: u64) -> PyResult<Bound<'_, PyAny>> {
    let read = move |_: &Control| fastshard::format::dcp::object(&SourceFile::open(&path)?, offset, len);
    to_python(py, &run(py, None, read).settle(None)?)
}

/// What lies in the place of a file of text, by its first bytes, as a finding; None for what may be the file itself.
#[pyfunction]
#[pyo3(name = "stand_in")]
fn stands_in(path: PathBuf, head: &[u8], size: u64) -> Option<findings::Finding> {
    stand_in::finding(&path, head, size, stand_in::Place::Text).map(findings::Finding::from)
}

/// BLAKE3 of bytes that come in pieces.
#[pyclass(module = "fastshard._core")]
struct Hasher(blake3::Hasher);

#[pymethods]
impl Hasher {
    #[new]
    fn new() -> Self {
        Hasher(blake3::Hasher::new())
    }

    fn update(&mut self, py: Python<'_>, content: &[u8]) {
        py.detach(|| self.0.update(content));
    }

    fn hexdigest(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}

/// What is kept of a tokenizer's vocabulary; `kind` is `tokenizers`, `ids`, `sentencepiece` or `lines`.
#[pyfunction]
fn vocabulary<'py>(
    py: Python<'py>,
    path: PathBuf,
    kind: &str,
    wanted: Vec<String>,
) -> PyResult<Bound<'py, PyAny>> {
    use fastshard::format::vocabulary::{read, Kind};
    let kind = match kind {
        "tokenizers" => Kind::Tokenizers,
        "ids" => Kind::Ids,
        "sentencepiece" => Kind::SentencePiece,
        "lines" => Kind::Lines,
        other => return Err(PyValueError::new_err(format!("no kind of vocabulary: {other}"))),
    };
    to_python(py, &run(py, None, move |_| read(&SourceFile::open(&path)?, kind, &wanted)).settle(None)?)
}

/// Findings about the files below `roots` that `manifest` lists and that hold no tensors.
#[pyfunction]
#[pyo3(signature = (manifest, roots, options, progress=None))]
fn manifest_files(
    py: Python<'_>,
    manifest: PathBuf,
    roots: Vec<PathBuf>,
    options: Given<RunOptions>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Vec<findings::Finding>> {
    let threads = options.0.threads;
    let compared = run(py, progress, move |control| {
        verify::files(&Manifest::read(&manifest)?, &roots, threads, control)
    });
    Ok(findings::list(compared.settle(None)?))
}

/// The entry of a file without tensors in a manifest.
#[pyfunction]
fn manifest_entry<'py>(py: Python<'py>, root: PathBuf, name: &str) -> PyResult<Bound<'py, PyAny>> {
    to_python(py, &py.detach(|| verify::entry(&root, name)).map_err(raise)?)
}

/// The edges between the bins of a histogram, ascending.
#[pyfunction]
fn histogram_edges() -> Vec<f64> {
    stats::edges()
}

/// CRC32 of the first `length` bytes of `pattern`, again and again.
#[pyfunction]
fn crc32_of_constant(pattern: &[u8], length: u64) -> u32 {
    fastshard::hash::crc32_of_constant(pattern, length)
}

/// Anonymous resident memory of this process, in bytes.
#[pyfunction]
fn anonymous_memory() -> u64 {
    fastshard::memory::anonymous_memory()
}

#[pymodule(gil_used = false)]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    logging::begin();
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    // The build for tests has assertions on purpose.
    if cfg!(debug_assertions) && !cfg!(feature = "steps") {
        let text = c"fastshard was built without optimisation: it is slow, do not benchmark it (maturin develop --release)";
        PyErr::warn(m.py(), &m.py().get_type::<PyRuntimeWarning>(), text, 1)?;
    }
    m.add("STEPS", cfg!(feature = "steps"))?;
    m.add("CoreError", m.py().get_type::<CoreError>())?;
    m.add_function(wrap_pyfunction!(processes::identify_process, m)?)?;
    m.add_function(wrap_pyfunction!(processes::is_process_dead, m)?)?;
    m.add_class::<destinations::FileParts>()?;
    m.add_class::<stores::StoreFolder>()?;
    m.add_class::<Catalog>()?;
    m.add_class::<findings::Effect>()?;
    m.add_class::<findings::Finding>()?;
    m.add_class::<drafts::Draft>()?;
    m.add_class::<patterns::PatternBudget>()?;
    m.add_class::<patterns::Patterns>()?;
    m.add_class::<plans::Plan>()?;
    m.add_class::<meetings::Meeting>()?;
    m.add_class::<ResultWriter>()?;
    m.add_class::<rosters::Roster>()?;
    m.add_class::<tables::Table>()?;
    m.add_class::<tables::Rule>()?;
    m.add_function(wrap_pyfunction!(write_piece, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::begin_parts, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::make_part, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::collect, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::commit, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::shared_run, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::storage_of, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::is_remote, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::bring, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::let_go, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::will_read, m)?)?;
    m.add_function(wrap_pyfunction!(findings::codes_table, m)?)?;
    m.add_function(wrap_pyfunction!(findings::exit_code, m)?)?;
    m.add_function(wrap_pyfunction!(findings::judge, m)?)?;
    m.add_function(wrap_pyfunction!(manifest_files, m)?)?;
    m.add_function(wrap_pyfunction!(manifest_entry, m)?)?;
    m.add_function(wrap_pyfunction!(dcp_metadata, m)?)?;
    m.add_function(wrap_pyfunction!(dcp_object, m)?)?;
    m.add_function(wrap_pyfunction!(pickles::plain_pickle, m)?)?;
    m.add_function(wrap_pyfunction!(stands_in, m)?)?;
    m.add_function(wrap_pyfunction!(vocabulary, m)?)?;
    m.add_function(wrap_pyfunction!(anonymous_memory, m)?)?;
    m.add_function(wrap_pyfunction!(crc32_of_constant, m)?)?;
    m.add_class::<Hasher>()?;
    m.add_function(wrap_pyfunction!(histogram_edges, m)?)?;
    Ok(())
}
