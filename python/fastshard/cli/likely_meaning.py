"""The probable meaning of a command line that cannot be parsed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence

#: Verbs of other tools, with the corresponding verb of fastshard.
_VERBS: Mapping[str, str] = {
    "check": "verify",
    "validate": "verify",
    "test": "verify",
    "doctor": "verify",
    "lint": "verify",
    "status": "inspect",
    "info": "inspect",
    "show": "inspect",
    "describe": "inspect",
    "list": "ls",
    "dump": "ls",
    "tensors": "ls",
    "compare": "diff",
    "repair": "find",
    "fix": "find",
    "recover": "find",
    "export": "convert",
    "reshard": "convert",
    "translate": "convert",
    "combine": "merge",
    "join": "merge",
    "shard": "split",
    "checksum": "manifest",
    "hash": "manifest",
    "sign": "attest",
    "rm": "clean",
    "gc": "clean",
    "where": "trace",
    "why": "explain",
    "masters": "master-weights",
    "probe": "check-storage",
    "piece": "copy-local",
    "run-part": "make-part",
}
#: Flags of other tools for the destination.
_OUT_FLAGS = ("-o", "--out", "--output", "--output-dir", "--out-dir", "--dest")


def find_verb(word: str, verbs: Collection[str]) -> str | None:
    """Return the verb that corresponds to another tool's verb."""
    verb = _VERBS.get(word.lower())
    return verb if verb in verbs else None


def is_path(word: str) -> bool:
    """Return True for a word that denotes a checkpoint: an existing path, or an address."""
    return os.path.exists(word) or "://" in word  # noqa: PTH110 - of all commands only this needs it


def with_verb(verb: str, argv: Sequence[str], *, replaces: bool) -> str:
    """Return the command line with a verb, which replaces or precedes the first word."""
    return shlex.join(["fastshard", verb, *argv[1 if replaces else 0 :]])


def with_out_last(argv: Sequence[str]) -> str | None:
    """Return a command line with the destination as its last path; None if no flag states one."""
    words, out = [], None
    rest = iter(argv)
    for word in rest:
        flag, is_joined, value = word.partition("=")
        if flag not in _OUT_FLAGS:
            words.append(word)
        elif out is not None:
            return None
        else:
            out = value if is_joined else next(rest, None)
    return None if out is None or out.startswith("-") else shlex.join(["fastshard", *words, out])
