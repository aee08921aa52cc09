//! Writes pickles of protocol 2, as `torch.save` does: plain data, torch tensors, and the few objects that
//! a format asks for by name.
//!
//! Opcodes follow CPython's `Lib/pickletools.py`; tensors are spelled as `torch/_tensor.py`
//! (`_reduce_ex_internal`) and `torch/serialization.py` (`persistent_id`) spell them.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::codes;
use crate::error::{Finding, Result};
use crate::tensor::{c_strides, element_count, Dtype};

/// A value to be pickled. In JSON each value names its kind, e.g. `{"tuple": [{"int": 1}, "none"]}`,
/// so that what Python tells apart stays apart, and the order of keys is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[allow(missing_docs)] // plain data
pub enum Tree {
    None,
    Bool(bool),
    Int(i64),
    /// As text in JSON: exact, and NaN has no number there.
    Float(#[serde(with = "exact")] f64),
    Str(String),
    Bytes(Vec<u8>),
    List(Vec<Tree>),
    Tuple(Vec<Tree>),
    Dict(Vec<(Tree, Tree)>),
    /// A `collections.OrderedDict`.
    Ordered(Vec<(Tree, Tree)>),
    /// A `torch.Size`.
    Size(Vec<u64>),
    /// What a module calls by a name: a class, a function, a dtype.
    Global(String, String),
    /// What a callable of a module gives for these arguments.
    Call(String, String, Vec<Tree>),
    /// An object of a module's class with this state.
    Object(String, String, Box<Tree>),
    /// The tensor of this name.
    Tensor(String),
}

mod exact {
    use serde::{de, Deserialize, Deserializer, Serializer};

    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
    pub(super) fn serialize<S: Serializer>(value: &f64, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(value)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
        String::deserialize(d)?.parse().map_err(de::Error::custom)
    }
}

/// A tensor as the stream describes it: whole, in C order, alone in its storage.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: &'a [u64],
    /// The member of the container that holds its bytes is `data/<key>`.
    pub key: u32,
}

impl Tree {
    /// The tensors of the tree, each with the keys that lead to it, in the order of the stream.
    pub fn tensors(&self) -> Vec<(Vec<String>, &str)> {
        let mut found = Vec::new();
        self.walk(&mut Vec::new(), &mut found);
        found
    }

    fn walk<'a>(&'a self, path: &mut Vec<String>, found: &mut Vec<(Vec<String>, &'a str)>) {
        let mut down = |key: String, value: &'a Tree, found: &mut Vec<_>| {
            path.push(key);
            value.walk(path, found);
            path.pop();
        };
        match self {
            Tree::Tensor(name) => found.push((path.clone(), name.as_str())),
            Tree::List(items) | Tree::Tuple(items) => {
                items.iter().enumerate().for_each(|(i, v)| down(i.to_string(), v, found));
            }
            Tree::Dict(items) | Tree::Ordered(items) => {
                items.iter().for_each(|(k, v)| down(k.key_text(), v, found));
            }
            // The reader finds tensors below keys only.
            _ => {}
        }
    }

    /// A key as the reader names it; see [`crate::value::Values::key_text`].
    fn key_text(&self) -> String {
        match self {
            Tree::Str(s) => s.clone(),
            Tree::Int(i) => i.to_string(),
            Tree::Bool(true) => "True".into(),
            Tree::Bool(false) => "False".into(),
            Tree::None => "None".into(),
            Tree::Tuple(items) => {
                format!("({})", items.iter().map(Tree::key_text).collect::<Vec<_>>().join(", "))
            }
            _ => "?".into(),
        }
    }
}

/// Pickles a tree. `stored` tells of each tensor that the tree names.
///
/// # Errors
/// `FS102` for a tensor that `stored` does not know.
pub fn pickle<'a>(tree: &Tree, stored: &dyn Fn(&str) -> Option<Stored<'a>>) -> Result<Vec<u8>> {
    let mut writer = Writer { out: vec![0x80, 2], memo: HashMap::new(), stored };
    writer.value(tree)?;
    writer.out.push(b'.');
    Ok(writer.out)
}

