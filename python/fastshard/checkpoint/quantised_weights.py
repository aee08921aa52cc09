"""Quantised weights of an opened checkpoint, recognised by the forms that its config states."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..common import codes, safe_files
from ..common.errors import FastshardError, Finding
from ..common.listing import Folder
from ..common.records import dataclass, field
from ..common.regex import compile_when_used
from ..layouts.declaration import Source, Unit, is_state
from ..models.config_json import QUANTISER_FILES
from ..models.quantised import bitsandbytes
from ..models.quantised.forms import F8, FLOATS, Stored, Weight
from ..models.quantised.judge import CODES, check_weights
from ..models.quantised.quantisation_config import QuantisationConfig, find_in_configs, find_in_files
from ..models.quantised.torchao import (
    Record,
    find_impossible,
    is_of_torchao,
    missing,
    records_of,
    without_header,
)
from ..sources.base import Contents

__all__ = ["QuantisedWeights", "found_in"]

#: Names of scales of activations, and of the cache of keys and values. source: vLLM
#: model_loader/weight_utils.py, ModelOpt 0.47 torch/export, compressed-tensors 0.20
#: quantization/lifecycle/initialize.py, transformers 5.24 finegrained_fp8.py
_OF_ACTIVATIONS = compile_when_used(
    r"\.((input|output|activation|prob|prob_output|[kvq]|kv)_(scale|zero_point)|input_global_scale|qscale_act"
    r"|experts\.(gate_up|down)_proj_activation_scale)$"
)
_CUT = Finding.of(
    codes.UNSUPPORTED,
    "a header of torchao is larger than fastshard reads, and the result cannot be loaded without it",
    help="copy the files unchanged, or save the model's values with torchao (dequantize)",
)
#: The format of fp8 weights without a description in a config.
_UNSAID = QuantisationConfig("fp8", {}, "")


@dataclass(frozen=True)
class QuantisedWeights:
    """The quantised weights of a model, and the findings about them."""

    weights: list[Weight] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    #: Findings for quantised weights that no config describes; reported when values are requested.
    unsaid: list[Finding] = field(default_factory=list)
    #: The quantiser's own files, by name.
    files: Mapping[str, Path] = field(default_factory=dict)
    #: Names of activation scales and KV-cache scales, which do not belong to a weight.
    of_activations: list[str] = field(default_factory=list)
    #: The records of torchao tensors in the headers, which loaders need.
    records: Mapping[str, Record] = field(default_factory=dict)
    #: The reasons why the result is not written, if any.
    unwritable: list[Finding] = field(default_factory=list)
    #: The quantisation method that the model states; None if it states none.
    method: str | None = None
    #: True for quantised weights that no config describes.
    is_unstated: bool = False

    @cached_property
    def by_tensor(self) -> list[tuple[str, ...]]:
        """The tensors that each weight is stored as, by the model's own names."""
        forms = [(weight.codes, *weight.companions.values()) for weight in self.weights]
        return [*forms, *(record.parts for record in self.records.values() if record.parts)]


