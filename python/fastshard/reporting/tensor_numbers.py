"""Statistics of the values of tensors: read in one pass, and grouped by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

from .. import _core
from ..checkpoint.plan import Plan
from ..common.errors import Finding, from_core
from ..common.progress import Progress
from ..models.tensor_roles import layer_of, role_of
from ..verification.stats import TensorStats

if TYPE_CHECKING:
    from .._core import RunOptions

#: Maximum number of single tensors with a separate chart.
_NOTABLE = 6


def read_through(
    plan: Plan, run: RunOptions, bar: Progress, title: str
) -> tuple[dict[str, TensorStats], dict[str, str], list[Finding]]:
    """Compute statistics and hashes of a plan's outputs, and return them with the findings."""
    if not plan.outputs:
        return {}, {}, []
    try:
        findings, hashes, found = plan.core.check({**run, "stats": "full"}, bar.phase(title))
    except _core.CoreError as error:
        # A page about it is what is asked for.
        return {}, {}, from_core(error).findings
    tensors = {
        name: TensorStats.from_dict(dtype, shape, found[name])
        for name, dtype, shape, _, _ in plan.outputs
        if name in found
    }
    return tensors, hashes, findings


def figures_of(s: TensorStats | None) -> str:
    """Summarize the values of a tensor."""
    if s is None:
        return "other bytes"
    return f"mean {s.mean:.4g}, std {s.std:.4g}" if s.mean is not None and s.std is not None else "no numbers"


def by_layer(tensors: Mapping[str, TensorStats]) -> dict[str, list[tuple[int, TensorStats]]]:
    """Group statistics by role and layer; omit roles that have a single layer."""
    roles: dict[str, list[tuple[int, TensorStats]]] = {}
    for name, s in tensors.items():
        layer = layer_of(name)
        if layer is not None and s.std is not None:
            roles.setdefault(role_of(name), []).append((layer, s))
    return {role: sorted(of, key=lambda e: e[0]) for role, of in roles.items() if len({n for n, _ in of}) > 1}


def worth_a_look(
    after: Mapping[str, TensorStats], before: Mapping[str, TensorStats]
) -> list[tuple[str, str]]:
    """List a few notable tensors with reasons, the most unusual first."""
    roles: dict[str, list[str]] = {}
    for name in after:
        roles.setdefault(role_of(name), []).append(name)
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
    return [(name, why) for _, name, why in sorted(found)[:_NOTABLE]]
