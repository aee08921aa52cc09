//! From the pickle and the members to named tensors, each checked to lie inside its storage.

use std::collections::{HashMap, HashSet};

use super::distributed::{self, Collector};
use super::float8::{self, Float8};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::format::pickle::{Pickle, PickledTensor, Storage};
use crate::format::zip::Archive;
use crate::format::{Blob, FileTensor, ParsedFile, Role};
use crate::storage::SourceFile;
use crate::value::{Node, Value, Values};

/// Bytes of paths and shapes at most: a small stream can name one tensor any number of times.
const MAX_LISTING: usize = 512 << 20;
/// Bytes from which a tensor is looked at for what it repeats, and how often each byte of its storage may count.
const LARGE: u64 = 64 << 20;
const REPEATS: u64 = 1024;
/// Bytes that a tensor takes in the listing besides path and shape.
const TENSOR: usize = 128;

/// Makes the file's listing. Blobs are the members `data/*`, whether a tensor uses them or not.
pub(super) fn assemble(
    file: &SourceFile,
    archive: &Archive,
    prefix: &str,
    pickle: Pickle,
    header_digest: [u8; 32],
) -> Result<ParsedFile> {
    let data = format!("{prefix}data/");
    let mut storages = Storages { file, blobs: Vec::new(), by_key: HashMap::new(), used: HashMap::new() };
    for member in archive.members() {
        if let Some(key) = member.name.strip_prefix(&data).filter(|key| !key.is_empty()) {
            storages.by_key.insert(key.to_string(), storages.blobs.len() as u32);
            storages.blobs.push(member.blob());
        }
    }

    let Pickle { mut values, tensors: pickled, storages: pickled_storages } = pickle;
    let mut tensors: Vec<FileTensor> = Vec::new();
    let mut first = HashMap::new();
    let mut walk = Walk { file, values: &values, steps: Vec::new(), listing: 0 };
    let mut collector = Collector::default();
    let mut wrappers = Vec::new();
    let mut scales = Vec::new();
    let mut seen = HashSet::new();
    for (path, node) in walk.run(&pickled)? {
        if !seen.insert(path.clone()) {
            return Err(duplicate(file, &path));
        }
        let listed = tensors.len() as u32;
        if float8::class_of(&values, node).is_some() {
            let Float8 { codes, scale, numbers, dtype } =
                float8::read(&values, &pickled, node).map_err(|why| unreadable(file, &path, why))?;
            let mut place = |path, node| match *values.get(node) {
                Value::Tensor(index) => {
                    let tensor = &pickled[index as usize];
                    storages.place(path, tensor, &pickled_storages[tensor.storage as usize])
                }
                _ => Err(unreadable(file, &[], "it has no data")),
            };
            let mut factor = place([&path[..], &["scale_inv".into()]].concat(), scale)?;
            let mut values = place(path, codes)?;
            factor.role = Role::Scale;
            values.dtype = numbers;
            values.role = Role::Codes(dtype);
            first.entry(codes).or_insert(listed);
            tensors.push(values);
            scales.push(factor);
            wrappers.push((node, vec![codes]));
            continue;
        }
        let wrapped = distributed::read(&values, &pickled, node).transpose();
        let wrapped = wrapped.map_err(|why| unreadable(file, &path, why))?;
        let locals = wrapped.as_ref().map_or_else(|| vec![node], distributed::Wrapped::tensors);
        for &local in &locals {
            let Value::Tensor(index) = *values.get(local) else { continue };
            let tensor = &pickled[index as usize];
            let storage = &pickled_storages[tensor.storage as usize];
            first.entry(local).or_insert(tensors.len() as u32);
            tensors.push(storages.place(path.clone(), tensor, storage)?);
        }
        if let Some(wrapped) = wrapped {
            walk.charge(path.iter().map(String::len).sum::<usize>() + TENSOR)?;
            collector
                .add(&values, &pickled, path.clone(), wrapped, listed)
                .map_err(|why| unreadable(file, &path, why))?;
            wrappers.push((node, locals));
        }
    }
    tensors.append(&mut scales);
    // What else they say is told by the parts: as values they are what this rank holds.
    for (node, mut locals) in wrappers {
        let one = if locals.len() == 1 { locals.pop() } else { None };
        *values.get_mut(node) = match one {
            Some(local) => values.get(local).clone(),
            None => Value::List(locals),
        };
        if let (Some(local), true) = (one, matches!(values.get(node), Value::Tensor(_))) {
            first.insert(node, first[&local]);
        }
    }
    renumber(&mut values, &first, &pickled);
    let archive = Some(prefix.trim_end_matches('/').to_string());
    let distributed = collector.found;
    Ok(ParsedFile {
        format: "torch_zip",
        blobs: storages.blobs,
        tensors,
        values,
        distributed,
        archive,
        header_digest,
    })
}

