"""Positions of the largest values in a tensor, which is read again; only for a few notable tensors."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from .. import _core
from ..checkpoint.plan import Plan
from ..common.errors import from_core
from ..common.thread_counts import default_threads

__all__ = ["Place", "largest"]

#: Index of an element, and its value.
Place = tuple[tuple[int, ...], float]
#: Number of values per tensor, and number of bytes to read at a time.
_MOST, _CHUNK = 3, 1 << 24
#: numpy's types of the floats; BF16 is the upper half of F32.
_TYPES = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}


def largest(plan: Plan, names: Iterable[str]) -> dict[str, tuple[Place, ...]]:
    """Return the values of largest magnitude in floating-point tensors, infinite ones too, largest first.

    Raises:
        FastshardError: if the values cannot be read.
    """
    found: dict[str, tuple[Place, ...]] = {}
    for name in names:
        number = plan.index[name]
        _, dtype, shape, size, _ = plan.outputs[number]
        if dtype in _TYPES:
            found[name] = _of(plan, number, dtype, shape, size)
    return found


def _of(plan: Plan, number: int, dtype: str, shape: list[int], size: int) -> tuple[Place, ...]:
    import numpy as np

    best: list[tuple[float, int, float]] = []
    item = np.dtype(_TYPES[dtype]).itemsize
    for start in range(0, size, _CHUNK):
        raw = np.empty(min(_CHUNK, size - start), dtype=np.uint8)
        try:
            plan.core.read(number, start, raw, default_threads())
        except _core.CoreError as error:
            raise from_core(error) from None
        values = raw.view(_TYPES[dtype])
        if dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        sizes = np.abs(values)
        sizes[np.isnan(sizes)] = -1
        least = np.partition(sizes, -_MOST)[-_MOST] if len(sizes) > _MOST else -1
        # Of equal ones the first.
        for at in (*np.flatnonzero(sizes > least), *np.flatnonzero(sizes == least)[:_MOST]):
            if sizes[at] >= 0:
                best.append((float(sizes[at]), -(start // item + int(at)), float(values[at])))
        best = heapq.nlargest(_MOST, best)
    return tuple((_index(-at, shape), value) for _, at, value in best)


def _index(at: int, shape: list[int]) -> tuple[int, ...]:
    """Return the index of an element from its position in C order."""
    index = []
    for step in (math.prod(shape[d + 1 :]) for d in range(len(shape))):
        index.append(at // step)
        at %= step
    return tuple(index)
