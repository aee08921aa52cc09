"""The order of the rows of a grid, and the names of bands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ..common.formatting import runs
from ..common.ranks import Rank
from .grid_bands import nowhere_last

__all__ = ["band_name", "in_order"]

#: Axes, outermost first; unlisted axes follow.
_AXES = ("pp", "tp", "ep", "dp")
#: Maximum number of axes whose orders are tried.
_MOST = 5


def in_order(names: Sequence[str], ranks: Mapping[str, Rank], alike: Mapping[str, object]) -> list[str]:
    """Sort ranks by pipeline stage, and within a stage by the order of axes that gives the fewest bands.

    Args:
        names: the rows.
        ranks: the rank of each row.
        alike: a value that is equal for rows that may form one band.
    """
    coords = {name: ranks[name] for name in names}
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


def band_name(coords: Sequence[Rank]) -> str | None:
    """Name a band as a product of ranges, or else by its ends; None for files.

    Examples are ``pp 1 · tp 0-7`` and ``pp 1 · tp 0 ep 3 - tp 1 ep 2``.
    """
    if not all(coords) or len({tuple(sorted(of)) for of in coords}) != 1:
        return None
    axes = sorted(coords[0], key=_place)
    values = {axis: sorted({of[axis] for of in coords}) for axis in axes}
    if math.prod(map(len, values.values())) != len(coords) or any(
        len(runs(of)) > 1 for of in values.values()
    ):
        alike = [f"{axis} {of[0]}" for axis, of in values.items() if len(of) == 1]
        ends = [" ".join(f"{axis} {of[axis]}" for axis in axes if len(values[axis]) > 1) for of in coords]
        return " · ".join([*alike, f"{ends[0]} - {ends[-1]}"])
    return " · ".join(
        f"{axis} {of[0]}" + (f"-{of[-1]}" if len(of) > 1 else "") for axis, of in values.items()
    )
