"""Element types as safetensors, numpy, zarr v2 and zarr v3 name them."""

from __future__ import annotations

import re
from typing import Any

#: numpy's name, by safetensors' name; bfloat16 is ml_dtypes'.
NUMPY = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip
#: zarr v3's data_type. source: zarr specs, core v3; TensorStore's zarr3 driver for bfloat16
ZARR3 = dict(NUMPY)
#: zarr v2's dtype; ``bfloat16`` is TensorStore's own word. source: tensorstore driver/zarr/dtype.cc
ZARR2 = {
    "BOOL": "|b1", "I8": "|i1", "U8": "|u1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4",
    "I64": "<i8", "U64": "<u8", "F16": "<f2", "BF16": "bfloat16", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


def item_size(dtype: str) -> int:
    """Bytes of an element, by any of safetensors' names (8-bit floats too)."""
    return 1 if dtype == "BOOL" else int(re.findall(r"\d+", dtype)[0]) // 8


def numpy_dtype(dtype: str) -> Any:
    """numpy's dtype for one of :data:`NUMPY`."""
    import numpy as np

    if dtype == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(NUMPY[dtype])
