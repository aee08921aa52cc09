"""Megatron-LM's distributed optimizer, moved to torch.distributed.checkpoint: FSDP2 goes on with the losses that Megatron has."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import cli

SCRIPT = Path(__file__).parent / "moving.py"
#: How far losses may be apart, relative; and how far they are at least if moments are lost.
SAME, LOST = 1e-4, 1e-2


def losses(folder: Path, what: str, name: str) -> list[float]:
    with (folder / "log").open("wb") as log:
        command = [sys.executable, str(SCRIPT), str(folder), what, name]
        ran = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=180, check=False)
    assert ran.returncode == 0, (folder / "log").read_text(errors="replace")[-3000:]
    return json.loads((folder / f"{name}.json").read_text())


def test_losses_go_on_as_they_would_have(tmp_path: Path) -> None:
    """tp 2, dp 2; query, key and value are one tensor there and three here; two groups by weight decay."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install '.[megatron]' (CONTRIBUTING.md)")
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
