"""Plans: what will be written, from what, before a byte is."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from .. import _core
from ..common import config_text
from ..common.dtypes import TORCH_FLOATS
from ..common.errors import Finding, from_core
from ..common.options import meant, nearest
from ..expected.compare_reference import judged
from ..expected.reference_names import Side
from ..layouts.declaration import Source
from ..models import config_json
from ..models.vocab_rows import padding, words
from ..targets.base import Bound, Completed, Drafted, Target
from ..targets.optimizer_state import carried
from ..targets.registry import TARGETS, check, target_of
from ..targets.request import DTYPES, MERGE, Request
from .causes import Causes, causes_of
from .drafting import Opened, draft_of, movable, taken, with_masters
from .grouping import HeldFile, grouped, with_effects
from .mapped_files import Maps
from .plan_findings import asked_for, evidence, left_out_for_one_reason, quantised, unproven, weights_taken
from .reference_sides import Values, as_referenced, sides_of

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
        each: list[Finding] | None = None,
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
        #: The findings before those of one cause were made one: one for each file.
        self.each = findings if each is None else each
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
    source = taken(opened, request)
    request = with_masters(source, request)
    source, form, how = as_referenced(opened, source, request)
    tokenizer, dtype = request.tokenizer, DTYPES[request.dtype]
    findings = weights_taken(source, opened.findings, request.weights, request.optimizer)
    findings += [f for f in source.findings if f not in opened.source.findings]
    findings += [asked_for(f, request) for f in source.of_tensors]
    target = None
    if request.to is not None:
        target = target_of(source, request)
        movable(source, target, request)
    asked = _asked(source, target, request, form)
    if dtype is not None:
        unquantised = config_json.unquantised(source.model.config or {}) or None
        source = replace(source, model=replace(source.model, config=unquantised))
    # A file that is missing or cannot be read makes every tensor in it missing: say the cause, not the echo.
    paths = [file.path for file in opened.files]
    causes = causes_of(findings, source, paths, opened.catalog.names)
    draft = draft_of(opened.catalog, asked)
    drafted = draft.findings()
    lost_by_core = draft.lost()
    looked_at = draft.tensors() if target is not None or dtype is not None else []
    tensors = {
        name: Drafted(kind, shape, size, whole, cuts) for name, kind, shape, size, whole, cuts in looked_at
    }
    axes = draft.axes()
    told: list[Finding] = []
    if dtype is not None:
        told += quantised(tensors, request.dtype, opened.source.model.config)
    # A reference says more than a model's own layers.
    seen = None if opened.reference is not None else evidence(opened, source, request, draft)
    if seen is not None:
        # What could not be drafted is missing below for that reason.
        both = causes_of([*findings, *drafted], source, paths, opened.catalog.names)
        told += both.left(asked_for(f, request) for f in seen.findings)
    if not source.provable:
        told.append(unproven(source, seen))
    if opened.reference is not None:
        named = [f.tensor for f in (*findings, *drafted) if f.severity == "error"]
        whole = Side(draft, source, target is None, Values(opened.catalog, asked).same, how)
        sides = sides_of(opened, request, whole, asked)
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
    keeps_names = target is not None and target.keeps_names
    texts = dict(completed.texts)
    if target is None or keeps_names:
        texts |= _config_text(opened, source, target, axes, main, cast=dtype is not None or masters)
    placement = {
        "files": completed.files,
        "max_shard_size": request.max_shard_size,
        "texts": texts,
        "dtypes": completed.dtypes,
        "constants": completed.constants,
        "pointers": completed.pointers,
    }
    core = draft.place(placement)
    placed = core.findings()
    planned = causes.left(placed)
    if request.include and any(f.code == "FS515" for f in planned):
        planned = [_meant_for(f, opened, request) for f in planned]
    findings += (planned if source.optimizer.rules is None else left_out_for_one_reason(planned)) + told
    arrays = target is not None and target.writes_arrays
    broken_ones = (f for f in [*findings, *drafted] if f.severity == "error" and f.code in _NOT_WHOLE)
    lost = {f.tensor for f in broken_ones if f.tensor}
    if request.is_narrowed:
        lost.clear()
    else:
        lost |= {*lost_by_core, *source.lost}
    if lost:
        usable = None if target else core.names()
        findings = with_effects(findings, causes, lost, usable, [*drafted, *placed])
    # Last: what is made an error here is not what the others follow from.
    each = opened.gate.judged(findings)
    found = grouped(each, [HeldFile(paths[unit.file], unit.coords) for unit in source.units])
    return Plan(
        core, found, source, request.to or "merge", arrays, keeps_names, texts, main, lost, causes, each
    )


def _asked(
    source: Source, target: Target | None, request: Request, form: dict[str, Any] | None
) -> dict[str, Any]:
    """What the core is asked to draft; ``form`` is that of a merge whose names are a reference's."""
    side = source.to_request(request.weights, request.optimizer)
    asked: dict[str, Any] = {
        "source": side,
        "dtype": DTYPES[request.dtype],
        "mean_replicas": request.replicas == "mean",
        "include": request.include,
        "exclude": request.exclude,
    }
    if asked["dtype"] is not None:
        side["dequantise"] = config_json.weight_block(source.model.config)
    if form is not None:
        asked["target"] = form
    if target is not None:
        asked["target"] = target.side()
        if source.optimizer.rules is not None and not target.is_container:
            side["layout"] = source.optimizer.rules(target.keeps_step, request.optimizer)
    return asked


def _config_text(
    opened: Opened,
    source: Source,
    target: Target | None,
    axes: dict[str, int],
    main: str | None,
    *,
    cast: bool,
) -> dict[str, str]:
    """The config.json of a result that keeps its names; nothing where the source's own goes along as it is."""
    config = _kept_config(source, axes, main, cast)
    unwritten = target is not None and source.model.config_file is None
    if config is None or (config == opened.source.model.config and not unwritten):
        return {}
    return {"config.json": config_text.written(config)}


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
