"""Writes arrays with TensorStore as Orbax and Paxml lay them out; needs no jax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

#: numpy's dtype -> zarr v2's word
ZARR2 = {np.dtype(ml_dtypes.bfloat16): "bfloat16"}


def write(
    folder: Path,
    name: str,
    values: np.ndarray,
    chunk: list[int],
    *,
    zarr: int = 2,
    ocdbt: bool = False,
    fill: Any = None,
    elide: bool = False,
    **metadata: Any,
) -> None:
    """Writes one array; `metadata` goes into `.zarray` or `zarr.json` as it is."""
    base = {"driver": "file", "path": f"{folder}/"}
    path = f"{name}/"
    kvstore = (
        {"driver": "ocdbt", "base": base, "path": path} if ocdbt else base | {"path": f"{folder}/{path}"}
    )
    described: dict[str, Any] = {"shape": list(values.shape), **metadata}
    if zarr == 2:
        described |= {"chunks": chunk, "fill_value": fill, "dtype": ZARR2.get(values.dtype, values.dtype.str)}
    else:
        described |= {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "data_type": values.dtype.name,
            "fill_value": 0 if fill is None else fill,
        }
        if values.dtype == bool:
            described["fill_value"] = bool(fill)
    spec = {
        "driver": "zarr" if zarr == 2 else "zarr3",
        "kvstore": kvstore,
        "metadata": described,
        "store_data_equal_to_fill_value": not elide,
    }
    store = ts.open(spec, create=True, open=True).result()
    store.write(values).result()


def describe(
    folder: Path, names: list[str], *, stores_fill: bool | None = True, zarr3: bool = False, **more: Any
) -> None:
    """Writes `_METADATA` for arrays below one key each."""
    tree = {
        str((name,)): {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        for name in names
    }
    document = {"tree_metadata": tree, "use_zarr3": zarr3, **more}
    if stores_fill is not None:
        document["store_array_data_equal_to_fill_value"] = stores_fill
    (folder / "_METADATA").write_text(json.dumps(document))


def painted(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Values by position, none of them zero."""
    numbers = np.arange(1, 1 + int(np.prod(shape)), dtype=np.int64).reshape(shape)
    return (numbers % 251).astype(dtype) if np.dtype(dtype).itemsize == 1 else numbers.astype(dtype)