/// The class of a typed storage; of other types torch stores bytes and names the type.
fn storage_class(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::Bool => "BoolStorage",
        Dtype::U8 => "ByteStorage",
        Dtype::I8 => "CharStorage",
        Dtype::I16 => "ShortStorage",
        Dtype::I32 => "IntStorage",
        Dtype::I64 => "LongStorage",
        Dtype::F16 => "HalfStorage",
        Dtype::Bf16 => "BFloat16Storage",
        Dtype::F32 => "FloatStorage",
        Dtype::F64 => "DoubleStorage",
        Dtype::C64 => "ComplexFloatStorage",
        Dtype::C128 => "ComplexDoubleStorage",
        _ => return None,
    })
}

struct Writer<'s, 'a> {
    out: Vec<u8>,
    /// What was written before and is only referred to: names by `module name`, texts by `'text`.
    memo: HashMap<String, u32>,
    stored: &'s dyn Fn(&str) -> Option<Stored<'a>>,
}

impl Writer<'_, '_> {
    fn value(&mut self, tree: &Tree) -> Result<()> {
        match tree {
            Tree::None => self.out.push(b'N'),
            Tree::Bool(b) => self.out.push(if *b { 0x88 } else { 0x89 }),
            Tree::Int(i) => self.int(*i),
            Tree::Float(x) => {
                self.out.push(b'G');
                self.out.extend(x.to_be_bytes());
            }
            Tree::Str(s) => self.text(s),
            Tree::Bytes(bytes) => {
                // Protocol 2 has no bytes: CPython's `save_bytes` spells them as encoded text.
                self.global("_codecs", "encode");
                self.text(&bytes.iter().map(|&b| char::from(b)).collect::<String>());
                self.text("latin1");
                self.out.extend([0x86, b'R']);
            }
            Tree::List(items) => {
                self.out.push(b']');
                if !items.is_empty() {
                    self.out.push(b'(');
                    items.iter().try_for_each(|item| self.value(item))?;
                    self.out.push(b'e');
                }
            }
            Tree::Tuple(items) => self.tuple(items)?,
            Tree::Dict(items) => {
                self.out.push(b'}');
                self.items(items)?;
            }
            Tree::Ordered(items) => {
                self.ordered();
                self.items(items)?;
            }
            Tree::Size(dims) => {
                self.global("torch", "Size");
                self.numbers(dims);
                self.out.extend([0x85, b'R']);
            }
            Tree::Global(module, name) => self.global(module, name),
            Tree::Call(module, name, arguments) => {
                self.global(module, name);
                self.tuple(arguments)?;
                self.out.push(b'R');
            }
            Tree::Object(module, name, state) => {
                self.global(module, name);
                self.out.extend([b')', 0x81]);
                self.value(state)?;
                self.out.push(b'b');
            }
            Tree::Tensor(name) => self.tensor(name)?,
        }
        Ok(())
    }

    fn tuple(&mut self, items: &[Tree]) -> Result<()> {
        if items.len() > 3 {
            self.out.push(b'(');
        }
        items.iter().try_for_each(|item| self.value(item))?;
        self.out.push(tuple_of(items.len()));
        Ok(())
    }

    fn ordered(&mut self) {
        self.global("collections", "OrderedDict");
        self.out.extend(b")R");
    }

    fn items(&mut self, items: &[(Tree, Tree)]) -> Result<()> {
        if items.is_empty() {
            return Ok(());
        }
        self.out.push(b'(');
        for (key, value) in items {
            self.value(key)?;
            self.value(value)?;
        }
        self.out.push(b'u');
        Ok(())
    }

