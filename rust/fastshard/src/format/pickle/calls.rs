//! The closed table of calls that are read as values. Every other call stays an inert record.

use super::{Machine, PickledTensor, Storage};
use crate::error::Result;
use crate::tensor::Dtype;
use crate::value::{Node, Value};

/// Dimensions at most, as in safetensors headers.
const MAX_DIMS: usize = 64;

/// `torch.<name>` storage classes and the torch name of their dtype (`torch/storage.py`,
/// `_dtype_to_storage_type_map`).
const STORAGES: &[(&str, &str)] = &[
    ("DoubleStorage", "float64"),
    ("FloatStorage", "float32"),
    ("HalfStorage", "float16"),
    ("BFloat16Storage", "bfloat16"),
    ("LongStorage", "int64"),
    ("IntStorage", "int32"),
    ("ShortStorage", "int16"),
    ("CharStorage", "int8"),
    ("ByteStorage", "uint8"),
    ("BoolStorage", "bool"),
    ("ComplexDoubleStorage", "complex128"),
    ("ComplexFloatStorage", "complex64"),
    ("UntypedStorage", "uint8"),
    ("QInt8Storage", "qint8"),
    ("QInt32Storage", "qint32"),
    ("QUInt8Storage", "quint8"),
    ("QUInt4x2Storage", "quint4x2"),
    ("QUInt2x4Storage", "quint2x4"),
];

/// A name of the stream for a message, of which a hostile one could fill a terminal.
fn shortened(name: &str) -> String {
    name.chars().take(64).collect()
}

/// The dtype of a torch name, or the clause that refuses it.
fn dtype(name: &str) -> std::result::Result<Dtype, String> {
    Dtype::from_torch(name).ok_or_else(|| format!("dtype torch.{} is not supported", shortened(name)))
}

/// Element type of a storage class, or the clause that refuses it; `None` for other classes.
pub(super) fn storage_dtype(class: &str) -> Option<std::result::Result<Dtype, String>> {
    let name = ["torch.storage.", "torch."].iter().find_map(|prefix| class.strip_prefix(prefix))?;
    STORAGES.iter().find(|row| row.0 == name).map(|row| dtype(row.1))
}

