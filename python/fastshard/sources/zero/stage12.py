"""Stages 1 and 2, and BF16_Optimizer: a group's concatenated parameters, divided into partitions.

Groups are padded at the end to a multiple of 2 x world_size elements. DeepSpeed 0.19.8 may also pad after
each parameter (``param_alignment_paddings``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...common import codes
from .flat_state import Flat, Named, Parts, Range, Rank, cut, ints
from .partitions import Partitions


def divide(partitions: Partitions, shapes: list[dict[str, list[int]]]) -> Named | None:
    """Locate each parameter in the ranks' partitions; None, with findings, if they do not match."""
    order = partitions.order
    for rank in order:
        if len(rank.masters) != len(shapes):
            partitions.problem(
                codes.PARTITION,
                "number of param groups",
                rank.path,
                rank.dp,
                f"{len(shapes)}, as {partitions.model.path} says",
                str(len(rank.masters)),
            )
            return None
    masters: list[Parts] = []
    slots: dict[str, list[Parts]] = {}
    for g, group in enumerate(shapes):
        for order, names in _vectors(partitions, g, group):
            offsets, needed = _offsets(order[0], partitions, g, group)
            lengths = [rank.masters[g].numel for rank in order]
            if not (
                _mappings(partitions, order, g, group, offsets, lengths)
                and _tiles(partitions, order, g, lengths, needed)
            ):
                continue
            starts = [sum(lengths[:r]) for r in range(len(order))]
            for name, shape in group.items():
                pieces = list(cut(offsets[name], math.prod(shape), starts, lengths))
                called, whole = names.get(name, name), [rank.masters[g] for rank in order]
                masters.append((called, shape, _ranges(order, pieces, whole)))
                for slot in order[0].slots:
                    vectors = [rank.slots[slot][g] if slot in rank.slots else None for rank in order]
                    if all(vectors[r] is not None for _, r, _ in pieces):
                        parts = _ranges(order, pieces, vectors)
                        slots.setdefault(slot, []).append((called, shape, parts))
    if any(f.severity == "error" for f in partitions.findings):
        return None
    return masters, slots


def _vectors(
    partitions: Partitions, g: int, group: dict[str, list[int]]
) -> list[tuple[list[Rank], dict[str, str]]]:
    """Return the ranks that divide a flat vector of the group, and the model's names for its experts.

    For a group of experts, there is one entry per expert-parallel rank.
    """
    order, experts = partitions.order, partitions.model.experts
    if experts is None or not experts.has(group):
        return [(order, {})]
    if not experts.whole:
        return []
    counts = [ints(rank.state.get("partition_count")) or [] for rank in order]
    degrees = {count[g] if g < len(count) else len(order) for count in counts}
    divided = experts.divided(order, degrees.pop()) if len(degrees) == 1 else None
    if divided is None:
        partitions.problem(
            codes.PARTITION,
            f"partition_count of group {g}, which holds experts",
            order[0].path,
            None,
            f"one divisor of {len(order)}, the data-parallel ranks",
            "others",
        )
        return []
    found: list[tuple[list[Rank], dict[str, str]]] = []
    for rank, among in enumerate(divided):
        names = {name: experts.name_of(name, rank, len(divided)) for name in group}
        wrong = next((name for name, called in names.items() if called is None), None)
        if wrong is not None:
            partitions.problem(
                codes.PARTITION,
                f"the model file and the experts' own files disagree on the experts of group {g}: {wrong}",
                among[0].path,
                among[0].dp,
                f"a number of experts that {len(divided)} expert-parallel ranks share equally",
                "others",
            )
            return []
        found.append((among, {name: called for name, called in names.items() if called is not None}))
    return found


def _ranges(
    order: list[Rank], pieces: list[tuple[int, int, int]], vectors: Sequence[Flat | None]
) -> list[Range]:
    return [
        (count, order[r].file, vector.tensor, first)
        for count, r, first in pieces
        if (vector := vectors[r]) is not None
    ]


def _offsets(
    first: Rank, partitions: Partitions, g: int, group: dict[str, list[int]]
) -> tuple[dict[str, int], int]:
    """Return the start of each parameter in the group's flat vector, and the end of the last one."""
    paddings = first.state.get("param_alignment_paddings")
    pads = ints(paddings[g]) if isinstance(paddings, list) and g < len(paddings) else None
    if pads is not None and len(pads) != len(group):
        partitions.problem(
            codes.PARTITION,
            "param_alignment_paddings",
            first.path,
            first.dp,
            f"{len(group)}, the group's number of parameters",
            str(len(pads)),
        )
    offsets, at, end = {}, 0, 0
    for i, (name, shape) in enumerate(group.items()):
        offsets[name] = at
        end = at + math.prod(shape)
        at = end + (pads[i] if pads is not None and i < len(pads) else 0)
    return offsets, end


