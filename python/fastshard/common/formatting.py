"""Formatting of untrusted texts and of numbers for users: in a terminal, a page or a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .regex import compile_when_used

_DIGITS = compile_when_used(r"\d+")


def human(n: float) -> str:
    """Format a storage size in bytes with three digits: ``8.19 kB``."""
    for unit in ("B", "kB", "MB", "GB"):
        # What would be rounded up to 1000 is one of the next unit.
        if n < 999.5:
            return f"{n:.3g} {unit}" if n < 99.95 or unit == "B" else f"{n:.0f} {unit}"
        n /= 1000
    return f"{n:,.3g} TB" if n < 999.5 else f"{n:,.0f} TB"


def human_memory(n: float) -> str:
    """Format a memory size in bytes in MiB, the unit of ``--memory``."""
    return f"{n / (1 << 20):,.0f} MiB"


def counted(count: int, what: str) -> str:
    """Format a count with its noun, e.g. ``1 tensor``, ``1,156 tensors``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def some(names: Sequence[str], most: int) -> str:
    """Join the first few names, and add the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that orders names by the numbers in them.

    >>> sorted(["x10", "x9", "x", "x²"], key=natural)
    ['x', 'x9', 'x10', 'x²']
    """
    # No more digits than are read as one number.
    parts = re.split(r"([0-9]{1,18})", name)
    return [(bool(i % 2), int(part) if i % 2 else 0, part) for i, part in enumerate(parts) if part]


def without_numbers(path: str) -> str:
    """Replace the numbers in a path, so that files of different ranks and layers have the same path.

    >>> without_numbers("layer_02-model_01.pt")
    'layer_#-model_#.pt'
    """
    return _DIGITS.sub("#", path)


def runs(numbers: Iterable[int]) -> list[range]:
    """Group numbers into ranges of consecutive ones.

    >>> runs([5, 0, 1, 2])
    [range(0, 3), range(5, 6)]
    """
    found: list[range] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def printable(text: str, keep: str = "") -> str:
    """Escape characters that could affect the display around a text.

    These are control and direction characters, and bytes that are not text.
    """
    # Most text is; a page asks for tens of thousands of names.
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )
