"""Trainings by a real Trainer of transformers, with faults from some step on: each is found at the save."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from fastshard import Finding
from fastshard.integrations import save_guard
from fastshard.integrations.save_guard import SaveGuard, StepVerdict
from fastshard.integrations.transformers import CheckpointGuard
from jobs import needs_mounts, run_job
from safetensors.numpy import load_file


@pytest.mark.parametrize("ranks", [1, 2], ids=["alone", "ddp"])
def test_a_trainer_keeps_the_last_good_step_when_weights_become_nan(ranks: int, tmp_path: Path) -> None:
    first, *others = run_job("trainer_run.py", tmp_path / "out", "nan", "wait", ranks=ranks)
    assert first["full"] == {
        "checkpoint-1": [],
        "checkpoint-2": [],
        "checkpoint-3": ["FS306"],
        "checkpoint-4": ["FS306"],
    }
    assert first["proven"] == first["verified"] == "checkpoint-2"
    # The newest one is there to be looked at. Of the Trainer's own rotation it would be the only one.
    assert first["present"] == ["checkpoint-2", "checkpoint-4"]
    assert len(first["warned"]) == 2 and all("FS306" in text for text in first["warned"])
    assert first["limit"] == 1 and others == [{"limit": 1}] * (ranks - 1)


def test_the_last_good_step_stays_however_late_verifications_end(tmp_path: Path) -> None:
    (first,) = run_job("trainer_run.py", tmp_path / "out", "nan", "do-not-wait", ranks=1)
    good = first["verified"]
    assert good in ("checkpoint-1", "checkpoint-2") and first["proven"] in (good, "checkpoint-3")
    assert {good, "checkpoint-4"} <= set(first["present"])
    assert first["full"]["checkpoint-4"] == ["FS306"]
    for tensor in load_file(tmp_path / "out" / good / "model.safetensors").values():
        assert tensor.sum() == tensor.sum(), "NaN"


@pytest.mark.parametrize(
    ("fault", "code", "ranks"), [("frozen", "FS102", 1), ("file", "FS513", 2)], ids=["frozen", "file-ddp"]
)
def test_a_trainer_finds_what_a_save_lacks_by_headers(
    fault: str, code: str, ranks: int, tmp_path: Path
) -> None:
    first, *_ = run_job("trainer_run.py", tmp_path / "out", fault, "wait", ranks=ranks)
    assert first["full"] == {"checkpoint-1": [], "checkpoint-2": []}
    assert len(first["warned"]) == 2 and all(code in text for text in first["warned"])
    assert first["present"] == ["checkpoint-2", "checkpoint-4"] and first["verified"] == "checkpoint-2"


def test_a_training_without_faults_keeps_one_step(tmp_path: Path) -> None:
    (first,) = run_job("trainer_run.py", tmp_path / "out", "none", "wait", ranks=1)
    assert first["present"] == ["checkpoint-4"] and first["warned"] == []
    assert first["proven"] == first["verified"] == "checkpoint-4"


def test_the_step_that_a_training_resumed_from_stays_until_a_later_one_is_verified(tmp_path: Path) -> None:
    run_job("trainer_run.py", tmp_path / "out", "none", "wait", ranks=1)
    (first,) = run_job("trainer_run.py", tmp_path / "out", "nan", "wait", ranks=1)
    assert first["verified"] is None and list(first["full"].values()) == [["FS306"]] * 4
    assert first["present"] == ["checkpoint-4", "checkpoint-8"]


def test_what_is_not_verified_when_training_ends_is_warned_of(tmp_path: Path) -> None:
    callback = CheckpointGuard(wait=0)
    waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run = save_guard._Run(tmp_path / "checkpoint-1", waiting, io.BytesIO(), io.BytesIO())
    callback.guard._running = run
    args = SimpleNamespace(should_save=True, output_dir=str(tmp_path))
    state = SimpleNamespace(is_hyper_param_search=False)
    with pytest.warns(UserWarning, match="checkpoint-1: its verification has not ended yet"):
        callback.on_train_end(args, state, None)
    run.stop()


class Saves:
    """Saves of a training in a folder, of which a callback hears; each verification has the given result."""

    def __init__(self, folder: Path, callback: CheckpointGuard, limit: int | None = 1) -> None:
        self.folder, self.callback = folder, callback
        self.args = SimpleNamespace(
            output_dir=str(folder),
            save_total_limit=limit,
            should_save=True,
            save_on_each_node=False,
            process_index=0,
            world_size=1,
        )
        callback.on_train_begin(self.args, self._state(0), None)

    def save(self, step: int, *, full: bool, best: Path | None = None) -> None:
        path = self.folder / f"checkpoint-{step}"
        path.mkdir(parents=True)
        self.callback.on_save(self.args, self._state(step, best), None)
        if full:
            self.callback.guard._verdicts[path] = StepVerdict(path, (), is_full=True)

    @property
    def present(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def _state(self, step: int, best: Path | None = None) -> SimpleNamespace:
        return SimpleNamespace(
            is_hyper_param_search=False,
            global_step=step,
            best_model_checkpoint=None if best is None else str(best),
        )


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What headers show of each save; no process starts."""
    found: list[Finding] = []
    monkeypatch.setattr(save_guard, "_check_headers", lambda path, reference: found)
    monkeypatch.setattr(SaveGuard, "_start_next", lambda self: setattr(self, "_waiting", None))
    return found


def test_a_training_without_a_limit_keeps_all_after_one_that_failed(
    headers: list[Finding], tmp_path: Path
) -> None:
    callback = CheckpointGuard()
    Saves(tmp_path / "failed", callback, limit=1)
    saves = Saves(tmp_path / "out", callback, limit=None)
    for step in (1, 2, 3):
        saves.save(step, full=True)
    assert saves.present == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_the_best_step_stays_under_another_path(headers: list[Finding], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    saves = Saves(tmp_path / "link", CheckpointGuard())
    for step in (1, 2, 3):
        saves.save(step, full=True, best=tmp_path / "out" / "checkpoint-1")
    assert saves.present == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    saves.save(4, full=True, best=tmp_path / "out" / "checkpoint-1")
    assert saves.present == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]


def test_a_new_step_stays_beside_higher_ones_of_an_earlier_training(
    headers: list[Finding], tmp_path: Path
) -> None:
    (tmp_path / "out" / "checkpoint-1000").mkdir(parents=True)
    saves = Saves(tmp_path / "out", CheckpointGuard())
    saves.save(1, full=True)
    saves.save(2, full=False)
    assert saves.present == ["checkpoint-1", "checkpoint-1000", "checkpoint-2"]


def test_a_good_step_stays_if_the_verified_one_was_deleted(headers: list[Finding], tmp_path: Path) -> None:
    saves = Saves(tmp_path / "out", CheckpointGuard())
    saves.save(1, full=True)
    saves.save(2, full=False)
    shutil.rmtree(tmp_path / "out" / "checkpoint-1")
    headers.append(Finding.of("FS101", "the file is missing"))
    with pytest.warns(UserWarning, match="checkpoint-3"):
        saves.save(3, full=False)
    assert saves.present == ["checkpoint-2", "checkpoint-3"]


@needs_mounts
def test_a_rank_with_a_separate_disk_is_found_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "other").mkdir()
    first, second = run_job("trainer_run.py", tmp_path / "out", "none", "wait", separate=tmp_path / "other")
    assert "FS522" in first["refused"] and "rank 1" in first["refused"] and first["steps"] == 0
    assert "FS522" in second["refused"] and second["steps"] == 0
    assert [*(tmp_path / "out").iterdir(), *(tmp_path / "other").iterdir()] == []
