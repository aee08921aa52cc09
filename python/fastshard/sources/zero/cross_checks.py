"""Checks across the files of all ranks."""

from __future__ import annotations

import struct
from typing import Any

from ... import _core
from ...common import codes
from ...common.errors import Finding
from ..base import Contents, Found, view_of
from ..rank_values import differing
from .flat_state import state_of, tensor_index
from .zero_files import ZeroFiles


def copied_files(found: Found[ZeroFiles], contents: Contents) -> list[Finding]:
    """Report optimizer files of two ranks whose master weights have the same checksum.

    One file is a copy of the other.
    """
    seen: dict[tuple[Any, ...], tuple[int, int, int]] = {}
    findings = []
    for dp, mp, file in found.seen.optim:
        state = state_of(contents, file) or {}
        groups = state.get("single_partition_of_fp32_groups") or state.get("fp32_flat_groups")
        tensors = contents.tensors(file)
        indices = [
            t
            for value in (groups if isinstance(groups, list) else [])
            if (t := tensor_index(value)) is not None
        ]
        views = tuple(view_of(tensors[t]) for t in indices)
        if not views or None in [crc for crc, *_ in views] or all(_is_constant(*view[:2]) for view in views):
            continue
        first = seen.setdefault(views, (dp, mp, file))
        if first[:2] != (dp, mp):
            findings.append(
                Finding.of(
                    codes.DUPLICATED_SHARD,
                    f"the same master weights as in {found.files[first[2]].name} (dp {first[0]}, mp "
                    f"{first[1]}): one file was copied over the other",
                    file=found.files[file].path,
                    rank=f"dp {dp}, mp {mp}",
                    expected="another partition",
                    got="a copy, by the checksums of its storages",
                    help="copy the file of this rank from the node that ran it",
                )
            )
    return findings


def _is_constant(crc: int, size: int) -> bool:
    """Return True if a float32 storage with this checksum contains only zeros or only ones."""
    return any(_core.crc32_of_constant(struct.pack("<f", value), size) == crc for value in (0.0, 1.0))


def same_step(found: Found[ZeroFiles], states: list[dict[str, Any]], word: str) -> list[Finding]:
    """Check that all model files state the same step; ``word`` is the framework's term for a rank."""
    values: dict[tuple[int, int, str], list[tuple[str, Any, Any]]] = {}
    for key in ("iteration", "global_steps"):
        counters = [
            (rank, file, state[key])
            for (rank, file), state in zip(found.seen.ranks, states, strict=True)
            if key in state
        ]
        for rank, file, value in counters:
            first = found.files[counters[0][1]].name
            values.setdefault((rank, file, first), []).append((key, counters[0][2], value))
    return [
        finding
        for (rank, file, first), each in values.items()
        for finding in differing(
            codes.MIXED_STEPS,
            each,
            f" as in {first}",
            file=found.files[file].path,
            rank=f"{word} {rank}",
            help="copy all files from one step",
        )
    ]


def steps_agree(found: Found[ZeroFiles], steps: dict[int, list[float]]) -> list[Finding]:
    """Check that all ranks have taken the same number of optimizer steps."""
    steps_by_file = {file: tuple(sorted(set(each))) for file, each in steps.items() if each}
    usual = max(steps_by_file.values(), key=list(steps_by_file.values()).count, default=())
    ranks = {file: f"dp {dp}, mp {mp}" for dp, mp, file in found.seen.optim}
    return [
        Finding.of(
            codes.MIXED_STEPS,
            "the optimizer step differs between ranks",
            file=found.files[file].path,
            rank=ranks.get(file),
            expected=f"{_listed(usual)}, as on the other ranks",
            got=_listed(each),
            help="copy all optimizer files from one step",
        )
        for file, each in sorted(steps_by_file.items())
        if each != usual
    ]


def _listed(steps: tuple[float, ...]) -> str:
    return ", ".join(f"{step:g}" for step in steps)
