"""MLX: 32-bit words with codes of a row, and one scale per group.

source: mlx 0.30 nn/layers/quantized.py, mlx-lm utils.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.patterns import PatternBudget
from .forms import FLOATS, Companion, Form, Sizes
from .settings import Settings

__all__ = ["forms", "methods", "telling"]

methods = ("mlx",)
#: Configs whose forms can be recognised by names and dtypes alone, if no config states anything; by the name
#: for messages, in which `{}` is the kind.
telling: Mapping[str, dict[str, Any]] = {"{}": {}}

#: Minimum and maximum bits of a code.
_BITS = (2, 8)


def forms(config: Mapping[str, Any], budget: PatternBudget) -> list[Form]:
    """List the forms: integers have scales and biases, small floats (mxfp4, nvfp4, mxfp8) have only scales.

    The number of bits may differ between modules.
    """
    settings = Settings(config)
    for one in (settings, *settings.each()):
        one.integer("bits", *_BITS)
        one.integer("group_size")
    is_affine = config.get("mode", "affine") == "affine"
    scales = Companion("scales", (".scales",), FLOATS if is_affine else FLOATS | {"U8"}, None)
    biases = Companion("biases", (".biases",), FLOATS, None, required=is_affine)
    return [
        Form(
            "MLX",
            ".weight",
            frozenset(("U32",)),
            _words,
            (scales, biases),
            fits=_fits,
            values="fastshard cannot dequantise them",
        ),
    ]


def _words(shape: tuple[int, ...]) -> Sizes | None:
    """Return the rows; the number of columns per word depends on the config, by module."""
    return Sizes(shape[:-2], shape[-2], shape[-1]) if len(shape) >= 2 else None


def _fits(sizes: Sizes, shape: tuple[int, ...]) -> bool:
    """Return True if words contain 4 to 16 codes of a row."""
    return shape[:-1] == sizes.shape[:-1] and 4 * sizes.columns <= shape[-1] <= 16 * sizes.columns
