"""A plan with everything that its run needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.manifests import Manifest
from ..checkpoint.plan import Plan
from ..common.errors import Finding
from ..common.options import WriteRequest
from ..common.records import dataclass, field
from .companion_files import CopiedFile

if TYPE_CHECKING:
    from .._core import RunOptions, WriteSettings

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """A plan and everything that its run needs."""

    checkpoint: Checkpoint
    plan: Plan
    #: Memory, threads and the like.
    run: RunOptions
    #: Files to copy along with the result.
    copies: list[CopiedFile]
    #: The origin of copied files that come from a folder above the checkpoint, as a path relative to it, by
    #: name.
    above: dict[str, str]
    #: True if the source was compared with a manifest, which rules out swapped files.
    settled: bool
    #: Findings before the run.
    findings: list[Finding]
    #: Files of the source from which the result takes nothing.
    left_out: list[str]
    #: Additional records for the manifest, besides those of the source, by name.
    records: dict[str, Any] = field(default_factory=dict)

    def set_up(self, request: WriteRequest) -> WriteSettings:
        """Return the settings of a write in the form that the core reads."""
        return {
            "threads": self.run["threads"],
            "memory": self.run["memory"],
            "publish": request.to_dict(),
            "values": {**self.plan.source.files.values, **self.records},
            "above": self.above,
            "expected": self.settled,
            "gate": self.checkpoint.opened.gate.to_dict(self.findings),
        }

    def manifest(self, written: tuple[str, list[Finding]]) -> Manifest:
        """Make the manifest from the core's output."""
        document, found = written
        manifest = Manifest.written(document, [*self.findings, *found])
        manifest.left_out = self.left_out
        return manifest
