"""The elements in each rank's flat ZeRO partition that make up a parameter.

Stages 1 and 2 (and BF16_Optimizer) concatenate the parameters of a group and divide the resulting vector into
one partition per data-parallel rank. Stage 3 divides every parameter into one part per rank. Stage 0 stores
the optimizer state in the model file.
source: DeepSpeed runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py, utils/zero_to_fp32.py,
utils/tensor_fragment.py
"""

from __future__ import annotations

import math
from typing import Any

from ...common import codes
from ...common.errors import Finding
from ...common.ranks import rank_range
from ...common.records import dataclass, field, replace
from ...layouts.declaration import Assembled, Group, Optimizer, Source, StateFile
from ..base import PARAMETERS_ALONE, Contents, Found, lacking, missing
from ..param_groups import joined
from . import stage0, stage3, stage12
from .cross_checks import copied_files, steps_agree
from .experts import Experts
from .flat_state import Model, Naming, name_list
from .partitions import Partitions
from .zero_files import ZeroFiles

__all__ = ["Naming", "attach"]


@dataclass(frozen=True)
class _State:
    """The optimizer state in the files of a model-parallel rank."""

    assembled: list[Assembled] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unread: list[Finding] = field(default_factory=list)
    #: Names of the parameters that the optimizer trains.
    trained: set[str] = field(default_factory=set)
    steps: dict[int, list[float]] = field(default_factory=dict)
    groups: list[list[Group] | None] = field(default_factory=list)
    state_files: list[StateFile] = field(default_factory=list)
    #: The values that it states for all parameters.
    values: dict[str, Any] | None = None
    #: True if there are moments but no master weights.
    moments_only: bool = False
    #: True if the optimizer never took a step; None if this is unknown.
    unstepped: bool | None = None


def attach(
    source: Source,
    found: Found[ZeroFiles],
    contents: Contents,
    states: list[dict[str, Any]],
    name_of: Naming,
    experts: Experts | None = None,
) -> None:
    """Add master weights, optimizer slots and their findings to a declaration."""
    seen = found.seen
    is_stage3 = bool(seen.sliced)
    by_mp: dict[int, list[tuple[int, int]]] = {}
    for dp, mp, file in seen.optim:
        by_mp.setdefault(mp, []).append((dp, file))
    ranks = []
    untrained: set[str] = set()
    frozen: set[str] = set()
    for model in _models(source, found, contents, states, name_of, experts):
        rank = _state_of(model, by_mp.pop(model.mp, None), is_stage3)
        ranks.append(rank)
        source.files.assembled += rank.assembled
        if rank.values is not None:
            source.files.values.setdefault("optimizer", rank.values)
        unnamed = model.names() - rank.trained if rank.trained else set()
        untrained.update(map(name_of, unnamed))
        frozen.update(map(name_of, _frozen(model, unnamed, rank.trained)))
        if is_stage3:
            source.files.assembled += stage3.frozen(model, seen.sliced)
            source.findings += stage3.ranks_agree(model, seen.sliced)
            buffers = {
                name for unit in source.files.units if unit.file == model.file for name in unit.only or []
            }
            source.findings += stage3.left_out(model, buffers)
    findings = [finding for rank in ranks for finding in rank.findings]
    findings += [_model_missing(found.folder, mp, len(parts)) for mp, parts in by_mp.items()]
    # A partition that its own account gives away needs no second finding.
    known = {f.file for f in findings if f.code == codes.DUPLICATED_SHARD}
    findings += [f for f in copied_files(found, contents) if f.file not in known]
    steps = {file: each for rank in ranks for file, each in rank.steps.items()}
    findings += steps_agree(found, steps)
    masters = [a for a in source.files.assembled if a.slot is None and not a.frozen]
    # Masters that cannot be named, or that the model file says there must be, are told of, not passed over.
    untaken = any(f.code == codes.MASTERS_NOT_CHECKABLE or f.is_a("missing_file") for f in findings)
    source.optimizer = Optimizer(
        masters=bool(masters) or is_stage3 or bool(seen.optim) or untaken,
        moments_only=any(rank.moments_only for rank in ranks),
        unstepped=next((rank.unstepped for rank in reversed(ranks) if rank.unstepped is not None), False),
        weights="masters" if is_stage3 else "params",
        params_stored=not is_stage3,
        findings=findings,
        unread=[finding for rank in ranks for finding in rank.unread],
        untrained=untrained,
        frozen=frozen,
        state_files=[file for rank in ranks for file in rank.state_files],
        groups=joined([groups for rank in ranks for groups in rank.groups]),
        files=set() if is_stage3 else {found.files[file].path for _, _, file in seen.optim},
        steps=steps,
    )


