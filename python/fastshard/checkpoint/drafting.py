"""The inputs of a plan: an opened checkpoint, the requested part of its source, and the core's draft."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import _core
from ..common import codes, memory_budget
from ..common.errors import FastshardError, Finding, from_core
from ..common.gate import Gate
from ..common.listing import File
from ..common.records import dataclass, field, replace
from ..findings.causes import Causes, causes_of
from ..layouts import tables as layouts
from ..layouts.declaration import Optimizer, Source
from ..models.config_json import find_text_config
from ..targets.base import Target
from ..targets.form import Form
from ..targets.registry import TARGETS, keeps_all
from ..targets.request import Request
from .quantised_weights import QuantisedWeights

if TYPE_CHECKING:
    from ..expected.expected_list import ExpectedTensors
    from ..expected.reference import Reference
    from .taken_tensors import TakenTensors

#: The placement of outputs in a plan that is only read, never written.
UNPLACED: dict[str, Any] = {
    "files": [],
    "max_shard_size": 1 << 62,
    "texts": {},
    "dtypes": {},
    "constants": {},
    "pointers": [],
}


class Promised:
    """The tensors that a config promises according to transformers, listed in a separate thread."""

    def __init__(self, listing: Callable[[], ExpectedTensors]) -> None:
        """Start to list the tensors; ``listing`` raises FastshardError if it cannot list them."""
        self._listed: ExpectedTensors | None = None
        self._why: str | BaseException = ""
        self._thread = threading.Thread(target=self._list, args=(listing,), daemon=True)
        self._thread.start()

    def _list(self, listing: Callable[[], ExpectedTensors]) -> None:
        try:
            self._listed = listing()
        except FastshardError as error:
            self._why = error.findings[0].message
        except BaseException as error:
            self._why = error

    @property
    def listed(self) -> ExpectedTensors | None:
        """The list, once it is complete; None if it could not be built."""
        self._thread.join()
        if isinstance(self._why, BaseException):
            raise self._why
        return self._listed

    @property
    def why(self) -> str:
        """The reason why there is no list; empty if there is one."""
        return "" if self.listed is not None else str(self._why)


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint as planning sees it: declaration, files, and the findings of opening."""

    source: Source
    catalog: _core.Catalog
    findings: list[Finding]
    #: Files in catalog order.
    files: Sequence[File]
    #: Names of these files in findings: the path, with the root if several roots have the same path.
    labels: Sequence[str]
    #: All files with data, including every file of a store, which the catalog counts as one.
    behind: list[File]
    #: The reference that the checkpoint is compared with, if any.
    reference: Reference | None = None
    #: The rules that set the severity of findings; they are not applied to ``findings``.
    gate: Gate = field(default_factory=Gate)
    #: True if transformers may be queried for the tensors that the config promises.
    asks_transformers: bool = False
    #: The answer of transformers, after the query.
    promised: Promised | None = None
    #: Weights that are stored quantised, by the model's own names.
    quantised: QuantisedWeights = field(default_factory=QuantisedWeights)
    #: Additional paths to read, as given: an adapter, and the model from which missing parts are taken.
    besides: Sequence[str] = ()
    #: The tensors that are taken from another model.
    taken: TakenTensors | None = None

    def find_causes(self, findings: Sequence[Finding], source: Source | None = None) -> Causes:
        """Find the causes among findings, which explain the tensors that are missing because of them."""
        paths = [file.path for file in self.files]
        return causes_of(findings, source or self.source, paths, self.catalog.names, self.labels)

    @property
    def is_composite(self) -> bool:
        """True for a Hugging Face model with towers for which a table describes only the text model."""
        model = self.source.model
        return bool(model.hf_names) and find_text_config(model.config or {}) is not None

    @property
    def is_described(self) -> bool:
        """True if a table describes the complete model."""
        return self.source.binding.layout is not None and not self.is_composite

    @property
    def listed(self) -> ExpectedTensors | None:
        """The list from transformers for the config, once it is complete; None if there is none."""
        return None if self.promised is None else self.promised.listed


