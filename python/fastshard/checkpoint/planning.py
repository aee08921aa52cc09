"""Construction of a plan: it is drafted once, checked, and placed into files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

from .. import _core
from ..common import codes, config_text, json_text
from ..common.dtypes import TORCH_FLOATS
from ..common.errors import FastshardError, Finding, from_core
from ..common.formatting import counted
from ..common.near_words import nearest
from ..common.records import dataclass, replace
from ..expected.from_config import holds_embedding
from ..findings.causes import Causes, locate_files
from ..findings.grouping import RankFile
from ..findings.lost_tensors import find_lost_tensors
from ..findings.missing_parts import PromisedPart, find_missing_parts, list_promised_parts
from ..findings.proof import listed_by
from ..findings.stages import Facts, judge
from ..layouts.declaration import Description, Source, is_state
from ..models import config_json
from ..models.quantised import torchao
from ..models.quantised.forms import Weight
from ..models.tensor_words import WORDS
from ..models.tokenizer import Tokenizer
from ..models.vocab_rows import find_ids_beyond_embedding, padding, words
from ..sources.hf_config import AUTO_MAP
from ..targets.base import Bound, Completed, Drafted, Target
from ..targets.form import Form
from ..targets.optimizer_state import carried
from ..targets.registry import TARGETS, check, target_of
from ..targets.request import DTYPES, MERGE, Request
from .dequantised import dequantised
from .drafting import CoreRequest, Merged, Opened, draft_of, movable, taken, with_masters
from .plan import Plan
from .plan_findings import (
    asked_for,
    beyond_config,
    evidence,
    quantised,
    torn,
    unproven,
    weights_taken,
)


def make_plan(opened: Opened, request: Request = MERGE) -> Plan:
    """Plan a request: draft it once, then place the outputs into files.

    See :func:`fastshard.plan`.
    """
    try:
        return _build_plan(opened, request)
    except _core.CoreError as error:
        # The memory that was stated is too small for the names.
        raise from_core(error) from None


@dataclass(frozen=True)
class _Draft:
    """A request and the core's draft for it, whose outputs are not placed into files yet."""

    opened: Opened
    request: Request
    #: The requested part of the source.
    source: Source
    #: None for a merge.
    target: Target | None
    #: The request that the core drafted.
    core_request: CoreRequest
    #: Description of how a merge's names were changed to a reference's; empty if they were not.
    renamed: str
    core: _core.Draft
    #: The findings from opening, with help that fits this request.
    findings: list[Finding]
    #: The causes among these findings.
    causes: Causes
    #: The core's findings about the outputs, and the outputs that it could not compose, with their numbers of
    #: elements.
    found: list[Finding]
    lost: dict[str, int | None]
    #: Sizes of the model, by axis.
    axes: dict[str, int]
    #: Bytes of the outputs, by dtype.
    dtypes: dict[str, int]
    #: Names of all tensors in the files, and the parts that the config promises, with their tensors.
    names: frozenset[str]
    parts: Sequence[PromisedPart]

    @cached_property
    def tensors(self) -> dict[str, Drafted]:
        """The outputs by name; empty if neither a target nor a dtype needs them."""
        if self.target is None and self.is_kept:
            return {}
        positions = {} if self.target is None else self.core.positions()
        tensors = {}
        for name, (dtype, shape, size, whole, cuts) in self.core.tensors():
            at = positions.get(name, {})
            tensors[name] = Drafted(dtype, shape, size, whole, cuts, at.get("L"), at.get("E"))
        return tensors

    @property
    def merged(self) -> Merged:
        """The draft in the form for comparing it with the tensors that must exist."""
        return Merged(self.core, self.source, self.target is None, self.core_request, self.renamed)

    @property
    def is_kept(self) -> bool:
        """True if every tensor keeps its dtype."""
        return DTYPES[self.request.dtype] is None

    @cached_property
    def paths(self) -> list[str]:
        """Paths of the checkpoint's files."""
        return [file.path for file in self.opened.files]

    @cached_property
    def is_of_masters(self) -> bool:
        """True if the weights are the optimizer's master weights."""
        optimizer = self.source.optimizer
        return optimizer.masters and (self.request.weights or optimizer.weights) == "masters"

    @cached_property
    def main_dtype(self) -> str | None:
        """torch's name for the dtype of most floating-point bytes."""
        return _main_dtype(self.dtypes, self.is_of_masters)


