//! The plan: every output tensor as views over pieces of source files.
//!
//! A plan is a document. It can be printed, compared and digested; the digest names the run. The
//! engine executes nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::boxes::Spread;
use crate::codes;
use crate::error::{Finding, Result};
use crate::format::pickle::writer::Tree;
use crate::format::zstd::Zstd;
use crate::format::Blob;
use crate::tensor::{c_strides, element_count, Dtype};
use crate::words::Words;

pub mod change;

pub use change::Change;

/// Version of the plan's JSON form.
pub const PLAN_VERSION: u32 = 2;

/// A source file as the plan names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanFile {
    /// Path relative to its root.
    pub path: String,
    /// Index of the root (one per CKPT given).
    pub root: u32,
    /// Size in bytes.
    pub size: u64,
    /// Modification time, nanoseconds since the epoch.
    pub mtime_ns: i64,
    /// BLAKE3 of the header, hexadecimal.
    pub header: String,
}

/// A range of a source file that pieces lie in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanBlob {
    /// Index into [`Plan::sources`].
    pub file: u32,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Bytes in the file; of a block of a store the bytes that its decoding takes.
    pub stored_len: u64,
    /// Bytes of data.
    pub len: u64,
    /// CRC32 of the data, where the container has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc32: Option<u32>,
    /// True if the bytes are compressed: by deflate, unless `zstd` says otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deflated: bool,
    /// For data that lie in a Zstandard stream, which the range of the file is then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zstd: Option<Zstd>,
    /// True for a block of a store that its reader decodes by the name in `member`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encoded: bool,
    /// Name of the member in the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<String>,
}

impl PlanBlob {
    /// A blob of source `file`.
    pub fn of(file: u32, blob: &Blob) -> PlanBlob {
        PlanBlob {
            file,
            offset: blob.offset,
            stored_len: blob.stored_len,
            len: blob.len,
            crc32: blob.crc32,
            deflated: blob.deflated,
            zstd: blob.zstd,
            encoded: blob.encoded,
            member: blob.member.clone(),
        }
    }
}

/// Where a stored tensor's elements lie.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pieces {
    /// One strided view over a blob: byte offset in its data and strides in elements.
    View {
        /// Index into [`Plan::blobs`].
        blob: u32,
        /// Byte offset in the blob's data.
        offset: u64,
        /// Strides in elements.
        strides: Vec<u64>,
    },
    /// Boxes that tile the tensor (DCP chunks, zarr blocks).
    Boxes(Vec<BoxPiece>),
    /// Ranges that tile the tensor's C-ordered elements (flat optimizer partitions), sorted by `start`.
    Ranges(Vec<RangePiece>),
}

/// One box of a stored tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoxPiece {
    /// First index in each dimension.
    pub lo: Vec<u64>,
    /// Extent in each dimension.
    pub len: Vec<u64>,
    /// Index into [`Plan::blobs`].
    pub blob: u32,
    /// Byte offset in the blob's data.
    pub offset: u64,
    /// Strides in elements, where the box is not C-ordered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub strides: Vec<u64>,
}

/// One range of a stored tensor's C-ordered elements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RangePiece {
    /// First element.
    pub start: u64,
    /// Number of elements.
    pub len: u64,
    /// Index into [`Plan::blobs`].
    pub blob: u32,
    /// Byte offset in the blob's data.
    pub offset: u64,
}

/// A tensor as the source's framework names it on one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoredTensor {
    /// Name in the layout's terms.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape on its rank.
    pub shape: Vec<u64>,
    /// Where its elements lie.
    pub pieces: Pieces,
    /// Rank in the field's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<String>,
    /// The rule it was matched to: tensors of one rule are alike over layers and ranks.
    pub rule: u32,
    /// Position on the axes bound by its name, e.g. the layer; from the rank's first where ranks divide the axis.
    pub index: Vec<u64>,
    /// Number of its part, if the rule divides the tensor over ranks: the tensor-parallel rank, or one for each
    /// pair of ranks where two dimensions divide it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<u64>,
    /// The same tensor in another precision (a parameter and its fp32 master weights): the wider of the two,
    /// rounded, must be the narrower one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub twins: Vec<u32>,
    /// Scales of a quantised tensor whose values are wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<BlockScale>,
    /// What adapters make of its values, one after another.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
}

