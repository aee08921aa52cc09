"""Charts of distributions: Vega-Lite specs, and SVG that is drawn from them for the page, without style or
script.

Specs name colours by their role in the chart. In the page these are classes, so that one chart works for
light and dark mode and for print.
"""

from __future__ import annotations

import re
import resource
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

from ..common import codes
from ..common.errors import Finding
from ..common.formatting import human_memory, printable
from ..common.optional_imports import imported
from ..common.regex import compile_when_used
from ..verification.stats import HISTOGRAM_EDGES
from .densities import Steps

__all__ = ["SERIES", "Chart", "densities", "logarithmic", "svg", "undrawn"]

#: Number of series that a chart distinguishes by colour.
SERIES = 8
#: Colours of specs, which represent classes of the page. No other colours are drawn.
_INK, _MUTED, _GRID = "#010101", "#010102", "#010103"
_OF_SERIES = tuple(f"#0101{0x10 + i:02x}" for i in range(SERIES))
_CLASSES = {
    _INK: "ink",
    _MUTED: "mut",
    _GRID: "grd",
    **{colour: f"c{i}" for i, colour in enumerate(_OF_SERIES)},
}

#: A Vega-Lite spec.
Chart = dict[str, Any]

_CONFIG: dict[str, Any] = {
    "background": None,
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        "domainColor": _MUTED,
        "tickColor": _MUTED,
        "gridColor": _GRID,
        "labelColor": _INK,
        "titleColor": _INK,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
    },
    "legend": {
        "labelColor": _INK,
        "titleColor": _INK,
        "labelFontSize": 11,
        "labelLimit": 300,
        "symbolSize": 70,
    },
    "text": {"color": _INK},
}


def _chart(**parts: Any) -> Chart:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "config": _CONFIG,
        "padding": 4,
        **parts,
    }


def densities(sides: Sequence[tuple[str, Steps]], *, width: int = 300, height: int = 110) -> Chart:
    """Draw one density, or two on the same axes, the first as a dashed line and the second filled."""
    low = min(steps.edges[0] for _, steps in sides)
    high = max(steps.edges[-1] for _, steps in sides)
    layers = []
    for i, (_, steps) in enumerate(sides):
        # A step reaches to the next edge; the line comes up at the first and goes down at the last.
        xs = (steps.edges[0], *steps.edges)
        values = [{"x": x, "y": y} for x, y in zip(xs, (0.0, *steps.heights, 0.0), strict=True)]
        line = {
            "type": "line",
            "interpolate": "step-after",
            "color": _OF_SERIES[len(sides) - 1 - i],
            "strokeWidth": 1.5,
        }
        marks: list[dict[str, Any]] = [line]
        if i == len(sides) - 1:
            area = {"type": "area", "interpolate": "step-after", "color": _OF_SERIES[0], "opacity": 0.25}
            marks = [area, line]
        else:
            line["strokeDash"] = [4, 2]
        layers += [{"data": {"values": values}, "mark": mark} for mark in marks]
    x: Chart = {
        "field": "x",
        "type": "quantitative",
        "title": None,
        "scale": {"domain": [low, high], "nice": False},
    }
    x["axis"] = {"grid": False, "tickCount": 5, "format": ".3~g"}
    y: Chart = {"field": "y", "type": "quantitative", "title": "density"}
    y["axis"] = {"tickCount": 3, "format": ".2~g"}
    return _chart(width=width, height=height, encoding={"x": x, "y": y}, layer=layers)


