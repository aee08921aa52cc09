//! `fastshard._core`: the Python face of the core crate.
//!
//! Thin: documents go in and out as JSON, long calls run without the GIL and stay interruptible,
//! and every error becomes the one exception that carries findings.

mod calls;
mod drafts;
mod plans;
mod ranks;
mod rosters;
mod stores;
mod tables;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use fastshard::catalog::{Catalog as CoreCatalog, Wanted};
use fastshard::codes;
use fastshard::draft::Planned;
use fastshard::engine::{Control, Options as EngineOptions};
use fastshard::error::{exit_code as exit_code_of, Error, Finding};
use fastshard::format::stand_in;
use fastshard::gate::Gate;
use fastshard::manifest::Manifest;
use fastshard::request::Request;
use fastshard::stats::{self, Level};
use fastshard::storage::SourceFile;
use fastshard::tensor::Dtype;
use fastshard::{publish, verify, write};
use numpy::PyReadonlyArray1;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use serde_json::json;

use calls::{run, run_telling};
use plans::{with_files, Plan};

create_exception!(_core, CoreError, PyException, "Findings that stopped an operation, as a JSON array.");

fn json_error(e: serde_json::Error) -> PyErr {
    PyValueError::new_err(e.to_string())
}

/// A request that holds what no option can be: a number beyond 64 bits, a text that is no UTF-8.
fn unusable(e: serde_json::Error) -> PyErr {
    raise(Finding::new(codes::USAGE, format!("an option holds what cannot be used: {e}")).into())
}

/// The one place where a core error becomes an exception.
fn raise(error: Error) -> PyErr {
    match serde_json::to_string(error.findings()) {
        Ok(text) => CoreError::new_err(text),
        Err(e) => json_error(e),
    }
}

fn to_json<T: serde::Serialize>(value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(json_error)
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RunOptions {
    threads: usize,
    memory: u64,
    #[serde(default)]
    scratch_dir: Option<PathBuf>,
    #[serde(default)]
    overwrite: bool,
    #[serde(default)]
    resume: bool,
    #[serde(default = "yes")]
    fsync: bool,
    #[serde(default)]
    sparse: bool,
    #[serde(default)]
    values: serde_json::Value,
    /// Of the files that go along those from above the checkpoint: where from, by name.
    #[serde(default)]
    above: std::collections::BTreeMap<String, String>,
    #[serde(default)]
    subset: Option<(u64, u64)>,
    /// Only these outputs.
    #[serde(default)]
    only: Option<std::collections::HashSet<String>>,
    #[serde(default)]
    stats: Statistics,
    /// The sources were compared with a manifest of theirs.
    #[serde(default)]
    expected: bool,
    /// Seconds that other processes of a run are given to show a sign of life.
    #[serde(default = "patience")]
    patience: f64,
    /// Which rank has each root of the sources on its own disk.
    #[serde(default)]
    near: Option<Vec<u32>>,
    /// How findings are judged.
    #[serde(default)]
    gate: Gate,
}

fn patience() -> f64 {
    5.0
}

impl RunOptions {
    /// How to write with them.
    fn writing(self, copies: Vec<(String, PathBuf)>, arrays: Option<Py<PyAny>>) -> write::Options {
        let patience = std::time::Duration::try_from_secs_f64(self.patience);
        write::Options {
            threads: self.threads,
            memory: self.memory,
            publish: publish::Options { overwrite: self.overwrite, resume: self.resume, fsync: self.fsync },
            copies,
            above: self.above,
            values: self.values,
            sparse: self.sparse,
            arrays: arrays
                .map(|writer| Arc::new(stores::PythonWriter { writer }) as Arc<dyn write::ArrayWriter>),
            stats: self.stats == Statistics::Full,
            expected: self.expected,
            patience: patience.unwrap_or(std::time::Duration::MAX).into(),
            near: self.near,
            gate: self.gate,
        }
    }
}

/// Statistics that a run gathers.
#[derive(serde::Deserialize, Default, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Statistics {
    #[default]
    Nothing,
    ZeroSlabs,
    Full,
}

fn yes() -> bool {
    true
}

impl RunOptions {
    fn parse(text: &str) -> PyResult<RunOptions> {
        serde_json::from_str(text).map_err(unusable)
    }

    fn engine(&self) -> EngineOptions {
        EngineOptions {
            threads: self.threads,
            memory: self.memory,
            scratch_dir: self.scratch_dir.clone().unwrap_or_else(std::env::temp_dir),
            held: None,
            encodes: 0,
            stats: match self.stats {
                Statistics::Nothing => Level::Nothing,
                Statistics::ZeroSlabs => Level::ZeroSlabs,
                Statistics::Full => Level::Full,
            },
        }
    }

