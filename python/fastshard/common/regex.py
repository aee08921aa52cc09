"""Regular expressions that are compiled on first use, because a run uses only a few of them."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, AnyStr

_MEMBERS = (
    "match",
    "search",
    "fullmatch",
    "sub",
    "subn",
    "split",
    "findall",
    "finditer",
    "pattern",
    "flags",
    "groups",
    "groupindex",
)


def compile_when_used(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return an object with the members of ``re.compile(pattern, flags)``, which compiles on first use."""
    return _Late(pattern, flags)  # type: ignore[return-value]


class _Late:
    """A pattern that is compiled on first use."""

    __slots__ = ("_source", *_MEMBERS)

    def __init__(self, pattern: Any, flags: int) -> None:
        self._source = pattern, flags

    def __getattr__(self, name: str) -> Any:
        # Called for what no slot holds yet; from then on the slots are found without it.
        if name not in _MEMBERS:
            raise AttributeError(name)
        compiled = re.compile(*self._source)
        for member in _MEMBERS:
            setattr(self, member, getattr(compiled, member))
        return getattr(compiled, name)