fn unreadable(file: &SourceFile, path: &[String], why: &str) -> Error {
    Finding::new(codes::UNSUPPORTED, format!("a rank's part of a tensor that cannot be read: {why}"))
        .file(file.path())
        .tensor(path.join("."))
        .help("save it again with torch.distributed.checkpoint, or gather it with full_tensor()")
        .into()
}

fn duplicate(file: &SourceFile, path: &[String]) -> Error {
    Finding::new(codes::UNSAFE_PICKLE, "the name stands for two values")
        .file(file.path())
        .tensor(path.join("."))
        .help("save the file again with distinct keys; readers disagree on which of them counts")
        .into()
}

/// Replaces the pickle's tensor indices by the listing's. A tensor that the listing lacks (it hangs
/// on an object that is not a container) becomes a record of its dtype and shape.
fn renumber(values: &mut Values, first: &HashMap<Node, u32>, pickled: &[PickledTensor]) {
    let mut class = None;
    for node in 0..values.len() as Node {
        let Value::Tensor(index) = *values.get(node) else { continue };
        *values.get_mut(node) = match first.get(&node) {
            Some(&listed) => Value::Tensor(listed),
            None => {
                let tensor = &pickled[index as usize];
                let dtype = tensor.dtype.as_ref().map_or_else(Clone::clone, |d| d.torch_name().to_string());
                let dtype = values.push(Value::Str(dtype));
                let shape = tensor.shape.iter().map(|&d| values.push(Value::Int(d as i64))).collect();
                let shape = values.push(Value::Tuple(shape));
                let args = values.push(Value::Tuple(vec![dtype, shape]));
                let class = *class.get_or_insert_with(|| values.push(Value::Global("torch.Tensor".into())));
                Value::Record { class, args, state: None }
            }
        };
    }
}

/// The storages of one file.
struct Storages<'a> {
    file: &'a SourceFile,
    blobs: Vec<Blob>,
    by_key: HashMap<String, u32>,
    /// Class under which a blob was used first.
    used: HashMap<u32, String>,
}

