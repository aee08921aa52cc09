"""Files that look alike are compared in linear time: each is read once more at most, and `--subset` bounds
what is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import spawn
from holding import HANG, Steps, needs_steps
from safetensors.torch import save_file

pytestmark = needs_steps

TENSORS = 4


def write_ranks(folder: Path, ranks: int, value: torch.Tensor) -> Path:
    """Ranks that all hold the same."""
    folder.mkdir()
    names = [f"w{i}" for i in range(TENSORS)]
    (folder / "layout.json").write_text(json.dumps({"tp": ranks, "tp_dim": dict.fromkeys(names, 1)}))
    for rank in range(ranks):
        save_file(
            {name: value + i for i, name in enumerate(names)}, folder / f"tp_rank_{rank:02d}.safetensors"
        )
    return folder


def count_readings(source: Path, *options: str) -> tuple[int, list[str]]:
    """How often `verify` reads something once more, and the codes that it finds."""
    with Steps() as steps:
        process = spawn("verify", source, "--json", *options, env=steps.environment)
        stdout, stderr = process.communicate(timeout=HANG)
        assert process.returncode in (0, 1), stderr
        readings = [name for name in steps.reached() if name.startswith("compare-")]
    return len(readings), [f["code"] for f in json.loads(stdout)["findings"] if f["severity"] != "note"]


@pytest.mark.parametrize("ranks", [4, 16])
def test_copies_are_read_once_more_each(ranks: int, tmp_path: Path) -> None:
    source = write_ranks(tmp_path / "in", ranks, torch.randn(64, 64))
    count, codes = count_readings(source)
    # As shards of a tensor, and as files.
    assert codes == ["FS303"] and 0 < count <= 2 * ranks * TENSORS


@pytest.mark.parametrize("ranks", [4, 16])
def test_constants_are_not_compared(ranks: int, tmp_path: Path) -> None:
    count, codes = count_readings(write_ranks(tmp_path / "in", ranks, torch.zeros(64, 64)))
    assert count == 0 and "FS303" not in codes


def test_a_subset_compares_what_it_reads(tmp_path: Path) -> None:
    """Each part compares its own tensors, and all parts together all of them."""
    source = write_ranks(tmp_path / "in", 4, torch.randn(64, 64))
    parts = 32
    counts = [count_readings(source, "--subset", f"{n}/{parts}") for n in range(1, parts + 1)]
    assert {codes[0] for count, codes in counts if count} == {"FS303"}
    assert all(codes == [] for count, codes in counts if not count)
    assert sum(count > 0 for count, _ in counts) == TENSORS
    assert all(count <= 2 * 4 for count, _ in counts)
