"""Heuristic checks of a model that neither a table nor a reference describes: its layers are compared with
each other and with its config.

The checks use only names, shapes and dtypes of full tensors. A finding is an error if it has no other
explanation, and a warning if it may have one. Tensors that cannot be compared with others are only counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..common.errors import Finding
from ..common.formatting import printable, some
from ..common.records import dataclass, replace
from . import from_config as by_config
from .from_layers import ShapeDtype, check_stack, find_repeated, leave_out_equal_experts, stacks

__all__ = ["Evidence", "ShapeDtype", "judge", "unheld"]

#: Maximum number of names in a message.
_NAMED = 4


@dataclass(frozen=True)
class Evidence:
    """Findings about a model from its own tensors, and tensors that could not be compared."""

    findings: list[Finding]
    #: Names that no other layer repeats; a missing tensor of this kind would go unnoticed.
    alone: list[str]
    #: Number of tensors.
    count: int


def judge(
    tensors: Mapping[str, ShapeDtype],
    config: Mapping[str, Any] | None = None,
    *,
    saved_whole: bool = True,
    in_files: bool = False,
    lost: Iterable[str] = (),
) -> Evidence:
    """Check a model by comparing its layers with each other and with its config.

    Args:
        tensors: shape and dtype of each full tensor, by name.
        config: content of the model's config.json, if there is one.
        saved_whole: True for a complete saved model; False if only the trained part may be stored.
        in_files: True for a model in several files, one of which may be lost. With a single file, a number of
            layers that differs from the config is not an error, because model families count layers
            differently.
        lost: names of missing tensors that a finding already reports; their layers get no further findings.
    """
    few = None if lost else leave_out_equal_experts(tensors)
    if few is not None:
        evidence = _judge(few.tensors, config, saved_whole, in_files, (), few.further)
        # Where anything is wrong, or the experts are compared with nothing, each of them is looked at.
        if not evidence.findings and not any(name.startswith(tuple(few.further)) for name in evidence.alone):
            return replace(evidence, count=len(tensors))
    return _judge(tensors, config, saved_whole, in_files, lost)


def _judge(
    tensors: Mapping[str, ShapeDtype],
    config: Mapping[str, Any] | None,
    saved_whole: bool,
    in_files: bool,
    lost: Iterable[str],
    further: Mapping[str, int] | None = None,
) -> Evidence:
    """Check a model like :func:`judge`; ``further`` counts the experts that its tensors omit."""
    found = stacks(tensors, lost, further)
    numbers = None if config is None else by_config.ConfigNumbers(config)
    findings = [finding for stack in found for finding in check_stack(stack)]
    partial = not saved_whole and not by_config.holds_embedding(tensors)
    findings += [
        finding.replace(severity="warning") if partial else finding
        for finding in by_config.counts(found, numbers, tensors, in_files=in_files)
    ]
    if numbers is not None:
        findings += by_config.rows(tensors, numbers)
        findings += by_config.ends(tensors, config or {})
    repeated_names = find_repeated(found)
    return Evidence(findings, [name for name in tensors if name not in repeated_names], len(tensors))


def unheld(evidence: Evidence) -> str:
    """Describe the tensors that the check could not compare with others."""
    return (
        f"{evidence.count - len(evidence.alone)} of {evidence.count} tensors were compared with other "
        f"layers; the loss of the other {len(evidence.alone)} would not be noticed: "
        f"{printable(some(evidence.alone, _NAMED))}"
    )
