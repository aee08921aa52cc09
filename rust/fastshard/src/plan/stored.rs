//! The sources of a plan: files, ranges of their bytes, and tensors made from these.

use serde::{Deserialize, Serialize};

use super::{Change, Coded, PartAxis};
use crate::few::Few;
use crate::format::zstd::Zstd;
use crate::format::Blob;
use crate::name::Name;
use crate::tensor::{c_strides, element_count, Dtype};

/// The record of a source file in the plan.
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

/// A range of a source file that contains pieces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanBlob {
    /// Index into [`Plan::sources`].
    pub file: u32,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Bytes in the file; for a block of a store, the bytes that decoding it takes.
    pub stored_len: u64,
    /// Bytes of data.
    pub len: u64,
    /// CRC32 of the data, if the container has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc32: Option<u32>,
    /// True if the bytes are compressed: by deflate, unless `zstd` says otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deflated: bool,
    /// For data in a Zstandard stream; the range of the file is then that of the stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zstd: Option<Box<Zstd>>,
    /// True for a block of a store that its reader decodes by the name in `member`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encoded: bool,
    /// Name of the member in the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<Box<str>>,
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
            zstd: blob.zstd.clone(),
            encoded: blob.encoded,
            member: blob.member.clone(),
        }
    }
}

/// The places of a stored tensor's elements.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pieces {
    /// One strided view over a blob: byte offset in its data and strides in elements.
    View {
        /// Index into [`Plan::blobs`].
        blob: u32,
        /// Byte offset in the blob's data.
        offset: u64,
        /// Strides in elements.
        strides: Few<u64>,
    },
    /// Boxes that tile the tensor (DCP chunks, zarr blocks).
    Boxes(Vec<BoxPiece>),
    /// Ranges that tile the tensor's C-ordered elements (flat optimizer partitions), sorted by `start`.
    Ranges(Vec<RangePiece>),
    /// No place: they are the values of codes, as float32.
    Coded(Box<Coded>),
}

impl Pieces {
    /// The blobs of the pieces, in order, for renumbering.
    pub(crate) fn blobs_mut(&mut self) -> impl Iterator<Item = &mut u32> {
        let (view, boxes, ranges) = match self {
            Pieces::View { blob, .. } => (Some(blob), [].iter_mut(), [].iter_mut()),
            Pieces::Boxes(boxes) => (None, boxes.iter_mut(), [].iter_mut()),
            Pieces::Ranges(ranges) => (None, [].iter_mut(), ranges.iter_mut()),
            Pieces::Coded(_) => (None, [].iter_mut(), [].iter_mut()),
        };
        let boxes = boxes.map(|piece: &mut BoxPiece| &mut piece.blob);
        view.into_iter().chain(boxes).chain(ranges.map(|piece: &mut RangePiece| &mut piece.blob))
    }
}

/// One box of a stored tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoxPiece {
    /// First index in each dimension.
    pub lo: Few<u64>,
    /// Extent in each dimension.
    pub len: Few<u64>,
    /// Index into [`Plan::blobs`].
    pub blob: u32,
    /// Byte offset in the blob's data.
    pub offset: u64,
    /// Strides in elements, if the box is not C-ordered.
    #[serde(default, skip_serializing_if = "<[u64]>::is_empty")]
    pub strides: Few<u64>,
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
    pub name: Name,
    /// Element type.
    pub dtype: Dtype,
    /// Shape on its rank.
    pub shape: Few<u64>,
    /// The places of its elements.
    pub pieces: Pieces,
    /// Rank in the field's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<Box<str>>,
    /// The rule it was matched to: tensors of one rule are alike over layers and ranks.
    pub rule: u32,
    /// Position on the axes bound by its name, e.g. the layer; counted from the rank's first if ranks divide
    /// the axis.
    pub index: Few<u64>,
    /// Number of its part, if the rule divides the tensor over ranks: the tensor-parallel rank, or one for
    /// each pair of ranks if two dimensions divide it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<u64>,
    /// The same tensor in another precision (a parameter and its fp32 master weights): the wider of the two,
    /// rounded, must be the narrower one.
    #[serde(default, skip_serializing_if = "<[u32]>::is_empty")]
    pub twins: Few<u32>,
    /// The changes that adapters make to its values, one after another.
    #[serde(default, skip_serializing_if = "<[Change]>::is_empty")]
    pub changes: Box<[Change]>,
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
            Pieces::Coded(coded) => coded.strides(&self.shape).into(),
            _ => c_strides(&self.shape),
        };
        axes.iter().map(|a| a.step * strides[a.dim as usize]).collect()
    }
}
