"""Weights in fp8 with one scale per block, per row or per tensor, or with powers of two as scales.

source: transformers 5.24 integrations/finegrained_fp8.py; DeepSeek-V3 README_WEIGHTS.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.patterns import PatternBudget
from .forms import (
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
)
from .settings import Settings
from .values import E2M1, NIBBLES, Coded, ValueAccess, Values, fitting, scale, view

__all__ = ["forms", "methods", "telling"]

methods = ("fp8",)
#: Configs whose forms can be recognised by names and dtypes alone, if no config states anything; by the name
#: for messages, in which `{}` is the kind.
telling: Mapping[str, dict[str, Any]] = {"{}": {}}
#: Default extents of a block.
BLOCK = (128, 128)
_SCALES = FLOATS | {"F8_E8M0"}


def forms(config: Mapping[str, Any], budget: PatternBudget) -> list[Form]:
    """List the forms of ``quant_method: fp8``: Linear layers, stacked experts, fp4 experts (DeepSeek V4)."""
    settings = Settings(config)
    block = settings.extents("weight_block_size")

    def scales(sizes: Sizes) -> list[tuple[int, ...]]:
        if block is None:
            # transformers takes blocks of 128 where nothing is said, vLLM one scale.
            unsaid = () if "weight_block_size" in config else blocks(*BLOCK)(sizes)
            return [*one(sizes), *each_row(sizes), *unsaid]
        # MXFP8 has a scale for each 32 of a row, whatever the config says of blocks.
        return [*blocks(*block)(sizes), *groups(32)(sizes)]

    # Where activations are scaled by a number that was measured, no loader has another.
    static = settings.word("activation_scheme", ("dynamic", "static"), any_case=True) == "static"
    measured = Companion("activation scale", (".input_scale", ".activation_scale"), FLOATS, one, static)

    def values(weight: Weight, access: ValueAccess) -> Values:
        """Compute the product in float32.

        source: compressed-tensors 0.20 fp8block_dequantizer.py; DeepSeek-V3 inference/kernel.py
        """
        del access
        sizes, (kind, shape) = weight.sizes, weight.stored[weight.codes]
        lead, rows, columns = sizes.matrices
        name, dtype, of = weight.of("scales")
        if block is not None:
            known = [block, (1, 32)]
        else:
            unsaid = [] if "weight_block_size" in config else [BLOCK, (1, 32)]
            known = [*unsaid, (rows, columns), (1, columns)]
        extents, grid = fitting(sizes, of, known)
        packed = weight.form.sizes is pairs
        codes = view(weight.codes, [lead, rows, shape[-1]], "U8" if packed else None)
        return Values(
            weight.form.suffix,
            sizes.shape,
            Coded(
                codes,
                numbers=E2M1 if packed else {"float": kind},
                packing=NIBBLES if packed else "none",
                scales=[scale(view(name, grid, "F8_E8M0" if dtype == "U8" else None), extents)],
            ),
        )

    def companions(*names: str) -> tuple[Companion, ...]:
        return (Companion("scales", names, _SCALES | {"U8"}, scales),)

    return [
        Form(
            "fp8",
            ".weight",
            F8,
            matrix,
            (*companions(".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight"), measured),
            values=values,
        ),
        *(
            Form(
                "fp8",
                f".experts.{name}",
                F8,
                matrix,
                companions(f".experts.{name}_scale_inv", f".experts.{name}_scale"),
                values=values,
            )
            for name in ("gate_up_proj", "down_proj")
        ),
        Form(
            "fp4 experts",
            ".weight",
            frozenset(("I8",)),
            pairs,
            (Companion("scales", (".scale", ".weight_scale_inv", ".weight_scale"), E8M0, groups(32)),),
            takes=lambda name: ".experts." in name,
            values=values,
        ),
    ]