impl Storages<'_> {
    /// The tensor over its blob, once it is proven to lie inside.
    fn place(&mut self, path: Vec<String>, tensor: &PickledTensor, storage: &Storage) -> Result<FileTensor> {
        let finding =
            |code, message: String| Finding::new(code, message).file(self.file.path()).tensor(path.join("."));
        let unsupported = |reason: &String| -> Error {
            finding(codes::UNSUPPORTED, reason.clone())
                .help("convert the tensor and save the file again")
                .into()
        };
        let dtype = *tensor.dtype.as_ref().map_err(unsupported)?;
        let class_dtype = *storage.dtype.as_ref().map_err(unsupported)?;
        let &blob_index = self.by_key.get(&storage.key).ok_or_else(|| -> Error {
            finding(codes::UNSAFE_ZIP, format!("no member data/{} holds its storage", storage.key))
                .help("copy the file again from the node that wrote it; it is damaged, or saved without data")
                .into()
        })?;
        let blob = &self.blobs[blob_index as usize];
        let want = storage.numel.checked_mul(class_dtype.size() as u64);
        if want != Some(blob.len) {
            let want = want.map_or("below 2^64 bytes".into(), |n| format!("{n} bytes"));
            return Err(finding(codes::UNSAFE_ZIP, format!("size of its storage data/{}", storage.key))
                .expected(want, format!("{} bytes", blob.len))
                .into());
        }
        // torch never writes this: it refuses to save one storage under two dtypes unless empty.
        let class = self.used.entry(blob_index).or_insert_with(|| storage.class.clone());
        if *class != storage.class && blob.len > 0 {
            return Err(finding(codes::UNSAFE_PICKLE, format!("class of its storage data/{}", storage.key))
                .expected(class, &storage.class)
                .into());
        }
        let reach = reach(tensor).and_then(|n| n.checked_mul(dtype.size() as u64));
        if reach.is_none_or(|n| n > blob.len) {
            let reach = reach.map_or("2^64 bytes or more".into(), |n| format!("{n} bytes"));
            return Err(finding(
                codes::UNSAFE_PICKLE,
                format!("reaches beyond its storage data/{}", storage.key),
            )
            .expected(format!("at most {} bytes", blob.len), reach)
            .into());
        }
        // A view can repeat elements without end (stride 0), but torch counts its bytes in 63 bits.
        let extents = tensor
            .shape
            .iter()
            .try_fold(dtype.size() as i64, |n, &d| n.checked_mul(i64::try_from(d.max(1)).ok()?));
        if extents.is_none() {
            return Err(finding(codes::UNSAFE_PICKLE, "size of the tensor".into())
                .expected("below 2^63 bytes", format!("{dtype} {:?}", tensor.shape))
                .into());
        }
        // Of a view that repeats elements torch saves the few that there are; no weights are such.
        let logical = tensor.shape.iter().fold(dtype.size() as u64, |n, &d| n.saturating_mul(d));
        if logical > LARGE && logical / REPEATS > blob.len {
            return Err(finding(
                codes::UNSAFE_PICKLE,
                format!("elements of its storage data/{} repeated without end", storage.key),
            )
            .expected(
                format!("{} bytes, or up to {REPEATS} times as many", blob.len),
                format!("{logical} bytes"),
            )
            .help("do not use this file: a kilobyte cannot describe a tensor of this size")
            .into());
        }
        Ok(FileTensor {
            path: path.into(),
            dtype,
            shape: tensor.shape[..].into(),
            strides: tensor.strides[..].into(),
            blob: blob_index,
            // No overflow: a tensor with elements lies in the blob; an empty one has no bytes to point at.
            offset: if reach == Some(0) { 0 } else { tensor.offset * dtype.size() as u64 },
            role: Role::Whole,
        })
    }
}

/// Elements of the storage up to the last one of the tensor; 0 for a tensor without elements,
/// `None` on overflow.
fn reach(tensor: &PickledTensor) -> Option<u64> {
    if tensor.shape.contains(&0) {
        return Some(0);
    }
    let last = tensor
        .shape
        .iter()
        .zip(&tensor.strides)
        .try_fold(tensor.offset, |at, (&d, &s)| at.checked_add((d - 1).checked_mul(s)?))?;
    last.checked_add(1)
}

/// One step of the walk: where it came from and the key that led here.
struct Step {
    parent: Option<usize>,
    /// `None` for a key that has no name.
    key: Option<String>,
    node: Node,
}

/// The way from the root to all tensors.
struct Walk<'a> {
    file: &'a SourceFile,
    values: &'a Values,
    /// Containers entered.
    steps: Vec<Step>,
    /// Bytes of names and shapes so far.
    listing: usize,
}

