"""What the values of tensors come to: read through once, and put together by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import _core
from ..checkpoint.plan import Plan
from ..common.errors import Finding, from_core
from ..common.progress import Progress
from ..models.tensor_roles import layer_of, role_of
from ..verification.stats import TensorStats

if TYPE_CHECKING:
    from .._core import RunOptions


def read_through(
    plan: Plan, run: RunOptions, bar: Progress, title: str
) -> tuple[dict[str, TensorStats], dict[str, str], list[Finding]]:
    """Statistics and hashes of a plan's outputs, and what came up while they were read."""
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
    """Says what the values of a tensor come to."""
    if s is None:
        return "other bytes"
    return f"mean {s.mean:.4g}, std {s.std:.4g}" if s.mean is not None and s.std is not None else "no numbers"


def by_layer(tensors: Mapping[str, TensorStats]) -> dict[str, list[tuple[int, TensorStats]]]:
    """Statistics by role and layer; roles that have a single layer say nothing over layers and are left out."""
    roles: dict[str, list[tuple[int, TensorStats]]] = {}
    for name, s in tensors.items():
        layer = layer_of(name)
        if layer is not None and s.std is not None:
            roles.setdefault(role_of(name), []).append((layer, s))
    return {role: sorted(of, key=lambda e: e[0]) for role, of in roles.items() if len({n for n, _ in of}) > 1}
