"""Small pictures of a conversion: the shards before it, and their places in the tensors after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .became import Became, ResultKind
from .page_markup import clipped, markup

__all__ = ["became_rows", "key"]

#: Positions and sizes of the pictures of shards and of tensors.
_SHARDS, _RESULT, _WIDE, _HIGH = 24.0, 130.0, 44.0, 56.0
#: Maximum number of shards to draw individually.
_DRAWN = 4


def became_rows(rows: Sequence[Became]) -> list[dict[str, Any]]:
    """Return the rows of the list."""
    return [
        {
            "name": row.name,
            "shape": list(row.shape),
            "made": [{"name": results.name, "shape": list(results.shape)} for results in row.results],
            "counts": f"{row.count:,} → {sum(made.count for made in row.results):,}",
            "how": row.how,
            "label": f"{clipped(row.name)}: {row.how}",
            "svg": markup(_shards(row) + _ARROW + _results(row.results)),
        }
        for row in rows
    ]


_ARROW = '<path class="t-arrow" d="M92 32h22m-6-5 6 5-6 5"/>'


def key(number: int) -> Any:
    """Draw the key of the legend: plain for even ranks, hatched for odd ones."""
    return markup(_box(number, 1, 1, 20, 20) + _edge(1, 1, 20, 20))


def _shards(row: Became) -> str:
    """Draw the shards: side by side if columns are joined, else below each other."""
    count = min(len(row.ranks), _DRAWN)
    flat = len(row.shape) < 2
    parts = []
    gap = 4.0
    for i in range(count):
        if "columns" in row.how:
            wide = (_WIDE - gap * (count - 1)) / count
            box = (_SHARDS + i * (wide + gap), 18.0, wide, 28.0)
        else:
            high = 8.0 if flat else (_HIGH - gap * (count - 1)) / count
            top = 32.0 - (count * high + (count - 1) * gap) / 2
            box = (_SHARDS, top + i * (high + gap), _WIDE, high)
        parts += [_box(i, *box), _edge(*box)]
    return "".join(parts)


def _results(results: Sequence[ResultKind]) -> str:
    shown = results[:_DRAWN]
    gap = 4.0
    flat = all(len(m.shape) < 2 for m in shown)
    room = _HIGH - gap * (len(shown) - 1)
    total = sum(m.shape[0] if m.shape else 1 for m in shown) or 1
    parts, top = [], 4.0
    for m in shown:
        high = 8.0 if flat and len(shown) == 1 else max(6.0, room * (m.shape[0] if m.shape else 1) / total)
        top = 28.0 if flat and len(shown) == 1 else top
        for at, left, height, width, shard in m.boxes:
            box = (_RESULT + left * _WIDE, top + at * high, width * _WIDE, height * high)
            parts.append(_box(shard, *box))
        parts.append(_edge(_RESULT, top, _WIDE, high))
        top += high + gap
    return "".join(parts)


def _box(number: int, x: float, y: float, wide: float, high: float) -> str:
    """Draw a filled rectangle, hatched for odd numbers."""
    filled = f'<rect class="t{number % 2}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"/>'
    if number % 2 == 0:
        return filled
    lines = []
    step = 5.0
    at = step
    while at < wide + high:
        x1, y1 = (x + at, y) if at <= wide else (x + wide, y + at - wide)
        x2, y2 = (x, y + at) if at <= high else (x + at - high, y + high)
        lines.append(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}")
        at += step
    return f'{filled}<path class="t-hatch" d="{"".join(lines)}"/>' if lines else filled


def _edge(x: float, y: float, wide: float, high: float) -> str:
    return f'<rect class="t-edge" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"/>'