def _build_plan(opened: Opened, request: Request) -> Plan:
    draft = _drafted(opened, request)
    of_outputs = _find_in_outputs(draft)
    by = listed_by(of_outputs)
    errors = [*draft.findings, *draft.causes.left(draft.found), *of_outputs]
    completed = Completed()
    if draft.target is not None and not any(finding.severity == "error" for finding in errors):
        completed = _completed(draft, draft.target)
        # What a list proves no other finding calls unproven.
        of_target = [f for f in completed.findings if f.code != codes.NOT_PROVABLE or by is None]
        of_outputs += of_target + padding(draft.source, draft.axes, request.tokenizer)
    keeps_names = draft.target is not None and draft.target.keeps_names
    texts = dict(completed.texts)
    if draft.target is None or keeps_names:
        texts |= _config_text(draft)
    metadata, unwritable = _metadata(draft)
    core = draft.core.place(
        {
            "metadata": metadata,
            "files": completed.files,
            "max_shard_size": request.max_shard_size,
            "texts": texts,
            "dtypes": completed.dtypes,
            "constants": completed.constants,
            "pointers": completed.pointers,
            "expected": _authority(draft),
        }
    )
    planned = core.findings()
    lost = _find_lost(draft, [*draft.findings, *of_outputs])
    facts = _facts_of(draft, core, planned, lost)
    planned = [beyond_config(f, draft.source.model) for f in planned]
    judgement = judge(facts, [*draft.findings, *planned, *of_outputs])
    source = draft.source
    if draft.is_kept and opened.quantised.weights:
        forms = Counter(weight.form.name for weight in opened.quantised.weights)
        source = replace(
            source, files=replace(source.files, values={**source.files.values, "quantised": dict(forms)})
        )
    if by is not None:
        values = {**source.files.values, "expected_tensors": by}
        source = replace(
            source,
            files=replace(source.files, values=values),
            index=replace(source.index, is_provable=True, is_reference=True),
        )
    return Plan(
        core,
        judgement.findings,
        source,
        request.to or "merge",
        draft.target is not None and draft.target.writes_arrays,
        keeps_names,
        texts,
        draft.main_dtype,
        lost,
        draft.causes,
        judgement.each,
        opened if draft.target is None and draft.is_kept else None,
        unwritable,
    )


def _authority(draft: _Draft) -> str | None:
    """Return the authority whose list of tensors determines the names of a result.

    Return None if the checkpoint or a table determines them.
    """
    opened = draft.opened
    if opened.reference is not None:
        return opened.reference.authority
    listed = opened.listed if draft.renamed else None
    return None if listed is None else listed.authority


def _take_form_of_reference(
    opened: Opened, source: Source, request: Request
) -> tuple[Source, Form | None, str]:
    """Return the source with the names of the reference, its form, and how tensors were renamed.

    Without a reference and a list of tensors, the source is unchanged.
    """
    # What compares is loaded where there is something to compare with.
    if opened.reference is not None:
        from .reference_sides import as_referenced

        return as_referenced(opened, opened.reference, source, request)
    if request.to == "hf" and opened.listed is not None:
        from .reference_sides import as_listed

        return as_listed(opened, opened.listed, source, request)
    return source, None, ""


def _find_in_declaration(
    opened: Opened, source: Source, request: Request, needed_by: str | None
) -> list[Finding]:
    """Find problems in the declared source, before any tensor is drafted."""
    has_slots = any(group.slot for group in source.files.assembled)
    findings = weights_taken(
        source.optimizer, has_slots, opened.findings, request.weights, request.optimizer, needed_by
    )
    findings += [f for f in source.findings if f not in opened.source.findings]
    findings += [asked_for(f, request) for f in source.tensor_findings]
    if request.to == "hf" and any(f.evidence == AUTO_MAP for f in findings):
        from .promised import refuse_missing_code

        return refuse_missing_code(findings, opened)
    return findings


