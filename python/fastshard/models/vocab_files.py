"""Vocabulary files of a tokenizer: their largest id, and the ids of requested tokens."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from .. import _core
from ..common import json_text, safe_files
from ..common.errors import FastshardError

#: Maximum size of a vocabulary file in bytes. The largest ones have some tens of megabytes; longer files
#: would take minutes to read.
MAX_BYTES = 1 << 30
#: Maximum number of digits of an id.
_DIGITS = 9


def read(path: Path, kind: str, wanted: list[str]) -> dict[str, Any] | None:
    """Read ``largest`` and ``ids`` of a vocabulary; None if the file is not one.

    ``special`` is false if its special tokens are elsewhere. The tokenizer is copied in either case.

    Args:
        path: the file.
        kind: one of the core's, ``tiktoken``, ``tekken``, or ``model`` for a file of either SentencePiece
            or tiktoken.
        wanted: tokens whose ids are requested.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        if kind == "model":
            # To SentencePiece's reader a text is fields of other numbers, which it passes over.
            return _tiktoken(path, wanted) or _of_core(path, "sentencepiece", wanted)
        own = {"tiktoken": _tiktoken, "tekken": _tekken}.get(kind)
        return own(path, wanted) if own else _of_core(path, kind, wanted)
    except (OSError, FastshardError, _core.CoreError):
        return None


def _of_core(path: Path, kind: str, wanted: list[str]) -> dict[str, Any] | None:
    found = _core.vocabulary(path, kind, wanted)
    return found if found.get("largest") is not None else None


def _tiktoken(path: Path, wanted: list[str]) -> dict[str, Any] | None:
    """Read lines of ``BASE64 RANK``; the special tokens are in code or in tokenizer_config.json."""
    # source: tiktoken load.py (load_tiktoken_bpe)
    first = safe_files.read_bytes(path, 4096, whole=False).split(b"\n", 1)[0]
    if _ranked(first) is None:
        return None
    sought = {base64.b64encode(word.encode()): word for word in wanted}
    largest, ids = -1, {}
    for line in safe_files.read_bytes(path, safe_files.MAX_TEXT).splitlines():
        if not line:
            continue
        ranked = _ranked(line)
        if ranked is None:
            return None
        token, rank = ranked
        largest = max(largest, rank)
        if token in sought:
            ids[sought[token]] = rank
    return {"largest": largest, "ids": ids, "special": False}


def _ranked(line: bytes) -> tuple[bytes, int] | None:
    token, _, rank = line.strip().partition(b" ")
    if not rank.isdigit() or len(rank) > _DIGITS:
        return None
    try:
        base64.b64decode(token, validate=True)
    except (binascii.Error, ValueError):
        return None
    return token, int(rank)


def _tekken(path: Path, wanted: list[str]) -> dict[str, Any] | None:
    """Read Mistral's tekken.json: special tokens, then as many list entries as the config states."""
    # source: mistral-common tokens/tokenizers/tekken.py (Tekkenizer)
    # A token is kept as its rank: a list of 150 000 objects would take a hundred megabytes.
    document = json_text.object_in(
        safe_files.read_bytes(path, safe_files.MAX_TEXT),
        lambda one: one.get("rank") if "token_bytes" in one else one,
    )
    config, vocab = document.get("config"), document.get("vocab")
    if not isinstance(config, dict) or not isinstance(vocab, list) or not all(_is_id(rank) for rank in vocab):
        return None
    named = document.get("special_tokens")
    named = named if isinstance(named, list) else []
    named = [one for one in named if isinstance(one, dict) and _is_id(one.get("rank"))]
    special = config.get("default_num_special_tokens", len(named))
    if not _is_id(special):
        return None
    largest = max([special - 1, *(special + rank for rank in vocab), *(one["rank"] for one in named)])
    size = config.get("default_vocab_size")
    if isinstance(size, int) and _is_id(size) and size > 0:
        largest = min(largest, size - 1)
    if largest < 0:
        return None
    ids = {one["token_str"]: one["rank"] for one in named if one.get("token_str") in wanted}
    return {"largest": largest, "ids": ids}


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_DIGITS
