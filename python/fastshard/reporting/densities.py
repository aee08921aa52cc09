"""Densities for charts, from the logarithmic bins of a histogram from :func:`fastshard.stats`.

With 64 bars of equal width, a normal distribution would have two humps. So this module divides counts by the
widths of their bins and uses a linear axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..common.records import dataclass
from ..verification.stats import HISTOGRAM_EDGES, TensorStats

__all__ = ["Steps", "density", "joined"]

#: Maximum share of the numbers that is cut off at each end.
TAIL = 0.0005
#: Minimum width of a step as a fraction of the axis; bins near zero are too narrow to see and have too few
#: numbers.
NARROWEST = 1 / 24


@dataclass(frozen=True)
class Steps:
    """A piecewise constant density; its area is the share of the numbers between the first and last edge."""

    edges: tuple[float, ...]
    #: Share of the numbers per unit of the value.
    heights: tuple[float, ...]
    #: Shares of the numbers outside the edges.
    below: float
    above: float


def density(
    histogram: Sequence[int], low: float | None, high: float | None, *, tail: float = TAIL
) -> Steps | None:
    """Compute the density of the finite nonzero numbers, from a histogram's 64 counts and the extremes.

    Returns:
        None if there is nothing to draw: no such numbers, or a single value.
    """
    total = sum(histogram)
    if not total or low is None or high is None or not low < high:
        return None
    filled = [i for i, n in enumerate(histogram) if n]
    first, last = filled[0], filled[-1]
    # Rare values far out would make all others a line.
    below = above = 0
    while first < last and (below + histogram[first]) / total <= tail:
        below += histogram[first]
        first += 1
    while first < last and (above + histogram[last]) / total <= tail:
        above += histogram[last]
        last -= 1
    bounds = [-math.inf, *HISTOGRAM_EDGES, math.inf]
    edges = [min(max(bound, low), high) for bound in bounds[first : last + 2]]
    if edges[0] == edges[-1]:
        # All but the tails are of one value, at the edge of a bin; or all but zeros, which are an extreme
        # too.
        return density(histogram, low, high, tail=-1) if tail >= 0 else None
    counts = list(histogram[first : last + 1])
    _merge(edges, counts, (edges[-1] - edges[0]) * NARROWEST)
    heights = tuple(n / total / (b - a) for a, b, n in zip(edges, edges[1:], counts, strict=False))
    return Steps(tuple(edges), heights, below / total, above / total)


def _merge(edges: list[float], counts: list[int], narrowest: float) -> None:
    """Join bins that are too narrow with their neighbours.

    The narrow bins on both sides of zero become one.
    """
    i = 0
    while i < len(counts) and len(counts) > 1:
        j = i
        while j + 1 < len(counts) and _narrow(edges, i, narrowest) and _narrow(edges, j + 1, narrowest):
            j += 1
        _join(edges, counts, i, j)
        i += 1
    # A run may be too narrow as a whole; an end that the extremes cut off is.
    while len(counts) > 1:
        thin = next((i for i in range(len(counts)) if _narrow(edges, i, narrowest)), None)
        if thin is None:
            return
        other = thin + 1 if thin == 0 else thin - 1
        if 0 < thin < len(counts) - 1 and edges[thin + 2] - edges[thin + 1] < edges[thin] - edges[thin - 1]:
            other = thin + 1
        _join(edges, counts, min(thin, other), max(thin, other))


def _narrow(edges: list[float], i: int, narrowest: float) -> bool:
    return edges[i + 1] - edges[i] < narrowest


def _join(edges: list[float], counts: list[int], first: int, last: int) -> None:
    counts[first : last + 1] = [sum(counts[first : last + 1])]
    del edges[first + 1 : last + 1]


def joined(stats: Sequence[TensorStats]) -> TensorStats:
    """Combine the statistics of several tensors as if they were one."""
    histogram = tuple(map(sum, zip(*(s.histogram for s in stats), strict=True)))
    lows = [s.min for s in stats if s.min is not None]
    highs = [s.max for s in stats if s.max is not None]
    finite = [
        (s.count - s.nan - s.inf, s.mean, s.std) for s in stats if s.mean is not None and s.std is not None
    ]
    n = sum(count for count, _, _ in finite)
    mean = sum(count * m for count, m, _ in finite) / n if n else None
    std = None
    if mean is not None:
        std = math.sqrt(sum(count * (s * s + (m - mean) ** 2) for count, m, s in finite) / n)
    return TensorStats(
        stats[0].dtype,
        (),
        sum(s.count for s in stats),
        sum(s.zeros for s in stats),
        sum(s.nan for s in stats),
        sum(s.inf for s in stats),
        min(lows, default=None),
        max(highs, default=None),
        mean,
        std,
        histogram,
    )
