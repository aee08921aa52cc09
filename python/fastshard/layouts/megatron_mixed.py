"""The tables of layers that differ, with rules for the blocks of layers that predict further tokens.

These are those of the decoder's layers with experts and heads, below other names.
"""

from __future__ import annotations

from functools import cache

from .._core import Table
from . import tables

#: Layers with heads or latents, and layers some of which have gated delta nets.
NAME, DELTA = "megatron.mixed", "megatron.delta"
NAMES = (NAME, DELTA)
#: Names of the decoder's blocks, by the sets of layers that have them.
_DECODER = (
    "decoder.layers.{L in main}.",
    "decoder.layers.{L in main_full}.",
    "decoder.layers.{L in main_moe}.",
    "decoder.layers.{L}.",
)
#: The block is called otherwise since 0.17; torch_dist keeps the first word.
#: source: megatron/core/transformer/multi_token_prediction.py
_FURTHER = "mtp.layers.{L of mtp}.(transformer_layer|mtp_model_layer)."


@cache
def table(name: str) -> Table:
    """Return the table of a name."""
    base = tables.table(name)
    blocks = [
        rule.renamed(_FURTHER + rule.name.removeprefix(prefix))
        for rule in base.rules
        for prefix in _DECODER
        if rule.name.startswith(prefix)
    ]
    return base.with_rules([*base.rules, *blocks])
