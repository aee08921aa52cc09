"""The formats of ModelOpt (``hf_quant_config.json``).

source: ModelOpt 0.47 torch/quantization/qtensor, torch/export
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ...common.patterns import PatternBudget
from .forms import (
    E4M3,
    E8M0,
    F8,
    FLOATS,
    Companion,
    Form,
    Sizes,
    Weight,
    blocks,
    each_row,
    groups,
    matrix,
    one,
    pairs,
    spellings,
)
from .settings import Settings
from .values import (
    NIBBLES,
    Coded,
    NoValuesError,
    ValueAccess,
    Values,
    fitting,
    powers,
    scale,
    scale_of_all,
    view,
)

__all__ = ["forms", "methods", "telling"]

methods = ("modelopt",)
#: Configs whose forms can be recognised by names and dtypes alone, if no config states anything; by the name
#: for messages, in which `{}` is the kind.
telling: Mapping[str, dict[str, Any]] = {
    "{} of ModelOpt": {"quant_algo": "NVFP4"},
    "4 bit AWQ of ModelOpt": {"quant_algo": "W4A16_AWQ"},
}
_U8 = frozenset(("U8",))
_INPUT = Companion("input scale", (".input_scale",), FLOATS, one, required=False)
#: Companions that change the model's computation: factors of the layer's input, and a part of the weight that
#: is stored separately.
_BEFORE = (
    Companion("pre_quant_scale", (".pre_quant_scale",), FLOATS, lambda s: [(s.columns,)], required=False),
    Companion("svdquant_lora_a", (".svdquant_lora_a",), FLOATS, None, required=False),
    Companion("svdquant_lora_b", (".svdquant_lora_b",), FLOATS, None, required=False),
)


def forms(config: Mapping[str, Any], budget: PatternBudget) -> list[Form]:
    """List the forms of an algorithm; for mixed precision, those of each listed layer."""
    settings = Settings(config)
    layers = settings.below("quantized_layers")
    if layers is None or not layers.values:
        algorithm = _algorithm(settings)
        size = _group_size(algorithm, settings) or _in_groups(algorithm, settings)
        return _of(algorithm, size, lambda name: True)
    kinds: dict[tuple[str, int | None], set[str]] = {}
    for name in layers.values:
        if (one := layers.below(name)) is None:
            continue
        algorithm = _algorithm(one)
        size = _group_size(algorithm, one if "group_size" in one.values else settings)
        kinds.setdefault((algorithm, size or _in_groups(algorithm, settings)), set()).add(name)
    return [
        form for (algorithm, size), names in kinds.items() for form in _of(algorithm, size, _one_of(names))
    ]


def _one_of(names: set[str]) -> Callable[[str], bool]:
    return lambda name: not names.isdisjoint(spellings(name))


def _group_size(algorithm: str, settings: Settings) -> int | None:
    """Read the number of columns per group; None if it is not stated.

    For no groups, 0 or -1 may be stated.

    Raises:
        ImpossibleSettingError: for another size.
    """
    has_groups = algorithm.startswith("NVFP4") or algorithm == "W4A16_AWQ"
    return settings.integer("group_size", 1 if has_groups else -1)


def _in_groups(algorithm: str, settings: Settings) -> int | None:
    """Return the group size that the copy in config.json states."""
    groups_ = settings.below("config_groups")
    for group in groups_.each() if groups_ is not None else ():
        if (weights := group.below("weights")) is not None and "group_size" in weights.values:
            return _group_size(algorithm, weights)
    return None


def _algorithm(settings: Settings) -> str:
    """Read the name of an algorithm; empty if it is not stated.

    Raises:
        ImpossibleSettingError: if it is not text.
    """
    name = settings.values.get("quant_algo")
    if name is not None and not isinstance(name, str):
        raise settings.refuse("quant_algo", "the name of an algorithm")
    return (name or "").upper()


def _of(algorithm: str, size: int | None, takes: Callable[[str], bool]) -> list[Form]:
    def scaled(role: Callable[[Sizes], Any]) -> tuple[Companion, ...]:
        return (Companion("scales", (".weight_scale",), FLOATS, role), _INPUT, *_BEFORE)

    if algorithm == "FP8":
        return [Form("fp8", ".weight", F8, matrix, scaled(one), takes, values=functools.partial(_fp8, None))]
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return [
            Form(
                "fp8 by row",
                ".weight",
                F8,
                matrix,
                scaled(each_row),
                takes,
                values=functools.partial(_fp8, 0),
            )
        ]
    if algorithm in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
        return [
            Form(
                "fp8 blocks", ".weight", F8, matrix, scaled(_grid), takes, values=functools.partial(_fp8, 128)
            )
        ]
    if algorithm.startswith("NVFP4"):
        return [
            Form(
                "NVFP4",
                ".weight",
                _U8,
                pairs,
                (
                    Companion("scales", (".weight_scale",), E4M3, groups(size or 16)),
                    Companion("global scale", (".weight_scale_2",), FLOATS, one),
                    _INPUT,
                    *_BEFORE,
                ),
                takes,
                values=functools.partial(_nvfp4, size or 16),
            )
        ]
    if algorithm == "W4A16_AWQ":
        return [
            Form(
                "4 bit, AWQ",
                ".weight",
                _U8,
                _rows_in_pairs,
                (Companion("scales", (".weight_scale",), FLOATS, groups(size or 128)), *_BEFORE),
                takes,
                values=functools.partial(_awq, size or 128),
            )
        ]
    if algorithm.startswith("MXFP8"):
        return [
            Form(
                "MXFP8",
                ".weight",
                F8,
                matrix,
                (Companion("scales", (".weight_scale",), E8M0, groups(32)), *_BEFORE),
                takes,
                values=_mxfp8,
            )
        ]
    return []


def _fp8(block_size: int | None, weight: Weight, access: ValueAccess) -> Values:
    """Compute the product in the requested dtype, after rounding the scales to it.

    source: ModelOpt 0.47 export/quant_utils.py
    """
    sizes, (kind, _) = weight.sizes, weight.stored[weight.codes]
    name, _, shape = weight.of("scales")
    _refuse_before(weight)
    # One for all, for each row, or for each block.
    known = {None: (sizes.rows, sizes.columns), 0: (1, sizes.columns)}.get(block_size, (128, 128))
    block, grid = fitting(sizes, shape, [known])
    coded = Coded(
        view(weight.codes, sizes.matrices),
        {"float": kind},
        scales=[scale(view(name, grid), block, rounded=access.dtype)],
        rounded=access.dtype,
    )
    return Values(".weight", sizes.shape, coded)


def _nvfp4(size: int, weight: Weight, access: ValueAccess) -> Values:
    """Compute the product of the code and both scales in float32.

    source: ModelOpt 0.47 torch/quantization/qtensor/nvfp4_tensor.py
    """
    del access
    _refuse_before(weight)
    sizes = weight.sizes
    (name, _, shape), (outer, _, of_outer) = weight.of("scales"), weight.of("global scale")
    block, grid = fitting(sizes, shape, [(1, size)])
    lead, rows, columns = sizes.matrices
    coded = Coded(
        view(weight.codes, [lead, rows, columns // 2]),
        {"e2m1": {"negative_zero": False}},
        NIBBLES,
        scales=[scale(view(name, grid), block), scale_of_all(outer, of_outer, sizes)],
    )
    return Values(".weight", sizes.shape, coded)


def _awq(size: int, weight: Weight, access: ValueAccess) -> Values:
    """Decode bytes that contain integers of two rows. source: ModelOpt 0.47 torch/export/quant_utils.py"""
    _refuse_before(weight)
    sizes = weight.sizes
    name, _, shape = weight.of("scales")
    block, grid = fitting(sizes, shape, [(1, size)])
    lead, rows, columns = sizes.matrices
    coded = Coded(
        view(weight.codes, [lead, rows // 2, columns]),
        {"signed": 4},
        {"column": {"bits": 4}},
        scales=[scale(view(name, grid), block, rounded=access.dtype)],
        rounded=access.dtype,
    )
    return Values(".weight", sizes.shape, coded)


def _mxfp8(weight: Weight, access: ValueAccess) -> Values:
    del access
    _refuse_before(weight)
    sizes, (kind, _) = weight.sizes, weight.stored[weight.codes]
    coded = Coded(
        view(weight.codes, sizes.matrices),
        {"float": kind},
        scales=[powers(weight.companions["scales"], sizes)],
    )
    return Values(".weight", sizes.shape, coded)


def _refuse_before(weight: Weight) -> None:
    for companion in _BEFORE:
        if (name := weight.companions.get(companion.role)) is not None:
            raise NoValuesError(
                f"{name} is part of the layer: the weight's values alone are not those of the model"
            )


def _grid(sizes: Sizes) -> list[tuple[int, ...]]:
    ((*lead, rows, columns),) = blocks(128, 128)(sizes)
    return [(*lead, rows, columns), (*lead, rows, 1, columns, 1)]


def _rows_in_pairs(shape: tuple[int, ...]) -> Sizes | None:
    """Return the sizes of a weight whose bytes each store two rows of one column."""
    return Sizes(shape[:-2], 2 * shape[-2], shape[-1]) if len(shape) >= 2 else None
