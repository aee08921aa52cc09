//! Tensors of which a rank's file holds a part: `DTensor` and `ShardedTensor`, as `torch.save` writes them.
//!
//! Both are `_rebuild_from_type_v2(_rebuild_wrapper_subclass, class, (class, dtype, size, stride, ...), state)`
//! (torch/_tensor.py, `_reduce_ex_internal`). What is read here is what the state says: the mesh, the rank's place in
//! it and the placements, or the shards with their offsets. Which box of the whole that makes is not decided here.
//!
//! Sources: torch/distributed/tensor/{_api,_dtensor_spec,placement_types}.py, device_mesh.py, _mesh_layout.py;
//! _shard/sharded_tensor/{api,shard,metadata}.py (2.3 to 2.15, whose class names and fields differ).

use std::collections::HashMap;

use crate::format::pickle::PickledTensor;
use crate::format::{Distributed, Mesh, Of, Part, Placement, Shard};
use crate::value::{Node, Value, Values};

/// Dimensions of a mesh or a tensor at most, and sizes that make up a mesh's.
const MAX_DIMS: usize = 64;
/// Different meshes of a file at most: each value is looked up among them.
const MAX_MESHES: usize = 1024;
/// Shards of one tensor that a rank holds at most; FSDP gives it one.
const MAX_SHARDS: usize = 64;
const REBUILD: &str = "torch._tensor._rebuild_from_type_v2";
const WRAPPER: &str = "torch._utils._rebuild_wrapper_subclass";

/// What a record of a wrapper subclass stands for, before its local tensors have their places in the listing.
pub(super) struct Wrapped {
    shape: Vec<u64>,
    of: Local,
}

enum Local {
    Placed { mesh: Node, placements: Vec<Placement>, order: Option<Vec<(u64, Vec<u64>)>>, tensor: Node },
    Sharded { rank: Option<u64>, ranks: Option<u64>, shards: Vec<(Vec<u64>, Vec<u64>, Node)> },
}

impl Wrapped {
    /// The local tensors, in order.
    pub(super) fn tensors(&self) -> Vec<Node> {
        match &self.of {
            Local::Placed { tensor, .. } => vec![*tensor],
            Local::Sharded { shards, .. } => shards.iter().map(|shard| shard.2).collect(),
        }
    }
}

/// The class of a wrapper subclass, if the record is one.
pub(super) fn class_of(values: &Values, node: Node) -> Option<&str> {
    let items = wrapper(values, node)?;
    global(values, items[1])
}

/// The four arguments of a record that stands for a wrapper subclass.
fn wrapper(values: &Values, node: Node) -> Option<&[Node]> {
    let Value::Record { class, args, .. } = values.get(node) else { return None };
    let items = sequence(values, *args)?;
    (global(values, *class) == Some(REBUILD) && items.len() == 4 && global(values, items[0]) == Some(WRAPPER))
        .then_some(items)
}

/// What a record says, if it is a `DTensor` or a `ShardedTensor`; a clause that says why it cannot be read.
pub(super) fn read(
    values: &Values,
    pickled: &[PickledTensor],
    node: Node,
) -> Option<Result<Wrapped, &'static str>> {
    let items = wrapper(values, node)?;
    match global(values, items[1])? {
        "torch.distributed.tensor.DTensor"
        | "torch.distributed.tensor._api.DTensor"
        | "torch.distributed.tensor.api.DTensor" => Some(dtensor(values, items[2], items[3])),
        "torch.distributed._tensor.api.DTensor" | "torch.distributed._tensor.DTensor" => {
            Some(dtensor(values, items[2], items[3]).and_then(one_order))
        }
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
        | "torch.distributed._shard.sharded_tensor.ShardedTensor" => {
            Some(sharded(values, pickled, items[2], items[3]))
        }
        _ => None,
    }
}

fn dtensor(values: &Values, args: Node, state: Node) -> Result<Wrapped, &'static str> {
    let shape = whole(values, args)?;
    let tensor = field(values, state, "_local_tensor").ok_or("it has no local tensor")?;
    if !matches!(values.get(tensor), Value::Tensor(_)) {
        return Err("its local tensor is not plain");
    }
    let spec = field(values, state, "_spec").ok_or("it has no spec")?;
    let mesh = field(values, spec, "mesh").ok_or("its spec has no mesh")?;
    let listed = field(values, spec, "placements").and_then(|node| sequence(values, node));
    let listed = listed.filter(|items| items.len() <= MAX_DIMS).ok_or("its spec has no placements")?;
    let placements: Option<Vec<_>> = listed.iter().map(|&node| placement(values, node)).collect();
    let placements = placements.ok_or("a placement is none that is known")?;
    let order = match field(values, spec, "shard_order") {
        Some(node) if *values.get(node) != Value::None => Some(order(values, node).ok_or("shard_order")?),
        _ => None,
    };
    Ok(Wrapped { shape, of: Local::Placed { mesh, placements, order, tensor } })
}