def found_in(
    source: Source, contents: Contents, full: Callable[[], Mapping[str, Stored]]
) -> QuantisedWeights:
    """Find the quantised weights of a model, their missing parts, and contradictions to the config.

    Without a config, fp8 weights are recognised by the names of their scales.

    Args:
        source: the declaration of the model.
        contents: the headers of its files.
        full: returns dtype and shape of every full tensor, by the model's own names; called if files hold
            parts of tensors.
    """
    model = source.model
    is_divided = bool(source.files.assembled) or any(degree > 1 for degree in source.binding.degrees.values())
    if is_divided and source.binding.layout is not None and not model.hf_names:
        # Frameworks with layouts of their own say what they store in FP8.
        return QuantisedWeights()
    headers = [contents(unit.file) for unit in source.files.units]
    torchao_config = _read_torchao_config(model.config)
    if any(map(is_of_torchao, headers)) or (contents.cut and torchao_config is not None):
        records, found = records_of(h for h in headers if isinstance(h, Mapping))
        found += find_impossible(torchao_config or {})
        found += () if model.is_part else missing(records, contents.names(), source.index.lost)
        return QuantisedWeights(findings=found, records=records, unwritable=[_CUT] if contents.cut else [])
    if model.is_part:
        return QuantisedWeights()
    files = _beside(source.files.folders)
    config = find_in_configs(model.config, _contents(files))
    if config is None and contents.dtypes().isdisjoint(CODES):
        return QuantisedWeights(files=files)
    tensors = full() if is_divided else _tensors(source.files.units, source.names.own, contents)
    tensors = _below(source.names.prefix, tensors)
    if found := without_header(tensors):
        return QuantisedWeights(findings=found, is_unstated=True)
    config = config or find_in_files(headers, tensors)
    if config is None and model.config is None and any(bitsandbytes.RECORD in name for name in tensors):
        # Records say what codes are, as all of a model that no config.json describes (a single file).
        config = QuantisationConfig("bitsandbytes", {}, "a record of bitsandbytes")
    if config is not None and config.method == "comfyui":
        by_names, unsaid = _by_names(tensors)
        return QuantisedWeights(by_names, [], unsaid, files, method=config.method)
    weights, found = check_weights(config, tensors)
    if config is None and model.config is None:
        # Scales of fp8 tell enough of a model that no config.json describes.
        found = [finding for finding in found if tensors[finding.tensor or ""][0] not in F8]
    lost = {source.names.own.get(name, name) for name in source.index.lost}
    # What is missing with a file is told with the file.
    findings = [finding for finding in found if finding.tensor not in lost]
    if config is None:
        by_names, unsaid = _by_names(tensors)
        return QuantisedWeights(by_names, findings, unsaid, files, is_unstated=bool(findings))
    owned = {name for weight in weights for name in weight.stored}
    others = [
        name for name, stored in tensors.items() if name not in owned and _is_of_activations(name, stored)
    ]
    return QuantisedWeights(weights, findings, [], files, others, method=config.method)


def _read_torchao_config(model_config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the quantization config of a model that torchao quantised; None for other models."""
    config = (model_config or {}).get("quantization_config")
    return config if isinstance(config, dict) and config.get("quant_method") == "torchao" else None


def _is_of_activations(name: str, stored: Stored) -> bool:
    """Return True for an activation scale: one number, or one for each head or expert, with a typical name.

    A tensor with more elements is another part of the model.
    """
    dtype, shape = stored
    is_few = math.prod(shape) == 1 or shape[1:] == (1, 1) or name.endswith("_proj_activation_scale")
    return (
        is_few
        and (dtype in FLOATS or dtype in F8 or dtype == "I8")
        and _OF_ACTIVATIONS.search(name) is not None
    )


def _by_names(tensors: Mapping[str, Stored]) -> tuple[list[Weight], list[Finding]]:
    """Return the fp8 weights with scales, recognised by name alone, and the findings about the scales."""
    if not any(dtype in F8 for dtype, _ in tensors.values()):
        return [], []
    weights, found = check_weights(_UNSAID, tensors)
    return weights, [finding for finding in found if finding.is_a("misfit")]


def _below(prefix: str, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of the model alone, by their names below its prefix."""
    return {
        name.removeprefix(prefix): stored
        for name, stored in tensors.items()
        if name.startswith(prefix) and not is_state(name)
    }


def _tensors(units: Iterable[Unit], own_names: Mapping[str, str], contents: Contents) -> dict[str, Stored]:
    """Return dtype and shape of all tensors in files of full tensors, by the model's own names."""
    tensors: dict[str, Stored] = {}
    for unit in units:
        under = len(unit.under)
        is_own = contents.readable(unit.file)
        for tensor in contents.tensors(unit.file) if is_own else ():
            key = ".".join(tensor["path"][under:])
            if tensor["path"][:under] != unit.under or (unit.only is not None and key not in unit.only):
                continue
            stored = unit.prefix + key.removeprefix(unit.strip)
            tensors[own_names.get(stored, stored)] = (tensor["dtype"], tuple(tensor["shape"]))
    return tensors


def _beside(folders: Sequence[Folder]) -> dict[str, Path]:
    """Return the files in which quantisers describe their work, by name."""
    found: dict[str, Path] = {}
    for folder in folders[:1]:
        for name in QUANTISER_FILES:
            with contextlib.suppress(FastshardError, OSError):
                if (file := folder.file(name)) is not None:
                    found[name] = file
    return found


def _contents(files: Mapping[str, Path]) -> dict[str, Mapping[str, Any]]:
    """Read the contents of these files; unreadable ones are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, file in files.items():
        with contextlib.suppress(FastshardError, OSError):
            found[name] = safe_files.read_object(file, safe_files.MAX_CONFIG)
    return found