    /// `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)`, or `v3` with the dtype
    /// at the end for types without a storage class.
    fn tensor(&mut self, name: &str) -> Result<()> {
        let about = (self.stored)(name).ok_or_else(|| {
            Finding::new(codes::MISSING_TENSOR, "a file of the result names it, nothing makes it")
                .tensor(name)
        })?;
        let class = storage_class(about.dtype);
        let elements = element_count(about.shape).unwrap_or(0);
        let version = if class.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" };
        self.global("torch._utils", version);
        self.out.extend(b"((");
        self.text("storage");
        match class {
            Some(class) => self.global("torch", class),
            None => self.global("torch.storage", "UntypedStorage"),
        }
        self.text(&about.key.to_string());
        self.text("cpu");
        // An untyped storage counts bytes.
        self.int((elements * if class.is_some() { 1 } else { about.dtype.size() as u64 }) as i64);
        self.out.extend(b"tQ");
        self.int(0);
        self.numbers(about.shape);
        // torch's strides of an empty tensor count empty dimensions as one.
        let counted: Vec<u64> = about.shape.iter().map(|&d| d.max(1)).collect();
        self.numbers(&c_strides(&counted));
        self.out.push(0x89);
        self.ordered();
        if class.is_none() {
            self.global("torch", about.dtype.torch_name());
        }
        self.out.extend(b"tR");
        Ok(())
    }

    fn numbers(&mut self, numbers: &[u64]) {
        if numbers.len() > 3 {
            self.out.push(b'(');
        }
        numbers.iter().for_each(|&n| self.int(n as i64));
        self.out.push(tuple_of(numbers.len()));
    }

    fn int(&mut self, value: i64) {
        if let Ok(n) = u8::try_from(value) {
            self.out.extend([b'K', n]);
        } else if let Ok(n) = u16::try_from(value) {
            self.out.push(b'M');
            self.out.extend(n.to_le_bytes());
        } else if let Ok(n) = i32::try_from(value) {
            self.out.push(b'J');
            self.out.extend(n.to_le_bytes());
        } else {
            self.out.extend([0x8a, 8]);
            self.out.extend(value.to_le_bytes());
        }
    }

    fn text(&mut self, text: &str) {
        let out = &mut self.out;
        remember(&mut self.memo, out, format!("'{text}"), |out| {
            out.push(b'X');
            out.extend((text.len() as u32).to_le_bytes());
            out.extend(text.as_bytes());
        });
    }

    fn global(&mut self, module: &str, name: &str) {
        remember(&mut self.memo, &mut self.out, format!("{module} {name}"), |out| {
            out.extend(format!("c{module}\n{name}\n").as_bytes());
        });
    }
}

/// Writes what is new and memoises it, or refers to it.
fn remember(
    memo: &mut HashMap<String, u32>,
    out: &mut Vec<u8>,
    key: String,
    write: impl FnOnce(&mut Vec<u8>),
) {
    let (index, short, long) = match memo.get(&key) {
        Some(&index) => (index, b'h', b'j'),
        None => {
            write(out);
            let index = memo.len() as u32;
            memo.insert(key, index);
            (index, b'q', b'r')
        }
    };
    match u8::try_from(index) {
        Ok(index) => out.extend([short, index]),
        Err(_) => {
            out.push(long);
            out.extend(index.to_le_bytes());
        }
    }
}