def _models(
    source: Source,
    found: Found[ZeroFiles],
    contents: Contents,
    states: list[dict[str, Any]],
    name_of: Naming,
    experts: Experts | None,
) -> list[Model]:
    """Return the model-parallel ranks, each with its first file if several root directories contain it."""
    seen = found.seen
    tp = source.binding.degrees.get("tp", 1)
    stages = len({rank for rank, _ in seen.ranks}) // tp if seen.pipeline else 1
    plain = source.binding.layout is None and source.binding.pass_unknown
    models: dict[int, Model] = {}
    for (mp, file), state in zip(seen.ranks, states, strict=True):
        if mp not in models:
            coords = _coords(mp, tp, seen.pipeline)
            layers = _layers(seen, coords.get("tp", 0)) if seen.pipeline else []
            models[mp] = Model(
                found, contents, state, file, mp, coords, {"mp": mp}, name_of, plain, layers, stages, experts
            )
    return list(models.values())


def _state_of(model: Model, parts: list[tuple[int, int]] | None, is_stage3: bool) -> _State:
    """Return a rank's state: partitions by data-parallel rank and file, or the state in the model file.

    Reports the missing file if there is neither.
    """
    if parts is not None:
        return _partitioned(model, parts, is_stage3)
    each, findings = ([], []) if is_stage3 else _stage0(model)
    if each:
        return _whole(each)
    if is_stage3 or stage0.partitioned(model):
        findings = [*findings, model.missing(0, 1, bf16=True)]
    return _State(findings=findings)


def _partitioned(model: Model, parts: list[tuple[int, int]], is_stage3: bool) -> _State:
    """Return the state that stages 1 to 3 divide among data-parallel ranks."""
    group = Partitions(model, parts, is_stage3)
    shapes = model.shapes() or (group.shapes() if not is_stage3 else None)
    trained = {name for shape in shapes or [] for name in shape}
    named = None
    unnamed = []
    if shapes is None:
        unnamed.append(
            Finding.of(
                codes.MASTERS_NOT_CHECKABLE,
                "the model file does not state the order of the flat parameters (no param_shapes), so the "
                "master weights have no names",
                file=model.path,
                rank=model.label,
            )
        )
    elif group.whole:
        named = stage3.slices(group, shapes) if is_stage3 else stage12.divide(group, shapes)
    if named is not None:
        group.keep(named)
        trained |= {name for name, *_ in named[0]}
    return _State(
        assembled=group.assembled,
        findings=[*unnamed, *group.findings],
        trained=trained,
        steps=group.steps,
        groups=[] if named is None else [group.groups(named)],
        state_files=[] if named is None else group.state_files(),
        values=group.values,
        unstepped=group.unstepped,
    )


def _whole(each: list[stage0.StoredOptimizer]) -> _State:
    """Return the state of stage 0, which is divided at most among expert-parallel ranks."""
    alone = [optimizer for optimizer in each if optimizer.key is None]
    return _State(
        assembled=[one for optimizer in each for one in optimizer.assembled],
        findings=[
            optimizer.unnamed() for optimizer in each if optimizer.key is not None and not optimizer.named
        ],
        unread=[finding for optimizer in each for finding in optimizer.unread()],
        trained={name for optimizer in each for name, *_ in optimizer.members()},
        steps={optimizer.model.file: optimizer.steps() for optimizer in each},
        groups=[optimizer.listed() for optimizer in each],
        state_files=[
            optimizer.state_file() for optimizer in each if optimizer.key is not None and optimizer.named
        ],
        moments_only=bool(alone),
        unstepped=alone[-1].states == {} if alone else None,
    )


