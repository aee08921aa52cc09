"""Colour in the terminal: five styles, which are never the only carrier of a meaning."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from ..common.regex import compile_when_used

TYPE_CHECKING = False  # typing itself takes longer than the rest
if TYPE_CHECKING:
    from typing import TextIO

WHEN = ("auto", "always", "never")
#: ANSI codes of each style.
_CODES = {"good": "32", "bad": "1;31", "warn": "33", "note": "34", "bold": "1", "dim": "2"}

#: Headers of tables, and headings of help.
_HEADER = compile_when_used(r"^(?:[A-Z][A-Z/% -]{8,}(?:NaN[A-Z/% -]*)?)$", re.MULTILINE)
_HEADING = compile_when_used(
    r"^(?:[Uu]sage:|Examples|Exit codes|[A-Z][a-z]+(?: [a-z]+)*(?=\n  )|[a-z ]+:$)", re.MULTILINE
)

#: Applies a style to a text.
Paint = Callable[[str, str], str]


def plain(text: str, style: str) -> str:
    """Return the text without its style."""
    return text


def painter(stream: TextIO, when: str = "auto") -> Paint:
    """Return a function that styles text for a stream: with ANSI codes, or not at all.

    ``when`` takes precedence over NO_COLOR, and NO_COLOR over FORCE_COLOR. Without them, only terminals get
    colour.
    """
    if when == "auto":
        if os.environ.get("NO_COLOR"):
            return plain
        is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        when = "always" if os.environ.get("FORCE_COLOR") or is_terminal else "never"
    return _painted if when == "always" else plain


def headed(text: str, paint: Paint, *, is_help: bool = False) -> str:
    """Make the headers of tables in a text bold, or the headings of a help page."""
    pattern = _HEADING if is_help else _HEADER
    return text if paint is plain else pattern.sub(lambda found: paint(found[0], "bold"), text)


def _painted(text: str, style: str) -> str:
    return f"\033[{_CODES[style]}m{text}\033[0m" if text else text
