"""Transformer Engine's FP8 state (``_extra_state``): recipe, length of the amax history, scales.

It belongs to the run, not to the model: weights are stored unscaled next to it. It is read without running
code, for reports only, and is not part of results.
source: TransformerEngine pytorch/module/base.py get_extra_state, common/recipe
"""

from __future__ import annotations

from typing import Any

from ...common.errors import FastshardError, Finding
from ...layouts.declaration import Unit
from ..base import Contents, Found
from ..zero.flat_state import tensor_index

#: Unit, keys from the file's root, name of the tensor, and whether the state is stored as a tensor.
State = tuple[Unit, list[str], str, bool]
#: Settings of a recipe to report; they are plain values in all recipes that have them.
_SETTINGS = ("margin", "amax_history_len", "amax_compute_algo")


def summary(
    found: Found[object], states: list[State], values: Contents, findings: list[Finding]
) -> dict[str, Any] | None:
    """Summarise the FP8 states; None if FP8 was not used.

    A state that cannot be read becomes a warning.
    """
    recipes: dict[str, None] = {}
    settings: dict[str, Any] = {}
    histories: set[int] = set()
    scales: dict[str, list[float]] = {}
    used = 0
    for unit, path, name, _ in states:
        try:
            packed = values.packed(unit.file, path)
        except FastshardError as error:
            findings.append(
                Finding.of(
                    error.code,
                    f"the FP8 state cannot be read ({error.findings[0].message}); fastshard leaves it out "
                    "anyway",
                    severity="warning",
                    file=found.files[unit.file].path,
                    rank=unit.rank,
                    tensor=name,
                )
            )
            continue
        if packed is None or not isinstance(packed["values"], dict):
            continue
        content, tensors = packed["values"], packed["tensors"]
        is_used = False
        recipe = content.get("recipe")
        if isinstance(recipe, dict) and isinstance(recipe.get("__class__"), str):
            recipes[recipe["__class__"].rsplit(".", 1)[-1]] = None
            fields = recipe.get("state")
            fields = fields if isinstance(fields, dict) else {}
            settings |= {k: fields[k] for k in _SETTINGS if isinstance(fields.get(k), (int, str))}
            is_used = True
        for key, value in content.items():
            index = tensor_index(value)
            if index is None or index >= len(tensors):
                continue
            tensor = tensors[index]
            if key.startswith("amax_history") and tensor["shape"]:
                histories.add(tensor["shape"][0])
                is_used = True
            if key in ("scale_fwd", "scale_bwd") and tensor["range"]:
                low, high = tensor["range"]
                known = scales.setdefault(key, [low, high])
                scales[key] = [min(known[0], low), max(known[1], high)]
                is_used = True
        used += is_used
    if not used:
        return None
    out: dict[str, Any] = {"states": used}
    if recipes:
        out["recipe"] = ", ".join(recipes)
    out |= settings
    if histories:
        out["amax_history"] = sorted(histories)
    return out | {key: scales[key] for key in sorted(scales)}
