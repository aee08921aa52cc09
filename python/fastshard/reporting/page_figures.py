"""The figures of a report's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..models.tensor_roles import role_of
from ..verification.stats import TensorStats
from . import charts
from .densities import density, joined
from .largest_values import Place
from .page_markup import figure_text, markup
from .report_data import Report
from .small_multiples import multiples
from .tensor_numbers import worth_a_look

#: Maximum number of roles with a separate chart.
_ROLES = 9


def figures(report: Report) -> dict[str, Any]:
    """Return all figures, and the tables next to them."""
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
    places = report.numbers.largest if report.numbers else {}
    for name, why in worth_a_look(after, before):
        sides = [("before", before[name])] if name in before else []
        notable.append(
            _distribution(name, [*sides, ("after", after[name])], why, drawn, places.get(name, ()))
        )
    odd = sorted(
        ((name, s) for name, s in after.items() if s.zeros or s.nan or s.inf),
        key=lambda item: (-(item[1].nan + item[1].inf), -item[1].zero_share),
    )
    layers, layers_left = multiples(after, before, heavy) if drawn else ([], 0)
    return {
        "by_role": by_role,
        "roles_left": max(0, len(heavy) - _ROLES),
        "notable": notable,
        "odd": [(n, s, before.get(n)) for n, s in odd[:20]],
        "odd_left": max(0, len(odd) - 20),
        "layers": layers,
        "layers_left": layers_left,
    }


def _distribution(
    title: str,
    sides: Sequence[tuple[str, TensorStats]],
    why: str,
    pictures: bool,
    largest: Sequence[Place] = (),
) -> dict[str, Any]:
    """Return a distribution in both views, and what the picture omits."""
    own = sides[-1][1]
    steps = [(name, density(s.histogram, s.min, s.max)) for name, s in sides]
    drawn = [(name, s) for name, s in steps if s is not None]
    told = [
        f"mean {figure_text(own.mean)}",
        f"std {figure_text(own.std)}",
        f"from {figure_text(own.min)} to {figure_text(own.max)}",
    ]
    if largest:
        told.append("largest: " + ", ".join(f"{figure_text(value)} at {list(at)}" for at, value in largest))
    if own.zeros:
        told.append(f"zeros {own.zero_share:.2%}, not drawn")
    if own.nan or own.inf:
        told.append(f"{own.nan:,} NaN, {own.inf:,} infinite, not drawn")
    if len(sides) == 2:
        old = sides[0][1]
        told.append(
            f"before: mean {figure_text(old.mean)}, std {figure_text(old.std)}; "
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
        figure["cut"] = "no density: all nonzero values are equal, or none is finite"
        return figure
    cut = drawn[-1][1]
    beyond = [
        f"{_share(share)} {where}"
        for share, where in (
            (cut.below, f"below {figure_text(cut.edges[0])}"),
            (cut.above, f"above {figure_text(cut.edges[-1])}"),
        )
        if share
    ]
    if beyond:
        figure["cut"] = f"tails cut: {' and '.join(beyond)}"
    linear = charts.svg(charts.densities(drawn))
    bins = charts.svg(charts.logarithmic([(name, s.histogram) for name, s in sides]))
    figure |= {"linear": (markup(linear[0]), linear[1]), "bins": (markup(bins[0]), bins[1])}
    return figure


def _alike(one: TensorStats, other: TensorStats) -> bool:
    """Return True if all bins have equal counts, up to rounding."""
    return all(getattr(one, k) == getattr(other, k) for k in ("histogram", "zeros", "nan", "inf"))


def _share(share: float) -> str:
    return f"{share:.2%}" if share >= 0.0001 else "less than 0.01 %"
