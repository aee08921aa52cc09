"""The grid of a report's page as HTML: ranks (or files) by layers, equal neighbours as bands and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..common.formatting import counted, natural
from ..common.listing import store_of
from ..common.records import dataclass, replace
from ..models.tensor_roles import order_of
from .grid import Grid
from .grid_cells import STATES, THERE, Band, Cell, Column, Problem
from .grid_order import band_name
from .page_markup import Limits, clipped, escaped, markup

__all__ = ["Links", "Part", "grid_rows"]

#: Maximum number of columns for large cells with counts.
BIG = 16
#: Maximum number of rows whose names the page contains, so that bands can be expanded.
_MOST_NAMES = 4096
#: Maximum number of cells with a description each.
_WORDED = 3000
#: Maximum number of columns outside of the layers with full names.
_APART = 6

#: The findings about a cell of a band: their numbers on the page.
Links = Callable[[Band, int], Sequence[int]]


@dataclass(frozen=True)
class Part:
    """The rows of one checkpoint in a table of one or two."""

    grid: Grid
    links: Links
    #: The heading above its rows: which of two checkpoints it is, and its size; empty for a single one.
    head: str = ""
    note: str = ""


@dataclass(frozen=True)
class _Folded:
    """A column of the page: a layer, or a tensor outside of all layers."""

    label: str
    #: A few characters, for narrow screens and ticks.
    short: str
    #: True for a layer.
    layer: bool
    #: False for columns that are not tensors: files and states.
    counted: bool = True


def grid_rows(parts: Sequence[Part], limits: Limits) -> dict[str, Any]:
    """Return the table's head, its rows as markup, the legend, and the script's texts for cells."""
    columns, indices = _common([_folded(part.grid.columns) for part in parts])
    big = len(columns) <= BIG
    bands = [(number, band) for number, part in enumerate(parts) for band in part.grid.bands[: limits.bands]]
    cells = [[_joined(band, of) for of in indices[number]] for number, band in bands]
    spans = [_spans(of, columns, big) for of in cells]
    worded = sum(map(len, spans)) <= _WORDED
    keeps = sum(len(band.names) for _, band in bands) <= _MOST_NAMES
    short = [label for number in range(len(parts)) for label in _short([b for n, b in bands if n == number])]
    rows = []
    for i, (number, band) in enumerate(bands):
        part = parts[number]
        ranks = _is_rank(band, part.grid)
        shown = _Shown(big, worded, part.grid.word, part.links)
        rows.append(
            {
                "part": number,
                "label": short[i],
                "band": band,
                "mark": STATES[band.worst].mark,
                "height": next(h for least, h in ((8, 8), (4, 4), (2, 3), (1, 1)) if band.rows >= least),
                "ranks": ranks,
                "size": "array store" if _is_store(band) else counted(band.file_count, "file"),
                "opens": keeps and band.alike and band.rows > 1,
                "cells": markup(_cells(band, short[i], columns, cells[i], spans[i], shown)),
            }
        )
    layers = sum(column.layer for column in columns)
    counts = [_counted(part.grid) for part in parts]
    size = counts[0] if len(parts) == 1 else f"{counts[0]} before, {counts[1]} after"
    return {
        "columns": columns,
        "big": big,
        "ticks": [] if big else _ticks(columns),
        "heads": [(part.head, part.note) for part in parts],
        "axis": _axis(parts),
        "rows": rows,
        "hidden": sum(len(part.grid.bands) for part in parts) - len(bands),
        "size": f"{size}, {counted(layers, 'layer' if _single(columns) else 'column of layers')}"
        if layers
        else size,
        "alike": all(band.alike for _, band in bands),
        "inferred": any(part.grid.inferred for part in parts),
        "legend": _legend(bands, cells),
        "nowhere": sum(band.rows * of.count(None) for (_, band), of in zip(bands, cells, strict=True)),
        "problems": [problem for part in parts for problem in _together(part.grid.problems)],
        "names": [[clipped(name) for name in band.names] if keeps else [] for _, band in bands],
        "rules": _rules(bands, spans),
    }


def _counted(grid: Grid) -> str:
    """Describe the numbers of ranks and files."""
    stores = sum(map(_is_store, grid.bands))
    others = grid.rows - grid.ranks - stores
    sizes = [counted(grid.ranks, "rank")] if grid.ranks else []
    sizes += [counted(stores, "array store")] if stores else []
    sizes += [counted(others, "other file" if sizes else "file")] if others else []
    return " and ".join(sizes)


def _is_store(band: Band) -> bool:
    """Return True for the row of an array store, which has the name of its folder."""
    stands_for = [store_of(file) for file in band.files]
    return band.rows == 1 and stands_for == [band.label] != [*band.files]


def _axis(parts: Sequence[Part]) -> str:
    """Name the kinds of rows: rank, file, or both."""
    return " or ".join(dict.fromkeys("rank" if part.grid.ranks else "file" for part in parts))


def _is_rank(band: Band, grid: Grid) -> bool:
    before = 0
    for other in grid.bands:
        if other is band:
            break
        before += other.rows
    return before < grid.ranks


def _single(columns: Sequence[_Folded]) -> bool:
    return not any("-" in column.short for column in columns if column.layer)


# --- columns


def _folded(columns: Sequence[Column]) -> dict[tuple[int, _Folded], tuple[int, ...]]:
    """Merge the columns of each layer, and those outside of layers by kind.

    The kinds are embedding, final norm and head.

    Returns:
        place and column of the page, with the columns of the grid that it contains.
    """
    outside = {column.label for column in columns if not column.group}
    found: dict[tuple[int, _Folded], list[int]] = {}
    for i, column in enumerate(columns):
        if column.group:
            label = f"layers {column.label}" if "-" in column.label else f"layer {column.label}"
            label = label if column.group == "layers" else column.group
            place, short = 1, label.partition(" ")[2]
        else:
            place, label, short = _outside(column.label, len(outside) > _APART)
        key = place, _Folded(clipped(label), clipped(short), place == 1, place != 5)
        found.setdefault(key, []).append(i)
    return {key: tuple(indices) for key, indices in found.items()}


def _common(
    folded: Sequence[dict[tuple[int, _Folded], tuple[int, ...]]],
) -> tuple[list[_Folded], list[list[tuple[int, ...]]]]:
    """Return the columns of all parts, and for each part the indices of its own columns in them."""
    keys = dict.fromkeys(key for of in folded for key in of)
    order = sorted(keys, key=lambda key: (key[0], natural(key[1].short) if key[1].layer else []))
    return [column for _, column in order], [[of.get(key, ()) for key in order] for of in folded]


def _outside(label: str, many: bool) -> tuple[int, str, str]:
    """Return place, label and short label of a column outside of all layers."""
    at, _, _ = order_of(label)
    if at == 0:
        return 0, "embedding", "emb"
    if at == 3:
        return 4, "head", "head"
    if " " in label:
        return 5, label, "state" if "state" in label else label.split()[-1]
    if "norm" in label or label.startswith("ln_f"):
        return 2, "final norm", "norm"
    return (3, "others", "others") if many else (3, label, label.partition(".")[0])


def _ticks(columns: Sequence[_Folded]) -> list[tuple[str, int, str]]:
    """Return the head of many columns: label, number of columns that it spans, class."""
    layers = sum(column.layer for column in columns)
    step = 10 if layers > 40 else 5
    ticks: list[tuple[str, int, str]] = []
    at = 0
    for i, column in enumerate(columns):
        if not column.layer:
            ticks.append((column.short, 1, "end"))
            at = 0
        elif at % step == 0:
            left = next((j for j in range(i, len(columns)) if not columns[j].layer), len(columns)) - i
            odd = " odd" if at // step % 2 or left < step else ""
            ticks.append((column.short, min(step, left), f"tick{odd}"))
            at += 1
        else:
            at += 1
    return ticks


# --- cells


def _joined(band: Band, indices: Iterable[int]) -> Cell | None:
    """Merge the cells of a band in one column of the page; the worst state counts."""
    known = [cell for cell in (band.cells[i] for i in indices) if cell is not None]
    if not known:
        return None
    state = min(cell.state for cell in known)
    return Cell(
        state, sum(cell.count for cell in known if cell.state == state), sum(cell.of for cell in known)
    )


def _spans(cells: Sequence[Cell | None], columns: Sequence[_Folded], big: bool) -> list[tuple[int, int]]:
    """Return runs of neighbouring layers with the same state: (first, after the last)."""
    spans: list[tuple[int, int]] = []
    for i, cell in enumerate(cells):
        state = cell.state if cell else None
        if spans and not big and columns[i].layer and columns[spans[-1][0]].layer:
            last = cells[spans[-1][0]]
            if (last.state if last else None) == state:
                spans[-1] = (spans[-1][0], i + 1)
                continue
        spans.append((i, i + 1))
    return spans


@dataclass(frozen=True)
class _Shown:
    """The appearance of cells: size, words and links."""

    #: True if each cell is large and shows its count.
    big: bool
    #: True if each has a description.
    worded: bool
    #: The noun for what is counted.
    word: str
    links: Links


def _cells(
    band: Band,
    row: str,
    columns: Sequence[_Folded],
    cells: Sequence[Cell | None],
    spans: Sequence[tuple[int, int]],
    shown: _Shown,
) -> str:
    parts = []
    for first, end in spans:
        cell = cells[first]
        span = f' colspan="{end - first}"' if end - first > 1 else ""
        run = "" if shown.big else f" run n{end - first} r{min(band.rows, 8)}"
        state = "n" if cell is None else f"s{cell.state}"
        said = _describe_cell(cell, end - first > 1 or not columns[first].counted, shown.word)
        where = (
            columns[first].label
            if end - first == 1
            else f"{columns[first].label} to {columns[end - 1].short}"
        )
        label = f' aria-label="{escaped(f"{row}, {where}: {said}")}"' if shown.worded else ""
        of = shown.links(band, cell.state) if cell is not None and cell.state != THERE else ()
        refers = f' data-f="{" ".join(map(str, of))}"' if of else ""
        inner = _inner(cell, shown.big and columns[first].counted, shown.word, of)
        parts.append(
            f'<td class="c {state}{run}"{span} data-c="{first}" '
            f'data-s="{escaped(said)}"{label}{refers}>{inner}</td>'
        )
    return "".join(parts)


def _describe_cell(cell: Cell | None, several: bool, word: str) -> str:
    if cell is None:
        return "nothing belongs here"
    name = STATES[cell.state].name
    if several:
        return name
    if cell.state == THERE or cell.count == cell.of:
        return f"{name}, {counted(cell.of, word)}"
    return f"{name}, {cell.count:,} of {counted(cell.of, word)}"


def _inner(cell: Cell | None, big: bool, word: str, of: Sequence[int]) -> str:
    if cell is None or (cell.state == THERE and not big):
        return ""
    mark = f'<b aria-hidden="true">{STATES[cell.state].mark}</b>' if cell.state != THERE else ""
    count = f"{cell.count:,} of {cell.of:,}" if cell.count != cell.of else counted(cell.of, word)
    text = f"{mark}<span>{count}</span>" if big else mark
    if cell.state == THERE:
        return text
    return f'<a href="#{f"f{of[0]}" if of else "findings"}">{text}</a>'


def _rules(bands: Sequence[tuple[int, Band]], spans: Sequence[Sequence[tuple[int, int]]]) -> str:
    """Return style rules that draw the lines of layers and ranks within a run."""
    wide = sorted({end - first for of in spans for first, end in of} - {1})
    high = sorted({min(band.rows, 8) for _, band in bands} - {1})
    return "".join([*(f".n{n}{{--n:{n}}}" for n in wide), *(f".r{n}{{--r:{n}}}" for n in high)])


def _legend(
    bands: Sequence[tuple[int, Band]], cells: Sequence[Sequence[Cell | None]]
) -> list[tuple[int, int]]:
    """Count the cells of each state, the worst last.

    Four states are always listed.
    """
    counts = dict.fromkeys(range(len(STATES)), 0)
    for (_, band), of in zip(bands, cells, strict=True):
        for cell in of:
            if cell is not None:
                counts[cell.state] += band.rows
    shown = [THERE, *(i for i in range(THERE) if counts[i] or i in (0, 1, 2, 4))]
    return [(i, counts[i]) for i in shown]


# --- what is wrong, in words


def _together(problems: Iterable[Problem]) -> list[tuple[Problem, int, list[str]]]:
    """Merge similar problems of several rows.

    The result has the problem of each row, the number of rows, and their labels.
    """
    groups: dict[tuple[Any, ...], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.state, problem.columns, problem.count // problem.rows), []).append(problem)
    return [
        (replace(of[0], count=of[0].count // of[0].rows), sum(p.rows for p in of), [p.where for p in of])
        for of in groups.values()
    ]


def _short(bands: Sequence[Band]) -> list[str]:
    """Shorten labels: a product of ranges for ranks, and names without folders if they are unique."""
    labels = [band_name(band.ranks) or band.label for band in bands]
    names = [" … ".join(part.rpartition("/")[2] for part in label.split(" … ")) for label in labels]
    return [
        clipped(name if names.count(name) == 1 else label) for name, label in zip(names, labels, strict=True)
    ]