def _drafted(opened: Opened, request: Request) -> _Draft:
    check(request)
    needed_by = request.to if request.to is not None and TARGETS[request.to].needs_optimizer else None
    if needed_by is not None:
        # Its weights are the masters, or what they would be.
        request = replace(request, optimizer=True, dtype="f32" if request.dtype == "keep" else request.dtype)
    source = taken(opened, request)
    request = with_masters(source.optimizer, request)
    source, form, renamed = _take_form_of_reference(opened, source, request)
    findings = _find_in_declaration(opened, source, request, needed_by)
    values = None
    if (dtype := DTYPES[request.dtype]) is None:
        _refuse_codes(opened.quantised.weights, request, is_adapted=bool(source.files.adapted))
    else:
        values = dequantised(opened, source.names.prefix, dtype)
        findings += values.findings
        source = values.described(source, opened.catalog.names)
    target = None
    if request.to is not None:
        target = target_of(source, request)
        movable(source.framework, source.optimizer, target, request)
    core_request = _core_request_of(source, target, request, form)
    if values is not None:
        core_request = replace(
            core_request,
            coded=values.coded,
            left_out=values.left_out(source.names.own),
            keep=_kept(opened, request),
        )
    # A file that is missing or cannot be read makes every tensor in it missing: say the cause, not the echo.
    causes = opened.find_causes(findings, source)
    core = draft_of(opened.catalog, core_request)
    # Read before the draft is placed, which uses it up.
    found, lost, axes, dtypes = core.findings(), core.lost(), core.axes(), core.dtypes()
    found = [beyond_config(f, source.model) for f in found]
    names, parts = _parts(opened, source, core)
    return _Draft(
        opened,
        request,
        source,
        target,
        core_request,
        renamed,
        core,
        findings,
        causes,
        found,
        lost,
        axes,
        dtypes,
        names,
        parts,
    )


def _kept(opened: Opened, request: Request) -> dict[str, object]:
    """Return the tensors that keep their dtype when others are cast to a narrower one.

    These are the tensors that the transformers class keeps in float32, and tensors with typical names. Layout
    tables list these tensors themselves.
    """
    if request.keep_dtype == "none" or request.dtype == "f32":
        # A wider dtype loses nothing.
        return {"nothing": True}
    if request.dtype not in ("bf16", "f16"):
        return {}
    listed = opened.listed
    by_class = () if listed is None else listed.keeps.get(DTYPES[request.dtype] or "", ())
    return {"names": sorted({*WORDS["kept"], *by_class})}


def _kept_note(draft: _Draft) -> list[Finding]:
    """Build a note for the tensors that keep a wider dtype than the requested one."""
    dtype = DTYPES[draft.request.dtype]
    if draft.request.dtype not in ("bf16", "f16"):
        return []
    kept = [
        (name, t.dtype)
        for name, t in draft.tensors.items()
        if t.dtype in ("F32", "F64") and not is_state(name)
    ]
    if not kept:
        return []
    name, kind = kept[0]
    keep = "keeps its dtype" if len(kept) == 1 else "keep their dtype"
    return [
        Finding.of(
            codes.IGNORED,
            f"{counted(len(kept), 'tensor')} that the model uses in float32 {keep}",
            severity="note",
            tensor=name,
            expected=dtype,
            got=kind,
            count=len(kept),
            help="pass --keep-dtype none to cast every tensor",
            run=["--keep-dtype none"],
        )
    ]


def _refuse_codes(weights: Sequence[Weight], request: Request, *, is_adapted: bool) -> None:
    """Refuse an operation on values if the weights keep their codes.

    Raises:
        FastshardError: ``FS514``.
    """
    if not weights or not (is_adapted or request.vocab_size is not None):
        return
    what = "--adapter" if is_adapted else "--vocab-size"
    raise FastshardError.of(
        codes.UNSUPPORTED,
        f"{what} needs values, but {counted(len(weights), 'weight')} of the model are codes "
        f"({weights[0].form.name})",
        tensor=weights[0].codes,
        help="dequantise the weights",
        run=["--dtype bf16"],
    )


