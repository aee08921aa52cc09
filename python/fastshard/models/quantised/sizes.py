"""Extents of weights, and of the blocks into which they are divided."""

from __future__ import annotations

import math

from ...common.records import dataclass

__all__ = ["Sizes", "Stored", "ceil_div", "each_channel"]

#: Dtype and shape of a tensor.
Stored = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """The extents of a weight without its form: leading extents (experts), rows, columns."""

    lead: tuple[int, ...]
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return (*self.lead, self.rows, self.columns)

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The extents, with the leading ones merged into one."""
        return math.prod(self.lead), self.rows, self.columns


def ceil_div(n: int, by: int) -> int:
    """Return the number of blocks of a given length in an extent; the last one may be shorter."""
    return -(-n // by) if by > 0 else 0


def each_channel(sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the shapes for one value per output channel of a convolution; none for a matrix."""
    if not sizes.lead:
        return []
    channels = sizes.lead[0]
    return [(channels,), (channels, 1), (channels, *(1 for _ in sizes.shape[1:]))]
