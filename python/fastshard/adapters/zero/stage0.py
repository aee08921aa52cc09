"""Stage 0: whole fp32 tensors in the model file, in the order of the module's parameters."""

from __future__ import annotations

import math
from typing import Any

from ...errors import Finding
from ..base import Assembled, StateFile
from .model import Model, Parts, counts_steps, name_list, scalar, tensor_index, tensors_below


def whole_masters(model: Model) -> list[Any] | None:
    """The groups of masters in the model file, if there are any."""
    optimizer = model.state.get("optimizer")
    groups = optimizer.get("fp32_groups") if isinstance(optimizer, dict) else None
    return groups if isinstance(groups, list) and groups else None


def whole(model: Model, findings: list[Finding]) -> list[Assembled]:
    """Stage 0: the masters have shapes and no names; they are in the order of the module's parameters."""
    groups = [g if isinstance(g, list) else [g] for g in whole_masters(model) or []]
    tensors = model.contents.tensors(model.file)
    buffers = set(name_list(model.state.get("buffer_names")))
    module = model.state.get("module")
    names: list[tuple[str, list[int]]] = []
    owners: dict[tuple[int, int, tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    for name, value in module.items() if isinstance(module, dict) else ():
        index = tensor_index(value)
        if index is None or name in buffers:
            continue
        tensor = tensors[index]
        place = (tensor["storage"], tensor["offset"], tuple(tensor["shape"]))
        if place in owners:
            aliases[name] = owners[place]
        else:
            owners[place] = name
            names.append((name, tensor["shape"]))
    masters = [
        [(t, tensors[t]["shape"]) for value in group if (t := tensor_index(value)) is not None]
        for group in groups
    ]
    found = assign(names, [[shape for _, shape in group] for group in masters])
    if found is None:
        findings.append(
            Finding.of(
                "FS402",
                "the masters of ZeRO stage 0 carry no names, and their shapes fit the parameters in more than one way or in none",
                file=model.path,
                rank=model.label,
                help="--weights params takes the parameters without looking at the masters",
            )
        )
        return []
    optimizer = model.state["optimizer"]
    base = optimizer.get("optimizer_state_dict")
    states = base.get("state") if isinstance(base, dict) else None
    states = states if isinstance(states, dict) else {}
    out: list[Parts] = []
    slots: dict[str, list[Parts]] = {}
    number = 0
    for g, group in enumerate(masters):
        for j, (master, shape) in enumerate(group):
            name, count = found[g][j], math.prod(shape)
            out.append((name, shape, [(count, model.file, master, 0)]))
            entry = states.get(str(number))
            for slot, value in entry.items() if isinstance(entry, dict) else ():
                index = tensor_index(value)
                if index is not None and tensors[index]["shape"] == shape and slot != "step":
                    slots.setdefault(slot, []).append((name, shape, [(count, model.file, index, 0)]))
            number += 1
    owned = {name: (shape, ranges) for name, shape, ranges in out}
    out += [(alias, *owned[owner]) for alias, owner in aliases.items() if owner in owned]
    found_slots = [model.assembled(slot, tensors_, model.file) for slot, tensors_ in slots.items()]
    return [model.assembled(None, out, model.file), *found_slots]


def state_file(model: Model) -> StateFile:
    """Masters, moments and steps in the model file."""
    optimizer = model.state["optimizer"]
    base = optimizer.get("optimizer_state_dict")
    state = base.get("state") if isinstance(base, dict) else None
    return StateFile(
        model.file, tensors_below(optimizer.get("fp32_groups")), tensors_below(state), counts_steps(base)
    )


def steps(model: Model) -> list[float]:
    """Optimizer steps, one per parameter."""
    base = model.state["optimizer"].get("optimizer_state_dict")
    states = base.get("state") if isinstance(base, dict) else None
    tensors = model.contents.tensors(model.file)
    found = []
    for entry in states.values() if isinstance(states, dict) else ():
        value = entry.get("step") if isinstance(entry, dict) else None
        index = tensor_index(value)
        step = value if isinstance(value, (int, float)) else None
        if index is not None:
            step = scalar(model.contents, model.file, index, tensors[index]["dtype"])
        if step is not None:
            found.append(float(step))
    return found


def assign(names: list[tuple[str, list[int]]], groups: list[list[list[int]]]) -> list[list[str]] | None:
    """The one way in which groups of shapes are subsequences of the parameters in order, if it is one.

    What is left over are frozen parameters. Several ways, or none, give None.
    """
    total = sum(map(len, groups))
    if total > len(names):
        return None
    frozen = len(names) - total
    # Ways to be at a position per group, walking the parameters; at most two paths per state matter.
    paths: dict[tuple[int, ...], list[list[int]]] = {tuple([0] * len(groups)): [[]]}
    for i, (_, shape) in enumerate(names):
        following: dict[tuple[int, ...], list[list[int]]] = {}
        for state, ways in paths.items():
            choices = [
                g for g, group in enumerate(groups) if state[g] < len(group) and group[state[g]] == shape
            ]
            if i - sum(state) < frozen:
                choices.append(-1)
            for g in choices:
                moved = state if g < 0 else (*state[:g], state[g] + 1, *state[g + 1 :])
                kept = following.setdefault(moved, [])
                kept.extend([*way, g] for way in ways[: 2 - len(kept)])
        if len(following) > 4096:
            return None
        paths = following
    ways = paths.get(tuple(map(len, groups)), [])
    if len(ways) != 1:
        return None
    assigned: list[list[str]] = [[] for _ in groups]
    for (name, _), g in zip(names, ways[0], strict=True):
        if g >= 0:
            assigned[g].append(name)
    return assigned
