"""Stage 0: the optimizer's state is in the model file, without names.

FP16_UnfusedOptimizer has a full master weight for each parameter, and FP16_Optimizer (for FusedAdam) has one
flat master weight per group. An optimizer without a wrapper (fp32 training) has no master weights, because it
updates the parameters themselves.
source: DeepSpeed runtime/fp16/{unfused,fused}_optimizer.py (state_dict), runtime/engine.py
    (_common_checkpoint_state)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ... import _core
from ...common import codes
from ...common.errors import Finding
from ...common.records import dataclass, field
from ...layouts.declaration import Assembled, Group, StateFile
from ..match_by_order import by_shape, by_size
from ..param_groups import listed
from .experts import is_expert
from .flat_state import (
    Model,
    Parameter,
    Parts,
    ints,
    scalar,
    scalars_of,
    state_below,
    tensor_index,
    tensors_below,
)


@dataclass
class Vector:
    """A tensor that the optimizer updates: a full parameter, or a group of concatenated parameters."""

    #: Key of its state.
    key: str
    shape: list[int] | None
    #: Index in the model file; None if the parameter itself is updated.
    master: int | None
    #: name, shape, first element
    members: list[tuple[str, list[int], int]] = field(default_factory=list)

    @property
    def whole(self) -> list[int] | None:
        """The shape of the moments."""
        return self.members[0][1] if self.master is None and self.members else self.shape


@dataclass
class StoredOptimizer:
    """An optimizer's state in a model file."""

    model: Model
    #: The state in the form of torch's optimizers: ``state`` and ``param_groups``.
    base: dict[str, Any]
    #: ``fp32_groups``, ``fp32_groups_flat``, or None for an optimizer without master weights.
    key: str | None
    groups: list[list[Vector]]
    #: Parameters in other files, without aliases: those of an MoE model.
    apart: list[Parameter] | None = None
    assembled: list[Assembled] = field(default_factory=list)
    #: True if the parameters of each tensor are known.
    named: bool = False

    @property
    def states(self) -> dict[str, Any]:
        """State by parameter number."""
        states = self.base.get("state")
        return states if isinstance(states, dict) else {}

    def vectors(self) -> list[Vector]:
        """Return the tensors of all groups."""
        return [vector for group in self.groups for vector in group]

    def members(self) -> list[tuple[str, list[int], int]]:
        """Return the parameters in the tensors of all groups."""
        return [member for vector in self.vectors() for member in vector.members]

    def unnamed(self) -> Finding:
        """Report that the names of the parameters are unknown."""
        help = "pass --weights params, which uses the parameters and ignores the master weights"
        return self._finding(
            f"the {'masters' if self.key else 'moments'} of ZeRO stage 0 carry no names, and their shapes "
            "fit the parameters in more than one way or in none",
            severity=None if self.key else "error",
            help=help if self.key else "leave out --optimizer",
        )

    def unread(self) -> list[Finding]:
        """Report state that is not read: state of unknown parameters, or with another layout than its
        parameter.
        """
        if not self.named:
            return [] if self.key or not self.states else [self.unnamed()]
        tensors = self.model.contents.tensors(self.model.file)
        for vector in self.vectors():
            for slot, index in self.slots(vector):
                shape = tensors[index]["shape"]
                if shape and shape != vector.whole:
                    message = (
                        f"the optimizer's {slot} does not have its parameter's layout (factored or "
                        "quantised), which is not supported"
                    )
                    name = vector.members[0][0] if vector.members else None
                    return [
                        self._finding(
                            message, severity="error", tensor=name, expected=str(vector.whole), got=str(shape)
                        )
                    ]
        return []

    def _finding(self, message: str, **parts: Any) -> Finding:
        return Finding.of(
            codes.MASTERS_NOT_CHECKABLE, message, file=self.model.path, rank=self.model.label, **parts
        )

    def slots(self, vector: Vector) -> list[tuple[str, int]]:
        """Return the state tensors of a vector, except its step."""
        entry = self.states.get(vector.key)
        kept = (
            [(k, tensor_index(v)) for k, v in entry.items() if k != "step"] if isinstance(entry, dict) else []
        )
        return [(slot, index) for slot, index in kept if index is not None]

    def listed(self) -> list[Group] | None:
        """Return the optimizer's groups."""
        members = {
            vector.key: [self.model.name_of(n) for n, *_ in vector.members] for vector in self.vectors()
        }
        read = scalars_of(self.model.contents, self.model.file)
        return listed(self.base.get("param_groups"), members, read) if self.named else None

    def state_file(self) -> StateFile:
        """Return master weights, moments and steps in the model file."""
        masters = tensors_below(self.model.state["optimizer"].get(self.key))
        tensors, numbers = state_below(self.base, ["optimizer", "optimizer_state_dict"])
        return StateFile(self.model.file, masters, tensors, numbers)

    def steps(self) -> list[float]:
        """Return optimizer steps, one per parameter or group."""
        tensors = self.model.contents.tensors(self.model.file)
        found = []
        for entry in self.states.values():
            value = entry.get("step") if isinstance(entry, dict) else None
            index = tensor_index(value)
            step = value if isinstance(value, (int, float)) else None
            if index is not None:
                step = scalar(self.model.contents, self.model.file, index, tensors[index]["dtype"])
            if step is not None:
                found.append(float(step))
        return found


