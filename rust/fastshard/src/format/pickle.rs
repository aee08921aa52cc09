//! Inert pickle machine: protocols 0 to 5, as far as plain data and torch tensors go.
//!
//! Nothing is imported or called. A name becomes [`Value::Global`], a call becomes
//! [`Value::Record`], and a closed table (`pickle/calls.rs`) turns the constructors of plain data and of
//! torch tensors into values. Values live in an arena, so neither building nor dropping them
//! recurses, and an object that a stream mentions often is stored once.
//!
//! Opcodes follow CPython's `Lib/pickletools.py`; what torch writes follows `torch/_utils.py`,
//! `torch/_tensor.py` and `torch/serialization.py` (2.x).

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use crate::codes;
use crate::error::{Error, Finding, Result};
use crate::memory;
use crate::tensor::Dtype;
use crate::value::{Node, Value, Values};

mod calls;
mod opcodes;
pub mod writer;

/// Hard limits of the machine; a stream beyond one of them is refused.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of the stream.
    pub stream: usize,
    /// Containers nested in each other, and marks open at the same time.
    pub depth: usize,
    /// Objects remembered for later reference.
    pub memo: usize,
    /// Values made, plus references from one value to another; also at most 8 for each byte of the
    /// stream, so that memory and time are linear in its length.
    pub nodes: usize,
    /// Objects on the stack.
    pub stack: usize,
    /// Bytes of one integer.
    pub long: usize,
    /// Bytes that calls copy out of strings of the stream, for each byte of the stream.
    pub derived: usize,
}

/// The limits that [`parse_bytes`] applies.
///
/// The largest streams seen are `.metadata` files of torch's distributed checkpoints: about 100
/// bytes and 40 nodes for each shard of each tensor. A node takes 32 bytes of memory.
pub const LIMITS: Limits = Limits {
    stream: 512 << 20,
    depth: 1000,
    memo: 1 << 25,
    nodes: 1 << 26,
    stack: 1 << 22,
    long: 1024,
    derived: 4,
};

/// A storage that a tensor names by persistent id `("storage", class, key, location, numel)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Storage {
    /// Class, e.g. `torch.FloatStorage`.
    pub class: String,
    /// Element type of the class (`U8` for `UntypedStorage`), or its torch name if unsupported.
    pub dtype: std::result::Result<Dtype, String>,
    /// Name of the zip member below `data/`.
    pub key: String,
    /// Device it was saved from, e.g. `cpu` or `cuda:3`.
    pub location: String,
    /// Elements of `dtype`.
    pub numel: u64,
}

/// A tensor as the stream describes it; nothing is checked against the data yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PickledTensor {
    /// Index into [`Pickle::storages`].
    pub storage: u32,
    /// Element type, or a clause that says why the tensor is not supported.
    pub dtype: std::result::Result<Dtype, String>,
    /// Offset in the storage, in elements.
    pub offset: u64,
    /// Shape; empty for 0-d.
    pub shape: Vec<u64>,
    /// Strides in elements, as many as dimensions.
    pub strides: Vec<u64>,
}

/// What a pickle stream says.
#[derive(Debug)]
pub struct Pickle {
    /// All values; [`Value::Tensor`] is an index into `tensors`.
    pub values: Values,
    /// Tensors in the order of the stream, wherever they are used.
    pub tensors: Vec<PickledTensor>,
    /// Storages in the order of the stream; one storage of the file may appear several times.
    pub storages: Vec<Storage>,
}

/// Interprets `bytes` under [`LIMITS`]. `file` is only named in refusals (`FS602`, or `FS514` for
/// protocols and buffers that torch does not write).
pub fn parse_bytes(bytes: &[u8], file: &Path) -> Result<Pickle> {
    parse_within(bytes, file, &LIMITS)
}

/// Like [`parse_bytes`], under limits of the caller's.
pub fn parse_within(bytes: &[u8], file: &Path, limits: &Limits) -> Result<Pickle> {
    run(bytes, file, limits, false).map(|(pickle, _)| pickle)
}

