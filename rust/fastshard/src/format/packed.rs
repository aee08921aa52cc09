//! Objects that a file holds as bytes: a pickle inside a tensor or a buffer.
//!
//! Transformer Engine keeps its FP8 state like this (`_extra_state`; pytorch/module/base.py,
//! `get_extra_state`): `torch.save` into an `io.BytesIO` up to 1.12, then `pickle.dumps` into a uint8
//! tensor. The inert machine reads both; nothing is imported or called.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use serde::Serialize;

use super::inflate::inflate;
use super::pickle::{self, Limits, Pickle};
use super::{torch_zip, ParsedFile};
use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::storage::SourceFile;
use crate::tensor::{element_count, Dtype};
use crate::value::{Node, Value, Values};

/// Bytes of a packed object at most.
pub const MAX_BYTES: u64 = 16 << 20;
/// Tensors of a packed object at most.
const MAX_TENSORS: usize = 4096;
/// A state holds a handful of values beside its tensors.
const LIMITS: Limits =
    Limits { stream: MAX_BYTES as usize, memo: 1 << 20, nodes: 1 << 20, stack: 1 << 16, ..pickle::LIMITS };
/// Elements looked at in all of an object's tensors at most.
const MAX_ELEMENTS: u64 = 1 << 24;
/// First pickle of a file that torch wrote before 1.6 (`torch/serialization.py`, `MAGIC_NUMBER`).
const LEGACY_MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];

/// A tensor inside a packed object.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Smallest and largest finite value of a floating tensor.
    pub range: Option<(f64, f64)>,
}

/// What a packed object says.
#[derive(Debug, Default)]
pub struct Packed {
    /// Its values; [`Value::Tensor`] is an index into `tensors`.
    pub values: Values,
    /// Its tensors.
    pub tensors: Vec<Summary>,
}

impl Packed {
    /// `{"values", "tensors"}`, bounded as [`Values::to_json`] is.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({"values": self.values.to_json(), "tensors": self.tensors})
    }
}

/// The object that a file holds as bytes at `path`: in a one-dimensional uint8 tensor or an
/// `io.BytesIO`. `None` if nothing is there, or nothing is in it.
///
/// # Errors
/// `FS514` for more than [`MAX_BYTES`] bytes and for other tensors; else as for the file's own pickle.
pub fn read(file: &SourceFile, parsed: &ParsedFile, path: &[String]) -> Result<Option<Packed>> {
    let within = |e: Error| -> Error {
        let name = path.join(".");
        let findings =
            e.into_findings().into_iter().map(|f| if f.tensor.is_some() { f } else { f.tensor(&name) });
        findings.collect::<Vec<_>>().into()
    };
    let bytes = content(file, parsed, path).map_err(within)?;
    match bytes {
        Some(bytes) if !bytes.is_empty() => parse(&bytes, file.path()).map(Some).map_err(within),
        _ => Ok(None),
    }
}

fn too_large(file: &Path, len: u64) -> Error {
    Finding::new(codes::UNSUPPORTED, "an object saved as bytes")
        .file(file)
        .expected(format!("at most {MAX_BYTES} bytes"), len)
        .into()
}

fn content(file: &SourceFile, parsed: &ParsedFile, path: &[String]) -> Result<Option<Vec<u8>>> {
    if let Some(tensor) = parsed.tensors.iter().find(|t| t.path[..] == *path) {
        let (&[len], &[stride]) = (&tensor.shape[..], &tensor.strides[..]) else { return not_bytes(file) };
        if tensor.dtype != Dtype::U8 || (stride != 1 && len > 1) {
            return not_bytes(file);
        }
        let blob = &parsed.blobs[tensor.blob as usize];
        let reach = if blob.deflated { blob.len } else { len };
        if reach > MAX_BYTES {
            return Err(too_large(file.path(), reach));
        }
        if !blob.deflated {
            return file.read_vec(blob.offset + tensor.offset, len as usize).map(Some);
        }
        let mut data = Vec::new();
        inflate(file, blob, &mut |bytes| {
            data.extend_from_slice(bytes);
            Ok(())
        })?;
        let start = tensor.offset as usize;
        return Ok(Some(data[start..start + len as usize].to_vec()));
    }
    let values = &parsed.values;
    if values.is_empty() {
        return Ok(None);
    }
    let mut node = values.root();
    for key in path {
        match values.lookup(node, key) {
            Some(next) => node = next,
            None => return Ok(None),
        }
    }
    let Value::Record { class, state: Some(state), .. } = values.get(node) else { return Ok(None) };
    if !matches!(values.get(*class), Value::Global(name) if name == "_io.BytesIO") {
        return Ok(None);
    }
    // BytesIO.__getstate__: (bytes, position, attributes)
    let bytes = match values.get(*state) {
        Value::Tuple(items) => items.first().map(|&n| values.get(n)),
        other => Some(other),
    };
    match bytes {
        Some(Value::Bytes(bytes)) if bytes.len() as u64 > MAX_BYTES => {
            Err(too_large(file.path(), bytes.len() as u64))
        }
        Some(Value::Bytes(bytes)) => Ok(Some(bytes.clone())),
        _ => Ok(None),
    }
}

