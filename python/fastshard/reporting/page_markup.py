"""Texts and figures of a report's page as markup."""

from __future__ import annotations

from typing import Any

from ..common.formatting import printable
from ..common.records import dataclass

#: Maximum number of characters of a text to show, from both ends.
CLIP = 400


#: Maximum number of bytes of the page for tensors that the script shows.
MOST_DATA = 1_200_000


@dataclass(frozen=True)
class Limits:
    """The maximum sizes of long parts of the page; the rest is counted."""

    findings: int = 40
    families: int = 300
    problems: int = 100
    changes: int = 200
    bands: int = 1 << 20
    data: int = MOST_DATA
    #: Maximum number of tensors that are rows even without the script.
    listed: int = 1000


def markup(text: str) -> Any:
    """Marks a text as HTML that needs no escaping."""
    import markupsafe

    return markupsafe.Markup(text)


def clipped(text: str, limit: int = CLIP) -> str:
    """Cut the middle out of a text longer than ``limit`` characters, and escape unprintable characters."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} … {text[-limit // 3 :]}"
    return printable(text)


def escaped(text: str) -> str:
    """Escapes a text for HTML."""
    from html import escape

    return escape(text)


def figure_text(x: float | int | None) -> str:
    """Format a figure; ``-`` for none."""
    return "-" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.4g}"
