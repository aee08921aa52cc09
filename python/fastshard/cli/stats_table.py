"""Statistics of tensors as a table, with broken tensors first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..models.tensor_roles import order_of
from .render import encodable, table
from .styles import Paint, plain

if TYPE_CHECKING:
    from ..verification.stats import TensorStats

#: Header of the histogram, which shows 64 bins in half as many columns.
_HISTOGRAM = "|histogram -64 .. 0 .. 64     |"
#: Characters for the heights of a histogram's columns: blocks, and ASCII for terminals without them.
_HEIGHTS = (" ▁▂▃▄▅▆▇█", " .:-=+*#@")
_BINS_PER_CELL = 2
#: Maximum length of a name in a narrow table; longer names lose their middle.
_LONGEST = 200
#: Columns to omit in a narrow terminal, in this order; columns for broken values are always kept.
_DROPPED = (_HISTOGRAM, "MEAN", "DTYPE", "MIN", "MAX", "STD")
#: Right-aligned columns, which contain numbers.
_FIGURES = ("MIN", "MAX", "MEAN", "STD", "ZERO", "NaN", "INF")


def stats_table(gathered: Mapping[str, TensorStats], *, wide: bool = True, paint: Paint = plain) -> str:
    """Format a row for each tensor, under a header.

    Args:
        gathered: statistics by name.
        wide: True to show full names, dtypes, shapes and histograms.
        paint: makes broken tensors red.
    """
    if not gathered:
        return "no tensors"
    names = sorted(gathered, key=lambda name: (not is_broken(gathered[name]), order_of(name)))
    stats = [gathered[name] for name in names]
    columns: dict[str, list[str]] = {
        "TENSOR": names if wide else [_shortened(name) for name in folded(names)]
    }

    heights = _HEIGHTS[0 if encodable(_HEIGHTS[0]) else 1]

    def show(title: str, cell: Callable[[TensorStats], str], where: bool = True) -> None:
        if where:
            columns[title] = [cell(s) for s in stats]

    show("DTYPE", lambda s: s.dtype, wide)
    show("SHAPE", lambda s: str(list(s.shape)), wide)
    show("MIN", lambda s: _figure(s.min))
    show("MAX", lambda s: _figure(s.max))
    show("MEAN", lambda s: _figure(s.mean))
    show("STD", lambda s: _figure(s.std))
    show("ZERO", lambda s: f"{s.zero_share:.0%}")
    show("NaN", lambda s: f"{s.nan:,}")
    show("INF", lambda s: f"{s.inf:,}", any(s.inf for s in stats))
    show(_HISTOGRAM, lambda s: sparkline(s.histogram, heights), wide)
    slabs = any(s.zero_slabs for s in stats)
    show("ZERO BLOCKS", lambda s: "; ".join(slab.text(len(s.shape)) for slab in s.zero_slabs), slabs)
    rows = [tuple(columns), *zip(*columns.values(), strict=True)]
    header, *lines = table(rows, indent="", right=_FIGURES, drop=_DROPPED).splitlines()
    red = (paint(line, "bad") if is_broken(s) else line for s, line in zip(stats, lines, strict=True))
    return "\n".join([header, *red])


def is_broken(stats: TensorStats) -> bool:
    """Return True for a tensor with NaN, infinities or all-zero blocks, and for a matrix of zeros.

    Zero vectors are not broken, because a new bias is zero.
    """
    is_zero = len(stats.shape) > 1 and stats.count > 0 and stats.zeros == stats.count
    return bool(stats.nan or stats.inf or stats.zero_slabs) or is_zero


def folded(names: Sequence[str]) -> list[str]:
    """Replace the common prefix of most names by ``...``.

    >>> folded(["model.embed.weight", "model.layers.0.w", "lm_head.weight"])
    ['...embed.weight', '...layers.0.w', 'lm_head.weight']
    """
    top, count = Counter(name.partition(".")[0] for name in names).most_common(1)[0]
    alike = [name.split(".") for name in names if name.startswith(f"{top}.")]
    if 2 * count <= len(names) or len(alike) < 2:
        return list(names)
    shared, first = 1, alike[0]
    # What a number counts stays before it.
    while all(
        len(parts) > shared + 2 and parts[shared] == first[shared] and not parts[shared + 1].isdecimal()
        for parts in alike
    ):
        shared += 1
    prefix = ".".join(alike[0][:shared]) + "."
    if len(prefix) <= len("..."):
        return list(names)
    return ["..." + name.removeprefix(prefix) if name.startswith(prefix) else name for name in names]


def _shortened(name: str) -> str:
    """Shorten a name.

    >>> len(_shortened("x" * 300)), _shortened("a.b")
    (200, 'a.b')
    """
    half = (_LONGEST - len("...")) // 2
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - half - 3]}...{name[-half:]}"


def sparkline(histogram: Sequence[int], heights: str = _HEIGHTS[0]) -> str:
    """Format a histogram in one line, from the most negative bin to the most positive.

    Every non-empty bin is visible.
    """
    cells = [sum(histogram[i : i + _BINS_PER_CELL]) for i in range(0, len(histogram), _BINS_PER_CELL)]
    top = max(cells, default=0)
    steps = len(heights) - 1
    return "".join(heights[-(-steps * n // top)] if n else heights[0] for n in cells)


def _figure(x: float | None) -> str:
    """Format a number with three digits, which are enough to spot outliers."""
    return "-" if x is None else str(x) if isinstance(x, int) else f"{x:.3g}"
