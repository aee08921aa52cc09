"""The model card of a Hugging Face directory: a draft, from the facts of the conversion, if the checkpoint
has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..common.regex import compile_when_used
from ..layouts.declaration import Source
from ..models import sidecar_files
from .base import Bound

__all__ = ["CARD_NAME", "drafted", "has_card"]

#: Where the Hub looks for the card. source: huggingface.co/docs/hub/model-cards
CARD_NAME = "README.md"
#: A repository on the Hub, as far as a name shows it: a local folder may be called the same.
_REPOSITORY = compile_when_used(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_WORD = compile_when_used(r"\w{1,96}")


def has_card(source: Source) -> bool:
    """Return True if the checkpoint has a model card, which may lie next to weights only."""
    own = [folder for folder in source.files.folders if folder.beside is None or folder.beside.is_file()]
    return sidecar_files.first(own, CARD_NAME) is not None


def drafted(source: Source, config: Mapping[str, Any], bound: Bound) -> str:
    """Draft a model card, which is the same bytes for the same checkpoint: no date, host or path.

    Args:
        source: the declaration of the checkpoint.
        config: the result's config.json.
        bound: the result's tensors.
    """
    name = _architecture(config)
    rows = {"Architecture": f"`{name}`" if name else None}
    rows["Parameters"] = f"{sum(math.prod(tensor.shape) for tensor in bound.weights.values()):,}"
    rows["Dtype"] = bound.dtype
    rows["Converted from"] = _origin(source)
    rows["Base model"] = _base(config)
    table = [f"| {label} | {value} |" for label, value in rows.items() if value]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "---",
            f"# {name or 'Model'}",
            "",
            "<!-- fastshard drafted this card. State what the model was trained on, what it is for, and its "
            "license. -->",
            "",
            "| | |",
            "|---|---|",
            *table,
            "",
            "`fastshard verify .` checks every file of this directory against `fastshard.manifest.json`.",
            "",
        ]
    )


def _architecture(config: Mapping[str, Any]) -> str | None:
    """Return the transformers class that the config names."""
    named = config.get("architectures")
    one = named[0] if isinstance(named, list) and named else None
    return one if isinstance(one, str) and _WORD.fullmatch(one) else None


def _origin(source: Source) -> str:
    """Describe the framework that wrote the checkpoint, and its number of ranks."""
    degrees = {**source.binding.other_degrees, **source.binding.degrees}
    ranks = [
        f"{name} {degree}" for name, degree in sorted(degrees.items()) if degree > 1 and _WORD.fullmatch(name)
    ]
    article = "an" if source.framework[:1] in "AEIOU" else "a"
    return f"{article} {source.framework} checkpoint" + (f" ({', '.join(ranks)})" if ranks else "")


def _base(config: Mapping[str, Any]) -> str | None:
    """Return the repository that the config states as its origin, if any."""
    path = config.get("_name_or_path")
    if not isinstance(path, str) or not _REPOSITORY.fullmatch(path):
        return None
    return f"`{path}`, from `_name_or_path` in config.json"