def _tiles(partitions: Partitions, order: list[Rank], g: int, lengths: list[int], needed: int) -> bool:
    """Check that partitions have equal lengths, except for tail padding, and match the parameters."""
    largest = max(lengths)
    # Tail padding is cut off at the last ranks; those before them are full.
    full = max(r for r, length in enumerate(lengths) if length == largest)
    for rank, length in zip(order[:full], lengths, strict=False):
        if length != largest:
            partitions.problem(
                codes.PARTITION,
                f"elements of group {g} on this rank",
                rank.path,
                rank.dp,
                str(largest),
                str(length),
            )
            return False
    total = sum(lengths)
    groups = [ints(rank.state.get("group_paddings")) or [] for rank in order]
    padding = max((p[g] for p in groups if g < len(p)), default=0)
    # DeepSpeed pads groups to 2 x world_size elements.
    most = needed + max(2 * len(order), padding)
    if not needed <= total <= most:
        partitions.problem(
            codes.PARTITION,
            f"elements of group {g} over all ranks",
            order[-1].path,
            None,
            f"{needed} to {most}, the parameters of {partitions.model.path} and padding",
            str(total),
            "copy the optimizer files of all ranks again; they are from another model or step, or one is a "
            "copy of another",
        )
    return needed <= total <= most


def _mappings(
    partitions: Partitions,
    order: list[Rank],
    g: int,
    group: dict[str, list[int]],
    offsets: dict[str, int],
    lengths: list[int],
) -> bool:
    """Check that each rank's own mapping of its partition agrees with the partition's place."""
    largest, before = max(lengths), len(partitions.findings)

    def by(offsets: dict[str, int]) -> list[dict[str, tuple[int, int]]]:
        expected = []
        for r in range(len(order)):
            lo, hi = r * largest, r * largest + lengths[r]
            ranges = {}
            for name, shape in group.items():
                a, b = max(offsets[name], lo), min(offsets[name] + math.prod(shape), hi)
                if a < b:
                    ranges[name] = (a - lo, b - a)
            expected.append(ranges)
        return expected

    accounts = [_account(rank, g) for rank in order]
    expected = by(offsets)
    if accounts != expected and (others := _before_round_robin(partitions, group, accounts)):
        by_others = by(others)
        expected = by_others if accounts == by_others else expected
    for r, rank in enumerate(order):
        account = accounts[r]
        if account is None or account == expected[r]:
            continue
        twin = next((o.dp for s, o in enumerate(order) if s != r and _alike(account, expected[s])), None)
        wrong = next((n for n in [*account, *expected[r]] if account.get(n) != expected[r].get(n)), "")
        if twin is not None:
            partitions.problem(
                codes.DUPLICATED_SHARD,
                f"the file holds data-parallel rank {twin}'s partition: it was copied over this rank's "
                "partition",
                rank.path,
                rank.dp,
                f"param_slice_mappings of rank {rank.dp}",
                f"the partition of rank {twin}",
                "copy the file of this rank from the node that ran it",
            )
        else:
            partitions.problem(
                codes.PARTITION,
                f"param_slice_mappings do not tile the flat vector: {wrong}",
                rank.path,
                rank.dp,
                _format_range(expected[r].get(wrong)),
                _format_range(account.get(wrong)),
            )
    return len(partitions.findings) == before


def _account(rank: Rank, g: int) -> dict[str, tuple[int, int]] | None:
    """Return (start, numel) of the parameters in a rank's own mapping of a group; None if there is no
    mapping.
    """
    mappings = rank.state.get("param_slice_mappings")
    if not isinstance(mappings, list) or g >= len(mappings) or not isinstance(mappings[g], dict):
        return None
    return {
        name: place
        for name, value in mappings[g].items()
        if (place := _address(value)) is not None and place[1] > 0
    }


def _before_round_robin(
    partitions: Partitions, group: dict[str, list[int]], accounts: list[dict[str, tuple[int, int]] | None]
) -> dict[str, int] | None:
    """Return offsets in the order before ``round_robin_gradients`` reordered the parameters, from the
    mappings.

    Up to DeepSpeed 0.19.8, the flat vector and ``param_shapes`` have the new order, and
    ``param_slice_mappings`` has the old one. source: runtime/zero/stage_1_and_2.py (_link_all_hp_params takes
    bit16_groups)
    """
    config = partitions.model.state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(zero, dict) or zero.get("round_robin_gradients") is not True:
        return None
    order = list(dict.fromkeys(name for account in accounts for name in account or ()))
    filled = [name for name, shape in group.items() if math.prod(shape)]
    if sorted(order) != sorted(filled):
        return None
    offsets, at = dict.fromkeys(group, 0), 0
    for name in order:
        offsets[name] = at
        at += math.prod(group[name])
    return offsets


def _address(value: Any) -> tuple[int, int] | None:
    """Return (start, numel) of an inert ``fragment_address``."""
    state = value.get("state") if isinstance(value, dict) else None
    if (
        isinstance(state, dict)
        and isinstance(state.get("start"), int)
        and isinstance(state.get("numel"), int)
    ):
        return state["start"], state["numel"]
    args = value.get("args") if isinstance(value, dict) else None
    if isinstance(args, list) and len(args) == 2 and all(isinstance(n, int) for n in args):
        return args[1], args[0]
    return None


def _alike(account: dict[str, tuple[int, int]], other: dict[str, tuple[int, int]]) -> bool:
    return bool(account) and account == other


def _format_range(place: tuple[int, int] | None) -> str:
    return "not on this rank" if place is None else f"{place[1]} elements from {place[0]}"
