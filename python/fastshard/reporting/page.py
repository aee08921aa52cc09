"""The page: Jinja2 fills it, and its policy lets nothing run or load but what is in it.

All texts are from strangers. Jinja2 escapes each, what would drive a page or a terminal is escaped before (`printable`), the data
of the script is JSON without ``<``, and the script puts it into the page as text alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from statistics import median
from typing import Any

from ..common.formatting import counted, human, printable
from ..common.optional_imports import imported
from ..models.tensor_roles import role_of
from ..verification.stats import TensorStats
from . import charts
from .densities import density, joined
from .grid import STATES, THERE, Band, Cell, Grid, Problem
from .report_data import Report, Tensor, by_layer

__all__ = ["LIMIT", "MARK", "needed", "rendered"]

#: What a page of ours has near its beginning.
MARK = b'<meta name="generator" content="fastshard '

#: Bytes of a page at most.
LIMIT = 2_000_000
#: Bytes of it for tensors that the script shows.
_DATA = 1_200_000
#: Characters of a text that are shown, from both its ends.
_CLIP = 400


@dataclass(frozen=True)
class Limits:
    """How much of what may be long is shown; the rest is counted."""

    findings: int = 40
    families: int = 300
    problems: int = 100
    changes: int = 200
    lines: int = 60
    bands: int = 1 << 20
    data: int = _DATA


#: Tried one after the other until the page is small enough.
_LIMITS = (
    Limits(),
    Limits(findings=10, families=80, problems=40, changes=50, data=_DATA // 2),
    Limits(findings=3, families=20, problems=10, changes=10, lines=20, bands=40, data=100_000),
)


def needed() -> Any:
    """Jinja2.

    Raises:
        FastshardError: ``FS514`` if it is not installed.
    """
    return imported("jinja2", told="a report is made with Jinja2", extra="report")


def rendered(report: Report) -> str:
    """The page of a report: the same bytes for the same report.

    Raises:
        FastshardError: ``FS514`` if Jinja2 is not installed, or vl-convert where there are distributions.
    """
    figures = _figures(report)
    for limits in _LIMITS:
        page = _filled(report, figures, limits)
        if len(page.encode()) <= LIMIT:
            return page
    raise AssertionError("a page whose parts are bounded is too large")


def _filled(report: Report, figures: dict[str, Any], limits: Limits) -> str:
    style, script = _asset("page.css"), _asset("page.js")
    data, shown = _data(report, limits.data)
    return str(
        _template().render(
            r=report,
            states=STATES,
            limits=limits,
            style=_markup(style),
            script=_markup(script),
            policy=_policy(style, script),
            data=_markup(data),
            data_shown=shown,
            columns=_json(
                [_clipped(f"{c.group} {c.label}".strip()) for c in report.grid.columns] if report.grid else []
            ),
            state_names=_json([state.name for state in STATES]),
            grid=_grid(report.grid, limits) if report.grid else None,
            sizes=_sizes(report),
            verdict=verdict(report),
            **figures,
        )
    )


@functools.cache
def _template() -> Any:
    jinja2 = needed()

    def finalize(value: Any) -> Any:
        return value if hasattr(value, "__html__") else _clipped(value) if isinstance(value, str) else value

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fastshard.reporting", ""),
        autoescape=True, finalize=finalize, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    filters: dict[str, Any] = {
        "human": human,
        "n": lambda n: f"{n:,}",
        "finding": str,
        "codes": _codes,
        "long": lambda text: _markup(_escaped(_clipped(text, 10 * _CLIP))),
    }
    environment.filters |= filters
    return environment.get_template("page.html.j2")


def _markup(text: str) -> Any:
    import markupsafe

    return markupsafe.Markup(text)


def _clipped(text: str, limit: int = _CLIP) -> str:
    """Text that drives nothing, and of a length that can be read."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} … {text[-limit // 3 :]}"
    return printable(text)


def _asset(name: str) -> str:
    return resources.files("fastshard.reporting").joinpath(name).read_text("utf-8")


