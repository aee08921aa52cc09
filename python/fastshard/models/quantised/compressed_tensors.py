"""The formats of compressed-tensors.

source: compressed-tensors 0.20 compressors/ and quantization/
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from ...common.patterns import PatternBudget, PatternList
from ...common.records import dataclass, replace
from ..tensor_words import WORDS
from .forms import (
    E4M3,
    E8M0,
    F8,
    FLOATS,
    WINDOW,
    Companion,
    Form,
    Sizes,
    Weight,
    blocks,
    ceil_div,
    each_row,
    groups,
    matrix,
    one,
    pairs,
    spellings,
)
from .settings import Settings
from .values import (
    E2M1,
    NIBBLES,
    Block,
    Coded,
    DamagedError,
    ValueAccess,
    Values,
    fitting,
    operand,
    powers,
    scale,
    scale_of_all,
    view,
)

__all__ = ["forms", "methods", "telling"]

methods = ("compressed-tensors",)
#: Configs whose forms can be recognised by names and dtypes alone, if no config states anything; by the name
#: for messages, in which `{}` is the kind.
telling: Mapping[str, dict[str, Any]] = {
    f"{called} of compressed-tensors": {
        "format": name,
        "config_groups": {"": {"weights": {"num_bits": 4, "strategy": "channel", "type": kind}}},
    }
    for called, name, kind in (
        ("packed integers", "pack-quantized", "int"),
        ("NVFP4", "nvfp4-pack-quantized", "float"),
        ("MXFP4", "mxfp4-pack-quantized", "float"),
        ("int8", "int-quantized", "int"),
    )
}
#: How scales can be distributed. source: compressed-tensors 0.20 quantization/quant_args.py
#: QuantizationStrategy
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
_IN_GROUPS = ("group", "tensor_group")
_TRANSFORMED = (
    "its transform_config makes the model transform the inputs of a layer, so the weight's values alone are "
    "not those of the model"
)
_I32, _U8 = frozenset(("I32",)), frozenset(("U8",))
_PACKED_FP4, _MX = "nvfp4-pack-quantized", ("mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")


def forms(config: Mapping[str, Any], budget: PatternBudget) -> list[Form]:
    """List the forms of a config's groups, each for its target modules."""
    whole = config.get("format")
    sparse = config.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format") not in (None, "dense"):
        # The codes are those that are not zero, under other names.
        return []
    config_groups = Settings(config).below("config_groups")
    # A group may be the name of a preset, with a list of targets.
    groups_ = [] if config_groups is None else list(config_groups.each())
    targets = [_Targets(group.values.get("targets"), budget) for group in groups_]

    @functools.cache
    def closest(name: str) -> frozenset[int]:
        """Return the groups whose targets match a module most specifically."""
        ranks = [one.rank(name) for one in targets]
        best = max(ranks, default=0)
        return frozenset(n for n, rank in enumerate(ranks) if rank and rank == best)

    found: list[Form] = []
    for number, group in enumerate(groups_):
        name = whole if whole not in (None, "mixed-precision") else group.values.get("format")
        weights = _read_weights(group, name)
        if isinstance(name, str) and weights is not None:
            inputs = group.values.get("input_activations")
            # Where inputs are scaled by a number that was measured, no loader has another.
            dynamic = inputs.get("dynamic") if isinstance(inputs, Mapping) else True
            found += _of(name, weights, dynamic, functools.partial(_is_among, closest, number))
    if config.get("transform_config"):
        return [replace(form, values=_TRANSFORMED) for form in found]
    return found


def _is_among(closest: Callable[[str], frozenset[int]], number: int, name: str) -> bool:
    return number in closest(name)


class _Targets:
    """The modules that a group targets: names, expressions, classes.

    source: compressed-tensors 0.20 utils/match.py match_targets
    """

    def __init__(self, targets: object, budget: PatternBudget) -> None:
        entries = [one for one in targets if isinstance(one, str)] if isinstance(targets, list) else []
        self._patterns = PatternList(
            (entry[3:] for entry in entries if entry.startswith("re:")), "start", budget
        )
        self._classes = {entry for entry in entries if entry[:1].isupper() and "." not in entry}
        self._names = set(entries) - self._classes
        self._all = not entries

    def rank(self, name: str) -> int:
        """Return how specifically a module is matched; 0 if it is not.

        A name shows a module's class only for embeddings.
        """
        if not self._names.isdisjoint(spellings(name)):
            return 4
        if self._patterns.first(name) is not None:
            return 3
        if "Embedding" in self._classes and name.rpartition(".")[2] in WORDS["embedding_modules"]:
            return 2
        return int(self._all or bool(self._classes - {"Embedding"}))