/// Scales of blocks: the value of an element is what is stored times the scale of its block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockScale {
    /// Index into [`Plan::stored`]; one element per block, C-ordered.
    pub stored: u32,
    /// Extent of a block in each dimension of the quantised tensor.
    pub block: Vec<u64>,
}

/// Most scales of one tensor: they are held in memory.
const MAX_SCALES: u64 = 1 << 22;

impl BlockScale {
    /// Scales of blocks for a tensor of shape `shape`, from the shape of the scales: one for all, one
    /// per row, or one per block of `stated` extents (128 by 128 if nothing states them).
    pub fn of(stored: u32, shape: &[u64], scales: &[u64], stated: Option<&[u64]>) -> Option<BlockScale> {
        let count = element_count(scales).filter(|n| *n <= MAX_SCALES)?;
        let fits = |block: &[u64], scales: &[u64]| {
            block.len() == shape.len()
                && scales.len() == shape.len()
                && block.iter().all(|b| *b > 0)
                && shape.iter().zip(block).zip(scales).all(|((n, b), s)| n.div_ceil(*b) == *s)
        };
        let whole: Vec<u64> = shape.iter().map(|n| (*n).max(1)).collect();
        let mut rows = whole.clone();
        if let Some(first) = rows.first_mut() {
            *first = 1;
        }
        let per_row = !shape.is_empty()
            && count == shape[0]
            && (scales.len() == 1 || scales[1..].iter().all(|n| *n == 1));
        let usual = [128, 128];
        let block = if count == 1 {
            whole
        } else if let Some(block) = stated.filter(|b| fits(b, scales)) {
            block.to_vec()
        } else if per_row {
            rows
        } else if fits(&usual, scales) {
            usual.to_vec()
        } else {
            return None;
        };
        Some(BlockScale { stored, block })
    }
}

impl StoredTensor {
    /// Bytes of the tensor's elements.
    pub fn nbytes(&self) -> u64 {
        element_count(&self.shape).unwrap_or(0) * self.dtype.size() as u64
    }

    /// Step in the stored elements per step on each of `axes`.
    pub fn steps(&self, axes: &[PartAxis]) -> Vec<u64> {
        let strides = match &self.pieces {
            Pieces::View { strides, .. } => strides.clone(),
            _ => c_strides(&self.shape),
        };
        axes.iter().map(|a| a.step * strides[a.dim as usize]).collect()
    }
}

/// An axis of a part: how far one step moves in the destination and in the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartAxis {
    /// Extent.
    pub n: u64,
    /// Step in the output tensor's C-ordered elements.
    pub dst: u64,
    /// Dimension of the stored tensor.
    pub dim: u32,
    /// Step in that dimension.
    pub step: u64,
}

/// How the sources of a part make one value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Combine {
    /// One source, or several that must be bit-equal: the first is taken.
    Equal,
    /// Sources are averaged in float32 in the order given, rounded once.
    Mean,
    /// Sources are summed in float32 in the order given, rounded once.
    Sum,
    /// Sum or copy depending on a fact that is not known: all elements must be zero.
    Zero(String),
}

/// A change of values, applied in float32 in the order listed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// x * factor
    Scale(f32),
    /// x + term
    Add(f32),
}

impl Op {
    /// True if the op loses no bits of a normal number: a scale by a power of two.
    pub fn is_exact(self) -> bool {
        matches!(self, Op::Scale(x) if x.to_bits() & 0x007f_ffff == 0)
    }
}

/// A box of an output tensor and where its values come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Axes by falling `dst` step.
    pub axes: Vec<PartAxis>,
    /// First element in the output tensor.
    pub dst_base: u64,
    /// First index in each dimension of the stored tensors.
    pub src_base: Vec<u64>,
    /// Indices into [`Plan::stored`]; all have the same shape.
    pub sources: Vec<u32>,
    /// How several sources make one value.
    pub combine: Combine,
    /// Value ops.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ops: Vec<Op>,
}

impl Part {
    /// Extents of the axes.
    pub fn extents(&self) -> Vec<u64> {
        self.axes.iter().map(|a| a.n).collect()
    }

    /// Number of elements.
    pub fn volume(&self) -> u64 {
        self.axes.iter().map(|a| a.n).product()
    }

    /// The part in the output tensor's C-ordered elements.
    pub fn dst(&self) -> Spread {
        Spread::new(self.dst_base, self.axes.iter().map(|a| a.dst).collect())
    }
}