/// Before torch 2.5 FSDP2 wrote two plain shards of a dimension where tensor parallelism had divided it first, and
/// everybody else where the outer dimension of the mesh had (torch/distributed/_composable/fsdp/_fsdp_param.py, 2.4).
fn one_order(wrapped: Wrapped) -> Result<Wrapped, &'static str> {
    let Local::Placed { placements, .. } = &wrapped.of else { return Ok(wrapped) };
    let mut dims = std::collections::HashSet::new();
    let twice = placements.iter().any(|p| matches!(p, Placement::Shard { dim } if !dims.insert(*dim)));
    if twice {
        return Err("before torch 2.5 nothing says which dimension of the mesh divided it first");
    }
    Ok(wrapped)
}

/// `((tensor dimension, mesh dimensions), ...)`, each a named tuple.
fn order(values: &Values, node: Node) -> Option<Vec<(u64, Vec<u64>)>> {
    let entry = |&node: &Node| {
        let items = match values.get(node) {
            Value::Record { args, .. } => sequence(values, *args)?,
            _ => sequence(values, node)?,
        };
        let &[dim, dims] = items else { return None };
        Some((number(values, dim)?, numbers(values, dims)?))
    };
    sequence(values, node).filter(|items| items.len() <= MAX_DIMS)?.iter().map(entry).collect()
}

fn placement(values: &Values, node: Node) -> Option<Placement> {
    let Value::Record { class, .. } = values.get(node) else { return None };
    let name = global(values, *class)?.strip_prefix("torch.distributed.")?;
    let dim = || number(values, field(values, node, "dim")?);
    Some(match name.rsplit('.').next()? {
        "Replicate" => Placement::Replicate,
        "Shard" => Placement::Shard { dim: dim()? },
        "_StridedShard" => {
            Placement::Strided { dim: dim()?, split: number(values, field(values, node, "split_factor")?)? }
        }
        "Partial" | "_Partial" | "_MaskPartial" | "_NormPartial" => Placement::Partial,
        _ => return None,
    })
}

fn sharded(
    values: &Values,
    pickled: &[PickledTensor],
    args: Node,
    state: Node,
) -> Result<Wrapped, &'static str> {
    let shape = whole(values, args)?;
    let parts = sequence(values, state).filter(|items| items.len() >= 3).ok_or("its state is not torch's")?;
    let shards = sequence(values, parts[0]).filter(|shards| shards.len() <= MAX_SHARDS);
    let shards = shards.ok_or("it has no list of shards")?;
    let declared = field(values, parts[1], "size").and_then(|node| numbers(values, node));
    if declared.is_some_and(|declared| declared != shape) {
        return Err("its metadata states another size");
    }
    let shard = |&node: &Node| {
        let tensor = field(values, node, "tensor")?;
        let Value::Tensor(index) = *values.get(tensor) else { return None };
        let metadata = field(values, node, "metadata")?;
        let lo = numbers(values, field(values, metadata, "shard_offsets")?)?;
        let size = numbers(values, field(values, metadata, "shard_sizes")?)?;
        // A flat parameter's last shard is padded in storage, not in its view.
        (pickled.get(index as usize)?.shape == size).then_some((lo, size, tensor))
    };
    let shards: Option<Vec<_>> = shards.iter().map(shard).collect();
    let shards = shards.ok_or("a shard is not what its metadata says")?;
    let of_group = |name: &str| field(values, parts[2], name).and_then(|node| number(values, node));
    let (rank, ranks) = (of_group("global_rank"), of_group("global_world_size"));
    Ok(Wrapped { shape, of: Local::Sharded { rank, ranks, shards } })
}

/// The shape of the whole among the arguments `(class, dtype, size, stride, ...)`.
fn whole(values: &Values, args: Node) -> Result<Vec<u64>, &'static str> {
    sequence(values, args)
        .and_then(|items| numbers(values, *items.get(2)?))
        .ok_or("the size of the full tensor is not stated")
}

/// Puts together what a file says of its parts; meshes that many values share are told once.
#[derive(Default)]
pub(super) struct Collector {
    pub(super) found: Distributed,
    meshes: HashMap<Node, u32>,
}

impl Collector {
    /// Adds a part; `listed` says where its local tensors begin in the listing.
    ///
    /// # Errors
    /// A clause that says why the mesh cannot be read.
    pub(super) fn add(
        &mut self,
        values: &Values,
        pickled: &[PickledTensor],
        path: Vec<String>,
        wrapped: Wrapped,
        listed: u32,
    ) -> Result<(), &'static str> {
        let of = match wrapped.of {
            Local::Placed { mesh, placements, order, .. } => {
                let mesh = match self.meshes.get(&mesh) {
                    Some(&known) => known,
                    None => {
                        let read = mesh_of(values, pickled, mesh)
                            .ok_or("its mesh is in a form that is not known")?;
                        // Each value has a mesh of its own where a parameter was saved by itself.
                        let same = self.found.meshes.iter().position(|m| *m == read);
                        if same.is_none() && self.found.meshes.len() == MAX_MESHES {
                            return Err("the file has more meshes than any run");
                        }
                        let index = same.unwrap_or_else(|| {
                            self.found.meshes.push(read);
                            self.found.meshes.len() - 1
                        });
                        self.meshes.insert(mesh, index as u32);
                        index as u32
                    }
                };
                if placements.len() != self.found.meshes[mesh as usize].shape.len() {
                    return Err("it has not one placement for each dimension of its mesh");
                }
                Of::Placed { mesh, placements, order, tensor: listed }
            }
            Local::Sharded { rank, ranks, shards } => {
                let shards = shards.into_iter().zip(listed..);
                let shards = shards.map(|((lo, size, _), tensor)| Shard { lo, size, tensor }).collect();
                Of::Sharded { rank, ranks, shards }
            }
        };
        self.found.parts.push(Part { path, shape: wrapped.shape, of });
        Ok(())
    }
}

