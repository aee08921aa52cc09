"""Optimizer state in Megatron-LM's torch_dist checkpoints, in the forms of the distributed optimizer.

- ``fully_reshardable``, and any optimizer that is not distributed: tensors with the parameters' shapes;
- ``fully_sharded_model_space`` (0.8 to 0.15): by parameter, shards flat (:mod:`.optim_model_space`);
- ``dp_reshardable``: flat buckets without names (:mod:`.optim_buckets`);
- ``dp_zero_gather_scatter``: pickled objects, which are refused.

source: megatron/core/optimizer/{optimizer,distrib_optimizer}.py (`sharded_state_dict`,
    `sharded_param_state_*`)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...common import codes
from ...common.errors import Finding
from ...common.records import dataclass, field, replace
from ...common.regex import compile_when_used
from ...layouts.declaration import Assembled, Optimizer, Source
from ..base import as_dict
from ..dcp.metadata import Metadata
from ..param_groups import by_decay
from . import optim_buckets, optim_model_space
from .optim_buckets import Stored
from .optim_flat import UnknownPlaces
from .optim_order import BUFFERS, Weights

#: Several optimizers are numbered: chained_0, chained_1, ...
_STATE = compile_when_used(r"^(?:chained_\d+\.)?optimizer\.")
_SLOT = compile_when_used(r"^(?:chained_\d+\.)?optimizer\.state\.([A-Za-z0-9_]+)\.(.+)$")
_PICKLED = compile_when_used(r"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state/")
#: Names of fp32 master weights. source: optimizer.py (fp32_param), distrib_optimizer.py (fp32_param, later
#: param)
MASTERS = ("param", "fp32_param")
#: Nesting depth of several optimizers, down to which parameter groups are searched.
_DEPTH = 4
_MOST_STEPS = 1 << 62


def is_state(name: str) -> bool:
    """Return True for a tensor of optimizer state."""
    return _STATE.match(name) is not None


def divide(
    source: Source,
    tensors: list[Stored],
    described: Metadata,
    args: dict[str, Any],
    common: dict[str, Any],
) -> list[Stored]:
    """Return the weights among the tensors, and declare master weights and optimizer state.

    Args:
        source: the declaration.
        tensors: all tensors of the checkpoint.
        described: contents of ``.metadata``.
        args: the run's arguments.
        common: the common part of the checkpoint.
    """
    weights = [t for t in tensors if not _STATE.match(t[0])]
    there = {name for name, *_ in tensors}
    if any(_STATE.match(entry["name"]) and entry["name"] not in there for entry in described["tensors"]):
        # Files that are missing are findings already.
        source.optimizer = Optimizer(masters=True)
        return weights
    shapes = {name: shape for name, shape, _ in weights}
    state = _state_of(tensors, shapes)
    assembled = [Assembled(0, {}, None, _slot(kind), found) for kind, found in state.by_parameter.items()]
    findings = _refused(described, args, state.unread)
    if state.flat and not findings:
        try:
            assembled += optim_buckets.read(_weights(weights, described), args, state.flat)
        except UnknownPlaces as error:
            findings = [_no_places(state.flat[0][0], error)]
    masters = not findings and any(group.slot is None for group in assembled)
    source.optimizer = Optimizer(
        masters=masters,
        moments_only=not masters and bool(assembled or state.flat or state.unread or findings),
        findings=findings,
    )
    if findings:
        return weights
    source.files.assembled += assembled
    known = {name for group in assembled for name, *_ in group.tensors}
    # One file lists all tensors: what it lists no state of has none.
    source.optimizer.untrained.update(
        n for n in shapes if assembled and n not in known and not n.endswith("_extra_state")
    )
    source.optimizer.frozen.update(n for n in source.optimizer.untrained if not BUFFERS.search(n))
    groups = list(param_groups(common.get("optimizer")))
    if groups:
        source.files.values["optimizer"] = {"param_groups": groups}
        source.optimizer = replace(source.optimizer, groups=by_decay(groups, args))
        source.optimizer.steps[0] = steps(groups)
    is_shifted = bool(args.get("overlap_grad_reduce")) and "param" in state.by_parameter
    source.findings += _remarks(assembled, is_shifted)
    return weights


@dataclass(frozen=True)
class _State:
    """Tensors of optimizer state, by form."""

    #: Tensors with the parameters' names and shapes, by slot.
    by_parameter: dict[str, list[Stored]] = field(default_factory=dict)
    #: Flat buckets.
    flat: list[Stored] = field(default_factory=list)
    #: Names of all other tensors.
    unread: list[str] = field(default_factory=list)


def _state_of(tensors: list[Stored], shapes: dict[str, list[int]]) -> _State:
    """Collect the tensors that are not parameters, given the parameters' shapes."""
    state = _State()
    for name, shape, pieces in tensors:
        if name in shapes:
            continue
        match = _SLOT.match(name)
        boxes = None
        if match and match[2] in shapes:
            whole = shapes[match[2]]
            boxes = pieces if whole == shape else optim_model_space.boxes(whole, shape, pieces)
        if match and boxes is not None:
            state.by_parameter.setdefault(match[1], []).append((match[2], shapes[match[2]], boxes))
        elif optim_buckets.KEY.match(name):
            state.flat.append((name, shape, pieces))
        else:
            state.unread.append(name)
    return state


