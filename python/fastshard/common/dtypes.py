"""Element types by the names of safetensors, numpy, ml_dtypes and torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

#: safetensors name -> numpy dtype.
NUMPY_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "C128": "complex128",
}
#: safetensors name -> ml_dtypes type.
ML_DTYPES_NAMES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}

#: safetensors name -> torch dtype.
TORCH_NAMES = NUMPY_NAMES | ML_DTYPES_NAMES
#: Floating-point types of weights: safetensors name -> torch dtype.
TORCH_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a safetensors dtype name, e.g. ``BF16``.

    Raises:
        ImportError: for bfloat16 and fp8 without ml_dtypes.
    """
    import numpy as np

    if name in NUMPY_NAMES:
        return np.dtype(NUMPY_NAMES[name])
    try:
        import ml_dtypes
    except ImportError:
        from .optional_imports import install

        raise ImportError(f"{name} in numpy needs ml_dtypes: {install('bf16')}, or use .torch()") from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, ML_DTYPES_NAMES[name]))
    return dtype


def item_size(dtype: str) -> int:
    """Return the size in bytes of an element of a safetensors dtype."""
    return 1 if dtype == "BOOL" else int(re.findall(r"\d+", dtype)[0]) // 8
