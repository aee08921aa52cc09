"""Facts about a checkpoint, including how much of it exists, for the cells below the statement."""

from __future__ import annotations

from typing import NamedTuple

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.missing_files import Absent
from ..checkpoint.plan import Plan
from ..common.formatting import counted, human
from ..common.records import dataclass

__all__ = ["Counts", "Fact", "counts_of", "degrees", "facts_of", "turned"]


class Fact(NamedTuple):
    """One cell: label, value and note; and how much exists of the total, if known."""

    label: str
    value: str
    note: str = ""
    have: int | None = None
    of: int | None = None

    @property
    def lacks(self) -> bool:
        """True if a part is missing."""
        return self.have is not None and self.of is not None and self.have < self.of

    @property
    def width(self) -> str:
        """The share that exists, in percent."""
        return f"{100 * (self.have or 0) / self.of:.2f}" if self.of else "0"


@dataclass(frozen=True)
class Counts:
    """The number of files, tensors and bytes of a checkpoint that exist."""

    #: Tensors that can be read in full, and tensors that are missing or incomplete.
    tensors: int
    lost: int
    stored: int
    parameters: int
    #: Number of parameters of the complete checkpoint, if known.
    all_parameters: int | None
    #: Files that were read, and files that are missing.
    files: int
    absent: int
    nbytes: int

    @property
    def expected(self) -> int:
        """Number of tensors in the complete checkpoint."""
        return self.tensors + self.lost


def counts_of(checkpoint: Checkpoint, plan: Plan, missing: Absent | None) -> Counts:
    """Count what exists of a checkpoint and what is missing."""
    summary = plan.summary
    files, nbytes = checkpoint.extent
    return Counts(
        summary["outputs"],
        len(plan.lost),
        summary["stored_tensors"],
        summary["parameters"],
        plan.expected_parameters,
        files,
        sum(len(set(files)) for files in missing.files.values()) if missing else 0,
        nbytes,
    )


def facts_of(checkpoint: Checkpoint, plan: Plan, counts: Counts, read: bool) -> tuple[Fact, ...]:
    """Return the cells of the page: first the description of the checkpoint, then how much of it exists."""
    c = counts
    dtypes = plan.summary["dtypes"]
    all_files, files = c.files + c.absent, f"{c.files:,}"
    # Of files that name none of their tensors nothing tells how many these were.
    of = f" of {c.expected:,}" if c.lost or not c.absent else ""
    return (
        Fact(
            "Framework",
            checkpoint.framework,
            f"model family {checkpoint.family}" if checkpoint.family else "",
        ),
        Fact("Step", checkpoint.step or "not stated"),
        Fact("Topology", degrees(checkpoint)),
        Fact(
            "Checked",
            "all data" if read else "headers alone",
            "headers, and every byte of the tensors" if read else "no value of a tensor was read",
        ),
        Fact(
            "Tensors in full",
            f"{c.tensors:,}{of}",
            f"from {c.stored:,} stored",
            *((c.tensors, c.expected) if of else ()),
        ),
        Fact(
            "Parameters in full",
            f"{c.parameters:,}",
            "of the tensors in full" if c.lost else "all of them",
            *((c.parameters, c.all_parameters) if c.lost and c.all_parameters is not None else ()),
        ),
        Fact(
            "Files", f"{files} of {all_files:,}" if c.absent else files, human(c.nbytes), c.files, all_files
        ),
        Fact(
            "Data types" if len(dtypes) > 1 else "Data type",
            ", ".join(dtypes) or "none",
            ", ".join(f"{d} x {n:,} ({human(b)})" for d, (n, b) in list(dtypes.items())[:4]),
        ),
    )


def degrees(checkpoint: Checkpoint) -> str:
    """Describe the degrees of parallelism, e.g. ``tp 2 x pp 2``."""
    return " x ".join(f"{k} {v}" for k, v in checkpoint.topology.items() if v > 1) or "not sharded"


def _step(checkpoint: Checkpoint) -> str | None:
    """Return the step, with the word ``step`` if its name is only a number."""
    return f"step {checkpoint.step}" if (checkpoint.step or "").isdecimal() else checkpoint.step


def _size(checkpoint: Checkpoint) -> tuple[str, str]:
    files, nbytes = checkpoint.extent
    return counted(files, "file"), human(nbytes)


def turned(facts: tuple[Fact, ...], before: Checkpoint, after: Checkpoint) -> tuple[Fact, ...]:
    """Return the cells of a comparison: the first two describe the checkpoint before and after."""
    was, now = (
        Fact(label, c.framework, ", ".join(filter(None, [degrees(c), _step(c), *_size(c)])))
        for label, c in (("Before", before), ("After", after))
    )
    return (was, now, *facts[2:])
