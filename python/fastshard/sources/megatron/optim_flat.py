"""The contents of the flat vectors of Megatron-LM's distributed optimizer, according to the rules for its
buffers.

Parameters are in reverse order, and each starts at a multiple of 64 elements. A bucket ends when it is full,
and before and after an embedding that stages share. Elements between two parameters were never written, and
are not read.
source: megatron/core/distributed/param_and_grad_buffer.py (_ParamAndGradBuffer)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from ...common.records import dataclass, field

#: Number of elements to which the start of a parameter is aligned.
ALIGNED = 64

#: First index, extent, first element in the flat range.
Run = tuple[list[int], list[int], int]


class UnknownPlaces(Exception):
    """An error: the places of parameters in flat vectors cannot be determined with certainty."""

    def __init__(self, message: str, expected: str | None = None, got: str | None = None) -> None:
        super().__init__(message)
        self.expected, self.got = expected, got


@dataclass
class Part:
    """A parameter on one rank."""

    #: Name of the tensor of which it is a part.
    name: str
    shape: list[int]
    dtype: str
    #: True for an embedding that the first and the last stage share.
    shared: bool = False
    #: Places of its elements: (first index, extent) of consecutive boxes of that tensor; empty if it is the
    #: full tensor.
    boxes: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


#: A parameter, and the range of its elements in a vector.
Place = tuple[Part, int, int]


def aligned(at: int) -> int:
    """Return the next position where a parameter may begin."""
    return -(-at // ALIGNED) * ALIGNED


def in_buckets(parts: Sequence[Part], sizes: Sequence[int]) -> list[list[Place]] | None:
    """Locate parameters in buckets of the given sizes, excluding the padding at the ends.

    None if the parameters do not fill the buckets.

    Args:
        parts: parameters of one buffer, in the model's order.
        sizes: number of elements in each bucket.
    """
    buckets: list[list[Place]] = []
    rest = deque(reversed(parts))
    for size in sizes:
        bucket: list[Place] = []
        end = 0
        while rest and aligned(end) + rest[0].numel <= size:
            # Before a shared embedding a bucket ends, where it would begin.
            if bucket and (bucket[-1][0].shared or rest[0].shared):
                break
            start = aligned(end)
            end = start + rest[0].numel
            bucket.append((rest.popleft(), start, end))
        closes = aligned(end) if rest and rest[0].shared and not (bucket and bucket[-1][0].shared) else end
        if not bucket or size != closes:
            return None
        buckets.append(bucket)
    return None if rest else buckets


def in_vector(parts: Sequence[Part], bucket: int | None, length: int) -> list[Place] | None:
    """Locate parameters in one vector of concatenated buckets without padding.

    None if they do not fill the vector.

    Args:
        parts: parameters of one buffer, in the model's order.
        bucket: number of elements after which a bucket is closed; None if never.
        length: number of elements in the vector.
    """
    found: list[Place] = []
    # Where the bucket begins in the vector, and how far it is filled.
    base = end = 0
    for part in reversed(parts):
        if part.shared and end:
            base, end = base + aligned(end), 0
        start = aligned(end)
        end = start + part.numel
        found.append((part, base + start, base + end))
        if part.shared or (bucket is not None and end >= bucket):
            base, end = base + end, 0
    return found if base + end == length else None


def runs(shape: Sequence[int], first: int, count: int) -> Iterator[Run]:
    """Yield the boxes for a range of a box's C-ordered elements, each with its start in the range."""
    if count <= 0:
        return
    if first == 0 and count == prod(shape):
        yield [0] * len(shape), list(shape), 0
        return
    inner = prod(shape[1:])
    rest = len(shape) - 1
    row, into = divmod(first, inner)
    done = 0
    if into:
        done = min(inner - into, count)
        yield from _in_row(row, shape[1:], into, done, 0)
        row += 1
    if full := (count - done) // inner:
        yield [row, *[0] * rest], [full, *shape[1:]], done
        done += full * inner
        row += full
    if done < count:
        yield from _in_row(row, shape[1:], 0, count - done, done)


def _in_row(row: int, shape: Sequence[int], first: int, count: int, at: int) -> Iterator[Run]:
    for lo, size, begin in runs(shape, first, count):
        yield [row, *lo], [1, *size], at + begin


def pieces(part: Part, first: int, count: int, file: int, number: int, at: int) -> Iterator[tuple[Any, ...]]:
    """Yield boxes of the full tensor for a range of a parameter's elements in a flat tensor.

    The range begins at ``at`` in the flat tensor.
    """
    begin = 0
    for lo, size in part.boxes:
        volume = prod(size)
        a, b = max(first, begin), min(first + count, begin + volume)
        for inner, extent, offset in runs(size, a - begin, b - a) if a < b else ():
            yield (
                [corner + i for corner, i in zip(lo, inner, strict=True)],
                extent,
                file,
                number,
                at + a - first + offset,
            )
        begin += volume
