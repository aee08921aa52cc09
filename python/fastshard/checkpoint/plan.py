"""A plan: the outputs and their sources, before any byte is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .. import _core
from ..common.errors import Finding
from ..common.near_words import meant
from ..findings.causes import Causes
from ..layouts.declaration import Source
from .dequantised import Logical, weights_of
from .mapped_files import Maps

if TYPE_CHECKING:
    from .drafting import Opened

__all__ = ["Plan"]


class Plan:
    """A plan: every output tensor as views over pieces of source files.

    ``findings`` lists the findings from planning. A plan with an error among them cannot be written.

    Examples:
        >>> plan = fastshard.plan("run", to="hf", vocab_size=500)
        >>> plan
        <fastshard.Plan hf: 40 tensors, 290,198 bytes in 1 files>
    """

    def __init__(
        self,
        core: _core.Plan,
        findings: list[Finding],
        source: Source,
        target: str,
        writes_arrays: bool = False,
        keeps_names: bool = False,
        texts: dict[str, str] | None = None,
        main: str | None = None,
        lost: Mapping[str, int | None] | None = None,
        causes: Causes | None = None,
        each: list[Finding] | None = None,
        opened: Opened | None = None,
        unwritable: Sequence[Finding] = (),
    ) -> None:
        self.core = core
        self._opened = opened
        #: The reasons why the plan is not written, if any.
        self.unwritable = unwritable
        self.findings = findings
        self.source = source
        self.target = target
        #: True for a result that is an array store.
        self.writes_arrays = writes_arrays
        #: True for a conversion of a model without a table, which keeps its names and config.
        self.keeps_names = keeps_names
        #: Texts that are written next to the tensors (config.json and the like), by name.
        self.texts = texts or {}
        #: Incomplete tensors that the checkpoint declares or must contain, sorted, with the number of
        #: elements of each if known.
        self.lost = {name: of for name, of in sorted((lost or {}).items()) if name not in self.index}
        #: torch's name for the dtype of most floating-point bytes.
        self.main_dtype = main
        #: The findings before merging by cause: one for each file.
        self.each = findings if each is None else each
        #: The causes of findings of the core that are not among ``findings``.
        self.causes = causes or Causes()

    @property
    def expected_parameters(self) -> int | None:
        """Number of elements if all tensors were complete; None if an incomplete tensor has an unknown size.

        It is also None if an error hides the required tensors, or if a lost file with unlisted contents may
        have contained tensors that no layout names.
        """
        sizes = [size for size in self.lost.values() if size is not None]
        broken = any(f.severity == "error" for f in self.findings)
        unlisted = (
            self.source.binding.pass_unknown and not self.source.index.is_listed and bool(self.causes.files)
        )
        if len(sizes) < len(self.lost) or (broken and (unlisted or not sizes)):
            return None
        return int(self.summary["parameters"]) + sum(sizes)

    @cached_property
    def maps(self) -> Maps:
        """Maps of the source files, for views of outputs that are one contiguous range of one file."""
        return Maps(self.core.descriptor)

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of the plan: the id of its run and the key for resuming it."""
        return self.core.digest()

    @cached_property
    def outputs(self) -> list[tuple[str, str, list[int], int, int]]:
        """(name, dtype, shape, bytes, pieces) of every output tensor, in file order."""
        return self.core.outputs()

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each output by name, or by ``FILE:NAME`` if ranks have outputs with the same name."""
        index = {output[0]: i for i, output in enumerate(self.outputs)}
        if len(index) < len(self.outputs):
            index = {name: i for i, name in enumerate(self.core.names())}
        return index

    @cached_property
    def weights(self) -> dict[str, Logical]:
        """Quantised weights whose codes are outputs, by the names of the codes; access reads small
        records."""
        return {} if self._opened is None else weights_of(self._opened)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Counts, bytes, files, dtypes, dimensions and value operations."""
        return self.core.summary()

    def trace(self, name: str) -> dict[str, Any]:
        """Traces an output to rules, ranks, files and offsets, including the operations on its values.

        Raises:
            KeyError: if no output has this name; the message suggests a similar name.
        """
        from .provenance import excerpt_of, origin

        made = origin(excerpt_of(self.core, self.position(name)))
        weight = self.weights.get(name)
        return made if weight is None else {**made, "weight": weight.to_dict()}

    def position(self, name: str) -> int:
        """Returns the position of an output.

        Raises:
            KeyError: if no output has this name; the message suggests a similar name.
        """
        try:
            return self.index[name]
        except KeyError:
            raise KeyError(f"{name}{meant(str(name), [*self.index, *self.lost])}") from None

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data (``fastshard plan --json``)."""
        document: dict[str, Any] = json.loads(self.core.to_json())
        return document

    def __repr__(self) -> str:
        s = self.summary
        return (
            f"<fastshard.Plan {self.target}: {s['outputs']} tensors, {s['bytes']:,} bytes in "
            f"{len(s['files'])} files>"
        )

    def _repr_html_(self) -> str:
        from ..common import notebook_html

        total = sum(size for _, _, _, size, _ in self.outputs) or 1
        rows = (
            (name, dtype, notebook_html.shape(shape), size, pieces, notebook_html.Bar(size / total))
            for name, dtype, shape, size, pieces in self.outputs
        )
        head = ("tensor", "dtype", "shape", "bytes", "pieces", "")
        return notebook_html.table(repr(self), head, rows, len(self.outputs), findings=self.findings)
