"""GPTQ and AWQ: words of 32 bits that hold several codes.

source: AutoGPTQ qlinear_cuda_old.py; AutoAWQ modules/linear/gemm.py, utils/packing_utils.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .expressions import matches
from .forms import FLOATS, Companion, Form, Sizes, Weight, ceil_div
from .values import Asked, Coded, NoValuesError, Values, operand, scale, view

__all__ = ["forms", "methods", "telling"]

methods = ("gptq", "awq")
#: Configs whose forms names and dtypes alone tell, where no config says anything, by what people call them; `{}` is the kind.
telling: Mapping[str, dict[str, Any]] = {"GPTQ": {"quant_method": "gptq"}, "AWQ": {"quant_method": "awq"}}
#: Bytes of zero points that tell what all are.
_MANY = 1 << 16
_I32 = frozenset(("I32",))
#: Eight codes of a word: where that of each column lies. source: AutoAWQ utils/packing_utils.py AWQ_ORDER
_WORDS = {"row": {"bits": 4, "lanes": [0, 4, 1, 5, 2, 6, 3, 7]}}


def forms(config: Mapping[str, Any]) -> list[Form]:
    """The form of a config; none for layouts of other kernels (marlin) and for AWQ that is not GEMM."""
    bits = config.get("bits", config.get("w_bit", 4))
    size = config.get("group_size", config.get("q_group_size", 128))
    if not isinstance(bits, int) or not 1 <= bits <= 8 or not isinstance(size, int):
        return []
    if config.get("quant_method") == "awq":
        said = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
        return [_awq(size)] if bits == 4 and str(said).lower() == "gemm" else []
    kind = config.get("checkpoint_format") or config.get("format") or "gptq"
    if kind not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        return []
    return _by_rules(config, bits, size)


def _by_rules(config: Mapping[str, Any], bits: int, size: int) -> list[Form]:
    """The form of a model, and those of modules for which a rule of GPTQModel states another; the first rule that fits decides."""
    ordered = config.get("desc_act") is True
    stated = config.get("dynamic")
    rules = [(key, one) for key, one in stated.items()] if isinstance(stated, Mapping) else []

    @functools.cache
    def deciding(name: str) -> frozenset[int | None]:
        """The rules that may decide, None for no rule: one that cannot be told may mean it, and shapes tell then."""
        found: set[int | None] = set()
        for number, (key, _) in enumerate(rules):
            fits = matches(str(key).removeprefix("+:").removeprefix("-:"), name)
            if fits is not False:
                found.add(number)
            if fits:
                return frozenset(found)
        return frozenset((*found, None))

    # In the first version of the format zero points are stored one too low.
    low = 1 if (config.get("checkpoint_format") or config.get("format") or "gptq") == "gptq" else 0
    symmetric = config.get("sym") is True
    found = [_gptq(bits, size, ordered, lambda name: None in deciding(name), low, symmetric)]
    for number, (key, one) in enumerate(rules):
        if str(key).startswith("-:") or not isinstance(one, Mapping):
            continue
        other, length = one.get("bits", bits), one.get("group_size", size)
        if isinstance(other, int) and 1 <= other <= 8 and isinstance(length, int):
            takes = functools.partial(lambda n, name: n in deciding(name), number)
            found.append(
                _gptq(
                    other,
                    length,
                    one.get("desc_act", ordered) is True,
                    takes,
                    low,
                    one.get("sym", symmetric) is True,
                )
            )
    return found


def _groups(columns: int, size: int) -> int:
    return ceil_div(columns, size) if size > 0 else 1


def _gptq(
    bits: int, size: int, ordered: bool, takes: Callable[[str], bool], low: int, symmetric: bool
) -> Form:
    """Codes are packed along the input, so that a weight lies transposed; groups that are in order need no indices."""

    def sizes(shape: tuple[int, ...]) -> Sizes | None:
        if len(shape) != 2 or shape[0] * 32 % bits:
            return None
        return Sizes((), shape[1], shape[0] * 32 // bits)

    return Form(
        f"GPTQ, {bits} bit", ".qweight", _I32, sizes,
        (
            Companion("scales", (".scales",), FLOATS, lambda s: [(_groups(s.columns, size), s.rows)]),
            Companion("zero points", (".qzeros",), _I32, lambda s: [(_groups(s.columns, size), ceil_div(s.rows * bits, 32))]),
            Companion("group indices", (".g_idx",), _I32, lambda s: [(s.columns,)], by_all=not ordered),
        ),
        takes,
        values=functools.partial(
            _values, _Kind(bits, size, {"column": {"bits": bits}}, {"row": {"bits": bits}}, low, symmetric)
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class _Kind:
    """How codes lie, and what zero points are."""

    bits: int
    #: Rows of a group; below 1 for all of them.
    size: int
    packing: object
    #: The same of zero points.
    of_zeros: object
    #: How much too low zero points are stored.
    low: int = 0
    #: True where all zero points are to lie in the middle.
    symmetric: bool = False


def _values(kind: _Kind, weight: Weight, asked: Asked) -> Values:
    """``scale * (code - zero point)`` as the scales are rounded; codes lie as ``[in, out]``.

    source: AutoGPTQ qlinear_cuda_old.py; GPTQModel utils/model.py; AutoAWQ utils/packing_utils.py
    """
    sizes = weight.sizes
    name, dtype, _ = weight.of("scales")
    block = [1, min(kind.size, max(1, sizes.columns)) if kind.size > 0 else max(1, sizes.columns), 1]
    grid = [1, _groups(sizes.columns, kind.size), sizes.rows]
    zeros_name, _, zeros_shape = weight.of("zero points")
    points = (
        _notes_of(kind, asked, sizes.rows, zeros_name) if asked.looks and (kind.symmetric or kind.low) else ()
    )
    zeros = Coded(view(zeros_name, [1, *zeros_shape]), {"less": 0}, kind.of_zeros, term=float(kind.low))
    indices = weight.companions.get("group indices")
    coded = Coded(
        view(weight.codes, [1, *weight.stored[weight.codes][1]]), {"less": 0}, kind.packing, turned=True,
        zero={"of": operand(zeros_name, grid, zeros), "block": block}, scales=[scale(view(name, grid), block)],
        groups=None if indices is None else {"of": view(indices, [1, 1, sizes.columns]), "rows": True}, rounded=dtype,
    )  # fmt: skip
    return Values(".weight", sizes.shape, coded, points)


def _notes_of(kind: _Kind, asked: Asked, rows: int, name: str) -> tuple[str, ...]:
    """What the first version of GPTQ leaves open: of the highest zero point, one more is read as 2^bits by some and as 0 by others.

    Raises:
        NoValuesError: where all zero points are those of the other version.
    """
    import numpy as np

    bits = kind.bits
    wide = ceil_div(rows * bits, 32) * 4
    # Where all are alike the first tell.
    raw = asked.read(name, max(1, _MANY // max(1, wide)) * wide if kind.symmetric else None)
    if not raw:
        return ()
    each = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little").reshape(-1, wide * 8)
    codes = each[:, : rows * bits].reshape(each.shape[0], rows, bits) @ (1 << np.arange(bits))
    said, other = ("gptq", "gptq_v2") if kind.low else ("gptq_v2", "gptq")
    if kind.symmetric and codes.size and bool((codes == (1 << (bits - 1)) - 1 + kind.low).all()):
        raise NoValuesError(f"the config says {said}, and the zero points of {name} are those of {other}")
    if kind.low and (count := int((codes == (1 << bits) - 1).sum())):
        most = (1 << bits) - 1
        return (
            f"{count:,} zero points of {name} are {most}: they are read as {most + 1} here, and as 0 by some versions of AutoGPTQ",
        )
    return ()


def _awq(size: int) -> Form:
    """Codes are packed along the output."""

    def sizes(shape: tuple[int, ...]) -> Sizes | None:
        return Sizes((), 8 * shape[1], shape[0]) if len(shape) == 2 else None

    return Form(
        "AWQ", ".qweight", _I32, sizes,
        (
            Companion("scales", (".scales",), FLOATS, lambda s: [(_groups(s.columns, size), s.rows)]),
            Companion("zero points", (".qzeros",), _I32, lambda s: [(_groups(s.columns, size), s.rows // 8)]),
        ),
        values=functools.partial(_values, _Kind(4, size, _WORDS, _WORDS)),
    )  # fmt: skip