/// Where the numbers of a stream lie that were made at one place and no other value is made of: by node, where in the
/// stream their bytes are. All-zero bytes there spell zero.
pub type Numbers = HashMap<Node, Range<usize>>;

/// Like [`parse_bytes`], with the places of the numbers that a binary opcode holds.
pub fn parse_with_numbers(bytes: &[u8], file: &Path) -> Result<(Pickle, Numbers)> {
    let mut machine = Machine::new(bytes, file, &LIMITS);
    machine.numbers = Some(HashMap::new());
    let (pickle, numbers) = machine.finish(false)?.0;
    Ok((pickle, numbers.unwrap_or_default()))
}

/// Like [`parse_within`], for a stream that other bytes follow; with the length of the stream.
pub fn parse_prefix(bytes: &[u8], file: &Path, limits: &Limits) -> Result<(Pickle, usize)> {
    run(bytes, file, limits, true)
}

/// The function that makes a storage of bytes, in pickles that torch writes outside its own files.
/// A tensor over its result is left a record: the stream holds the data of it.
pub const NESTED_STORAGE: &str = "torch.storage._load_from_bytes";

/// Element type of a storage class, e.g. `torch.FloatStorage`.
pub fn storage_dtype(class: &str) -> Option<Dtype> {
    calls::storage_dtype(class)?.ok()
}

fn run(bytes: &[u8], file: &Path, limits: &Limits, more: bool) -> Result<(Pickle, usize)> {
    let ((pickle, _), len) = Machine::new(bytes, file, limits).finish(more)?;
    Ok((pickle, len))
}

