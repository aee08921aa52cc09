"""Regular expressions of a config, held against names: a stranger wrote them, and none may take longer than it is worth."""

from __future__ import annotations

import re

__all__ = ["matches"]

#: Characters of an expression, and of a name, at most.
_LONG = 512
#: What is no plain character between two ``.*``.
_SPECIAL = re.compile(r"[\[\](){}+?|*^$]|\\[A-Za-z0-9]")
#: A group that is repeated, or repetitions without a bound.
_REPEATED_GROUP, _UNBOUNDED = re.compile(r"\)\s*[*+{]"), re.compile(r"(?<!\\)[*+]|\{\d*,\}")


def matches(expression: str, name: str) -> bool | None:
    """Whether a name begins as an expression says (``re.match``); None for one that is invalid, or would take too long.

    >>> matches("model.layers.*.mlp.*_proj$", "model.layers.3.mlp.up_proj"), matches("(a+)+$", "aaaa")
    (True, None)
    """
    if len(expression) > _LONG or len(name) > _LONG:
        return None
    body = expression.removeprefix("^")
    ends = body.endswith("$") and not body.endswith("\\$")
    pieces = body.removesuffix("$" if ends else "").split(".*")
    try:
        if not any(map(_SPECIAL.search, pieces)):
            return _in_turn(pieces, name, ends)
        if _REPEATED_GROUP.search(expression) or len(_UNBOUNDED.findall(expression)) > 2:
            return None
        return re.match(expression, name) is not None
    except (re.error, RecursionError, OverflowError):
        return None


def _in_turn(pieces: list[str], name: str, ends: bool) -> bool:
    """True if the pieces follow one another in a name, the first at its begin: the first place of each will do."""
    at = 0
    for number, piece in enumerate(pieces):
        last = ends and number == len(pieces) - 1
        if number == 0:
            found = re.compile(piece + ("$" if last else "")).match(name)
        elif last:
            # The end decides where it lies.
            ending = re.compile(f"(?:{piece})$")
            found = next((m for i in range(at, len(name) + 1) if (m := ending.match(name, i))), None)
        else:
            found = re.compile(piece).search(name, at)
        if found is None:
            return False
        at = found.end()
    return True
