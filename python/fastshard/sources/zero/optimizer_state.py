"""ZeRO: which elements of which rank's flat partition make up a parameter.

Stages 1 and 2 (and BF16_Optimizer) lay the parameters of a group one after another and cut the
whole into one partition per data-parallel rank. Stage 3 cuts every parameter into one part per rank.
Stage 0 keeps the optimizer's state in the model file.
source: DeepSpeed runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py,
utils/zero_to_fp32.py, utils/tensor_fragment.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...common.errors import Finding
from ...layouts.declaration import Group, Optimizer, Source
from ..base import Contents, Found, lacking, missing
from ..param_groups import joined
from . import stage0, stage3, stage12
from .cross_checks import copied_files, steps_agree
from .experts import Experts
from .flat_state import Model, Naming, name_list
from .partitions import Partitions
from .zero_files import ZeroFiles

__all__ = ["Naming", "attach"]


def attach(
    source: Source,
    found: Found[ZeroFiles],
    contents: Contents,
    states: list[dict[str, Any]],
    name_of: Naming,
    experts: Experts | None = None,
) -> None:
    """Adds masters and optimizer slots to a declaration, and what is wrong with them."""
    seen = found.seen
    is_stage3 = bool(seen.sliced)
    by_mp: dict[int, list[tuple[int, int]]] = {}
    for dp, mp, file in seen.optim:
        by_mp.setdefault(mp, []).append((dp, file))
    tp = source.degrees.get("tp", 1)
    state = Optimizer()
    findings, moments_only, unstepped = state.findings, False, False
    groups: list[list[Group] | None] = []
    for i, (mp, file) in enumerate(seen.ranks):
        # The first file of a rank, where several roots hold it.
        if any(mp == earlier for earlier, _ in seen.ranks[:i]):
            continue
        coords, label = _place(mp, tp, seen.pipeline)
        plain = source.layout is None and source.pass_unknown
        model = Model(
            found, contents, states[i], file, mp, coords, label, name_of, own_names=plain, experts=experts
        )
        if seen.pipeline:
            model.layers = _layers(seen, coords.get("tp", 0))
            model.stages = len({rank for rank, _ in seen.ranks}) // tp
        trained: set[str] = set()
        renamed: set[str] = set()
        if mp in by_mp:
            group = Partitions(model, by_mp.pop(mp), is_stage3)
            shapes = model.shapes() or (group.shapes() if not is_stage3 else None)
            if shapes is None:
                findings.append(
                    Finding.of(
                        "FS402",
                        "the model file does not tell the order of the flat parameters (no param_shapes), so the masters cannot be named",
                        file=model.path,
                        rank=model.label,
                    )
                )
            elif group.whole:
                named = stage3.slices(group, shapes) if is_stage3 else stage12.divide(group, shapes)
                if named is not None:
                    group.keep(named)
                    renamed = {name for name, *_ in named[0]}
                    state.state_files.extend(group.state_files())
                    groups.append(group.groups(named))
            source.assembled += group.assembled
            trained = {name for shape in shapes or [] for name in shape} | renamed
            findings += group.findings
            state.steps.update(group.steps)
            unstepped = group.unstepped
            source.values.setdefault("optimizer", group.values)
        elif not is_stage3 and (each := _stage0(model, experts, findings)):
            for held in each:
                source.assembled += held.assembled
                state.unread.extend(held.unread())
                trained |= {name for name, *_ in held.members()}
                state.steps[held.model.file] = held.steps()
                groups.append(held.listed())
                if held.key is None:
                    moments_only, unstepped = True, held.states == {}
                elif held.named:
                    state.state_files.append(held.state_file())
                else:
                    findings.append(held.unnamed())
        elif is_stage3 or stage0.partitioned(model):
            findings.append(model.missing(0, 1, bf16=True))
        untrained = model.names() - trained if trained else set()
        state.untrained.update(map(name_of, untrained))
        state.frozen.update(map(name_of, _frozen(model, untrained, trained)))
        if is_stage3:
            source.assembled += stage3.frozen(model, seen.sliced)
            source.findings += stage3.ranks_agree(model, seen.sliced)
            buffers = {name for unit in source.units if unit.file == file for name in unit.only or []}
            source.findings += stage3.left_out(model, buffers)
    for mp, parts in by_mp.items():
        name = f"mp_rank_{mp:02d}_model_states.pt"
        folder = found.folder
        findings.append(
            missing(
                f"{folder}/{name}" if folder else name,
                f"mp {mp}",
                f"{len(parts)} optimizer files of this model-parallel rank; only it names their parameters",
                f"copy {name} from the node that ran model-parallel rank {mp}",
            )
        )
    # A partition that its own account gives away needs no second finding.
    known = {f.file for f in findings if f.code == "FS303"}
    findings += [f for f in copied_files(found, contents) if f.file not in known]
    findings += steps_agree(found, state.steps)
    masters = [a for a in source.assembled if a.slot is None and not a.frozen]
    # Masters that cannot be named, or that the model file says there must be, are told of, not passed over.
    untaken = any(f.code in ("FS101", "FS402") for f in findings)
    source.optimizer = replace(
        state,
        masters=bool(masters) or is_stage3 or bool(seen.optim) or untaken,
        moments_only=moments_only,
        unstepped=unstepped,
        groups=joined(groups),
        weights="masters" if is_stage3 else "params",
        params_stored=not is_stage3,
        files=set() if is_stage3 else {found.files[file].path for _, _, file in seen.optim},
    )


def _stage0(model: Model, experts: Experts | None, findings: list[Finding]) -> list[stage0.Held]:
    """What the files hold of optimizers of stage 0: the model file, or of a mixture of experts one file per
    expert-parallel rank (of which the model file holds the first once more)."""
    if experts is None or not experts.optimizers:
        held = stage0.read(model)
        return [] if held is None else [held]
    dense = model.stored()[0]
    each: list[tuple[int, Model]] = []
    width = max(rank for rank, _ in experts.optimizers) + 1
    every = sum(math.prod(shape) for shape in experts.tensors.values())
    for rank, file in experts.optimizers:
        content = model.contents(file)
        state = {"optimizer": content.get("optimizer")} if isinstance(content, dict) else {}
        label = f"ep {rank}, {model.label}"
        of_rank = replace(model, file=file, state=state, coords={**model.coords, "ep": rank}, label=label)
        own = stage0.of_experts(of_rank)
        if own and every % own == 0:
            width = max(width, every // own)
        each.append((rank, of_rank))
    absent = lacking((rank for rank, _ in each), 0, width - 1)
    if absent:
        why = f"one of {width} parts of the experts"
        findings += [_no_experts_state(model, first, last, why) for first, last in absent]
        return []
    found: list[stage0.Held] = []
    for rank, of_rank in each:
        apart = [*dense, *((name, shape, 0) for name, shape in experts.held_by(rank, width))]
        one = stage0.read(of_rank, apart)
        found += [] if one is None else [one]
    return found


def _no_experts_state(model: Model, first: int, last: int, why: str) -> Finding:
    name, end = (f"expp_rank_{n}_mp_rank_{model.mp:02d}_optim_states.pt" for n in (first, last))
    folder = model.found.folder
    return missing(
        f"{folder}/{name}" if folder else name, f"ep {first}, {model.label}", why,
        f"copy {name} from the node that ran expert-parallel rank {first}"
        " (to take the parameters without looking at the optimizer: --weights params)",
        upto=end if last > first else None,
    )  # fmt: skip


def _frozen(model: Model, untrained: set[str], trained: set[str]) -> set[str]:
    """Parameters that were not to be trained: as the model file says, or, before ZeRO-2, what has no master and is neither a
    buffer nor a further name of what was trained.

    source: DeepSpeed runtime/engine.py (frozen_param_shapes from stage 2 on), 0.18
    """
    buffers = set(name_list(model.state.get("buffer_names")))
    aliases = {alias for alias, owner in model.aliases().items() if owner in trained}
    return stage3.frozen_names(model) | (untrained - buffers - aliases)


def _layers(seen: ZeroFiles, tp: int) -> list[tuple[int, int]]:
    """The layer files of a rank, in order; the first one of each layer, where several roots hold it."""
    files: dict[int, int] = {}
    for layer, rank, file in seen.layers:
        if rank == tp:
            files.setdefault(layer, file)
    return sorted(files.items())


def _place(mp: int, tp: int, pipeline: bool) -> tuple[dict[str, int], str]:
    """Topology of a model-parallel rank. A pipeline numbers pp x tp jointly, tp fastest."""
    if not pipeline:
        return ({"tp": mp} if tp > 1 else {}), f"mp {mp}"
    # Stages hold different layers; a tied tensor is the same on several, and compared as a replica.
    return ({"tp": mp % tp, "pp": mp // tp} if tp > 1 else {"pp": mp}), f"mp {mp}"
