"""What a plan is drafted of: an opened checkpoint, the part of its source that is asked for, and the core's
draft."""

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
from ..targets.base import Target
from ..targets.form import Form
from ..targets.registry import TARGETS, keeps_all
from ..targets.request import Request
from .quantised_weights import QuantisedWeights

if TYPE_CHECKING:
    from ..expected.expected_list import ExpectedTensors
    from ..expected.reference import Reference

#: Where the outputs of a plan lie that is only read.
UNPLACED: dict[str, Any] = {
    "files": [],
    "max_shard_size": 1 << 62,
    "texts": {},
    "dtypes": {},
    "constants": {},
    "pointers": [],
}


class Promised:
    """The tensors that a config promises by the installed transformers, which are listed beside other
    work."""

    def __init__(self, listing: Callable[[], ExpectedTensors]) -> None:
        """Begins to list them; ``listing`` raises FastshardError where it cannot."""
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
        """The list, waited for; None if nothing could make it."""
        self._thread.join()
        if isinstance(self._why, BaseException):
            raise self._why
        return self._listed

    @property
    def why(self) -> str:
        """Why there is no list; empty where there is one."""
        return "" if self.listed is not None else str(self._why)


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint as planning sees it: declaration, files, and what was found on opening."""

    source: Source
    catalog: _core.Catalog
    findings: list[Finding]
    #: Files in the catalog's order.
    files: Sequence[File]
    #: What findings call these files: their paths, and of a path that several roots hold the root too.
    labels: Sequence[str]
    #: All files that hold what is read: of a store, which the catalog knows as one, each.
    behind: list[File]
    #: What it is held against, if anything is.
    reference: Reference | None = None
    #: How findings are judged; those above are as they were found.
    gate: Gate = field(default_factory=Gate)
    #: False if transformers is not to be asked what the config promises.
    asks_transformers: bool = False
    #: What it has answered, once it was asked.
    promised: Promised | None = None
    #: Weights that are stored quantised, by the model's own names.
    quantised: QuantisedWeights = field(default_factory=QuantisedWeights)
    #: What is read besides the checkpoint, as it was given: an adapter, the model that parts are taken from.
    besides: Sequence[str] = ()

    def find_causes(self, findings: Sequence[Finding], source: Source | None = None) -> Causes:
        """Find the causes among findings: what is missing because of them needs no finding of its own."""
        paths = [file.path for file in self.files]
        return causes_of(findings, source or self.source, paths, self.catalog.names, self.labels)

    @property
    def listed(self) -> ExpectedTensors | None:
        """What transformers lists by the config, waited for; None if it was not asked or cannot tell."""
        return None if self.promised is None else self.promised.listed


@dataclass(frozen=True)
class CoreRequest:
    """What the core is asked to draft: of a source alone, every tensor as it is stored. The core reads the
    fields by their names."""

    source: Source
    #: Which copy of the weights is taken: ``params`` or ``masters``; None for the one that the source names.
    weights: str | None = None
    #: True to make slots of the optimizer's state.
    optimizer: bool = False
    #: None for a merge.
    target: Form | None = None
    #: Element type of floating outputs, by safetensors' name; None to keep each.
    dtype: str | None = None
    #: Outputs that keep theirs: ``names`` (or last parts of names), and whether ``nothing`` does.
    keep: Mapping[str, object] = field(default_factory=dict)
    #: True to average replicas that differ.
    mean_replicas: bool = False
    #: Glob patterns of outputs; all where there are none.
    include: Iterable[str] = ()
    exclude: Iterable[str] = ()
    #: Tensors that are wanted as the values of their codes, and names stored of those that only these are
    #: made of.
    coded: Sequence[Mapping[str, object]] = ()
    left_out: frozenset[str] = frozenset()
    #: The source's table, where it is not its own.
    table: _core.Table | None = None


@dataclass(frozen=True)
class Merged:
    """A draft that is compared with a reference: of what, and how its names came about."""

    draft: _core.Draft
    source: Source
    #: False for a conversion.
    is_merge: bool
    #: What the core was asked to draft.
    core_request: CoreRequest
    #: How its names became those of the reference; empty where they did not.
    renamed: str


def taken(opened: Opened, request: Request) -> Source:
    """The part of a source that is asked for, with the vocabulary that was given."""
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
            codes.UNSUPPORTED, f"{source.framework} with the layout {source.binding.layout}: not read yet"
        )
    return source


def with_masters(state: Optimizer, request: Request) -> Request:
    """Moments go on with the weights that they were taken of: the masters, where there are any."""
    moves = request.optimizer and request.to is not None and TARGETS[request.to].takes_slots
    if moves and request.weights is None and state.masters:
        return replace(request, weights="masters")
    return request


def movable(framework: str, state: Optimizer, target: Target, request: Request) -> None:
    """Whether the source's state is one that moves.

    Raises:
        FastshardError: ``FS514`` for train states of JAX, whose moments have other names than their weights.
    """
    if request.optimizer and target.takes_slots and state.rules is not None:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"the optimizer's state of {framework} is not converted to {target.name}",
            expected="a state of DeepSpeed, torch, Megatron-LM or ColossalAI",
            got=framework,
            help="convert to maxtext, which holds it, or leave out --optimizer",
        )


def draft_of(catalog: _core.Catalog, core_request: CoreRequest) -> _core.Draft:
    """A draft of what is asked for, with the tables of source and target."""
    table = core_request.source.binding.effective_table if core_request.table is None else core_request.table
    target = None if core_request.target is None else core_request.target.table
    try:
        catalog.within(memory_budget.get_limit())
        return catalog.draft(core_request, table, target)
    except _core.CoreError as error:
        raise from_core(error) from None


def full_tensors(catalog: _core.Catalog, source: Source) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a source, merged, by the model's own names."""
    drafted = draft_of(catalog, CoreRequest(source)).tensors()
    return {
        source.names.own.get(name, name): (dtype, tuple(whole)) for name, dtype, _, _, whole, _ in drafted
    }
