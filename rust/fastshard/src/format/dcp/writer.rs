//! `.metadata` of torch.distributed.checkpoint, for records that are laid out already.
//!
//! source: torch/distributed/checkpoint/metadata.py (`Metadata`, `TensorProperties.__getstate__`),
//! filesystem.py (`_StorageInfo`)

use std::collections::HashMap;

use serde::Deserialize;

use crate::codes;
use crate::error::{Finding, Result};
use crate::format::pickle::writer::Tree;
use crate::tensor::Dtype;

const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";

/// A name in the metadata.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Fully qualified name.
    pub name: String,
    /// Shape of the whole tensor; none for what is no tensor, whose record is called by the name.
    #[serde(default)]
    pub shape: Option<Vec<u64>>,
    /// (record, first index) of each chunk.
    #[serde(default)]
    pub chunks: Vec<(String, Vec<u64>)>,
}

/// Where a record lies.
#[derive(Debug)]
pub struct Place {
    /// File, relative to the result.
    pub file: String,
    /// Offset in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Of a tensor.
    pub tensor: Option<(Dtype, Vec<u64>)>,
}

/// What `.metadata` holds. `path` is its own, relative to the result.
///
/// # Errors
/// Records that are not there or lie outside of its folder, and chunks of several dtypes.
pub fn metadata(entries: &[Entry], records: &HashMap<String, Place>, path: &str) -> Result<Tree> {
    let folder = path.rfind('/').map_or("", |end| &path[..=end]);
    let refuse = |what: &str, name: &str| Finding::new(codes::MISSING_TENSOR, what).file(path).tensor(name);
    let mut described = Vec::with_capacity(entries.len());
    let mut stored = Vec::with_capacity(entries.len());
    let mut store = |name: &str, lo: Option<&[u64]>, place: &Place| -> Result<()> {
        let file = place.file.strip_prefix(folder);
        let file = file.ok_or_else(|| refuse("the record is in another folder", name))?;
        stored.push(storage(name, lo, file, place));
        Ok(())
    };
    for entry in entries {
        let name = &entry.name;
        let lookup = |key: &str| -> Result<&Place> {
            Ok(records.get(key).ok_or_else(|| refuse("no file of the result has this record", key))?)
        };
        let Some(shape) = &entry.shape else {
            store(name, None, lookup(name)?)?;
            described.push((
                Tree::Str(name.clone()),
                object(METADATA, "BytesStorageMetadata", fields(Vec::new())),
            ));
            continue;
        };
        let mut dtype = None;
        let mut chunks = Vec::with_capacity(entry.chunks.len());
        for (key, lo) in &entry.chunks {
            let place = lookup(key)?;
            let Some((kind, sizes)) = &place.tensor else {
                return Err(refuse("the record is no tensor", key).into());
            };
            if *dtype.get_or_insert(*kind) != *kind {
                return Err(refuse("its chunks have several dtypes", name).into());
            }
            store(name, Some(lo), place)?;
            let chunk =
                fields(vec![("offsets", Tree::Size(lo.clone())), ("sizes", Tree::Size(sizes.clone()))]);
            chunks.push(object(METADATA, "ChunkStorageMetadata", chunk));
        }
        let dtype = dtype.ok_or_else(|| refuse("it has no chunk", name))?;
        let tensor = fields(vec![
            ("properties", properties(dtype)),
            ("size", Tree::Size(shape.clone())),
            ("chunks", Tree::List(chunks)),
        ]);
        described.push((Tree::Str(name.clone()), object(METADATA, "TensorStorageMetadata", tensor)));
    }
    let root = fields(vec![
        ("state_dict_metadata", Tree::Dict(described)),
        ("planner_data", Tree::None),
        ("storage_data", Tree::Dict(stored)),
        ("storage_meta", Tree::None),
        ("version", Tree::Str("1.0.0".into())),
    ]);
    Ok(object(METADATA, "Metadata", root))
}

/// Which part of which tensor a record is, and where it lies.
fn storage(name: &str, lo: Option<&[u64]>, file: &str, place: &Place) -> (Tree, Tree) {
    let index = fields(vec![
        ("fqn", Tree::Str(name.into())),
        ("offset", lo.map_or(Tree::None, |lo| Tree::Size(lo.to_vec()))),
        ("index", Tree::None),
    ]);
    let info = fields(vec![
        ("relative_path", Tree::Str(file.into())),
        ("offset", Tree::Int(place.offset as i64)),
        ("length", Tree::Int(place.len as i64)),
        ("transform_descriptors", Tree::None),
    ]);
    (object(METADATA, "MetadataIndex", index), object(FILESYSTEM, "_StorageInfo", info))
}

/// Dtype, layout, `requires_grad`, memory format and pinning, as its state is pickled.
fn properties(dtype: Dtype) -> Tree {
    let layout = Tree::Call(
        "torch.serialization".into(),
        "_get_layout".into(),
        vec![Tree::Str("torch.strided".into())],
    );
    let contiguous = Tree::Call(METADATA.into(), "_MEM_FORMAT_ENCODING".into(), vec![Tree::Int(0)]);
    let state = vec![
        Tree::Global("torch".into(), dtype.torch_name().into()),
        layout,
        Tree::Bool(false),
        contiguous,
        Tree::Bool(false),
    ];
    object(METADATA, "TensorProperties", Tree::Tuple(state))
}

fn fields(items: Vec<(&str, Tree)>) -> Tree {
    Tree::Dict(items.into_iter().map(|(k, v)| (Tree::Str(k.into()), v)).collect())
}

fn object(module: &str, class: &str, state: Tree) -> Tree {
    Tree::Object(module.into(), class.into(), Box::new(state))
}