/// The opcode that makes a tuple; more than three elements need a mark before them.
fn tuple_of(len: usize) -> u8 {
    [b')', 0x85, 0x86, 0x87].get(len).copied().unwrap_or(b't')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::pickle::parse_bytes;
    use crate::value::{Node, Value, Values};

    fn leaf() -> impl Strategy<Value = Tree> {
        prop_oneof![
            Just(Tree::None),
            any::<bool>().prop_map(Tree::Bool),
            prop_oneof![any::<i64>(), -300i64..70_000, Just(i64::MIN)].prop_map(Tree::Int),
            any::<f64>().prop_map(Tree::Float),
            ".{0,12}".prop_map(Tree::Str),
            proptest::collection::vec(any::<u8>(), 0..9).prop_map(Tree::Bytes),
            proptest::collection::vec(0u64..1 << 40, 0..5).prop_map(Tree::Size),
            Just(Tree::Global("torch".into(), "bfloat16".into())),
            (0u32..4).prop_map(|i| Tree::Tensor(format!("t{i}"))),
        ]
    }

    fn tree() -> impl Strategy<Value = Tree> {
        leaf().prop_recursive(5, 400, 6, |inner| {
            let pairs = proptest::collection::vec((".{0,6}".prop_map(Tree::Str), inner.clone()), 0..6);
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(Tree::List),
                proptest::collection::vec(inner, 0..6).prop_map(Tree::Tuple),
                pairs.clone().prop_map(Tree::Dict),
                pairs.prop_map(Tree::Ordered),
            ]
        })
    }

    const SHAPES: [&[u64]; 4] = [&[], &[0, 3], &[2, 3, 4, 5], &[1 << 33, 2]];
    const DTYPES: [Dtype; 4] = [Dtype::Bf16, Dtype::F32, Dtype::U16, Dtype::F8E4m3];

    /// Compares by hand: the reader is another machine with other types.
    fn same(tree: &Tree, values: &Values, node: Node, tensors: &mut Vec<u32>) -> bool {
        let all = |items: &[Tree], nodes: &[Node], tensors: &mut Vec<u32>| {
            items.len() == nodes.len() && items.iter().zip(nodes).all(|(t, &n)| same(t, values, n, tensors))
        };
        match (tree, values.get(node)) {
            (Tree::None, Value::None) => true,
            (Tree::Bool(a), Value::Bool(b)) => a == b,
            (Tree::Int(a), Value::Int(b)) => a == b,
            (Tree::Float(a), Value::Float(b)) => a.to_bits() == b.to_bits(),
            (Tree::Str(a), Value::Str(b)) => a == b,
            (Tree::Bytes(a), Value::Bytes(b)) => a == b,
            (Tree::List(a), Value::List(b)) | (Tree::Tuple(a), Value::Tuple(b)) => all(a, b, tensors),
            (Tree::Dict(a) | Tree::Ordered(a), Value::Dict(b)) => {
                a.len() == b.len()
                    && a.iter().zip(b).all(|((k, v), (kn, vn))| {
                        same(k, values, *kn, tensors) && same(v, values, *vn, tensors)
                    })
            }
            (Tree::Size(a), Value::Tuple(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(d, n)| *values.get(*n) == Value::Int(*d as i64))
            }
            (Tree::Global(module, name), Value::Global(read)) => *read == format!("{module}.{name}"),
            (Tree::Tensor(name), Value::Tensor(index)) => {
                tensors.push(*index);
                name.starts_with('t')
            }
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn the_reader_finds_what_was_written(tree in tree()) {
            let stored = |name: &str| {
                let i = name[1..].parse::<usize>().ok()?;
                Some(Stored { dtype: DTYPES[i], shape: SHAPES[i], key: i as u32 })
            };
            let bytes = pickle(&tree, &stored).unwrap();
            let read = parse_bytes(&bytes, std::path::Path::new("x")).unwrap();
            let mut indices = Vec::new();
            prop_assert!(same(&tree, &read.values, read.values.root(), &mut indices), "{tree:?}");
            let named = tree.tensors();
            prop_assert_eq!(named.len(), indices.len());
            for ((_, name), index) in named.iter().zip(indices) {
                let want = stored(name).unwrap();
                let tensor = &read.tensors[index as usize];
                let storage = &read.storages[tensor.storage as usize];
                prop_assert_eq!(&tensor.dtype, &Ok(want.dtype));
                prop_assert_eq!(&tensor.shape[..], want.shape);
                prop_assert_eq!(&storage.key, &want.key.to_string());
                let size = if storage_class(want.dtype).is_some() { 1 } else { want.dtype.size() as u64 };
                prop_assert_eq!(storage.numel, size * want.shape.iter().product::<u64>());
                prop_assert_eq!((tensor.offset, storage.location.as_str()), (0, "cpu"));
            }
            let json = serde_json::to_string(&tree).unwrap();
            let again: Tree = serde_json::from_str(&json).unwrap();
            prop_assert!(again == tree || json.contains("NaN"), "{json}");
        }
    }

    #[test]
    fn a_tensor_that_nothing_makes_is_refused() {
        let error = pickle(&Tree::Tensor("w".into()), &|_| None).unwrap_err();
        assert_eq!(error.findings()[0].code, codes::MISSING_TENSOR);
    }
}