    fn subset(&self) -> Option<verify::Subset> {
        self.subset.map(|(part, of)| verify::Subset { part, of })
    }

    fn holds(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|names| names.contains(name))
    }
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
    #[pyo3(signature = (roots, files, threads, records=None, blocks=None, memory=None))]
    fn new(
        py: Python<'_>,
        roots: Vec<PathBuf>,
        files: Vec<(u32, String)>,
        threads: usize,
        records: Option<HashMap<usize, Vec<fastshard::format::dcp::Range>>>,
        blocks: Option<HashMap<usize, stores::Listed>>,
        memory: Option<u64>,
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
        let opened = run(py, None, move |_| CoreCatalog::open_parts(roots, &parts, threads, memory));
        Ok(Catalog { inner: Arc::new(opened.settle(None)?) })
    }

    fn findings(&self) -> PyResult<String> {
        to_json(&self.inner.findings)
    }

    fn files(&self) -> PyResult<String> {
        let files: Vec<_> = self
            .inner
            .files
            .iter()
            .map(|file| {
                file.as_ref().map(|f| {
                    json!({
                        "path": f.path, "root": f.root, "format": f.parsed.format,
                        "checksums": f.parsed.blobs.iter().all(|blob| blob.crc32.is_some()),
                        "size": f.source.size(), "tensors": f.parsed.tensors.len(), "archive": f.parsed.archive,
                        "partial": f.parsed.partial().next().map(|part| part.path.join(".")),
                    })
                })
            })
            .collect();
        to_json(&files)
    }

    fn values(&self, file: usize) -> PyResult<(String, bool)> {
        let value =
            self.inner.files.get(file).and_then(|f| f.as_ref()).map(|f| f.parsed.values.to_json_whole());
        let (value, whole) = value.map_or((None, true), |(value, whole)| (Some(value), whole));
        Ok((to_json(&value)?, whole))
    }

    fn tensors(&self, file: usize) -> PyResult<String> {
        let tensors = self.inner.files.get(file).and_then(|f| f.as_ref()).map(|f| {
            f.parsed
                .tensors
                .iter()
                .map(|t| {
                    let blob = &f.parsed.blobs[t.blob as usize];
                    json!({
                        "path": t.path, "dtype": t.dtype, "torch_dtype": t.dtype.torch_name(), "shape": t.shape,
                        "storage": t.blob, "offset": t.offset, "strides": t.strides,
                        "storage_bytes": blob.len, "storage_crc32": blob.crc32,
                    })
                })
                .collect::<Vec<_>>()
        });
        to_json(&tensors.unwrap_or_default())
    }

    fn distributed(&self, file: usize) -> PyResult<String> {
        let file = self.inner.files.get(file).and_then(|f| f.as_ref());
        to_json(&file.map(|f| &f.parsed.distributed))
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
    fn packed(&self, py: Python<'_>, file: usize, path: Vec<String>) -> PyResult<Option<String>> {
        let Some(Some(file)) = self.inner.files.get(file) else { return Ok(None) };
        let packed = py
            .detach(|| fastshard::format::packed::read(&file.source, &file.parsed, &path))
            .map_err(raise)?;
        packed.map(|packed| to_json(&packed.to_json())).transpose()
    }

    fn names(&self, file: usize) -> Vec<String> {
        let file = self.inner.files.get(file).and_then(|f| f.as_ref());
        file.map_or_else(Vec::new, |f| f.parsed.tensors.iter().map(|t| t.path.join(".")).collect())
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
        request: &str,
        source: Option<PyRef<'_, tables::Table>>,
        target: Option<PyRef<'_, tables::Table>>,
    ) -> PyResult<drafts::Draft> {
        let mut request: Request = serde_json::from_str(request).map_err(unusable)?;
        if let Some(table) = source {
            request.source.layout = Some(Arc::clone(&table.inner));
        }
        if let (Some(side), Some(table)) = (&mut request.target, target) {
            side.layout = Some(Arc::clone(&table.inner));
        }
        let catalog = Arc::clone(&self.inner);
        let draft = py.detach(|| fastshard::request::draft(&catalog, &request)).map_err(raise)?;
        Ok(drafts::Draft::new(draft, catalog))
    }

    fn compare(&self, py: Python<'_>, request: &str) -> PyResult<Plan> {
        let request: Request = serde_json::from_str(request).map_err(unusable)?;
        let catalog = Arc::clone(&self.inner);
        Ok(self.with_files(py.detach(move || fastshard::repair::compare(&catalog, &request))))
    }

    fn repair(&self, py: Python<'_>, request: &str, repair: &str) -> PyResult<Plan> {
        let request: Request = serde_json::from_str(request).map_err(unusable)?;
        let repair: fastshard::repair::Repair = serde_json::from_str(repair).map_err(unusable)?;
        let catalog = Arc::clone(&self.inner);
        let planned =
            py.detach(move || fastshard::repair::plan(&catalog, &request, &repair)).map_err(raise)?;
        Ok(self.with_files(planned))
    }

    #[pyo3(signature = (options, progress=None))]
    fn inventory(&self, py: Python<'_>, options: &str, progress: Option<Py<PyAny>>) -> PyResult<String> {
        let options = RunOptions::parse(options)?.engine();
        let catalog = Arc::clone(&self.inner);
        let (manifest, findings) =
            run(py, progress, move |control| verify::inventory(&catalog, &options, control)).settle(None)?;
        to_json(&json!({"manifest": manifest, "findings": findings}))
    }

    #[pyo3(signature = (manifest, options, progress=None, checked=None))]
    fn against(
        &self,
        py: Python<'_>,
        manifest: PathBuf,
        options: &str,
        progress: Option<Py<PyAny>>,
        checked: Option<PyRef<'_, Plan>>,
    ) -> PyResult<String> {
        let known = checked.map_or_else(verify::Hashed::new, |plan| plan.hashed().clone());
        let options = RunOptions::parse(options)?;
        let manifest = Manifest::read(&manifest).map_err(raise)?;
        let catalog = Arc::clone(&self.inner);
        let findings = run(py, progress, move |control| {
            verify::against(&catalog, &manifest, options.subset(), &known, &options.engine(), control)
        })
        .settle(None)?;
        to_json(&findings)
    }
}

