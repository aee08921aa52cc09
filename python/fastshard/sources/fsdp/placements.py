"""The box of a tensor that a rank stores, according to its DTensor's placements.

source: torch/distributed/tensor/{_utils,_dtensor_spec,placement_types}.py. torch's
    compute_local_shape_and_global_offset reads strided shards from left to right. For uneven extents, FSDP2
    stores other boxes, because it divides the shards of tensor parallelism
    (fsdp/_fully_shard/_fsdp_param.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ... import _core


class Unreadable(Exception):
    """The reason why a placement is not supported."""


def box(shape: Sequence[int], mesh: _core.Mesh, part: _core.RankPart) -> tuple[list[int], list[int]] | None:
    """Return first index and extent of a rank's box; None for a rank outside the mesh.

    Args:
        shape: shape of the full tensor.
        mesh: ``shape`` and ``coordinate``, in the core's form.
        part: ``placements`` and ``order``.

    Raises:
        Unreadable: for partial sums, and for placements that do not determine the box.
    """
    sizes, at = mesh["shape"], mesh["coordinate"]
    lo, extent = [0] * len(shape), list(shape)
    for dim, dims in _order(part, sizes, len(shape)):
        for d in dims:
            if at is None:
                return None
            start, end = _chunk(extent[dim], sizes[d], at[d])
            lo[dim] += start
            extent[dim] = end - start
    return None if at is None else (lo, extent)


def _chunk(extent: int, count: int, index: int) -> tuple[int, int]:
    """Return the range of one of ``count`` chunks.

    The division is that of torch.chunk: the last chunks may be shorter, or empty.
    """
    each = -(-extent // count) if count else 0
    return min(index * each, extent), min((index + 1) * each, extent)


def _order(part: _core.RankPart, sizes: list[int], ndim: int) -> list[tuple[int, list[int]]]:
    """Return each divided tensor dimension with the mesh dimensions that divide it, in that order."""
    found: dict[int, list[int]] = {}
    declared: dict[int, list[int]] = dict(part["order"] or [])
    for d in reversed(range(len(part["placements"]))):
        placement = part["placements"][d]
        if placement["kind"] == "partial":
            raise Unreadable("it is a term of a sum that was not reduced (Partial)")
        if placement["kind"] == "replicate":
            continue
        dim = placement["dim"]
        if dim >= ndim:
            raise Unreadable(f"it divides dimension {dim} of {ndim}")
        before = found.setdefault(dim, [])
        split = placement.get("split", 1)
        # A strided shard divides what the dimensions to its right have divided into so many pieces.
        place = next((n for n in range(len(before) + 1) if prod(sizes[b] for b in before[:n]) == split), None)
        if place is None:
            raise Unreadable(f"_StridedShard(dim={dim}, split_factor={split}) on a mesh of {sizes}")
        before.insert(place, d)
    for dim, dims in declared.items():
        strided = any(p.get("split", 1) != 1 for p in part["placements"] if p.get("dim") == dim)
        if strided or sorted(dims) != sorted(found.get(dim, [])):
            raise Unreadable(f"shard_order {dims} of dimension {dim} does not fit its placements")
        found[dim] = dims
    return sorted(found.items())
