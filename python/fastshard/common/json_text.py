"""JSON: what a text that anybody may have made holds, and texts in the forms that are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .errors import FastshardError


def value(
    text: str | bytes,
    file: str,
    said: str = "not valid JSON",
    *,
    code: str = "FS211",
    help: str | None = None,
    hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value that a file's text holds; ``hook`` makes an object of its pairs.

    Raises:
        FastshardError: ``code``, with what is ``said`` of the file, if the text is damaged or too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        again = f"copy {file.rpartition('/')[2]} again from the original checkpoint"
        raise FastshardError.of(code, f"{said}: {error}", file=file, help=help or again) from None


def read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of its pairs.

    Raises:
        ValueError: if a key stands there twice, with different values: JSON's own readers take the last.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"the key {key!r} stands there twice, with different values")
        found[key] = value
    return found


def object_in(
    text: str | bytes | None, hook: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """The object that a text holds; an empty one for a text that holds none, where that is no error."""
    try:
        content = None if text is None else json.loads(text, object_hook=hook)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def indented(document: Any, by: int = 1) -> str:
    """The text of a file that people read too."""
    return json.dumps(document, indent=by) + "\n"


def compact(document: Any) -> str:
    """A text without blanks, for programs alone."""
    return json.dumps(document, separators=(",", ":"))


def canonical(document: Any) -> str:
    """A text that is the same for equal values: what digests are made of, and comparisons."""
    return json.dumps(document, sort_keys=True)