fn mesh_of(values: &Values, pickled: &[PickledTensor], node: Node) -> Option<Mesh> {
    let Value::Record { class, .. } = values.get(node) else { return None };
    global(values, *class)
        .filter(|name| name.starts_with("torch.distributed.") && name.ends_with(".DeviceMesh"))?;
    let shape = match field(values, node, "_layout") {
        Some(layout) => layout_shape(values, layout)?,
        None => match values.get(field(values, node, "mesh")?) {
            Value::Tensor(index) => pickled.get(*index as usize)?.shape.clone(),
            _ => return None,
        },
    };
    if shape.len() > MAX_DIMS {
        return None;
    }
    let names = ["_mesh_dim_names", "mesh_dim_names"].iter().find_map(|name| field(values, node, name));
    let names = names.and_then(|names| sequence(values, names)).map(|items| {
        let text = |&node: &Node| match values.get(node) {
            Value::Str(text) => text.clone(),
            _ => String::new(),
        };
        items.iter().map(text).collect()
    });
    let coordinate = field(values, node, "_coordinate_on_dim").and_then(|node| numbers(values, node));
    let coordinate = coordinate.filter(|at| at.len() == shape.len());
    let listed = |name: &str| field(values, node, name).and_then(|node| sequence(values, node));
    let rank = field(values, node, "_rank").and_then(|node| number(values, node)).or_else(|| {
        // Before 2.10 the list is that of the mesh itself, in the order of its coordinates.
        let at = coordinate.as_ref()?.iter().zip(&shape).try_fold(0u64, |at, (&i, &n)| {
            if i < n {
                at.checked_mul(n)?.checked_add(i)
            } else {
                None
            }
        })?;
        number(values, *listed("_flatten_mesh_list")?.get(usize::try_from(at).ok()?)?)
    });
    let ranks = listed("_flatten_rank_map").or_else(|| listed("_flatten_mesh_list"));
    Some(Mesh { shape, names, coordinate, rank, ranks: ranks.map(|ranks| ranks.len() as u64) })
}

/// Sizes of a mesh's dimensions by its layout: one entry each, which is a size, a nest of sizes (2.10 to 2.12), or a
/// layout of its own (2.15).
fn layout_shape(values: &Values, layout: Node) -> Option<Vec<u64>> {
    let axes = field(values, layout, "axes");
    let listed = axes.or_else(|| field(values, layout, "shape"))?;
    let mut left = MAX_DIMS;
    let mut size = |node: Node| {
        let mut all = 1u64;
        let mut open = vec![node];
        while let Some(node) = open.pop() {
            left = left.checked_sub(1)?;
            match sequence(values, node) {
                Some(items) if items.len() <= left => open.extend(items),
                Some(_) => return None,
                None => all = all.checked_mul(number(values, node)?)?,
            }
        }
        Some(all)
    };
    match sequence(values, listed) {
        Some(items) if axes.is_some() => {
            items.iter().map(|&axis| size(field(values, axis, "shape")?)).collect()
        }
        Some(items) => items.iter().map(|&item| size(item)).collect(),
        None => Some(vec![number(values, listed)?]),
    }
}

/// An attribute of an object: in its state, which is a dict, or a pair of one and those of its slots.
fn field(values: &Values, node: Node, name: &str) -> Option<Node> {
    let state = match values.get(node) {
        Value::Record { state, .. } => (*state)?,
        _ => node,
    };
    match values.get(state) {
        Value::Dict(_) => values.lookup(state, name),
        Value::Tuple(pair) if pair.len() == 2 => pair.iter().find_map(|&half| values.lookup(half, name)),
        _ => None,
    }
}

fn global(values: &Values, node: Node) -> Option<&str> {
    match values.get(node) {
        Value::Global(name) => Some(name),
        _ => None,
    }
}

fn sequence(values: &Values, node: Node) -> Option<&[Node]> {
    match values.get(node) {
        Value::Tuple(items) | Value::List(items) => Some(items),
        _ => None,
    }
}

fn number(values: &Values, node: Node) -> Option<u64> {
    match values.get(node) {
        Value::Int(n) => u64::try_from(*n).ok(),
        _ => None,
    }
}

fn numbers(values: &Values, node: Node) -> Option<Vec<u64>> {
    let items = sequence(values, node).filter(|items| items.len() <= MAX_DIMS)?;
    items.iter().map(|&item| number(values, item)).collect()
}
