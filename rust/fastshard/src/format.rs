//! Bytes to named arrays: what every reader yields.
//!
//! A reader turns one file into a [`ParsedFile`]: blobs (ranges of bytes with their checksum),
//! tensors (views over blobs) and the values that are not tensors. No reader looks at payload
//! bytes, knows a framework, or executes anything.

pub mod blocks;
pub mod dcp;
pub mod inflate;
pub mod packed;
pub mod pickle;
mod region;
pub mod safetensors;
pub mod stand_in;
pub mod torch_zip;
pub mod vocabulary;
pub(crate) mod zip;
pub mod zstd;

use serde::Serialize;

use crate::codes;
use crate::error::{Finding, Result};
use crate::few::Few;
use crate::name::Keys;
use crate::storage::SourceFile;
use crate::tensor::Dtype;
use crate::value::Values;

/// A range of a file's bytes that holds tensor data, with the checksum the container keeps for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Blob {
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Bytes in the file (compressed size if deflated); for a block of a store, the bytes that decoding it
    /// takes.
    pub stored_len: u64,
    /// Bytes of data.
    pub len: u64,
    /// CRC32 (ISO-HDLC, as in zip) of the data, where the container has one.
    pub crc32: Option<u32>,
    /// True if the bytes are compressed: by deflate, unless `zstd` says otherwise.
    pub deflated: bool,
    /// For data in a Zstandard stream; the range of the file is then that of the stream.
    pub zstd: Option<Box<zstd::Zstd>>,
    /// True for a block of a store that its reader decodes by the name in `member`; it then has no place in a
    /// file.
    pub encoded: bool,
    /// Name of the member in the container, for messages.
    pub member: Option<Box<str>>,
}

/// A tensor as one file stores it: a strided view over a blob, checked to lie inside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileTensor {
    /// Keys from the file's root to the tensor, e.g. `["module", "sequential.0.word_embeddings.weight"]`.
    pub path: Keys,
    /// Element type.
    pub dtype: Dtype,
    /// Shape; empty for 0-d.
    pub shape: Few<u64>,
    /// Strides in elements; C-order unless the tensor is a view (0 for expanded dimensions).
    pub strides: Few<u64>,
    /// Index into [`ParsedFile::blobs`].
    pub blob: u32,
    /// Offset in the blob's data, in bytes.
    pub offset: u64,
    /// Its role in a model.
    pub role: Role,
}

/// The role of a file's tensor in a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub enum Role {
    /// An independent tensor.
    #[default]
    Whole,
    /// Codes of eight bits, whose values are made with one scale and rounded to this type.
    Codes(Dtype),
    /// A scale of codes; the scales of a file are its last tensors, in the order of the codes.
    Scale,
}

impl FileTensor {
    /// Element type of its values.
    pub fn value_dtype(&self) -> Dtype {
        match self.role {
            Role::Codes(dtype) => dtype,
            _ => self.dtype,
        }
    }
}

/// The tensors of which a rank's file holds a part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Distributed {
    /// Meshes, each once.
    pub meshes: Vec<Mesh>,
    /// Parts, in the file's order.
    pub parts: Vec<Part>,
}

/// A mesh of ranks, and the place in it of the rank that wrote the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Mesh {
    /// Ranks along each dimension.
    pub shape: Vec<u64>,
    /// Names of the dimensions.
    pub names: Option<Vec<String>>,
    /// The rank's place; absent if it is not in the mesh.
    pub coordinate: Option<Vec<u64>>,
    /// The rank's number in the run, if it is stated.
    pub rank: Option<u64>,
    /// Ranks of the run, or of this mesh of it.
    pub ranks: Option<u64>,
}

/// A tensor of which a file holds only a part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Keys from the file's root; the local tensors are listed under them.
    pub path: Vec<String>,
    /// Shape of the whole.
    pub shape: Vec<u64>,
    /// Which part it is.
    #[serde(flatten)]
    pub of: Of,
}

/// The description of a part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Of {
    /// By a placement for each dimension of a mesh.
    Placed {
        /// Index into [`Distributed::meshes`].
        mesh: u32,
        /// Placements.
        placements: Vec<Placement>,
        /// (dimension of the tensor, dimensions of the mesh in the order in which they divide it), where it is told.
        order: Option<Vec<(u64, Vec<u64>)>>,
        /// Index into [`ParsedFile::tensors`].
        tensor: u32,
    },
    /// By the place of each shard.
    Sharded {
        /// The rank that wrote the file, and how many there were.
        rank: Option<u64>,
        /// Ranks of the run.
        ranks: Option<u64>,
        /// The rank's own; a rank may have none.
        shards: Vec<Shard>,
    },
}

