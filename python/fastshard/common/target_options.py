"""The options of targets, as the targets list them."""

from __future__ import annotations

from typing import Any

from .options import Placing, table

_OF = table(Placing)
TP, PP, EP, ETP, MULTIPLE, SCAN_AXIS = (
    _OF["tp"],
    _OF["pp"],
    _OF["ep"],
    _OF["etp"],
    _OF["make_vocab_size_divisible_by"],
    _OF["param_scan_axis"],
)
FUSED_QKV, ROPE_TYPE = _OF["fused_qkv"], _OF["rope_type"]
STACKED_EXPERTS, ZARR2, CARD = _OF["stacked_experts"], _OF["zarr2"], _OF["card"]
#: All options of targets, in the order of the table.
OPTIONS = tuple(_OF.values())


def of(given: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of targets from keyword arguments, and return them."""
    return {option.name: given.pop(option.name) for option in OPTIONS if option.name in given}
