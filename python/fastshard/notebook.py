"""What a notebook shows of checkpoints, plans, manifests, differences and statistics. Names come from strangers: all is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from .shown import human, printable

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .errors import Finding
    from .manifests import Manifest
    from .planning import Plan
    from .stats import TensorStats
    from .verify import Difference

#: Rows of a table; of more it says how many there are.
_ROWS = 200
#: Findings that are listed.
_FINDINGS = 20
#: Told apart by the mark and the word too, never by the colour alone. Readable on white and on black.
_MARKS = {"error": ("✕", "#d55e00"), "warning": ("!", "#b07400"), "note": ("·", "#808080")}
_CELL = "padding:.1em .7em;text-align:left;vertical-align:top;border-bottom:1px solid rgba(128,128,128,.3);"
_NUMBER = _CELL + "text-align:right;font-variant-numeric:tabular-nums;"


class Bar(float):
    """A share of a whole, drawn as a bar."""


def text(value: object) -> str:
    """Anything, as text in HTML: what would end an attribute or an element is escaped, and what would drive the page."""
    return escape(printable(str(value)), quote=True)


def checkpoint(shown: Checkpoint) -> str:
    """An opened checkpoint: what is wrong with it, and its tensors."""
    total = sum(tensor.nbytes for tensor in shown.values()) or 1
    rows = (
        (name, tensor.dtype, _shape(tensor.shape), tensor.nbytes, Bar(tensor.nbytes / total))
        for name, tensor in shown.items()
    )
    return _block(repr(shown), shown.findings, ("tensor", "dtype", "shape", "bytes", ""), rows, len(shown))


def plan(shown: Plan) -> str:
    """A plan: what was found, and what would be written."""
    total = sum(size for _, _, _, size, _ in shown.outputs) or 1
    rows = (
        (name, dtype, _shape(shape), size, pieces, Bar(size / total))
        for name, dtype, shape, size, pieces in shown.outputs
    )
    head = ("tensor", "dtype", "shape", "bytes", "pieces", "")
    return _block(repr(shown), shown.findings, head, rows, len(shown.outputs))


def manifest(shown: Manifest) -> str:
    """A manifest: what was accepted, what it does not prove, and the tensors."""
    entries = shown.document["tensors"]
    rows = (
        (t["name"], t.get("dtype", ""), _shape(t.get("shape", ())), t.get("file", ""), t["blake3"][:12])
        for t in entries
    )
    head = ("tensor", "dtype", "shape", "file", "BLAKE3 (begins)")
    proven = f"not proven: {shown.document.get('not_proven', '')}"
    return _block(repr(shown), shown.findings, head, rows, len(entries), proven)


def differences(shown: Sequence[Difference]) -> str:
    """What two checkpoints differ in."""
    many = f"{len(shown)} tensors differ" if shown else "no difference: every tensor has the same bytes"
    rows = (
        (
            d.tensor,
            d.kind.replace("_", " "),
            d.a,
            d.b,
            f"{d.differing:,}" if d.differing else "",
            f"{d.largest:.4g}" if d.differing else "",
            d.distributions,
        )
        for d in shown
    )
    head = ("tensor", "what", "A", "B", "elements", "max |a-b|", "distributions")
    return _block(many, (), head, rows, len(shown))


def statistics(shown: Mapping[str, TensorStats]) -> str:
    """Distributions per tensor."""

    def figure(x: float | None) -> str:
        return "" if x is None else str(x) if isinstance(x, int) else f"{x:.4g}"

    rows = (
        (
            name,
            s.dtype,
            _shape(s.shape),
            *(figure(x) for x in (s.min, s.max, s.mean, s.std)),
            f"{s.zero_share:.2%}" if s.zeros else "",
            f"{s.nan:,} / {s.inf:,}" if s.nan or s.inf else "",
            "; ".join(slab.text(len(s.shape)) for slab in s.zero_slabs),
        )
        for name, s in shown.items()
    )
    head = ("tensor", "dtype", "shape", "min", "max", "mean", "std", "zeros", "NaN / inf", "zero slabs")
    return _block(f"statistics of {len(shown)} tensors", (), head, rows, len(shown))


def _shape(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _block(
    title: str,
    findings: Iterable[Finding],
    head: Sequence[str],
    rows: Iterable[tuple[Any, ...]],
    count: int,
    below: str = "",
) -> str:
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
        return f"<td style='{_CELL}'><div style='background:#0072b2;height:.8em;width:{100 * value:.1f}px'></div></td>"
    if isinstance(value, int):
        return f"<td style='{_NUMBER}' title='{human(value)}'>{value:,}</td>"
    return f"<td style='{_CELL}'>{text(value)}</td>"


def _findings(findings: list[Finding]) -> str:
    order = list(_MARKS)
    listed = sorted(findings, key=lambda f: order.index(f.severity) if f.severity in order else len(order))
    lines = []
    for finding in listed[:_FINDINGS]:
        mark, colour = _MARKS.get(finding.severity, _MARKS["note"])
        what = f"<b style='color:{colour}'>{mark} {text(finding.severity)} {text(finding.code)}</b> {text(finding)}"
        help = f"<br><small>{text(finding.help)}</small>" if finding.help else ""
        lines.append(f"<li style='list-style:none;margin:.2em 0'>{what}{help}</li>")
    if not lines:
        return ""
    more = f"<p>and {len(listed) - _FINDINGS:,} more findings</p>" if len(listed) > _FINDINGS else ""
    return f"<ul style='padding:0'>{''.join(lines)}</ul>{more}"
