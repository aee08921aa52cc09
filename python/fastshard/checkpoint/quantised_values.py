"""Checks of scales and group indices of quantised weights for damage that names and shapes do not show."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .. import _core
from ..common import codes, memory_budget
from ..common.errors import Finding
from ..models.quantised.forms import Weight, ceil_div
from ..models.quantised.values import DamagedError, NoValuesError, ValueAccess
from .code_blocks import Blocks, classify, count_lost, show_first
from .drafting import Opened
from .stored_bytes import StoredBytes

__all__ = ["damaged"]

#: Roles of companions that are factors of values.
_FACTORS = (
    "scales",
    "global scale",
    "input scale",
    "activation scale",
    "absolute maxima",
    "nested maxima",
    "pre_quant_scale",
)
#: Roles of factors that may be negative.
_SIGNED = ("pre_quant_scale",)
#: Dtypes of factors.
_READ = ("F16", "BF16", "F32", "F8_E4M3", "F8_E8M0", "U8")
_HELP = "restore the file that the quantiser wrote"


def damaged(opened: Opened) -> list[Finding]:
    """Find damaged values of scales and indices.

    Scales are damaged if they are NaN, infinite, negative, or zero over nonzero codes; indices if they name
    no group.
    """
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
    """Yield the findings about the companions of a weight."""
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
        yield from _of_factors(weight, role, name, stored)


def _of_factors(weight: Weight, role: str, name: str, stored: StoredBytes) -> Iterator[Finding]:
    """Yield the findings for invalid factors, and for factors that are zero over nonzero codes."""
    import numpy as np

    # AutoRound turns the range of symmetric integers round where the lowest value is the largest.
    signed = role in _SIGNED or (weight.codes in stored and stored.dtype(weight.codes) == "I32")
    dtype, count, first, zeros = stored.dtype(name), 0, "", 0
    for _, raw in stored.windows(name):
        zero, odd = classify(raw, dtype, signed=signed)
        if odd.any():
            first = first or show_first(raw, odd, dtype)
            count += int(np.count_nonzero(odd))
        zeros += int(np.count_nonzero(zero))
    if count:
        # Of what is no number the whole run tells too; here is what it does to the weight.
        yield Finding.of(
            codes.NON_FINITE,
            f"{count:,} {role} of {weight.codes} are invalid (NaN, infinite or negative)",
            tensor=name,
            expected="finite numbers above zero",
            got=first,
            help=_HELP,
        )
    elif zeros:
        blocks = _blocks_of(weight, role, name, stored)
        zeros = zeros if blocks is None else count_lost(name, blocks, stored)
        if zeros:
            yield _is_zero(weight, name, role, zeros)


def _find_damage(weight: Weight, stored: StoredBytes) -> Iterator[Finding]:
    """Yield a finding for a damaged record, shape or table on which a weight's values depend."""
    try:
        weight.values(ValueAccess("F32", stored.read, compares_readers=False))
    except DamagedError as error:
        yield error.finding
    except NoValuesError:
        # Its values are not made here, which is no damage.
        return


def _is_zero(weight: Weight, name: str, role: str, count: int) -> Finding:
    return Finding.of(
        codes.ZERO_SLAB,
        f"{count:,} {role} of {weight.codes} are zero where the codes are not, so those values are lost",
        severity="error",
        tensor=name,
        expected="numbers above zero",
        got="0",
        help=_HELP,
    )


def _blocks_of(weight: Weight, role: str, name: str, stored: StoredBytes) -> Blocks | None:
    """Return the codes that each factor scales; None if each factor counts regardless of the codes."""
    if role == "absolute maxima":
        # They run over the rows.
        return Blocks.in_turn(weight.codes, stored.size(weight.codes), math.prod(stored.shape(name)), "")
    if role == "nested maxima":
        # Where all maxima are alike their own maximum is zero, and so are their codes.
        maxima = weight.companions["absolute maxima"]
        return Blocks.in_turn(maxima, stored.size(maxima), math.prod(stored.shape(name)), "maxima")
    if role != "scales" or weight.codes not in stored:
        return None
    shape, of = stored.shape(weight.codes), stored.shape(name) or (1,)
    if len(of) == 1 and len(shape) == 2 and of[0] in (1, shape[0]):
        # One for the whole, or for each row.
        of = (of[0], 1)
    is_stacked = len(shape) > 2 and len(of) == len(shape) and of[:-2] == shape[:-2]
    if (not is_stacked and (len(shape), len(of)) != (2, 2)) or not math.prod(shape):
        return None
    return Blocks.of_matrices(weight.codes, shape, stored.size(weight.codes), of, stored.dtype(weight.codes))


def _groups(weight: Weight, name: str, stored: StoredBytes) -> Iterator[Finding]:
    """Yield a finding for group indices that name no group, or one group too often."""
    import numpy as np

    scales = weight.companions.get("scales")
    if scales is None or stored.dtype(name) != "I32" or scales not in stored or len(stored.shape(scales)) < 2:
        return
    groups = stored.shape(scales)[0 if weight.form.suffix == ".qweight" else -1]
    memory_budget.ask(4 * groups, tensor=name)
    size = ceil_div(math.prod(stored.shape(name)), groups)
    counts, outside = np.zeros(groups, np.int32), 0
    for _, raw in stored.windows(name):
        indices = raw.view("<i4")
        if weight.form.suffix != ".qweight" and bool((indices == -1).any()):
            # compressed-tensors says so that they are in order.
            return
        inside = (indices >= 0) & (indices < groups)
        outside += indices.size - int(np.count_nonzero(inside))
        np.add.at(counts, indices[inside], 1)
    uneven = outside == 0 and bool((counts > size).any())
    if outside or uneven:
        got = f"{outside:,} of another" if outside else "groups of other sizes"
        yield Finding.of(
            codes.CONFIG_DISAGREES,
            f"the group indices of {weight.codes} do not match {groups} groups",
            tensor=name,
            expected=f"0 to {groups - 1}, each at most {size} times",
            got=got,
            help=_HELP,
        )