/// What stands where no part reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fill {
    /// Parts cover every element.
    None,
    /// Zeros: padding.
    Zero,
    /// Negative zeros: the neutral term of a sum that must keep the sign of a zero.
    NegativeZero,
    /// This number, which the element type has: a counter that no tensor of the source is.
    Number(u32),
}

/// An output tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Boxes that make it, disjoint.
    pub parts: Vec<Part>,
    /// What stands elsewhere.
    pub fill: Fill,
    /// Index into [`Plan::files`].
    pub file: u32,
    /// Offset of its first byte in that file.
    pub offset: u64,
    /// Name in that file, where it is another one (keys joined by dots).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

impl Output {
    /// Name in its file.
    pub fn key(&self) -> &str {
        self.key.as_deref().unwrap_or(&self.name)
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        element_count(&self.shape).unwrap_or(0)
    }

    /// Bytes.
    pub fn nbytes(&self) -> u64 {
        self.elements() * self.dtype.size() as u64
    }
}

/// A region of the sources that no output takes and that should be zero (vocabulary padding).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PadRegion {
    /// Index into [`Plan::stored`].
    pub stored: u32,
    /// Axes; `dst` is unused.
    pub axes: Vec<PartAxis>,
    /// First index in each dimension of the stored tensor.
    pub src_base: Vec<u64>,
}

/// What an output file is besides the bytes of its outputs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// A header, then the tensors one after another.
    #[default]
    Safetensors,
    /// A file as `torch.save` writes it, that holds this value.
    TorchZip(Tree),
    /// Files of that kind one after another, one for each value (`.distcp`).
    Records(Vec<Tree>),
    /// A bare pickle of this value.
    Pickle(Tree),
    /// A copy of this source file (index into [`Plan::sources`]), a torch zip, in which the outputs
    /// replace bytes of storages.
    Overlay(u32),
    /// No file but a store of arrays, which a writer of such stores makes.
    Arrays(ArrayStore),
}

/// A store of arrays in blocks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ArrayStore {
    /// What its writer must know.
    pub how: serde_json::Value,
    /// Extent of a block of each array, by its name in the store. A block is a run of C-ordered elements.
    pub blocks: BTreeMap<String, Vec<u64>>,
}

impl Form {
    fn is_safetensors(&self) -> bool {
        *self == Form::Safetensors
    }
}

/// An output file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutFile {
    /// Path, relative to the result, with `/` between its parts.
    pub name: String,
    /// Bytes before the data of the first tensor.
    pub header_len: u64,
    /// Bytes in all.
    pub size: u64,
    /// What it is besides.
    #[serde(default, skip_serializing_if = "Form::is_safetensors")]
    pub form: Form,
    /// In an overlay: offsets and lengths of numbers of the pickle that become zero.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zeros: Vec<(u64, u64)>,
}

/// The plan.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Plan {
    /// [`PLAN_VERSION`].
    pub version: u32,
    /// What the plan makes, in words: `merge`, `hf`, ...
    pub target: String,
    /// Source files.
    pub sources: Vec<PlanFile>,
    /// Data ranges of the source files.
    pub blobs: Vec<PlanBlob>,
    /// Tensors of the sources.
    pub stored: Vec<StoredTensor>,
    /// Names of the rules that `stored` refers to.
    pub rules: Vec<String>,
    /// Output tensors, in file order.
    pub outputs: Vec<Output>,
    /// Output files.
    pub files: Vec<OutFile>,
    /// Regions that should be zero.
    pub pads: Vec<PadRegion>,
    /// Stored tensors that must repeat another one: (first, copy).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<(u32, u32)>,
    /// True if a tensor that differs from its twin is a warning and no error.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub twins_may_differ: bool,
    /// True if layers may hold what other layers hold (a warning then).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub layers_may_repeat: bool,
    /// True if a head that equals the embedding is not tied to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub untied: bool,
    /// Glob patterns of files that were copied on purpose.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies_accepted: Vec<String>,
    /// True if NaN and infinite values are taken as they are.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub non_finite_accepted: bool,
    /// Small text files written besides, by name (config.json and the like).
    pub texts: BTreeMap<String, String>,
    /// The index among the files of the result, which names the file of each tensor; none where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<String>,
    /// Top-level names that appear after all others, in this order; readers start from the last.
    pub pointers: Vec<String>,
    /// Degree of each parallel dimension of the source.
    pub topology: BTreeMap<String, u64>,
    /// Extents of the axes, for the reader.
    pub axes: BTreeMap<String, u64>,
    /// What was noted while planning, in words that name files by where they lie; not part of what is made, which is the
    /// same wherever that is.
    #[serde(skip)]
    pub notes: Vec<Finding>,
    /// Roots as given, for messages; not part of the document.
    #[serde(skip)]
    pub roots: Vec<String>,
    /// What names of tensors tell; not part of the document.
    #[serde(skip)]
    pub words: Arc<Words>,
}