@dataclass(frozen=True)
class _Weights:
    """The quantisation of a group's weights. source: compressed-tensors 0.20 quantization/quant_args.py"""

    bits: int
    is_float: bool
    symmetric: bool
    #: The strategy; None if it is not stated.
    strategy: str | None
    group_size: int | None
    block: Block | None
    in_order: bool


def _read_weights(group: Settings, name: object) -> _Weights | None:
    """Read how the weights of a group are quantised; None if they are not.

    Raises:
        ImpossibleSettingError: if compressed-tensors does not support such weights.
    """
    weights = group.below("weights")
    if weights is None:
        return None
    strategy = weights.word("strategy", _STRATEGIES, any_case=True)
    size = weights.integer("group_size", 1 if strategy in _IN_GROUPS else -1)
    if strategy is None and size is not None:
        strategy = "group" if size > 0 else "channel" if size == -1 else None
    return _Weights(
        weights.integer("num_bits", 1, 8 if name == "pack-quantized" else 16, default=8) or 8,
        weights.word("type", ("int", "float"), default="int", any_case=True) == "float",
        weights.flag("symmetric", default=True),
        strategy,
        size,
        weights.extents("block_structure"),
        weights.values.get("actorder") != "group",
    )


def _of(name: str, weights: _Weights, dynamic: object, takes: Callable[[str], bool]) -> list[Form]:
    symmetric, scales = weights.symmetric, _scales(weights)
    if name == "pack-quantized":
        return [_packed(weights, takes)]
    if name == _PACKED_FP4:
        return [
            Form(
                "NVFP4",
                ".weight_packed",
                _U8,
                pairs,
                (
                    Companion("scales", (".weight_scale",), E4M3, groups(16)),
                    Companion("global scale", (".weight_global_scale",), FLOATS, one),
                    Companion("input scale", (".input_global_scale",), FLOATS, one, dynamic is not True),
                ),
                takes,
                values=_nvfp4,
            )
        ]
    if name in _MX:
        return [_mx(name, takes)]
    if name in ("float-quantized", "int-quantized", "naive-quantized"):
        kinds = F8 if weights.is_float else frozenset(("I8",))
        measured = Companion("input scale", (".input_scale",), FLOATS, one, dynamic is False)
        zero = Companion(
            "zero points", (".weight_zero_point",), frozenset(("I8", *F8)), scales, required=not symmetric
        )
        return [
            Form(
                name,
                ".weight",
                kinds,
                matrix,
                (Companion("scales", (".weight_scale",), FLOATS, scales), zero, measured),
                takes,
                values=functools.partial(_plain, weights),
            )
        ]
    return []


def _scales(weights: _Weights) -> Callable[[Sizes], Any] | None:
    """Return the possible shapes of scales for a group's strategy; None if it is not stated."""
    if weights.strategy == "tensor":
        return one
    if weights.strategy == "channel":
        return each_row
    if weights.strategy in _IN_GROUPS and weights.group_size is not None:
        return groups(weights.group_size)
    return blocks(*weights.block) if weights.strategy == "block" and weights.block is not None else None


def _mx(name: str, takes: Callable[[str], bool]) -> Form:
    scales = Companion("scales", (".weight_scale",), E8M0, groups(32))
    if name == "mxfp8-quantized":
        return Form("MXFP8", ".weight", F8, matrix, (scales,), takes, values=functools.partial(_of_powers, 8))
    if name == "mxfp6-pack-quantized":
        return Form(
            "MXFP6", ".weight_packed", _U8, _sixths, (scales,), takes, values=functools.partial(_of_powers, 6)
        )
    return Form(
        "MXFP4", ".weight_packed", _U8, pairs, (scales,), takes, values=functools.partial(_of_powers, 4)
    )


