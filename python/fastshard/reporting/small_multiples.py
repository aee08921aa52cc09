"""Small charts side by side: the standard deviation of each kind of tensor by layer, with axes from zero and
labelled outliers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..verification.stats import TensorStats
from .page_markup import clipped, escaped, markup
from .tensor_numbers import by_layer

__all__ = ["multiples", "picture"]

#: Maximum number of kinds of tensors with a chart.
MOST = 6
#: Minimum factor between a layer and its neighbours for a label.
_STANDS_OUT = 1.5
_NEAR = 5
_LEFT, _RIGHT, _TOP, _BASE = 44.0, 332.0, 18.0, 94.0

#: Layers and values, in the order of the layers.
Points = Sequence[tuple[int, float]]


def multiples(
    after: Mapping[str, TensorStats], before: Mapping[str, TensorStats], heavy: Sequence[str]
) -> tuple[list[dict[str, Any]], int]:
    """Draw the pictures of the largest kinds, and count the kinds that are omitted."""
    sides = [{role: _means(of) for role, of in by_layer(side).items()} for side in (after, before)]
    chosen = [role for role in heavy if role in sides[0]]
    return [picture(role, sides[0][role], sides[1].get(role, ())) for role in chosen[:MOST]], max(
        0, len(chosen) - MOST
    )


def _means(of: Sequence[tuple[int, TensorStats]]) -> list[tuple[int, float]]:
    """Return one value for each layer: the mean if a layer has several tensors of the kind."""
    layers: dict[int, list[float]] = {}
    for layer, s in of:
        layers.setdefault(layer, []).append(float(s.std or 0))
    return [(layer, sum(values) / len(values)) for layer, values in layers.items()]


def picture(role: str, points: Points, before: Points = ()) -> dict[str, Any]:
    """Draw one picture: a line from zero, the earlier one dashed, and the layer that stands out."""
    layers = [layer for layer, _ in (*points, *before)]
    low, high = min(layers), max(layers)
    top = max(value for _, value in (*points, *before)) or 1.0

    def x(layer: int) -> float:
        return _LEFT + (layer - low) / ((high - low) or 1) * (_RIGHT - _LEFT)

    def y(value: float) -> float:
        return _BASE - value / top * (_BASE - _TOP)

    def line(of: Points, kind: str) -> str:
        at = " ".join(f"{x(layer):.1f},{y(value):.1f}" for layer, value in of)
        return f'<polyline class="{kind}" points="{at}"/>'

    parts = [f'<path class="p-axis" d="M{_LEFT} {level}H{_RIGHT}"/>' for level in (_BASE, _TOP)]
    parts += [_text(_LEFT - 5, _BASE + 4, "end", "0"), _text(_LEFT - 5, _TOP + 4, "end", f"{top:.2g}")]
    parts += [_text(x(layer), _BASE + 18, "middle", str(layer)) for layer in _ticks(low, high)]
    parts += [line(before, "p-ref")] if before else []
    parts.append(line(points, "p-line"))
    out = _outliers(points)
    for layer, value, times in out[:1]:
        parts.append(f'<path class="p-hot" d="M{x(layer):.1f} {y(value) + 3:.1f}l-5 -9h10z"/>')
        right = x(layer) > (_LEFT + _RIGHT) / 2
        said = f"layer {layer}: {value:.2g}, {times:.2g} x its neighbours"
        parts.append(
            _text(
                x(layer) + (-10 if right else 10),
                max(12.0, y(value) + 1),
                "end" if right else "start",
                said,
                "hi",
            )
        )
    values = [value for _, value in points]
    named = ", ".join(str(layer) for layer, _, _ in out[:8])
    note = f"{len(out)} layer{'s' * (len(out) != 1)} stand{'s' * (len(out) == 1)} out" if out else ""
    told = (
        f"layers {named} stand out"
        if len(out) > 1
        else f"layer {named} stands out"
        if out
        else "no layer stands out"
    )
    return {
        "role": role,
        "note": note,
        "label": f"Standard deviation by layer. {clipped(role)}: {min(values):.3g} to {max(values):.3g}; "
        f"{told}",
        "svg": markup("".join(parts)),
    }


def _ticks(low: int, high: int) -> list[int]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if (high - low) / s <= 5)
    inner = [n for n in range(low, high, step) if high - n > step // 2]
    return [*inner, high]


def _outliers(points: Points) -> list[tuple[int, float, float]]:
    """List layers that differ from those around them: layer, value, factor; the furthest first."""
    found = []
    values = [value for _, value in points]
    for i, (layer, value) in enumerate(points):
        near = values[max(0, i - _NEAR) : i] + values[i + 1 : i + 1 + _NEAR]
        usual = median(near) if len(near) > 2 else 0.0
        if usual > 0 and not 1 / _STANDS_OUT < value / usual < _STANDS_OUT:
            found.append((layer, value, value / usual))
    return sorted(found, key=lambda f: -max(f[2], 1 / f[2] if f[2] else 1e9))


def _text(x: float, y: float, anchor: str, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'
