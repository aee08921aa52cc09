"""Suggestions for misspelt words."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable

#: Maximum number of known words to compare letter by letter.
_COMPARED = 256


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most similar to a misspelt one, if there is one."""
    import difflib

    others = [one for one in known if one != word]
    # Of a tensor name, the last two parts (module and parameter) say more than the rest of its letters.
    parts = word.rsplit(".", 2)
    if len(parts) == 3 and (same := [one for one in others if one.endswith(f".{parts[1]}.{parts[2]}")]):
        others = same
    if len(others) > _COMPARED:
        # A checkpoint has a million names: those that begin and end most like it are compared.
        others = heapq.nlargest(_COMPARED, others, key=lambda one: _ends_alike(word, one))
    # A name that is long differs in more letters before it is another one; of a short one half are one
    # letter.
    near = difflib.get_close_matches(word, others, n=1, cutoff=0.5 if len(word) <= 3 else 0.6)
    return near[0] if near else None


def _ends_alike(word: str, other: str) -> int:
    """Count the letters that two words have in common at both ends."""
    first = len(os.path.commonprefix((word, other)))  # noqa: RUF071 - letters are meant
    return first + len(os.path.commonprefix((word[first:][::-1], other[first:][::-1])))  # noqa: RUF071


def meant(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for a word that is similar to a known one, else an empty text."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""
