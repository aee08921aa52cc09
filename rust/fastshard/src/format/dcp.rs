//! `.metadata` of torch.distributed.checkpoint: which tensors there are, in which chunks, and where.
//!
//! A bare pickle of plain dataclasses (torch/distributed/checkpoint/metadata.py, filesystem.py), read by
//! the inert machine. The `.distcp` files themselves are records one after another, each a whole torch
//! zip, or a stream that holds one; see [`records`].

mod streams;
pub mod writer;

use std::collections::HashMap;

use serde::Serialize;

use super::{pickle, torch_zip, Distributed, ParsedFile, Role};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::name::Name;
use crate::storage::SourceFile;
use crate::value::{Node, Value, Values};

/// What `.metadata` says.
#[derive(Debug, Default, Serialize)]
pub struct Metadata {
    /// Tensors, in the file's order.
    pub tensors: Vec<TensorEntry>,
    /// Names of what is no tensor.
    pub objects: Vec<String>,
    /// Where each chunk (or object) is stored.
    pub stored: Vec<StoredAt>,
    /// Version that wrote it, if it is told.
    pub version: Option<String>,
}

/// A tensor and its chunks.
#[derive(Debug, Serialize)]
pub struct TensorEntry {
    /// Fully qualified name.
    pub name: String,
    /// torch name of the element type, e.g. `bfloat16`.
    pub dtype: Option<String>,
    /// Keys of the nested state dict that lead to it, the last of them the module's own name; none where the planner left
    /// nothing of that. source: torch/distributed/checkpoint/{default_planner,_nested_dict}.py
    pub path: Option<Vec<String>>,
    /// Shape of the whole.
    pub shape: Vec<u64>,
    /// (first index, extent) of each chunk.
    pub chunks: Vec<(Vec<u64>, Vec<u64>)>,
}

/// A record of a file.
#[derive(Debug, Serialize)]
pub struct StoredAt {
    /// Fully qualified name.
    pub name: String,
    /// First index of the chunk; none for what is no tensor.
    pub at: Option<Vec<u64>>,
    /// File, relative to the folder.
    pub file: String,
    /// Offset of the record in the file.
    pub offset: u64,
    /// Bytes of the record.
    pub len: u64,
    /// What the bytes went through when they were written (compression), the last first.
    pub transforms: Vec<String>,
}

/// The opcode that ends a pickle.
const STOP: u8 = b'.';

struct Reader<'a> {
    values: &'a Values,
    file: &'a SourceFile,
}

/// Reads a `.metadata` file.
///
/// # Errors
/// `FS602` for a pickle that is none or exceeds the limits, or that is no metadata of DCP.
pub fn metadata(file: &SourceFile) -> Result<Metadata> {
    let len = usize::try_from(file.size()).unwrap_or(usize::MAX);
    if len > pickle::LIMITS.stream {
        return Err(Finding::new(codes::UNSAFE_PICKLE, "size of the metadata")
            .file(file.path())
            .expected(format!("at most {} bytes", pickle::LIMITS.stream), len)
            .into());
    }
    let bytes = file.read_vec(0, len)?;
    let pickle = pickle::parse_bytes(&bytes, file.path()).map_err(|error| match bytes.last() {
        None | Some(&STOP) => error,
        _ if error.is_of_memory() => error,
        Some(_) => Finding::new(codes::TRUNCATED, "the file is truncated")
            .file(file.path())
            .expected("a pickle that ends with STOP", format!("{len} bytes that end otherwise"))
            .help("copy .metadata again from the node that wrote it")
            .into(),
    })?;
    let reader = Reader { values: &pickle.values, file };
    reader.metadata(pickle.values.root())
}

