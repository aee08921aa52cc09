"""The ranks' optimizer state: ``optim_world_size_N_rank_R.pt``, and the trainers' files next to it.

torch's optimizers number parameters in model order; frozen parameters are numbered too. FSDP2 stores each
moment as a DTensor with its parameter's shape. FSDP1 stores the moments of the rank's elements of the flat
parameter, concatenated.
source: torch/optim/optimizer.py (state_dict), verl utils/checkpoint/fsdp_checkpoint_manager.py
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from ...common import codes
from ...common.errors import Finding
from ...common.records import replace
from ...layouts.declaration import Assembled, Optimizer, Source
from ..base import Contents, Found, as_dict
from ..box_pieces import Boxes
from ..match_by_order import by_shape
from ..param_groups import listed
from ..zero.flat_state import ints, scalar, scalars_of, tensor_index
from .rank_files import Ranks

_STEP = "step"


def attach(
    source: Source, contents: Contents, model: Ranks, ranks: Ranks, shapes: dict[str, list[int]]
) -> None:
    """Add moments to a declaration.

    Args:
        source: the declaration.
        contents: contents of all files.
        model: the ranks' model files.
        ranks: the ranks' optimizer files.
        shapes: shapes of the model's tensors by name, in their order.
    """
    found = ranks.found
    states = {rank: as_dict(contents(file)) for rank, file in ranks.files.items()}
    state = Optimizer(
        moments_only=True,
        findings=list(ranks.findings),
        unstepped=all(one.get("state") == {} for one in states.values()),
        files={found.files[file].path for file in ranks.files.values()},
    )
    state.steps.update(
        {ranks.files[rank]: _steps(contents, ranks.files[rank], one) for rank, one in states.items()}
    )
    taken = {rank: state.steps[file] for rank, file in ranks.files.items()}
    source.findings += _agree(model, ranks, taken, "optimizer's step")
    parameters = [name for name in shapes if name in model.parameters()]
    aliases = model.aliases()
    parameters = [name for name in parameters if name not in aliases]
    slots = _Slots(ranks, contents)
    named = _named(states, parameters, shapes, slots)
    if named is None:
        if not state.unstepped:
            state.unread.append(_unnamed(found, ranks))
    else:
        source.files.assembled += slots.assembled(named, shapes, holes=not ranks.broken)
        state.unread.extend(slots.unread)
        state.untrained.update(set(shapes) - {named[key] for key in slots.every_key() if key in named})
    first, groups = next(((rank, one.get("param_groups")) for rank, one in states.items()), (0, None))
    if isinstance(groups, list):
        source.files.values["optimizer"] = {"param_groups": groups}
    members = {key: [name] for key, name in (named or {}).items()}
    listed_groups = listed(groups, members, scalars_of(contents, ranks.files[first])) if states else None
    source.optimizer = replace(state, groups=listed_groups)


class _Slots:
    """The state of each parameter, by slot and by the optimizer's key."""

    def __init__(self, ranks: Ranks, contents: Contents) -> None:
        #: DTensors and full tensors.
        self.boxes: dict[str, dict[str, None]] = {}
        self.all: dict[str, Boxes] = {}
        #: Ranges of flat parameters, by rank.
        self.flat: dict[str, dict[str, list[tuple[int, int, int, int]]]] = {}
        self.unread: list[Finding] = []
        for rank, file in sorted(ranks.files.items()):
            record = ranks.distributed[rank]
            listed = contents.tensors(file) if contents.readable(file) else []
            parts = {tuple(part["path"]): part for part in record["parts"]}
            for path, part in parts.items():
                if (place := _place(path)) is not None:
                    boxes = self.all.setdefault(place[1], Boxes())
                    self.boxes.setdefault(place[1], {})[place[0]] = None
                    boxes.state(place[0], part["shape"])
                    for lo, size, number in ranks.boxes_of(rank, part):
                        if 0 not in size or 0 in part["shape"]:
                            boxes.add(place[0], lo, size, file, number)
            for number, tensor in enumerate(listed):
                path = tuple(tensor["path"])
                if path in parts or (place := _place(path)) is None or not tensor["shape"]:
                    continue
                if len(tensor["shape"]) == 1:
                    piece = (prod(tensor["shape"]), file, number, 0)
                    self.flat.setdefault(place[1], {}).setdefault(place[0], []).append(piece)
                else:
                    boxes = self.all.setdefault(place[1], Boxes())
                    self.boxes.setdefault(place[1], {})[place[0]] = None
                    boxes.state(place[0], tensor["shape"])
                    boxes.add(place[0], [0] * len(tensor["shape"]), tensor["shape"], file, number)

    def every_key(self) -> set[str]:
        """Return the optimizer's keys that have state."""
        return {key for slot in self.boxes.values() for key in slot} | {
            key for slot in self.flat.values() for key in slot
        }

    def shape(self, key: str) -> list[int] | None:
        """Return the shape of a key's parameter according to its moments; None if they do not show it."""
        shapes = {tuple(self.all[slot].shape(key)) for slot, keys in self.boxes.items() if key in keys}
        return list(shapes.pop()) if len(shapes) == 1 else None

    def elements(self, key: str) -> int | None:
        """Return the number of elements of a parameter with flat moments."""
        counts = {sum(n for n, *_ in keys[key]) for keys in self.flat.values() if key in keys}
        return counts.pop() if len(counts) == 1 else None

    def assembled(
        self, named: dict[str, str], shapes: dict[str, list[int]], *, holes: bool
    ) -> list[Assembled]:
        """Return the slots under the parameters' names."""
        found = []
        for slot, boxes in self.all.items():
            for one in boxes.assembled(holes=holes):
                tensors = [
                    (named[key], shape, pieces)
                    for key, shape, pieces in one.tensors
                    if key in named and shape == shapes[named[key]]
                ]
                found.append(replace(one, slot=slot, tensors=tensors, frozen=False))
        for slot, keys in self.flat.items():
            flat = [
                (named[key], shapes[named[key]], ranges)
                for key, ranges in keys.items()
                if key in named and sum(n for n, *_ in ranges) == prod(shapes[named[key]])
            ]
            if flat:
                found.append(Assembled(flat[0][2][0][1], {}, None, slot, flat))
        return found