fn not_bytes(file: &SourceFile) -> Result<Option<Vec<u8>>> {
    Err(Finding::new(codes::UNSUPPORTED, "an object saved as bytes")
        .file(file.path())
        .expected("a one-dimensional uint8 tensor", "another")
        .into())
}

/// Reads an object from its bytes: a torch zip file or a bare pickle. `file` is only named in refusals.
///
/// # Errors
/// As for files of these forms.
pub fn parse(bytes: &[u8], file: &Path) -> Result<Packed> {
    if bytes.len() as u64 > MAX_BYTES {
        return Err(too_large(file, bytes.len() as u64));
    }
    if bytes.starts_with(b"PK\x03\x04") {
        zipped(bytes, file)
    } else {
        pickled(bytes, file)
    }
}

fn zipped(bytes: &[u8], file: &Path) -> Result<Packed> {
    let unpacked = SourceFile::unpacked(&std::env::temp_dir(), file, |sink| sink(bytes))?;
    let parsed = torch_zip::parse(&unpacked)?;
    let mut left = MAX_ELEMENTS;
    let mut blobs: HashMap<u32, Vec<u8>> = HashMap::new();
    let mut tensors = Vec::with_capacity(parsed.tensors.len());
    for tensor in &parsed.tensors {
        let blob = &parsed.blobs[tensor.blob as usize];
        let mut range = None;
        if !blob.deflated {
            let data = match blobs.entry(tensor.blob) {
                std::collections::hash_map::Entry::Occupied(slot) => slot.into_mut(),
                std::collections::hash_map::Entry::Vacant(slot) => {
                    slot.insert(unpacked.read_vec(blob.offset, blob.len as usize)?)
                }
            };
            let data = data.get(tensor.offset as usize..).unwrap_or_default();
            range = range_of(data, tensor.dtype, &tensor.shape, &tensor.strides, &mut left);
        }
        tensors.push(Summary { dtype: tensor.dtype, shape: tensor.shape.to_vec(), range });
    }
    Ok(Packed { values: parsed.values, tensors })
}

/// A pickle in which each storage is a whole file of the form before torch 1.6
/// (`torch/storage.py`, `TypedStorage.__reduce__`).
fn pickled(bytes: &[u8], file: &Path) -> Result<Packed> {
    let Pickle { mut values, tensors: by_id, .. } = pickle::parse_within(bytes, file, &LIMITS)?;
    if !by_id.is_empty() {
        return Err(Finding::new(codes::UNSUPPORTED, "a pickle whose tensors lie elsewhere")
            .file(file)
            .into());
    }
    let mut left = MAX_ELEMENTS;
    let mut storages: HashMap<Node, (Dtype, Range<usize>)> = HashMap::new();
    let mut tensors = Vec::new();
    for node in 0..values.len() as Node {
        let Some(view) = nested(&values, node) else { continue };
        if tensors.len() == MAX_TENSORS {
            return Err(Finding::new(codes::UNSAFE_PICKLE, "tensors of an object saved as bytes")
                .file(file)
                .expected(format!("at most {MAX_TENSORS}"), "more")
                .into());
        }
        let Value::Bytes(bytes) = values.get(view.bytes) else { continue };
        let (dtype, range) = match storages.get(&view.bytes) {
            Some(known) => known.clone(),
            None => {
                let known = legacy(bytes, file)?;
                storages.insert(view.bytes, known.clone());
                known
            }
        };
        let start = (view.offset as usize).saturating_mul(dtype.size());
        let data = bytes[range].get(start..).unwrap_or_default();
        let range = range_of(data, dtype, &view.shape, &view.strides, &mut left);
        tensors.push(Summary { dtype, shape: view.shape, range });
        *values.get_mut(node) = Value::Tensor((tensors.len() - 1) as u32);
    }
    Ok(Packed { values, tensors })
}

