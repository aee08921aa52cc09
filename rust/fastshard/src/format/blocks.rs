//! Arrays that a store keeps as encoded blocks (zarr chunks): what its reader lists, as a parsed file.

use std::collections::HashSet;
use std::sync::Arc;

use crate::codes;
use crate::error::{Finding, Result};
use crate::storage::BlockReader;
use crate::tensor::{c_strides, element_count, Dtype};
use crate::value::{Value, Values};

use super::{Blob, Distributed, FileTensor, ParsedFile, Role};

/// The blocks of a store.
#[derive(Debug, Clone)]
pub struct Store {
    /// Key, element type and shape of each block, and the bytes that its decoding takes: what is clipped at the edge of
    /// an array is decoded whole.
    pub blocks: Vec<(String, Dtype, Vec<u64>, u64)>,
    /// What tells this content from another: names, sizes and times of what is stored.
    pub identity: String,
    /// Decodes them.
    pub reader: Arc<dyn BlockReader>,
}

/// The store as a parsed file: each block a tensor, in a blob of its own.
///
/// # Errors
/// `FS515` for a key that is named twice or a block beyond what can be addressed.
pub fn parse(store: &Store) -> Result<ParsedFile> {
    let mut names = HashSet::new();
    let mut blobs = Vec::with_capacity(store.blocks.len());
    let mut tensors = Vec::with_capacity(store.blocks.len());
    for (key, dtype, shape, decoding) in &store.blocks {
        let refuse = |what: &str| Finding::new(codes::USAGE, what).tensor(key);
        if !names.insert(key) {
            return Err(refuse("a block is listed twice").into());
        }
        let len = element_count(shape).and_then(|n| n.checked_mul(dtype.size() as u64));
        let Some(len) = len.filter(|len| *len <= isize::MAX as u64) else {
            return Err(refuse("a block is too large to be addressed").into());
        };
        tensors.push(FileTensor {
            path: [key.as_str()].into_iter().collect(),
            dtype: *dtype,
            shape: shape[..].into(),
            strides: c_strides(shape),
            blob: blobs.len() as u32,
            offset: 0,
            role: Role::Whole,
        });
        blobs.push(Blob {
            offset: 0,
            stored_len: len.max(*decoding),
            len,
            crc32: None,
            deflated: false,
            zstd: None,
            encoded: true,
            member: Some(key.as_str().into()),
        });
    }
    let mut values = Values::default();
    let root = values.push(Value::Dict(Vec::new()));
    values.set_root(root);
    let header_digest = *blake3::hash(store.identity.as_bytes()).as_bytes();
    Ok(ParsedFile {
        format: "blocks",
        blobs,
        tensors,
        values,
        distributed: Distributed::default(),
        archive: None,
        header_digest,
    })
}
