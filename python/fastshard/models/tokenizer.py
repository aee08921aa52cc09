"""A model's tokenizer, as far as a checkpoint must match it: its files, largest id and special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..common import codes, json_text, safe_files
from ..common.errors import FastshardError, error_for
from ..common.listing import Folder, is_utf8, refuse_unprintable
from ..common.options import StrPath
from ..common.records import dataclass
from . import vocab_files

#: Vocabulary files and their kinds, in the order in which readers prefer them.
#: source: transformers tokenization_utils_base.py and the tokenizers of its models
_VOCABULARIES = {
    "tokenizer.json": "tokenizers",
    "vocab.json": "ids",
    "vocab.txt": "lines",
    "tokenizer.model": "model",
    "spiece.model": "sentencepiece",
    "sentencepiece.bpe.model": "sentencepiece",
    "tiktoken.model": "tiktoken",
    "tekken.json": "tekken",
}
#: Suffix of other tiktoken files, e.g. qwen.tiktoken.
_TIKTOKEN = ".tiktoken"
#: Files of a tokenizer.
NAMES = (
    *_VOCABULARIES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
#: Files that name the special tokens.
_TOKEN_FILES = ("special_tokens_map.json", "tokenizer_config.json")
#: Token ids in a model's config, and the tokenizer's names for the tokens.
_SPECIAL = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}
#: The end-of-document token in the vocabularies of GPT-2 and GPT-NeoX, whose files name no special tokens.
#: source: gpt-neox megatron/tokenizer/tokenizer.py (eod of HFTokenizer and _GPT2BPETokenizer)
END_OF_DOCUMENT = "<|endoftext|>"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that was given or found."""

    #: Its files, by the names under which they are written.
    files: dict[str, Path]
    #: The largest id of its vocabulary; None if none of its files could be read for it.
    largest: int | None = None
    #: The file that should contain the ids and could not be read; ``largest`` then includes only added
    #: tokens.
    unread: Path | None = None
    #: The vocabulary file, if no file states its special tokens because they are defined in code.
    partial: Path | None = None
    #: ``bos_token_id`` and other special ids, as far as its files state them.
    special: dict[str, int] | None = None
    #: Id of the end-of-document token in the vocabularies of GPT-2 and GPT-NeoX.
    end_of_document: int | None = None

    @property
    def path(self) -> str:
        """The file to name in messages."""
        return str(next(self.files[name] for name in (*NAMES, *self.files) if name in self.files))


def find(given: StrPath | None, folders: Iterable[Folder]) -> Tokenizer | None:
    """Find the given tokenizer, or the one in the nearest folder that has one.

    Args:
        given: a folder, or a vocabulary file.
        folders: folders to search, the nearest first.

    Raises:
        FastshardError: ``FS501`` if the given one does not exist or is not a tokenizer, ``FS601`` if
            something other than a file has the name of one, ``FS603`` for a link that leaves its folder.
    """
    if given is not None:
        path = Path(given)
        if path.is_file():
            if (other := safe_files.stand_in(path)) is not None:
                raise error_for([other])
            return _described({_name(path): path})
        if not path.is_dir():
            raise FastshardError.of(codes.NO_SUCH_PATH, "no such file or directory", file=str(given))
        files = _files(Folder.named(path))
        if not files:
            raise FastshardError.of(
                codes.NO_SUCH_PATH,
                "the directory holds no tokenizer",
                file=str(given),
                expected=f"{', '.join(list(NAMES)[:4])} or similar",
                got="none",
                help="name the directory or file that the tokenizer was saved to",
            )
        return _described(files)
    first: dict[str, Path] = {}
    for folder in folders:
        files = _files(folder)
        if any(_kind(name) for name in files):
            # Folders that are further away have no say.
            return _described(files)
        first = first or files
    return _described(first) if first else None


def named_folders(given: StrPath | None) -> list[Folder]:
    """Return the given tokenizer folder as a list; empty if a file was given."""
    return [Folder.named(Path(given))] if given is not None and Path(given).is_dir() else []


def _files(folder: Folder) -> dict[str, Path]:
    # What is no text cannot go along, and may be anybody's: this folder may be the one above the checkpoint.
    further = (name for name in folder.names() if name.endswith(_TIKTOKEN) and is_utf8(name))
    # Where a folder cannot be listed the names that are known may be there all the same.
    names = dict.fromkeys((*NAMES, *further))
    return {name: path for name in names if (path := folder.file(name)) is not None}


def is_of(name: str) -> bool:
    """Return True if a tokenizer file can have this name."""
    return name in NAMES or name.endswith(_TIKTOKEN)


def _kind(name: str) -> str | None:
    """Return the kind of a vocabulary file, from its name; None for other files."""
    return "tiktoken" if name.endswith(_TIKTOKEN) else _VOCABULARIES.get(name)


def _name(path: Path) -> str:
    """Return the name that readers expect for a vocabulary file, from its content.

    Raises:
        FastshardError: ``FS501`` if it is not a vocabulary.
    """
    if path.name in NAMES:
        return path.name
    if path.name.endswith(_TIKTOKEN):
        refuse_unprintable(path.name, path)
        return path.name
    kinds = {
        ".json": ("tokenizer.json", "vocab.json", "tekken.json"),
        ".txt": ("vocab.txt",),
        ".model": ("tokenizer.model",),
    }
    for name in kinds.get(path.suffix, ()):
        if vocab_files.read(path, _VOCABULARIES[name], []) is not None:
            return name
    raise FastshardError.of(
        codes.NO_SUCH_PATH,
        "the file is not a tokenizer file",
        file=str(path),
        expected="a tokenizer.json, a vocab.json or vocab.txt, or a model of SentencePiece or tiktoken",
        got="another file"
        if path.stat().st_size <= vocab_files.MAX_BYTES
        else f"{path.stat().st_size} bytes, more than fastshard reads",
    )


def _described(files: dict[str, Path]) -> Tokenizer:
    named: dict[str, str] = {}
    added: dict[str, int] = {}
    for content in (_read_object(files[name]) for name in _TOKEN_FILES if name in files):
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
    largest: list[int] = list(added.values())
    ids: dict[str, int] = dict(added)
    vocabularies = [name for name in _VOCABULARIES if name in files] + [
        n for n in files if n.endswith(_TIKTOKEN)
    ]
    # The first that can be read: those after it say the same in another form.
    name, known = next(
        ((n, f) for n in vocabularies if (f := vocab_files.read(files[n], _kind(n) or "", wanted))),
        ("", None),
    )
    if "added_tokens.json" in files:
        more = vocab_files.read(files["added_tokens.json"], "ids", wanted)
    else:
        more = None
    partial = known is not None and known.get("special") is False and not added and more is None
    for found in (known, more):
        if found is not None:
            ids |= found["ids"]
            largest.append(found["largest"])
    return Tokenizer(
        files,
        largest=max(largest, default=None),
        unread=None if known else next((files[n] for n in (*vocabularies, *NAMES) if n in files), None),
        partial=files[name] if partial else None,
        special={key: ids[token] for key, token in named.items() if token in ids},
        end_of_document=ids.get(END_OF_DOCUMENT),
    )


def _read_object(path: Path) -> dict[str, Any]:
    return json_text.object_in(safe_files.read_text(path, safe_files.MAX_TEXT))
