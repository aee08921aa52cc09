"""bitsandbytes: nf4, fp4 and int8, whose true shape only a record beside the codes states. source: bitsandbytes 0.50 functional.py"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .forms import FLOATS, Companion, Form, Sizes, ceil_div, matrix

__all__ = ["forms", "methods", "telling"]

methods = ("bitsandbytes",)
#: Configs whose forms are told by names and dtypes alone, where a model has no config.
telling: tuple[dict[str, Any], ...] = ({},)
_F32, _U8 = frozenset(("F32",)), frozenset(("U8",))
#: Absolute maxima that are quantised themselves.
_NESTED = (".weight.absmax", _U8)


def forms(config: Mapping[str, Any]) -> list[Form]:
    """4 bit, with or without nested statistics, and 8 bit."""
    states = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
    # Bytes that are viewed as floats (for FSDP) do not differ from plain weights in dtype.
    viewed = config.get("bnb_4bit_quant_storage") not in (None, "uint8")
    found = [
        Form(
            "4 bit", ".weight", _U8, _flat,
            (
                Companion("absolute maxima", (".weight.absmax",), _F32 | _U8, _maxima),
                Companion("table of values", (".weight.quant_map",), _F32, lambda s: [(16,)]),
                Companion("quant state", states, _U8, None),
                Companion("nested maxima", (".weight.nested_absmax",), _F32, None, where=_NESTED),
                Companion("nested table", (".weight.nested_quant_map",), _F32, lambda s: [(256,)], where=_NESTED),
            ),
            fits=lambda s, shape: ceil_div(math.prod(shape), 2) == s.rows,
        ),
        Form(
            "int8", ".weight", frozenset(("I8",)), matrix,
            (
                Companion("scales", (".SCB",), FLOATS, lambda s: [(s.rows,)]),
                Companion("format", (".weight_format",), _U8, lambda s: [(), (1,)], required=False),
            ),
        ),
    ]  # fmt: skip
    return found[1:] if viewed else found


def _maxima(sizes: Sizes) -> list[tuple[int, ...]]:
    """One for each block; its length is in the record, and a power of two."""
    return [(ceil_div(2 * sizes.rows, 1 << n),) for n in (6, 5, 7, 8, 9, 10, 11, 12)]


def _flat(shape: tuple[int, ...]) -> Sizes | None:
    """Bytes of a column; how many rows the weight has they do not say."""
    return Sizes((), shape[0], 1) if len(shape) == 2 and shape[1] == 1 else None
