"""``fully_sharded_model_space``: optimizer state by parameter, with each rank's shard flat.

The shape in ``.metadata`` is not the parameter's shape. It has one axis per axis of the parameter, which
counts shards, and a last axis for the elements of a shard, which data-parallel ranks divide.
source: megatron/core/dist_checkpointing/strategies/resharding.py
    (nd_flattened_tensor_reformulated_global_shape), 0.8 to 0.15
"""

from __future__ import annotations

from math import prod
from typing import Any

from .optim_flat import runs


def boxes(shape: list[int], stored: list[int], chunks: list[Any]) -> list[Any] | None:
    """Return the chunks as boxes of the parameter; None if the shape in ``.metadata`` does not consist of its
    shards.

    Args:
        shape: the parameter's shape.
        stored: the shape in ``.metadata``.
        chunks: first index and extent in the stored tensor, file, and tensor in the file.
    """
    if len(stored) != len(shape) + 1 or any(n < 1 for n in stored[:-1]):
        return None
    if any(size % count for size, count in zip(shape, stored, strict=False)):
        return None
    shard = [size // count for size, count in zip(shape, stored, strict=False)]
    if prod(shard) != stored[-1]:
        return None
    found: list[Any] = []
    for lo, size, file, number in chunks:
        if any(n != 1 for n in size[:-1]):
            return None
        corner = [index * extent for index, extent in zip(lo, shard, strict=False)]
        for inner, extent, first in runs(shard, lo[-1], size[-1]):
            found.append(([c + i for c, i in zip(corner, inner, strict=True)], extent, file, number, first))
    return found