def _policy(style: str, script: str) -> str:
    """What the page may do: nothing is loaded, and of scripts and styles these two alone are taken."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _escaped(text: str) -> str:
    from html import escape

    return escape(text)


def _codes(text: str) -> Any:
    """Our own words, with what stands between backquotes as code."""
    parts = [_escaped(part) for part in text.split("`")]
    return _markup("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def _figure(x: float | int | None) -> str:
    return "-" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.4g}"


def verdict(report: Report) -> dict[str, str]:
    """What stands at the top: a mark, and a sentence."""
    everything = report.numbers is not None and report.numbers.read
    errors = counted(report.errors, "error")
    words = {
        "ok": ("✓", "Whole, and all of it was read" if everything else "Whole, by its headers"),
        "unproven": ("~", "Nothing is missing that headers tell of; completeness is not provable"),
        "broken": ("✕", f"Not in order: {errors}"),
        "unopened": ("✕", "Cannot be opened as a checkpoint"),
    }  # fmt: skip
    mark, text = words[report.verdict]
    if report.warnings:
        text += f", {report.warnings:,} warning{'s' if report.warnings != 1 else ''}"
    return {"mark": mark, "text": text}


# --- the grid


def _grid(grid: Grid, limits: Limits) -> dict[str, Any]:
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
            "cells": _markup(_cells(band, grid, short[band.label], runs=cells > 2500, named=named)),
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
                hint = f' title="{_escaped(_clipped(where))}"'
            mark = state.mark if cell.state != THERE or not runs else ""
            parts.append(f'<td{span} class="s{cell.state}"{hint}>{mark}')
        i = j
    return "".join(parts)


def _plain(cell: Cell | None, other: Cell | None) -> bool:
    return other is None if cell is None else other is not None and other.state == cell.state


# --- sizes


def _sizes(report: Report) -> dict[str, Any]:
    dtypes: dict[str, int] = {}
    for of_role in report.sizes.values():
        for dtype, (_, size) in of_role.items():
            dtypes[dtype] = dtypes.get(dtype, 0) + size
    order = sorted(dtypes, key=lambda d: -dtypes[d])
    total = sum(dtypes.values())
    top = max((sum(b for _, b in of.values()) for of in report.sizes.values()), default=0) or 1
    rows = []
    for role, of_role in list(report.sizes.items())[:40]:
        size = sum(b for _, b in of_role.values())
        at, bars = 0.0, []
        for dtype in order:
            if dtype in of_role:
                width = 100 * of_role[dtype][1] / top
                bars.append(
                    (
                        f"{at:.2f}",
                        f"{width:.2f}",
                        order.index(dtype) % charts.SERIES,
                        dtype,
                        of_role[dtype][1],
                    )
                )
                at += width
        count = sum(n for n, _ in of_role.values())
        held = ", ".join(dtype for dtype in order if dtype in of_role)
        rows.append(
            {
                "role": role,
                "count": count,
                "bytes": size,
                "share": size / total if total else 0,
                "bars": bars,
                "dtypes": held,
            }
        )
    kinds = [
        {"dtype": d, "bytes": dtypes[d], "share": dtypes[d] / total if total else 0, "i": i % charts.SERIES}
        for i, d in enumerate(order)
    ]
    return {"rows": rows, "dtypes": kinds, "total": total, "more": max(0, len(report.sizes) - 40)}


# --- what the script shows


def _data(report: Report, limit: int) -> tuple[str, int]:
    """The tensors as JSON for the script, as many as fit in so many bytes; those that are not whole and odd ones first."""
    stats = report.numbers.tensors if report.numbers else {}
    forms: dict[tuple[str, str, int], int] = {}
    rows: list[str] = []
    left = limit

    def weight(tensor: Tensor) -> bool:
        s = stats.get(tensor.name)
        return not (tensor.lacks or (s and (s.nan or s.inf or s.zero_slabs)))

    for tensor in sorted(report.tensors, key=weight):
        form = (tensor.dtype, str(list(tensor.shape)) if tensor.dtype else "", tensor.nbytes)
        if form not in forms:
            forms[form] = len(forms)
            left -= len(json.dumps(form)) + 1
        row: list[Any] = [_clipped(tensor.name), forms[form], tensor.pieces, _clipped(tensor.lacks)]
        if s := stats.get(tensor.name):
            row.append(_numbers(s))
        text = json.dumps(row, separators=(",", ":"))
        left -= len(_inert(text)) + 1
        if left < 0:
            break
        rows.append(text)
    document = {"forms": list(forms), "all": len(report.tensors)}
    text = json.dumps(document, separators=(",", ":"))[:-1] + f',"rows":[{",".join(rows)}]}}'
    return _inert(text), len(rows)


def _json(value: Any) -> Any:
    return _markup(_inert(json.dumps(value, separators=(",", ":"))))


def _inert(text: str) -> str:
    """JSON that cannot end the element that it stands in, nor begin another."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _numbers(s: TensorStats) -> list[Any]:
    steps = density(s.histogram, s.min, s.max)
    drawn = (
        None
        if steps is None
        else [_round(steps.edges), _round(steps.heights), *_round((steps.below, steps.above))]
    )
    slabs = "; ".join(slab.text(len(s.shape)) for slab in s.zero_slabs)
    return [*_round((s.min, s.max, s.mean, s.std, s.zero_share)), s.nan, s.inf, slabs, drawn]


