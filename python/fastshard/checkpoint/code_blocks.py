"""Scales of quantised weights and the blocks of codes that they scale, to find invalid factors, and zero
factors over nonzero codes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from ..common.dtypes import numpy_dtype
from ..common.records import dataclass
from ..models.quantised.forms import WINDOW, ceil_div
from .stored_bytes import StoredBytes

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["Blocks", "classify", "count_lost", "show_first"]

#: Significant bits of a byte of codes: all except the signs; for maxima and pairs of integers, all bits.
_FLOATS, _HALVES, _ALL = 0x7F, 0x77, 0xFF


@dataclass(frozen=True)
class Blocks:
    """The codes of a stack of matrices, divided into blocks of bytes; each block has one factor."""

    #: The tensor of the codes.
    codes: str
    #: Number of rows of a matrix, and bytes per row.
    rows: int
    width: int
    #: Number of rows and columns of a matrix's factors.
    down: int
    across: int
    #: Bits that are zero if a code is zero; None for integers, whose block counts as zero if all bytes are
    #: equal.
    mask: int | None
    #: Number of matrices.
    lead: int = 1
    #: Rows of factors for each row of bytes: 2 if a byte holds codes of two rows, the first one in its low
    #: half.
    share: int = 1

    @classmethod
    def in_turn(cls, codes: str, size: int, count: int, kind: str) -> Blocks:
        """Build consecutive blocks, regardless of rows."""
        return cls(codes, 1, size, 1, count, _ALL if kind == "maxima" else None)

    @classmethod
    def of_matrices(
        cls, codes: str, shape: tuple[int, ...], size: int, grid: tuple[int, ...], dtype: str
    ) -> Blocks | None:
        """Build blocks of rows and columns; return None if a byte has several factors."""
        rows, width = shape[-2], size // math.prod(shape[:-1])
        down, across = grid[-2:]
        share = 2 if dtype == "U8" and down == 2 * rows else 1
        if across > width or down > rows * share:
            return None
        mask = _FLOATS if dtype.startswith("F8") else _HALVES if dtype == "U8" else None
        return cls(
            codes, rows, width, down, across, _ALL if share == 2 else mask, math.prod(shape[:-2]), share
        )

    @property
    def height(self) -> int:
        """Number of rows in a block."""
        return _extent(self.rows, self.down // self.share)

    @property
    def length(self) -> int:
        """Bytes in a row of a block."""
        return _extent(self.width, self.across)


def _extent(extent: int, parts: int) -> int:
    """Return the length of the blocks that divide an extent into the given number of parts.

    The last block may be short. The length is a power of two if one fits.
    """
    least = ceil_div(extent, parts)
    power = 1 << max(0, least - 1).bit_length()
    return power if ceil_div(extent, power) == parts else least


def classify(raw: Array, dtype: str, *, signed: bool) -> tuple[Array, Array]:
    """Find the factors that are zero, and those that are invalid.

    Invalid factors are NaN, infinite, or, unless ``signed``, negative.
    """
    import numpy as np

    if dtype in ("F8_E4M3", "F8_E8M0", "U8"):
        # A byte is looked up as a byte: nothing is widened.
        kinds = np.frombuffer(raw.tobytes().translate(_kinds_of_bytes(dtype, signed)), np.uint8)
        return kinds == 1, kinds == 2
    values = _as_floats(raw, dtype)
    odd = ~np.isfinite(values)
    return values == 0, odd if signed else odd | (values < 0)


def show_first(raw: Array, odd: Array, dtype: str) -> str:
    """Format the first of the invalid factors."""
    import numpy as np

    at = int(np.argmax(odd))
    if dtype in ("F8_E4M3", "F8_E8M0", "U8"):
        return str(np.float32(_value_of_byte(int(raw[at]), dtype)))
    return str(_as_floats(raw, dtype)[at])


def _as_floats(raw: Array, dtype: str) -> Array:
    import numpy as np

    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(numpy_dtype(dtype))


@cache
def _kinds_of_bytes(dtype: str, signed: bool) -> bytes:
    """Build a table that maps zero bytes to 1, bytes that are invalid factors to 2, and others to 0."""
    values = [_value_of_byte(byte, dtype) for byte in range(256)]
    return bytes(1 if v == 0 else 2 if math.isnan(v) or (v < 0 and not signed) else 0 for v in values)


def _value_of_byte(byte: int, dtype: str) -> float:
    """Return the number that a byte encodes.

    The byte is an E4M3 number, or else the exponent of a power of two, whose last value (255) is NaN.
    """
    if dtype != "F8_E4M3":
        return math.nan if byte == 255 else math.ldexp(1.0, byte - 127)
    exponent, fraction = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    value = math.ldexp(fraction / 8, -6) if exponent == 0 else math.ldexp(1 + fraction / 8, exponent - 7)
    return -value if byte >> 7 else value


def count_lost(name: str, blocks: Blocks, stored: StoredBytes) -> int:
    """Count the zero factors over nonzero codes; over zero codes, any factor is valid."""
    import numpy as np

    lost = 0
    # Rows whose codes share a byte stay together.
    together = 1 if blocks.share == 1 else blocks.share * blocks.across
    for first, raw in stored.windows(name, together):
        zero, _ = classify(raw, stored.dtype(name), signed=True)
        if not zero.any():
            continue
        if blocks.share == 1:
            lost += int(np.count_nonzero(_find_codes(first, zero, blocks, stored)))
            continue
        pairs = zero.reshape(-1, 2, blocks.across)
        bits = _find_codes(first // 2, pairs.any(axis=1).ravel(), blocks, stored).reshape(-1, blocks.across)
        lost += int(np.count_nonzero(pairs[:, 0] & (bits & 0x0F != 0)))
        lost += int(np.count_nonzero(pairs[:, 1] & (bits & 0xF0 != 0)))
    return lost


def _find_codes(first: int, zero: Array, blocks: Blocks, stored: StoredBytes) -> Array:
    """Find the bits that are set in the codes of some blocks; they are nonzero if the codes carry values.

    Args:
        first: the number of the first block.
        zero: an array that is True for the blocks to examine.
        blocks: how the codes are divided.
        stored: the bytes to read them from.
    """
    import numpy as np

    count, shares = zero.size, blocks.share == 2
    found, least, undecided = np.zeros(count, np.uint8), np.full(count, 255, np.uint8), zero.copy()
    high, wide, down = blocks.height, blocks.length, blocks.down // blocks.share
    columns = ceil_div(blocks.width, wide)
    for at, end in _windows_of_codes(first, count, blocks):
        rows = np.arange(at // blocks.width, (end - 1) // blocks.width + 1)
        low, last = (0, columns - 1) if rows.size > 1 else ((n % blocks.width) // wide for n in (at, end - 1))
        of_columns = np.arange(low, last + 1)
        of_rows = rows // blocks.rows * down + rows % blocks.rows // high
        numbers = (of_rows[:, None] * blocks.across + of_columns - first).ravel()
        wanted = (numbers >= 0) & (numbers < count)
        wanted[wanted] = undecided[numbers[wanted]]
        if not wanted.any():
            continue
        starts = np.maximum((rows * blocks.width)[:, None] + of_columns * wide, at).ravel() - at
        raw, numbers = stored.raw(blocks.codes, at, end - at), numbers[wanted]
        np.bitwise_or.at(found, numbers, np.bitwise_or.reduceat(raw, starts)[wanted])
        if blocks.mask is None:
            np.bitwise_and.at(least, numbers, np.bitwise_and.reduceat(raw, starts)[wanted])
            # Bytes that differ.
            undecided[numbers] = found[numbers] == least[numbers]
        elif not shares:
            undecided[numbers] = found[numbers] & blocks.mask == 0
    return found if shares else zero & ~undecided


def _windows_of_codes(first: int, count: int, blocks: Blocks) -> Iterator[tuple[int, int]]:
    """Yield ranges of the bytes of some blocks: several complete rows, or a part of one row."""
    high, wide, down = blocks.height, blocks.length, blocks.down // blocks.share

    def first_row(block: int) -> int:
        return block // down * blocks.rows + min(block % down * high, blocks.rows)

    top, bottom = first // blocks.across, (first + count - 1) // blocks.across
    at, end = first_row(top) * blocks.width, first_row(bottom + 1) * blocks.width
    if top == bottom and high == 1:
        at, end = (
            at + min(blocks.width, first % blocks.across * wide),
            at + min(blocks.width, ((first + count - 1) % blocks.across + 1) * wide),
        )
    while at < end:
        rest = at % blocks.width
        if blocks.width <= WINDOW and rest == 0:
            step = WINDOW // blocks.width * blocks.width
        else:
            step = min(WINDOW, blocks.width - rest)
        yield at, min(end, at + step)
        at += step
