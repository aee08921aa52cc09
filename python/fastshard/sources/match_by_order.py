"""The parameters for an optimizer's numbers or vectors, if order and shapes determine them uniquely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Maximum number of simultaneous states in the search; above it, shapes do not decide.
_MOST_STATES = 4096


def by_shape(
    names: list[tuple[str, list[int]]], groups: list[list[list[int] | None]]
) -> list[list[str]] | None:
    """Return the only assignment of shape groups to subsequences of the ordered parameters.

    An unknown shape fits any parameter. The remaining parameters are frozen. The result is None if there are
    several assignments, or none.
    """
    ends = [len(group) for group in groups]
    ends.append(len(names) - sum(ends))

    def advance(g: int, at: int, shape: list[int]) -> int | None:
        if at == ends[g] or (g < len(groups) and groups[g][at] not in (None, shape)):
            return None
        return at + 1

    return _one_way(names, ends, advance)


def by_size(names: list[tuple[str, int]], lengths: list[int]) -> list[list[str]] | None:
    """Return the only way in which parameters in order fill vectors of the given lengths, if there is exactly
    one.

    The remaining parameters are frozen.
    """
    ends = [*lengths, sum(size for _, size in names) - sum(lengths)]

    def advance(g: int, at: int, size: int) -> int | None:
        return at + size if at + size <= ends[g] else None

    return _one_way(names, ends, advance)


def _one_way(
    names: list[tuple[str, Any]], ends: list[int], advance: Callable[[int, int, Any], int | None]
) -> list[list[str]] | None:
    """Assign each parameter in order to one of several places; the last place is for the remaining ones.

    Args:
        names: parameters, each with the value to compare.
        ends: the final position required for each place.
        advance: maps (place, its position, parameter) to the next position, or None if it does not fit.
    """
    if ends[-1] < 0:
        return None
    # Ways to be at a position per place, as linked lists; at most two per state matter.
    paths: dict[tuple[int, ...], list[Any]] = {(0,) * len(ends): [None]}
    for _, decides in names:
        following: dict[tuple[int, ...], list[Any]] = {}
        for state, ways in paths.items():
            for g, at in enumerate(state):
                if (moved := advance(g, at, decides)) is not None:
                    kept = following.setdefault((*state[:g], moved, *state[g + 1 :]), [])
                    kept.extend((way, g) for way in ways[: 2 - len(kept)])
        if len(following) > _MOST_STATES:
            return None
        paths = following
    ways = paths.get(tuple(ends), [])
    if len(ways) != 1:
        return None
    places, way = [], ways[0]
    while way is not None:
        way, g = way
        places.append(g)
    assigned: list[list[str]] = [[] for _ in ends[:-1]]
    for (name, _), g in zip(names, reversed(places), strict=True):
        if g < len(assigned):
            assigned[g].append(name)
    return assigned
