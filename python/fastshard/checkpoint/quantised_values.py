"""Whether the scales of quantised weights are such as a quantiser writes: read, where names and shapes tell nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .. import _core
from ..common.errors import Finding
from ..models.quantised.forms import Weight, ceil_div
from ..models.quantised.values import Asked, DamagedError, NoValuesError
from .drafting import Opened
from .stored_bytes import StoredBytes

if TYPE_CHECKING:
    import numpy as np

__all__ = ["damaged"]

#: Companions that are factors of values.
_FACTORS = (
    "scales",
    "global scale",
    "input scale",
    "activation scale",
    "absolute maxima",
    "nested maxima",
    "pre_quant_scale",
)
#: Of these, those that may be below zero.
_SIGNED = ("pre_quant_scale",)
#: Dtypes of factors.
_READ = ("F16", "BF16", "F32", "F8_E4M3", "F8_E8M0", "U8")
_HELP = "restore the file that the quantiser wrote"


def damaged(opened: Opened) -> list[Finding]:
    """What is wrong with the values of scales and indices: NaN, infinite, below zero, zero over codes that are not, no groups."""
    if not opened.quantised.weights:
        return []
    stored = StoredBytes(opened)
    found: list[Finding] = []
    for weight in opened.quantised.weights:
        try:
            found += _of_weight(weight, stored)
        except _core.CoreError as error:
            # What cannot be read is told where all is read.
            del error
    return found


def _of_weight(weight: Weight, stored: StoredBytes) -> Iterator[Finding]:
    """What is wrong with the companions of a weight."""
    import numpy as np

    if all(name in stored for name in weight.stored):
        yield from _find_damage(weight, stored)
    for role, name in weight.companions.items():
        if name not in stored:
            continue
        if role == "group indices":
            yield from _groups(weight, name, stored)
        if stored.dtype(name) not in _READ:
            # Of another dtype is told by the header.
            continue
        if role not in _FACTORS or (role.endswith("maxima") and stored.dtype(name) == "U8"):
            # Maxima that are quantised are numbers in a table.
            continue
        values = stored.values(name)
        # AutoRound turns the range of symmetric integers round where the lowest value is the largest.
        signed = role in _SIGNED or (weight.codes in stored and stored.dtype(weight.codes) == "I32")
        odd = ~np.isfinite(values) | (False if signed else values < 0)
        if count := int(odd.sum()):
            # Of what is no number the whole run tells too; here is what it does to the weight.
            yield Finding.of(
                "FS306", f"{count:,} {role} of {weight.codes} are no factors (NaN, infinite or below zero)", tensor=name,
                expected="finite numbers above zero", got=str(values[odd].ravel()[0]), help=_HELP,
            )  # fmt: skip
        elif zeros := values.size - int(np.count_nonzero(values)):
            if role == "scales":
                zeros = _lost(weight, np.atleast_1d(values), stored)
            elif role == "absolute maxima":
                zeros = _lost_runs(weight, values, stored)
            elif role == "nested maxima":
                zeros = _lost_maxima(weight, values, stored)
            if zeros:
                yield _is_zero(weight, name, role, zeros)


def _find_damage(weight: Weight, stored: StoredBytes) -> Iterator[Finding]:
    """Finds what keeps codes from having values, by asking for these: a record, a shape in numbers, a table."""
    try:
        weight.values(Asked("F32", stored.read, compares_readers=False))
    except DamagedError as error:
        yield error.finding
    except NoValuesError:
        # Its values are not made here, which is no damage.
        return


def _is_zero(weight: Weight, name: str, role: str, count: int) -> Finding:
    return Finding.of(
        "FS313", f"{count:,} {role} of {weight.codes} are zero, and the codes there are not: all of that is lost", severity="error",
        tensor=name, expected="numbers above zero", got="0", help=_HELP,
    )  # fmt: skip


def _lost(weight: Weight, scales: np.ndarray[Any, Any], stored: StoredBytes) -> int:
    """How many scales are zero over codes that are not; over zeros any scale will do."""
    import numpy as np

    zero = np.argwhere(scales == 0)
    shape = stored.shape(weight.codes) if weight.codes in stored else ()
    if scales.ndim == 1 and len(shape) == 2 and len(scales) in (1, shape[0]):
        # One for the whole, or for each row.
        scales = scales.reshape(-1, 1)
    if len(shape) > 2 and scales.ndim == len(shape) and scales.shape[:-2] == shape[:-2] and math.prod(shape):
        # Each expert by itself.
        experts = stored.raw(weight.codes, 0, stored.size(weight.codes)).reshape(
            -1, shape[-2], stored.size(weight.codes) // math.prod(shape[:-1])
        )
        pairs = zip(experts, scales.reshape(-1, *scales.shape[-2:]), strict=True)
        return sum(_lost_blocks(codes, one, stored.dtype(weight.codes)) for codes, one in pairs)
    if len(shape) != 2 or scales.ndim != 2:
        return len(zero)
    codes = stored.raw(weight.codes, 0, stored.size(weight.codes))
    return _lost_blocks(
        codes.reshape(shape[0], codes.size // max(1, shape[0])), scales, stored.dtype(weight.codes)
    )


def _lost_blocks(codes: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], dtype: str) -> int:
    """The same of one matrix of bytes."""
    import numpy as np

    zero = np.argwhere(scales == 0)
    if scales.shape[1] > codes.shape[1]:
        # Several lie in one byte.
        return len(zero)
    high, wide = (_block(extent, parts) for extent, parts in zip(codes.shape, scales.shape, strict=True))
    return sum(
        _says_something(codes[r * high : (r + 1) * high, c * wide : (c + 1) * wide], dtype) for r, c in zero
    )


def _lost_runs(weight: Weight, maxima: np.ndarray[Any, Any], stored: StoredBytes) -> int:
    """The same of blocks that run over the rows."""
    import numpy as np

    if weight.codes not in stored:
        return 0
    codes = stored.raw(weight.codes, 0, stored.size(weight.codes))
    length = _block(codes.size, maxima.size)
    zero = np.argwhere(maxima.ravel() == 0).ravel()
    return sum(_says_something(codes[i * length : (i + 1) * length], "") for i in zero)


def _lost_maxima(weight: Weight, nested: np.ndarray[Any, Any], stored: StoredBytes) -> int:
    """The same of maxima that are quantised themselves: where all are alike their own maximum is zero, and so are their codes."""
    import numpy as np

    codes = stored.raw(
        weight.companions["absolute maxima"], 0, stored.size(weight.companions["absolute maxima"])
    )
    length = _block(codes.size, nested.size)
    zero = np.argwhere(nested.ravel() == 0).ravel()
    return sum(bool(codes[i * length : (i + 1) * length].any()) for i in zero)


def _says_something(codes: np.ndarray[Any, Any], dtype: str) -> bool:
    """True for codes of which some are not zero, whatever their sign; of integers, that are not all one number."""
    if not codes.size:
        return False
    if dtype.startswith("F8"):
        return bool((codes & 0x7F).any())
    if dtype == "U8":
        return bool((codes & 0x77).any())
    return bool((codes != codes.ravel()[0]).any())


def _block(extent: int, parts: int) -> int:
    """How long the blocks are of which an extent has so many, the last of them short: a power of two, where one fits."""
    least = ceil_div(extent, parts)
    power = 1 << max(0, least - 1).bit_length()
    return power if ceil_div(extent, power) == parts else least


def _groups(weight: Weight, name: str, stored: StoredBytes) -> Iterator[Finding]:
    """Group indices that name no group, or one too often."""
    import numpy as np

    scales = weight.companions.get("scales")
    if scales is None or stored.dtype(name) != "I32" or scales not in stored or len(stored.shape(scales)) < 2:
        return
    groups = stored.values(scales).shape[0 if weight.form.suffix == ".qweight" else -1]
    indices = stored.raw(name, 0, stored.size(name)).view(np.int32)
    if weight.form.suffix != ".qweight" and bool((indices == -1).any()):
        # compressed-tensors says so that they are in order.
        return
    size = ceil_div(indices.size, groups)
    outside = int(((indices < 0) | (indices >= groups)).sum())
    uneven = outside == 0 and bool((np.bincount(indices, minlength=groups)[:groups] > size).any())
    if outside or uneven:
        got = f"{outside:,} of another" if outside else "groups of other sizes"
        yield Finding.of(
            "FS215", f"the group indices of {weight.codes} are not those of {groups} groups", tensor=name,
            expected=f"0 to {groups - 1}, each at most {size} times", got=got, help=_HELP,
        )  # fmt: skip
