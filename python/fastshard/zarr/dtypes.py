"""Element types by the names of safetensors, zarr v2 and zarr v3."""

from __future__ import annotations

from ..common.dtypes import ML_DTYPES_NAMES, NUMPY_NAMES

__all__ = ["ARRAY_DTYPES", "WIDER", "ZARR2", "ZARR3", "fill"]

#: zarr v3's data_type, by safetensors' name: numpy's, or ml_dtypes'.
#: source: zarr specs, core v3; TensorStore's zarr3 driver for bfloat16 and 8-bit floats; measured with 0.1.86
ZARR3 = NUMPY_NAMES | ML_DTYPES_NAMES
#: zarr v2's dtype; ml_dtypes' names are extensions of TensorStore. source: tensorstore driver/zarr/dtype.cc
ZARR2 = ML_DTYPES_NAMES | {
    "BOOL": "|b1",
    "I8": "|i1",
    "U8": "|u1",
    "I16": "<i2",
    "U16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "I64": "<i8",
    "U64": "<u8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
    "C128": "<c16",
}
#: Dtypes that arrays may have.
ARRAY_DTYPES = tuple(ZARR3)
#: Other dtypes of arrays, with one byte per element and the same name in zarr v2 and v3, mapped to the
#: smallest safetensors dtype that has all their values. source: tensorstore's data types; measured with
#: 0.1.86
WIDER = {
    "int2": "I8",
    "int4": "I8",
    "float4_e2m1fn": "BF16",
    "float8_e3m4": "BF16",
    "float8_e4m3b11fnuz": "BF16",
}


def fill(dtype: str) -> object:
    """Return zero as zarr v3 metadata writes it.

    source: zarr specs, core v3, fill values
    """
    return False if dtype == "BOOL" else [0.0, 0.0] if dtype.startswith("C") else 0
