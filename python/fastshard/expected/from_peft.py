"""The tensors that an adapter's config promises, listed by the installed peft and transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from ..common import codes
from ..common.errors import FastshardError
from ..common.formatting import printable
from ..common.records import dataclass
from . import transformers_process
from .from_transformers import MEMORY, TIMEOUT, class_name, cleaned, installed_version

__all__ = ["AdapterTensors", "list_tensors"]

#: Keys that name code or initial values, and that do not affect which modules are adapted.
_NO_TENSORS = {
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "init_lora_weights",
    "runtime_config",
}


@dataclass(frozen=True)
class AdapterTensors:
    """Tensors that peft saves for an adapter, and those that a load of the stored ones would miss."""

    #: The library that lists them, with its version.
    by: str
    #: The tensors that peft saves for this adapter, by its names.
    saved: Sequence[str]
    #: Tensors among these that are missing after a load of the stored ones, by the names in memory; None if
    #: peft cannot load them.
    missing: Sequence[str] | None


def list_tensors(
    base: Mapping[str, Any], adapter: Mapping[str, Any], stored: Mapping[str, Sequence[int]], file: str
) -> AdapterTensors:
    """List the tensors that peft saves for an adapter, and those that are missing from the stored ones.

    The function builds the base's class on the ``meta`` device, like
    :func:`.from_transformers.expected_tensors`.

    Args:
        base: content of the base's config.json.
        adapter: content of the adapter_config.json.
        stored: shapes of the adapter's tensors, by their stored names.
        file: name of the adapter's config in messages.

    Raises:
        FastshardError: ``FS514`` if peft or transformers is not installed, or cannot build the adapter.
    """
    installed_version(file)
    try:
        version = metadata.version("peft")
    except metadata.PackageNotFoundError:
        raise FastshardError.of(
            codes.UNSUPPORTED, "peft is not installed", file=file, run=["pip install peft"]
        ) from None
    question = {
        "config": cleaned(base),
        "class": class_name(base),
        "adapter": {key: value for key, value in adapter.items() if key not in _NO_TENSORS},
        "adapter_tensors": {name: list(shape) for name, shape in stored.items()},
    }
    answer = transformers_process.answer_of(question, TIMEOUT, MEMORY)
    if "error" in answer:
        why = printable(str(answer["error"])[:300])
        raise FastshardError.of(
            codes.UNSUPPORTED, f"peft {version} cannot build this adapter: {why}", file=file
        )
    return AdapterTensors(f"peft {version}", answer["saved"], answer["missing"])
