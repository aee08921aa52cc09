//! The plan: every output tensor as views over pieces of source files.
//!
//! A plan is a document. It can be printed, compared and digested; the digest names the run. The
//! engine executes nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufWriter;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Finding;
use crate::few::Few;
use crate::layout::axis_words;
use crate::name::Name;
use crate::tensor::{c_strides, element_count};
use crate::words::Words;

pub(crate) mod blobs;
pub mod change;
mod check;
mod coded;
mod output;
mod stored;
pub mod tiles;

pub use change::Change;
pub use coded::{Coded, Grid, Groups, Numbers, Packing, Scale};
pub use output::{ArrayStore, Combine, Fill, Form, Op, OutFile, Output, PadRegion, Part, PartAxis};
pub use stored::{BoxPiece, Pieces, PlanBlob, PlanFile, RangePiece, StoredTensor};

/// Texts in the header of a safetensors file, by key.
pub type Metadata = BTreeMap<String, String>;

/// Version of the plan's JSON form.
pub const PLAN_VERSION: u32 = 2;

/// The plan.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Plan {
    /// [`PLAN_VERSION`].
    pub version: u32,
    /// The result of the plan, in words: `merge`, `hf`, ...
    pub target: String,
    /// Source files.
    pub sources: Vec<PlanFile>,
    /// Data ranges of the source files.
    pub blobs: Vec<PlanBlob>,
    /// Tensors of the sources.
    pub stored: Vec<StoredTensor>,
    /// Names of the rules that `stored` refers to.
    pub rules: Vec<Name>,
    /// Output tensors, in file order.
    pub outputs: Vec<Output>,
    /// Output files.
    pub files: Vec<OutFile>,
    /// Regions that should be zero.
    pub pads: Vec<PadRegion>,
    /// Stored tensors that must repeat another one: (first, copy).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<(u32, u32)>,
    /// True if a tensor that differs from its twin is a warning instead of an error.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub twins_may_differ: bool,
    /// True if layers may be equal to other layers (which is then a warning).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub layers_may_repeat: bool,
    /// True if a head that equals the embedding is not tied to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub untied: bool,
    /// Glob patterns of files that were copied on purpose.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies_accepted: Vec<String>,
    /// True if NaN and infinite values are accepted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub non_finite_accepted: bool,
    /// Small text files written besides, by name (config.json and the like).
    pub texts: BTreeMap<String, String>,
    /// Metadata in the header of each safetensors file, by key.
    #[serde(default, skip_serializing_if = "Metadata::is_empty")]
    pub metadata: Metadata,
    /// The index among the files of the result, which names the file of each tensor, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<String>,
    /// The caller's list of expected tensors, with which the result is compared: its class, version and
    /// digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// Top-level names that appear after all others, in this order; readers start from the last.
    pub pointers: Vec<String>,
    /// Degree of each parallel dimension of the source.
    pub topology: BTreeMap<String, u64>,
    /// Extents of the axes, for the reader.
    pub axes: BTreeMap<String, u64>,
    /// Notes from planning, whose words include the places of files; not part of the digest, as the result
    /// does not depend on these places.
    #[serde(skip)]
    pub notes: Vec<Finding>,
    /// Roots as given, for messages; not part of the document.
    #[serde(skip)]
    pub roots: Vec<String>,
    /// Words that show what tensors are by their names; not part of the document.
    #[serde(skip)]
    pub words: Arc<Words>,
}

impl Plan {
    /// BLAKE3 of the plan's JSON form, hexadecimal: the run's id and its resume key.
    pub fn digest(&self) -> String {
        // A call of the hasher for each word of the text would take longer than the text.
        let mut text = BufWriter::with_capacity(32 << 10, blake3::Hasher::new());
        serde_json::to_writer(&mut text, self).expect("a plan is plain data");
        let hasher = text.into_inner().expect("a hasher takes all bytes");
        hasher.finalize().to_hex().to_string()
    }

