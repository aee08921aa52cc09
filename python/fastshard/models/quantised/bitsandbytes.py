"""bitsandbytes: nf4, fp4 and int8. Only a record next to the codes states a weight's true shape.

source: bitsandbytes 0.50 functional.py
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from ...common import codes, json_text
from ...common.patterns import PatternBudget
from ...common.records import dataclass
from .forms import FLOATS, Companion, Form, Sizes, Weight, ceil_div, matrix
from .settings import ImpossibleSettingError, Settings
from .values import Coded, DamagedError, NoValuesError, ValueAccess, Values, operand, scale, view

__all__ = ["RECORD", "forms", "methods", "telling"]

methods = ("bitsandbytes",)
#: Configs whose forms can be recognised by names and dtypes alone, if no config states anything; by the name
#: for messages, in which `{}` is the kind.
telling: Mapping[str, dict[str, Any]] = {"{} of bitsandbytes": {}}
_F32, _U8 = frozenset(("F32",)), frozenset(("U8",))
#: Suffix of a record's name, before the kind of the codes. Only the record describes the codes.
RECORD = ".weight.quant_state.bitsandbytes__"
#: Maximum size of a record in bytes.
LONGEST = 1 << 16
#: Storage dtypes of codes. source: transformers 5.24 BitsAndBytesConfig
_STORAGES = ("uint8", "int8", "float16", "bfloat16", "float32", "float64")
#: Dtypes in a record.
DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
#: Largest layout number of int8: 0 means rows, the other three are tiled.
_LAYOUTS = 3
#: Absolute maxima that are themselves quantised.
_NESTED = (".weight.absmax", _U8)


def forms(config: Mapping[str, Any], budget: PatternBudget) -> list[Form]:
    """List the forms: 4-bit, with or without nested statistics, and 8-bit."""
    kinds = ("nf4", "fp4")
    states = {f"{RECORD}{kind}": kind for kind in kinds}
    settings = Settings(config)
    settings.word("bnb_4bit_quant_type", kinds)
    if settings.flag("load_in_4bit", default=False) and settings.flag("load_in_8bit", default=False):
        raise settings.refuse("load_in_8bit", "false together with load_in_4bit")
    # Bytes that are viewed as floats (for FSDP) do not differ from plain weights in dtype.
    viewed = settings.word("bnb_4bit_quant_storage", _STORAGES, default="uint8") != "uint8"
    found = [
        Form(
            "4 bit",
            ".weight",
            _U8,
            _flat,
            (
                Companion("absolute maxima", (".weight.absmax",), _F32 | _U8, _maxima),
                Companion("table of values", (".weight.quant_map",), _F32, lambda s: [(16,)]),
                Companion("quant state", tuple(states), _U8, None, kinds=states),
                Companion("nested maxima", (".weight.nested_absmax",), _F32, None, where=_NESTED),
                Companion(
                    "nested table", (".weight.nested_quant_map",), _F32, lambda s: [(256,)], where=_NESTED
                ),
            ),
            fits=lambda s, shape: ceil_div(math.prod(shape), 2) == s.rows,
            values=_values,
        ),
        Form(
            "int8",
            ".weight",
            frozenset(("I8",)),
            matrix,
            (
                Companion("scales", (".SCB",), FLOATS, lambda s: [(s.rows,)]),
                Companion("format", (".weight_format",), _U8, lambda s: [(), (1,)], required=False),
            ),
            values=_keep_int8,
        ),
    ]
    return found[1:] if viewed else found


@dataclass(frozen=True)
class Nested:
    """The storage of absolute maxima that are themselves quantised."""

    blocksize: int
    offset: float
    #: True if the reference computes with them in float32, as every quantiser does.
    is_float32: bool


@dataclass(frozen=True)
class QuantState:
    """The description of a weight's codes in its record."""

    shape: tuple[int, ...]
    blocksize: int
    #: The dtype to which values are rounded.
    rounded: str
    #: The storage of nested maxima; None if maxima are not quantised.
    nested: Nested | None


def read_state(weight: Weight, access: ValueAccess) -> QuantState:
    """Read the record of a weight, for checking it and for decoding its codes.

    source: bitsandbytes 0.50 functional.py QuantState.from_dict

    Raises:
        DamagedError: for a record that does not define the codes' values, and for one of another weight.
    """
    name = weight.companions["quant state"]
    try:
        record = Settings(_read_record(weight, access))
        kind = name.rpartition("__")[2]
        if record.word("quant_type", (kind,)) is None:
            raise record.refuse("quant_type", kind)
        rounded = record.word("dtype", tuple(DTYPES))
        if rounded is None:
            raise record.refuse("dtype", " or ".join(DTYPES))
        state = QuantState(
            record.shape("shape"),
            record.required("blocksize"),
            DTYPES[rounded],
            _read_nested(record) if weight.of("absolute maxima")[1] == "U8" else None,
        )
    except ImpossibleSettingError as error:
        raise DamagedError(
            f"the quant state of {weight.codes} is invalid: {error.key} is {error.got}",
            tensor=name,
            expected=f"{error.key}: {error.expected}",
            got=error.got,
        ) from error
    size_of_codes = math.prod(weight.stored[weight.codes][1])
    if ceil_div(math.prod(state.shape), 2) != size_of_codes:
        raise DamagedError(
            f"the quant state of {weight.codes} is from another weight",
            tensor=name,
            expected=f"{2 * size_of_codes:,} elements",
            got=str(list(state.shape)),
        )
    return state


