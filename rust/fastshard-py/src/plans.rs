//! Plans, and what is done with them: looked at, read, verified, written.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{IntoRawFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastshard::catalog::Catalog;
use fastshard::codes;
use fastshard::distributed::ranks::write_together;
use fastshard::draft::Planned;
use fastshard::error::{Error, Finding, Severity};
use fastshard::manifest::Manifest;
use fastshard::plan::{Form, Pieces, Plan as CorePlan};
use fastshard::storage::SourceFile;
use fastshard::{verify, write};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde_json::json;

use crate::calls::{run, run_telling};
use crate::destinations::PythonDestination;
use crate::meetings::Meeting;
use crate::options::complete;
use crate::plain::{list, to_python, Given};
use crate::{findings, raise, to_json, Paths, RunOptions, Written};

/// A plan with the open files that it reads.
#[pyclass(frozen, module = "fastshard._core")]
pub(crate) struct Plan {
    pub(crate) plan: Arc<CorePlan>,
    findings: Vec<Finding>,
    pub(crate) files: Vec<Arc<SourceFile>>,
    roots: Vec<PathBuf>,
    /// What `check` hashed and `against` need not read again.
    hashed: Mutex<verify::Hashed>,
    /// Findings of the last `write`: those of its result, or those that ended it.
    outcome: Mutex<Vec<Finding>>,
}

impl Plan {
    pub(crate) fn hashed(&self) -> MutexGuard<'_, verify::Hashed> {
        self.hashed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what a write came to.
    pub(crate) fn remember(&self, findings: Vec<Finding>) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = findings;
    }

    pub(crate) fn refuse_errors(&self) -> PyResult<()> {
        if self.findings.iter().any(|f| f.severity == Severity::Error) {
            return Err(raise(Error::from(self.findings.clone())));
        }
        Ok(())
    }
}

/// Files that an output is made of.
fn files_of(plan: &CorePlan, output: usize) -> BTreeSet<u32> {
    let sources = plan.outputs[output].parts.iter().flat_map(|p| &p.sources);
    let stored = sources.flat_map(|&s| plan.made_of(s)).map(|s| &plan.stored[s as usize]);
    let blobs = stored.flat_map(|stored| match &stored.pieces {
        Pieces::View { blob, .. } => vec![*blob],
        Pieces::Boxes(pieces) => pieces.iter().map(|p| p.blob).collect(),
        Pieces::Ranges(pieces) => pieces.iter().map(|p| p.blob).collect(),
        Pieces::Coded(_) => Vec::new(),
    });
    blobs.map(|b| plan.blobs[b as usize].file).collect()
}

/// What a run without writing came to: findings, hashes and statistics by the outputs' names.
type Checked<'py> = (Vec<findings::Finding>, BTreeMap<String, String>, Bound<'py, PyDict>);

/// What decoding blocks takes; null where there are none.
fn decoding(plan: &CorePlan) -> serde_json::Value {
    let about = fastshard::engine::decoding(plan);
    match about.blocks {
        0 => serde_json::Value::Null,
        _ => json!({
            "blocks": about.blocks, "bytes": about.bytes, "largest": about.largest, "live": about.live,
        }),
    }
}

#[pymethods]
impl Plan {
    fn findings(&self) -> Vec<findings::Finding> {
        findings::list(self.findings.iter().cloned())
    }

    /// What no file can hold, for a plan that is to be written.
    fn unwritable(&self) -> Vec<findings::Finding> {
        findings::list(fastshard::files::unwritable(&self.plan))
    }

