"""Quantised weights of an opened checkpoint, judged by the forms that its config states."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ..common import safe_files
from ..common.errors import FastshardError, Finding
from ..layouts.declaration import Source, is_state
from ..models.quantised.judge import Weight, judged
from ..models.quantised.stated import stated
from ..sources.base import Contents

__all__ = ["found_in"]

#: Files in which quantisers say what they did, where config.json does not.
_BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def found_in(source: Source, contents: Contents) -> tuple[list[Weight], list[Finding]]:
    """The quantised weights of a model of Hugging Face; what is missing of them, and what contradicts its config.

    Names and shapes of tensors whose storage a layout table states are judged by the core, which does not read their scales; those
    that ranks divide are not judged.
    """
    model = source.model
    if model.is_part or source.assembled or model.config is None:
        return [], []
    if any(degree > 1 for degree in source.degrees.values()):
        return [], []
    said = stated(model.config, _beside(source))
    if said is None and not model.hf_names:
        return [], []
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for unit in source.units:
        under = len(unit.under)
        is_own = contents.readable(unit.file)
        for tensor in contents.tensors(unit.file) if is_own else ():
            key = ".".join(tensor["path"][under:])
            if tensor["path"][:under] != unit.under or (unit.only is not None and key not in unit.only):
                continue
            stored = unit.prefix + key.removeprefix(unit.strip)
            own = source.names.get(stored, stored)
            if own.startswith(source.weights_prefix) and not is_state(own):
                tensors[own.removeprefix(source.weights_prefix)] = (tensor["dtype"], tuple(tensor["shape"]))
    lost = {source.names.get(name, name) for name in source.lost}
    # What is missing with a file is told with the file.
    weights, found = judged(said, tensors)
    if source.stored:
        return weights, []
    return weights, [finding for finding in found if finding.tensor not in lost]


def _beside(source: Source) -> dict[str, Mapping[str, Any]]:
    """Contents of the files in which quantisers say what they did, as far as they can be read."""
    found: dict[str, Mapping[str, Any]] = {}
    for folder in source.places[:1]:
        for name in _BESIDE:
            with contextlib.suppress(FastshardError, OSError):
                if (file := folder.file(name)) is not None:
                    found[name] = safe_files.read_object(file, safe_files.MAX_CONFIG)
    return found
