"""HTML of checkpoints, plans, manifests, differences and statistics in a notebook. Names are untrusted, so
all texts are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .errors import Finding
from .formatting import human, printable

__all__ = ["Bar", "figure", "shape", "table", "text"]

#: Maximum number of rows of a table; below a longer one, the total is stated.
_ROWS = 200
#: Maximum number of findings to list.
_FINDINGS = 20
#: Mark and colour of each severity. Mark and word also distinguish them, so colour is never the only cue. The
#: colours are readable on white and on black.
_MARKS = {"error": ("✕", "#d55e00"), "warning": ("!", "#b07400"), "note": ("·", "#808080")}
_CELL = "padding:.1em .7em;text-align:left;vertical-align:top;border-bottom:1px solid rgba(128,128,128,.3);"
_NUMBER = _CELL + "text-align:right;font-variant-numeric:tabular-nums;"


class Bar(float):
    """A fraction, drawn as a bar."""


def text(value: object) -> str:
    """Escape any value for HTML.

    The text cannot end an attribute or an element, and cannot affect the page.
    """
    return escape(printable(str(value)), quote=True)


def shape(extents: Iterable[int]) -> str:
    """Format a shape."""
    return f"[{', '.join(map(str, extents))}]"


def figure(x: float | None) -> str:
    """Format a number in statistics; integers are shown in full."""
    return "" if x is None else str(x) if isinstance(x, int) else f"{x:.4g}"


def table(
    title: str,
    head: Sequence[str],
    rows: Iterable[tuple[Any, ...]],
    count: int,
    *,
    findings: Iterable[Finding] = (),
    below: str = "",
) -> str:
    """Return HTML with a title, findings, a table, and a line below it.

    Args:
        title: the title.
        head: names of the columns.
        rows: their cells: texts, integers, and bars; the function reads only the rows that it shows.
        count: total number of rows.
        findings: findings to show.
        below: the line below the table.
    """
    lines = [f"<p style='margin:.4em 0'><b>{text(title)}</b></p>", _findings(list(findings))]
    if count:
        cells = "".join(f"<th style='{_CELL}'>{text(word)}</th>" for word in head)
        lines.append(f"<div style='overflow-x:auto'><table style='border-collapse:collapse'><tr>{cells}</tr>")
        for row, _ in zip(rows, range(_ROWS), strict=False):
            lines.append("<tr>" + "".join(map(_cell, row)) + "</tr>")
        lines.append("</table></div>")
    if count > _ROWS:
        lines.append(f"<p>{_ROWS:,} of {count:,} shown</p>")
    if below:
        lines.append(f"<p><small>{text(below)}</small></p>")
    return "<div>" + "".join(lines) + "</div>"


def _cell(value: object) -> str:
    if isinstance(value, Bar):
        # A length that is written out: nothing of a stranger's gets into an attribute.
        return (
            f"<td style='{_CELL}'><div "
            f"style='background:#0072b2;height:.8em;width:{100 * value:.1f}px'></div></td>"
        )
    if isinstance(value, int):
        return f"<td style='{_NUMBER}' title='{human(value)}'>{value:,}</td>"
    return f"<td style='{_CELL}'>{text(value)}</td>"


def _findings(findings: list[Finding]) -> str:
    order = list(_MARKS)
    listed = sorted(findings, key=lambda f: order.index(f.severity) if f.severity in order else len(order))
    lines = []
    for finding in listed[:_FINDINGS]:
        mark, colour = _MARKS.get(finding.severity, _MARKS["note"])
        what = (
            f"<b style='color:{colour}'>{mark} {text(finding.severity)} {text(finding.code)}</b> "
            f"{text(finding)}"
        )
        help = f"<br><small>{text(finding.advice)}</small>" if finding.advice else ""
        lines.append(f"<li style='list-style:none;margin:.2em 0'>{what}{help}</li>")
    if not lines:
        return ""
    more = f"<p>and {len(listed) - _FINDINGS:,} more findings</p>" if len(listed) > _FINDINGS else ""
    return f"<ul style='padding:0'>{''.join(lines)}</ul>{more}"
