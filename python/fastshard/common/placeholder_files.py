"""Placeholders instead of files: a Git LFS pointer, a saved web page, an empty file. The core reports
placeholders for weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from . import safe_files
from .errors import Finding
from .listing import File, Listing
from .records import replace

__all__ = ["is_known", "near", "sifted"]

#: Names of indices, configs and tokenizer files, which readers open by name. Tests compare this list with
#: those readers.
_NAMES = (
    "config.json",
    "adapter_config.json",
    "layout.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_ENDS = (".index.json", ".tiktoken")


def is_known(name: str) -> bool:
    """Return True for the name of a text file that checkpoint readers look for."""
    return name in _NAMES or name.endswith(_ENDS)


def sifted(listing: Listing) -> tuple[Listing, dict[str, Finding]]:
    """Remove placeholders from a listing, and make a finding for each, by path.

    Weight files stay in the listing, because their readers report placeholders.
    """
    if listing.single:
        return listing, {}
    found: dict[str, Finding] = {}
    kept: list[File] = []
    for file in listing.files:
        path = listing.roots[file.root] / file.path
        is_other = safe_files.stand_in(path, file.path) if is_known(file.name) else None
        if is_other is None:
            kept.append(file)
        else:
            found.setdefault(file.path, is_other)
    return (replace(listing, files=kept), found) if found else (listing, found)


def near(found: dict[str, Finding], folders: Iterable[str]) -> list[Finding]:
    """Return the findings for files in the folders that were read and in their parents; other files are never
    read.

    Args:
        found: findings for such files, by path.
        folders: relative to a root.
    """
    places = set()
    for folder in folders:
        at = PurePosixPath(folder)
        places |= {"" if one == PurePosixPath() else one.as_posix() for one in (at, *at.parents)}
    # Trainers keep what they took from Hugging Face there.
    places |= {f"{folder}/huggingface".removeprefix("/") for folder in places}
    return [finding for path, finding in found.items() if path.rpartition("/")[0] in places]
