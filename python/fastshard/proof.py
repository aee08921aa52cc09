"""What is not proven of a checkpoint or a result, in words."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import UNPROVEN, Finding

__all__ = ["not_proven"]


def not_proven(findings: Iterable[Finding]) -> list[str]:
    """What no run that reads a checkpoint can prove, and what this one could not."""
    findings = list(findings)
    unprovable = next((f for f in findings if f.code == "FS109" and f.file is None), None)
    told = "that the layout is right for the model: a hash cannot tell, logits can"
    if unprovable:
        told = f"{unprovable.message}; {unprovable.help}"
    return [told, *(f"{f.message}; {f.help}" for f in findings if f.code in UNPROVEN)]
