"""Parsing of JSON of unknown origin, and formatting of JSON for files, programs and digests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from . import codes
from .errors import FastshardError

#: Maximum number of digits of an integer; a longer one exceeds every float too. Tokenizers write 10**30 for
#: "no limit".
_MOST_DIGITS = 300
#: Maximum nesting of objects and lists; code that traverses them uses a stack frame or two for each level.
MOST_LEVELS = 100


class _TooLarge(NamedTuple):
    """A number with too many digits to read."""

    digits: int


def load(text: str | bytes, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON of unknown origin; ``hook`` builds an object from its key-value pairs.

    Raises:
        ValueError: if the text is damaged or too deep, or if an integer has too many digits (the message
            names its key).
    """
    large: list[_TooLarge] = []

    def read_number(digits: str) -> int | _TooLarge:
        if len(digits) <= _MOST_DIGITS:
            return int(digits)
        large.append(_TooLarge(len(digits)))
        return large[-1]

    try:
        found = json.loads(text, object_pairs_hook=hook, parse_int=read_number)
    except RecursionError:
        raise ValueError("values are nested too deep") from None
    check_levels(found)
    if large:
        raise ValueError(f"{_find_key(found, large[0]) or 'a number'}: a number of {large[0].digits} digits")
    return found


def check_levels(content: Any) -> None:
    """Refuse JSON content that is nested deeper than any config.

    Raises:
        ValueError: if objects and lists are nested in more than 100 levels.
    """
    level = [content]
    for _ in range(MOST_LEVELS + 1):
        level = [one for one in level if isinstance(one, (dict, list))]
        if not level:
            return
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    raise ValueError(f"values are nested more than {MOST_LEVELS} levels deep")


def _find_key(content: Any, wanted: object) -> str | None:
    """Return the keys that lead to a value, joined by dots."""
    inner: Iterable[tuple[object, Any]] = ()
    if isinstance(content, dict):
        inner = content.items()
    elif isinstance(content, list):
        inner = enumerate(content)
    for key, item in inner:
        if item is wanted:
            return str(key)[:80]
        if (below := _find_key(item, wanted)) is not None:
            return f"{str(key)[:80]}.{below}"
    return None


def value(
    text: str | bytes,
    file: str,
    message: str = "not valid JSON",
    *,
    code: str = codes.BAD_VALUE,
    help: str | None = None,
    hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parse the JSON text of a file; ``hook`` builds an object from its key-value pairs.

    Raises:
        FastshardError: ``code``, with ``message``, if the text is damaged or too deep.
    """
    try:
        return load(text, hook)
    except ValueError as error:
        again = f"copy {file.rpartition('/')[2]} again from the original checkpoint"
        raise FastshardError.of(code, f"{message}: {error}", file=file, help=help or again) from None


def read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its key-value pairs.

    Raises:
        ValueError: if a key occurs twice with different values; JSON readers themselves would use the last
            one.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"the key {key!r} appears twice, with different values")
        found[key] = value
    return found


def object_in(
    text: str | bytes | None, hook: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """Parse a text as a JSON object; return an empty dict if it is not a valid JSON object."""
    try:
        of_pairs = None if hook is None else lambda pairs: hook(dict(pairs))
        content = None if text is None else load(text, of_pairs)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def indented(document: Any, by: int = 1) -> str:
    """Format a document as indented JSON, for files that people read too."""
    return json.dumps(document, indent=by) + "\n"


def indented_pieces(document: Any) -> Iterator[str]:
    """Yield the text of :func:`indented` in short pieces.

    For many tensors, the complete text takes more memory than their records, and a list of all its pieces
    takes several times as much.
    """
    yield from json.JSONEncoder(indent=1).iterencode(document)
    yield "\n"


def compact(document: Any) -> str:
    """Format a document as JSON without whitespace, for programs only."""
    return json.dumps(document, separators=(",", ":"))


def canonical(document: Any) -> str:
    """Format a document as canonical JSON, the same for equal values, for digests and comparisons."""
    return json.dumps(document, sort_keys=True)
