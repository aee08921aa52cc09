"""The formats of compressed-tensors. source: compressed-tensors 0.20 compressors/ and quantization/"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..tensor_words import WORDS
from .expressions import matches
from .forms import (
    E4M3,
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
    spellings,
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
    stated, sparse = config.get("config_groups"), config.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format") not in (None, "dense"):
        # The codes are those that are not zero, under other names.
        return []
    groups_ = (
        [one for one in stated.values() if isinstance(one, Mapping)] if isinstance(stated, Mapping) else []
    )
    targets = [_Targets(group.get("targets")) for group in groups_]

    @functools.cache
    def closest(name: str) -> frozenset[int]:
        """The groups whose targets name a module most closely."""
        ranks = [one.rank(name) for one in targets]
        return frozenset(n for n, rank in enumerate(ranks) if rank and rank == max(ranks))

    found: list[Form] = []
    for number, group in enumerate(groups_):
        name = whole if whole not in (None, "mixed-precision") else group.get("format")
        if isinstance(name, str) and isinstance(group.get("weights"), Mapping):
            found += _of(name, group, functools.partial(_is_among, closest, number))
    return found


def _is_among(closest: Callable[[str], frozenset[int]], number: int, name: str) -> bool:
    return number in closest(name)


class _Targets:
    """The modules that a group is for: names, expressions, classes. source: compressed-tensors 0.20 utils/match.py match_targets"""

    def __init__(self, targets: object) -> None:
        entries = [one for one in targets if isinstance(one, str)] if isinstance(targets, list) else []
        self._expressions = [entry[3:] for entry in entries if entry.startswith("re:")]
        self._classes = {entry for entry in entries if entry[:1].isupper() and "." not in entry}
        self._names = set(entries) - self._classes
        self._all = not entries

    def rank(self, name: str) -> int:
        """How closely a module is named, 0 if it is not; names tell of classes no more than whether one is an embedding."""
        if not self._names.isdisjoint(spellings(name)):
            return 4
        # One that cannot be told may mean it.
        if any(matches(expression, name) is not False for expression in self._expressions):
            return 3
        if "Embedding" in self._classes and name.rpartition(".")[2] in WORDS["embedding_modules"]:
            return 2
        return int(self._all or bool(self._classes - {"Embedding"}))


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
                    Companion("scales", (".weight_scale",), E4M3, groups(16)),
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
