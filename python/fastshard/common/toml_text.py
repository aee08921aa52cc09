"""Parsing of TOML of unknown origin."""

from __future__ import annotations

import re
import sys
from typing import Any

from .regex import compile_when_used

#: Maximum nesting of lists and tables, and maximum number of parts of a key.
_MOST = 100
#: Strings, comments, and the characters that open, close and separate; a lone quote is an unterminated
#: string.
_SIGN = compile_when_used(
    r'"""(?:[^\\]|\\.)*?"""|' r"'''.*?'''|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'|#[^\n]*|[\[\]{}.=,\n\"']",
    re.DOTALL,
)


def load(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: if the text is damaged, nested too deeply, or has a key with too many parts, on which
            Python's own parser would hang.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    level = parts = 0
    for match in _SIGN.finditer(text):
        sign = match[0]
        if sign in "\"'":
            # Its own reader says what is wrong, and comes no further.
            break
        if sign in "[{":
            level += 1
        elif sign in "]}":
            level = max(level - 1, 0)
        parts = parts + 1 if sign == "." else 0 if sign in "[]{}=,\n" else parts
        if level > _MOST:
            raise ValueError(f"values are nested more than {_MOST} levels deep")
        if parts > _MOST:
            raise ValueError(f"a key of more than {_MOST} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("values are nested too deep") from None