/// A tensor over a storage that the pickle holds as bytes.
struct Nested {
    bytes: Node,
    offset: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

fn nested(values: &Values, node: Node) -> Option<Nested> {
    let [storage, offset, shape, strides, ..] = call(values, node, "torch._utils._rebuild_tensor_v2")? else {
        return None;
    };
    let [bytes] = call(values, *storage, pickle::NESTED_STORAGE)? else { return None };
    let number = |node: Node| match values.get(node) {
        Value::Int(n) => u64::try_from(*n).ok(),
        _ => None,
    };
    let numbers = |node: Node| match values.get(node) {
        Value::Tuple(items) => items.iter().map(|&n| number(n)).collect::<Option<Vec<_>>>(),
        _ => None,
    };
    let (offset, shape, strides) = (number(*offset)?, numbers(*shape)?, numbers(*strides)?);
    (shape.len() == strides.len()).then_some(Nested { bytes: *bytes, offset, shape, strides })
}

/// The arguments of a call of `name`.
fn call<'a>(values: &'a Values, node: Node, name: &str) -> Option<&'a [Node]> {
    let Value::Record { class, args, .. } = values.get(node) else { return None };
    match (values.get(*class), values.get(*args)) {
        (Value::Global(class), Value::Tuple(args)) if class == name => Some(args),
        _ => None,
    }
}

/// Element type and data of the one storage of a file in torch's form before 1.6: pickles of magic
/// number, version, machine, the storage by id, and keys; then 8 bytes of length and the data.
fn legacy(bytes: &[u8], file: &Path) -> Result<(Dtype, Range<usize>)> {
    let refuse = |what: &str| {
        Error::from(
            Finding::new(codes::UNSAFE_PICKLE, format!("a storage inside a pickle: {what}")).file(file),
        )
    };
    let mut at = 0;
    let mut next = || -> Result<Values> {
        let (pickle, len) = pickle::parse_prefix(&bytes[at..], file, &LIMITS)?;
        at += len;
        Ok(pickle.values)
    };
    let magic = next()?;
    if *magic.get(magic.root()) != Value::BigInt(LEGACY_MAGIC.to_vec()) {
        return Err(refuse("not the magic number of torch"));
    }
    let (_version, _machine, object, _keys) = (next()?, next()?, next()?, next()?);
    let id = call(&object, object.root(), "persistent_id").ok_or_else(|| refuse("no storage"))?;
    let &[_, class, _, _, numel, ..] = id else { return Err(refuse("no storage")) };
    let (Value::Global(class), Value::Int(numel)) = (object.get(class), object.get(numel)) else {
        return Err(refuse("no storage"));
    };
    let dtype = pickle::storage_dtype(class).ok_or_else(|| refuse("its class is not supported"))?;
    let data = at + 8;
    let stored = bytes.get(at..data).map(|n| u64::from_le_bytes(n.try_into().expect("eight bytes")));
    let len = u64::try_from(*numel).ok().filter(|n| stored == Some(*n));
    let end = len.and_then(|n| n.checked_mul(dtype.size() as u64)).and_then(|n| n.checked_add(data as u64));
    match end {
        Some(end) if end == bytes.len() as u64 => Ok((dtype, data..bytes.len())),
        _ => Err(refuse("its length is not that of its data")),
    }
}

/// Smallest and largest finite value of a strided floating view that begins at `data`.
fn range_of(data: &[u8], dtype: Dtype, shape: &[u64], strides: &[u64], left: &mut u64) -> Option<(f64, f64)> {
    let count = element_count(shape).filter(|&n| n > 0 && n <= *left && dtype.is_float())?;
    *left -= count;
    let mut range: Option<(f64, f64)> = None;
    for flat in 0..count {
        let (mut rest, mut at) = (flat, 0u64);
        for (extent, stride) in shape.iter().zip(strides).rev() {
            at = at.checked_add((rest % extent).checked_mul(*stride)?)?;
            rest /= extent;
        }
        let start = usize::try_from(at).ok()?.checked_mul(dtype.size())?;
        let value = value_at(data.get(start..start.checked_add(dtype.size())?)?, dtype);
        if value.is_finite() {
            let (low, high) = range.unwrap_or((value, value));
            range = Some((low.min(value), high.max(value)));
        }
    }
    range
}

