"""Optimizer state for another framework: moments by the target's weights, the step, and parameter groups.

Moments are outputs like their weights: the core moves them through the same boxes. This module collects
everything that does not have a weight's shape, or reports that it is not converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..common import codes
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass, field
from ..layouts.declaration import Group, Source

#: Adam's slots, which targets support. source: torch/optim/adam.py
ADAM = ("exp_avg", "exp_avg_sq")
#: Hyperparameters that a target receives, by torch's names. Others belong to a framework's own kernels.
CARRIED = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "initial_lr",
    "amsgrad",
    "maximize",
    "bias_correction",
    "decoupled_weight_decay",
)
#: Hyperparameters that every Adam group has, and the ones that distinguish AdamW from Adam.
NEEDED = ("lr", "betas", "eps", "weight_decay")
DECOUPLED = "decoupled_weight_decay"
#: Settings of how torch runs its optimizers, not of what they compute, and keys under which Megatron-LM and
#: DeepSpeed store facts that are known from elsewhere.
_SILENT = (
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "step",
    "name",
    "wd_mult",
    "lr_mult",
    "is_expert_parallel",
    "is_decoupled_lr",
    "max_lr",
    "min_lr",
    "pre_mult_wd",
    "pre_mult_lr",
    "default_config",
    "is_vision_model_param",
)


@dataclass(frozen=True)
class State:
    """Optimizer state under the target's names."""

    #: The draft's moments, by weight and slot.
    slots: dict[str, dict[str, str]]
    #: Number of steps taken; None if the source does not state it.
    step: int | None
    #: Hyperparameters and weights of each group; None if the source does not state which weights each group
    #: has.
    groups: list[tuple[dict[str, Any], list[str]]] | None
    #: Findings about state that is not converted.
    findings: list[Finding] = field(default_factory=list)


def carried(source: Source, outputs: Mapping[str, Any], made_of: Mapping[str, Iterable[str]]) -> State:
    """Return the optimizer state to convert.

    Args:
        source: the source, with its slots.
        outputs: the draft's tensors by name, with their full shapes (``whole``).
        made_of: the stored tensors from which each output is computed.

    Raises:
        FastshardError: ``FS514`` for state that no target supports.
    """
    known = sorted({group.slot for group in source.files.assembled if group.slot is not None})
    if known != list(ADAM):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "this kind of optimizer state cannot be converted",
            expected=" and ".join(ADAM),
            got=", ".join(known) or "no moments",
            help="merge it, which keeps the state under its own names",
            run=["fastshard merge CKPT OUT --optimizer"],
        )
    slots: dict[str, dict[str, str]] = {}
    for name in outputs:
        weight, _, slot = name.rpartition(".")
        if slot in ADAM and weight in outputs:
            slots.setdefault(weight, {})[slot] = name
    lacking = next((w for w, have in slots.items() if len(have) < len(ADAM)), None)
    if lacking is not None:
        raise FastshardError.of(
            codes.MASTERS_NOT_CHECKABLE,
            "some of the moments of this parameter are missing",
            tensor=lacking,
            expected=" and ".join(ADAM),
            got=", ".join(slots[lacking]),
        )
    findings: list[Finding] = []
    state = State(slots, _step(source), _groups(source, slots, outputs, made_of, findings), findings)
    if state.step is None:
        findings.append(
            Finding.of(
                codes.IGNORED,
                "the optimizer's step is not carried over: the files do not state it",
                severity="warning",
                help="set it in the run that continues: Adam's bias correction depends on the step",
            )
        )
    findings += _of_groups(state, source)
    dropped = sorted(
        {
            key
            for group in source.optimizer.groups or ()
            for key, value in group.values.items()
            if key not in (*CARRIED, *_SILENT) and value not in (None, False)
        }
    )
    if dropped:
        findings.append(
            Finding.of(
                codes.IGNORED,
                f"hyperparameters not carried over: {', '.join(dropped)}",
                severity="note",
                help="set them in the run that continues",
            )
        )
    return state


