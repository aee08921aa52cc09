"""For griffe: roles of reStructuredText in docstrings become links to the pages of public names, or code;
options that a function hands on get their meaning."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import fastshard
import griffe
from fastshard.common.options import ALL

if TYPE_CHECKING:
    from griffe import Attribute, GriffeLoader, Object

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


def _meanings() -> dict[str, str]:
    """What each option means that a function hands on: as the function says that takes it, or the targets."""
    meanings = {option.name: option.meaning or option.help for option in ALL.values()}
    for function in (fastshard.ray.convert, fastshard.convert, fastshard.plan, fastshard.open):
        arguments = inspect.cleandoc(function.__doc__ or "").partition("Args:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", arguments, re.MULTILINE):
            meanings[name] = " ".join(text.split())
    return meanings


_MEANINGS = _meanings()


def _strip_annotated(annotation: str | griffe.Expr | None) -> str | griffe.Expr | None:
    """Return the type of ``Annotated[TYPE, ...]``; other annotations as they are."""
    if isinstance(annotation, griffe.ExprSubscript) and annotation.canonical_name == "Annotated":
        inside = annotation.slice
        return inside.elements[0] if isinstance(inside, griffe.ExprTuple) else inside
    return annotation


class Roles(griffe.Extension):
    """Rewrites each docstring before it is rendered."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Called when it is read, before the options are handed to the functions that take them."""
        attr.annotation = _strip_annotated(attr.annotation)
        if attr.docstring is None and attr.path.startswith("fastshard.common.options."):
            attr.docstring = griffe.Docstring(_MEANINGS.get(attr.name, ""), parent=attr)

    def on_object(self, *, obj: Object, loader: GriffeLoader, **_: Any) -> None:
        """Called once for each object with all that is known of it."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_linked, obj.docstring.value)