def _read_record(weight: Weight, access: ValueAccess) -> dict[str, Any]:
    """Parse the record of a weight into an object.

    Raises:
        DamagedError: for bytes that are not such a record.
    """
    name, dtype, shape = weight.of("quant state")
    size, content, reason = math.prod(shape), None, ""
    try:
        content = json_text.load(access.read(name, 0, size)) if dtype == "U8" and size <= LONGEST else None
    except ValueError as error:
        reason = f": {error}"
    if not isinstance(content, dict) or not content:
        raise DamagedError(
            f"the quant state of {weight.codes} is not a record{reason}",
            tensor=name,
            expected="a JSON object",
            got="other data",
        )
    return content


def _read_nested(record: Settings) -> Nested:
    """Read how maxima are stored.

    Raises:
        ImpossibleSettingError: if their values are not defined.
    """
    dtype = record.word("nested_dtype", tuple(DTYPES))
    if dtype is None:
        raise record.refuse("nested_dtype", " or ".join(DTYPES))
    blocksize, offset = record.required("nested_blocksize"), record.number("nested_offset")
    return Nested(blocksize, offset, dtype == "float32")


def _check_maxima(weight: Weight, state: QuantState) -> None:
    """Compare the maxima with the number of blocks in a record.

    Raises:
        DamagedError: if their number differs from the number of blocks, and for nested maxima that are not
            quantised.
    """
    count = ceil_div(math.prod(state.shape), state.blocksize)
    numbers = {"absolute maxima": count}
    if state.nested is not None:
        numbers["nested maxima"] = ceil_div(count, state.nested.blocksize)
    elif "nested maxima" in weight.companions:
        name, dtype, _ = weight.of("absolute maxima")
        raise DamagedError(
            f"the absolute maxima of {weight.codes} are not quantised, but nested maxima are stored with "
            "them",
            tensor=name,
            expected="U8",
            got=dtype,
            code=codes.DTYPE,
        )
    for role, number in numbers.items():
        name, _, shape = weight.of(role)
        if math.prod(shape) != number:
            raise DamagedError(
                f"the {role} of {weight.codes} do not match its blocks",
                tensor=name,
                expected=str([number]),
                got=str(list(shape)),
                code=codes.SHAPE,
            )


def _check_table(weight: Weight, role: str, access: ValueAccess) -> None:
    """Refuse a table that gives all codes the same value.

    Raises:
        DamagedError: for such a table.
    """
    name, _, shape = weight.of(role)
    size = 4 * math.prod(shape)
    content = access.read(name, 0, size)
    if content == content[:4] * math.prod(shape):
        raise DamagedError(
            f"the {role} of {weight.codes} holds only one number, so all codes have the same value",
            tensor=name,
            expected="different numbers",
            got=f"{math.prod(shape)} times {struct.unpack('<f', content[:4])[0]:g}",
        )


def _values(weight: Weight, access: ValueAccess) -> Values:
    """Multiply table entries by the maximum of their block; blocks continue across rows.

    source: bitsandbytes 0.50 functional.py
    """
    state = read_state(weight, access)
    _check_maxima(weight, state)
    if access.looks:
        for role in ("table of values", "nested table") if state.nested else ("table of values",):
            _check_table(weight, role, access)
    size = min(state.blocksize, max(1, math.prod(state.shape)))
    count = ceil_div(math.prod(state.shape), size)
    maxima = weight.companions["absolute maxima"]
    of = view(maxima, [1, 1, count])
    if state.nested is not None:
        if not state.nested.is_float32:
            raise NoValuesError(f"the nested maxima of {weight.codes} are not stored in float32")
        nested = min(state.nested.blocksize, max(1, count))
        inner_table, outer = weight.companions["nested table"], weight.companions["nested maxima"]
        factors = scale(view(outer, [1, 1, ceil_div(count, nested)]), [1, 1, nested])
        inner = Coded(
            of,
            {"table": view(inner_table, [1, 1, 256])},
            flat=True,
            scales=[factors],
            term=state.nested.offset,
        )
        of = operand(maxima, [1, 1, count], inner)
    table = view(weight.companions["table of values"], [1, 1, 16])
    coded = Coded(
        view(weight.codes, [1, 1, math.prod(weight.stored[weight.codes][1])]),
        {"table": table},
        # The high half of a byte comes first.
        {"row": {"bits": 4, "lanes": [1, 0]}},
        flat=True,
        scales=[scale(of, [1, 1, size])],
        rounded=state.rounded,
    )
    return Values(".weight", state.shape, coded)


def _keep_int8(weight: Weight, access: ValueAccess) -> Values:
    """Refuse to compute int8 values, because a separate byte states their layout.

    source: bitsandbytes 0.50 nn/modules.py

    Raises:
        NoValuesError: always, or DamagedError for a layout that no version has.
    """
    name = weight.companions.get("format")
    layout = access.read(name, 0, 1)[0] if name is not None and access.looks else 0
    if name is not None and layout > _LAYOUTS:
        raise DamagedError(
            f"bitsandbytes does not know the format of {weight.codes}, so nothing can load it",
            tensor=name,
            expected=f"0 (rows) to {_LAYOUTS}",
            got=str(layout),
        )
    raise NoValuesError("fastshard does not dequantise int8: its outliers are not stored")


def _maxima(sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the shapes for one maximum per block; the record states the block's length, a power of two."""
    return [(ceil_div(2 * sizes.rows, 1 << n),) for n in (6, 5, 7, 8, 9, 10, 11, 12)]


def _flat(shape: tuple[int, ...]) -> Sizes | None:
    """Return the sizes of a column of bytes, which does not show the weight's number of rows."""
    return Sizes((), shape[0], 1) if len(shape) == 2 and shape[1] == 1 else None