def _place(path: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the key and the slot in the path ``state.KEY.SLOT``."""
    return (path[1], path[2]) if len(path) == 3 and path[0] == "state" else None


def _named(
    states: dict[int, dict[str, Any]], parameters: list[str], shapes: dict[str, list[int]], slots: _Slots
) -> dict[str, str] | None:
    """Return the parameter for each of the optimizer's keys; None if they are unknown or ambiguous."""
    keys = slots.every_key()
    if keys and keys <= set(shapes):
        # FSDP.optim_state_dict gives names.
        return {key: key for key in keys}
    groups = next((one.get("param_groups") for one in states.values()), None)
    numbers = [ints(as_dict(group).get("params")) for group in groups] if isinstance(groups, list) else []
    if not numbers or any(group is None for group in numbers):
        return None
    ordered = [[str(n) for n in group or []] for group in numbers]
    every = [key for group in ordered for key in group]
    if len(ordered) == 1 and len(every) == len(parameters):
        named = [parameters]
    else:
        shaped = [[slots.shape(key) for key in group] for group in ordered]
        assigned = by_shape([(name, shapes[name]) for name in parameters], shaped)
        if assigned is None:
            return None
        named = assigned
    found = {
        key: name
        for keys_, names in zip(ordered, named, strict=True)
        for key, name in zip(keys_, names, strict=True)
    }
    fits = all(
        (shape := slots.shape(key)) in (None, shapes[name])
        and (shape is not None or (n := slots.elements(key)) is None or n == prod(shapes[name]))
        for key, name in found.items()
    )
    return found if fits else None


def _unnamed(found: Found[object], ranks: Ranks) -> Finding:
    file = next(iter(ranks.files.values()))
    return Finding.of(
        codes.MASTERS_NOT_CHECKABLE,
        "the optimizer state numbers its parameters, and their order and shapes do not match the model in "
        "exactly one way",
        severity="error",
        file=found.files[file].path,
        help="leave out --optimizer; a state saved by torch.distributed.checkpoint has names",
    )


def _steps(contents: Contents, file: int, state: dict[str, Any]) -> list[float]:
    """Return the optimizer's steps, one per parameter."""
    steps = []
    tensors = contents.tensors(file) if contents.readable(file) else []
    for entry in as_dict(state.get("state")).values():
        value = as_dict(entry).get(_STEP)
        index = tensor_index(value)
        if index is not None and not tensors[index]["shape"]:
            value = scalar(contents, file, index, tensors[index]["dtype"])
        if isinstance(value, (int, float)):
            steps.append(float(value))
    return steps


def _agree(model: Ranks, ranks: Ranks, steps_by_rank: dict[int, list[float]], what: str) -> list[Finding]:
    """Check that all ranks are from one step, using the files next to the model files, which do not state a
    step.
    """
    seen = {rank: tuple(sorted(set(steps))) for rank, steps in steps_by_rank.items() if steps}
    usual = Counter(seen.values()).most_common(1)[0][0] if seen else ()
    return [
        Finding.of(
            codes.MIXED_STEPS,
            f"the {what} in this file differs from that of the other ranks: the file may be from another "
            "step",
            file=model.path(rank),
            rank=ranks.label(rank),
            expected=f"{', '.join(f'{s:g}' for s in usual)}, as on the other ranks",
            got=f"{', '.join(f'{s:g}' for s in steps)} in {ranks.path(rank)}",
            help="copy all files of all ranks from one step",
        )
        for rank, steps in sorted(seen.items())
        if steps != usual and rank in model.files
    ]


def trainer(source: Source, contents: Contents, model: Ranks, ranks: Ranks) -> None:
    """Declare the scheduler's position from ``extra_state_*``, and check that all ranks agree on it."""
    steps_by_rank: dict[int, list[float]] = {}
    for rank, file in ranks.files.items():
        scheduler = as_dict(as_dict(contents(file)).get("lr_scheduler"))
        epoch = scheduler.get("last_epoch")
        if isinstance(epoch, int):
            steps_by_rank[rank] = [float(epoch)]
    source.findings += _agree(model, ranks, steps_by_rank, "scheduler's step")
    if steps_by_rank:
        source.files.values["lr_scheduler"] = {"last_epoch": int(next(iter(steps_by_rank.values()))[0])}