def _metadata(draft: _Draft) -> tuple[dict[str, str], list[Finding]]:
    """Return the metadata of the headers for tensors of torchao, and the reasons why it cannot be written.

    It cannot be written if it would be wrong, i.e. for a result with other names, values or another form.
    """
    records, source = draft.opened.quantised.records, draft.source
    unwritable = draft.opened.quantised.unwritable
    if unwritable or not records:
        return {}, unwritable
    changed = bool(source.names.own or source.files.adapted) or draft.request.vocab_size is not None
    is_whole = draft.target is None or (draft.target.keeps_names and draft.target.name == "hf")
    if draft.is_kept and is_whole and not changed:
        if draft.request.is_narrowed:
            names = draft.core.names()
            records = {name: r for name, r in records.items() if not names.isdisjoint(r.parts or (name,))}
        # Each file has all of it: readers keep the list of the last one. source: transformers 5.24
        # quantizer_torchao.py
        texts = {name: r.text for name, r in records.items()}
        return {**texts, torchao.NAMES: json_text.canonical(sorted(texts))}, []
    name = next((name for name, r in records.items() if r.parts), None)
    return {}, [
        Finding.of(
            codes.UNSUPPORTED,
            "torchao describes its tensors in the header of each file: their names, values and files cannot "
            "be changed",
            tensor=name,
            help="merge the checkpoint without options that change names, values or the format, or save the "
            "model's values with torchao (dequantize) and convert those",
        )
    ]


def _parts(opened: Opened, source: Source, core: _core.Draft) -> tuple[frozenset[str], list[PromisedPart]]:
    """Return the names of all tensors, and the parts that a config promises, with their tensors."""
    if opened.reference is not None or not list_promised_parts(source, ()):
        return frozenset(), []
    names = {name for unit in source.files.units for name in opened.catalog.names(unit.file)}
    names |= core.names()
    return frozenset(names), list_promised_parts(source, names)


def _find_in_outputs(draft: _Draft) -> list[Finding]:
    """Find problems in the outputs: differences from the reference, or between the model's own layers."""
    opened, request, source = draft.opened, draft.request, draft.source
    findings: list[Finding] = []
    if not draft.is_kept and not any(f.severity == "error" for f in (*draft.findings, *draft.found)):
        findings += quantised(draft.tensors, request.dtype, opened.quantised.method)
        findings += _kept_note(draft)
    if request.is_narrowed and draft.is_kept and opened.quantised.by_tensor:
        taken_names = {source.names.own.get(name, name) for name in draft.core.names()}
        findings += torn(
            opened.quantised.by_tensor, {n.removeprefix(source.names.prefix) for n in taken_names}
        )
    # A reference says more than a model's own layers.
    merged = _with_own_names(draft)
    has_evidence = opened.reference is None and not _is_described_anew(draft)
    seen = evidence(opened, merged, request) if has_evidence else None
    by_list: list[Finding] = []
    why = "" if opened.promised is None else opened.promised.why
    if seen is not None:
        # What could not be drafted is missing below for that reason.
        both = opened.find_causes([*draft.findings, *draft.found], source)
        by_layers = both.left(asked_for(f, request) for f in seen.findings)
        if opened.promised is not None:
            from .promised import beside_list, compare_with_list

            named = [f.tensor for f in (*draft.findings, *draft.found) if f.severity == "error"]
            by_list, reason = compare_with_list(opened, request, merged, named)
            why = reason or why
            by_list = both.left(by_list)
            by_layers = beside_list(by_layers, by_list)
        findings += [*by_layers, *by_list]
    elif opened.promised is not None:
        from .promised import refused_names

        findings += refused_names(opened, request, draft.merged)
    if seen is not None and source.model.config and not request.is_narrowed and opened.listed is None:
        from .tied_tensors import find_differing_head

        findings += find_differing_head(opened, draft.merged)
    if not source.index.is_provable and listed_by(by_list) is None:
        findings.append(unproven(source.model.config is not None, bool(source.index.names), seen, why))
    if opened.reference is not None:
        from .reference_sides import compared

        named = [f.tensor for f in (*draft.findings, *draft.found) if f.severity == "error"]
        findings += draft.causes.left(compared(opened, opened.reference, request, draft.merged, named))
    if draft.parts and not request.is_narrowed and not _accounts_for_parts(draft):
        listed = opened.is_described or opened.listed is not None
        both_found = [*draft.findings, *draft.found]
        findings = find_missing_parts(source, draft.parts, draft.names, both_found, findings, listed=listed)
    findings += _odd_dtypes(draft)
    return findings + words(source, draft.axes, request.tokenizer)


