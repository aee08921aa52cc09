"""Kinds of tensors in a conversion: the shards before it, the tensors after it, and how they are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint.plan import Plan
from ..checkpoint.provenance import excerpt_of
from ..common.records import dataclass
from ..models.tensor_roles import layer_of, role_of

__all__ = ["Became", "ResultKind", "became"]

#: Maximum number of kinds to list.
_MOST = 60
#: Maximum number of blocks of one shard to draw in a tensor.
_BLOCKS = 16


@dataclass(frozen=True)
class ResultKind:
    """One kind of tensors after the conversion."""

    name: str
    shape: tuple[int, ...]
    count: int
    #: Rectangles of the tensor, as fractions of its height and width: (top, left, height, width, number of
    #: the shard).
    boxes: tuple[tuple[float, float, float, float, int], ...]


@dataclass(frozen=True)
class Became:
    """One kind of tensors before the conversion, and its results."""

    name: str
    #: The shape of a shard, and the ranks that have one.
    shape: tuple[int, ...]
    ranks: tuple[str, ...]
    count: int
    how: str
    results: tuple[ResultKind, ...]

    @property
    def changed(self) -> bool:
        """True if a name or a shape has changed."""
        return len(self.ranks) > 1 or self.results[0].name != self.name


def became(plan: Plan) -> tuple[Became, ...]:
    """Group the tensors of a plan by how they are computed; one tensor of each kind is examined."""
    kinds: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for name, (_, dtype, extents, _, _) in zip(plan.index, plan.outputs, strict=True):
        kinds.setdefault((role_of(name), dtype, tuple(extents)), []).append(name)
    found: dict[str, list[tuple[ResultKind, dict[str, Any], str]]] = {}
    for (_, _, shape), names in list(kinds.items())[:_MOST]:
        excerpt = excerpt_of(plan.core, plan.position(names[0]))
        if not excerpt["stored"]:
            continue
        (output,) = excerpt["outputs"]
        boxes = tuple(box for part in output["parts"] for box in _boxes(shape, part))
        results = ResultKind(_without_layer(names[0], len(names)), shape, len(names), boxes)
        source = _without_layer(excerpt["stored"][0]["name"], len(names))
        found.setdefault(source, []).append((results, excerpt, _how(output, excerpt["stored"])))
    rows = []
    for source, of in found.items():
        stored = of[0][1]["stored"]
        ranks = tuple(dict.fromkeys(str(s.get("rank") or "") for s in stored))
        hows = tuple(dict.fromkeys(how for _, _, how in of))
        count = of[0][0].count
        rows.append(
            Became(
                source, tuple(stored[0]["shape"]), ranks, count, ", ".join(hows), tuple(m for m, _, _ in of)
            )
        )
    return tuple(rows) if any(row.changed for row in rows) else ()


def _without_layer(name: str, count: int) -> str:
    """Replace the layer number in a name by N, if the name stands for several tensors."""
    layer = layer_of(name) if count > 1 else None
    parts = name.split(".")
    if layer is not None and str(layer) in parts:
        parts[parts.index(str(layer))] = "N"
    return ".".join(parts)


def _how(output: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> str:
    """Describe in a few words how a tensor is computed."""
    parts = output["parts"]
    combined = {part["combine"] if isinstance(part["combine"], str) else "zero" for part in parts}
    several = any(len(part["sources"]) > 1 for part in parts)
    if several:
        words = {
            "equal": "equal on all ranks, one kept",
            "sum": "summed over ranks",
            "mean": "averaged over ranks",
        }
        return words.get(next(iter(combined)), "put together")
    taken = sum(math.prod(axis["n"] for axis in part["axes"]) for part in parts)
    separated = "separated, " if taken < sum(math.prod(s["shape"]) for s in stored) else ""
    scattered = len(parts) > len(stored) or any(len(_merged(part)) > len(output["shape"]) for part in parts)
    if len(parts) == 1 and not scattered:
        return f"{separated}copied"
    width = math.prod(output["shape"][1:]) or 1
    side = "columns" if any(part["dst_base"] % width for part in parts) else "rows"
    return (
        f"{separated}{'rows reordered, ' if scattered else ''}{side} joined"
        if len(stored) > 1
        else (f"{separated}{'rows reordered' if scattered else 'copied'}")
    )


def _merged(part: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the axes of a part as (number, stride in the result), adjacent ones merged, largest first."""
    axes = sorted(((a["n"], a["dst"]) for a in part["axes"] if a["n"] > 1), key=lambda a: -a[1])
    merged: list[tuple[int, int]] = []
    for n, stride in axes:
        if merged and merged[-1][1] == n * stride and len(axes) > 2:
            merged[-1] = (merged[-1][0] * n, stride)
        else:
            merged.append((n, stride))
    return merged


def _boxes(shape: Sequence[int], part: Mapping[str, Any]) -> list[tuple[float, float, float, float, int]]:
    """Return the boxes that a part covers in a tensor."""
    rows = shape[0] if shape else 1
    width = math.prod(shape[1:]) or 1
    across = [(a["n"], a["dst"]) for a in part["axes"] if a["dst"] < width]
    down = sorted(
        ((a["n"], a["dst"] // width) for a in part["axes"] if a["dst"] >= width), key=lambda a: a[1]
    )
    wide = min(width, 1 + sum((n - 1) * stride for n, stride in across))
    height = 1
    repeats: list[tuple[int, int]] = []
    for n, stride in down:
        if stride == height and not repeats:
            height *= n
        else:
            repeats.append((n, stride))
    starts = [part["dst_base"] // width]
    for n, stride in repeats:
        starts = [start + i * stride for start in starts for i in range(n)][: _BLOCKS + 1]
    if len(starts) > _BLOCKS:
        # Too many to draw: all that lies between the first and the last.
        height, starts = 1 + starts[-1] - starts[0], starts[:1]
    left = (part["dst_base"] % width) / width
    shard = part["sources"][0]
    return [(start / rows, left, height / rows, wide / width, shard) for start in starts]
