"""Megatron-LM's distributed optimizer, moved to torch.distributed.checkpoint: FSDP2 goes on with the losses
that Megatron has."""

from __future__ import annotations

import json
from pathlib import Path

from helpers import cli
from megatron_ranks import launch

#: How far losses may be apart, relative; and how far they are at least if moments are lost.
SAME, LOST = 1e-4, 1e-2


def losses(folder: Path, what: str, name: str) -> list[float]:
    launch("going_on.py", [folder, what, name], [folder / "log"])
    return json.loads((folder / f"{name}.json").read_text())


def test_losses_go_on_as_they_would_have(tmp_path: Path) -> None:
    """tp 2, dp 2; query, key and value are one tensor there and three here; two groups by weight decay."""
    wanted = losses(tmp_path, "megatron", "first")
    converted = cli("convert", tmp_path / "saved", tmp_path / "moved", "--to", "dcp", "--optimizer")
    assert converted.code == 0, converted.out
    got, without = losses(tmp_path, "fsdp", "on"), losses(tmp_path, "fsdp", "lost")
    apart, lost = (
        max(abs(a - b) / a for a, b in zip(wanted, other, strict=True)) for other in (got, without)
    )
    told = f"{apart:.1e} with moments, {lost:.1e} without"
    print(told)
    assert apart <= SAME, told
    assert lost >= LOST, told
    assert sum(without) > sum(wanted) * (1 + 10 * SAME), told
