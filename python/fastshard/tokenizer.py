"""A model's tokenizer, as far as a checkpoint has to agree with it: its files, its largest id, its special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _core, regular
from .discover import StrPath
from .errors import FastshardError

#: Files that hold a vocabulary, and of what kind; the one that readers prefer first.
#: source: transformers tokenization_utils_base.py and the tokenizers of its models
_VOCABULARIES = {
    "tokenizer.json": "tokenizers", "vocab.json": "ids", "vocab.txt": "lines", "tokenizer.model": "sentencepiece",
    "spiece.model": "sentencepiece", "sentencepiece.bpe.model": "sentencepiece",
}  # fmt: skip
#: Files of a tokenizer.
NAMES = (
    *_VOCABULARIES, "merges.txt", "tekken.json", "tiktoken.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
#: Where the special tokens are named.
_STATED = ("special_tokens_map.json", "tokenizer_config.json")
#: Ids of a model's config, and what the tokenizer calls the tokens.
_SPECIAL = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}
#: What ends a document for GPT-2's vocabulary and GPT-NeoX's, whose files name no special tokens.
#: source: gpt-neox megatron/tokenizer/tokenizer.py (eod of HFTokenizer and _GPT2BPETokenizer)
END_OF_DOCUMENT = "<|endoftext|>"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that was given or found."""

    #: Its files, by the names under which they are published.
    files: dict[str, Path]
    #: The largest id of its vocabulary; None where none of its files could be read for it.
    largest: int | None = None
    #: ``bos_token_id`` and the like, as far as its files tell.
    special: dict[str, int] | None = None
    #: Id of the token that ends a document in GPT-2's vocabulary and GPT-NeoX's.
    end_of_document: int | None = None

    @property
    def path(self) -> str:
        """The file that messages name."""
        return str(next(path for name in NAMES if (path := self.files.get(name)) is not None))


def find(given: StrPath | None, folders: Iterable[Path]) -> Tokenizer | None:
    """The tokenizer given, else that of the nearest folder that holds one.

    Args:
        given: a folder, or a file of a vocabulary.
        folders: where it is looked for, the nearest first.

    Raises:
        FastshardError: ``FS501`` if the one given is not there or is none, ``FS601`` if something else than a file has
            the name of one.
    """
    if given is not None:
        path = Path(given)
        if path.is_file():
            return _described({_name(path): path})
        if not path.is_dir():
            raise FastshardError.of("FS501", "no such file or directory", file=str(given))
        files = _files(path)
        if not files:
            raise FastshardError.of(
                "FS501",
                "the folder holds no tokenizer",
                file=str(given),
                expected=f"{', '.join(list(NAMES)[:4])} or the like",
                got="none",
                help="name the folder, or the file, that the tokenizer was saved to",
            )
        return _described(files)
    held = [files for folder in folders if (files := _files(folder))]
    whole = (files for files in held if files.keys() & _VOCABULARIES.keys())
    files = next(whole, held[0] if held else {})
    return _described(files) if files else None


def _files(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in NAMES if regular.is_file(folder / name)}


def _name(path: Path) -> str:
    """Under which name readers take a file of a vocabulary, by what it holds.

    Raises:
        FastshardError: ``FS501`` if it is none.
    """
    if path.name in NAMES:
        return path.name
    kinds = {
        ".json": ("tokenizer.json", "vocab.json"),
        ".txt": ("vocab.txt",),
        ".model": ("tokenizer.model",),
    }
    for name in kinds.get(path.suffix, ()):
        if (_vocabulary(path, _VOCABULARIES[name], []) or {}).get("largest") is not None:
            return name
    raise FastshardError.of(
        "FS501",
        "the file is no tokenizer's",
        file=str(path),
        expected="a tokenizer.json, a vocab.json or vocab.txt, or a model of SentencePiece",
        got="something else",
    )


def _described(files: dict[str, Path]) -> Tokenizer:
    named: dict[str, str] = {}
    added: dict[str, int] = {}
    for content in (_stated(files[name]) for name in _STATED if name in files):
        for key, word in _SPECIAL.items():
            token = content.get(word)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named[key] = token
        decoder = content.get("added_tokens_decoder")
        for number, token in decoder.items() if isinstance(decoder, dict) else ():
            if str(number).isdecimal() and len(str(number)) < 10 and isinstance(token, dict):
                added[str(token.get("content"))] = int(number)
    wanted = [*named.values(), END_OF_DOCUMENT]
    read = [(name, kind) for name, kind in _VOCABULARIES.items() if name in files][:1]
    read += [("added_tokens.json", "ids")] if read and "added_tokens.json" in files else []
    largest: list[int] = list(added.values()) if read else []
    ids: dict[str, int] = dict(added)
    for name, kind in read:
        found = _vocabulary(files[name], kind, wanted) or {}
        ids |= found.get("ids", {})
        if found.get("largest") is not None:
            largest.append(found["largest"])
    return Tokenizer(
        files,
        largest=max(largest, default=None),
        special={key: ids[token] for key, token in named.items() if token in ids},
        end_of_document=ids.get(END_OF_DOCUMENT),
    )


def _vocabulary(path: Path, kind: str, wanted: list[str]) -> dict[str, Any] | None:
    """What the core reads of a vocabulary; None where the file is none: a tokenizer goes along whatever it is."""
    try:
        found: dict[str, Any] = json.loads(_core.vocabulary(path, kind, wanted))
    except _core.CoreError:
        return None
    return found


def _stated(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(regular.read_text(path, regular.MAX_TEXT))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
