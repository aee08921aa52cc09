"""The grid of a report's page, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from .grid import Grid
from .grid_cells import STATES, THERE, Band, Cell, Problem
from .page_markup import Limits, clipped, escaped, markup


def grid_rows(grid: Grid, limits: Limits) -> dict[str, Any]:
    """The table's head, its rows as markup (there may be thousands of cells), and what the script says of a cell."""
    groups: list[list[Any]] = []
    for column in grid.columns:
        if groups and groups[-1][0] == column.group:
            groups[-1][1] += 1
        else:
            groups.append([column.group, 1])
    bands = grid.bands[: limits.bands]
    cells = sum(len(band.cells) for band in bands)
    named = sum(cell.state != THERE for band in bands for cell in band.cells if cell) <= 1500
    short = _short([band.label for band in bands])
    rows = [
        {
            "label": short[band.label],
            "title": band.label,
            "band": band,
            "cells": markup(_cells(band, grid, short[band.label], runs=cells > 2500, named=named)),
        }
        for band in bands
    ]
    others = grid.rows - grid.ranks
    size = f"{grid.ranks:,} rank{'s' * (grid.ranks != 1)}" if grid.ranks else ""
    if others:
        size += f"{' and ' if size else ''}{others:,} {'other ' if size else ''}file{'s' * (others != 1)}"
    return {
        "groups": groups if any(name for name, _ in groups) else [],
        "rows": rows,
        "hidden": len(grid.bands) - len(bands),
        "size": size,
        "alike": all(band.alike for band in bands),
        "problems": _together(grid.problems),
    }


def _together(problems: Iterable[Problem]) -> list[tuple[Problem, int, list[str]]]:
    """Problems, those of several rows that are alike as one: what is wrong on each, of how many rows, and their labels."""
    groups: dict[tuple[Any, ...], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.state, problem.columns, problem.count // problem.rows), []).append(problem)
    return [
        (replace(of[0], count=of[0].count // of[0].rows), sum(p.rows for p in of), [p.where for p in of])
        for of in groups.values()
    ]


def _short(labels: Sequence[str]) -> dict[str, str]:
    """Labels without folders, where they are told apart without."""
    names = {label: " … ".join(part.rpartition("/")[2] for part in label.split(" … ")) for label in labels}
    return {label: name if list(names.values()).count(name) == 1 else label for label, name in names.items()}


def _cells(band: Band, grid: Grid, label: str, *, runs: bool, named: bool) -> str:
    parts: list[str] = []
    i = 0
    while i < len(band.cells):
        cell = band.cells[i]
        j = i + 1
        if runs and (cell is None or cell.state == THERE):
            while j < len(band.cells) and _plain(cell, band.cells[j]):
                j += 1
        span = f' colspan="{j - i}"' if j - i > 1 else ""
        if cell is None:
            parts.append(f"<td{span}>")
        else:
            state = STATES[cell.state]
            hint = ""
            if named and cell.state != THERE:
                column = grid.columns[i]
                called = f"{column.group} {column.label}".strip()
                where = f"{label}, {called}: {state.name}, {cell.count:,} of {cell.of:,}"
                hint = f' title="{escaped(clipped(where))}"'
            mark = state.mark if cell.state != THERE or not runs else ""
            parts.append(f'<td{span} class="s{cell.state}"{hint}>{mark}')
        i = j
    return "".join(parts)


def _plain(cell: Cell | None, other: Cell | None) -> bool:
    return other is None if cell is None else other is not None and other.state == cell.state