    /// Writes the plan with its notes as JSON.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string(self).expect("a plan is plain data");
        text.truncate(text.len() - 1);
        text += ",\"notes\":";
        text += &serde_json::to_string(&self.notes).expect("plain data");
        text.push('}');
        text
    }

    /// A unique name for each output: its own, or `FILE:KEY` if several ranks have an output of that name.
    pub fn names(&self) -> Vec<String> {
        let mut count: BTreeMap<&str, u32> = BTreeMap::new();
        self.outputs.iter().for_each(|output| *count.entry(&output.name).or_default() += 1);
        self.outputs
            .iter()
            .map(|output| match count[output.name.as_str()] {
                1 => output.name.to_string(),
                _ => format!("{}:{}", self.files[output.file as usize].name, output.key()),
            })
            .collect()
    }

    /// The outputs of each file, by their position in [`Plan::outputs`].
    pub fn by_file(&self) -> Vec<Vec<usize>> {
        let mut files = vec![Vec::new(); self.files.len()];
        for (i, output) in self.outputs.iter().enumerate() {
            if let Some(file) = files.get_mut(output.file as usize) {
                file.push(i);
            }
        }
        files
    }

    /// Sets the pointers: the given ones, else the file from which a reader starts, the index or the first
    /// file.
    pub(crate) fn point(&mut self, pointers: Vec<String>) {
        let first = || self.files.first()?.name.split('/').next();
        let usual = || self.index.as_deref().or_else(first).map(str::to_string).into_iter().collect();
        self.pointers = if pointers.is_empty() { usual() } else { pointers };
    }

    /// Bytes of all output files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.size).sum::<u64>()
            + self.texts.values().map(|t| t.len() as u64).sum::<u64>()
    }

    /// The changes of values, in words, with the number of outputs: value ops, casts, sums and means of
    /// several sources, scales of quantised tensors. Empty if every bit is kept.
    pub fn changes(&self) -> BTreeMap<String, u64> {
        let mut all: BTreeMap<String, u64> = BTreeMap::new();
        for output in &self.outputs {
            let mut here: BTreeSet<String> = BTreeSet::new();
            for part in &output.parts {
                here.extend(part.ops.iter().map(|op| match op {
                    Op::Scale(factor) => format!("scale {factor}"),
                    Op::Add(term) => format!("add {term}"),
                }));
                match part.combine {
                    Combine::Mean if part.sources.len() > 1 => drop(here.insert("mean of replicas".into())),
                    Combine::Sum if part.sources.len() > 1 => drop(here.insert("sum over ranks".into())),
                    _ => {}
                }
                for stored in part.sources.iter().map(|&source| &self.stored[source as usize]) {
                    here.extend(stored.changes.iter().map(|change| change.words()));
                    if let Some(coded) = stored.coded() {
                        let codes = self.stored[coded.codes as usize].dtype;
                        here.insert(format!("values of {codes} by scales"));
                    } else if stored.dtype != output.dtype {
                        here.insert(format!("cast {} to {}", stored.dtype, output.dtype));
                    }
                }
            }
            here.into_iter().for_each(|change| *all.entry(change).or_default() += 1);
        }
        all
    }

    /// Sizes of the model, by their names in configs.
    pub fn dimensions(&self) -> BTreeMap<String, u64> {
        self.axes.iter().map(|(axis, size)| (axis_words::config_key(axis).to_string(), *size)).collect()
    }

    /// Bytes read for each byte of the stored tensors in use. Data is read again if several outputs take it,
    /// or if it is compared with a tensor that was read before.
    pub fn read_amplification(&self) -> f64 {
        let mut looked_at: BTreeSet<u32> = BTreeSet::new();
        let mut read = 0u64;
        let mut take = |stored: u32, elements: u64| {
            looked_at.insert(stored);
            read = read
                .saturating_add(elements.saturating_mul(self.stored[stored as usize].dtype.size() as u64));
        };
        for part in self.outputs.iter().flat_map(|output| &output.parts) {
            for &source in &part.sources {
                take(source, part.volume());
                self.stored[source as usize].twins.iter().for_each(|twin| take(*twin, part.volume()));
            }
        }
        for pad in &self.pads {
            take(pad.stored, pad.axes.iter().map(|axis| axis.n).product());
        }
        for &(first, copy) in &self.copies {
            for stored in [first, copy] {
                take(stored, element_count(&self.stored[stored as usize].shape).unwrap_or(0));
            }
        }
        let total: u64 = looked_at.iter().map(|stored| self.stored[*stored as usize].nbytes()).sum();
        if total == 0 {
            1.0
        } else {
            read as f64 / total as f64
        }
    }

    /// Full stored tensors as outputs, for hashing a checkpoint: one output per stored tensor.
    pub fn identity_outputs(&self) -> Vec<Output> {
        self.stored
            .iter()
            .enumerate()
            .map(|(i, tensor)| {
                let axes = tensor
                    .shape
                    .iter()
                    .zip(&c_strides(&tensor.shape))
                    .enumerate()
                    .map(|(dim, (&n, &dst))| PartAxis { n, dst, dim: dim as u32, step: 1 })
                    .collect();
                Output {
                    name: tensor.name.clone(),
                    dtype: tensor.dtype,
                    shape: tensor.shape.clone(),
                    parts: [Part {
                        axes,
                        dst_base: 0,
                        src_base: Few::repeat(0, tensor.shape.len()),
                        sources: [i as u32].into(),
                        combine: Combine::Equal,
                        ops: Box::default(),
                    }]
                    .into(),
                    fill: Fill::None,
                    file: 0,
                    offset: 0,
                    key: None,
                }
            })
            .collect()
    }

    /// The name of a source file in messages, with its root if there are several.
    pub fn label(&self, file: u32) -> String {
        let file = &self.sources[file as usize];
        match self.roots.get(file.root as usize) {
            Some(root) if self.roots.len() > 1 => format!("{root}/{}", file.path),
            _ => file.path.clone(),
        }
    }

    /// The file of a stored tensor (the first one if there are several); for values, the file of their codes.
    pub fn file_of(&self, stored: &StoredTensor) -> &PlanFile {
        let blob = match &stored.pieces {
            Pieces::View { blob, .. } => Some(*blob),
            Pieces::Boxes(pieces) => pieces.first().map(|p| p.blob),
            Pieces::Ranges(pieces) => pieces.first().map(|p| p.blob),
            Pieces::Coded(coded) => return self.file_of(&self.stored[coded.codes as usize]),
        };
        &self.sources[blob.map_or(0, |b| self.blobs[b as usize].file as usize)]
    }

    /// Whether each stored tensor is read: an output is made from it, or it is compared with a tensor that an
    /// output is made from.
    pub fn tensors_read(&self) -> Vec<bool> {
        let mut read = vec![false; self.stored.len()];
        for source in self.outputs.iter().flat_map(|o| &o.parts).flat_map(|p| &p.sources) {
            if !std::mem::replace(&mut read[*source as usize], true) {
                self.read_with(*source).into_iter().for_each(|stored| read[stored as usize] = true);
            }
        }
        read
    }

    /// The stored tensors that are read for one: those that it is made from, its twins, and the factors of
    /// its changes.
    pub fn read_with(&self, stored: u32) -> Vec<u32> {
        let tensor = &self.stored[stored as usize];
        let factors = tensor.changes.iter().flat_map(Change::needs);
        self.made_of(stored).into_iter().chain(tensor.twins.iter().copied()).chain(factors).collect()
    }

    /// A stored tensor, and the tensors that its values are made from, e.g. codes and scales.
    pub fn made_of(&self, stored: u32) -> Vec<u32> {
        let mut all = vec![stored];
        let mut at = 0;
        while let Some(&one) = all.get(at) {
            all.extend(self.stored[one as usize].coded().into_iter().flat_map(Coded::needs));
            at += 1;
        }
        all
    }

    /// File index and offset of an output whose bytes are one run of one file, as they are.
    pub fn contiguous(&self, output: &Output) -> Option<(u32, u64)> {
        let [part] = &output.parts[..] else { return None };
        let [source] = part.sources[..] else { return None };
        let stored = &self.stored[source as usize];
        let Pieces::View { blob, offset, strides } = &stored.pieces else { return None };
        let blob = &self.blobs[*blob as usize];
        let kept = part.ops.is_empty() && stored.changes.is_empty();
        let plain = kept && stored.dtype == output.dtype && part.volume() == output.elements();
        let same_order = part.axes.iter().all(|a| a.dst == a.step * strides[a.dim as usize]);
        if !plain || !same_order || blob.deflated || blob.encoded || part.volume() == 0 {
            return None;
        }
        let first: u64 = part.src_base.iter().zip(strides).map(|(i, s)| i * s).sum();
        Some((blob.file, blob.offset + offset + first * stored.dtype.size() as u64))
    }
}