def _of_groups(state: State, source: Source) -> list[Finding]:
    """Report hyperparameters that the groups do not state.

    Raises:
        FastshardError: ``FS514`` for hyperparameters that are not numbers.
    """
    findings: list[Finding] = []
    for given, _ in state.groups or ():
        for key, value in given.items():
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if not all(n is None or isinstance(n, (bool, int, float)) for n in numbers):
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    "a hyperparameter of the optimizer is not a number",
                    expected=f"a number for {key}",
                    got=repr(value)[:80],
                    help="leave out --optimizer",
                )
    lacking = {key for given, _ in state.groups or () for key in NEEDED if key not in given}
    if lacking:
        findings.append(
            Finding.of(
                codes.IGNORED,
                f"a param group does not state these hyperparameters: {', '.join(sorted(lacking))}",
                severity="warning",
                help="set them in the run that continues",
            )
        )
    if any(DECOUPLED not in given and given.get("weight_decay") for given, _ in state.groups or ()):
        findings.append(
            Finding.of(
                codes.IGNORED,
                "the files do not state whether weight decay is decoupled: fastshard assumes that it is, as "
                "in AdamW",
                severity="warning",
                help="set decoupled_weight_decay to False in the run that continues, if it uses Adam with "
                "L2 regularisation",
            )
        )
    moved = {name for group in source.files.assembled if group.slot for name, *_ in group.tensors}
    without = sorted({n for group in source.optimizer.groups or () for n in group.names or ()} - moved)
    if without:
        findings.append(
            Finding.of(
                codes.IGNORED,
                f"{len(without)} parameters are in the param groups but have no moments: fastshard treats "
                "them as never stepped",
                severity="note",
                tensor=without[0],
            )
        )
    return findings


def _step(source: Source) -> int | None:
    """Return the common step of all parameters.

    Raises:
        FastshardError: ``FS514`` if their steps differ.
    """
    counts = [step for steps in source.optimizer.steps.values() for step in steps]
    # Fused optimizers count by group.
    by_group = [group.values.get("step") for group in source.optimizer.groups or ()]
    counts += [float(step) for step in by_group if type(step) is int]
    told = sorted(set(counts))
    if len(told) > 1:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "the optimizer's parameters are at several steps, and the target holds a single step",
            expected="one step",
            got=", ".join(f"{step:g}" for step in told[:8]),
            help="merge it, which keeps the moments under their own names",
            run=["fastshard merge CKPT OUT --optimizer"],
        )
    return int(told[0]) if told and told[0] >= 0 and told[0] == int(told[0]) else None


def _groups(
    source: Source,
    slots: Mapping[str, Mapping[str, str]],
    outputs: Mapping[str, Any],
    made_of: Mapping[str, Iterable[str]],
    findings: list[Finding],
) -> list[tuple[dict[str, Any], list[str]]] | None:
    """Return each group's weights: those whose moments come from the group's parameters."""
    groups = source.optimizer.groups
    if groups is None:
        findings.append(
            Finding.of(
                codes.IGNORED,
                "the param groups (learning rates, weight decay) are not carried over: the files do not "
                "state which parameters belong to which group",
                severity="warning",
                help="set them in the run that continues, as in the first run",
            )
        )
        return None
    members: list[list[str]] = [[] for _ in groups]
    for weight, moments in slots.items():
        names = {name for moment in moments.values() for name in made_of.get(moment, ())}
        among = [n for n, group in enumerate(groups) if _of(group, weight, names, outputs)]
        if len(among) != 1:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "a weight of the target combines parameters of several param groups, or of none",
                tensor=weight,
                expected="parameters of one param group",
                got=", ".join(sorted(names)[:4]),
                help="convert to a layout that keeps these parameters separate, or leave out --optimizer",
            )
        members[among[0]].append(weight)
    return [
        ({key: group.values[key] for key in CARRIED if key in group.values}, sorted(names))
        for group, names in zip(groups, members, strict=True)
    ]


def _of(group: Group, weight: str, names: set[str], outputs: Mapping[str, Any]) -> bool:
    if group.names is not None:
        return bool(group.names & names)
    decays = len(outputs[weight].whole) > 1 and not weight.endswith(".bias")
    return group.decays is None or group.decays == decays
