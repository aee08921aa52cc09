"""bitsandbytes: nf4, fp4 and int8, whose true shape only a record beside the codes states. source: bitsandbytes 0.50 functional.py"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...common import json_text
from .forms import FLOATS, Companion, Form, Sizes, Weight, ceil_div, matrix
from .values import Asked, Coded, NoValuesError, Values, operand, scale, view

__all__ = ["LONGEST", "RECORD", "forms", "methods", "telling"]

methods = ("bitsandbytes",)
#: Configs whose forms names and dtypes alone tell, where no config says anything, by what people call them; `{}` is the kind.
telling: Mapping[str, dict[str, Any]] = {"{} of bitsandbytes": {}}
_F32, _U8 = frozenset(("F32",)), frozenset(("U8",))
#: What the name of a record ends with, before the kind of the codes: it alone says what they are.
RECORD = ".weight.quant_state.bitsandbytes__"
#: Bytes of a record at most.
LONGEST = 1 << 16
#: Dtypes of a record.
DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
#: Absolute maxima that are quantised themselves.
_NESTED = (".weight.absmax", _U8)


def forms(config: Mapping[str, Any]) -> list[Form]:
    """4 bit, with or without nested statistics, and 8 bit."""
    states = {f"{RECORD}{kind}": kind for kind in ("nf4", "fp4")}
    # Bytes that are viewed as floats (for FSDP) do not differ from plain weights in dtype.
    viewed = config.get("bnb_4bit_quant_storage") not in (None, "uint8")
    found = [
        Form(
            "4 bit", ".weight", _U8, _flat,
            (
                Companion("absolute maxima", (".weight.absmax",), _F32 | _U8, _maxima),
                Companion("table of values", (".weight.quant_map",), _F32, lambda s: [(16,)]),
                Companion("quant state", tuple(states), _U8, None, kinds=states),
                Companion("nested maxima", (".weight.nested_absmax",), _F32, None, where=_NESTED),
                Companion("nested table", (".weight.nested_quant_map",), _F32, lambda s: [(256,)], where=_NESTED),
            ),
            fits=lambda s, shape: ceil_div(math.prod(shape), 2) == s.rows,
            values=_values,
        ),
        Form(
            "int8", ".weight", frozenset(("I8",)), matrix,
            (
                Companion("scales", (".SCB",), FLOATS, lambda s: [(s.rows,)]),
                Companion("format", (".weight_format",), _U8, lambda s: [(), (1,)], required=False),
            ),
            values="int8 is kept as it is: its outliers are no part of it",
        ),
    ]  # fmt: skip
    return found[1:] if viewed else found


def _values(weight: Weight, asked: Asked) -> Values:
    """Entries of a table times the maximum of their block, which counts on over the rows. source: bitsandbytes 0.50 functional.py"""
    state = weight.companions["quant state"]
    if math.prod(weight.stored[state][1]) > LONGEST:
        raise NoValuesError(f"the quant state of {weight.codes} is no record")
    try:
        said = json_text.object_in(asked.read(state, None))
        shape, size, rounded = tuple(said["shape"]), said["blocksize"], DTYPES[said["dtype"]]
        nested, offset = said.get("nested_blocksize"), float(said.get("nested_offset") or 0)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise NoValuesError(f"the quant state of {weight.codes} is no record") from error
    if not all(type(n) is int and n >= 0 for n in (*shape, size)) or size == 0 or not math.isfinite(offset):
        raise NoValuesError(f"the quant state of {weight.codes} is no record")
    if ceil_div(math.prod(shape), 2) != math.prod(weight.stored[weight.codes][1]):
        raise NoValuesError(f"the quant state of {weight.codes} is that of another weight")
    size = min(size, max(1, math.prod(shape)))
    count = ceil_div(math.prod(shape), size)
    maxima, dtype, _ = weight.of("absolute maxima")
    of = view(maxima, [1, 1, count])
    if dtype == "U8":
        if type(nested) is not int or nested <= 0:
            raise NoValuesError(f"the quant state of {weight.codes} says nothing of nested maxima")
        nested = min(nested, max(1, count))
        inner_table, outer = weight.companions["nested table"], weight.companions["nested maxima"]
        factors = scale(view(outer, [1, 1, ceil_div(count, nested)]), [1, 1, nested])
        inner = Coded(of, {"table": view(inner_table, [1, 1, 256])}, flat=True, scales=[factors], term=offset)
        of = operand(maxima, [1, 1, count], inner)
    table = view(weight.companions["table of values"], [1, 1, 16])
    coded = Coded(
        view(weight.codes, [1, 1, math.prod(weight.stored[weight.codes][1])]), {"table": table},
        # The high half of a byte comes first.
        {"row": {"bits": 4, "lanes": [1, 0]}}, flat=True, scales=[scale(of, [1, 1, size])], rounded=rounded,
    )  # fmt: skip
    return Values(".weight", shape, coded)


def _maxima(sizes: Sizes) -> list[tuple[int, ...]]:
    """One for each block; its length is in the record, and a power of two."""
    return [(ceil_div(2 * sizes.rows, 1 << n),) for n in (6, 5, 7, 8, 9, 10, 11, 12)]


def _flat(shape: tuple[int, ...]) -> Sizes | None:
    """Bytes of a column; how many rows the weight has they do not say."""
    return Sizes((), shape[0], 1) if len(shape) == 2 and shape[1] == 1 else None
