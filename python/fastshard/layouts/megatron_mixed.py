"""The table ``megatron.mixed`` with rules for the blocks of layers that predict further tokens: those of the
decoder's layers with experts, below other names."""

from __future__ import annotations

from functools import cache

from .._core import Table
from . import tables

NAME = "megatron.mixed"
#: Names of the decoder's blocks, by the sets of layers that have them.
_DECODER = ("decoder.layers.{L in main}.", "decoder.layers.{L in main_moe}.", "decoder.layers.{L}.")
#: The block is called otherwise since 0.17; torch_dist keeps the first word.
#: source: megatron/core/transformer/multi_token_prediction.py
_FURTHER = "mtp.layers.{L of mtp}.(transformer_layer|mtp_model_layer)."


@cache
def table() -> Table:
    """Return the table."""
    base = tables.table(NAME)
    blocks = [
        rule.renamed(_FURTHER + rule.name.removeprefix(prefix))
        for rule in base.rules
        for prefix in _DECODER
        if rule.name.startswith(prefix)
    ]
    return base.with_rules([*base.rules, *blocks])
