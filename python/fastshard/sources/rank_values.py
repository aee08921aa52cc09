"""Values on which all ranks of a run agree. A file with different values gets one finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..common.errors import Finding

__all__ = ["differing"]


def differing(
    code: str, values: Sequence[tuple[str, Any, Any]], source: str = "", **fields: Any
) -> list[Finding]:
    """Report files whose values differ from those of the others; nothing if all agree.

    Args:
        code: code of the finding.
        values: name of each value, the value in the other files, and the value in this file.
        source: where the expected value is stated: ``" as in a.pt"``.
        fields: other fields of the finding.
    """
    differ = [(key, expected, got) for key, expected, got in values if expected != got]
    if not differ:
        return []
    keys = [key for key, *_ in differ]
    if len(differ) == 1:
        subject, (_, expected, got) = f"{keys[0]} differs", differ[0]
    else:
        subject = f"{', '.join(keys[:-1])} and {keys[-1]} differ"
        expected, got = (", ".join(f"{one[0]} {one[at]}" for one in differ) for at in (1, 2))
    return [
        Finding.of(code, f"{subject} between ranks", expected=f"{expected}{source}", got=str(got), **fields)
    ]