    fn digest(&self, py: Python<'_>) -> String {
        let plan = Arc::clone(&self.plan);
        py.detach(move || plan.digest())
    }

    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        let plan = Arc::clone(&self.plan);
        Ok(py.detach(move || plan.to_json()))
    }

    /// Number of outputs, and bytes of their names.
    fn named(&self) -> (u64, u64) {
        let names = self.plan.outputs.iter().map(|output| output.name.len() as u64);
        (self.plan.outputs.len() as u64, names.sum())
    }

    /// A name for each output that no other has.
    fn names(&self) -> Vec<String> {
        self.plan.names()
    }

    /// The names of the files that a write makes, a folder with a slash at its end; and the top-level names that appear last.
    fn written_names(&self) -> (Vec<String>, Vec<String>) {
        let of_file = |file: &fastshard::plan::OutFile| match file.form {
            Form::Arrays(_) => format!("{}/", file.name),
            _ => file.name.clone(),
        };
        let files = self.plan.files.iter().map(of_file);
        let names = files.chain(self.plan.texts.keys().cloned()).chain(self.plan.index.clone()).collect();
        (names, self.plan.pointers.clone())
    }

    /// The plan of one output alone.
    fn excerpt(&self, output: usize) -> PyResult<String> {
        if output >= self.plan.outputs.len() {
            return Err(pyo3::exceptions::PyIndexError::new_err(output));
        }
        Ok(self.plan.excerpt(&[output]).to_json())
    }

    fn summary<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let plan = &self.plan;
        let mut dtypes: BTreeMap<String, (u64, u64)> = Default::default();
        for output in &plan.outputs {
            let slot = dtypes.entry(output.dtype.to_string()).or_default();
            slot.0 += 1;
            slot.1 += output.nbytes();
        }
        to_python(
            py,
            &json!({
                "target": plan.target,
                "sources": plan.sources.len(),
                "source_bytes": plan.sources.iter().map(|s| s.size).sum::<u64>(),
                "stored_tensors": plan.stored.len(),
                "outputs": plan.outputs.len(),
                "parameters": plan.outputs.iter().map(|o| o.elements()).sum::<u64>(),
                "bytes": plan.bytes(),
                "files": plan.files.iter().map(|f| json!({"name": f.name, "header_len": f.header_len, "size": f.size})).collect::<Vec<_>>(),
                "dtypes": dtypes,
                "topology": plan.topology,
                "dimensions": plan.dimensions(),
                "texts": plan.texts.keys().collect::<Vec<_>>(),
                "value_ops": Manifest::ops_of(plan),
                "changes": plan.changes(),
                "read_amplification": plan.read_amplification(),
                "decoding": decoding(plan),
                "compared": {
                    "checksums": plan.blobs.iter().filter(|blob| blob.crc32.is_some()).count(),
                    "twins": plan.stored.iter().filter(|stored| !stored.twins.is_empty()).count(),
                    "pads": plan.pads.len(),
                },
            }),
        )
    }

    /// (name, dtype, shape, bytes, pieces) of every output.
    fn outputs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let outputs = self.plan.outputs.iter().map(|o| {
            let pieces: usize = o.parts.iter().map(|p| p.sources.len()).sum();
            (&o.name[..], o.dtype.safetensors_name(), &o.shape[..], o.nbytes(), pieces)
        });
        list(py, outputs)
    }

    /// (rank, file, local shape) of every stored tensor that an output is made of.
    fn pieces(&self, output: usize) -> Vec<(Option<String>, String, Vec<u64>)> {
        let Some(output) = self.plan.outputs.get(output) else { return Vec::new() };
        let mut seen = std::collections::HashSet::new();
        output
            .parts
            .iter()
            .flat_map(|p| &p.sources)
            .filter(|s| seen.insert(**s))
            .map(|&s| {
                let stored = &self.plan.stored[s as usize];
                let rank = stored.rank.as_deref().map(str::to_string);
                (rank, self.plan.file_of(stored).path.clone(), stored.shape.to_vec())
            })
            .collect()
    }

    /// Files that an output is read from.
    fn sources(&self, output: usize) -> Vec<String> {
        let Some(output) = self.plan.outputs.get(output) else { return Vec::new() };
        let files = fastshard::distributed::share::files_of(&self.plan, output);
        files.into_iter().map(|file| self.plan.sources[file as usize].path.clone()).collect()
    }

    /// (file, offset) of an output whose bytes are one run of one file, as they are; the file unchanged.
    fn contiguous(&self, output: usize) -> PyResult<Option<(usize, u64)>> {
        let place = self.plan.outputs.get(output).and_then(|o| self.plan.contiguous(o));
        let Some((file, offset)) = place else { return Ok(None) };
        self.files[file as usize].unchanged().map_err(raise)?;
        Ok(Some((file as usize, offset)))
    }

    /// A new descriptor of a source file for the caller to close; None where it should be read, not mapped.
    fn descriptor(&self, file: usize) -> PyResult<Option<RawFd>> {
        let Some(file) = self.files.get(file) else { return Ok(None) };
        Ok(file.descriptor().map_err(raise)?.map(IntoRawFd::into_raw_fd))
    }

    /// Fills `buffer` with the bytes of an output from byte `start`.
    #[pyo3(signature = (output, start, buffer, threads=1))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        output: usize,
        start: u64,
        buffer: &Bound<'py, PyArray1<u8>>,
        threads: usize,
    ) -> PyResult<()> {
        let mut view = buffer.try_readwrite().map_err(|e| PyValueError::new_err(e.to_string()))?;
        let bytes = view.as_slice_mut().map_err(|e| PyValueError::new_err(e.to_string()))?;
        let (plan, files) = (&self.plan, &self.files);
        py.detach(|| {
            fastshard::engine::read(plan, files, output, start, bytes, &std::env::temp_dir(), threads)?;
            // What was read belongs to the headers that were.
            files_of(plan, output).into_iter().try_for_each(|f| files[f as usize].unchanged())
        })
        .map_err(raise)
    }

    /// Writes and publishes; returns the manifest as JSON, and findings.
    /// `arrays` writes the arrays of a result that holds some. `paths` are the files that go along, by
    /// their names there, and what the destination must lie apart from: none, and the roots, if not given.
    /// With `meeting` it does so together with the other ranks there, and `about` is kept for those that go on.
    /// With `store` the result is published there, and `out` is where it is staged.
    #[pyo3(signature = (out, options, progress=None, arrays=None, paths=None, tell=None, meeting=None, about=None, store=None))]
    #[allow(clippy::too_many_arguments)] // as Python passes them
    fn write(
        &self,
        py: Python<'_>,
        out: PathBuf,
        options: Given<write::Options>,
        progress: Option<Py<PyAny>>,
        arrays: Option<Py<PyAny>>,
        paths: Option<Paths>,
        tell: Option<Py<PyAny>>,
        meeting: Option<&Meeting>,
        about: Option<Given<serde_json::Value>>,
        store: Option<Py<PyAny>>,
    ) -> PyResult<Written> {
        self.refuse_errors()?;
        let (copies, roots) = paths.unwrap_or_else(|| (Vec::new(), self.roots.clone()));
        let mut write_options = complete(options.0, copies, arrays);
        write_options.store = store
            .map(|destination| Arc::new(PythonDestination { destination }) as Arc<dyn write::Destination>);
        let (plan, files) = (Arc::clone(&self.plan), self.files.clone());
        let meeting = meeting.map(Meeting::inner).transpose()?;
        let about = about.map(|about| about.0).unwrap_or_default();
        let ended = run_telling(py, progress, tell, {
            let out = out.clone();
            move |control| {
                let options = &write_options;
                let run =
                    write::Run { plan: &plan, files: &files, roots: &roots, out: &out, options, control };
                match meeting {
                    Some(meeting) => write_together(&run, &meeting, about),
                    None => write::write(&run),
                }
            }
        });
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) =
            ended.collect_findings(&out, |(_, warnings): &(Manifest, Vec<Finding>)| warnings.clone());
        let (manifest, warnings) = ended.settle(Some(&out))?;
        Ok((to_json(&manifest)?, findings::list(warnings)))
    }

    /// Lists what the last `write` came to, as findings: `FS519` if the result is published.
    #[pyo3(name = "told")]
    fn outcome(&self) -> Vec<findings::Finding> {
        findings::list(self.outcome.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned())
    }

    /// Refuses to read files with large holes in the place of tensors.
    fn refuse_unwritten(&self) -> PyResult<()> {
        let is_refused = |f: &&Finding| f.code == codes::UNWRITTEN && f.severity == Severity::Error;
        match self.findings.iter().filter(is_refused).cloned().collect::<Vec<Finding>>() {
            unwritten if unwritten.is_empty() => Ok(()),
            unwritten => Err(raise(Error::from(unwritten))),
        }
    }

    /// Runs without writing; returns findings, hashes and statistics, by the outputs' names.
    #[pyo3(signature = (options, progress=None))]
    fn check<'py>(
        &self,
        py: Python<'py>,
        options: Given<RunOptions>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Checked<'py>> {
        self.refuse_unwritten()?;
        let options = options.0;
        let (mut plan, files) = (Arc::clone(&self.plan), self.files.clone());
        if options.only.is_some() {
            let names = plan.names();
            let mut selection = names.iter().map(|name| options.holds(name));
            Arc::make_mut(&mut plan).outputs.retain(|_| selection.next().unwrap_or(false));
        }
        let (checked, report) = run(py, progress, move |control| {
            verify::content(plan, &files, options.subset(), &options.engine(), control)
        })
        .settle(None)?;
        self.hashed().extend(verify::hashed(&checked, &report));
        let mut hashes = BTreeMap::new();
        let gathered = PyDict::new(py);
        for (o, r) in checked.outputs.iter().zip(&report.outputs) {
            // Shards of one tensor are told apart by their files.
            let name = match &o.key {
                Some(key) => format!("{}:{key}", checked.files[o.file as usize].name),
                None => o.name.to_string(),
            };
            if let Some(stats) = r.seen.stats() {
                gathered.set_item(&name, to_python(py, stats)?)?;
            }
            hashes.insert(name, fastshard::hash::hex(&r.hash));
        }
        Ok((findings::list(report.findings), hashes, gathered))
    }
}

/// A plan with the open files that it reads.
pub(crate) fn with_files(catalog: &Catalog, planned: Planned) -> Plan {
    // The plan's sources are the catalog's files in the order in which units named them.
    let by_path = catalog.files.iter().flatten().map(|file| ((file.root, file.path.as_str()), &file.source));
    let by_path: HashMap<_, _> = by_path.collect();
    let sources = planned.plan.sources.iter();
    let files =
        sources.filter_map(|s| by_path.get(&(s.root, s.path.as_str())).map(|f| Arc::clone(f))).collect();
    Plan {
        plan: Arc::new(planned.plan),
        findings: planned.findings,
        files,
        roots: catalog.roots.clone(),
        hashed: Mutex::default(),
        outcome: Mutex::default(),
    }
}