/// The effect of a mesh dimension on a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Placement {
    /// All ranks hold the same.
    Replicate,
    /// A dimension is divided as `torch.chunk` divides.
    Shard {
        /// The dimension.
        dim: u64,
    },
    /// A dimension is divided after others have divided it into `split` pieces.
    Strided {
        /// The dimension.
        dim: u64,
        /// Pieces before this division.
        split: u64,
    },
    /// Terms of a reduction that was not carried out.
    Partial,
}

/// A box of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Shard {
    /// First index.
    pub lo: Vec<u64>,
    /// Extent.
    pub size: Vec<u64>,
    /// Index into [`ParsedFile::tensors`].
    pub tensor: u32,
}

/// The content of a file to write, without the bytes that come later.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frame {
    /// Known bytes: (offset, bytes), by rising offset.
    pub pieces: Vec<(u64, Vec<u8>)>,
    /// Ranges that are filled later and whose checksum the file names, by rising offset.
    pub members: Vec<Member>,
    /// Bytes of the file.
    pub size: u64,
}

/// A range of a file whose CRC32 is written into the file once its last byte is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Offset of its first byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The places for its CRC32, four bytes each, little-endian.
    pub crc_at: Vec<u64>,
}

/// The content that a reader found in one file.
#[derive(Debug)]
pub struct ParsedFile {
    /// `safetensors`, `torch_zip`, or `blocks`.
    pub format: &'static str,
    /// Ranges of tensor data.
    pub blobs: Vec<Blob>,
    /// Tensors, in the file's order.
    pub tensors: Vec<FileTensor>,
    /// Everything that is not a tensor; tensors appear in it by their index.
    pub values: Values,
    /// Tensors that are parts of larger ones.
    pub distributed: Distributed,
    /// The name that the archive was given when it was saved (torch zips: the file's stem).
    pub archive: Option<String>,
    /// BLAKE3 of the header bytes (JSON header, or pickle and member table).
    pub header_digest: [u8; 32],
}

impl ParsedFile {
    /// The tensors that a model may have; scales belong to their codes.
    pub fn named(&self) -> impl Iterator<Item = &FileTensor> {
        self.tensors[..self.named_count()].iter()
    }

    /// The number of tensors that a model may have; they come first.
    pub fn named_count(&self) -> usize {
        self.tensors.partition_point(|tensor| tensor.role != Role::Scale)
    }

    /// Tensors that are parts of larger ones, or terms of sums, and must not be taken for full tensors.
    pub fn partial(&self) -> impl Iterator<Item = &Part> {
        self.distributed.parts.iter().filter(|part| {
            let is_whole = |tensor: u32| self.tensors[tensor as usize].shape == part.shape;
            match &part.of {
                Of::Placed { placements, tensor, .. } => {
                    !is_whole(*tensor) || placements.contains(&Placement::Partial)
                }
                Of::Sharded { shards, .. } => shards.len() != 1 || !is_whole(shards[0].tensor),
            }
        })
    }
}

/// Reads the header of a file, by its first bytes: a torch zip or a safetensors file.
pub fn parse(file: &SourceFile) -> Result<ParsedFile> {
    if file.size() == 0 {
        return Err(Finding::new(codes::TRUNCATED, "the file is empty").file(file.path()).into());
    }
    let mut magic = [0u8; 16];
    let n = (file.size() as usize).min(16);
    file.read_at(0, &mut magic[..n])?;
    if magic.starts_with(b"PK\x03\x04") || magic.starts_with(b"PK\x05\x06") {
        torch_zip::parse_archive(file, &zip::Archive::read(file, 0, file.size())?)
    } else if magic[0] == 0x80 && (2..=5).contains(&magic[1]) && !(magic[4..8] == [0; 4] && magic[8] == b'{')
    {
        // A safetensors header of 640, 896, 1152 or 1408 bytes begins like a pickle, and goes on with zeros.
        Err(torch_zip::legacy_refusal(file))
    } else {
        safetensors::parse(file)
    }
}
