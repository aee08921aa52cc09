"""The grid of a report's page, as HTML: ranks (or files) by layers, neighbours that are equal as bands and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..common.formatting import counted
from ..models.tensor_roles import order_of
from .grid import Grid
from .grid_cells import STATES, THERE, Band, Cell, Column, Problem
from .grid_order import band_name
from .page_markup import Limits, clipped, escaped, markup

__all__ = ["Links", "grid_rows"]

#: Columns up to which each cell is large, with its count.
BIG = 16
#: Rows whose names the page holds, so that bands can be opened.
_MOST_NAMES = 4096
#: Cells up to which each says in words what it is.
_WORDED = 3000
#: Columns outside of the layers that keep their names.
_APART = 6

#: The findings about a cell of a band: their numbers on the page.
Links = Callable[[Band, int], Sequence[int]]


@dataclass(frozen=True)
class _Folded:
    """A column of the page: a layer, or what is outside of all layers."""

    label: str
    #: A few characters, for narrow screens and ticks.
    short: str
    #: Columns of the grid in it.
    indices: tuple[int, ...]
    #: True for a layer.
    layer: bool
    #: False for what is no tensor: files and states.
    counted: bool = True


def grid_rows(grid: Grid, limits: Limits, links: Links) -> dict[str, Any]:
    """The table's head, its rows as markup, the legend, and what the script says of a cell."""
    columns = _folded(grid.columns)
    big = len(columns) <= BIG
    bands = grid.bands[: limits.bands]
    cells = [[_joined(band, column.indices) for column in columns] for band in bands]
    spans = [_spans(of, columns, big) for of in cells]
    worded = sum(map(len, spans)) <= _WORDED
    keeps = sum(len(band.names) for band in bands) <= _MOST_NAMES
    short = _short(bands)
    rows = [
        {
            "label": short[i],
            "band": band,
            "mark": STATES[band.worst].mark,
            "height": next(h for least, h in ((8, 8), (4, 4), (2, 3), (1, 1)) if band.rows >= least),
            "ranks": _is_rank(i, bands, grid),
            "opens": keeps and band.alike and band.rows > 1,
            "cells": markup(_cells(band, short[i], columns, cells[i], spans[i], big, worded, links)),
        }
        for i, band in enumerate(bands)
    ]
    others = grid.rows - grid.ranks
    size = counted(grid.ranks, "rank") if grid.ranks else ""
    if others:
        size += f"{' and ' if size else ''}{counted(others, 'other file' if size else 'file')}"
    layers = sum(column.layer for column in columns)
    return {
        "columns": columns,
        "big": big,
        "ticks": [] if big else _ticks(columns),
        "rows": rows,
        "hidden": len(grid.bands) - len(bands),
        "size": f"{size}, {counted(layers, 'layer' if _single(columns) else 'column of layers')}"
        if layers
        else size,
        "alike": all(band.alike for band in bands),
        "legend": _legend(bands, cells),
        "nowhere": sum(band.rows * of.count(None) for band, of in zip(bands, cells, strict=True)),
        "problems": _together(grid.problems),
        "names": [[clipped(name) for name in band.names] if keeps else [] for band in bands],
        "rules": _rules(bands, spans),
    }


def _is_rank(i: int, bands: Sequence[Band], grid: Grid) -> bool:
    return sum(band.rows for band in bands[:i]) < grid.ranks


def _single(columns: Sequence[_Folded]) -> bool:
    return not any("-" in column.short for column in columns if column.layer)


# --- columns


def _folded(columns: Sequence[Column]) -> list[_Folded]:
    """Columns of one layer as one; what is outside of the layers by what it is: embedding, final norm, head."""
    outside = {column.label for column in columns if not column.group}
    found: dict[tuple[int, str, str, bool], list[int]] = {}
    for i, column in enumerate(columns):
        if column.group:
            label = f"layers {column.label}" if "-" in column.label else f"layer {column.label}"
            label = label if column.group == "layers" else column.group
            key = (1, label, label.partition(" ")[2], True)
        else:
            key = (*_outside(column.label, len(outside) > _APART), False)
        found.setdefault(key, []).append(i)
    return [
        _Folded(clipped(label), clipped(short), tuple(indices), layer, place != 5)
        for (place, label, short, layer), indices in sorted(found.items(), key=lambda item: item[0][0])
    ]


def _outside(label: str, many: bool) -> tuple[int, str, str]:
    """Place, label and short label of what is outside of all layers."""
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
    """The head of many columns: label, columns that it spans, class."""
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
    """The cells of a band in one column of the page: the worst that is among them."""
    known = [cell for cell in (band.cells[i] for i in indices) if cell is not None]
    if not known:
        return None
    state = min(cell.state for cell in known)
    return Cell(
        state, sum(cell.count for cell in known if cell.state == state), sum(cell.of for cell in known)
    )


