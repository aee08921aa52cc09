//! The outputs of a plan: tensors made from parts of stored ones, and their files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::boxes::Spread;
use crate::few::Few;
use crate::format::pickle::writer::Tree;
use crate::name::Name;
use crate::tensor::{element_count, Dtype};

/// An axis of a part: its steps in the destination and in the source.
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

/// The way in which the sources of a part make one value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Combine {
    /// One source, or several that must be bit-equal: the first is taken.
    Equal,
    /// Sources are averaged in float32 in the order given, rounded once.
    Mean,
    /// Sources are summed in float32 in the order given, rounded once.
    Sum,
    /// Sum or copy, depending on an unknown fact: all elements must be zero.
    Zero(Box<str>),
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

/// A box of an output tensor, and the sources of its values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Axes by falling `dst` step.
    pub axes: Box<[PartAxis]>,
    /// First element in the output tensor.
    pub dst_base: u64,
    /// First index in each dimension of the stored tensors.
    pub src_base: Few<u64>,
    /// Indices into [`Plan::stored`]; all have the same shape.
    pub sources: Few<u32>,
    /// The way in which several sources make one value.
    pub combine: Combine,
    /// Value ops.
    #[serde(default, skip_serializing_if = "<[Op]>::is_empty")]
    pub ops: Box<[Op]>,
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

/// The value of elements that no part covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fill {
    /// Parts cover every element.
    None,
    /// Zeros: padding.
    Zero,
    /// Negative zeros: the neutral term of a sum that must keep the sign of a zero.
    NegativeZero,
    /// This number, which the element type can represent: a counter that comes from no tensor of the source.
    Number(u32),
}

/// An output tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// Name.
    pub name: Name,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Few<u64>,
    /// Boxes that make it, disjoint.
    pub parts: Box<[Part]>,
    /// The value of all other elements.
    pub fill: Fill,
    /// Index into [`Plan::files`].
    pub file: u32,
    /// Offset of its first byte in that file.
    pub offset: u64,
    /// Name in that file, if it differs (keys joined by dots).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Box<str>>,
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
    pub axes: Box<[PartAxis]>,
    /// First index in each dimension of the stored tensor.
    pub src_base: Few<u64>,
}

/// The format of an output file around the bytes of its outputs.
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
    /// A store of arrays instead of a file, which a writer of such stores makes.
    Arrays(ArrayStore),
}

/// A store of arrays in blocks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ArrayStore {
    /// Parameters for its writer.
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
    /// Its format.
    #[serde(default, skip_serializing_if = "Form::is_safetensors")]
    pub form: Form,
    /// In an overlay: offsets and lengths of numbers of the pickle that become zero.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zeros: Vec<(u64, u64)>,
}
