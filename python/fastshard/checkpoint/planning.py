"""Plans: what will be written, from what, before a byte is."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from .. import _core
from .._core import Rule
from ..common import config_text, memory_budget
from ..common.dtypes import TORCH_FLOATS
from ..common.errors import FastshardError, Finding, from_core, raise_errors
from ..common.gate import Gate
from ..common.listing import File
from ..common.options import meant, nearest
from ..expected import heuristics
from ..expected.compare_reference import Side, gain, judged, moves
from ..expected.reference import Reference
from ..layouts import tables as layouts
from ..layouts.declaration import Source, is_state
from ..models import config_json
from ..models.vocab_rows import padding, words
from ..targets.base import Bound, Completed, Drafted, Target
from ..targets.optimizer_state import carried
from ..targets.registry import TARGETS, check, keeps_all, target_of
from ..targets.request import DTYPES, MERGE, Request
from .causes import Causes, causes_of
from .mapped_files import Maps

#: Threads at most; no machine has as many cores.
_MAX_THREADS = 1 << 14
#: Bytes of two tensors that are compared at a time; of what tensors begin with, which tells most apart.
_CHUNK, _BEGIN = 1 << 24, 1 << 12
#: Bytes of the widest element.
_WIDEST = 16
#: Where the outputs of a plan lie that is only read.
_UNPLACED: dict[str, Any] = {
    "files": [], "max_shard_size": 1 << 62, "texts": {}, "dtypes": {}, "constants": {}, "pointers": [],
}  # fmt: skip
#: Errors of a tensor that is missing, or of which a part is missing or does not fit.
_NOT_WHOLE = ("FS102", "FS103", "FS111", "FS201", "FS202", "FS203", "FS204", "FS205", "FS206", "FS208")


def default_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(threads: int | None) -> int:
    """The number of worker threads asked for; default all cores.

    Raises:
        FastshardError: ``FS515`` if it is none.
    """
    if threads is None:
        return default_threads()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MAX_THREADS:
        raise FastshardError.of(
            "FS515", "threads", expected=f"a whole number from 1 to {_MAX_THREADS}", got=repr(threads)
        )
    return threads


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint as planning sees it: declaration, files, and what was found on opening."""

    source: Source
    catalog: _core.Catalog
    findings: list[Finding]
    #: Files in the catalog's order.
    files: Sequence[File]
    #: All files that hold what is read: of a store, which the catalog knows as one, each.
    behind: list[File]
    #: What it is held against, if anything is.
    reference: Reference | None = None
    #: How findings are judged; those above are as they were found.
    gate: Gate = field(default_factory=Gate)


