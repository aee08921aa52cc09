"""The page of a report: a Jinja2 template whose security policy allows only its own content.

All texts are untrusted. `printable` escapes control characters, then Jinja2 escapes HTML. The data of the
script is JSON without ``<``, and the script inserts it into the page only as text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Iterable
from importlib import resources
from typing import Any

from ..common import json_text
from ..common.formatting import counted, human
from ..common.optional_imports import imported
from ..common.regex import compile_when_used
from ..verification.stats import TensorStats
from . import charts
from .densities import density
from .facts import Fact
from .grid import STATES, Grid
from .page_became import became_rows, key
from .page_figures import figures
from .page_findings import articles, links
from .page_grid import Links, Part, grid_rows
from .page_markup import CLIP, MOST_DATA, Limits, clipped, escaped, markup
from .report_data import Report, Tensor
from .statement import Statement, statement

__all__ = ["LIMIT", "MARK", "needed", "rendered"]

#: The marker near the start of fastshard's pages.
MARK = b'<meta name="generator" content="fastshard '

#: Maximum size of a page in bytes.
LIMIT = 2_000_000


#: Allowed names in links.
_ANCHOR = compile_when_used(r"[\w./:-]{1,300}")
#: Limits that are tried in turn until the page is small enough.
_LIMITS = (
    Limits(),
    Limits(findings=10, families=80, problems=40, changes=50, data=MOST_DATA // 2, listed=300),
    Limits(findings=3, families=20, problems=10, changes=10, bands=40, data=100_000, listed=20),
)


def needed() -> Any:
    """Import Jinja2.

    Raises:
        FastshardError: ``FS514`` if Jinja2 is not installed.
    """
    return imported("jinja2", purpose="a report is made with Jinja2", extra="report")


def rendered(report: Report) -> str:
    """Render the page of a report: the same bytes for the same report.

    Raises:
        FastshardError: ``FS514`` if Jinja2 is not installed, or vl-convert if there are distributions.
    """
    drawn = figures(report)
    for limits in _LIMITS:
        page = _filled(report, drawn, limits)
        if len(page.encode()) <= LIMIT:
            return page
    raise AssertionError("a page whose parts are bounded is too large")


def _filled(report: Report, figures: dict[str, Any], limits: Limits) -> str:
    made = articles(report, limits)
    grid = (
        grid_rows(_parts(report, report.grid, functools.partial(links, made)), limits)
        if report.grid
        else None
    )
    style, script = _asset("page.css") + (grid["rules"] if grid else ""), _asset("page.js")
    say = statement(report)
    about = {
        "verdict": say.word,
        "summary": summary(report, say),
        "findings": [f.to_dict() for a in made for f in a.findings[:3]] if limits.data == MOST_DATA else [],
        "checks": [[c.name, c.state, c.text] for c in report.checks],
        "grid": {"columns": [c.label for c in grid["columns"]], "rows": grid["names"]} if grid else {},
    }
    data, shown = _data(report, limits.data, about)
    became = report.comparison.became if report.comparison else ()
    return str(
        _template().render(
            r=report,
            say=say,
            facts=[Fact(*fact) for fact in report.facts],
            articles=made,
            causes=sum(len({f.message for f in group.findings}) for group in report.findings),
            counts=_counted(report),
            became=became_rows(became),
            keys=[key(0), key(1)],
            listed=report.tensors[: limits.listed],
            states=STATES,
            limits=limits,
            style=markup(style),
            script=markup(script),
            policy=_policy(style, script),
            data=markup(data),
            data_shown=shown,
            grid=grid,
            sizes=_sizes(report),
            **figures,
        )
    )


def _parts(report: Report, grid: Grid, links: Links) -> list[Part]:
    """Return the rows of the checkpoint; for a conversion, those of the earlier checkpoint first."""
    grids = report.comparison.grids if report.comparison else None
    # Where something is wrong, its layers have the numbers of its own framework.
    if grids is None or grid.problems:
        return [Part(grid, links)]
    was, now = (Fact(*fact) for fact in report.facts[:2])
    return [
        Part(grids[0], lambda band, state: (), f"{was.label}: {was.value}", was.note),
        Part(grids[1], links, f"{now.label}: {now.value}", now.note),
    ]


def _counted(report: Report) -> str:
    notes = sum(len(group.findings) for group in report.findings if group.severity == "note")
    return ", ".join(
        [counted(report.errors, "error"), counted(report.warnings, "warning"), counted(notes, "note")]
    )


def summary(report: Report, say: Statement) -> str:
    """Format the statement and the facts as Markdown, for an issue or a pull request."""
    rows = [f"| {_cell(f.label)} | {_cell(f.value)} |" for f in (Fact(*fact) for fact in report.facts)]
    path = _cell(", ".join(report.paths[:3]))
    lines = [
        f"**{say.word}: {clipped(say.why)}**",
        "",
        "| | |",
        "|---|---|",
        f"| checkpoint | {path} |",
        *rows,
        "",
    ]
    return "\n".join(
        [*lines, f"{clipped(say.advice)} `{clipped(say.command)}`", "", f"fastshard {report.version}"]
    )


def _cell(text: str) -> str:
    return clipped(text).replace("|", "\\|")


@functools.cache
def _template() -> Any:
    jinja2 = needed()

    def finalize(value: Any) -> Any:
        return value if hasattr(value, "__html__") else clipped(value) if isinstance(value, str) else value

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fastshard.reporting", ""),
        autoescape=True,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Any] = {
        "human": human,
        "n": lambda n: f"{n:,}",
        "finding": str,
        "anchor": lambda name: bool(_ANCHOR.fullmatch(name)),
        "long": lambda text: markup(escaped(clipped(text, 10 * CLIP))),
    }
    environment.filters |= filters
    return environment.get_template("page.html.j2")


def _asset(name: str) -> str:
    return resources.files("fastshard.reporting").joinpath(name).read_text("utf-8")


def _policy(style: str, script: str) -> str:
    """Return the page's content security policy: load nothing, and run only this style and script."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; img-src "
        "data:; "
        "base-uri 'none'; form-action 'none'"
    )


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


def _data(report: Report, limit: int, about: dict[str, Any]) -> tuple[str, int]:
    """Format as many tensors as fit into a number of bytes as JSON for the script.

    Incomplete and unusual ones come first.
    """
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
        row: list[Any] = [clipped(tensor.name), forms[form], tensor.pieces, clipped(tensor.lacks)]
        if s := stats.get(tensor.name):
            row.append(_numbers(s))
        text = json_text.compact(row)
        left -= len(_inert(text)) + 1
        if left < 0:
            break
        rows.append(text)
    document = {**about, "forms": list(forms), "all": len(report.tensors)}
    text = json_text.compact(document)[:-1] + f',"rows":[{",".join(rows)}]}}'
    return _inert(text), len(rows)


def _inert(text: str) -> str:
    """Escape JSON so that it cannot end its element or begin another."""
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
    """Round numbers to five digits, and replace those that JSON cannot express."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.5g}") for v in values]
