"""A summary of a checkpoint from its headers alone: framework, step, topology, tensors, bytes and missing
parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..common import memory_budget
from ..common.errors import Finding
from ..common.formatting import human
from ..common.records import dataclass
from . import manifest_files
from .manifests import beside, read
from .open_checkpoint import CheckpointSource, as_checkpoint
from .planning import make_plan
from .promised import with_promised
from .tensor_rows import TensorRow, rows_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..common.options import OpenOptions

__all__ = ["Inspection", "inspect"]


@dataclass(frozen=True)
class Inspection:
    """The summary of a checkpoint from its headers.

    Examples:
        >>> inspection = fastshard.inspect("run")
        >>> inspection.framework, inspection.topology, inspection.parameters
        ('GPT-NeoX', {'tp': 2}, 70944)
    """

    #: Framework that wrote the checkpoint.
    framework: str
    #: Model family, if it is known.
    family: str | None
    #: Name of the step, if the checkpoint names its steps.
    step: str | None
    #: Parallel degrees, e.g. ``{"tp": 2}``.
    topology: dict[str, int]
    #: Number of files that were read, and their bytes.
    files: int
    file_bytes: int
    #: Number of tensors in the files; ``outputs`` are the full tensors that are merged from them.
    stored_tensors: int
    #: Number of all elements.
    parameters: int
    #: Number of full tensors and their bytes, by dtype.
    dtypes: dict[str, tuple[int, int]]
    #: Sizes of the model by their names in configs, e.g. ``hidden_size``.
    dimensions: dict[str, int]
    #: Values that are not tensors: iteration, arguments.
    metadata: dict[str, Any]
    #: The full tensors.
    outputs: list[TensorRow]
    #: All findings.
    findings: list[Finding]
    #: True if something outside the files states which tensors must exist.
    provable: bool
    #: Number of tensors that are missing or incomplete.
    incomplete: int = 0
    #: Number of all elements if every tensor were complete; None if unknown.
    expected_parameters: int | None = None

    @property
    def complete(self) -> bool:
        """True if the headers show no errors and nothing missing."""
        return not any(f.severity == "error" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, without findings and single tensors (``fastshard inspect --json``)."""
        return {
            "framework": self.framework,
            "family": self.family,
            "step": self.step,
            "topology": self.topology,
            "files": self.files,
            "file_bytes": self.file_bytes,
            "stored_tensors": self.stored_tensors,
            "tensors": len(self.outputs),
            "incomplete_tensors": self.incomplete,
            "parameters": self.parameters,
            "expected_parameters": self.expected_parameters,
            "dtypes": {d: {"tensors": n, "bytes": b} for d, (n, b) in self.dtypes.items()},
            "dimensions": self.dimensions,
            "metadata": self.metadata,
            "complete": self.complete,
        }

    def __repr__(self) -> str:
        step = f", {self.step}" if self.step else ""
        verdict = "complete by headers" if self.complete else "NOT complete"
        return (
            f"<fastshard.Inspection {self.framework}{step}: {len(self.outputs)} tensors, "
            f"{human(self.file_bytes)} in {self.files} files, {verdict}>"
        )


@memory_budget.kept
def inspect(
    source: CheckpointSource, *, memory: str | int | None = None, **opening: Unpack[OpenOptions]
) -> Inspection:
    """Describes a checkpoint by its headers: the framework that wrote it, its contents, and what is missing.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        memory: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Raises:
        FastshardError: if there is no checkpoint at the path.

    Examples:
        >>> fastshard.inspect("run")
        <fastshard.Inspection GPT-NeoX, global_step0: 40 tensors, 332 kB in 14 files, complete by headers>
        >>> [finding.headline for finding in fastshard.inspect("lossy").findings]
        ['global_step0/layer_03-model_01-model_states.pt: the file is missing (tp 1)']
    """
    checkpoint = as_checkpoint(source, **opening)
    plan = make_plan(with_promised(checkpoint.opened, only_kept=True))
    summary = plan.summary
    findings = list(plan.findings)
    if (manifest := beside(checkpoint)) is not None:
        known = {f.tensor for f in findings} | {file for f in findings for file in f.files}
        missing = manifest_files.find_missing(manifest, read(manifest), checkpoint)
        new = [f for f in missing if (f.tensor or f.file) not in known]
        findings += checkpoint.opened.gate.evaluate(new)
    files, file_bytes = checkpoint.extent
    return Inspection(
        framework=checkpoint.framework,
        family=checkpoint.family,
        step=checkpoint.step,
        topology=checkpoint.topology,
        files=files,
        file_bytes=file_bytes,
        stored_tensors=summary["stored_tensors"],
        parameters=summary["parameters"],
        dtypes=summary["dtypes"],
        dimensions=summary["dimensions"],
        metadata=checkpoint.metadata(),
        outputs=rows_of(plan),
        findings=findings,
        provable=plan.source.index.is_provable,
        incomplete=len(plan.lost),
        expected_parameters=plan.expected_parameters,
    )
