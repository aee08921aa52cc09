"""The description of an array in ``.zarray`` and ``zarr.json``: shape, dtype, chunks and their keys.

source: zarr v2 and v3 specifications; tensorstore driver/{zarr,zarr3} for ``bfloat16``
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from ...common import codes
from ...common.config_text import parse_json
from ...common.dtypes import item_size, numpy_dtype
from ...common.errors import FastshardError
from ...common.records import dataclass, replace
from ...zarr.dtypes import ARRAY_DTYPES, WIDER, ZARR2, ZARR3

#: zarr version by the name of an array's metadata file.
METADATA = {".zarray": 2, "zarr.json": 3}
#: Maximum number of chunks of an array; checkpoints do not have more.
MAX_CHUNKS = 1 << 20
#: Maximum number of dimensions. source: tensorstore kMaxRank
_MAX_RANK = 32
#: Maximum size of a metadata file that is read, in bytes.
MAX_METADATA = 1 << 20
#: Shards up to this size are read as blocks; in larger shards, the chunks are the blocks.
_SHARD_BYTES = 64 << 20
#: Numbers that JSON cannot represent. source: zarr v2 and v3 specifications, fill values
_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_DTYPES = {v: k for k, v in ZARR3.items()} | {v: k for k, v in ZARR2.items()} | WIDER


@dataclass(frozen=True)
class Array:
    """An array in a store."""

    name: str
    #: dtype by its safetensors name; if safetensors lacks it, the smallest dtype that represents all its
    #: values.
    dtype: str
    shape: tuple[int, ...]
    #: Extents of a chunk, which has its own key.
    chunk: tuple[int, ...]
    #: Extents of the unit of decoding: a chunk, or a part of one (``sharding_indexed``).
    block: tuple[int, ...]
    zarr: int
    separator: str
    #: Fill value; None if the format does not define one for absent chunks.
    fill: Any
    #: The metadata as stored.
    metadata: dict[str, Any]
    #: True if a chunk consists of parts that may be absent.
    partial: bool = False
    #: ml_dtypes' name of the stored dtype, if ``dtype`` is wider.
    narrow: str | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks in each dimension."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    def key(self, index: tuple[int, ...]) -> str:
        """Return the key of the chunk at ``index``, below the array's name."""
        numbers = map(str, index)
        if self.zarr == 2:
            return self.separator.join(numbers) or "0"
        return self.separator.join(["c", *numbers])

    def has(self, key: str) -> bool:
        """Return True if this is the key of one of its chunks."""
        parts = key.split(self.separator)
        if self.zarr == 3 and parts.pop(0) != "c":
            return False
        if not self.shape and self.zarr == 2:
            return key == "0"
        grid = self.grid
        if len(parts) != len(grid) or not all(p.isdigit() and str(int(p)) == p for p in parts):
            return False
        return all(int(p) < n for p, n in zip(parts, grid, strict=True))

    def chunks(self) -> Iterator[tuple[int, ...]]:
        """Return the indices of all chunks."""
        return itertools.product(*map(range, self.grid))

    def extent(self, index: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Return first element and extent of a chunk, clipped to the array."""
        lo = [i * c for i, c in zip(index, self.chunk, strict=True)]
        return lo, [min(c, n - at) for c, n, at in zip(self.chunk, self.shape, lo, strict=True)]

    def blocks(self, index: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield first element and extent of each block of a chunk."""
        lo, extent = self.extent(index)
        if self.block == self.chunk:
            yield lo, extent
            return
        steps = [range(at, at + n, b) for at, n, b in zip(lo, extent, self.block, strict=True)]
        for start in itertools.product(*steps):
            yield (
                list(start),
                [min(b, a + n - s) for b, a, n, s in zip(self.block, lo, extent, start, strict=True)],
            )


def parse(name: str, text: bytes, zarr: int, where: str) -> Array | None:
    """Parse the array that a metadata file describes; None if it describes a group.

    Raises:
        FastshardError: ``FS601`` if it is malformed, ``FS514`` for an unsupported format.
    """

    malformed = partial(_malformed, name, where)
    try:
        described = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise malformed(str(error)) from None
    if not isinstance(described, dict):
        raise malformed("no object")
    if zarr == 3 and described.get("node_type") == "group":
        return None
    shape = _extents(described.get("shape"))
    chunk, block, separator = (_chunks_of_2 if zarr == 2 else _chunks_of_3)(name, described, where)
    dtype, fill = described.get("dtype" if zarr == 2 else "data_type"), described.get("fill_value")
    if described.get("zarr_format") != zarr:
        raise malformed("zarr_format", described.get("zarr_format"))
    if shape is None or chunk is None or block is None or not len(shape) == len(chunk) == len(block):
        raise malformed("shape or chunks")
    if len(shape) > _MAX_RANK or 0 in chunk or 0 in block or separator not in (".", "/"):
        raise malformed("shape, chunks or separator")
    if any(c % b for c, b in zip(chunk, block, strict=True)):
        raise malformed("parts of a chunk that do not divide it", block)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _unread(name, where, "dtype", dtype)
    found = _DTYPES[dtype]
    item = item_size(found)
    if (
        max(math.prod(shape), math.prod(chunk)) * item >= 1 << 62
        or math.prod(min(c, n) for c, n in zip(chunk, shape, strict=True)) * item >= 1 << 40
    ):
        raise malformed("an array or a chunk beyond what can be addressed", list(shape))
    narrow = dtype if dtype in WIDER else None
    array = Array(name, found, shape, chunk, block, zarr, separator, fill, described, narrow=narrow)
    if block != chunk:
        whole = math.prod(chunk) * item <= _SHARD_BYTES
        array = replace(array, block=chunk if whole else block, partial=True)
    blocks = math.prod(-(-n // b) for n, b in zip(shape, array.block, strict=True))
    if math.prod(array.grid) > MAX_CHUNKS or blocks > MAX_CHUNKS:
        raise malformed(f"more than {MAX_CHUNKS} chunks", list(array.grid))
    return array


def _malformed(name: str, where: str, what: str, got: Any = None) -> FastshardError:
    return FastshardError.of(
        codes.UNSAFE_HEADER,
        f"metadata of an array: {what}",
        file=where,
        tensor=name,
        got=None if got is None else repr(got)[:80],
        help="copy the file again: it is damaged or truncated",
    )


#: Extents of a chunk, extents of its parts that are read separately, and the separator of numbers in chunk
#: names.
_Chunks = tuple["tuple[int, ...] | None", "tuple[int, ...] | None", Any]


def _chunks_of_2(name: str, described: dict[str, Any], where: str) -> _Chunks:
    if described.get("order", "C") not in ("C", "F"):
        raise _malformed(name, where, "order", described.get("order"))
    if described.get("filters"):
        raise _unread(name, where, "filters", described["filters"])
    chunk = _extents(described.get("chunks"))
    separator = described.get("dimension_separator")
    return chunk, chunk, "." if separator is None else separator


def _chunks_of_3(name: str, described: dict[str, Any], where: str) -> _Chunks:
    encoding = described.get("chunk_key_encoding")
    if encoding is not None and (not isinstance(encoding, dict) or encoding.get("name") != "default"):
        raise _unread(name, where, "chunk_key_encoding", encoding)
    if described.get("storage_transformers"):
        raise _unread(name, where, "storage_transformers", described["storage_transformers"])
    chunk = _extents(_configured(described.get("chunk_grid"), "regular").get("chunk_shape"))
    codecs = described.get("codecs")
    inner = None
    if isinstance(codecs, list) and len(codecs) == 1:
        inner = _extents(_configured(codecs[0], "sharding_indexed").get("chunk_shape"))
    return chunk, inner or chunk, _configured(encoding, "default").get("separator", "/")


def fill_bytes(array: Array) -> bytes:
    """Return one element with the array's fill value, little-endian."""
    import numpy as np

    value = _FLOATS.get(array.fill, array.fill) if isinstance(array.fill, str) else array.fill
    if array.dtype in ("C64", "C128") and isinstance(value, list) and len(value) == 2:
        value = complex(*(_FLOATS.get(v, v) if isinstance(v, str) else v for v in value))
    if array.dtype == "F8_E8M0" and not value:
        # It has no zero; TensorStore takes the smallest number for it.
        value = 2.0**-127
    try:
        with np.errstate(all="ignore"):
            element = np.array(0 if value is None else value, _stored(array))
        if element.shape:
            raise ValueError(f"{value!r:.80} is not a number")
        return element.astype(numpy_dtype(array.dtype)).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        raise FastshardError.of(codes.UNSAFE_HEADER, f"fill value: {error}", tensor=array.name) from None


def _stored(array: Array) -> Any:
    """Return the numpy dtype of the stored elements."""
    if array.narrow is None:
        return numpy_dtype(array.dtype)
    import ml_dtypes

    return getattr(ml_dtypes, array.narrow)


def _unread(name: str, where: str, what: str, got: Any) -> FastshardError:
    return FastshardError.of(
        codes.UNSUPPORTED,
        f"{what} of an array is not supported",
        file=where,
        tensor=name,
        expected=", ".join(sorted(ARRAY_DTYPES)) if what == "dtype" else None,
        got=json.dumps(got)[:80],
        help=f"leave out the array (--exclude '{name}'), or save it again without this",
    )


def _configured(value: Any, name: str) -> dict[str, Any]:
    """Return the configuration of a named part in zarr v3 metadata."""
    if (
        isinstance(value, dict)
        and value.get("name") == name
        and isinstance(value.get("configuration", {}), dict)
    ):
        found: dict[str, Any] = value.get("configuration", {})
        return found
    return {}


def _extents(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > _MAX_RANK:
        return None
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in value):
        return None
    return tuple(value)
