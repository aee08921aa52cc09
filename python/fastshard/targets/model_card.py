"""The model card of a Hugging Face directory: a draft, from the facts of the conversion."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common import safe_files
from ..common.config_text import parse_yaml
from ..common.errors import FastshardError
from ..common.regex import compile_when_used
from ..layouts.declaration import Source
from ..models import sidecar_files
from .base import Bound

__all__ = ["CARD_NAME", "drafted", "is_copied"]

#: Where the Hub looks for the card. source: huggingface.co/docs/hub/model-cards
CARD_NAME = "README.md"
#: Bytes of the largest card whose metadata is read.
_MAX_CARD = 1 << 20
_METADATA = compile_when_used(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_PART = "[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
#: A repository on the Hub, as far as a name shows it: a local folder may be called the same.
#: source: huggingface_hub utils/_validators.py (validate_repo_id)
_REPOSITORY = compile_when_used(rf"(?!.*(?:--|\.\.|\.git$)){_PART}/{_PART}")
#: source: huggingface.co/docs/hub/repositories-licenses
_LICENSE = compile_when_used(r"[a-z0-9.+-]{1,64}")
_WORD = compile_when_used(r"[A-Za-z0-9_]{1,96}")
#: The class that loads an architecture, by the end of its name.
#: source: transformers models/auto/modeling_auto.py
_LOADERS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
}


def is_copied(source: Source) -> bool:
    """Return True if the checkpoint has a model card that is copied to the result.

    Like the license, it is copied only from the folder of config.json.
    """
    config = source.model.config_file or sidecar_files.first(source.files.folders, "config.json")
    if config is None or not source.model.hf_names:
        return False
    return CARD_NAME in sidecar_files.documents(source.files.folders, config)


def drafted(source: Source, config: Mapping[str, Any], bound: Bound, *, is_described: bool) -> str:
    """Draft a model card, which is the same bytes for the same checkpoint: no date, host or path.

    Args:
        source: the declaration of the checkpoint.
        config: the result's config.json.
        bound: the result's tensors.
        is_described: True if a layout table describes the result's tensors.
    """
    import yaml

    card = _find_card(source)
    front = {} if card is None else _read_metadata(card)
    bases, bases_from = _bases(front.get("base_model")), "the checkpoint's README.md"
    metadata = {
        "license": _license(front),
        "base_model": bases[0] if len(bases) == 1 else bases,
        "library_name": "transformers",
    }
    if not bases:
        # It may be a local folder, which the Hub must not take for a repository.
        bases, bases_from = _bases(config.get("_name_or_path")), "`_name_or_path` in config.json"
    name = _architecture(config)
    rows = {"Architecture": f"`{name}`" if name else None}
    rows["Parameters"] = f"{sum(math.prod(tensor.shape) for tensor in bound.weights.values()):,}"
    rows["Dtype"] = bound.dtype
    rows["Base model"] = f"{', '.join(f'`{base}`' for base in bases)}, from {bases_from}" if bases else None
    table = [f"| {label} | {value} |" for label, value in rows.items() if value]
    not_copied = "" if card is None else " The checkpoint's own README.md was not copied."
    lines = [
        "---",
        yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False) + "---",
        f"# {name or 'Model'}",
        "",
        "<!-- fastshard drafted this card. State what the model was trained on, what it is for, and its "
        f"license.{not_copied} -->",
        "",
        "| | |",
        "|---|---|",
        *table,
        "",
        *_usage(config, name),
        *_verified(source, bound, is_described),
    ]
    return "\n".join(lines)


def _find_card(source: Source) -> Path | None:
    """Find the checkpoint's own card, which may be next to weights only."""
    own = [folder for folder in source.files.folders if folder.beside is None or folder.beside.is_file()]
    return sidecar_files.first(own, CARD_NAME)


def _read_metadata(card: Path) -> Mapping[str, Any]:
    """Read the metadata at the beginning of a card; it is empty if the card has none that can be read."""
    try:
        found = _METADATA.match(safe_files.read_text(card, _MAX_CARD))
        content = parse_yaml(found[1]) if found else None
    except (FastshardError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _license(front: Mapping[str, Any]) -> str | None:
    """Return the identifier of the license that the card states, if any."""
    one = front.get("license")
    return one if isinstance(one, str) and _LICENSE.fullmatch(one) else None


def _bases(value: Any) -> list[str]:
    """Return the repositories that are stated as origin; none if one of them is no repository."""
    named = value if isinstance(value, list) else [value]
    bases = [base for base in named if isinstance(base, str) and _REPOSITORY.fullmatch(base)]
    return bases if len(bases) == len(named) else []


def _architecture(config: Mapping[str, Any]) -> str | None:
    """Return the transformers class that the config names."""
    named = config.get("architectures")
    one = named[0] if isinstance(named, list) and named else None
    return one if isinstance(one, str) and _WORD.fullmatch(one) else None


def _usage(config: Mapping[str, Any], name: str | None) -> list[str]:
    """Return the lines that show how to load the model; none for a class that transformers may not have."""
    loader = next((loader for end, loader in _LOADERS.items() if (name or "").endswith(end)), None)
    # With auto_map, the class is in the model's own code.
    if loader is None or "auto_map" in config:
        return []
    return [
        "## Usage",
        "",
        "```python",
        f"from transformers import {loader}",
        "",
        f'model = {loader}.from_pretrained(".")  # this directory, or its id on the Hub',
        "```",
        "",
    ]


def _verified(source: Source, bound: Bound, is_described: bool) -> list[str]:
    """Return the lines that state what was checked, and the command that checks it again."""
    return [
        "## Verified",
        "",
        f"fastshard converted {_origin(source)} to {len(bound.tensors):,} tensors, and its checks found no "
        "error:",
        "",
        "- Each tensor that `config.json` calls for is present and has the right shape."
        if is_described
        else "- Names and shapes are those of the checkpoint. No layout table shows that they fit the model.",
        "- `fastshard.manifest.json` records the BLAKE3 hash of each tensor, and the warnings that were "
        "accepted.",
        "",
        "This command compares all files of this directory with their hashes:",
        "",
        "```sh",
        "fastshard verify .",
        "```",
        "",
    ]


def _origin(source: Source) -> str:
    """Describe the framework that wrote the checkpoint, and its number of ranks."""
    degrees = {**source.binding.other_degrees, **source.binding.degrees}
    ranks = [
        f"{name} {degree}" for name, degree in sorted(degrees.items()) if degree > 1 and _WORD.fullmatch(name)
    ]
    article = "an" if source.framework[:1] in "AEIOU" else "a"
    return f"{article} {source.framework} checkpoint" + (f" ({', '.join(ranks)})" if ranks else "")