impl Machine<'_> {
    /// REDUCE, NEWOBJ and their kin: pushes what `class(*args)` stands for.
    pub(super) fn call(&mut self, class: Node, args: Node) -> Result<()> {
        let node = match self.known_call(class, args)? {
            Some(node) => node,
            None => self.make(Value::Record { class, args, state: None })?,
        };
        self.push(node)
    }

    fn known_call(&mut self, class: Node, args: Node) -> Result<Option<Node>> {
        let (mut class, mut args) = (class, args);
        // A tensor subclass wraps the call that makes its data, possibly several times over.
        while let Some("torch._tensor._rebuild_from_type_v2" | "torch._tensor._rebuild_from_type") =
            self.global(class)
        {
            match self.tuple(args) {
                Some(&[func, _class, inner, _state]) => (class, args) = (func, inner),
                _ => return Err(self.refuse("a tensor subclass with other arguments than torch writes")),
            }
        }
        let Some(name) = self.global(class) else { return Ok(None) };
        if let Some(name) = name.strip_prefix("torch._utils.") {
            return match name {
                "_rebuild_tensor_v2" if self.over_bytes(args) => Ok(None),
                "_rebuild_tensor" => self.tensor(args, 4..=4, None).map(Some),
                "_rebuild_tensor_v2" => self.tensor(args, 6..=7, None).map(Some),
                "_rebuild_tensor_v3" => self.tensor(args, 7..=8, Some(6)).map(Some),
                "_rebuild_parameter"
                | "_rebuild_parameter_with_state"
                | "_rebuild_device_tensor_from_cpu_tensor" => match self.tuple(args) {
                    Some(&[data, ..]) => Ok(Some(data)),
                    _ => Err(self.refuse("a parameter without data")),
                },
                _ => Ok(None),
            };
        }
        let Some(arguments) = self.tuple(args) else { return Ok(None) };
        let builtin = name.strip_prefix("builtins.").or_else(|| name.strip_prefix("__builtin__."));
        match (builtin.unwrap_or(name), arguments) {
            ("collections.OrderedDict" | "dict", &[]) => self.make(Value::Dict(Vec::new())).map(Some),
            ("collections.OrderedDict" | "dict", &[items]) => self.dict(items),
            ("collections.defaultdict", [] | [_]) => self.make(Value::Dict(Vec::new())).map(Some),
            ("list", &[]) => self.make(Value::List(Vec::new())).map(Some),
            ("list", &[items]) => self.copy(items, Value::List),
            ("set" | "frozenset", &[]) => self.make(Value::Set(Vec::new())).map(Some),
            ("set" | "frozenset", &[items]) => self.copy(items, Value::Set),
            ("tuple" | "torch.Size", &[]) => self.make(Value::Tuple(Vec::new())).map(Some),
            ("tuple" | "torch.Size", &[items]) if self.tuple(items).is_some() => Ok(Some(items)),
            ("tuple" | "torch.Size", &[items]) => self.copy(items, Value::Tuple),
            ("bytearray" | "bytes", &[]) => self.make(Value::Bytes(Vec::new())).map(Some),
            ("bytearray" | "bytes", &[b]) if matches!(self.values.get(b), Value::Bytes(_)) => Ok(Some(b)),
            ("_codecs.encode" | "bytearray", &[text, encoding]) => self.encode(text, encoding),
            _ => Ok(None),
        }
    }

    fn global(&self, node: Node) -> Option<&str> {
        match self.values.get(node) {
            Value::Global(name) => Some(name),
            _ => None,
        }
    }

    fn tuple(&self, node: Node) -> Option<&[Node]> {
        match self.values.get(node) {
            Value::Tuple(items) => Some(items),
            _ => None,
        }
    }

    /// True for the arguments of a tensor whose storage is made of bytes in the stream itself.
    fn over_bytes(&self, args: Node) -> bool {
        let Some(&[storage, ..]) = self.tuple(args) else { return false };
        matches!(self.values.get(storage), Value::Record { class, .. }
            if self.global(*class) == Some(super::NESTED_STORAGE))
    }

    /// A new container with the elements of a list, tuple or set.
    fn copy(&mut self, items: Node, make: impl Fn(Vec<Node>) -> Value) -> Result<Option<Node>> {
        let (Value::List(v) | Value::Tuple(v) | Value::Set(v)) = self.values.get(items) else {
            return Ok(None);
        };
        self.afford(v.len())?;
        let value = make(v.clone());
        self.make(value).map(Some)
    }

    /// A dict from another one or from a list of pairs, as Python 2 writes an `OrderedDict`.
    fn dict(&mut self, items: Node) -> Result<Option<Node>> {
        let count = match self.values.get(items) {
            Value::Dict(v) => v.len(),
            Value::List(v) | Value::Tuple(v) => v.len(),
            _ => return Ok(None),
        };
        self.afford(count)?;
        let pair = |&n: &Node| match self.values.get(n) {
            Value::List(v) | Value::Tuple(v) => <[Node; 2]>::try_from(v.as_slice()).ok().map(|[k, v]| (k, v)),
            _ => None,
        };
        let entries: Option<Vec<_>> = match self.values.get(items) {
            Value::Dict(v) => Some(v.clone()),
            Value::List(v) | Value::Tuple(v) => v.iter().map(pair).collect(),
            _ => None,
        };
        entries.map(|entries| self.make(Value::Dict(entries))).transpose()
    }

    /// `_codecs.encode(text, "latin1")`: how protocol 2 spells bytes.
    fn encode(&mut self, text: Node, encoding: Node) -> Result<Option<Node>> {
        let (Value::Str(text), Value::Str(encoding)) = (self.values.get(text), self.values.get(encoding))
        else {
            return Ok(None);
        };
        if !matches!(encoding.as_str(), "latin1" | "latin-1" | "iso-8859-1") {
            return Ok(None);
        }
        let bytes: Option<Vec<u8>> = text.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect();
        let bytes = bytes.ok_or_else(|| self.refuse("text that is not Latin-1"))?;
        // Charged before it is kept: one string of the stream can be encoded any number of times.
        self.derive(bytes.len())?;
        self.make(Value::Bytes(bytes)).map(Some)
    }

    /// PERSID, BINPERSID: a storage, or an inert record of the id.
    pub(super) fn persistent(&mut self, id: Node) -> Result<()> {
        let Some(storage) = self.storage(id)? else {
            let class = self.make(Value::Global("persistent_id".into()))?;
            return self.push_value(Value::Record { class, args: id, state: None });
        };
        let class = self.make(Value::Global(storage.class.clone()))?;
        let node = self.make(Value::Record { class, args: id, state: None })?;
        self.storage_of.insert(node, self.storages.len() as u32);
        self.storages.push(storage);
        self.push(node)
    }

    /// The storage of a persistent id as torch writes it, `None` for any other id.
    fn storage(&mut self, id: Node) -> Result<Option<Storage>> {
        let Some(&[kind, class, key, location, numel]) = self.tuple(id) else { return Ok(None) };
        if !matches!(self.values.get(kind), Value::Str(kind) if kind == "storage") {
            return Ok(None);
        }
        let (Value::Global(class), Value::Str(key), Value::Str(location), &Value::Int(numel)) =
            (self.values.get(class), self.values.get(key), self.values.get(location), self.values.get(numel))
        else {
            return Err(self.refuse("a storage with other attributes than torch writes"));
        };
        let storage = Storage {
            class: class.clone(),
            dtype: storage_dtype(class)
                .unwrap_or_else(|| Err(format!("storage class {} is not supported", shortened(class)))),
            key: key.clone(),
            location: location.clone(),
            numel: u64::try_from(numel).map_err(|_| self.refuse(format!("a storage of {numel} elements")))?,
        };
        // The class is copied twice: here and into the record that stands for the storage.
        self.derive(storage.class.len() * 2 + storage.key.len() + storage.location.len())?;
        Ok(Some(storage))
    }

    /// `_rebuild_tensor*(storage, offset, size, stride, requires_grad, hooks, [dtype], [metadata])`.
    fn tensor(
        &mut self,
        args: Node,
        arity: std::ops::RangeInclusive<usize>,
        dtype_at: Option<usize>,
    ) -> Result<Node> {
        let args = match self.tuple(args) {
            Some(args) if arity.contains(&args.len()) => args.to_vec(),
            _ => return Err(self.refuse("a tensor with other arguments than torch writes")),
        };
        let storage = *self
            .storage_of
            .get(&args[0])
            .ok_or_else(|| self.refuse("a tensor over something that is not a storage"))?;
        let offset = self.extent(args[1])?;
        let (shape, strides) = (self.extents(args[2])?, self.extents(args[3])?);
        if shape.len() != strides.len() {
            let (dims, strides) = (shape.len(), strides.len());
            return Err(self.finding("strides of a tensor").expected(dims, strides).into());
        }
        let mut kind = match dtype_at {
            None => self.storages[storage as usize].dtype.clone(),
            Some(at) => match self.global(args[at]).and_then(|name| name.strip_prefix("torch.")) {
                Some(name) => dtype(name),
                None => return Err(self.refuse("a tensor whose dtype is not a torch dtype")),
            },
        };
        // Bits of lazy views: the stored bytes are not the tensor's values.
        if let Some(&metadata) = args.get(dtype_at.map_or(6, |at| at + 1)) {
            if let Some(bit) = self.set_bit(metadata) {
                kind = Err(format!("a tensor saved with its {bit} bit is not supported"));
            }
        }
        if self.storages[storage as usize].location == "meta" {
            kind = Err("a tensor on the meta device has no data".into());
        }
        if let Err(reason) = &kind {
            self.derive(reason.len())?;
        }
        self.spend(shape.len() * 2)?;
        self.tensors.push(PickledTensor { storage, dtype: kind, offset, shape, strides });
        self.make(Value::Tensor((self.tensors.len() - 1) as u32))
    }

    /// The first entry of a tensor's metadata (`conj`, `neg`) that is not false.
    fn set_bit(&self, metadata: Node) -> Option<String> {
        let Value::Dict(items) = self.values.get(metadata) else { return None };
        let (key, _) = items.iter().find(|(_, v)| *self.values.get(*v) != Value::Bool(false))?;
        Some(match self.values.get(*key) {
            Value::Str(key) => shortened(key),
            _ => "metadata".into(),
        })
    }

    fn extents(&self, node: Node) -> Result<Vec<u64>> {
        let (Value::Tuple(items) | Value::List(items)) = self.values.get(node) else {
            return Err(self.refuse("a shape or stride that is not a tuple"));
        };
        self.limit("dimensions of a tensor", items.len(), MAX_DIMS)?;
        items.iter().map(|&item| self.extent(item)).collect()
    }

    fn extent(&self, node: Node) -> Result<u64> {
        match self.values.get(node) {
            Value::Int(n) => u64::try_from(*n).ok(),
            _ => None,
        }
        .ok_or_else(|| self.refuse("an offset, extent or stride that is not a number from 0 up"))
    }
}
