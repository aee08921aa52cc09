"""An opened checkpoint: a mapping of full tensors, which are merged when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.errors import Finding, exit_code
from ..common.listing import Listing
from .drafting import Opened
from .plan import Plan
from .planning import make_plan
from .tensor_map import Tensors

__all__ = ["Checkpoint"]


class Checkpoint(Tensors):
    """The full tensors of a checkpoint, under their names in its files.

    The mapping contains the tensors that ``fastshard merge`` would write. Values are read only when they are
    requested from a tensor. ``findings`` lists all problems. An incomplete tensor keeps its name, is listed
    in :attr:`incomplete`, and raises :class:`~fastshard.IncompleteError` when it is read.

    Examples:
        >>> checkpoint = fastshard.open("run")
        >>> checkpoint
        <fastshard.Checkpoint GPT-NeoX, step global_step0, tp 2: 40 tensors in 14 files>
        >>> list(checkpoint)[:2]
        ['0.word_embeddings.weight', '2.attention.dense.weight']
        >>> fastshard.open("lossy").incomplete[:2]
        ['3.attention.dense.bias', '3.attention.dense.weight']
    """

    def __init__(self, listing: Listing, opened: Opened, files: list[Any]) -> None:
        #: All files below the roots, by name.
        self.listing = listing
        #: The parts of the checkpoint that planning needs.
        self.opened = opened
        self._files = files
        self._merged: Plan | None = None

    @property
    def framework(self) -> str:
        """The framework that wrote the checkpoint."""
        return self.opened.source.framework

    @property
    def family(self) -> str | None:
        """Model family, if it is known."""
        return self.opened.source.model.family

    @property
    def step(self) -> str | None:
        """Name of the step, if the checkpoint names its steps."""
        return self.opened.source.step

    @property
    def topology(self) -> dict[str, int]:
        """Parallel degrees, e.g. ``{"tp": 2}``, as far as files and arguments state them."""
        source = self.opened.source
        places: dict[str, set[int]] = {}
        for unit in source.files.units:
            for dimension, place in unit.coords.items():
                places.setdefault(dimension, set()).add(place)
        return (
            {name: len(of) for name, of in places.items()}
            | source.binding.other_degrees
            | source.binding.degrees
        )

    @property
    def read_from(self) -> list[str]:
        """Source paths, which no result may overwrite."""
        return [*self.listing.given(), *self.opened.besides]

    @property
    def roots(self) -> list[Path]:
        """Directories from which the checkpoint was opened."""
        return list(self.listing.roots)

    @property
    def files(self) -> list[dict[str, Any]]:
        """Files that were read: path, format, bytes, number of tensors."""
        return [f for f in self._files if f is not None]

    @property
    def extent(self) -> tuple[int, int]:
        """Number of files, and their total bytes; for chunked arrays, of all files that contain chunks.

        For a store that is distributed over several hosts, all files below the roots count.
        """
        sizes = [file["size"] for file in self.files if file["format"] != "blocks"]
        if len(sizes) < len(self.files):
            # One file stands for a store, and beside it none of those behind is a file of tensors.
            stored = self.listing.files if len(self.roots) > 1 else self.opened.behind
            sizes += [file.size for file in stored]
        return len(sizes), sum(sizes)

    def metadata(self) -> dict[str, Any]:
        """Returns the values of the checkpoint that are not tensors (iteration, arguments)."""
        return dict(self.opened.source.files.values)

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, from names and headers."""
        return self._plan.findings

    @property
    def _plan(self) -> Plan:
        if self._merged is None:
            self._merged = make_plan(self.opened)
        return self._merged

    def __enter__(self) -> Checkpoint:
        return self

    def __repr__(self) -> str:
        step = f", step {self.step}" if self.step else ""
        degrees = "".join(f", {k} {v}" for k, v in self.topology.items() if v > 1)
        contents = f"{len(self)} tensors in {len(self.files)} files{_verdict(self)}"
        return f"<fastshard.Checkpoint {self.framework}{step}{degrees}: {contents}>"


def _verdict(checkpoint: Checkpoint) -> str:
    """Describe the errors of a checkpoint for its repr; return an empty text if there are none."""
    errors = [finding for finding in checkpoint.findings if finding.severity == "error"]
    if not errors:
        return ""
    word = "INCOMPLETE" if checkpoint.incomplete or exit_code(errors) == 3 else "BROKEN"
    return f", {word}: {len(errors)} {'error' if len(errors) == 1 else 'errors'}"
