"""A loop with FSDP2 and torch DCP on two ranks, with faults at some steps: each is found at the save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from jobs import needs_mounts, run_job


@needs_mounts
def test_a_loop_with_fsdp2_does_not_begin_with_a_separate_disk(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "other").mkdir()
    first, second = run_job("sharded_loop.py", tmp_path / "out", separate=tmp_path / "other")
    assert [(f["code"], f["rank"]) for f in first["refused"]] == [("FS522", "rank 1")]
    assert {f["code"] for f in second["refused"]} == {"FS522"}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Steps 1 to 6 of a loop with FSDP2 and torch DCP on two ranks."""
    first, second = run_job("sharded_loop.py", tmp_path_factory.mktemp("loop") / "out")
    assert second == {"rank": 1, "steps": []}, "only rank 0 checks"
    return first["steps"]


def test_steps_without_a_fault_are_proven(steps: list[dict[str, Any]]) -> None:
    for number in (1, 2, 6):
        step = steps[number - 1]
        assert (step["headers"], step["full"], step["warnings"]) == ([], [], 0)
        assert step["by_headers"] == step["proven"] == f"step-{number}"


@pytest.mark.parametrize(
    ("number", "headers", "full", "text"),
    [
        (3, ["FS101"], [], "__1_0.distcp: the file is missing (rank 1)"),
        (4, [], ["FS306"], "model.body.0.weight: NaN or infinite elements"),
        (5, ["FS102"], [], "model.tower.weight"),
    ],
    ids=["file", "nan", "frozen"],
)
def test_a_fault_of_a_sharded_save_is_found(
    number: int, headers: list[str], full: list[str], text: str, steps: list[dict[str, Any]]
) -> None:
    step = steps[number - 1]
    assert (step["headers"], step["full"], step["warnings"]) == (headers, full, 1)
    assert any(text in line for line in step["texts"])
    assert step["proven"] == "step-2"