def _sixths(shape: tuple[int, ...]) -> Sizes | None:
    """Return the sizes for codes that are packed four to three bytes."""
    return (
        Sizes(shape[:-2], shape[-2], shape[-1] // 3 * 4) if len(shape) >= 2 and shape[-1] % 3 == 0 else None
    )


def _packed(weights: _Weights, takes: Callable[[str], bool]) -> Form:
    bits, symmetric = weights.bits, weights.symmetric
    size = weights.group_size if weights.strategy == "group" else None

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
        if size is not None:
            fitting = {ceil_div(n, size) for n in columns(sizes) if n > 0}
            return [(*sizes.lead, sizes.rows, n) for n in sorted(fitting, reverse=True)]
        return [*each_row(sizes), *one(sizes)]

    def zeros(sizes: Sizes) -> list[tuple[int, ...]]:
        return [(*s[:-2], ceil_div(s[-2] * bits, 32), s[-1]) for s in scales(sizes) if len(s) >= 2]

    # Of symmetric codes older versions saved zero points that are no words. source: compressed-tensors 0.20
    # PackedQuantizationCompressor
    zero = Companion(
        "zero points",
        (".weight_zero_point",),
        frozenset(("I8",)) if symmetric else _I32,
        scales if symmetric else zeros,
        not symmetric,
    )
    return Form(
        f"{bits} bit, packed",
        ".weight_packed",
        _I32,
        most,
        (
            Companion("scales", (".weight_scale",), FLOATS, scales),
            Companion("shape", (".weight_shape",), frozenset(("I64", "I32")), lambda s: [(2 + len(s.lead),)]),
            zero,
            Companion("group indices", (".weight_g_idx",), _I32, None, required=not weights.in_order),
        ),
        takes,
        fits,
        functools.partial(_of_words, weights),
    )


def _blocks(weights: _Weights, sizes: Sizes) -> list[Block]:
    """Return the possible blocks of scales for a group's strategy."""
    strategy = weights.strategy
    if strategy == "block":
        return [] if weights.block is None else [weights.block]
    if strategy in _IN_GROUPS:
        return [] if weights.group_size is None else [(1, weights.group_size)]
    return [(1, sizes.columns) if strategy == "channel" else (sizes.rows, sizes.columns)]


def _groups_of(weight: Weight, columns: int, access: ValueAccess) -> Mapping[str, object] | None:
    """Return the groups of columns if they are not in order; -1 means that they are in order.

    source: compressed-tensors forward_helpers.py
    """
    indices = weight.companions.get("group indices")
    if indices is None or (access.looks and _has_minus_one(indices, columns, access)):
        return None
    return {"of": view(indices, [1, 1, columns]), "rows": False}


def _has_minus_one(indices: str, columns: int, access: ValueAccess) -> bool:
    """Return True if one of the indices is -1."""
    import numpy as np

    size = 4 * columns
    return any(
        bool((np.frombuffer(access.read(indices, at, min(WINDOW, size - at)), "<i4") == -1).any())
        for at in range(0, size, WINDOW)
    )


def _plain(weights: _Weights, weight: Weight, access: ValueAccess) -> Values:
    """Compute the product in the dtype of the scales.

    source: compressed-tensors 0.20 quantization/lifecycle/forward_helpers.py
    """
    sizes, (kind, _) = weight.sizes, weight.stored[weight.codes]
    name, dtype, shape = weight.of("scales")
    block, grid = fitting(sizes, shape, _blocks(weights, sizes))
    zero = None
    if "zero points" in weight.companions:
        zeros, of_zeros, _ = weight.of("zero points")
        numbers = {"signed": 8} if of_zeros == "I8" else {"float": of_zeros}
        zero = {"of": operand(zeros, grid, Coded(view(zeros, grid), numbers)), "block": block}
    coded = Coded(
        view(weight.codes, sizes.matrices),
        {"signed": 8} if kind == "I8" else {"float": kind},
        zero=zero,
        scales=[scale(view(name, grid), block)],
        groups=_groups_of(weight, sizes.columns, access),
        rounded=dtype,
    )
    return Values(".weight", sizes.shape, coded)


def _of_words(weights: _Weights, weight: Weight, access: ValueAccess) -> Values:
    """Compute the product of codes of fewer bits that are packed into words.

    source: compressed-tensors 0.20 compressors/pack_quantized/base.py
    """
    bits, words = weights.bits, weight.stored[weight.codes][1]
    if not access.looks and weights.strategy == "group" and weights.group_size is not None:
        # Groups are whole, so that they tell.
        extents = [*words[:-1], weight.of("scales")[2][-1] * weights.group_size]
    else:
        extents = _read_shape(bits, weight, access)
    *lead, rows, columns = extents
    sizes = Sizes(tuple(lead), rows, columns)
    name, dtype, shape = weight.of("scales")
    block, grid = fitting(sizes, shape, _blocks(weights, sizes))
    less, zero = {"less": 1 << (bits - 1)}, None
    if "zero points" in weight.companions:
        zeros, of_zeros, shape = weight.of("zero points")
        if of_zeros == "I8":
            points = Coded(view(zeros, grid), {"signed": 8})
        else:
            points = Coded(view(zeros, [grid[0], *shape[-2:]]), less, {"column": {"bits": bits}})
        zero = {"of": operand(zeros, grid, points), "block": block}
    coded = Coded(
        view(weight.codes, [math.prod(lead), *words[-2:]]),
        less,
        {"row": {"bits": bits}},
        zero=zero,
        scales=[scale(view(name, grid), block)],
        groups=_groups_of(weight, columns, access),
        rounded=dtype,
    )
    return Values(".weight", sizes.shape, coded)


def _read_shape(bits: int, weight: Weight, access: ValueAccess) -> list[int]:
    """Read the shape that is stored as numbers next to the codes.

    Raises:
        DamagedError: for a shape that does not fit the codes, which may leave part of a row's last word
            unused.
    """
    name, kind, count = weight.of("shape")
    raw, words = (
        access.read(name, 0, (8 if kind == "I64" else 4) * math.prod(count)),
        weight.stored[weight.codes][1],
    )
    numbers = list(memoryview(raw).cast("q") if kind == "I64" else memoryview(raw).cast("i"))
    if numbers[:-1] != list(words[:-1]) or numbers[-1] <= 0 or ceil_div(numbers[-1] * bits, 32) != words[-1]:
        raise DamagedError(
            f"the stated shape of {weight.codes} does not match its codes",
            tensor=name,
            expected=str(list(weight.sizes.shape)),
            got=str(numbers),
        )
    return numbers


def _nvfp4(weight: Weight, access: ValueAccess) -> Values:
    """Divide scales by the global scale. source: compressed-tensors 0.20 compressors/nvfp4/base.py"""
    del access
    sizes = weight.sizes
    (name, _, shape), (outer, _, of_outer) = weight.of("scales"), weight.of("global scale")
    block, grid = fitting(sizes, shape, [(1, 16)])
    lead, rows, columns = sizes.matrices
    # One without a dimension does not widen what it divides.
    of_all = scale_of_all(outer, of_outer, sizes, divides=True, rounded="F32" if of_outer else "BF16")
    coded = Coded(
        view(weight.codes, [lead, rows, columns // 2]),
        E2M1,
        NIBBLES,
        scales=[scale(view(name, grid), block), of_all],
        rounded="BF16",
    )
    return Values(".weight", sizes.shape, coded)


def _of_powers(bits: int, weight: Weight, access: ValueAccess) -> Values:
    """Multiply small floats by powers of two.

    source: compressed-tensors 0.20 compressors/mxfp4, mxfp6, mxfp8
    """
    del access
    sizes, (kind, shape) = weight.sizes, weight.stored[weight.codes]
    lead, rows, _ = sizes.matrices
    numbers: object = {4: E2M1, 6: "e2m3"}.get(bits, {"float": kind})
    coded = Coded(
        view(weight.codes, [lead, rows, shape[-1]]),
        numbers,
        {"row": {"bits": bits}} if bits < 8 else "none",
        scales=[powers(weight.companions["scales"], sizes)],
        rounded="BF16",
    )
    return Values(".weight", sizes.shape, coded)
