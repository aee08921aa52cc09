"""Ranks of the run that wrote a checkpoint: a number or a range for each dimension of its mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

__all__ = ["Coords", "Rank", "RankRanges", "do_meet", "format_rank", "is_among", "is_within", "rank_range"]

#: One rank, e.g. ``{"tp": 1, "pp": 0}``. A missing dimension matches any number.
Rank: TypeAlias = Mapping[str, int]
#: One rank or several, e.g. ``{"tp": range(3, 6), "pp": 1}``.
Coords: TypeAlias = Mapping[str, int | range]

#: Ranks in a finding: ranges of consecutive numbers for each dimension.
RankRanges: TypeAlias = Mapping[str, Sequence[range]]


def do_meet(one: Sequence[range], other: Sequence[range]) -> bool:
    """Return True if two lists of ranges have a number in common.

    >>> do_meet([range(0, 4)], [range(3, 5)]), do_meet([range(0, 4)], [range(4, 5)])
    (True, False)
    """
    return any(a.start < b.stop and b.start < a.stop for a in one for b in other)


def is_among(rank: Rank, coords: RankRanges) -> bool:
    """Return True if a rank is one of several.

    A dimension that only one side has is ignored.

    >>> is_among({"tp": 1}, {"tp": [range(0, 2)], "pp": [range(3, 4)]})
    True
    >>> is_among({"tp": 2}, {"tp": [range(0, 2)]})
    False
    """
    return all(rank.get(d) is None or any(rank[d] in run for run in runs) for d, runs in coords.items())


def is_within(rank: Rank, coords: RankRanges) -> bool:
    """Return True if a rank is one of some ranks and has all of their dimensions.

    >>> is_within({"tp": 1, "pp": 0}, {"tp": [range(0, 2)]}), is_within({"tp": 1}, {"pp": [range(3, 4)]})
    (True, False)
    """
    return all(d in rank and any(rank[d] in run for run in runs) for d, runs in coords.items())


def rank_range(first: int, last: int) -> int | range:
    """Return the numbers from ``first`` to ``last`` in the form of :data:`Coords`.

    >>> rank_range(3, 3), rank_range(3, 5)
    (3, range(3, 6))
    """
    return first if first == last else range(first, last + 1)


def format_rank(rank: Rank) -> str:
    """Format one rank, e.g. for messages.

    >>> format_rank({"tp": 1, "pp": 0})
    'tp 1, pp 0'
    """
    return ", ".join(f"{dimension} {number}" for dimension, number in rank.items())
