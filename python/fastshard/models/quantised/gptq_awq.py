"""GPTQ and AWQ: 32-bit words that contain several codes.

source: AutoGPTQ qlinear_cuda_old.py; AutoAWQ modules/linear/gemm.py, utils/packing_utils.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...common.patterns import PatternBudget, PatternList
from ...common.records import dataclass
from .forms import FLOATS, Companion, Form, Sizes, Weight, ceil_div
from .settings import Settings
from .values import Coded, NoValuesError, ValueAccess, Values, operand, scale, view

if TYPE_CHECKING:
    import numpy as np

__all__ = ["forms", "methods", "telling"]

methods = ("gptq", "awq")
#: Configs whose forms can be recognised by names and dtypes alone, if no config states anything; by the name
#: for messages, in which `{}` is the kind.
telling: Mapping[str, dict[str, Any]] = {
    "GPTQ": {"quant_method": "gptq", "bits": 4},
    "AWQ": {"quant_method": "awq"},
}
#: Minimum and maximum bits of a code. source: GPTQModel quantization/config.py
_BITS = (2, 8)
#: Number of bytes of zero points that represents all of them.
_MANY = 1 << 16
_I32 = frozenset(("I32",))
#: Positions of the eight columns' codes in a word. source: AutoAWQ utils/packing_utils.py AWQ_ORDER
_WORDS = {"row": {"bits": 4, "lanes": [0, 4, 1, 5, 2, 6, 3, 7]}}


def forms(config: Mapping[str, Any], budget: PatternBudget) -> list[Form]:
    """List the forms of a config; none for layouts of other kernels (marlin) and for AWQ other than GEMM."""
    settings = Settings(config)
    is_awq = config.get("quant_method") == "awq"
    # AWQ has one form that is known; nothing says how many bits codes of GPTQ have by default.
    bits = _read_bits(settings, 4 if is_awq else None, "w_bit" if is_awq else "bits")
    size = settings.group_size("group_size" if "group_size" in config else "q_group_size", 128)
    if is_awq:
        version = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
        return [_awq(size)] if bits == 4 and str(version).lower() == "gemm" else []
    kind = config.get("checkpoint_format") or config.get("format") or "gptq"
    if kind not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        return []
    return _by_rules(settings, bits, size, budget)


def _read_bits(settings: Settings, default: int | None, other: str = "bits") -> int:
    """Read the bits of a code; AWQ's own file uses another key.

    Raises:
        ImpossibleSettingError: for an impossible number of bits, and if it is neither stated nor has a
            default.
    """
    key = "bits" if "bits" in settings.values else other
    bits = default if key not in settings.values else settings.integer(key, *_BITS)
    if bits is None:
        raise settings.refuse(key, f"an integer from {_BITS[0]} to {_BITS[1]}")
    return bits


def _by_rules(settings: Settings, bits: int, size: int, budget: PatternBudget) -> list[Form]:
    """List the form of a model, and the forms of modules for which a GPTQModel rule states another one.

    The first matching rule applies.
    """
    config = settings.values
    ordered, symmetric = settings.flag("desc_act", default=False), settings.flag("sym", default=False)
    overrides = settings.below("dynamic")
    rules = [] if overrides is None else list(overrides.values.items())

    patterns = PatternList(
        (str(key).removeprefix("+:").removeprefix("-:") for key, _ in rules), "start", budget
    )
    deciding = functools.cache(patterns.first)
    # In the first version of the format zero points are stored one too low.
    low = 1 if (config.get("checkpoint_format") or config.get("format") or "gptq") == "gptq" else 0
    usual = bits, size, ordered, symmetric
    #: Rules by form, since there may be very many rules; None stands for modules without a rule.
    numbers: dict[tuple[int, int, bool, bool], set[int | None]] = {usual: {None}}
    for number, (key, _) in enumerate(rules):
        rule = None if overrides is None or str(key).startswith("-:") else overrides.below(key)
        if rule is None:
            continue
        form = (
            _read_bits(rule, bits),
            rule.group_size("group_size", size),
            rule.flag("desc_act", default=ordered),
            rule.flag("sym", default=symmetric),
        )
        numbers.setdefault(form, set()).add(number)
    return [
        _gptq(*form[:3], functools.partial(_is_among, deciding, of_form), low, form[3])
        for form, of_form in numbers.items()
    ]


def _is_among(deciding: Callable[[str], int | None], numbers: Collection[int | None], name: str) -> bool:
    return deciding(name) in numbers


def _groups(columns: int, size: int) -> int:
    return ceil_div(columns, size) if size > 0 else 1


def _gptq(
    bits: int, size: int, ordered: bool, takes: Callable[[str], bool], low: int, symmetric: bool
) -> Form:
    """Build the form of GPTQ. Codes are packed along the input, so a weight is stored transposed.

    Groups in order need no indices.
    """

    def sizes(shape: tuple[int, ...]) -> Sizes | None:
        if len(shape) != 2 or shape[0] * 32 % bits:
            return None
        return Sizes((), shape[1], shape[0] * 32 // bits)

    return Form(
        f"GPTQ, {bits} bit",
        ".qweight",
        _I32,
        sizes,
        (
            Companion("scales", (".scales",), FLOATS, lambda s: [(_groups(s.columns, size), s.rows)]),
            Companion(
                "zero points",
                (".qzeros",),
                _I32,
                lambda s: [(_groups(s.columns, size), ceil_div(s.rows * bits, 32))],
            ),
            Companion("group indices", (".g_idx",), _I32, lambda s: [(s.columns,)], by_all=not ordered),
        ),
        takes,
        values=functools.partial(
            _values, _Kind(bits, size, {"column": {"bits": bits}}, {"row": {"bits": bits}}, low, symmetric)
        ),
    )


@dataclass(frozen=True)
class _Kind:
    """The packing of codes, and the meaning of zero points."""

    bits: int
    #: Rows of a group; all rows if below 1.
    size: int
    packing: object
    #: The packing of zero points.
    of_zeros: object
    #: The offset by which stored zero points are too low.
    low: int = 0
    #: True if all zero points must be in the middle.
    symmetric: bool = False


def _values(kind: _Kind, weight: Weight, access: ValueAccess) -> Values:
    """Compute ``scale * (code - zero point)``, rounded like the scales; codes are stored as ``[in, out]``.

    source: AutoGPTQ qlinear_cuda_old.py; GPTQModel utils/model.py; AutoAWQ utils/packing_utils.py
    """
    sizes = weight.sizes
    name, dtype, _ = weight.of("scales")
    block = [1, min(kind.size, max(1, sizes.columns)) if kind.size > 0 else max(1, sizes.columns), 1]
    grid = [1, _groups(sizes.columns, kind.size), sizes.rows]
    zeros_name, _, zeros_shape = weight.of("zero points")
    compares = access.compares_readers and (kind.symmetric or kind.low)
    points = _notes_of(kind, access, sizes.rows, zeros_name, zeros_shape[0]) if compares else ()
    zeros = Coded(view(zeros_name, [1, *zeros_shape]), {"less": 0}, kind.of_zeros, term=float(kind.low))
    indices = weight.companions.get("group indices")
    coded = Coded(
        view(weight.codes, [1, *weight.stored[weight.codes][1]]),
        {"less": 0},
        kind.packing,
        turned=True,
        zero={"of": operand(zeros_name, grid, zeros), "block": block},
        scales=[scale(view(name, grid), block)],
        groups=None if indices is None else {"of": view(indices, [1, 1, sizes.columns]), "rows": True},
        rounded=dtype,
    )
    return Values(".weight", sizes.shape, coded, points)


def _notes_of(kind: _Kind, access: ValueAccess, rows: int, name: str, count: int) -> tuple[str, ...]:
    """Note ambiguities in the first version of GPTQ.

    Some readers treat one above the highest zero point as 2^bits, others as 0.

    Raises:
        NoValuesError: if all zero points match the other version.
    """
    most, middle, highest = (1 << kind.bits) - 1, (1 << (kind.bits - 1)) - 1 + kind.low, 0
    declared, other = ("gptq", "gptq_v2") if kind.low else ("gptq_v2", "gptq")
    for codes in _read_zero_points(kind.bits, access, rows, name, count):
        if kind.symmetric and bool((codes == middle).all()):
            raise NoValuesError(
                f"the config states {declared}, but the zero points of {name} are those of {other}"
            )
        highest += int((codes == most).sum()) if kind.low else 0
        if kind.symmetric:
            # Where all are alike the first tell.
            break
    if highest:
        return (
            f"{highest:,} zero points of {name} are {most}: fastshard reads them as {most + 1}, some "
            "versions of AutoGPTQ as 0",
        )
    return ()


def _read_zero_points(
    bits: int, access: ValueAccess, rows: int, name: str, count: int
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the codes of zero points, for several groups or for part of a group at a time, within a limit in
    bytes.
    """
    import numpy as np

    wide = ceil_div(rows * bits, 32) * 4
    # As many bytes hold 32 codes.
    step, together = _MANY // (4 * bits) * 4 * bits, max(1, _MANY // max(1, wide))
    for group in range(0, count if wide else 0, together):
        groups = min(together, count - group)
        for at in range(0, wide, max(step, wide if groups > 1 else 0)):
            length = wide * groups if groups > 1 else min(step, wide - at)
            raw = np.frombuffer(access.read(name, group * wide + at, length), np.uint8)
            each = np.unpackbits(raw, bitorder="little").reshape(groups, -1)
            codes = min(length // groups * 8 // bits, rows - at * 8 // bits)
            yield each[:, : codes * bits].reshape(-1, bits) @ (1 << np.arange(bits))


def _awq(size: int) -> Form:
    """Build the form of AWQ, whose codes are packed along the output."""

    def sizes(shape: tuple[int, ...]) -> Sizes | None:
        return Sizes((), 8 * shape[1], shape[0]) if len(shape) == 2 else None

    return Form(
        "AWQ",
        ".qweight",
        _I32,
        sizes,
        (
            Companion("scales", (".scales",), FLOATS, lambda s: [(_groups(s.columns, size), s.rows)]),
            Companion("zero points", (".qzeros",), _I32, lambda s: [(_groups(s.columns, size), s.rows // 8)]),
        ),
        values=functools.partial(_values, _Kind(4, size, _WORDS, _WORDS)),
    )
