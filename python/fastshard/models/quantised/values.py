"""The computation of values from a weight's codes, in the terms of the core's decoder.

The value of an element is ``(number of its code - zero point) * scale + term``. All tensors in the formula
are viewed with three extents: merged leading ones, rows, columns. They have the order of the codes, which may
be transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ...common import codes
from ...common.errors import Finding
from ...common.records import dataclass
from .sizes import Sizes, ceil_div, each_channel

__all__ = [
    "E2M1",
    "NIBBLES",
    "Block",
    "Coded",
    "DamagedError",
    "NoValuesError",
    "ValueAccess",
    "Values",
    "fitting",
    "operand",
    "powers",
    "scale",
    "scale_of_all",
    "view",
]

#: A description in the core's form.
Document = Mapping[str, object]
#: 4-bit float codes, two adjacent codes of a row per byte.
E2M1: Document = {"e2m1": {"negative_zero": True}}
NIBBLES: Document = {"row": {"bits": 4}}
#: Rows and columns of a block.
Block = tuple[int, int]


class NoValuesError(Exception):
    """A weight whose values fastshard does not compute; the message gives the reason."""


class DamagedError(NoValuesError):
    """A weight whose values nobody can compute, because a record or a table of its codes is damaged."""

    def __init__(
        self, message: str, *, tensor: str, expected: str, got: str, code: str = codes.CONFIG_DISAGREES
    ) -> None:
        super().__init__(message)
        self.finding = Finding.of(
            code,
            message,
            severity="error",
            tensor=tensor,
            expected=expected,
            got=got,
            help="restore the file that the quantiser wrote",
        )


@dataclass(frozen=True)
class ValueAccess:
    """A decoder's access to stored values, and the requested dtype."""

    #: The requested dtype: ``BF16``.
    dtype: str
    #: Reads bytes of a tensor: its name, the offset, and the number of bytes.
    read: Callable[[str, int, int], bytes]
    #: Whether to read values for checks that names and shapes do not allow.
    looks: bool = True
    #: Whether to check for points on which readers of one form differ.
    compares_readers: bool = True


@dataclass(frozen=True)
class Coded:
    """The computation of values from codes."""

    codes: Document
    numbers: object
    packing: object = "none"
    flat: bool = False
    turned: bool = False
    zero: Document | None = None
    scales: Sequence[Document] = ()
    groups: Document | None = None
    #: The dtype to which the product of number and scale is rounded, as in the reference.
    rounded: str = "F32"
    term: float = 0.0

    def document(self) -> Document:
        """Return the description in the core's form."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Values:
    """A tensor of values: its name within the module, its shape, and its computation."""

    suffix: str
    shape: tuple[int, ...]
    coded: Coded
    #: Notes for the user about the values, if any.
    open_points: tuple[str, ...] = ()


def view(name: str, shape: Sequence[int], dtype: str | None = None) -> Document:
    """Describe a tensor in another shape or dtype with the same bytes."""
    return {"name": name, "shape": list(shape), "dtype": dtype}


def operand(name: str, shape: Sequence[int], coded: Coded) -> Document:
    """Describe a tensor that is itself coded."""
    return {"name": name, "shape": list(shape), "coded": coded.document()}


def scale(of: Document, block: Sequence[int], *, divides: bool = False, rounded: str = "F32") -> Document:
    """Describe a factor per block."""
    return {"grid": {"of": of, "block": list(block)}, "divides": divides, "rounded": rounded}


def scale_of_all(
    of: str, shape: Sequence[int], sizes: Sizes, *, divides: bool = False, rounded: str = "F32"
) -> Document:
    """Describe one factor for the full weight, or for each matrix of a stack."""
    count, (lead, rows, columns) = math.prod(shape), sizes.matrices
    block = [max(1, lead) if count == 1 else 1, rows, columns]
    return scale(view(of, [count, 1, 1]), block, divides=divides, rounded=rounded)


def powers(of: str, sizes: Sizes) -> Document:
    """Describe a power of two per 32 elements of a row."""
    lead, rows, columns = sizes.matrices
    return scale(view(of, [lead, rows, ceil_div(columns, 32)], "F8_E8M0"), [1, 1, 32])


def fitting(sizes: Sizes, shape: tuple[int, ...], candidates: Sequence[Block]) -> tuple[list[int], list[int]]:
    """Return the block and the grid for scales of a given shape: the first candidate that fits, or one scale
    for all.

    Raises:
        NoValuesError: if no candidate fits.
    """
    lead, high, wide = (max(1, n) for n in sizes.matrices)
    if math.prod(shape) == 1:
        return [lead, high, wide], [1, 1, 1]
    for rows, columns in candidates:
        grid = [sizes.matrices[0], ceil_div(sizes.rows, rows), ceil_div(sizes.columns, columns)]
        if shape in _spelled(sizes.lead, *grid[1:]):
            return [1, min(rows, high), min(columns, wide)], grid
    if shape in each_channel(sizes):
        return [math.prod(sizes.lead[1:]), high, wide], [sizes.lead[0], 1, 1]
    raise NoValuesError(f"scales of {list(shape)} do not match any blocks of {list(sizes.shape)}")


def _spelled(lead: tuple[int, ...], high: int, wide: int) -> list[tuple[int, ...]]:
    """Return the possible stored shapes of a grid."""
    found = [(*lead, high, wide), (*lead, high, 1, wide, 1)]
    found += [(*lead, high)] if wide == 1 else []
    return found + ([lead, (*lead, 1)] if high == wide == 1 else [])