/// Values and references that a byte of the stream can make, with room for one copy by a call: the
/// busiest opcode makes four.
const NODES_PER_BYTE: usize = 8;
/// Marks a memo index that nothing was stored under.
const VACANT: Node = Node::MAX;

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    op: u8,
    op_at: usize,
    file: &'a Path,
    limits: &'a Limits,
    stack: Vec<Node>,
    /// Heights of the stack where a MARK was set.
    marks: Vec<usize>,
    memo: Vec<Node>,
    values: Values,
    /// Nesting of each value when it was last changed.
    depth: Vec<u16>,
    nodes: usize,
    derived: usize,
    tensors: Vec<PickledTensor>,
    storages: Vec<Storage>,
    /// Values that stand for a storage. A record of the same class made by a call is none.
    storage_of: HashMap<Node, u32>,
    /// Records whose state is the container of the items that were appended to them.
    with_items: HashSet<Node>,
    /// Kept where they are asked for.
    numbers: Option<Numbers>,
}

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8], file: &'a Path, limits: &'a Limits) -> Self {
        Machine {
            bytes,
            at: 0,
            op: 0,
            op_at: 0,
            file,
            limits,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            values: Values::default(),
            depth: Vec::new(),
            nodes: 0,
            derived: 0,
            tensors: Vec::new(),
            storages: Vec::new(),
            storage_of: HashMap::new(),
            with_items: HashSet::new(),
            numbers: None,
        }
    }

    /// Runs the stream; with what was made, and the length of the stream.
    fn finish(mut self, more: bool) -> Result<((Pickle, Option<Numbers>), usize)> {
        self.limit("bytes of the stream", self.bytes.len(), self.limits.stream)?;
        self.run()?;
        let len = self.at;
        if !more && len != self.bytes.len() {
            return Err(self.refuse(format!("{} bytes follow the end", self.bytes.len() - len)));
        }
        let pickle = Pickle { values: self.values, tensors: self.tensors, storages: self.storages };
        Ok(((pickle, self.numbers), len))
    }

    fn finding(&self, message: impl std::fmt::Display) -> Finding {
        let name = opcodes::name(self.op);
        Finding::new(codes::UNSAFE_PICKLE, format!("pickle opcode {name} at byte {}: {message}", self.op_at))
            .file(self.file)
            .help("copy or download the file again: it is damaged, or not written by torch")
    }

    fn refuse(&self, message: impl std::fmt::Display) -> Error {
        self.finding(message).into()
    }

    fn unsupported(&self, message: impl std::fmt::Display) -> Error {
        let mut finding = self.finding(message);
        finding.code = codes::UNSUPPORTED;
        finding.help = Some("save it again with torch.save and its default protocol".into());
        finding.into()
    }

    fn limit(&self, what: &str, got: usize, limit: usize) -> Result<()> {
        if got <= limit {
            return Ok(());
        }
        Err(self.finding(what).expected(format!("at most {limit}"), got).into())
    }

    /// The next `len` bytes of the stream.
    fn take(&mut self, len: u64) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        if len > rest.len() as u64 {
            return Err(self
                .finding("the stream ends too early")
                .expected(format!("{len} bytes"), format!("{} bytes", rest.len()))
                .into());
        }
        self.at += len as usize;
        Ok(&rest[..len as usize])
    }

    /// The next `N` bytes of the stream.
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N as u64)?.try_into().expect("take gives the length asked for"))
    }

    /// The bytes up to the next newline, without it.
    fn line(&mut self) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let len = rest.iter().position(|&b| b == b'\n').ok_or_else(|| self.refuse("a line without end"))?;
        self.at += len + 1;
        Ok(&rest[..len])
    }

    fn text(&self, bytes: &[u8]) -> Result<String> {
        String::from_utf8(bytes.to_vec()).map_err(|_| self.refuse("a string that is not UTF-8"))
    }

    /// Accounts for `count` values or references.
    fn spend(&mut self, count: usize) -> Result<()> {
        self.afford(count)?;
        self.nodes += count;
        Ok(())
    }

    /// Refuses a copy of `count` references before it is made; making the value accounts for it.
    fn afford(&self, count: usize) -> Result<()> {
        let limit = self.limits.nodes.min(NODES_PER_BYTE * self.bytes.len());
        self.limit("values", self.nodes.saturating_add(count), limit)
    }

    /// Accounts for `count` bytes copied out of a string that is already there.
    fn derive(&mut self, count: usize) -> Result<()> {
        self.derived = self.derived.saturating_add(count);
        self.limit("bytes derived by calls", self.derived, self.limits.derived * self.bytes.len())
    }

    /// Adds a value to the arena.
    fn make(&mut self, value: Value) -> Result<Node> {
        let below = |nodes: &[Node]| {
            nodes.iter().map(|&n| self.depth[n as usize].saturating_add(1)).max().unwrap_or(0)
        };
        let (depth, references) = match &value {
            Value::List(v) | Value::Tuple(v) | Value::Set(v) => (below(v), v.len()),
            Value::Dict(items) => {
                (items.iter().map(|&(k, v)| below(&[k, v])).max().unwrap_or(0), 2 * items.len())
            }
            Value::Record { class, args, state } => (below(&[*class, *args, state.unwrap_or(*args)]), 3),
            _ => (0, 0),
        };
        self.limit("containers nested", depth.into(), self.limits.depth)?;
        self.spend(1 + references)?;
        memory::reserve(&mut self.depth, 1)?;
        self.values.reserve()?;
        self.depth.push(depth);
        Ok(self.values.push(value))
    }

    /// Accounts for `item` becoming part of `container`.
    fn attach(&mut self, container: Node, item: Node) -> Result<()> {
        let depth = self.depth[container as usize].max(self.depth[item as usize].saturating_add(1));
        self.limit("containers nested", depth.into(), self.limits.depth)?;
        self.depth[container as usize] = depth;
        self.spend(1)
    }

    fn push(&mut self, node: Node) -> Result<()> {
        self.limit("objects on the stack", self.stack.len() + 1, self.limits.stack)?;
        memory::reserve(&mut self.stack, 1)?;
        self.stack.push(node);
        Ok(())
    }

    /// Makes a value and pushes it.
    fn push_value(&mut self, value: Value) -> Result<()> {
        let node = self.make(value)?;
        self.push(node)
    }

    /// Number of objects above the innermost mark; those below are out of reach until it is popped.
    fn height(&self) -> usize {
        self.stack.len() - self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Node> {
        self.top()?;
        Ok(self.stack.pop().expect("top has looked"))
    }

    fn top(&self) -> Result<Node> {
        if self.height() == 0 {
            return Err(self.refuse("nothing is on the stack"));
        }
        Ok(self.stack[self.stack.len() - 1])
    }

    /// All objects above the innermost mark, and removes the mark.
    fn pop_mark(&mut self) -> Result<Vec<Node>> {
        let mark = self.marks.pop().ok_or_else(|| self.refuse("no mark is set"))?;
        Ok(self.stack.split_off(mark))
    }

    fn memo_put(&mut self, index: usize) -> Result<()> {
        let node = self.top()?;
        self.limit("objects in the memo", index.saturating_add(1), self.limits.memo)?;
        // Every object takes a byte or more, so no writer's index can be ahead of the stream.
        self.limit("index into the memo", index, self.op_at)?;
        if index >= self.memo.len() {
            let more = index + 1 - self.memo.len();
            memory::reserve(&mut self.memo, more)?;
            self.memo.resize(index + 1, VACANT);
        }
        self.memo[index] = node;
        Ok(())
    }

    fn memo_get(&mut self, index: usize) -> Result<()> {
        match self.memo.get(index) {
            Some(&node) if node != VACANT => self.push(node),
            _ => Err(self.refuse(format!("nothing is in the memo under {index}"))),
        }
    }

    /// Appends to a list or set, or to a record of a class that is like one.
    fn append(&mut self, target: Node, items: &[Node]) -> Result<()> {
        let container = self.container(target, || Value::List(Vec::new()))?;
        for &item in items {
            self.attach(container, item)?;
        }
        match self.values.get_mut(container) {
            Value::List(v) | Value::Set(v) => {
                memory::reserve(v, items.len())?;
                v.extend_from_slice(items);
            }
            _ => return Err(self.refuse("the target is not a list or set")),
        }
        Ok(())
    }

    /// Sets keys of a dict, or of a record of a class that is like one. `items` alternates.
    fn set_items(&mut self, target: Node, items: &[Node]) -> Result<()> {
        if items.len() % 2 == 1 {
            return Err(self.refuse("a key without a value"));
        }
        let container = self.container(target, || Value::Dict(Vec::new()))?;
        for &item in items {
            self.attach(container, item)?;
        }
        match self.values.get_mut(container) {
            Value::Dict(entries) => {
                memory::reserve(entries, items.len() / 2)?;
                entries.extend(items.chunks_exact(2).map(|kv| (kv[0], kv[1])));
            }
            _ => return Err(self.refuse("the target is not a dict")),
        }
        Ok(())
    }

    /// What items of `target` go into: itself, or the state of a record, made by `empty`.
    fn container(&mut self, target: Node, empty: impl Fn() -> Value) -> Result<Node> {
        match *self.values.get(target) {
            Value::Record { state: Some(items), .. } if self.with_items.contains(&target) => Ok(items),
            Value::Record { state: None, class, args } => {
                let items = self.make(empty())?;
                self.attach(target, items)?;
                *self.values.get_mut(target) = Value::Record { class, args, state: Some(items) };
                self.with_items.insert(target);
                Ok(items)
            }
            _ => Ok(target),
        }
    }

    /// BUILD: gives a record its state. Attributes of dicts (`_metadata` of a state dict) and of
    /// tensors are dropped: nothing in them is a parameter.
    fn build(&mut self, target: Node, state: Node) -> Result<()> {
        match *self.values.get(target) {
            Value::Dict(_) | Value::Tensor(_) => Ok(()),
            Value::Record { state: Some(items), class, args } if self.with_items.remove(&target) => {
                let state = Some(self.make(Value::Tuple(vec![items, state]))?);
                *self.values.get_mut(target) = Value::Record { class, args, state };
                Ok(())
            }
            Value::Record { state: None, class, args } => {
                self.attach(target, state)?;
                *self.values.get_mut(target) = Value::Record { class, args, state: Some(state) };
                Ok(())
            }
            Value::Record { .. } => Err(self.refuse("the state is set twice")),
            _ => Err(self.refuse("the target has no state to set")),
        }
    }
}
