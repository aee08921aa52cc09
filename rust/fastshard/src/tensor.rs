//! Element types.

use serde::{Deserialize, Serialize};

use crate::few::Few;

/// Element type of a tensor. Serialised under its safetensors name, e.g. `BF16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs)] // the variants are the safetensors names
#[serde(rename_all = "UPPERCASE")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    Bf16,
    F32,
    F64,
    C64,
    C128,
    #[serde(rename = "F8_E4M3")]
    F8E4m3,
    #[serde(rename = "F8_E5M2")]
    F8E5m2,
    #[serde(rename = "F8_E4M3FNUZ")]
    F8E4m3fnuz,
    #[serde(rename = "F8_E5M2FNUZ")]
    F8E5m2fnuz,
    #[serde(rename = "F8_E8M0")]
    F8E8m0,
}

use Dtype::*;

/// (dtype, safetensors name, torch name, bytes per element)
const NAMES: &[(Dtype, &str, &str, usize)] = &[
    (Bool, "BOOL", "bool", 1),
    (U8, "U8", "uint8", 1),
    (I8, "I8", "int8", 1),
    (U16, "U16", "uint16", 2),
    (I16, "I16", "int16", 2),
    (U32, "U32", "uint32", 4),
    (I32, "I32", "int32", 4),
    (U64, "U64", "uint64", 8),
    (I64, "I64", "int64", 8),
    (F16, "F16", "float16", 2),
    (Bf16, "BF16", "bfloat16", 2),
    (F32, "F32", "float32", 4),
    (F64, "F64", "float64", 8),
    (C64, "C64", "complex64", 8),
    (C128, "C128", "complex128", 16),
    (F8E4m3, "F8_E4M3", "float8_e4m3fn", 1),
    (F8E5m2, "F8_E5M2", "float8_e5m2", 1),
    (F8E4m3fnuz, "F8_E4M3FNUZ", "float8_e4m3fnuz", 1),
    (F8E5m2fnuz, "F8_E5M2FNUZ", "float8_e5m2fnuz", 1),
    (F8E8m0, "F8_E8M0", "float8_e8m0fnu", 1),
];

impl Dtype {
    fn row(self) -> &'static (Dtype, &'static str, &'static str, usize) {
        NAMES.iter().find(|row| row.0 == self).expect("every dtype has a row")
    }

    /// Bytes per element.
    pub fn size(self) -> usize {
        self.row().3
    }

    /// Name in a safetensors header, e.g. `BF16`.
    pub fn safetensors_name(self) -> &'static str {
        self.row().1
    }

    /// Name in torch, e.g. `bfloat16`.
    pub fn torch_name(self) -> &'static str {
        self.row().2
    }

    /// The dtype of a safetensors header name.
    pub fn from_safetensors(name: &str) -> Option<Dtype> {
        NAMES.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// The dtype of a torch name without the `torch.` prefix.
    pub fn from_torch(name: &str) -> Option<Dtype> {
        NAMES.iter().find(|row| row.2 == name).map(|row| row.0)
    }

    /// True for the 8-bit floating types, whose values need a scale.
    pub fn is_f8(self) -> bool {
        matches!(self, F8E4m3 | F8E5m2 | F8E4m3fnuz | F8E5m2fnuz | F8E8m0)
    }

    /// True for integers; false for `BOOL`.
    pub fn is_integer(self) -> bool {
        matches!(self, I8 | U8 | I16 | U16 | I32 | U32 | I64 | U64)
    }

    /// A number as an element, little-endian; `None` if the type cannot represent it, or is not a type for
    /// counters.
    pub fn element(self, number: u32) -> Option<Vec<u8>> {
        let single = number as f32;
        Some(match self {
            F32 if f64::from(single) == f64::from(number) => single.to_le_bytes().to_vec(),
            F64 => f64::from(number).to_le_bytes().to_vec(),
            I64 | U64 => u64::from(number).to_le_bytes().to_vec(),
            U32 => number.to_le_bytes().to_vec(),
            I32 => i32::try_from(number).ok()?.to_le_bytes().to_vec(),
            _ => return None,
        })
    }

    /// True for the floating types that value ops may convert (F16, BF16, F32, F64).
    pub fn is_float(self) -> bool {
        matches!(self, F16 | Bf16 | F32 | F64)
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.safetensors_name())
    }
}

/// Number of elements of a shape, or `None` on overflow. A 0-d tensor has one element.
pub fn element_count(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))
}

/// C-order strides of a shape, in elements. They saturate if they have no meaning: a tensor without elements
/// may have other extents of any size.
pub fn c_strides(shape: &[u64]) -> Few<u64> {
    let mut strides = Few::repeat(1u64, shape.len());
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(shape[i].max(1));
    }
    strides
}