def read(model: Model, apart: list[Parameter] | None = None) -> StoredOptimizer | None:
    """Read the optimizer in the model file, under the parameters' names; None if there is none.

    Args:
        model: the model-parallel rank.
        apart: the parameters of the rank, if they are in other files.
    """
    optimizer = _read_optimizer(model)
    if optimizer is not None:
        optimizer.apart = apart
        parameters, aliases = model.stored() if apart is None else (apart, {})
        # Nothing says which layers are those of a stage.
        optimizer.named = model.stages == 1 and _name(optimizer, parameters)
        if optimizer.named:
            optimizer.assembled = _assembled(optimizer, aliases)
    return optimizer


def of_experts(model: Model) -> int:
    """Count the parameter elements in an optimizer's expert groups; 0 if it does not state them."""
    optimizer = _read_optimizer(model)
    if optimizer is None:
        return 0
    optimizer.apart = []
    groups = [group for group, kind in zip(optimizer.groups, _of_experts(optimizer), strict=True) if kind]
    shapes = [vector.shape for group in groups for vector in group]
    return 0 if None in shapes else sum(math.prod(shape) for shape in shapes if shape is not None)


def partitioned(model: Model) -> bool:
    """Return True if the model file contains a partition: that of BF16_Optimizer's first rank, in a stage-0
    pipeline.
    """
    optimizer = model.state.get("optimizer")
    return isinstance(optimizer, dict) and "single_partition_of_fp32_groups" in optimizer


def _read_optimizer(model: Model) -> StoredOptimizer | None:
    stored = model.state.get("optimizer")
    if not isinstance(stored, dict):
        return None
    tensors = model.contents.tensors(model.file)
    for key in ("fp32_groups", "fp32_groups_flat"):
        groups = stored.get(key)
        if not isinstance(groups, list) or not groups:
            continue
        base = stored.get("optimizer_state_dict")
        found: list[list[Vector]] = []
        number = 0
        for group in groups:
            found.append([])
            for value in group if isinstance(group, list) else [group]:
                if (index := tensor_index(value)) is not None:
                    found[-1].append(Vector(str(number), tensors[index]["shape"], index))
                    number += 1
        return StoredOptimizer(model, base if isinstance(base, dict) else {}, key, found)
    states, groups = stored.get("state"), stored.get("param_groups")
    if not isinstance(states, dict) or not isinstance(groups, list):
        return None
    numbers = [ints(group.get("params")) if isinstance(group, dict) else None for group in groups]
    vectors = [[Vector(str(n), _stepped(states, n, tensors), None) for n in group or []] for group in numbers]
    return StoredOptimizer(model, stored, None, vectors)


def _stepped(states: dict[str, Any], number: int, tensors: Sequence[_core.StoredTensor]) -> list[int] | None:
    """Return the shape of a parameter, from its state.

    None if the state does not show it (no gradient yet, or factored moments).
    """
    entry = states.get(str(number))
    indices = [tensor_index(v) for k, v in entry.items() if k != "step"] if isinstance(entry, dict) else []
    shapes = [tensors[i]["shape"] for i in indices if i is not None]
    # Scalars besides the step belong to no element, but where the parameter is one.
    shapes = [shape for shape in shapes if shape] or shapes
    return shapes[0] if shapes and all(shape == shapes[0] for shape in shapes) else None


def _name(optimizer: StoredOptimizer, parameters: list[Parameter]) -> bool:
    """Assign parameters to the optimizer's tensors; return False if the assignment cannot be determined."""
    if optimizer.key == "fp32_groups_flat":
        return _name_flat(optimizer, parameters)
    found = _apart(
        optimizer,
        parameters,
        lambda g: [vector.shape for vector in optimizer.groups[g]],
        lambda shape: shape,
        by_shape,
    )
    if found is None:
        return False
    shapes = {name: shape for name, shape, _ in parameters}
    for group, names in zip(optimizer.groups, found, strict=True):
        for vector, name in zip(group, names, strict=True):
            vector.members = [(name, shapes[name], 0)]
    return True


def _apart(
    optimizer: StoredOptimizer,
    parameters: list[Parameter],
    sized: Callable[[int], Any],
    decides: Callable[[list[int]], Any],
    assign: Callable[[list[tuple[str, Any]], list[Any]], list[list[str]] | None],
) -> list[list[str]] | None:
    """Return the names of each group's parameters, with separate groups for experts; None if they are
    unknown.
    """
    of_experts = _of_experts(optimizer)
    found: list[list[str]] = [[] for _ in optimizer.groups]
    for kind in sorted(set(of_experts)):
        places = [g for g, is_kind in enumerate(of_experts) if is_kind is kind]
        named = [(n, decides(s)) for n, s, _ in parameters if True not in of_experts or is_expert(n) is kind]
        assigned = assign(named, [sized(g) for g in places])
        if assigned is None:
            return None
        for g, names in zip(places, assigned, strict=True):
            found[g] = names
    return found