def _round(values: Iterable[float | int | None]) -> list[float | None]:
    """Five digits, and nothing that JSON has no word for."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.5g}") for v in values]


# --- figures

#: Roles and single tensors that have pictures of their own.
_ROLES, _NOTABLE = 9, 6


def _figures(report: Report) -> dict[str, Any]:
    """Everything that is drawn, and the tables beside it."""
    none: dict[str, Any] = {
        "by_role": [],
        "notable": [],
        "layers": [],
        "layers_left": 0,
        "roles_left": 0,
        "odd": [],
        "odd_left": 0,
    }
    after = report.numbers.tensors if report.numbers else {}
    before: Mapping[str, TensorStats] = {}
    if report.comparison and report.comparison.before and report.comparison.after:
        before, after = report.comparison.before, report.comparison.after
    if not after:
        return none
    drawn = report.undrawn is None
    roles: dict[str, list[str]] = {}
    for name in after:
        roles.setdefault(role_of(name), []).append(name)
    heavy = sorted(roles, key=lambda role: -sum(after[n].count for n in roles[role]))
    by_role = []
    for role in heavy[:_ROLES]:
        sides = [(f"{len(roles[role]):,} tensors", joined([after[n] for n in roles[role]]))]
        if old := [before[n] for n in roles[role] if n in before]:
            sides.insert(0, ("before", joined(old)))
        by_role.append(
            _distribution(role, sides, f"{len(roles[role]):,} tensor{'s' * (len(roles[role]) != 1)}", drawn)
        )
    notable = []
    for name, why in _notable(after, before, roles)[:_NOTABLE]:
        sides = [("before", before[name])] if name in before else []
        notable.append(_distribution(name, [*sides, ("after", after[name])], why, drawn))
    odd = sorted(
        ((name, s) for name, s in after.items() if s.zeros or s.nan or s.inf),
        key=lambda item: (-(item[1].nan + item[1].inf), -item[1].zero_share),
    )
    return {
        "by_role": by_role, "roles_left": max(0, len(heavy) - _ROLES), "notable": notable,
        "odd": [(n, s, before.get(n)) for n, s in odd[:20]], "odd_left": max(0, len(odd) - 20),
        **(_over_layers(after, before, heavy) if drawn else {"layers": [], "layers_left": 0}),
    }  # fmt: skip


def _over_layers(
    after: Mapping[str, TensorStats], before: Mapping[str, TensorStats], heavy: Sequence[str]
) -> dict[str, Any]:
    """Standard deviations over layers: two pictures with one scale where there is a before."""
    of_role = by_layer(after)
    chosen = [role for role in heavy if role in of_role][: charts.SERIES]
    pictures = []
    sides = [("before", by_layer(before))] if before else []
    sides.append(("after" if before else "", of_role))
    points = [
        (title, {role: [(layer, float(s.std or 0)) for layer, s in of.get(role, [])] for role in chosen})
        for title, of in sides
    ]
    values = [value for _, of in points for each in of.values() for _, value in each]
    if not values:
        return {"layers": [], "layers_left": 0}
    positive = [value for value in values if value > 0]
    logarithmic = len(positive) == len(values) and max(values) > 30 * min(values)
    domain = (min(values), max(values)) if logarithmic else (0.0, max(values) or 1.0)
    for title, of in points:
        drawn = charts.svg(
            charts.by_layer(
                of,
                title="standard deviation",
                domain=domain,
                logarithmic=logarithmic,
                width=400 if before else 620,
            )
        )
        pictures.append({"title": title, "svg": _markup(drawn[0]), "box": drawn[1], "log": logarithmic})
    return {"layers": pictures, "layers_left": max(0, len(of_role) - len(chosen))}


def _distribution(
    title: str, sides: Sequence[tuple[str, TensorStats]], why: str, pictures: bool
) -> dict[str, Any]:
    """A distribution in both views, and what the picture leaves out."""
    own = sides[-1][1]
    steps = [(name, density(s.histogram, s.min, s.max)) for name, s in sides]
    drawn = [(name, s) for name, s in steps if s is not None]
    told = [
        f"mean {_figure(own.mean)}",
        f"std {_figure(own.std)}",
        f"from {_figure(own.min)} to {_figure(own.max)}",
    ]
    if own.zeros:
        told.append(f"zeros {own.zero_share:.2%}, not drawn")
    if own.nan or own.inf:
        told.append(f"{own.nan:,} NaN, {own.inf:,} infinite, not drawn")
    if len(sides) == 2:
        old = sides[0][1]
        told.append(
            f"before: mean {_figure(old.mean)}, std {_figure(old.std)}; "
            + ("alike" if _alike(own, old) else f"overlap {min(own.overlap(old), 0.999):.1%}")
        )
    figure: dict[str, Any] = {
        "title": title,
        "why": why,
        "told": "; ".join(told),
        "cut": "",
        "two": len(drawn) == 2,
    }
    if not pictures:
        return figure
    if not drawn or drawn[-1][0] != sides[-1][0]:
        figure["cut"] = "no density: all that is not zero is of one value, or nothing is finite"
        return figure
    cut = drawn[-1][1]
    beyond = [
        f"{_share(share)} {where}"
        for share, where in (
            (cut.below, f"below {_figure(cut.edges[0])}"),
            (cut.above, f"above {_figure(cut.edges[-1])}"),
        )
        if share
    ]
    if beyond:
        figure["cut"] = f"tails cut: {' and '.join(beyond)}"
    linear = charts.svg(charts.densities(drawn))
    bins = charts.svg(charts.logarithmic([(name, s.histogram) for name, s in sides]))
    figure |= {"linear": (_markup(linear[0]), linear[1]), "bins": (_markup(bins[0]), bins[1])}
    return figure


def _alike(one: TensorStats, other: TensorStats) -> bool:
    """True for the same counts in all bins: sums of shares do not come to one exactly."""
    return all(getattr(one, k) == getattr(other, k) for k in ("histogram", "zeros", "nan", "inf"))


def _share(share: float) -> str:
    return f"{share:.2%}" if share >= 0.0001 else "less than 0.01 %"


def _notable(
    after: Mapping[str, TensorStats], before: Mapping[str, TensorStats], roles: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """Tensors that are worth a look, and why; the oddest first."""
    found: list[tuple[float, str, str]] = []
    for names in roles.values():
        stds = [std for name in names if (std := after[name].std)]
        usual = median(stds) if len(stds) > 2 else None
        for name in names:
            s = after[name]
            reasons: list[tuple[float, str]] = []
            if s.nan or s.inf:
                reasons.append((1000.0, f"{s.nan:,} NaN, {s.inf:,} infinite"))
            if s.zero_slabs:
                slab = s.zero_slabs[0].text(len(s.shape))
                reasons.append((500.0, f"zero throughout: {slab}"))
            if s.zero_share > 0.05 and s.zeros >= 100:
                reasons.append((100 * s.zero_share, f"{s.zero_share:.1%} zeros"))
            if usual and s.std and not 1 / 3 < s.std / usual < 3:
                ratio = s.std / usual
                reasons.append(
                    (20 * abs(math.log(ratio)), f"std is {ratio:.2g} times that of its like in other layers")
                )
            if name in before and (overlap := s.overlap(before[name])) < 0.95:
                reasons.append((200 * (1 - overlap), f"overlaps by {overlap:.0%} with what it was before"))
            if reasons:
                found.append((-max(r for r, _ in reasons), name, "; ".join(text for _, text in reasons)))
    return [(name, why) for _, name, why in sorted(found)]