def _weights(weights: list[Stored], described: Metadata) -> Weights:
    """Return shape, boxes and dtype of each parameter; these determine the order of flat buckets."""
    dtypes = {entry["name"]: entry["dtype"] for entry in described["tensors"]}
    return {
        name: (shape, [(lo, size) for lo, size, _, _ in pieces], dtypes.get(name) or "")
        for name, shape, pieces in weights
    }


def _no_places(name: str, error: UnknownPlaces) -> Finding:
    return Finding.of(
        codes.MASTERS_NOT_CHECKABLE,
        "the optimizer's flat buffers have no names, and the positions of the parameters in them are "
        f"uncertain: {error}",
        severity="error",
        tensor=name,
        expected=error.expected,
        got=error.got,
        help="load it with Megatron-LM and save it with --dist-ckpt-optim-fully-reshardable, or leave out "
        "--optimizer",
    )


def _remarks(assembled: list[Assembled], is_shifted: bool) -> list[Finding]:
    """Report remarks on the optimizer state that is read.

    source: distrib_optimizer.py (sharded_param_state_fully_reshardable), 0.16 to 0.19
    """
    remarks = []
    if is_shifted:
        remarks.append(
            Finding.of(
                codes.IGNORED,
                "Megatron-LM shifts the optimizer state in this format (fully_reshardable) if one of "
                "several buckets is padded: master weights that differ from the parameters (FS401) show it, "
                "and these files do not hold the correct state",
                severity="note",
            )
        )
    slots = sorted({group.slot for group in assembled if group.slot})
    if slots:
        count = len({(group.slot, name) for group in assembled if group.slot for name, *_ in group.tensors})
        remarks.append(
            Finding.of(
                codes.IGNORED,
                f"{count} tensors of the optimizer state ({', '.join(slots)}) are only read with --optimizer",
            )
        )
    return remarks


def _slot(kind: str) -> str | None:
    return None if kind in MASTERS else kind


def _refused(described: Metadata, args: dict[str, Any], unread: list[str]) -> list[Finding]:
    """Report the reason if the optimizer's state is not read."""
    again = (
        "load it with Megatron-LM and save it with --dist-ckpt-optim-fully-reshardable, or leave out "
        "--optimizer"
    )
    pickled = [name for name in described["objects"] if _PICKLED.match(name)]
    if pickled:
        return [
            Finding.of(
                codes.UNSUPPORTED,
                "the optimizer state is in one pickled object for each model-parallel rank "
                "(dp_zero_gather_scatter), which is not supported",
                tensor=pickled[0],
                severity="error",
                help=again,
            )
        ]
    if unread:
        return [
            Finding.of(
                codes.UNSUPPORTED,
                f"{len(unread)} tensors of the optimizer state are not stored by parameter, and are not read",
                tensor=unread[0],
                severity="error",
                help=again,
            )
        ]
    for name in ("fp8_param_gather", "fp8_param", "fp4_param"):
        if args.get(name) and any(_STATE.match(entry["name"]) for entry in described["tensors"]):
            # Parameters were rounded twice: nothing tells whether masters are theirs.
            return [
                Finding.of(
                    codes.UNSUPPORTED,
                    f"master weights of parameters in FP8 or FP4 ({name}) cannot be compared with them, and "
                    "are not read",
                    severity="error",
                    help="leave out --optimizer",
                )
            ]
    return []


def param_groups(optimizer: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups of all optimizers, without the parameter numbers."""
    if isinstance(optimizer, list):
        optimizer = dict(enumerate(optimizer))
    if not isinstance(optimizer, dict) or depth > _DEPTH:
        return
    groups = optimizer.get("param_groups")
    if isinstance(groups, list):
        for group in groups:
            yield {key: value for key, value in as_dict(group).items() if key != "params"}
        return
    for value in optimizer.values():
        yield from param_groups(value, depth + 1)


def steps(groups: list[dict[str, Any]]) -> list[float]:
    """Return the steps that the groups state."""
    values = [group.get("step") for group in groups]
    return [float(step) for step in values if isinstance(step, (int, float)) and abs(step) < _MOST_STEPS]