def _model_missing(folder: str, mp: int, count: int) -> Finding:
    name = f"mp_rank_{mp:02d}_model_states.pt"
    return missing(
        f"{folder}/{name}" if folder else name,
        {"mp": mp},
        f"{count} optimizer files of this model-parallel rank; only it names their parameters",
        f"copy {name} from the node that ran model-parallel rank {mp}",
    )


def _stage0(model: Model) -> tuple[list[stage0.StoredOptimizer], list[Finding]]:
    """Read the optimizers of stage 0, and report missing files.

    They are in the model file or, for an MoE model, in one file per expert-parallel rank; the model file then
    contains a copy of the first one.
    """
    experts = model.experts
    if experts is None or not experts.optimizers:
        optimizer = stage0.read(model)
        return [] if optimizer is None else [optimizer], []
    dense = model.stored()[0]
    each: list[tuple[int, Model]] = []
    width = max(rank for rank, _ in experts.optimizers) + 1
    every = sum(math.prod(shape) for shape in experts.tensors.values())
    for rank, file in experts.optimizers:
        content = model.contents(file)
        state = {"optimizer": content.get("optimizer")} if isinstance(content, dict) else {}
        coords, place = {**model.coords, "ep": rank}, {"ep": rank, **model.place}
        of_rank = replace(model, file=file, state=state, coords=coords, place=place)
        own = stage0.of_experts(of_rank)
        if own and every % own == 0:
            width = max(width, every // own)
        each.append((rank, of_rank))
    absent = lacking((rank for rank, _ in each), 0, width - 1)
    if absent:
        why = f"one of {width} parts of the experts"
        return [], [_no_experts_state(model, first, last, why) for first, last in absent]
    found: list[stage0.StoredOptimizer] = []
    for rank, of_rank in each:
        apart = [*dense, *((name, shape, 0) for name, shape in experts.list_of_rank(rank, width))]
        one = stage0.read(of_rank, apart)
        found += [] if one is None else [one]
    return found, []


def _no_experts_state(model: Model, first: int, last: int, why: str) -> Finding:
    name, end = (f"expp_rank_{n}_mp_rank_{model.mp:02d}_optim_states.pt" for n in (first, last))
    folder = model.found.folder
    return missing(
        f"{folder}/{name}" if folder else name,
        {"ep": rank_range(first, last), **model.place},
        why,
        f"copy {name} from the node that ran expert-parallel rank {first}, or take the parameters alone",
        upto=end if last > first else None,
        run=PARAMETERS_ALONE,
    )


def _frozen(model: Model, untrained: set[str], trained: set[str]) -> set[str]:
    """Return the frozen parameters.

    The model file states them. Before ZeRO-2, they are the tensors without a master weight that are neither
    buffers nor aliases of trained parameters.

    source: DeepSpeed runtime/engine.py (frozen_param_shapes from stage 2 on), 0.18
    """
    buffers = set(name_list(model.state.get("buffer_names")))
    aliases = {alias for alias, owner in model.aliases().items() if owner in trained}
    return stage3.frozen_names(model) | (untrained - buffers - aliases)


def _layers(seen: ZeroFiles, tp: int) -> list[tuple[int, int]]:
    """Return the layer files of a rank, in order; the first file of each layer if several root directories
    contain it.
    """
    files: dict[int, int] = {}
    for layer, rank, file in seen.layers:
        if rank == tp:
            files.setdefault(layer, file)
    return sorted(files.items())


def _coords(mp: int, tp: int, pipeline: bool) -> dict[str, int]:
    """Return the coordinates of a model-parallel rank; a pipeline numbers pp x tp jointly, tp fastest."""
    if not pipeline:
        return {"tp": mp} if tp > 1 else {}
    # Stages hold different layers; a tied tensor is the same on several, and compared as a replica.
    return {"tp": mp % tp, "pp": mp // tp} if tp > 1 else {"pp": mp}
