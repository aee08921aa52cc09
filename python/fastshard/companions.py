"""Files that go along with a model: its config, its tokenizer, code of its own; and where they are looked for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import _core, regular, tokenizer
from .discover import Listing, refuse_unprintable
from .errors import FastshardError, Finding

#: Besides the tokenizer's. source: transformers utils/__init__.py, processing_utils.py
_OTHERS = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
#: Where trainers keep what they took from Hugging Face. source: verl utils/checkpoint/fsdp_checkpoint_manager.py
_SUBFOLDER = "huggingface"
#: Where something was loaded from. source: transformers configuration_utils.py, tokenization_utils_base.py
_LOADED_FROM = ("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file")
#: Code at most that a model brings along.
_MAX_CODE = 64


def places(listing: Listing, folder: str, *, above: bool = True) -> list[Path]:
    """Folders in which a model's config and tokenizer are looked for, the nearest first: that of its tensors, those
    above it in the checkpoint, the one above the checkpoint, and ``huggingface/`` in each.

    Args:
        listing: what the roots hold.
        folder: that of the tensors, relative to a root.
        above: whether to look above the checkpoint too.
    """
    if listing.single:
        return []
    elsewhere = any(_core.is_elsewhere(root) for root in listing.roots)
    levels: list[list[Path]] = []
    for root in listing.roots:
        at = folder
        chain = [root / at if at else root]
        while at:
            at = at.rpartition("/")[0]
            chain.append(root / at if at else root)
        # What lies there on other hosts nobody has said.
        if above and not elsewhere:
            chain.append(root.absolute().parent)
        for i, one in enumerate(chain):
            levels.extend([] for _ in range(i + 1 - len(levels)))
            levels[i].append(one)
    found = [place for level in levels for one in level for place in (one, one / _SUBFOLDER)]
    return list(dict.fromkeys(found))


def first(folders: Iterable[Path], name: str) -> Path | None:
    """The file of this name in the first folder that has it.

    Raises:
        FastshardError: ``FS601`` if something else has the name.
    """
    return next((folder / name for folder in folders if regular.is_file(folder / name)), None)


def beside(folders: list[Path], config: Path | None) -> dict[str, Path]:
    """Files that go along besides the tokenizer's and config.json: by name.

    Args:
        folders: where they are looked for, the nearest first.
        config: the model's config.json, beside which code of its own lies.
    """
    found = {name: path for name in _OTHERS if (path := first(folders, name)) is not None}
    return found | ({} if config is None else _code(config))


def differing(listing: Listing, paths: Iterable[Path]) -> list[Finding]:
    """What parts of a checkpoint on several hosts' disks do not agree on: the files at the same place in other roots must
    hold the same. Of parts that lie on other hosts' disks those who have them say it.

    Args:
        listing: what the roots hold.
        paths: files that were taken.
    """
    findings = []
    elsewhere = {root for root in listing.roots if _core.is_elsewhere(root)}
    for path in paths:
        taken = next((root for root in listing.roots if path.is_relative_to(root)), None)
        if taken is None:
            continue
        inside = path.relative_to(taken)
        for root in listing.roots:
            other = root / inside
            if other == path or root in elsewhere or not regular.is_file(other) or _same(path, other):
                continue
            findings.append(
                Finding.of(
                    "FS110",
                    f"two parts of the checkpoint have a {path.name} each, and they differ",
                    file=str(other),
                    expected=f"what {path} holds",
                    got="something else",
                    help=_right_one(path.name),
                )
            )
    return findings


def _right_one(name: str) -> str:
    if name == "config.json":
        return "give the right one with --config"
    return "give the right one with --tokenizer" if tokenizer.is_of(name) else "take the wrong one away"


def _same(one: Path, other: Path) -> bool:
    held = [regular.read_bytes(path, regular.MAX_TEXT) for path in (one, other)]
    if held[0] == held[1]:
        return True
    if one.suffix != ".json":
        return False
    try:
        first, second = (json.loads(content) for content in held)
    except (ValueError, RecursionError):
        return False
    return bool(_without_paths(first) == _without_paths(second))


def _without_paths(value: Any) -> Any:
    """A config without what tells where it was loaded from, which says nothing of the model."""
    if isinstance(value, dict):
        return {key: _without_paths(part) for key, part in value.items() if key not in _LOADED_FROM}
    return [_without_paths(part) for part in value] if isinstance(value, list) else value


def _code(config: Path) -> dict[str, Path]:
    """Modules that ``auto_map`` of a config.json needs: those beside it, since they import each other."""
    try:
        content = json.loads(regular.read_text(config, regular.MAX_CONFIG))
    except ValueError:
        return {}
    if not isinstance(content, dict) or not isinstance(content.get("auto_map"), dict):
        return {}
    paths = sorted(path for path in config.parent.glob("*.py") if regular.is_file(path))
    if len(paths) > _MAX_CODE:
        raise FastshardError.of(
            "FS514",
            "a model with code of its own (auto_map) whose folder holds other programs too",
            file=str(config.parent),
            expected=f"{_MAX_CODE} modules at most",
            got=str(len(paths)),
            help="give a folder that holds only the model's with --config",
        )
    for path in paths:
        refuse_unprintable(path.name, path)
    return {path.name: path for path in paths}