/// Files that go along with a result, by their names there; and what its destination must lie apart from.
type Paths = (Vec<(String, PathBuf)>, Vec<PathBuf>);

/// Copies files (name, path) below `roots` to `out` as a host's part of a checkpoint: `{"manifest", "findings"}`.
#[pyfunction]
#[pyo3(signature = (files, roots, out, options, progress=None, tell=None))]
fn write_piece(
    py: Python<'_>,
    files: Vec<(String, PathBuf)>,
    roots: Vec<PathBuf>,
    out: PathBuf,
    options: &str,
    progress: Option<Py<PyAny>>,
    tell: Option<Py<PyAny>>,
) -> PyResult<String> {
    let options = RunOptions::parse(options)?.writing(Vec::new(), None);
    let ended = run_telling(py, progress, tell, {
        let out = out.clone();
        move |control| write::write_piece(files, &roots, &out, options, control)
    });
    let (manifest, findings) = ended.settle(Some(&out))?;
    to_json(&json!({"manifest": manifest, "findings": findings}))
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
        let options = publish::Options { overwrite, resume: false, fsync };
        let inner = py
            .detach(|| fastshard::writer::ResultWriter::begin(&out, nbytes, max_shard_size, &options))
            .map_err(raise)?;
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
        values: &str,
    ) -> PyResult<String> {
        let values = serde_json::from_str(values).map_err(json_error)?;
        let (manifest, findings) = py
            .detach(|| self.inner.lock().unwrap_or_else(PoisonError::into_inner).finish(&texts, values))
            .map_err(raise)?;
        to_json(&json!({"manifest": manifest, "findings": findings}))
    }

    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.lock().unwrap_or_else(PoisonError::into_inner).abort()).map_err(raise)
    }
}

/// The table of finding codes, as JSON.
#[pyfunction]
fn codes_table() -> PyResult<String> {
    let rows: Vec<_> = codes::TABLE
        .iter()
        .map(|row| {
            let exit = match row.exit {
                codes::Exit::Problem => 1,
                codes::Exit::CouldNotRun => 2,
                codes::Exit::Incomplete => 3,
            };
            json!({"code": row.code, "name": row.name, "severity": row.severity, "exit": exit, "explanation": row.explanation})
        })
        .collect();
    to_json(&rows)
}

/// The exit code that findings (a JSON array) stand for.
#[pyfunction]
fn exit_code(findings: &str) -> PyResult<u8> {
    let findings: Vec<Finding> = serde_json::from_str(findings).map_err(json_error)?;
    Ok(exit_code_of(&findings))
}

/// Findings (a JSON array) as a gate (a JSON object) judges them.
#[pyfunction]
fn judge(findings: &str, gate: &str) -> PyResult<String> {
    let mut findings: Vec<Finding> = serde_json::from_str(findings).map_err(json_error)?;
    let gate: Gate = serde_json::from_str(gate).map_err(json_error)?;
    gate.judge(&mut findings).map_err(raise)?;
    to_json(&findings)
}

/// One line for a finding (a JSON object), control characters escaped.
#[pyfunction]
fn format_finding(finding: &str) -> PyResult<String> {
    let finding: Finding = serde_json::from_str(finding).map_err(json_error)?;
    Ok(finding.to_string())
}