def _is_described_anew(draft: _Draft) -> bool:
    """Return True if a table describes a model's values, which are written for another framework."""
    is_described = draft.source.binding.layout is not None and not draft.opened.is_composite
    return draft.target is not None and draft.request.to != "hf" and is_described


def _with_own_names(draft: _Draft) -> Merged:
    """Return the draft with the model's own names, for a draft for another framework's target."""
    merged = draft.merged
    has_own = draft.target is None or draft.request.to == "hf"
    if has_own or not draft.opened.is_composite:
        return merged
    core_request = CoreRequest(merged.source, draft.request.weights, mean_replicas=True)
    core = draft_of(draft.opened.catalog, core_request)
    return replace(merged, draft=core, core_request=core_request)


def _odd_dtypes(draft: _Draft) -> list[Finding]:
    """Find tensors in a few layers whose dtype differs from that in all other layers.

    The list is empty for quantised models, which mix dtypes on purpose, for a checkpoint with a reference,
    which states more, and after an error, which may explain a dtype.
    """
    quantised, config = draft.opened.quantised, draft.source.model.config or {}
    is_quantised = (
        quantised.weights or quantised.method or any(config.get(key) for key in config_json.QUANTISED)
    )
    if (
        not draft.is_kept
        or draft.opened.reference is not None
        or is_quantised
        or any(f.severity == "error" for f in (*draft.findings, *draft.found))
    ):
        return []
    return draft.core.odd_dtypes()


def _facts_of(
    draft: _Draft, core: _core.Plan, planned: Sequence[Finding], lost: Mapping[str, int | None]
) -> Facts:
    """Collect the facts that the stages of the evaluation use."""
    source, listed, request = draft.source, draft.opened.listed, draft.request
    table = source.binding.usual_table if source.binding.table is None else source.binding.table
    is_own = draft.target is None
    # Those of a target are its own.
    of_parts = [n for n in lost if is_own or (table is not None and table.rule_of(n) is not None)]
    return Facts(
        causes=draft.causes,
        known=frozenset(draft.findings),
        echoes=[*draft.found, *planned],
        lost=lost,
        usable=core.names() if is_own and lost else None,
        parts=draft.parts,
        lost_of_parts=of_parts,
        index=source.index.names,
        listed_by=None if listed is None else f"{listed.model_class} of transformers {listed.transformers}",
        rank_files=[RankFile(path, rank) for path, rank in locate_files(source, draft.paths).items()],
        gate=draft.opened.gate,
        is_narrowed=request.is_narrowed,
        explain_selection=partial(_meant_for, opened=draft.opened, request=request),
        has_reasons=source.optimizer.rules is not None,
    )


def _accounts_for_parts(draft: _Draft) -> bool:
    """Return True if a known reason may explain a missing part.

    Possible reasons are a lost file, and a trainer that saved only the tensors that it trained.
    """
    by_file = draft.causes.files or draft.causes.of_all
    return bool(by_file) or not (draft.source.model.saved_whole or holds_embedding(draft.names))


def _completed(draft: _Draft, target: Target) -> Completed:
    """Return the names and contents of the target's files, which depend on the tensors of the draft."""
    catalog, request, source = draft.opened.catalog, draft.request, draft.source
    stored = (name for unit in source.files.units for name in catalog.names(unit.file))
    state = None
    if request.optimizer and target.takes_slots:
        state = carried(source, draft.tensors, draft.core.made_of())
    bound = Bound(draft.axes, draft.tensors, stored, draft.main_dtype, request.tokenizer, state)
    completed = target.complete(bound)
    return completed if state is None else replace(completed, findings=state.findings + completed.findings)


