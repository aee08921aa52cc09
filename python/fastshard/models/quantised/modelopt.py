"""The formats of ModelOpt (``hf_quant_config.json``). source: ModelOpt 0.47 torch/quantization/qtensor, torch/export"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .forms import (
    E4M3,
    E8M0,
    F8,
    FLOATS,
    Companion,
    Form,
    Sizes,
    blocks,
    each_row,
    groups,
    matrix,
    one,
    pairs,
    spellings,
)

__all__ = ["forms", "methods", "telling"]

methods = ("modelopt",)
#: Configs whose forms are told by names and dtypes alone, where a model has no config.
telling: tuple[dict[str, Any], ...] = ({"quant_algo": "NVFP4"}, {"quant_algo": "W4A16_AWQ"})
_U8 = frozenset(("U8",))
_INPUT = Companion("input scale", (".input_scale",), FLOATS, one, required=False)
_BEFORE = Companion(
    "pre_quant_scale", (".pre_quant_scale",), FLOATS, lambda s: [(s.columns,)], required=False
)


def forms(config: Mapping[str, Any]) -> list[Form]:
    """The forms of an algorithm; of mixed precision those of each layer that is listed."""
    layers = config.get("quantized_layers")
    if isinstance(layers, Mapping) and layers:
        found = []
        listed = {name: one for name, one in layers.items() if isinstance(one, Mapping)}
        for algorithm in dict.fromkeys(map(_algorithm, listed.values())):
            names = {name for name, one in listed.items() if _algorithm(one) == algorithm}
            first = next(one for one in listed.values() if _algorithm(one) == algorithm)
            found += _of(algorithm, {**config, **first}, _one_of(names))
        return found
    return _of(_algorithm(config), config, lambda name: True)


def _one_of(names: set[str]) -> Callable[[str], bool]:
    return lambda name: not names.isdisjoint(spellings(name))


def _algorithm(stated: Mapping[str, Any]) -> str:
    return str(stated.get("quant_algo") or "").upper()


def _of(algorithm: str, config: Mapping[str, Any], takes: Callable[[str], bool]) -> list[Form]:
    size = config.get("group_size")
    size = size if isinstance(size, int) and size > 0 else None

    def scaled(role: Callable[[Sizes], Any]) -> tuple[Companion, ...]:
        return (Companion("scales", (".weight_scale",), FLOATS, role), _INPUT)

    if algorithm == "FP8":
        return [Form("fp8", ".weight", F8, matrix, scaled(one), takes)]
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return [Form("fp8 by row", ".weight", F8, matrix, scaled(each_row), takes)]
    if algorithm in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
        return [Form("fp8 blocks", ".weight", F8, matrix, scaled(_grid), takes)]
    if algorithm.startswith("NVFP4"):
        return [
            Form(
                "NVFP4", ".weight", _U8, pairs,
                (
                    Companion("scales", (".weight_scale",), E4M3, groups(size or 16)),
                    Companion("global scale", (".weight_scale_2",), FLOATS, one), _INPUT, _BEFORE,
                ),
                takes,
            )
        ]  # fmt: skip
    if algorithm == "W4A16_AWQ":
        return [
            Form(
                "4 bit, AWQ", ".weight", _U8, _rows_in_pairs,
                (Companion("scales", (".weight_scale",), FLOATS, groups(size or 128)), _BEFORE), takes,
            )
        ]  # fmt: skip
    if algorithm.startswith("MXFP8"):
        return [
            Form(
                "MXFP8",
                ".weight",
                F8,
                matrix,
                (Companion("scales", (".weight_scale",), E8M0, groups(32)),),
                takes,
            )
        ]
    return []


def _grid(sizes: Sizes) -> list[tuple[int, ...]]:
    ((*lead, rows, columns),) = blocks(128, 128)(sizes)
    return [(*lead, rows, columns), (*lead, rows, 1, columns, 1)]


def _rows_in_pairs(shape: tuple[int, ...]) -> Sizes | None:
    """A byte holds two rows of one column."""
    return Sizes(shape[:-2], 2 * shape[-2], shape[-1]) if len(shape) >= 2 else None