impl Reader<'_> {
    fn refuse(&self, what: &str) -> Error {
        Finding::new(
            codes::UNSAFE_PICKLE,
            format!("not the metadata of torch.distributed.checkpoint: {what}"),
        )
        .file(self.file.path())
        .help("copy .metadata again from the node that wrote it")
        .into()
    }

    /// State of an object, whatever its class.
    fn state(&self, node: Node) -> Option<Node> {
        match self.values.get(node) {
            Value::Record { state, .. } => *state,
            _ => None,
        }
    }

    fn field(&self, object: Node, name: &str) -> Option<Node> {
        self.values.lookup(self.state(object)?, name)
    }

    fn class(&self, node: Node) -> &str {
        match self.values.get(node) {
            Value::Record { class, .. } => match self.values.get(*class) {
                Value::Global(name) => name.rsplit('.').next().unwrap_or(name),
                _ => "",
            },
            _ => "",
        }
    }

    fn text(&self, node: Option<Node>) -> Option<String> {
        match self.values.get(node?) {
            Value::Str(text) => Some(text.clone()),
            _ => None,
        }
    }

    fn number(&self, node: Option<Node>) -> Option<u64> {
        match self.values.get(node?) {
            Value::Int(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// A `torch.Size`, or any sequence of sizes.
    fn sizes(&self, node: Option<Node>) -> Option<Vec<u64>> {
        match self.values.get(node?) {
            Value::Tuple(items) | Value::List(items) => items.iter().map(|&n| self.number(Some(n))).collect(),
            // torch.Size as an object: its one argument is the sequence.
            Value::Record { args, .. } => match self.values.get(*args) {
                Value::Tuple(args) if args.len() == 1 => self.sizes(args.first().copied()),
                _ => None,
            },
            _ => None,
        }
    }

    fn items(&self, node: Option<Node>) -> Option<&[(Node, Node)]> {
        match self.values.get(node?) {
            Value::Dict(items) => Some(items),
            _ => None,
        }
    }

    /// Reads the flat names in `planner_data`: the keys that they were made of, joined by dots.
    fn paths(&self, root: Node) -> HashMap<&str, Vec<String>> {
        let entries = self.items(self.field(root, "planner_data")).unwrap_or_default();
        let path = |&(key, value): &(Node, Node)| {
            let Value::Str(name) = self.values.get(key) else { return None };
            let (Value::Tuple(keys) | Value::List(keys)) = self.values.get(value) else { return None };
            let key = |&key: &Node| match self.values.get(key) {
                Value::Str(text) => Some(text.clone()),
                Value::Int(number) => Some(number.to_string()),
                _ => None,
            };
            let keys: Vec<String> = keys.iter().map(key).collect::<Option<_>>()?;
            // Of what is put together otherwise nothing is known.
            (keys.join(".") == *name).then_some((name.as_str(), keys))
        };
        entries.iter().filter_map(path).collect()
    }

    fn metadata(&self, root: Node) -> Result<Metadata> {
        let mut out = Metadata { version: self.text(self.field(root, "version")), ..Metadata::default() };
        let tensors = self
            .items(self.field(root, "state_dict_metadata"))
            .ok_or_else(|| self.refuse("no state_dict_metadata"))?;
        let mut paths = self.paths(root);
        for &(key, value) in tensors {
            let name = self.text(Some(key)).ok_or_else(|| self.refuse("a name that is no text"))?;
            if self.class(value) == "BytesStorageMetadata" {
                out.objects.push(name);
                continue;
            }
            let shape = self.sizes(self.field(value, "size"));
            let Some(Value::List(chunks)) = self.field(value, "chunks").map(|n| self.values.get(n)) else {
                return Err(self.refuse(&format!("{name} has no chunks")));
            };
            let chunks: Option<Vec<_>> = chunks
                .iter()
                .map(|&c| Some((self.sizes(self.field(c, "offsets"))?, self.sizes(self.field(c, "sizes"))?)))
                .collect();
            let (Some(shape), Some(chunks)) = (shape, chunks) else {
                return Err(self.refuse(&format!("sizes of {name}")));
            };
            let dtype = self.field(value, "properties").and_then(|p| self.dtype(p));
            let path = paths.remove(name.as_str());
            out.tensors.push(TensorEntry { name, dtype, path, shape, chunks });
        }
        let stored =
            self.items(self.field(root, "storage_data")).ok_or_else(|| self.refuse("no storage_data"))?;
        for &(key, value) in stored {
            let place = || {
                let transforms = self.field(value, "transform_descriptors");
                Some(StoredAt {
                    name: self.text(self.field(key, "fqn"))?,
                    at: self.sizes(self.field(key, "offset")),
                    file: self.text(self.field(value, "relative_path"))?,
                    offset: self.number(self.field(value, "offset"))?,
                    len: self.number(self.field(value, "length"))?,
                    transforms: match transforms.map(|t| self.values.get(t)) {
                        None | Some(Value::None) => Vec::new(),
                        Some(Value::List(items) | Value::Tuple(items)) => {
                            items.iter().map(|&item| self.text(Some(item))).collect::<Option<_>>()?
                        }
                        Some(_) => return None,
                    },
                })
            };
            out.stored.push(place().ok_or_else(|| self.refuse("an entry of storage_data"))?);
        }
        Ok(out)
    }

    /// The element type among a tensor's properties: a field, or the first of the pickled tuple.
    fn dtype(&self, properties: Node) -> Option<String> {
        let state = self.state(properties)?;
        let node = match self.values.get(state) {
            Value::Tuple(items) => *items.first()?,
            _ => self.values.lookup(state, "dtype")?,
        };
        match self.values.get(node) {
            Value::Global(name) => Some(name.rsplit('.').next().unwrap_or(name).to_string()),
            _ => None,
        }
    }
}

/// The value of a record that is no tensor, as plain data.
///
/// # Errors
/// As for any torch file; `FS602` for more values than are looked at.
pub fn object(file: &SourceFile, offset: u64, len: u64) -> Result<serde_json::Value> {
    let record = match streams::begins(file, offset)? {
        true => streams::parse(file, offset, len)?,
        false => torch_zip::parse_range(file, offset, len)?,
    };
    let (value, whole) = record.values.to_json_whole();
    if whole {
        return Ok(value);
    }
    Err(Finding::new(codes::UNSAFE_PICKLE, "a record holds more values than are looked at")
        .file(file.path())
        .help("choose another step with --step, or leave out --optimizer")
        .into())
}

/// A record of a `.distcp` file: offset, length, what it holds, and if it is a Zstandard stream.
pub type Range = (u64, u64, String, bool);

/// Reads the headers of records of a `.distcp` file. The path of a record's tensors begins with what the
/// record is said to hold; values of records are left out.
pub fn records(file: &SourceFile, ranges: &[Range]) -> Result<ParsedFile> {
    let mut all = ParsedFile {
        archive: None,
        format: "dcp",
        blobs: Vec::new(),
        tensors: Vec::new(),
        values: Values::default(),
        distributed: Distributed::default(),
        header_digest: [0; 32],
    };
    let mut digest = blake3::Hasher::new();
    // In the file's order, whatever that of `.metadata`: who writes a file knows no other.
    let mut ranges: Vec<&Range> = ranges.iter().collect();
    ranges.sort_by_key(|(offset, ..)| *offset);
    for &&(offset, len, ref name, is_stream) in &ranges {
        let record = match is_stream {
            true => streams::parse(file, offset, len)?,
            false => torch_zip::parse_range(file, offset, len)?,
        };
        if record.tensors.iter().any(|tensor| tensor.role != Role::Whole) {
            let message = "a record of Transformer Engine's Float8Tensor is not read";
            return Err(Finding::new(codes::UNSUPPORTED, message)
                .file(file.path())
                .tensor(name)
                .help("convert it with dequantize() and save the file again")
                .into());
        }
        if !record.distributed.parts.is_empty() {
            return Err(Finding::new(
                codes::UNSUPPORTED,
                "a record that is itself a rank's part of a tensor",
            )
            .file(file.path())
            .tensor(name)
            .help("save it again with torch.distributed.checkpoint; torch writes chunks as plain tensors")
            .into());
        }
        let first = all.blobs.len() as u32;
        all.blobs.extend(record.blobs);
        for mut tensor in record.tensors {
            tensor.path = [Name::from(name)].into_iter().chain(tensor.path.iter().cloned()).collect();
            tensor.blob += first;
            all.tensors.push(tensor);
        }
        digest.update(&offset.to_le_bytes());
        digest.update(&record.header_digest);
    }
    all.header_digest = *digest.finalize().as_bytes();
    Ok(all)
}
