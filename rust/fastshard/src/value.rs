//! Inert values: what a checkpoint says besides its tensors.
//!
//! Values live in an arena and refer to each other by index, so that shared and cyclic objects of
//! a pickle can be represented without recursion. Nothing here can call or import anything.

use serde_json::{json, Map};

use crate::memory::{self, NoMemory};

/// Index of a node in [`Values`].
pub type Node = u32;

/// One inert value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // plain data
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits, little-endian two's complement as pickled.
    BigInt(Vec<u8>),
    Float(f64),
    Str(String),
    Bytes(Vec<u8>),
    List(Vec<Node>),
    Tuple(Vec<Node>),
    Set(Vec<Node>),
    Dict(Vec<(Node, Node)>),
    /// Index into the file's tensors.
    Tensor(u32),
    /// A name the file would have imported, e.g. `argparse.Namespace`. Never imported.
    Global(String),
    /// An object of a class that is not plain data: its class, constructor arguments and state.
    Record {
        class: Node,
        args: Node,
        state: Option<Node>,
    },
}

/// An arena of values with a root.
#[derive(Debug, Clone, Default)]
pub struct Values {
    nodes: Vec<Value>,
    root: Node,
}

/// Maximum number of nodes visited when a value is turned into JSON, as shared objects would multiply
/// otherwise.
const JSON_NODES: usize = 200_000;
/// Maximum bytes of strings and keys when a value is turned into JSON, for the same reason.
const JSON_TEXT: usize = 16 << 20;
/// Maximum nesting when a value is turned into JSON.
const JSON_DEPTH: usize = 64;
/// Keys for values that JSON cannot express.
const OWN_KEYS: [&str; 5] = ["tensor__", "class__", "bytes__", "bigint_bytes__", "global__"];
/// Maximum number of elements of a tuple that has a text as a key.
const KEY_TUPLE: usize = 8;

/// The remainder of the bounds.
struct Budget {
    nodes: usize,
    text: usize,
    cut: bool,
}

impl Budget {
    /// `text` if it still fits; else no further value is visited.
    fn text(&mut self, text: &str) -> String {
        if text.len() > self.text {
            self.nodes = 0;
            self.cut = true;
            return "...".into();
        }
        self.text -= text.len();
        text.to_string()
    }
}

impl Values {
    /// Makes room for one more node.
    ///
    /// # Errors
    /// [`NoMemory`] if the system has none left.
    pub(crate) fn reserve(&mut self) -> Result<(), NoMemory> {
        memory::reserve(&mut self.nodes, 1)
    }

    /// Adds a node.
    pub fn push(&mut self, value: Value) -> Node {
        self.nodes.push(value);
        (self.nodes.len() - 1) as Node
    }

    /// The node's value.
    pub fn get(&self, node: Node) -> &Value {
        &self.nodes[node as usize]
    }

    /// The node's value, for changing it.
    pub fn get_mut(&mut self, node: Node) -> &mut Value {
        &mut self.nodes[node as usize]
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// True if there is no node.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The root node.
    pub fn root(&self) -> Node {
        self.root
    }

    /// Sets the root node.
    pub fn set_root(&mut self, root: Node) {
        self.root = root;
    }

    /// The entries of a dict under `key`, if `node` is a dict with a string key of that name.
    pub fn lookup(&self, node: Node, key: &str) -> Option<Node> {
        match self.get(node) {
            Value::Dict(items) => items
                .iter()
                .rev()
                .find(|(k, _)| matches!(self.get(*k), Value::Str(s) if s == key))
                .map(|(_, v)| *v),
            _ => None,
        }
    }

    /// The value that keys lead to from the root, by their texts (numbers in lists).
    pub fn at(&self, path: &[String]) -> Option<Node> {
        path.iter().try_fold(self.root, |node, key| match self.get(node) {
            Value::Dict(items) => {
                let named = |&&(k, _): &&(Node, Node)| self.key_text(k).as_ref() == Some(key);
                items.iter().rev().find(named).map(|&(_, value)| value)
            }
            Value::List(items) | Value::Tuple(items) => items.get(key.parse::<usize>().ok()?).copied(),
            _ => None,
        })
    }

    /// The number of times that each value is part of others.
    pub fn references(&self) -> Vec<u32> {
        let mut counts = vec![0u32; self.nodes.len()];
        let mut count = |node: Node| counts[node as usize] = counts[node as usize].saturating_add(1);
        for value in &self.nodes {
            match value {
                Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
                    items.iter().copied().for_each(&mut count);
                }
                Value::Dict(items) => items.iter().for_each(|&(key, value)| {
                    count(key);
                    count(value);
                }),
                Value::Record { class, args, state } => {
                    [*class, *args].into_iter().chain(*state).for_each(&mut count);
                }
                _ => {}
            }
        }
        counts
    }

