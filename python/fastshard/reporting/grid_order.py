"""The order of the rows of a grid, and what a band of them is called."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ..checkpoint.causes import ranks_of
from ..common.formatting import runs
from .grid_bands import nowhere_last

__all__ = ["band_name", "in_order"]

#: Axes from the outermost; those that are not named come behind them.
_AXES = ("pp", "tp", "ep", "dp")
#: Axes whose orders are tried.
_MOST = 5


def in_order(names: Sequence[str], alike: Mapping[str, object]) -> list[str]:
    """Ranks by pipeline stage, and within it by that order of their axes which gives the fewest bands.

    Args:
        names: the rows.
        alike: what is the same for rows that may be one band.
    """
    coords = {name: _coords(name) for name in names}
    axes = sorted({axis for of in coords.values() for axis in of}, key=_place)
    if len({tuple(sorted(of)) for of in coords.values()}) != 1 or not 1 < len(axes) <= _MOST:
        return sorted(names, key=nowhere_last)
    outer = [axis for axis in axes if axis == "pp"]
    inner = [axis for axis in axes if axis != "pp"]
    orders = [
        sorted(names, key=lambda name: [coords[name][axis] for axis in (*outer, *order)])
        for order in itertools.permutations(inner)
    ]
    return min(orders, key=lambda order: len(list(itertools.groupby(order, key=alike.__getitem__))))


def _place(axis: str) -> tuple[int, str]:
    return (_AXES.index(axis) if axis in _AXES else len(_AXES), axis)


def _coords(name: str) -> dict[str, int]:
    return {} if ":" in name else {axis: first for axis, (first, _) in ranks_of(name).items()}


def band_name(names: Sequence[str]) -> str | None:
    """A band as the product of ranges, else by its ends: ``pp 1 · tp 0-7``, ``pp 1 · tp 0 ep 3 - tp 1 ep 2``; None for files."""
    coords = [_coords(name) for name in names]
    if not all(coords) or len({tuple(sorted(of)) for of in coords}) != 1:
        return None
    axes = sorted(coords[0], key=_place)
    values = {axis: sorted({of[axis] for of in coords}) for axis in axes}
    if math.prod(map(len, values.values())) != len(names) or any(len(runs(of)) > 1 for of in values.values()):
        alike = [f"{axis} {of[0]}" for axis, of in values.items() if len(of) == 1]
        ends = [" ".join(f"{axis} {of[axis]}" for axis in axes if len(values[axis]) > 1) for of in coords]
        return " · ".join([*alike, f"{ends[0]} - {ends[-1]}"])
    return " · ".join(
        f"{axis} {of[0]}" + (f"-{of[-1]}" if len(of) > 1 else "") for axis, of in values.items()
    )
