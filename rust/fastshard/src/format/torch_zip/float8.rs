//! Weights in eight bits as Transformer Engine pickles them: `Float8Tensor` and its kin.
//!
//! Their `__reduce_ex__` calls a class method, which Python pickles as `getattr(CLASS, "_make_in_reduce_ex")(data, number
//! of the format, scale_inv, dtype[, shape])` (transformer_engine/pytorch/tensor/float8_tensor.py). The value of an element
//! is the number of its code times `scale_inv`, in float32 and rounded to `dtype` (`dequantize`).

use crate::format::pickle::PickledTensor;
use crate::tensor::{c_strides, element_count, Dtype};
use crate::value::{Node, Value, Values};

const METHOD: &str = "_make_in_reduce_ex";
/// The numbers of the formats are those of `NVTEDType`, which has grown twice: E4M3 was 5 and 6 before it was 7, and E5M2 was
/// 6 and 7. Weights are for the forward pass, for which every recipe that Transformer Engine accepts takes E4M3.
const E4M3: std::ops::RangeInclusive<i64> = 5..=7;
const E5M2: i64 = 8;

/// A tensor of codes and one scale.
pub(super) struct Float8 {
    pub(super) codes: Node,
    pub(super) scale: Node,
    /// What a code is as a number.
    pub(super) numbers: Dtype,
    /// What its values are rounded to.
    pub(super) dtype: Dtype,
}

/// The class whose method a record calls to make a quantised tensor.
pub(super) fn class_of(values: &Values, node: Node) -> Option<&str> {
    let Value::Record { class: method, .. } = values.get(node) else { return None };
    let Value::Record { class: getattr, args, .. } = values.get(*method) else { return None };
    let (Value::Global(getattr), Value::Tuple(args)) = (values.get(*getattr), values.get(*args)) else {
        return None;
    };
    let &[class, name] = &args[..] else { return None };
    match (values.get(class), values.get(name)) {
        (Value::Global(class), Value::Str(name))
            if name == METHOD && matches!(&**getattr, "builtins.getattr" | "__builtin__.getattr") =>
        {
            Some(class)
        }
        _ => None,
    }
}

/// What a record of the class `Float8Tensor` says; a clause that says why it cannot be read.
pub(super) fn read(values: &Values, pickled: &[PickledTensor], node: Node) -> Result<Float8, &'static str> {
    let class = class_of(values, node).unwrap_or_default();
    if !class.starts_with("transformer_engine.") || !class.ends_with(".Float8Tensor") {
        return Err("its class is not one that is known");
    }
    let Value::Record { args, .. } = values.get(node) else { return Err("it has no arguments") };
    let Value::Tuple(args) = values.get(*args) else { return Err("it has no arguments") };
    let (codes, format, scale, dtype, shape) = match args[..] {
        [codes, format, scale, dtype] => (codes, format, scale, dtype, None),
        [codes, format, scale, dtype, shape] => (codes, format, scale, dtype, Some(shape)),
        _ => return Err("it has other arguments than Transformer Engine writes"),
    };
    let tensor = |node: Node| match values.get(node) {
        Value::Tensor(index) => pickled.get(*index as usize),
        _ => None,
    };
    let data = tensor(codes).ok_or("it has no codes")?;
    let factor = tensor(scale).ok_or("it has no scale")?;
    if data.dtype != Ok(Dtype::U8) {
        return Err("its codes are no bytes");
    }
    if element_count(&data.shape) > Some(1) && data.strides != c_strides(&data.shape) {
        return Err("its codes do not lie one after another");
    }
    if factor.dtype != Ok(Dtype::F32) || element_count(&factor.shape) != Some(1) {
        return Err("its scale is not one float32");
    }
    if shape.is_some_and(|shape| sizes(values, shape).is_none_or(|sizes| sizes != data.shape)) {
        return Err("its shape is not that of its codes");
    }
    let numbers = match number(values, format) {
        Some(n) if E4M3.contains(&n) => Dtype::F8E4m3,
        Some(E5M2) => Dtype::F8E5m2,
        _ => return Err("its format is none that is known"),
    };
    let dtype = match values.get(dtype) {
        Value::Global(name) => name.strip_prefix("torch.").and_then(Dtype::from_torch),
        _ => None,
    };
    let dtype = dtype.filter(|dtype| matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32));
    Ok(Float8 { codes, scale, numbers, dtype: dtype.ok_or("its dtype is no float of 16 or 32 bits")? })
}

/// The number of an enumeration's member: an argument, or the state of an object of pybind11's.
fn number(values: &Values, node: Node) -> Option<i64> {
    match values.get(node) {
        Value::Int(n) => Some(*n),
        Value::Record { args, state, .. } => {
            if let Some(Value::Int(n)) = state.map(|state| values.get(state)) {
                return Some(*n);
            }
            match values.get(*args) {
                Value::Tuple(args) => match args[..] {
                    [only] => number(values, only),
                    _ => None,
                },
                _ => None,
            }
        }
        _ => None,
    }
}

fn sizes(values: &Values, node: Node) -> Option<Vec<u64>> {
    let Value::Tuple(items) = values.get(node) else { return None };
    let size = |&item: &Node| match values.get(item) {
        Value::Int(n) => u64::try_from(*n).ok(),
        _ => None,
    };
    items.iter().map(size).collect()
}
