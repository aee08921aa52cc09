"""Trainings by a real Trainer of Lightning, with faults from some step on: each is found at the save."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import fastshard
import torch
from jobs import needs_mounts, run_job

# Not imported here: it takes seconds, and brings compilers along.
needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="no lightning")


def name(step: int) -> str:
    return f"epoch=0-step={step}.ckpt"


def run(out: Path, fault: str, wait: str, ranks: int = 1) -> dict[str, Any]:
    first, *others = run_job("lightning_run.py", out, fault, wait, ranks=ranks)
    assert others == [{}] * (ranks - 1)
    return first


@needs_lightning
@pytest.mark.parametrize("ranks", [1, 2], ids=["alone", "ddp"])
def test_the_last_good_step_stays_when_weights_become_nan(ranks: int, tmp_path: Path) -> None:
    first = run(tmp_path / "out", "nan", "wait", ranks)
    assert first["full"] == {name(1): [], name(2): [], name(3): [], name(4): ["FS306"]}
    assert first["proven"] == first["verified"] == name(3)
    # ModelCheckpoint alone would keep the newest one only.
    assert first["present"] == [name(3), name(4)]
    assert len(first["warned"]) == 1 and "FS306" in first["warned"][0]
    for tensor in torch.load(tmp_path / "out" / name(3))["state_dict"].values():
        assert torch.isfinite(tensor).all()


@needs_lightning
@pytest.mark.parametrize(
    ("fault", "code", "ranks"), [("frozen", "FS103", 1), ("file", "FS312", 2)], ids=["frozen", "file-ddp"]
)
def test_what_a_save_lacks_is_found_by_headers(fault: str, code: str, ranks: int, tmp_path: Path) -> None:
    first = run(tmp_path / "out", fault, "wait", ranks)
    assert first["full"] == {name(1): [], name(2): []}
    assert len(first["warned"]) == 2 and all(code in text for text in first["warned"])
    assert first["present"] == [name(2), name(4)] and first["verified"] == name(2)


@needs_lightning
def test_a_training_without_faults_keeps_one_step(tmp_path: Path) -> None:
    first = run(tmp_path / "out", "none", "wait")
    assert first["present"] == [name(4)] and first["warned"] == []
    assert first["proven"] == first["verified"] == name(4)


@needs_lightning
@pytest.mark.parametrize("wait", ["wait-last", "last"])
def test_a_file_that_each_save_overwrites_protects_no_step(wait: str, tmp_path: Path) -> None:
    first = run(tmp_path / "out", "nan", wait)
    assert first["present"] == sorted({first["verified"], name(4), "last.ckpt"})
    assert first["verified"] in (name(1), name(2), name(3)) and "last.ckpt" not in first["full"]


@needs_lightning
@needs_mounts
def test_a_rank_with_a_separate_disk_is_found_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "other").mkdir()
    first, second = run_job("lightning_run.py", tmp_path / "out", "none", "wait", separate=tmp_path / "other")
    assert "FS522" in first["refused"] and "rank 1" in first["refused"] and first["steps"] == 0
    assert "FS522" in second["refused"] and second["steps"] == 0
    assert [*(tmp_path / "out").iterdir(), *(tmp_path / "other").iterdir()] == []


@needs_lightning
def test_asynchronous_saves_are_refused(tmp_path: Path) -> None:
    (only,) = run_job("lightning_run.py", tmp_path / "out", "async", "wait", ranks=1)
    assert "FS514" in only["refused"] and "AsyncCheckpointIO" in only["refused"] and only["steps"] == 0


def test_numbers_that_a_callback_keeps_may_be_infinite(tmp_path: Path) -> None:
    callbacks = {"ModelCheckpoint{'monitor': None}": {"kth_value": torch.tensor(torch.inf)}}
    document = {"state_dict": {"body.weight": torch.ones(2, 2)}, "callbacks": callbacks}
    torch.save(document, tmp_path / "good.ckpt")
    assert fastshard.verify(tmp_path / "good.ckpt").ok
    # A tensor below the same key may be a copy of the weights.
    document["callbacks"] = {"average": {"body.weight": torch.full((2, 2), torch.nan)}}
    torch.save(document, tmp_path / "bad.ckpt")
    assert [f.code for f in fastshard.verify(tmp_path / "bad.ckpt").findings if f.severity == "error"] == [
        "FS306"
    ]