struct Digesting(blake3::Hasher);

impl std::io::Write for Digesting {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Plan {
    /// BLAKE3 of the plan's JSON form, hexadecimal: the run's id and its resume key.
    pub fn digest(&self) -> String {
        let mut sink = Digesting(blake3::Hasher::new());
        serde_json::to_writer(&mut sink, self).expect("a plan is plain data");
        sink.0.finalize().to_hex().to_string()
    }

    /// The plan with its notes, as JSON.
    pub fn told(&self) -> String {
        let mut text = serde_json::to_string(self).expect("a plan is plain data");
        text.truncate(text.len() - 1);
        text += ",\"notes\":";
        text += &serde_json::to_string(&self.notes).expect("plain data");
        text.push('}');
        text
    }

    /// A name for each output that no other has: its own, or, where ranks each have one of it, `FILE:KEY`.
    pub fn names(&self) -> Vec<String> {
        let mut count: BTreeMap<&str, u32> = BTreeMap::new();
        self.outputs.iter().for_each(|output| *count.entry(&output.name).or_default() += 1);
        self.outputs
            .iter()
            .map(|output| match count[output.name.as_str()] {
                1 => output.name.clone(),
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

    /// Sets the pointers: those that are stated, else where a reader starts, the index or the first file.
    pub(crate) fn point(&mut self, stated: Vec<String>) {
        let first = || self.files.first()?.name.split('/').next();
        let usual = || self.index.as_deref().or_else(first).map(str::to_string).into_iter().collect();
        self.pointers = if stated.is_empty() { usual() } else { stated };
    }

    /// Bytes of all output files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.size).sum::<u64>()
            + self.texts.values().map(|t| t.len() as u64).sum::<u64>()
    }

    /// What is done to values, in words, and to how many outputs: value ops, casts, sums and means of several sources,
    /// scales of quantised tensors. Empty where every bit is kept.
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
                    if stored.scale.is_some() {
                        here.insert(format!("values of {} by scales", stored.dtype));
                    } else if stored.dtype != output.dtype {
                        here.insert(format!("cast {} to {}", stored.dtype, output.dtype));
                    }
                }
            }
            here.into_iter().for_each(|change| *all.entry(change).or_default() += 1);
        }
        all
    }

    /// Bytes that are read for each byte of the stored tensors that anything is made of: what several outputs take, or what is
    /// compared with a tensor that has been read, is read again.
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
        let held: u64 = looked_at.iter().map(|stored| self.stored[*stored as usize].nbytes()).sum();
        if held == 0 {
            1.0
        } else {
            read as f64 / held as f64
        }
    }

    /// Checks what the engine relies on, wherever the plan came from: indices, bounds, and that each
    /// output's parts have the volume of the output. (That they are disjoint is proven when they are
    /// composed.)
    ///
    /// # Errors
    /// `FS205`/`FS206` naming the output; `FS211` for one that no file can hold.
    pub fn validate(&self) -> Result<()> {
        let mut findings = Vec::new();
        for output in &self.outputs {
            let mut fail = |code, what: &str, expected: String, got: String| {
                findings.push(Finding::new(code, what).tensor(&output.name).expected(expected, got));
            };
            let size = element_count(&output.shape).and_then(|n| n.checked_mul(output.dtype.size() as u64));
            if size.is_none_or(|bytes| bytes > i64::MAX as u64) {
                let shape = format!("{:?} of {}", output.shape, output.dtype);
                fail(codes::BAD_VALUE, "size of a tensor", "fewer than 2^63 bytes".into(), shape);
                continue;
            }
            if let Fill::Number(number) = output.fill {
                if output.dtype.element(number).is_none() {
                    fail(
                        codes::BAD_VALUE,
                        "type of a number",
                        "one that has it".into(),
                        output.dtype.to_string(),
                    );
                }
            }
            let elements = output.elements();
            let mut covered = 0u64;
            for part in &output.parts {
                let Some(stored) =
                    part.sources.iter().map(|&s| self.stored.get(s as usize)).collect::<Option<Vec<_>>>()
                else {
                    fail(codes::HOLE, "a part names a stored tensor that is not there", "".into(), "".into());
                    continue;
                };
                covered += part.volume();
                if part.volume() == 0 {
                    continue;
                }
                let end = part.dst_base + part.axes.iter().map(|a| (a.n - 1) * a.dst).sum::<u64>();
                if end >= elements {
                    fail(
                        codes::OVERLAP,
                        "a part leaves the tensor",
                        format!("{elements} elements"),
                        format!("{end}"),
                    );
                }
                for tensor in stored {
                    let known = tensor
                        .changes
                        .iter()
                        .flat_map(Change::needs)
                        .all(|n| (n as usize) < self.stored.len());
                    let misfit = tensor
                        .changes
                        .iter()
                        .filter(|_| known)
                        .find_map(|c| c.misfit(&tensor.shape, &self.stored));
                    if let Some((_, expected, got)) = misfit {
                        fail(codes::SHAPE, "a factor of an adapter", expected, got);
                    } else if !known {
                        fail(
                            codes::HOLE,
                            "an adapter names a tensor that is not there",
                            "".into(),
                            "".into(),
                        );
                    }
                    let mut last = part.src_base.clone();
                    for axis in &part.axes {
                        if let Some(at) = last.get_mut(axis.dim as usize) {
                            *at += (axis.n - 1) * axis.step;
                        }
                    }
                    if last.len() != tensor.shape.len() || last.iter().zip(&tensor.shape).any(|(l, n)| l >= n)
                    {
                        fail(
                            codes::HOLE,
                            "a part reads outside its source",
                            format!("{} {:?}", tensor.name, tensor.shape),
                            format!("{last:?}"),
                        );
                    }
                }
            }
            if covered > elements || (covered < elements && output.fill == Fill::None) {
                let code = if covered > elements { codes::OVERLAP } else { codes::HOLE };
                fail(code, "elements covered", elements.to_string(), covered.to_string());
            }
        }
        let files = self.files.iter().map(|f| &f.name).chain(self.texts.keys()).chain(&self.index);
        let top: BTreeSet<&str> = files.filter_map(|name| name.split('/').next()).collect();
        for name in self.pointers.iter().filter(|name| !top.contains(name.as_str())) {
            findings.push(
                Finding::new(codes::BAD_VALUE, "the plan's last name is of no file of the result").file(name),
            );
        }
        if findings.is_empty() {
            Ok(())
        } else {
            Err(findings.into())
        }
    }

    /// Whole stored tensors as outputs, for hashing what is there: one output per stored tensor.
    pub fn identity_outputs(&self) -> Vec<Output> {
        self.stored
            .iter()
            .enumerate()
            .map(|(i, tensor)| {
                let axes = tensor
                    .shape
                    .iter()
                    .zip(c_strides(&tensor.shape))
                    .enumerate()
                    .map(|(dim, (&n, dst))| PartAxis { n, dst, dim: dim as u32, step: 1 })
                    .collect();
                Output {
                    name: tensor.name.clone(),
                    dtype: tensor.dtype,
                    shape: tensor.shape.clone(),
                    parts: vec![Part {
                        axes,
                        dst_base: 0,
                        src_base: vec![0; tensor.shape.len()],
                        sources: vec![i as u32],
                        combine: Combine::Equal,
                        ops: Vec::new(),
                    }],
                    fill: Fill::None,
                    file: 0,
                    offset: 0,
                    key: None,
                }
            })
            .collect()
    }
}

impl Plan {
    /// A source file as messages name it: by its root too, where there are several.
    pub fn label(&self, file: u32) -> String {
        let file = &self.sources[file as usize];
        match self.roots.get(file.root as usize) {
            Some(root) if self.roots.len() > 1 => format!("{root}/{}", file.path),
            _ => file.path.clone(),
        }
    }

    /// The file that a stored tensor lies in (its first, where there are several).
    pub fn file_of(&self, stored: &StoredTensor) -> &PlanFile {
        let blob = match &stored.pieces {
            Pieces::View { blob, .. } => Some(*blob),
            Pieces::Boxes(pieces) => pieces.first().map(|p| p.blob),
            Pieces::Ranges(pieces) => pieces.first().map(|p| p.blob),
        };
        &self.sources[blob.map_or(0, |b| self.blobs[b as usize].file as usize)]
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