def _spans(cells: Sequence[Cell | None], columns: Sequence[_Folded], big: bool) -> list[tuple[int, int]]:
    """Runs of neighbouring layers of one state: (first, behind the last)."""
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


def _cells(
    band: Band,
    row: str,
    columns: Sequence[_Folded],
    cells: Sequence[Cell | None],
    spans: Sequence[tuple[int, int]],
    big: bool,
    worded: bool,
    links: Links,
) -> str:
    parts = []
    for first, end in spans:
        cell = cells[first]
        span = f' colspan="{end - first}"' if end - first > 1 else ""
        run = "" if big else f" run n{end - first} r{min(band.rows, 8)}"
        state = "n" if cell is None else f"s{cell.state}"
        said = _said(cell, end - first > 1 or not columns[first].counted)
        where = (
            columns[first].label
            if end - first == 1
            else f"{columns[first].label} to {columns[end - 1].short}"
        )
        label = f' aria-label="{escaped(f"{row}, {where}: {said}")}"' if worded else ""
        of = links(band, cell.state) if cell is not None and cell.state != THERE else ()
        refers = f' data-f="{" ".join(map(str, of))}"' if of else ""
        inner = _inner(cell, big and columns[first].counted, of)
        parts.append(
            f'<td class="c {state}{run}"{span} data-c="{first}" data-s="{escaped(said)}"{label}{refers}>{inner}</td>'
        )
    return "".join(parts)


def _said(cell: Cell | None, several: bool) -> str:
    if cell is None:
        return "nothing belongs here"
    name = STATES[cell.state].name
    if several:
        return name
    if cell.state == THERE or cell.count == cell.of:
        return f"{name}, {counted(cell.of, 'tensor')}"
    return f"{name}, {cell.count:,} of {counted(cell.of, 'tensor')}"


def _inner(cell: Cell | None, big: bool, of: Sequence[int]) -> str:
    if cell is None or (cell.state == THERE and not big):
        return ""
    mark = f'<b aria-hidden="true">{STATES[cell.state].mark}</b>' if cell.state != THERE else ""
    count = f"{cell.count:,} of {cell.of:,}" if cell.count != cell.of else counted(cell.of, "tensor")
    text = f"{mark}<span>{count}</span>" if big else mark
    if cell.state == THERE:
        return text
    return f'<a href="#{f"f{of[0]}" if of else "findings"}">{text}</a>'


def _rules(bands: Sequence[Band], spans: Sequence[Sequence[tuple[int, int]]]) -> str:
    """Rules of the style that draw the lines of layers and ranks within a run."""
    wide = sorted({end - first for of in spans for first, end in of} - {1})
    high = sorted({min(band.rows, 8) for band in bands} - {1})
    return "".join([*(f".n{n}{{--n:{n}}}" for n in wide), *(f".r{n}{{--r:{n}}}" for n in high)])


def _legend(bands: Sequence[Band], cells: Sequence[Sequence[Cell | None]]) -> list[tuple[int, int]]:
    """Each state, the worst last, and how many cells have it; those of four states are named in any case."""
    counts = dict.fromkeys(range(len(STATES)), 0)
    for band, of in zip(bands, cells, strict=True):
        for cell in of:
            if cell is not None:
                counts[cell.state] += band.rows
    shown = [THERE, *(i for i in range(THERE) if counts[i] or i in (0, 1, 2, 4))]
    return [(i, counts[i]) for i in shown]


# --- what is wrong, in words


def _together(problems: Iterable[Problem]) -> list[tuple[Problem, int, list[str]]]:
    """Problems, those of several rows that are alike as one: what is wrong on each, of how many rows, and their labels."""
    groups: dict[tuple[Any, ...], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.state, problem.columns, problem.count // problem.rows), []).append(problem)
    return [
        (replace(of[0], count=of[0].count // of[0].rows), sum(p.rows for p in of), [p.where for p in of])
        for of in groups.values()
    ]


def _short(bands: Sequence[Band]) -> list[str]:
    """Labels: a band of ranks as a product of ranges; names of files without folders, where they are told apart without."""
    labels = [band_name(band.names) or band.label for band in bands]
    names = [" … ".join(part.rpartition("/")[2] for part in label.split(" … ")) for label in labels]
    return [
        clipped(name if names.count(name) == 1 else label) for name, label in zip(names, labels, strict=True)
    ]
