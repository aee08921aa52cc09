"""For griffe: roles of reStructuredText in docstrings become links to the pages of public names, or code; examples blocks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import fastshard
import griffe

if TYPE_CHECKING:
    from griffe import GriffeLoader, Object

#: An example in plain text, which Markdown would take for quotations.
_EXAMPLE = re.compile(r"(?:^>>> .*(?:\n(?:>>>|\.\.\.) .*)*)", re.MULTILINE)
_ROLE = re.compile(r":\w+:`([~.]?)([\w.]+)`")


def _linked(match: re.Match[str]) -> str:
    shortened, name = match.groups()
    shown = name.rpartition(".")[2] if shortened else name
    public = name.removeprefix("fastshard.")
    if public not in fastshard.__all__:
        return f"`{shown}`"
    value = getattr(fastshard, public)
    # Where it is defined: a module may have the name of what it defines.
    path = (
        f"{value.__module__}.{value.__qualname__}"
        if hasattr(value, "__qualname__")
        else f"fastshard.{public}"
    )
    return f"[`{shown}`][{path}]"


class Roles(griffe.Extension):
    """Rewrites each docstring before it is rendered."""

    def on_object(self, *, obj: Object, loader: GriffeLoader, **_: Any) -> None:
        """Called once for each object with all that is known of it."""
        if obj.docstring is not None:
            text = _ROLE.sub(_linked, obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", text)
