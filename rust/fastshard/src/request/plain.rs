//! Tensors that no rule names and that are there once: each becomes an output as it is, with nothing to meet or to prove.
//!
//! The layout engine would make the same of them, at some sixty microseconds each; a checkpoint without a table can have a
//! million.

use std::collections::HashSet;
use std::sync::Arc;

use super::assembled::Pass;
use crate::compose::{Drafted, Target};
use crate::few::Few;
use crate::layout::cuts::Cuts;
use crate::layout::resolve::{Outside, Stored, Unknown};
use crate::layout::table::Table;
use crate::plan::{Combine, Fill, Output, Part, PartAxis};
use crate::tensor::c_strides;

#[cfg(test)]
thread_local! {
    /// Set to have the layout engine make all of a plan.
    pub(super) static OFF: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// True if all tensors of a pass are such.
pub(super) fn all_plain(
    pass: &Pass,
    table: &Table,
    outside: &Outside,
    unknown: Unknown,
    target: &Target,
) -> bool {
    #[cfg(test)]
    if OFF.get() {
        return false;
    }
    let keeps = unknown == Unknown::Pass && target.table.is_none();
    let undivided = outside.known.degrees.values().all(|degree| *degree == 1);
    if !keeps || !undivided || !table.entries.is_empty() {
        return false;
    }
    let mut names = HashSet::with_capacity(pass.seen.len());
    pass.seen.iter().all(|tensor| names.insert(tensor.name.as_str()))
}

/// The outputs of such a pass that are wanted, by the tensors' numbers in it.
pub(super) fn outputs(pass: &Pass, target: &Target) -> Vec<Drafted> {
    let uncut: Cuts = Arc::new([]);
    let (coords, index) = (Arc::default(), Arc::default());
    let wanted = pass.seen.iter().enumerate().filter(|(_, tensor)| (target.wanted)(&tensor.name));
    let drafted = |output| Drafted {
        coords: Arc::clone(&coords),
        output,
        whole: None,
        cuts: Some(uncut.clone()),
        index: Arc::clone(&index),
    };
    wanted.map(|(i, tensor)| drafted(output(i as u32, tensor, target))).collect()
}

fn output(source: u32, tensor: &Stored, target: &Target) -> Output {
    let stored = tensor.dtype;
    let cast = target.dtype.filter(|_| stored.is_float() && !target.keep.names(&tensor.name));
    let strides = c_strides(&tensor.shape);
    let axes = tensor.shape.iter().zip(&strides).enumerate();
    let axes = axes.filter(|(_, (n, _))| **n > 1);
    let part = Part {
        axes: axes.map(|(dim, (&n, &dst))| PartAxis { n, dst, dim: dim as u32, step: 1 }).collect(),
        dst_base: 0,
        src_base: Few::repeat(0, tensor.shape.len()),
        sources: [source].into(),
        combine: Combine::Equal,
        ops: Box::default(),
    };
    Output {
        name: tensor.name.clone(),
        dtype: cast.unwrap_or(stored),
        shape: tensor.shape.clone(),
        // Without elements nothing is read.
        parts: if tensor.shape.contains(&0) { Box::default() } else { [part].into() },
        fill: Fill::None,
        file: 0,
        offset: 0,
        key: None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;
    use safetensors::tensor::{serialize_to_file, Dtype, TensorView};
    use serde_json::{json, Value};

    use super::OFF;
    use crate::catalog::Catalog;

    const DTYPES: [(Dtype, usize); 4] =
        [(Dtype::F32, 4), (Dtype::BF16, 2), (Dtype::I64, 8), (Dtype::BOOL, 1)];

    fn write(path: &Path, tensors: &[(String, Vec<usize>, usize)]) {
        let zeros = vec![0u8; 1 << 12];
        let views = tensors.iter().map(|(name, shape, dtype)| {
            let (dtype, item) = DTYPES[*dtype];
            let bytes = shape.iter().product::<usize>() * item;
            (name.clone(), TensorView::new(dtype, shape.clone(), &zeros[..bytes]).unwrap())
        });
        serialize_to_file(views, None, path).unwrap();
    }

    fn planned(folder: &Path, files: usize, options: &Value) -> (Value, Value) {
        let names: Vec<(u32, String)> = (0..files).map(|i| (0, format!("{i}.safetensors"))).collect();
        let catalog = Catalog::open(vec![folder.to_path_buf()], &names, 1);
        let units: Vec<Value> = (0..files).map(|i| json!({ "file": i })).collect();
        let mut request = json!({"source": {"files": {"units": units}, "binding": {"pass_unknown": true}}});
        request.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        let limit = request.as_object_mut().unwrap().remove("max_shard_size");
        let placement = json!({"max_shard_size": limit.unwrap_or(json!(1u64 << 40))});
        let draft = crate::request::draft(&catalog, &serde_json::from_value(request).unwrap()).unwrap();
        let planned = draft.placed(&catalog, serde_json::from_value(placement).unwrap());
        (serde_json::to_value(&planned.plan).unwrap(), serde_json::to_value(&planned.findings).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// What is made of such tensors is what the layout engine makes of them.
        #[test]
        fn plans_are_those_of_the_layout_engine(
            tensors in prop::collection::btree_map("[a-c]{1,2}(\\.[0-9]{1,2}){0,2}", (prop::collection::vec(0usize..4, 0..4), 0usize..4), 1..12),
            halves in any::<bool>(),
            options in prop::sample::select(vec![
                json!({}), json!({"dtype": "F16"}), json!({"include": ["a*"]}), json!({"exclude": ["*.1*"]}),
                json!({"target": {"name": "hf"}}), json!({"max_shard_size": 64}),
            ]),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let all: Vec<_> = tensors.into_iter().map(|(name, (shape, dtype))| (name, shape, dtype)).collect();
            let (first, second) = all.split_at(if halves { all.len() / 2 } else { all.len() });
            write(&folder.path().join("0.safetensors"), first);
            if halves {
                write(&folder.path().join("1.safetensors"), second);
            }
            let files = 1 + usize::from(halves);
            let plain = planned(folder.path(), files, &options);
            OFF.set(true);
            let engine = planned(folder.path(), files, &options);
            OFF.set(false);
            prop_assert_eq!(plain, engine);
        }
    }
}