class Plan:
    """A plan: every output tensor as views over pieces of source files.

    ``findings`` says what was found while planning; with an error among them the plan cannot be
    written.
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
        lost: Collection[str] = (),
        causes: Causes | None = None,
    ) -> None:
        self.core = core
        self.findings = findings
        self.source = source
        self.target = target
        #: True for a result that is a store of arrays.
        self.writes_arrays = writes_arrays
        #: True for a conversion of a model without a table, whose names and config stay.
        self.keeps_names = keeps_names
        #: Texts that are written beside the tensors (config.json and the like), by name.
        self.texts = texts or {}
        #: Names of tensors that the checkpoint declares, or must hold, and that are not whole; sorted.
        self.lost = dict.fromkeys(sorted(name for name in lost if name not in self.index))
        #: torch's name of the dtype that most of the floating bytes have.
        self.main_dtype = main
        #: What accounts for findings of the core that are not among ``findings``.
        self.causes = causes or Causes()

    @cached_property
    def maps(self) -> Maps:
        """Maps of the source files, for views of outputs that are one run of one file."""
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
        """Position of each output by name; where ranks each have one of a name, by ``FILE:NAME``."""
        index = {output[0]: i for i, output in enumerate(self.outputs)}
        if len(index) < len(self.outputs):
            index = {name: i for i, name in enumerate(self.core.names())}
        return index

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Counts, bytes, files, dtypes, axes and value ops."""
        return self.core.summary()

    def why(self, name: str) -> dict[str, Any]:
        """What an output is made of: rules, ranks, files and offsets, and what is done to its values.

        Raises:
            KeyError: if there is no output of this name, with the one that may be meant.
        """
        from .provenance import origin

        return origin(json.loads(self.core.excerpt(self.position(name))))

    def position(self, name: str) -> int:
        """Position of an output.

        Raises:
            KeyError: if there is none of this name, with the one that may be meant.
        """
        try:
            return self.index[name]
        except KeyError:
            raise KeyError(f"{name}{meant(str(name), self.index)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as plain data (``fastshard plan --json``)."""
        document: dict[str, Any] = json.loads(self.core.to_json())
        return document

    def __repr__(self) -> str:
        s = self.summary
        return f"<fastshard.Plan {self.target}: {s['outputs']} tensors, {s['bytes']:,} bytes in {len(s['files'])} files>"

    def _repr_html_(self) -> str:
        from ..common import notebook_html

        total = sum(size for _, _, _, size, _ in self.outputs) or 1
        rows = (
            (name, dtype, notebook_html.shape(shape), size, pieces, notebook_html.Bar(size / total))
            for name, dtype, shape, size, pieces in self.outputs
        )
        head = ("tensor", "dtype", "shape", "bytes", "pieces", "")
        return notebook_html.table(repr(self), head, rows, len(self.outputs), findings=self.findings)


def make_plan(opened: Opened, request: Request = MERGE) -> Plan:
    """Plans what is asked for: drafted once, then placed into files. See :func:`fastshard.plan`."""
    try:
        return _made(opened, request)
    except _core.CoreError as error:
        # The memory that was stated is too small for the names.
        raise from_core(error) from None


def _made(opened: Opened, request: Request) -> Plan:
    check(request)
    if request.to is not None and TARGETS[request.to].needs_optimizer:
        # Its weights are the masters, or what they would be.
        request = replace(request, optimizer=True, dtype="f32" if request.dtype == "keep" else request.dtype)
    source = _taken(opened, request)
    request = _with_masters(source, request)
    source, form, how = _as_referenced(opened, source, request)
    tokenizer, dtype = request.tokenizer, DTYPES[request.dtype]
    findings = _weights(source, opened.findings, request.weights, request.optimizer)
    findings += [f for f in source.findings if f not in opened.source.findings]
    findings += [_asked_for(f, request) for f in source.of_tensors]
    side = source.to_request(request.weights, request.optimizer)
    asked: dict[str, Any] = {
        "source": side,
        "dtype": dtype,
        "mean_replicas": request.replicas == "mean",
        "include": request.include,
        "exclude": request.exclude,
    }
    if dtype is not None:
        side["dequantise"] = config_json.weight_block(source.model.config)
        unquantised = config_json.unquantised(source.model.config or {}) or None
        source = replace(source, model=replace(source.model, config=unquantised))
    if form is not None:
        asked["target"] = form
    target = None
    if request.to is not None:
        target = target_of(source, request)
        _movable(source, target, request)
        asked["target"] = target.side()
        if source.optimizer.rules is not None and not target.is_container:
            side["layout"] = source.optimizer.rules(target.keeps_step, request.optimizer)
    # A file that is missing or cannot be read makes every tensor in it missing: say the cause, not the echo.
    paths = [file.path for file in opened.files]
    causes = causes_of(findings, source, paths, opened.catalog.names)
    draft = _draft(opened.catalog, asked)
    drafted = draft.findings()
    lost_by_core = draft.lost()
    looked_at = draft.tensors() if target is not None or dtype is not None else []
    tensors = {
        name: Drafted(kind, shape, size, whole, cuts) for name, kind, shape, size, whole, cuts in looked_at
    }
    axes = draft.axes()
    told: list[Finding] = []
    if dtype is not None:
        told += _quantised(tensors, request.dtype, opened.source.model.config)
    # A reference says more than a model's own layers.
    seen = None if opened.reference is not None else _evidence(opened, source, request, draft)
    if seen is not None:
        # What could not be drafted is missing below for that reason.
        both = causes_of([*findings, *drafted], source, paths, opened.catalog.names)
        told += both.left(_asked_for(f, request) for f in seen.findings)
    if not source.provable:
        told.append(_unproven(source, seen))
    if opened.reference is not None:
        named = [f.tensor for f in (*findings, *drafted) if f.severity == "error"]
        whole = Side(draft, source, target is None, _Values(opened.catalog, asked).same, how)
        sides = _sides(opened, request, whole, asked)
        told += causes.left(judged(sides, opened.reference, request.wants, dtype, named))
    told += words(source, axes, tokenizer)
    masters = source.optimizer.masters and (request.weights or source.optimizer.weights) == "masters"
    main = _main_dtype(draft.dtypes(), masters)
    completed = Completed()
    if target is not None and not any(
        f.severity == "error" for f in [*findings, *causes.left(drafted), *told]
    ):
        # What the files are called and hold follows from the tensors that there are.
        stored = (name for unit in source.units for name in opened.catalog.names(unit.file))
        state = None
        if request.optimizer and target.takes_slots:
            state = carried(source, tensors, draft.made_of())
            told += state.findings
        completed = target.complete(Bound(axes, tensors, stored, main, tokenizer, state))
        told += completed.findings + padding(source, axes, tokenizer)
    texts = dict(completed.texts)
    keeps_names = target is not None and target.keeps_names
    if target is None or keeps_names:
        cast = dtype is not None or masters
        config = _kept_config(source, axes, main, cast)
        unwritten = target is not None and source.model.config_file is None
        if config is not None and (config != opened.source.model.config or unwritten):
            texts["config.json"] = config_text.written(config)
    placement = {
        "files": completed.files,
        "max_shard_size": request.max_shard_size,
        "texts": texts,
        "dtypes": completed.dtypes,
        "constants": completed.constants,
        "pointers": completed.pointers,
    }
    core = draft.place(placement)
    planned = causes.left(core.findings())
    if request.include and any(f.code == "FS515" for f in planned):
        planned = [_meant_for(f, opened, request) for f in planned]
    findings += (planned if source.optimizer.rules is None else _grouped(planned)) + told
    arrays = target is not None and target.writes_arrays
    broken_ones = (f for f in [*findings, *drafted] if f.severity == "error" and f.code in _NOT_WHOLE)
    lost = {f.tensor for f in broken_ones if f.tensor}
    if request.is_narrowed:
        lost.clear()
    else:
        lost |= {*lost_by_core, *source.lost}
    # Last: what is made an error here is not what the others follow from.
    found = opened.gate.judged(findings)
    return Plan(core, found, source, request.to or "merge", arrays, keeps_names, texts, main, lost, causes)


def _sides(opened: Opened, request: Request, planned: Side, asked: dict[str, Any]) -> Iterator[Side]:
    """The whole model under the names that those of a reference may be: as it is planned, unless the target has a form of
    its own, as it is stored, and as transformers has it."""
    every = {**asked, "include": (), "exclude": ()}
    keeps = request.to in (None, "hf") and not request.optimizer
    if keeps:
        yield replace(planned, draft=_draft(opened.catalog, every)) if request.is_narrowed else planned
    every.pop("target", None)
    weights_of = {key: asked["source"][key] for key in ("dequantise",) if key in asked["source"]}
    if request.to is not None or not keeps:
        as_stored = replace(MERGE, vocab_size=request.vocab_size, weights=request.weights)
        stored, form, how = _as_referenced(opened, _taken(opened, as_stored), as_stored)
        side = stored.to_request(request.weights) | weights_of
        every |= {"source": side} | ({} if form is None else {"target": form})
        yield Side(_draft(opened.catalog, every), stored, True, _Values(opened.catalog, every).same, how)
    if request.to != "hf" or not keeps:
        as_hf = Request("hf", vocab_size=request.vocab_size)
        try:
            source = _taken(opened, as_hf)
            target = target_of(source, as_hf).side()
            side = source.to_request(request.weights) | weights_of
            every |= {"source": side, "target": target}
            draft = _draft(opened.catalog, every)
        except FastshardError:
            # It has no such form.
            return
        if not any(found.severity == "error" for found in draft.findings()):
            yield Side(draft, source, False, _Values(opened.catalog, every).same)


def _as_referenced(
    opened: Opened, source: Source, request: Request
) -> tuple[Source, dict[str, Any] | None, str]:
    """A source whose result has the names of the reference, the form that a merge has for that, and how in words.

    A model that a table describes takes the table's form, others move prefixes of their names.
    """
    roster = None if opened.reference is None else opened.reference.roster
    if opened.reference is None or roster is None or source.weights_prefix:
        return source, None, ""
    if request.to is not None:
        target = target_of(source, request)
        if not target.keeps_names or target.takes_slots:
            # By a table's names, or for a trainer, which has those of memory.
            return source, None, ""
    if source.layout is not None and not source.model.hf_names:
        return source, None, ""
    asked: dict[str, Any] = {
        "source": source.to_request(request.weights),
        "dtype": None,
        "mean_replicas": request.replicas == "mean",
        "include": (),
        "exclude": (),
    }
    side = Side(_draft(opened.catalog, asked), source, below=True)
    if source.layout is not None:
        shaped, form = _by_table(source, side, request)
        if form is None:
            return source, None, ""
        asked |= {"source": shaped.to_request(request.weights), "target": form}
        other = Side(_draft(opened.catalog, asked), shaped, below=True)
        return (shaped, form, "") if gain(other, side, roster) > 0 else (source, None, "")
    way = moves(side, roster, opened.reference.path)
    if way is None:
        return source, None, ""
    note = Finding.of(
        "FS212",
        f"names are written as the reference {opened.reference.path} has them: {way}",
        severity="note",
    )
    return source.as_called(way.names, note), None, str(way)


def _by_table(source: Source, side: Side, request: Request) -> tuple[Source, dict[str, Any] | None]:
    """A source and the form in which transformers stores its model, for a merge; no form where no table tells.

    Both tables have what lies beside the model, so that it stays.
    """
    try:
        target = target_of(source, Request("hf", vocab_size=request.vocab_size))
    except FastshardError:
        return source, None
    form, usual = target.side(), source.usual_table
    if "layout" not in form or usual is None:
        return source, None
    beside: list[Rule] = []
    for name, (_, shape) in side.tensors.items():
        own = source.names.get(name, name)
        if usual.rule_of(own) is None:
            axes = ", ".join(f"beside{len(beside)}d{d}" for d in range(len(shape)))
            beside.append(Rule.literal(own, f"[{axes}]", own))
    form |= {"name": "merge", "layout": form["layout"].with_rules([*form["layout"].rules, *beside])}
    return replace(source, table=usual.with_rules([*usual.rules, *beside])), form


class _Values:
    """The values that a draft's tensors have, as they are stored."""

    def __init__(self, catalog: _core.Catalog, asked: dict[str, Any]) -> None:
        self._catalog, self._asked = catalog, {**asked, "dtype": None, "include": (), "exclude": ()}
        self._begins: dict[str, bytes] = {}

    @cached_property
    def _plan(self) -> _core.Plan:
        draft = _draft(self._catalog, self._asked)
        return draft.place(_UNPLACED)

    @cached_property
    def _index(self) -> dict[str, tuple[int, int]]:
        return {name: (i, size) for i, (name, _, _, size, _) in enumerate(self._plan.outputs())}

    def same(self, one: str, other: str, constant: bool) -> bool:
        """Whether two tensors of one shape and dtype hold the same bytes; of one value all over only if ``constant``."""
        if one not in self._index or other not in self._index:
            return False
        first = self._begin(one)
        if first != self._begin(other):
            return False
        size, is_varied = self._index[one][1], constant
        for start in range(0, size, _CHUNK):
            length = min(_CHUNK, size - start)
            bytes_of = self._read(one, start, length)
            if bytes_of != self._read(other, start, length):
                return False
            # Zeros and ones are the same in tensors that have nothing to do with each other.
            is_varied = is_varied or bytes_of[_WIDEST:] != bytes_of[:-_WIDEST]
        return is_varied

    def _begin(self, name: str) -> bytes:
        if name not in self._begins:
            self._begins[name] = self._read(name, 0, min(_BEGIN, self._index[name][1]))
        return self._begins[name]

    def _read(self, name: str, start: int, length: int) -> bytes:
        import numpy as np

        buffer = np.empty(length, dtype=np.uint8)
        try:
            self._plan.read(self._index[name][0], start, buffer, default_threads())
        except _core.CoreError as error:
            raise from_core(error) from None
        return buffer.tobytes()


def _evidence(
    opened: Opened, source: Source, request: Request, draft: _core.Draft
) -> heuristics.Evidence | None:
    """What a model of Hugging Face tells of itself, where no table tells of it; None for others."""
    model = opened.source.model
    by_config = model.no_table and (model.config or {}).keys() & {"model_type", "architectures"}
    if source.layout is not None or model.is_part or not (model.hf_names or by_config):
        return None
    if request.include or request.exclude or request.optimizer:
        # All of the model, and nothing else.
        side = source.to_request(request.weights, optimizer=False)
        draft = _draft(
            opened.catalog,
            {"source": side, "dtype": None, "mean_replicas": True, "include": [], "exclude": []},
        )
    tensors = {
        name: (tuple(whole), kind) for name, kind, _, _, whole, _ in draft.tensors() if not is_state(name)
    }
    return heuristics.judge(
        tensors,
        model.config,
        saved_whole=model.saved_whole,
        in_files=len(opened.behind) > 1,
        lost=source.lost,
    )


def _unproven(source: Source, seen: heuristics.Evidence | None) -> Finding:
    """That nothing states all that must exist, and what of it nothing speaks of."""
    if source.model.config is None:
        help_ = "give --expect CONFIG (a config.json or the training config)"
    else:
        help_ = "--like with a good checkpoint of the model states it, --expect with a manifest, or --layout with a table of your own"
    unnoticed = "nothing outside the files states what must exist"
    if seen is not None:
        if source.expected_names:
            unnoticed = "the index alone states what must exist"
        if seen.alone:
            unnoticed += f"; {heuristics.unheld(seen)}"
    return Finding.of("FS109", f"completeness not provable: {unnoticed}", unnoticed=unnoticed, help=help_)


def to_be_written(plan: Plan) -> Plan:
    """The plan, with findings for what can be looked at and not be written."""
    plan.findings += plan.core.unwritable()
    return plan


def _meant_for(finding: Finding, opened: Opened, request: Request) -> Finding:
    """That nothing is left, with the name that a pattern may be meant for."""
    if finding.code != "FS515":
        return finding
    names = make_plan(opened, replace(request, include=(), exclude=())).index
    for pattern in request.include:
        near = nearest(pattern, names)
        if near is not None and not any(fnmatchcase(name, pattern) for name in names):
            return finding.replace(got=f"--include {pattern}", help=f"did you mean {near}?")
    return finding


def _taken(opened: Opened, request: Request) -> Source:
    """The part of a source that is asked for, with the vocabulary that was given."""
    source = opened.source
    if source.chosen or not keeps_all(request.to):
        source = source.weights_only(opened.catalog.names, request.optimizer)
    elif request.to is None:
        source = source.beside_config(opened.catalog.names)
    if request.vocab_size is not None:
        axes = {k: v for k, v in source.axes.items() if k != "V"}
        source = replace(source, vocab_size=request.vocab_size, axes=axes)
    named = source.table is None and source.own_table is None and source.layout is not None
    if named and source.layout not in layouts.names():
        raise FastshardError.of("FS514", f"{source.framework} with the layout {source.layout}: not read yet")
    return source


def _with_masters(source: Source, request: Request) -> Request:
    """Moments go on with the weights that they were taken of: the masters, where there are any."""
    moves = request.optimizer and request.to is not None and TARGETS[request.to].takes_slots
    if moves and request.weights is None and source.optimizer.masters:
        return replace(request, weights="masters")
    return request


def _movable(source: Source, target: Target, request: Request) -> None:
    """Whether the source's state is one that moves.

    Raises:
        FastshardError: ``FS514`` for train states of JAX, whose moments have other names than their weights.
    """
    if request.optimizer and target.takes_slots and source.optimizer.rules is not None:
        raise FastshardError.of(
            "FS514",
            f"the optimizer's state of {source.framework} is not converted to {target.name}",
            expected="a state of DeepSpeed, torch, Megatron-LM or ColossalAI",
            got=source.framework,
            help="convert to maxtext, which holds it, or do without --optimizer",
        )


def _kept_config(source: Source, axes: dict[str, int], main: str | None, cast: bool) -> dict[str, Any] | None:
    """The config.json that goes with tensors under Hugging Face's own names; None if there is none.

    With another dtype transformers would cast the tensors, or take them for quantised ones. What transformers itself has
    saved is as its config says, unless it is cast here.
    """
    model = source.model
    if not (model.hf_names and model.config):
        return None
    config = config_json.with_rows(model.config, axes.get("V"))
    if cast or not (model.saved_whole or config_json.dtype_of(config) is None):
        config = config_json.with_dtype(config, main)
    return config


def _main_dtype(held: dict[str, int], masters: bool) -> str | None:
    """torch name of the dtype that most of the floating bytes have; None where there are none.

    Beside masters frozen parameters may be most of the bytes: by the narrower dtype the masters would be rounded.
    """
    weight = {
        d: (TORCH_FLOATS[d] == "float32" if masters else False, n)
        for d, n in held.items()
        if d in TORCH_FLOATS
    }
    return TORCH_FLOATS[max(weight, key=lambda d: weight[d])] if weight else None


def _asked_for(finding: Finding, request: Request) -> Finding:
    """An error about a tensor is a note where that is left out, as the core takes these patterns."""
    if request.wants(finding.tensor or ""):
        return finding
    return finding.replace(message=f"left out, as asked for: {finding.message}", severity="note", help=None)


def _weights(source: Source, opened: list[Finding], weights: str | None, optimizer: bool) -> list[Finding]:
    """Which copy of the weights is taken, and what that makes of the findings about optimizer files."""
    state = source.optimizer
    held = state.masters or state.moments_only or state.moments_named
    if (weights == "masters" and not state.masters) or (optimizer and not held):
        # Why what is there cannot be read, if it cannot.
        raise_errors(state.findings)
        raise FastshardError.of(
            "FS402",
            "the checkpoint holds no fp32 masters or optimizer state",
            severity="error",
            help="only its parameters can be taken (--weights params)",
        )
    if weights == "params" and not state.params_stored:
        raise FastshardError.of(
            "FS402",
            "the checkpoint holds its parameters as fp32 masters only (ZeRO stage 3)",
            severity="error",
            help="take the masters (--weights masters, the default here); --dtype bf16 rounds them",
        )
    if not held or state.moments_named:
        return list(opened)
    unread: list[Finding] = []
    if optimizer and not any(a.slot for a in source.assembled):
        unread = [
            Finding.of("FS402", "the optimizer holds no moments: it never took a step", severity="warning")
            if state.unstepped
            else Finding.of("FS402", "the checkpoint holds no moments that can be read", severity="error")
        ]
    taken = weights or state.weights
    # Masters are compared with the parameters unless that is declined; moments alone are compared with nothing.
    lenient = not optimizer and (weights == "params" or state.moments_only)

    def weighed(finding: Finding, about_optimizer: bool) -> Finding:
        if lenient and about_optimizer and finding.severity == "error":
            return finding.replace(severity="warning")
        # What cannot be named cannot be taken either.
        if (taken == "masters" or optimizer) and finding.code == "FS402":
            return finding.replace(severity="error")
        return finding

    found = [weighed(f, f.file in state.files) for f in opened]
    found += [weighed(f, True) for f in state.findings]
    found += state.unread if optimizer else []
    told = {
        "params": "the parameters as stored; the fp32 masters are compared with them",
        "masters": "the fp32 masters; the parameters stored beside them are compared with them"
        if state.params_stored
        else "the fp32 masters, the only copy of the weights",
    }
    if not any(f.severity == "error" for f in found):
        # Otherwise what is wrong with the optimizer files is the cause.
        found += unread
    if state.moments_only:
        return found
    return [*found, Finding.of("FS403", f"weights taken: {told[taken]}")]


def _grouped(findings: list[Finding]) -> list[Finding]:
    """Tensors that are left out for one reason are one note: a train state has two moments of each weight."""
    left: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.code == "FS212":
            left.setdefault(finding.message, []).append(finding)
    notes = [
        group[0] if len(group) == 1 else group[0].replace(message=f"{len(group)} tensors: {reason}")
        for reason, group in left.items()
    ]
    return [f for f in findings if f.code != "FS212"] + notes


def _quantised(tensors: dict[str, Drafted], dtype: str, config: dict[str, Any] | None) -> list[Finding]:
    """What is stored quantised and has no scales that are understood would be kept as it is, which is not what was asked for."""
    method = config_json.quantised_by(config or {})
    packed = [(n, t.dtype) for n, t in tensors.items() if t.dtype[0] in "IU" and len(t.shape) > 1]
    if method and packed:
        return [
            Finding.of(
                "FS514",
                f"{len(packed)} tensors hold packed weights (quantization_config: {method}), whose values are not computed here",
                tensor=packed[0][0],
                expected=f"floats that can be cast to {dtype}",
                got=packed[0][1],
                help="leave out --dtype to keep them, or dequantise them with the tool that quantised them",
            )
        ]
    stored = [(name, t.dtype) for name, t in tensors.items() if t.dtype.startswith("F8_")]
    if not stored:
        return []
    name, kind = stored[0]
    return [
        Finding.of(
            "FS514",
            f"{len(stored)} tensors stored in FP8 have no scales beside them (NAME_scale_inv, NAME_scale)",
            tensor=name,
            expected=f"floats that can be cast to {dtype}",
            got=kind,
            help="leave out --dtype to keep them, or dequantise them with the tool that quantised them",
        )
    ]


def _draft(catalog: _core.Catalog, request: dict[str, Any]) -> _core.Draft:
    """A draft of a request, with the tables of source and target."""
    sides: dict[str, Any] = {key: dict(request[key]) for key in ("source", "target") if key in request}
    tables = [sides.get(key, {}).pop("layout", None) for key in ("source", "target")]
    try:
        catalog.within(memory_budget.stated())
        return catalog.draft({**request, **sides}, *tables)
    except _core.CoreError as error:
        raise from_core(error) from None