def _find_lost(draft: _Draft, findings: Sequence[Finding]) -> dict[str, int | None]:
    """Find the incomplete tensors with the number of elements of each; none if patterns select tensors."""
    if draft.request.is_narrowed:
        return {}
    broken = (
        f
        for f in [*findings, *draft.found]
        if f.severity == "error" and f.is_a("missing_tensor", "incomplete", "misfit")
    )
    return find_lost_tensors(draft.lost, draft.source, broken)


def _core_request_of(
    source: Source, target: Target | None, request: Request, form: Form | None
) -> CoreRequest:
    """Build the request to the core.

    ``form`` is the form of a result that takes its names from a reference.
    """
    table = None
    if target is not None:
        own = target.form()
        form = own if form is None else replace(own, table=form.table, facts=form.facts)
        if source.optimizer.rules is not None and not target.is_container:
            table = source.optimizer.rules(target.keeps_step, request.optimizer)
    return CoreRequest(
        source,
        request.weights,
        request.optimizer,
        form,
        dtype=DTYPES[request.dtype],
        mean_replicas=request.replicas == "mean",
        include=request.include,
        exclude=request.exclude,
        table=table,
    )


def _config_text(draft: _Draft) -> dict[str, str]:
    """Return the config.json of a result that keeps its names; empty if the source's own is copied."""
    cast = not draft.is_kept or draft.is_of_masters
    config = _kept_config(draft.source.model, draft.axes, draft.main_dtype, cast)
    unwritten = draft.target is not None and draft.source.model.config_file is None
    adapter = draft.source.files.adapter
    # An adapter may have changed the config that was declared: the base's own is what would go along.
    own = draft.opened.source.model.config if adapter is None else adapter.base
    if config is None or (config == own and not unwritten):
        return {}
    return {"config.json": config_text.written(config)}


def find_ids_beyond(plan: Plan, tokenizer: Tokenizer | None) -> list[Finding]:
    """Report a tokenizer with ids beyond the rows of the embedding, for a plan that keeps tensor names."""
    keeps_names = plan.target == "merge" or plan.keeps_names
    is_known = any(f.severity == "error" or f.code == codes.CONFIG_DISAGREES for f in plan.findings)
    if tokenizer is None or not keeps_names or is_known:
        return []
    shapes = {name: shape for name, _, shape, *_ in plan.outputs}
    # Of names that ranks share each tensor is a slice.
    return [] if len(shapes) < len(plan.outputs) else find_ids_beyond_embedding(shapes, tokenizer)


def to_be_written(plan: Plan) -> Plan:
    """Add to a plan the findings that only prevent writing, and return the plan."""
    plan.findings += [*plan.core.unwritable(), *plan.unwritable]
    return plan


def _meant_for(finding: Finding, opened: Opened, request: Request) -> Finding:
    """Add a suggestion for a mistyped pattern to the finding that no tensor is left."""
    if not request.include:
        return finding
    names = make_plan(opened, replace(request, include=(), exclude=())).index
    for pattern in request.include:
        near = nearest(pattern, names)
        if near is not None and not any(fnmatchcase(name, pattern) for name in names):
            return finding.replace(got=f"--include {pattern}", help=f"did you mean {near}?")
    return finding


def _kept_config(
    model: Description, axes: dict[str, int], main: str | None, cast: bool
) -> dict[str, Any] | None:
    """Return the config.json for tensors under Hugging Face's own names; None if there is none.

    With a wrong dtype in it, transformers would cast the tensors, or take them for quantised ones. The config
    of a model that transformers saved is right, unless the tensors are cast.
    """
    if not (model.hf_names and model.config):
        return None
    config = config_json.with_rows(model.config, axes.get("V"))
    if cast or not (model.saved_whole or config_json.dtype_of(config) is None):
        config = config_json.with_dtype(config, main)
    return config


def _main_dtype(sizes: dict[str, int], masters: bool) -> str | None:
    """Return torch's name of the dtype of most floating-point bytes; None if there are no floats.

    Next to master weights, frozen parameters may be most of the bytes, and their narrower dtype would round
    the master weights. So float32 takes precedence there.
    """
    weight = {
        d: (TORCH_FLOATS[d] == "float32" if masters else False, n)
        for d, n in sizes.items()
        if d in TORCH_FLOATS
    }
    return TORCH_FLOATS[max(weight, key=lambda d: weight[d])] if weight else None
