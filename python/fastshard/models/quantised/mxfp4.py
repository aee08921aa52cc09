"""Experts in MXFP4, as in gpt-oss.

source: transformers 5.24 integrations/mxfp4.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.patterns import PatternBudget
from .forms import Companion, Form, Sizes, Weight
from .values import E2M1, NIBBLES, Coded, ValueAccess, Values, powers, view

__all__ = ["forms", "methods", "telling"]

methods = ("mxfp4",)
#: Configs whose forms can be recognised by names and dtypes alone, if no config states anything; by the name
#: for messages, in which `{}` is the kind.
telling: Mapping[str, dict[str, Any]] = {"{}": {}}


def forms(config: Mapping[str, Any], budget: PatternBudget) -> list[Form]:
    """List the form: blocks of 32 elements in 16 bytes, with one power of two each."""
    del config
    scales = Companion(
        "scales", ("_scales",), frozenset(("U8", "F8_E8M0")), lambda s: [(*s.lead, s.rows, s.columns // 32)]
    )
    return [Form("MXFP4", "_blocks", frozenset(("U8",)), _sizes, (scales,), fits=_turned, values=_values)]


def _values(weight: Weight, access: ValueAccess) -> Values:
    """Multiply codes of three bits and a sign by powers of two, exactly, and transpose.

    source: transformers 5.24 integrations/mxfp4.py
    """
    del access
    sizes = weight.sizes
    lead, rows, columns = sizes.matrices
    codes = view(weight.codes, [lead, rows, columns // 2])
    coded = Coded(
        codes, E2M1, NIBBLES, turned=True, scales=[powers(weight.companions["scales"], sizes)], rounded="BF16"
    )
    return Values("", (*sizes.lead, sizes.columns, sizes.rows), coded)


def _turned(sizes: Sizes, shape: tuple[int, ...]) -> bool:
    """Return True if a shape is the weight's shape with its last two dimensions transposed.

    Dequantised weights have this transposed shape.
    """
    return (*shape[:-2], *shape[:-3:-1]) == sizes.shape


def _sizes(shape: tuple[int, ...]) -> Sizes | None:
    if len(shape) < 3 or shape[-1] != 16:
        return None
    return Sizes(shape[:-3], shape[-3], 32 * shape[-2])
