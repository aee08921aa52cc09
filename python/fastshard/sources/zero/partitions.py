"""The optimizer files of one model-parallel rank, and their flat vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ... import _core
from ...common import codes
from ...common.errors import Finding
from ...layouts.declaration import Assembled, Group, StateFile
from ..base import lacking, unexpected, view_of
from ..param_groups import numbered
from .flat_state import Flat, Model, Named, Rank, scalar, scalars_of, state_below, state_of, tensor_index


class Partitions:
    """The partitions of one model-parallel rank, compared with each other and combined."""

    def __init__(self, model: Model, files: list[tuple[int, int]], stage3: bool) -> None:
        self.model = model
        self.stage3 = stage3
        self.findings: list[Finding] = []
        self.assembled: list[Assembled] = []
        self.steps: dict[int, list[float]] = {}
        self.ranks: dict[int, Rank] = {}
        #: Flat vectors (file, tensor) that contain parameters.
        self.filled: set[tuple[int, int]] = set()
        #: True if each rank's optimizer has a state that is empty.
        self.unstepped = True
        self.bf16 = model.found.files[files[0][1]].name.startswith("bf16_")
        readable = True
        for dp, file in files:
            path = model.found.files[file].path
            state = state_of(model.contents, file)
            if state is None:
                # An unreadable file is a finding already.
                readable = False
                if model.contents.readable(file):
                    self.problem(
                        codes.PARTITION,
                        "the file holds no optimizer state",
                        path,
                        dp,
                        "optimizer_state_dict",
                        "none",
                    )
            elif dp in self.ranks:
                self._same_copy(self.ranks[dp], file, path)
            else:
                self.ranks[dp] = Rank(dp, file, path, state)
        world = self._world()
        absent = lacking((dp for dp, _ in files), 0, world - 1)
        self.findings += [model.missing(dp, world, self.bf16, last) for dp, last in absent]
        for dp in [dp for dp in self.ranks if dp >= world]:
            left = self.ranks.pop(dp)
            why = f"data-parallel rank {dp} is beyond the {world} of this checkpoint"
            self.findings.append(unexpected(left.path, why))
        self.order = [self.ranks[dp] for dp in sorted(self.ranks)]
        #: True if all ranks exist and are readable.
        self.whole = bool(self.order) and readable and not absent and all(map(self._read, self.order))
        self.values = self._values() if self.whole else {}
        if self.whole:
            self._same_slots()

    def shapes(self) -> list[dict[str, list[int]]] | None:
        """Return names and shapes by group as the ranks state them; None if a shape is unknown.

        This is for a model file that does not state them (BF16_Optimizer in a pipeline of stage 0).
        """
        stored = {name: shape for name, shape, _ in self.model.stored()[0]}
        groups: list[dict[str, list[int]]] = []
        for rank in self.order:
            # ZeRO's own optimizers may reorder parameters after they took account of them
            # (_before_round_robin).
            mappings = rank.state.get("param_slice_mappings") if "zero_stage" not in rank.state else None
            for g, mapping in enumerate(mappings if isinstance(mappings, list) else []):
                groups += [{}] if g == len(groups) else []
                for name in mapping if isinstance(mapping, dict) else ():
                    shape = stored.get(self.model.name_of(name))
                    if shape is None:
                        return None
                    groups[g].setdefault(name, shape)
        return groups if groups and all(groups) else None

    def _same_slots(self) -> None:
        """Check that all ranks with a part of a group have the same slots for it (``exp_avg``)."""
        groups = min(len(rank.masters) for rank in self.order)
        for g in range(groups):
            holders = [rank for rank in self.order if rank.masters[g].numel]
            kept = [{slot for slot, parts in rank.slots.items() if parts[g] is not None} for rank in holders]
            every = set().union(*kept)
            for rank, slots in zip(holders, kept, strict=True):
                for slot in sorted(every - slots):
                    self.problem(
                        codes.PARTITION,
                        f"optimizer state of param group {g}",
                        rank.path,
                        rank.dp,
                        f"{slot}, as on other ranks",
                        "none, or fewer elements than master weights",
                    )

    def _values(self) -> dict[str, Any]:
        """Return the non-tensor values in the optimizer's state."""
        state = self.order[0].state
        base = state.get("base_optimizer_state") or state.get("optimizer_state_dict")
        scaler = state.get("loss_scaler")
        scale = (scaler.get("state") or {}).get("cur_scale") if isinstance(scaler, dict) else None
        values = {
            "param_groups": base.get("param_groups") if isinstance(base, dict) else None,
            "loss_scale": scale,
            "ds_version": state.get("ds_version"),
        }
        return {key: value for key, value in values.items() if value is not None}

    def problem(
        self,
        code: str,
        message: str,
        path: str,
        dp: int | None,
        expected: str,
        got: str,
        help: str | None = None,
    ) -> None:
        """Add a finding about a rank's file, or about all files if ``dp`` is None."""
        rank = self.model.label if dp is None else f"dp {dp}, {self.model.label}"
        self.findings.append(
            Finding.of(
                code,
                message,
                file=path,
                rank=rank,
                expected=expected,
                got=got,
                help=help or "copy the file of this step again from the node that wrote it",
            )
        )

    def _world(self) -> int:
        """Return the number of partitions: the one in the model file, or the most frequent one in the
        partitions.
        """
        counts: list[int] = []
        for rank in self.ranks.values():
            value = _partitions(rank)
            if value is not None and 0 < value <= 1 << 20:
                counts.append(value)
        world_size = self.model.state.get("dp_world_size")
        world = world_size if isinstance(world_size, int) and 0 < world_size <= 1 << 20 else None
        if world is None or (counts and world not in counts):
            world = (
                max(set(counts), key=counts.count) if counts else (world or max(self.ranks, default=0) + 1)
            )
        for rank in self.ranks.values():
            value = _partitions(rank)
            if value is not None and value != world and rank.dp < world:
                self.problem(
                    codes.RANKS_DISAGREE,
                    "partition_count",
                    rank.path,
                    rank.dp,
                    f"{world}, as the other files state",
                    str(value),
                )
        return world

    def _same_copy(self, first: Rank, file: int, path: str) -> None:
        """Check that files of the same rank in two root directories are copies, using their checksums."""

        def sums(index: int) -> list[Any]:
            return [(t["path"], view_of(t)) for t in self.model.contents.tensors(index)]

        if sums(first.file) != sums(file):
            self.problem(
                codes.REPLICAS_DIFFER,
                "two different files of one rank",
                path,
                first.dp,
                f"the checksums of {first.path}",
                "others",
                "pass only directories that hold one step of one run",
            )

    def _read(self, rank: Rank) -> bool:
        """Find the flat vectors of a rank; return False, with a finding, if they are misplaced."""
        tensors = self.model.contents.tensors(rank.file)
        key = "fp32_flat_groups" if self.stage3 else "single_partition_of_fp32_groups"
        groups = rank.state.get(key)
        flat = [self._flat(rank.file, tensors, value) for value in groups] if isinstance(groups, list) else []
        if not flat or any(f is None for f in flat):
            what = "ZeRO-3" if self.stage3 else "ZeRO-1, ZeRO-2 or BF16_Optimizer"
            self.problem(
                codes.MASTERS_NOT_CHECKABLE,
                f"the file is not an optimizer state of {what} as DeepSpeed writes it since 0.4",
                rank.path,
                rank.dp,
                key,
                ", ".join(sorted(map(str, rank.state))[:8]),
                "pass --weights params, which uses the parameters and does not read the master weights",
            )
            return False
        rank.masters = [f for f in flat if f is not None]
        base = rank.state.get("optimizer_state_dict" if self.stage3 else "base_optimizer_state")
        if isinstance(base, list) and len(base) == len(flat):
            # Elastic checkpoints list the groups' states, without padding. source: stage_1_and_2.py
            # (_get_base_optimizer_state)
            base = {"state": {str(g): state for g, state in enumerate(base)}}
        base = base if isinstance(base, dict) else {}
        states = base.get("state")
        self.unstepped = self.unstepped and states == {}
        states = states if isinstance(states, dict) else {}
        keys = self._state_keys(base, states, len(flat))
        for g, master in enumerate(rank.masters):
            entry = states.get(keys[g]) if keys[g] is not None else None
            for name, value in entry.items() if isinstance(entry, dict) else ():
                part = self._flat(rank.file, tensors, value)
                if name != "step":
                    # Scalars besides the step belong to no element.
                    if part is not None and part.numel >= master.numel and tensors[part.tensor]["shape"]:
                        rank.slots.setdefault(name, [None] * len(flat))[g] = part
                else:
                    number = float(value) if isinstance(value, (int, float)) else None
                    rank.steps.append((part, number))
        self._steps_of(rank, tensors)
        return True

    @staticmethod
    def _state_keys(base: dict[str, Any], states: dict[str, Any], count: int) -> list[str | None]:
        """Return the key of each flat vector's state; torch numbers parameters across all groups."""
        numbered = sorted((k for k in states if str(k).isdigit()), key=lambda k: int(k))
        groups = base.get("param_groups")
        named = (
            [p for g in groups for p in (g.get("params") or []) if isinstance(g, dict)]
            if isinstance(groups, list)
            else []
        )
        if len(named) == count and all(str(p) in states for p in named):
            return [str(p) for p in named]
        return [numbered[g] if g < len(numbered) else None for g in range(count)]

    @staticmethod
    def _flat(file: int, tensors: Sequence[_core.StoredTensor], value: Any) -> Flat | None:
        index = tensor_index(value)
        if index is None or index >= len(tensors):
            return None
        return Flat(file, index, math.prod(tensors[index]["shape"]))

    def _steps_of(self, rank: Rank, tensors: Sequence[_core.StoredTensor]) -> None:
        steps = []
        for flat, number in rank.steps:
            if flat is not None and flat.numel == 1:
                number = scalar(self.model.contents, rank.file, flat.tensor, tensors[flat.tensor]["dtype"])
            if number is not None:
                steps.append(number)
        if steps:
            self.steps[rank.file] = steps

    def state_files(self) -> list[StateFile]:
        """Return master weights, moments and steps of each rank."""
        files = []
        for rank in self.order:
            key = "optimizer_state_dict" if self.stage3 else "base_optimizer_state"
            tensors, numbers = state_below(rank.state.get(key), ["optimizer_state_dict", key])
            masters = [flat.tensor for flat in rank.masters if (rank.file, flat.tensor) in self.filled]
            # A partition of a small group may be padding from end to end.
            padding = [flat.tensor for flat in rank.masters if (rank.file, flat.tensor) not in self.filled]
            files.append(StateFile(rank.file, masters, [*tensors, *padding], numbers))
        return files

    def groups(self, named: Named) -> list[Group] | None:
        """Return the optimizer's groups: each lists flat vectors, in which parameters are ranges."""
        places = {(rank.file, flat.tensor): g for rank in self.order for g, flat in enumerate(rank.masters)}
        members: list[dict[str, None]] = [{} for _ in self.order[0].masters]
        for name, _, ranges in named[0]:
            for count, file, tensor, _ in ranges:
                if count:
                    members[places[file, tensor]][self.model.name_of(name)] = None
        read = scalars_of(self.model.contents, self.order[0].file)
        return numbered(self.values.get("param_groups"), members, read)

    def keep(self, named: Named) -> None:
        """Record the master weights and slots that the stage assembled, including aliases."""
        masters, slots = named
        model, file = self.model, self.order[0].file
        owned = {name: (shape, ranges) for name, shape, ranges in masters}
        self.filled = {(f, tensor) for *_, ranges in masters for count, f, tensor, _ in ranges if count}
        aliases = model.aliases().items()
        masters = masters + [
            (alias, *owned[owner]) for alias, owner in aliases if owner in owned and alias not in owned
        ]
        self.assembled.append(model.assembled(None, masters, file))
        renamed = [part for part in masters if model.name_of(part[0]) != part[0]]
        if model.own_names and renamed:
            # Without a layout a tensor keeps each of its names; the parameters have none but the file's.
            extra = Assembled(file, model.coords, model.label, None, renamed, masters_only=True)
            self.assembled.append(extra)
        for slot, tensors in slots.items():
            self.assembled.append(model.assembled(slot, tensors, file))


def _partitions(rank: Rank) -> int | None:
    """Return the number of partitions that a rank states.

    It is the largest number among its groups, because groups of experts have fewer partitions.
    """
    value = rank.state.get("partition_count")
    return max(
        (n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)), default=None
    )