def logarithmic(sides: Sequence[tuple[str, Sequence[int]]], *, width: int = 300, height: int = 110) -> Chart:
    """Draw the 64 bins of histograms side by side, as shares of the nonzero numbers."""
    layers = []
    for i, (_, histogram) in enumerate(sides):
        total = sum(histogram) or 1
        values = [{"bin": b, "share": n / total} for b, n in enumerate(histogram)]
        if i == len(sides) - 1:
            mark: dict[str, Any] = {
                "type": "bar",
                "color": _OF_SERIES[0],
                "binSpacing": 0,
                "width": width / 64 - 0.5,
            }
        else:
            mark = {
                "type": "line",
                "color": _OF_SERIES[1],
                "strokeDash": [4, 2],
                "interpolate": "step",
                "strokeWidth": 1.5,
            }
        layers.append({"data": {"values": values}, "mark": mark})
    # Edge i lies between bins i and i + 1.
    named = {0: "-64", 6: "-1", 16: "-2⁻¹⁰", 31: "0", 46: "2⁻¹⁰", 56: "1", 62: "64"}
    assert HISTOGRAM_EDGES[6] == -1 and HISTOGRAM_EDGES[56] == 1 and HISTOGRAM_EDGES[46] == 2**-10
    labels = " : ".join(f"datum.value == {i + 0.5} ? '{text}'" for i, text in named.items())
    x: Chart = {
        "field": "bin",
        "type": "quantitative",
        "title": None,
        "scale": {"domain": [-1, 64], "nice": False},
    }
    x["axis"] = {
        "grid": False,
        "values": [i + 0.5 for i in named],
        "labelExpr": f"{labels} : ''",
        "labelOverlap": False,
    }
    y: Chart = {"field": "share", "type": "quantitative", "title": "share"}
    y["axis"] = {"tickCount": 3, "format": ".0%"}
    return _chart(width=width, height=height, encoding={"x": x, "y": y}, layer=layers)


def undrawn() -> Finding | None:
    """Return the reason why this process cannot draw pictures; None if it can.

    vl-convert runs V8, which reserves tens of GiB of address space and ends the process if it cannot. The
    amount differs from version to version, so the page has no pictures under any limit.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return Finding.of(
        codes.UNSUPPORTED,
        f"the page has no charts: this process may use {human_memory(limit)} of address space, and the "
        "chart renderer needs it unlimited",
        severity="warning",
        help="run it where `ulimit -v` prints unlimited",
    )


def needed() -> Any:
    """Import vl-convert.

    Raises:
        FastshardError: ``FS514`` if vl-convert is not installed.
    """
    return imported("vl_convert", purpose="pictures of distributions are drawn by vl-convert", extra="report")


#: SVG elements that are allowed in the page, because charts contain untrusted names and the output of
#: vl-convert may change.
_ELEMENTS = frozenset(("svg", "g", "path", "line", "rect", "circle", "text", "tspan"))
_ATTRIBUTES = frozenset(
    (
        "d",
        "transform",
        "x",
        "y",
        "x1",
        "x2",
        "y1",
        "y2",
        "dx",
        "dy",
        "cx",
        "cy",
        "r",
        "width",
        "height",
        "text-anchor",
        "font-size",
        "stroke-width",
        "stroke-dasharray",
        "opacity",
        "fill-opacity",
        "stroke-opacity",
    )
)
#: Numbers with more digits than a screen can show.
_LONG = compile_when_used(r"-?[0-9]+\.[0-9]{3,}(?![0-9e])")
_SVG = "{http://www.w3.org/2000/svg}"


def svg(chart: Chart) -> tuple[str, str]:
    """Draw a chart; return the content of its ``svg`` element, and its size as a view box."""
    drawn = ET.fromstring(needed().vegalite_to_svg(chart, vl_version="5.20"))
    parts: list[str] = []
    for child in drawn:
        _write(child, parts)
    return "".join(parts), drawn.get("viewBox", "0 0 1 1")


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}"


def _write(element: ET.Element, parts: list[str]) -> None:
    from html import escape

    tag = element.tag.removeprefix(_SVG)
    if tag not in _ELEMENTS:
        return
    attributes, classes = [], []
    for name, value in element.attrib.items():
        if name in ("fill", "stroke"):
            known = _CLASSES.get(value.lower())
            if known:
                classes.append(f"{name[0]}-{known}")
        elif name in _ATTRIBUTES and not (name in ("opacity", "stroke-opacity") and value == "1"):
            attributes.append(f' {name}="{escape(_LONG.sub(_rounded, value))}"')
    inside: list[str] = []
    if tag in ("text", "tspan") and element.text:
        inside.append(escape(printable(element.text)))
    for child in element:
        _write(child, inside)
    visible = tag in ("text", "tspan") and inside
    if tag == "g" or tag == "svg":
        if not inside:
            return
        if not attributes and not classes:
            parts.extend(inside)
            return
    elif not visible and not classes:
        return  # Neither filled nor drawn.
    if classes:
        attributes.append(f' class="{" ".join(classes)}"')
    parts.append(
        f"<{tag}{''.join(attributes)}>{''.join(inside)}</{tag}>"
        if inside
        else f"<{tag}{''.join(attributes)}/>"
    )