fn value_at(bytes: &[u8], dtype: Dtype) -> f64 {
    match (dtype, bytes) {
        (Dtype::F64, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        (Dtype::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).into(),
        (Dtype::Bf16, &[a, b]) => half::bf16::from_le_bytes([a, b]).into(),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(bytes: &[u8]) -> Result<Packed> {
        parse(bytes, Path::new("x.pt"))
    }

    /// `torch.ones(3) * [1, 2, -4]`'s storage as `TypedStorage.__reduce__` gives it.
    fn storage() -> Vec<u8> {
        let mut out = b"\x80\x02\x8a\x0a".to_vec();
        out.extend(LEGACY_MAGIC);
        out.extend(b".\x80\x02M\xe9\x03.\x80\x02}.\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\n");
        out.extend(b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x03NtQ.\x80\x02]X\x01\x00\x00\x000a.");
        out.extend(3u64.to_le_bytes());
        out.extend([1.0f32, 2.0, -4.0].iter().flat_map(|x| x.to_le_bytes()));
        out
    }

    fn tensor(storage: &[u8], offset: u8, len: u8) -> Vec<u8> {
        let mut out = b"\x80\x03}X\x05\x00\x00\x00scalectorch._utils\n_rebuild_tensor_v2\n(".to_vec();
        out.extend(b"ctorch.storage\n_load_from_bytes\nB");
        out.extend((storage.len() as u32).to_le_bytes());
        out.extend(storage);
        out.extend([b"\x85RK", &[offset][..], b"K", &[len], b"\x85K\x01\x85\x89}tRs."].concat());
        out
    }

    #[test]
    fn reads_tensors_of_a_bare_pickle() {
        let packed = parsed(&tensor(&storage(), 0, 3)).unwrap();
        let want = Summary { dtype: Dtype::F32, shape: vec![3], range: Some((-4.0, 2.0)) };
        assert_eq!(packed.tensors, [want]);
        assert_eq!(packed.to_json()["values"], serde_json::json!({"scale": {"__tensor__": 0}}));
        assert_eq!(parsed(&tensor(&storage(), 1, 1)).unwrap().tensors[0].range, Some((2.0, 2.0)));
    }

    #[test]
    fn views_beyond_their_storage_have_no_range() {
        for (offset, len) in [(1, 3), (3, 1), (255, 255)] {
            assert_eq!(parsed(&tensor(&storage(), offset, len)).unwrap().tensors[0].range, None);
        }
    }

    #[test]
    fn refuses_storages_that_are_cut_or_not_torchs() {
        let whole = storage();
        for len in 0..whole.len() {
            assert!(parsed(&tensor(&whole[..len], 0, 3)).is_err(), "cut at {len}");
        }
        let mut other = whole.clone();
        other[5] ^= 1;
        assert!(parsed(&tensor(&other, 0, 3)).is_err());
    }

    #[test]
    fn a_call_stays_a_record() {
        let packed = parsed(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.").unwrap();
        assert_eq!(packed.to_json()["values"]["__class__"], "os.system");
    }

    #[test]
    fn refuses_one_tensor_named_without_end() {
        // The call is made once more for each: (function, arguments) from the memo.
        let calls = b"ctorch._utils\n_rebuild_tensor_v2\nq\x00(ctorch.storage\n_load_from_bytes\nC\x00\x85RK\x00K\x03\x85K\x01\x85\x89}tq\x01";
        let mut many = b"\x80\x03(".to_vec();
        many.extend(calls);
        many.extend(b"0");
        for _ in 0..=MAX_TENSORS {
            many.extend(b"h\x00h\x01R");
        }
        many.extend(b"l.");
        let storage = storage();
        let spot = many.windows(3).position(|w| w == b"C\x00\x85").unwrap();
        many.splice(spot..spot + 2, [b"C", &[storage.len() as u8][..], &storage].concat());
        assert!(parsed(&many).unwrap_err().to_string().contains("at most"));
    }

    #[test]
    fn any_damage_is_an_error_or_inert() {
        let whole = tensor(&storage(), 0, 3);
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                if let Ok(packed) = parsed(&bytes) {
                    packed.to_json();
                }
            }
        }
    }
}
