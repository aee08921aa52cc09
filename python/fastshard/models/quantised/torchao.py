"""torchao: subclasses of tensors, of which the header of a file says what they are made of. source: torchao 0.18 prototype/safetensors"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ...common import json_text
from ...common.errors import Finding

__all__ = ["is_of_torchao", "missing"]

#: The key under which a header lists what it describes.
_NAMES = "tensor_names"


def is_of_torchao(header: Any) -> bool:
    """True for the metadata of a safetensors file that describes tensors of torchao."""
    return isinstance(header, Mapping) and _NAMES in header and any(_parts(name, header) for name in header)


def missing(header: Mapping[str, object], names: Collection[str]) -> Iterator[Finding]:
    """The tensors that a header calls for and no file has."""
    for name in header:
        for part in _parts(name, header):
            if part not in names:
                yield Finding.of(
                    "FS102",
                    f"{name} is stored as a tensor of torchao, and a part of it is missing",
                    tensor=part,
                    help="copy the file that holds it from the original checkpoint",
                )


def _parts(name: str, header: Mapping[str, object]) -> list[str]:
    """The tensors in a file that one of torchao is made of."""
    text = header.get(name)
    said = json_text.object_in(text) if isinstance(text, str) and name != _NAMES else {}
    parts = said.get("_tensor_data_names")
    if not isinstance(parts, list):
        return []
    module, _, leaf = name.rpartition(".")
    return [f"{module}{'.' if module else ''}_{leaf}_{part}" for part in parts if isinstance(part, str)]