def _of_experts(optimizer: StoredOptimizer) -> list[bool]:
    """Return one flag per group, True for experts, which DeepSpeed puts in separate groups.

    source: deepspeed/moe/utils.py
    """
    groups = optimizer.base.get("param_groups")
    flags = [isinstance(g, dict) and g.get("moe") is True for g in groups] if isinstance(groups, list) else []
    if optimizer.apart is None or len(flags) != len(optimizer.groups):
        return [False] * len(optimizer.groups)
    return flags


def _name_flat(optimizer: StoredOptimizer, parameters: list[Parameter]) -> bool:
    """Assign parameters to flat master weights, by the vectors of which tensors are views, or by sizes."""
    vectors = optimizer.vectors()
    lengths = [math.prod(vector.shape or []) for vector in vectors]
    shapes = {name: shape for name, shape, _ in parameters}
    # What has no elements is in no place that tells whether it is frozen.
    filled = [p for p in parameters if math.prod(p[1])]
    # Layer files hold copies.
    elsewhere = optimizer.model.layers or optimizer.apart is not None
    found = None if elsewhere else _by_views(optimizer.model, filled, lengths)
    if found is None:
        found = _apart(optimizer, filled, lambda g: lengths[g], math.prod, by_size)
    if found is None:
        return False
    for vector, names in zip(vectors, found, strict=True):
        at = 0
        for name in names:
            vector.members.append((name, shapes[name], at))
            at += math.prod(shapes[name])
    return True


def _by_views(model: Model, parameters: list[Parameter], lengths: list[int]) -> list[list[str]] | None:
    """Return names by place: FP16_Optimizer turns a group's parameters into ordered views of one flat vector.

    A group with one parameter looks like any other tensor with a separate storage. Its size identifies it
    among the tensors that are not views.
    """
    views = _views(model, parameters)
    # Two vectors of one length, or a frozen parameter of that size, do not tell which is which.
    sure = {n for n in lengths if lengths.count(n) == 1 and len(views.get(n, ())) == 1}
    names_by_length = {n: views[n][0] for n in sure if len(views[n][0]) > 1}
    if not names_by_length:
        return None
    rest = [n for n in lengths if n not in names_by_length]
    taken = {name for names in names_by_length.values() for name in names}
    alone = by_size([(n, math.prod(s)) for n, s, _ in parameters if n not in taken], rest) if rest else []
    if alone is None:
        return None
    left = iter(alone)
    return [names_by_length[n] if n in names_by_length else next(left) for n in lengths]


def _views(model: Model, parameters: list[Parameter]) -> dict[int, list[list[str]]]:
    """Group tensors that fill one storage, alone or jointly, by the storage's number of elements.

    The tensors are in the order of the storage.
    """
    tensors = model.contents.tensors(model.file)
    storages: dict[int, list[tuple[int, int, int, str]]] = {}
    for name, shape, index in parameters:
        tensor = tensors[index]
        count = math.prod(shape)
        storages.setdefault(tensor["storage"], []).append(
            (tensor["offset"], count, tensor["storage_bytes"], name)
        )
    tiled: dict[int, list[list[str]]] = {}
    for places in storages.values():
        places.sort()
        total = sum(count for _, count, _, _ in places)
        item = places[0][2] // total
        starts = [item * sum(count for _, count, _, _ in places[:i]) for i in range(len(places))]
        if [at for at, *_ in places] == starts and item * total == places[0][2]:
            tiled.setdefault(total, []).append([name for *_, name in places])
    return tiled


def _assembled(optimizer: StoredOptimizer, aliases: dict[str, str]) -> list[Assembled]:
    """Return master weights under all names of a parameter, and moments under its owner's name."""
    model = optimizer.model
    tensors = model.contents.tensors(model.file)
    masters: list[Parts] = []
    slots: dict[str, list[Parts]] = {}
    for vector in optimizer.vectors():
        kept = [(s, i) for s, i in optimizer.slots(vector) if tensors[i]["shape"] == vector.whole]
        for name, shape, at in vector.members:
            count = math.prod(shape)
            if vector.master is not None:
                masters.append((name, shape, [(count, model.file, vector.master, at)]))
            for slot, index in kept:
                slots.setdefault(slot, []).append((name, shape, [(count, model.file, index, at)]))
    owned = {name: (shape, ranges) for name, shape, ranges in masters}
    masters += [(alias, *owned[owner]) for alias, owner in aliases.items() if owner in owned]
    found = [model.assembled(None, masters, model.file)] if masters else []
    return found + [model.assembled(slot, parts, model.file) for slot, parts in slots.items()]