    /// A dict's key as text: strings as they are; numbers, constants, names and short tuples of
    /// these much as Python prints them. `None` for all other keys.
    pub fn key_text(&self, key: Node) -> Option<String> {
        match self.get(key) {
            Value::Str(s) | Value::Global(s) => Some(s.clone()),
            Value::Int(i) => Some(i.to_string()),
            Value::Bool(true) => Some("True".into()),
            Value::Bool(false) => Some("False".into()),
            Value::None => Some("None".into()),
            Value::Tuple(items) if items.len() <= KEY_TUPLE => {
                let plain = |&n: &Node| match self.get(n) {
                    Value::Tuple(_) => None,
                    _ => self.key_text(n),
                };
                let items: Option<Vec<String>> = items.iter().map(plain).collect();
                Some(format!("({})", items?.join(", ")))
            }
            _ => None,
        }
    }

    /// The root as JSON: bounded in nodes, text and depth, tensors as `{"__tensor__": index}`, records
    /// as `{"__class__": name, ...}`, bytes by their length, keys without a text as `"__key<node>__"`,
    /// everything beyond the bounds as `"..."`. A file's own key that reads like one of these gets one more
    /// underscore.
    pub fn to_json(&self) -> serde_json::Value {
        self.to_json_whole().0
    }

    /// [`Values::to_json`], and whether it is complete: false if a bound was reached.
    pub fn to_json_whole(&self) -> (serde_json::Value, bool) {
        if self.nodes.is_empty() {
            return (serde_json::Value::Null, true);
        }
        let mut budget = Budget { nodes: JSON_NODES, text: JSON_TEXT, cut: false };
        let value = self.node_json(self.root, 0, &mut budget);
        (value, !budget.cut)
    }

    fn node_json(&self, node: Node, depth: usize, budget: &mut Budget) -> serde_json::Value {
        if budget.nodes == 0 || depth > JSON_DEPTH {
            budget.cut = true;
            return json!("...");
        }
        budget.nodes -= 1;
        match self.get(node) {
            Value::None => serde_json::Value::Null,
            Value::Bool(b) => json!(b),
            Value::Int(i) => json!(i),
            Value::BigInt(bytes) => json!({"__bigint_bytes__": bytes.len()}),
            Value::Float(x) if x.is_finite() => json!(x),
            Value::Float(x) => json!(x.to_string()),
            Value::Str(s) => json!(budget.text(s)),
            Value::Bytes(b) => json!({"__bytes__": b.len()}),
            Value::List(v) | Value::Tuple(v) | Value::Set(v) => {
                let mut items = Vec::new();
                for &n in v {
                    items.push(self.node_json(n, depth + 1, budget));
                    if budget.cut && budget.nodes == 0 {
                        break;
                    }
                }
                items.into()
            }
            Value::Dict(items) => {
                let mut map = Map::new();
                for &(k, v) in items {
                    let key = self.key_text(k).unwrap_or_else(|| format!("__key{k}__"));
                    let own = key.starts_with("__") && OWN_KEYS.contains(&key.trim_start_matches('_'));
                    let key = budget.text(&if own { format!("_{key}") } else { key });
                    map.insert(key, self.node_json(v, depth + 1, budget));
                    if budget.cut && budget.nodes == 0 {
                        break;
                    }
                }
                map.into()
            }
            Value::Tensor(i) => json!({"__tensor__": i}),
            Value::Global(name) => json!({"__global__": budget.text(name)}),
            Value::Record { class, args, state } => {
                // Moved into the map: `json!` would copy the subtree at each level.
                let mut map = Map::new();
                let class = match self.get(*class) {
                    Value::Global(name) => json!(budget.text(name)),
                    _ => self.node_json(*class, depth + 1, budget),
                };
                map.insert("__class__".into(), class);
                map.insert("args".into(), self.node_json(*args, depth + 1, budget));
                if let Some(state) = state {
                    map.insert("state".into(), self.node_json(*state, depth + 1, budget));
                }
                map.into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dict(entries: &[(&str, i64)]) -> Values {
        let mut values = Values::default();
        let items = entries
            .iter()
            .map(|(key, n)| (values.push(Value::Str((*key).into())), values.push(Value::Int(*n))))
            .collect();
        let root = values.push(Value::Dict(items));
        values.set_root(root);
        values
    }

    #[test]
    fn keys_of_a_file_do_not_read_like_ours() {
        let values =
            dict(&[("__tensor__", 1), ("___tensor__", 2), ("__class__", 3), ("_tensor__", 4), ("a", 5)]);
        let want = json!({"___tensor__": 1, "____tensor__": 2, "___class__": 3, "_tensor__": 4, "a": 5});
        assert_eq!(values.to_json_whole(), (want, true));
    }

    #[test]
    fn what_lies_beyond_the_bounds_is_told() {
        for (count, whole) in [(JSON_NODES - 1, true), (JSON_NODES, false)] {
            let mut values = Values::default();
            let items = (0..count).map(|_| values.push(Value::None)).collect();
            let root = values.push(Value::List(items));
            values.set_root(root);
            assert_eq!(values.to_json_whole().1, whole);
        }
        let mut values = dict(&[]);
        for _ in 0..=JSON_DEPTH {
            let root = values.push(Value::List(vec![values.root()]));
            values.set_root(root);
        }
        assert!(!values.to_json_whole().1);
    }
}