impl Walk<'_> {
    /// Paths of all tensors reachable through dicts, lists and tuples, in the file's order. A
    /// container is entered once, under the first path that leads to it; a tensor is listed under
    /// each of its keys.
    fn run(&mut self, pickled: &[PickledTensor]) -> Result<Vec<(Vec<String>, Node)>> {
        let values = self.values;
        let mut found = Vec::new();
        let mut entered = HashSet::new();
        let mut open = vec![Step { parent: None, key: None, node: values.root() }];
        while let Some(step) = open.pop() {
            let children = match values.get(step.node) {
                Value::Tensor(index) => {
                    let path = self.path(&step)?;
                    let dims = pickled[*index as usize].shape.len();
                    self.charge(TENSOR + 16 * dims + path.iter().map(String::len).sum::<usize>())?;
                    found.push((path, step.node));
                    continue;
                }
                Value::Record { class, .. } => match values.get(*class) {
                    Value::Global(_) if distributed::read(values, pickled, step.node).is_some() => {
                        let path = self.path(&step)?;
                        self.charge(TENSOR + path.iter().map(String::len).sum::<usize>())?;
                        found.push((path, step.node));
                        continue;
                    }
                    Value::Global(name) if is_rebuild(name) => {
                        let class = distributed::class_of(values, step.node);
                        let message = match class {
                            Some(class) => format!("tensors of the class {class} are not supported"),
                            None => format!("tensors made by {name} are not supported"),
                        };
                        return Err(Finding::new(codes::UNSUPPORTED, message)
                            .file(self.file.path())
                            .tensor(self.path(&step)?.join("."))
                            .help("convert it to a plain dense tensor with data and save the file again")
                            .into());
                    }
                    _ if float8::class_of(values, step.node).is_some() => {
                        let path = self.path(&step)?;
                        if let Err(why) = float8::read(values, pickled, step.node) {
                            let class = float8::class_of(values, step.node).unwrap_or_default();
                            let message = format!("tensors of the class {class} are not supported: {why}");
                            return Err(Finding::new(codes::UNSUPPORTED, message)
                                .file(self.file.path())
                                .tensor(path.join("."))
                                .help("convert it with dequantize() and save the file again")
                                .into());
                        }
                        self.charge(TENSOR + path.iter().map(String::len).sum::<usize>())?;
                        found.push((path, step.node));
                        continue;
                    }
                    _ => continue,
                },
                _ if !entered.insert(step.node) => continue,
                Value::Dict(items) => self.entries(&step, items)?,
                Value::List(items) | Value::Tuple(items) => items
                    .iter()
                    .enumerate()
                    .filter(|(_, &n)| holds_tensors(values, n))
                    .map(|(i, &n)| (Some(i.to_string()), n))
                    .collect(),
                _ => continue,
            };
            let here = Some(self.steps.len());
            open.extend(children.into_iter().rev().map(|(key, node)| Step { parent: here, key, node }));
            self.steps.push(step);
        }
        Ok(found)
    }

    /// The entries of a dict that tensors may hang on. Of equal keys Python keeps the last; where a
    /// tensor may hang on one of them, the dict is refused.
    fn entries(&mut self, step: &Step, items: &[(Node, Node)]) -> Result<Vec<(Option<String>, Node)>> {
        let mut children = Vec::new();
        let mut seen: HashMap<String, bool> = HashMap::new();
        for &(key, value) in items {
            let holds = holds_tensors(self.values, value);
            let key = self.values.key_text(key);
            if let Some(key) = &key {
                // Charged since one long string can be the key in any number of dicts.
                self.charge(key.len())?;
                let earlier = seen.insert(key.clone(), holds);
                if earlier.is_some_and(|earlier| earlier || holds) {
                    let mut path = self.path(step)?;
                    path.push(key.clone());
                    return Err(duplicate(self.file, &path));
                }
            }
            if holds {
                children.push((key, value));
            }
        }
        Ok(children)
    }

    /// Accounts for `count` bytes of names and shapes.
    fn charge(&mut self, count: usize) -> Result<()> {
        self.listing = self.listing.saturating_add(count);
        if self.listing <= MAX_LISTING {
            return Ok(());
        }
        Err(Finding::new(codes::UNSAFE_PICKLE, "names of the tensors")
            .file(self.file.path())
            .expected(format!("at most {MAX_LISTING} bytes"), "more")
            .into())
    }

    /// The keys from the root to `step`.
    fn path(&self, step: &Step) -> Result<Vec<String>> {
        let mut path = Vec::new();
        let mut at = step;
        while let Some(parent) = at.parent {
            path.push(at.key.clone().ok_or_else(|| -> Error {
                let message = "a tensor under a key that is no string, number or tuple of them";
                Finding::new(codes::UNSUPPORTED, message).file(self.file.path()).into()
            })?);
            at = &self.steps[parent];
        }
        path.reverse();
        Ok(path)
    }
}

/// True for tensors, containers, and calls that stand for a tensor.
fn holds_tensors(values: &Values, node: Node) -> bool {
    match values.get(node) {
        Value::Tensor(_) | Value::Dict(_) | Value::List(_) | Value::Tuple(_) => true,
        Value::Record { class, .. } => {
            matches!(values.get(*class), Value::Global(name) if is_rebuild(name))
                || float8::class_of(values, node).is_some()
        }
        _ => false,
    }
}

/// Functions that make tensors of a kind without plain strided data: sparse, quantized, nested,
/// meta, wrapper subclasses.
fn is_rebuild(name: &str) -> bool {
    name.starts_with("torch._utils._rebuild_") || name.starts_with("torch._tensor._rebuild_")
}
