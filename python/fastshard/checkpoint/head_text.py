"""Descriptions of the rows of a fused QKV tensor as heads of queries, keys or values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..common.regex import compile_when_used
from .box_text import Run, join_runs

__all__ = ["heads"]

#: The axis of the groups; the parts, each with its number of heads in a group; and the axis of a head's rows.
_FUSED = compile_when_used(r"(\w+)\*\(([^()]+)\)\*(\w+)")


def heads(
    dimension: str, extent: int, first: int, runs: Sequence[Run], axes: Mapping[str, int]
) -> str | None:
    """Describe rows as heads, e.g. ``heads 0-1 of q in each of 2 groups: rows 0-15 of each 32``.

    Args:
        dimension: the dimension's expression in the layout table, e.g. ``g*(q:r|k:1|v:1)*d``.
        extent: rows of the stored tensor.
        first: the first row taken.
        runs: the rows taken, from the first on.
        axes: extents by the letters of the table.

    Returns:
        None if the dimension fuses no heads, or if the rows are not full heads of one part.
    """
    fused = _FUSED.fullmatch(dimension)
    if fused is None:
        return None
    counts = {name: count for name, _, count in (part.partition(":") for part in fused[2].split("|"))}
    sizes = {name: int(count) if count.isdigit() else axes.get(count, 0) for name, count in counts.items()}
    rows = axes.get(fused[3], 0)
    every = rows * sum(sizes.values())
    if not all(sizes.values()) or not rows or extent % every:
        return None
    *outer, (taken, step) = join_runs(runs) or [(1, 1)]
    if step != 1:
        # One row of each.
        outer, taken = [*outer, (taken, step)], 1
    groups, apart = outer[0] if outer else (1, every)
    begin = first % every
    if apart != every or len(outer) > 1:
        return None
    # Where each part has one head in a group, the group is what a model calls a head.
    noun = "head" if set(sizes.values()) == {1} else "group"
    is_all = groups > 1 and groups * every == extent
    where = f"each of {groups} {noun}s" if is_all else _ranged(noun, first // every, groups)
    at = 0
    for name, size in sizes.items():
        if at <= begin and begin + taken <= at + size * rows:
            one, rest = divmod(begin - at, rows)
            if rest or taken % rows:
                return None
            which = f"{_ranged('head', one, taken // rows)} of {name}" if size > 1 else name
            return f"{which} in {where}: rows {begin}-{begin + taken - 1} of each {every}"
        at += size * rows
    return None


def _ranged(noun: str, first: int, count: int) -> str:
    return f"{noun} {first}" if count == 1 else f"{noun}s {first}-{first + count - 1}"