@dataclass(frozen=True)
class CoreRequest:
    """The request to the core for a draft; by default every tensor of the source as it is stored.

    The core reads the fields by their names.
    """

    source: Source
    #: The copy of the weights to use: ``params`` or ``masters``; None for the source's default.
    weights: str | None = None
    #: True to include the optimizer state.
    optimizer: bool = False
    #: None for a merge.
    target: Form | None = None
    #: Dtype of floating-point outputs, by its safetensors name; None to keep each dtype.
    dtype: str | None = None
    #: Outputs that keep their dtype: ``names`` (or last parts of names), and ``nothing`` if none does.
    keep: Mapping[str, object] = field(default_factory=dict)
    #: True to average replicas that differ.
    mean_replicas: bool = False
    #: Glob patterns of outputs; all outputs if there are none.
    include: Iterable[str] = ()
    exclude: Iterable[str] = ()
    #: Tensors to compute from their codes, and the stored names of tensors that only these computations
    #: need.
    coded: Sequence[Mapping[str, object]] = ()
    left_out: frozenset[str] = frozenset()
    #: The table to read the source with; None for the table of the source.
    table: _core.Table | None = None


@dataclass(frozen=True)
class Merged:
    """A draft to compare with a reference, with its source and the origin of its names."""

    draft: _core.Draft
    source: Source
    #: False for a conversion.
    is_merge: bool
    #: The request that the core drafted.
    core_request: CoreRequest
    #: Description of how its names were changed to the reference's; empty if they were not.
    renamed: str


def taken(opened: Opened, request: Request) -> Source:
    """Return the requested part of a source, with the vocabulary size of the request."""
    source = opened.source
    if source.names.is_chosen or not keeps_all(request.to):
        source = source.weights_only(opened.catalog.names, request.optimizer)
    elif request.to is None:
        source = source.beside_config(opened.catalog.names)
    if request.vocab_size is not None:
        axes = {k: v for k, v in source.binding.axes.items() if k != "V"}
        source = replace(source, binding=replace(source.binding, vocab_size=request.vocab_size, axes=axes))
    named = (
        source.binding.table is None
        and source.binding.own_table is None
        and source.binding.layout is not None
    )
    if named and source.binding.layout not in layouts.names():
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"{source.framework} with the layout {source.binding.layout} is not supported yet",
        )
    return source


def with_masters(state: Optimizer, request: Request) -> Request:
    """Request the master weights if moments are converted, because the moments belong to existing master
    weights."""
    moves = request.optimizer and request.to is not None and TARGETS[request.to].takes_slots
    if moves and request.weights is None and state.masters:
        return replace(request, weights="masters")
    return request


def movable(framework: str, state: Optimizer, target: Target, request: Request) -> None:
    """Check that the optimizer state of a source can be converted to the target.

    Raises:
        FastshardError: ``FS514`` for JAX train states, whose moments have other names than their weights.
    """
    if request.optimizer and target.takes_slots and state.rules is not None:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"the optimizer state of {framework} cannot be converted to {target.name}",
            expected="an optimizer state of DeepSpeed, torch, Megatron-LM or ColossalAI",
            got=framework,
            help="convert to maxtext, which can hold it, or leave out --optimizer",
        )


def draft_of(catalog: _core.Catalog, core_request: CoreRequest) -> _core.Draft:
    """Draft a request, with the tables of source and target."""
    table = core_request.source.binding.effective_table if core_request.table is None else core_request.table
    target = None if core_request.target is None else core_request.target.table
    try:
        catalog.within(memory_budget.get_limit())
        return catalog.draft(core_request, table, target)
    except _core.CoreError as error:
        raise from_core(error) from None


def full_tensors(catalog: _core.Catalog, source: Source) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every full tensor of a source, by the model's own names."""
    drafted = draft_of(catalog, CoreRequest(source)).tensors()
    return {
        source.names.own.get(name, name): (dtype, tuple(whole)) for name, (dtype, _, _, whole, _) in drafted
    }
