"""Parsing of TOML of unknown origin."""

from __future__ import annotations

import re
import sys
from typing import Any

from .regex import compile_when_used

#: Levels of lists and tables at most, and parts of a key.
_MOST = 100
#: Strings, comments, and the signs that open, close and divide; a quote alone is a string without an end.
_SIGN = compile_when_used(
    r'"""(?:[^\\]|\\.)*?"""|' r"'''.*?'''|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'|#[^\n]*|[\[\]{}.=,\n\"']",
    re.DOTALL,
)


def load(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: if the text is damaged, is too deep, or has a key of too many parts, which Python's own
            reader does not finish reading.
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
