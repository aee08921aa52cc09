"""The formats of compressed-tensors. source: compressed-tensors 0.20 compressors/ and quantization/"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .forms import (
    E8M0,
    F8,
    FLOATS,
    Companion,
    Form,
    Sizes,
    blocks,
    ceil_div,
    each_row,
    groups,
    matrix,
    one,
    pairs,
)

__all__ = ["forms", "methods", "telling"]

methods = ("compressed-tensors",)
#: Configs whose forms are told by names and dtypes alone, where a model has no config.
telling: tuple[dict[str, Any], ...] = tuple(
    {"format": name, "config_groups": {"": {"weights": {"num_bits": 4, "strategy": "channel", "type": kind}}}}
    for name, kind in (
        ("pack-quantized", "int"),
        ("nvfp4-pack-quantized", "float"),
        ("mxfp4-pack-quantized", "float"),
        ("int-quantized", "int"),
    )
)
_I32, _U8 = frozenset(("I32",)), frozenset(("U8",))
_PACKED_FP4, _MX = "nvfp4-pack-quantized", ("mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")


def forms(config: Mapping[str, Any]) -> list[Form]:
    """The forms of the groups of a config, each for the modules that it targets."""
    whole = config.get("format")
    stated = config.get("config_groups")
    found: list[Form] = []
    for group in stated.values() if isinstance(stated, Mapping) else ():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            continue
        name = whole if whole not in (None, "mixed-precision") else group.get("format")
        if isinstance(name, str):
            takes = _targeted(group.get("targets"))
            found += _of(name, group, takes)
    return found


def _targeted(targets: object) -> Callable[[str], bool]:
    """Which modules a group is for; a class takes all of them, since names do not tell classes."""
    entries = [one for one in targets if isinstance(one, str)] if isinstance(targets, list) else []

    def takes(name: str) -> bool:
        for entry in entries:
            if entry.startswith("re:"):
                try:
                    if re.match(entry[3:], name):
                        return True
                except re.error:
                    return True
            elif "." not in entry or entry == name:
                return True
        return not entries

    return takes


def _of(name: str, group: Mapping[str, Any], takes: Callable[[str], bool]) -> list[Form]:
    weights, inputs = group["weights"], group.get("input_activations")
    # Where inputs are scaled by a number that was measured, no loader has another.
    dynamic = inputs.get("dynamic") if isinstance(inputs, Mapping) else True
    bits, symmetric = weights.get("num_bits"), weights.get("symmetric") is not False
    scales = _scales(weights)
    if name == "pack-quantized":
        if not isinstance(bits, int) or not 1 <= bits <= 8:
            return []
        return [_packed(bits, symmetric, weights, takes)]
    if name == _PACKED_FP4:
        return [
            Form(
                "NVFP4", ".weight_packed", _U8, pairs,
                (
                    Companion("scales", (".weight_scale",), F8, groups(16)),
                    Companion("global scale", (".weight_global_scale",), FLOATS, one),
                    Companion("input scale", (".input_global_scale",), FLOATS, one, dynamic is not True),
                ),
                takes,
            )
        ]  # fmt: skip
    if name in _MX:
        return [_mx(name, takes)]
    if name in ("float-quantized", "int-quantized", "naive-quantized"):
        kinds = F8 if weights.get("type") == "float" else frozenset(("I8",))
        measured = Companion("input scale", (".input_scale",), FLOATS, one, dynamic is False)
        zero = Companion("zero points", (".weight_zero_point",), frozenset(("I8", *F8)), scales)
        return [
            Form(
                name, ".weight", kinds, matrix,
                (Companion("scales", (".weight_scale",), FLOATS, scales), *(() if symmetric else (zero,)), measured), takes,
            )
        ]  # fmt: skip
    return []


def _scales(weights: Mapping[str, Any]) -> Callable[[Sizes], Any] | None:
    """The shapes that scales may have by a group's strategy; None where nothing says."""
    strategy, size, block = weights.get("strategy"), weights.get("group_size"), weights.get("block_structure")
    if strategy == "tensor":
        return one
    if strategy == "channel":
        return each_row
    if strategy in ("group", "tensor_group") and isinstance(size, int) and size > 0:
        return groups(size)
    if isinstance(block, str):
        parts = block.split("x")
        block = [int(part) for part in parts] if all(part.isdecimal() for part in parts) else None
    if (
        strategy == "block"
        and isinstance(block, list)
        and len(block) == 2
        and all(isinstance(n, int) for n in block)
    ):
        return blocks(*block)
    return None


def _mx(name: str, takes: Callable[[str], bool]) -> Form:
    scales = Companion("scales", (".weight_scale",), E8M0, groups(32))
    if name == "mxfp8-quantized":
        return Form("MXFP8", ".weight", F8, matrix, (scales,), takes)
    if name == "mxfp6-pack-quantized":
        return Form("MXFP6", ".weight_packed", _U8, _sixths, (scales,), takes)
    return Form("MXFP4", ".weight_packed", _U8, pairs, (scales,), takes)


def _sixths(shape: tuple[int, ...]) -> Sizes | None:
    """Four codes in three bytes."""
    return (
        Sizes(shape[:-2], shape[-2], shape[-1] // 3 * 4) if len(shape) >= 2 and shape[-1] % 3 == 0 else None
    )


def _packed(bits: int, symmetric: bool, weights: Mapping[str, Any], takes: Callable[[str], bool]) -> Form:
    size = weights.get("group_size") if weights.get("strategy") == "group" else None

    def most(shape: tuple[int, ...]) -> Sizes | None:
        # The last word of a row may be filled in part, which the shape does not say.
        return Sizes(shape[:-2], shape[-2], shape[-1] * 32 // bits) if len(shape) >= 2 else None

    def columns(sizes: Sizes) -> range:
        return range(
            sizes.columns - 32 // bits - 1 if 32 % bits else sizes.columns - 32 // bits + 1, sizes.columns + 1
        )

    def fits(sizes: Sizes, shape: tuple[int, ...]) -> bool:
        # Words that are not full have room for more columns than there are.
        return shape[:-1] == sizes.shape[:-1] and ceil_div(shape[-1] * bits, 32) * 32 // bits == sizes.columns

    def scales(sizes: Sizes) -> list[tuple[int, ...]]:
        if isinstance(size, int) and size > 0:
            fitting = {ceil_div(n, size) for n in columns(sizes) if n > 0}
            return [(*sizes.lead, sizes.rows, n) for n in sorted(fitting, reverse=True)]
        return [*each_row(sizes), *one(sizes)]

    def zeros(sizes: Sizes) -> list[tuple[int, ...]]:
        return [(*s[:-2], ceil_div(s[-2] * bits, 32), s[-1]) for s in scales(sizes) if len(s) >= 2]

    return Form(
        f"{bits} bit, packed", ".weight_packed", _I32, most,
        (
            Companion("scales", (".weight_scale",), FLOATS, scales),
            Companion("shape", (".weight_shape",), frozenset(("I64", "I32")), lambda s: [(2 + len(s.lead),)]),
            *(() if symmetric else (Companion("zero points", (".weight_zero_point",), _I32, zeros),)),
            Companion("group indices", (".weight_g_idx",), _I32, None, required=weights.get("actorder") == "group"),
        ),
        takes,
        fits,
    )  # fmt: skip