/// What a `.metadata` file of torch.distributed.checkpoint says, as JSON.
#[pyfunction]
fn dcp_metadata(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    let read = move |_: &Control| {
        let file = SourceFile::open(&path)?;
        fastshard::format::dcp::metadata(&file).map_err(|e| stand_in::explained(&file, e))
    };
    to_json(&run(py, None, read).settle(None)?)
}

/// The value of a record of a `.distcp` file that is no tensor, as JSON.
#[pyfunction]
fn dcp_object(py: Python<'_>, path: PathBuf, offset: u64, len: u64) -> PyResult<String> {
    let read = move |_: &Control| fastshard::format::dcp::object(&SourceFile::open(&path)?, offset, len);
    to_json(&run(py, None, read).settle(None)?)
}

/// What lies in the place of a file of text, by its first bytes, as a finding in JSON; None for what may be the file itself.
#[pyfunction]
#[pyo3(name = "stand_in")]
fn stands_in(path: PathBuf, head: &[u8], size: u64) -> PyResult<Option<String>> {
    stand_in::finding(&path, head, size, stand_in::Place::Text).map(|finding| to_json(&finding)).transpose()
}

/// What is kept of a tokenizer's vocabulary, as JSON; `kind` is `tokenizers`, `ids`, `sentencepiece` or `lines`.
#[pyfunction]
fn vocabulary(py: Python<'_>, path: PathBuf, kind: &str, wanted: Vec<String>) -> PyResult<String> {
    use fastshard::format::vocabulary::{read, Kind};
    let kind = match kind {
        "tokenizers" => Kind::Tokenizers,
        "ids" => Kind::Ids,
        "sentencepiece" => Kind::SentencePiece,
        "lines" => Kind::Lines,
        other => return Err(PyValueError::new_err(format!("no kind of vocabulary: {other}"))),
    };
    to_json(&run(py, None, move |_| read(&SourceFile::open(&path)?, kind, &wanted)).settle(None)?)
}

/// Findings about the files below `roots` that `manifest` lists and that hold no tensors, as JSON.
#[pyfunction]
#[pyo3(signature = (manifest, roots, options, progress=None))]
fn manifest_files(
    py: Python<'_>,
    manifest: PathBuf,
    roots: Vec<PathBuf>,
    options: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let threads = RunOptions::parse(options)?.threads;
    let compared = run(py, progress, move |control| {
        verify::files(&Manifest::read(&manifest)?, &roots, threads, control)
    });
    to_json(&compared.settle(None)?)
}

/// The entry of a file without tensors in a manifest, as JSON.
#[pyfunction]
fn manifest_entry(py: Python<'_>, root: PathBuf, name: &str) -> PyResult<String> {
    to_json(&py.detach(|| verify::entry(&root, name)).map_err(raise)?)
}

/// The edges between the bins of a histogram, ascending.
#[pyfunction]
fn histogram_edges() -> Vec<f64> {
    stats::edges()
}

/// Anonymous resident memory of this process, in bytes.
#[pyfunction]
fn anonymous_memory() -> u64 {
    fastshard::memory::anonymous_memory()
}

#[pymodule(gil_used = false)]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    // The build for tests has assertions on purpose.
    m.add("DEBUG_BUILD", cfg!(debug_assertions) && !cfg!(feature = "steps"))?;
    m.add("STEPS", cfg!(feature = "steps"))?;
    m.add("CoreError", m.py().get_type::<CoreError>())?;
    m.add_class::<Catalog>()?;
    m.add_class::<drafts::Draft>()?;
    m.add_class::<plans::Plan>()?;
    m.add_class::<ranks::Meeting>()?;
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
    m.add_function(wrap_pyfunction!(ranks::is_elsewhere, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::bring, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::let_go, m)?)?;
    m.add_function(wrap_pyfunction!(ranks::will_read, m)?)?;
    m.add_function(wrap_pyfunction!(codes_table, m)?)?;
    m.add_function(wrap_pyfunction!(exit_code, m)?)?;
    m.add_function(wrap_pyfunction!(judge, m)?)?;
    m.add_function(wrap_pyfunction!(format_finding, m)?)?;
    m.add_function(wrap_pyfunction!(manifest_files, m)?)?;
    m.add_function(wrap_pyfunction!(manifest_entry, m)?)?;
    m.add_function(wrap_pyfunction!(dcp_metadata, m)?)?;
    m.add_function(wrap_pyfunction!(dcp_object, m)?)?;
    m.add_function(wrap_pyfunction!(stands_in, m)?)?;
    m.add_function(wrap_pyfunction!(vocabulary, m)?)?;
    m.add_function(wrap_pyfunction!(anonymous_memory, m)?)?;
    m.add_function(wrap_pyfunction!(histogram_edges, m)?)?;
    Ok(())
}
