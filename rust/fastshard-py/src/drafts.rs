//! Drafts, for targets: looked at, then placed.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use fastshard::catalog::Catalog;
use fastshard::compose;
use fastshard::draft::{Draft as CoreDraft, Placement};
use fastshard::odd_dtypes::find_odd_dtypes;
use fastshard::tensor::Dtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::calls::compute;
use crate::plain::Given;
use crate::plans::{with_files, Plan};
use crate::rosters::{compared, Roster};
use crate::{findings, raise};

/// What a step takes of memory, as measured.
struct Need {
    /// Half as many bytes per byte of a name.
    halves: u64,
    /// Bytes per tensor besides.
    per_tensor: u64,
}

/// What placing a draft takes.
const PLACING: Need = Need { halves: 1, per_tensor: 50 };
/// What listing its tensors takes, which is held until it is placed, and placing it.
const LISTING: Need = Need { halves: 3, per_tensor: 600 };

/// How ranks cut a tensor, dimension by dimension: the dimension, the parallel one, and the parts.
type Cut = (usize, String, Vec<u64>);
/// What outputs of a draft share: dtype, a rank's shape and bytes, the full tensor's shape, and how ranks cut it.
type Shared<'a> = (&'static str, &'a [u64], u64, &'a [u64], Option<Vec<Cut>>);

/// A plan without places; placed once.
#[pyclass(frozen, module = "fastshard._core")]
pub(crate) struct Draft {
    inner: Mutex<Option<CoreDraft>>,
    catalog: Arc<Catalog>,
}

impl Draft {
    pub(crate) fn new(draft: CoreDraft, catalog: Arc<Catalog>) -> Draft {
        Draft { inner: Mutex::new(Some(draft)), catalog }
    }

    /// Refuses to go on where that takes more than the memory that was stated.
    fn room(&self, draft: &CoreDraft, need: &Need) -> PyResult<()> {
        let names: u64 = draft.outputs.iter().map(|one| one.output.name.len() as u64).sum();
        let tensors = draft.outputs.len() as u64 * need.per_tensor;
        self.catalog.look(names.saturating_mul(need.halves) / 2 + tensors).map_err(raise)
    }

    fn with<T>(&self, look: impl FnOnce(&CoreDraft) -> T) -> PyResult<T> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.as_ref().map(look).ok_or_else(|| PyValueError::new_err("the draft was placed"))
    }
}

#[pymethods]
impl Draft {
    fn findings(&self) -> PyResult<Vec<findings::Finding>> {
        self.with(|draft| findings::list(draft.findings.iter().cloned()))
    }

    fn odd_dtypes(&self) -> PyResult<Vec<findings::Finding>> {
        self.with(|draft| findings::list(find_odd_dtypes(draft)))
    }

    fn lost(&self) -> PyResult<BTreeMap<String, Option<u64>>> {
        self.with(|draft| draft.lost.clone())
    }

    fn axes(&self) -> PyResult<BTreeMap<String, u64>> {
        self.with(|draft| draft.axes().clone())
    }

    /// Bytes by dtype, of all ranks.
    fn dtypes(&self) -> PyResult<BTreeMap<String, u64>> {
        self.with(|draft| {
            let mut all = BTreeMap::new();
            for one in &draft.outputs {
                *all.entry(one.output.dtype.to_string()).or_default() += one.output.nbytes();
            }
            all
        })
    }

    /// Each tensor once, whatever the ranks that hold it. Tensors that are alike share shapes and cuts.
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.with(|draft| {
            self.room(draft, &LISTING)?;
            let mut seen = HashSet::with_capacity(draft.outputs.len());
            let mut records: HashMap<_, Bound<'py, PyTuple>> = HashMap::new();
            let tensors = PyList::empty(py);
            for one in draft.outputs.iter().filter(|one| seen.insert(one.output.name.as_str())) {
                let o = &one.output;
                let whole = &one.whole.as_ref().unwrap_or(&o.shape)[..];
                let cuts = one.cuts.as_ref().map(Arc::as_ptr);
                let record = match records.entry((o.dtype, &o.shape[..], whole, cuts)) {
                    Entry::Occupied(record) => record.into_mut(),
                    Entry::Vacant(place) => {
                        let cuts: Option<Vec<Cut>> = one.cuts.as_ref().map(|cuts| {
                            cuts.iter().map(|cut| (cut.dim, cut.by.clone(), cut.parts.clone())).collect()
                        });
                        let shared: Shared = (o.dtype.safetensors_name(), &o.shape, o.nbytes(), whole, cuts);
                        place.insert(shared.into_pyobject(py)?)
                    }
                };
                tensors.append((o.name.as_str(), &*record))?;
            }
            Ok(tensors)
        })?
    }

    /// Names of the outputs, each once.
    fn names(&self) -> PyResult<HashSet<String>> {
        self.with(|draft| draft.outputs.iter().map(|one| one.output.name.to_string()).collect())
    }

    /// Shape and dtype of each full tensor, by its name. Tensors that are alike share one record.
    fn full_tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.with(|draft| -> PyResult<Bound<'py, PyDict>> {
            self.room(draft, &LISTING)?;
            let mut records: HashMap<(&[u64], Dtype), Bound<'py, PyTuple>> = HashMap::new();
            let tensors = PyDict::new(py);
            for compose::Drafted { output, whole, .. } in &draft.outputs {
                let shape = &whole.as_ref().unwrap_or(&output.shape)[..];
                let record = match records.entry((shape, output.dtype)) {
                    Entry::Occupied(record) => record.into_mut(),
                    Entry::Vacant(place) => {
                        let shape = PyTuple::new(py, shape)?;
                        place.insert((shape, output.dtype.to_string()).into_pyobject(py)?)
                    }
                };
                tensors.set_item(output.name.as_str(), &*record)?;
            }
            Ok(tensors)
        })?
    }

    /// Position of each output on the axes that its name counts, where it counts any.
    fn positions(&self) -> PyResult<HashMap<String, BTreeMap<String, u64>>> {
        self.with(|draft| {
            let counted = draft.outputs.iter().filter(|one| !one.index.is_empty());
            counted.map(|one| (one.output.name.to_string(), (*one.index).clone())).collect()
        })
    }

    /// Stored tensors that each output is made of, by its name.
    fn made_of(&self) -> PyResult<BTreeMap<String, BTreeSet<String>>> {
        self.with(|draft| {
            let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
            for one in &draft.outputs {
                all.entry(one.output.name.to_string()).or_default().extend(draft.made_of(&one.output));
            }
            all
        })
    }

    /// What the tensors differ in from those of a roster; `names` are the model's own of those that have others, and only
    /// those below `outer` are the model's.
    fn compared<'py>(
        &self,
        py: Python<'py>,
        roster: &Roster,
        names: HashMap<String, String>,
        outer: &str,
    ) -> PyResult<Bound<'py, PyDict>> {
        self.with(|draft| compared(py, draft, roster, &names, outer))?
    }

    /// The plan. A draft is placed once.
    fn place(&self, py: Python<'_>, placement: Given<Placement>) -> PyResult<Plan> {
        let draft = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let draft = draft.ok_or_else(|| PyValueError::new_err("the draft was placed"))?;
        self.room(&draft, &PLACING)?;
        let catalog = Arc::clone(&self.catalog);
        let planned = compute(py, move || draft.placed(&catalog, placement.0))?;
        Ok(with_files(&self.catalog, planned))
    }
}
