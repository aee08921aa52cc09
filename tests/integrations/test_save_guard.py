"""The guard of saves by itself, on small checkpoints of one process."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import fastshard
import numpy as np
import pytest
from fastshard import FastshardError, integrations
from fastshard.common import codes
from fastshard.integrations import SaveGuard, save_guard
from holding import HANG
from safetensors.numpy import save_file


def save(path: Path, *, without: str | None = None, value: float = 1.0, dtype: type = np.float32) -> Path:
    """Saves a model of a frozen tower and a body."""
    numbers = np.arange(1, 13).reshape(3, 4)
    names = [f"{part}.{layer}.weight" for part in ("tower", "body") for layer in range(3)]
    tensors = {name: (numbers * (at + value)).astype(dtype) for at, name in enumerate(names)}
    path.mkdir(parents=True, exist_ok=True)
    kept = {name: t for name, t in tensors.items() if without is None or not name.startswith(without)}
    save_file(kept, path / "model.safetensors")
    return path


def codes_of(verdict: integrations.StepVerdict | None) -> set[str]:
    assert verdict is not None
    return {finding.code for finding in verdict.findings if finding.severity == "error"}


def wait(guard: SaveGuard) -> list[integrations.StepVerdict]:
    return guard.results(HANG)


@pytest.fixture
def guard() -> SaveGuard:
    return SaveGuard(rank=0, world=1)


def test_a_good_save_is_proven_by_headers_and_then_by_all_data(guard: SaveGuard, tmp_path: Path) -> None:
    verdict = guard.after_save(save(tmp_path / "1"))
    assert verdict is not None and verdict.ok and not verdict.is_full
    assert (guard.last_proven, guard.last_verified, guard.unfinished) == (
        tmp_path / "1",
        None,
        [tmp_path / "1"],
    )
    (full,) = wait(guard)
    assert full.ok and full.is_full and full.path == tmp_path / "1"
    assert (guard.last_proven, guard.last_verified, guard.unfinished) == (tmp_path / "1", tmp_path / "1", [])


def test_nan_is_found_in_the_background(guard: SaveGuard, tmp_path: Path) -> None:
    guard.after_save(save(tmp_path / "1"))
    wait(guard)
    assert codes_of(guard.after_save(save(tmp_path / "2", value=np.nan))) == set()
    assert guard.last_proven == tmp_path / "2"
    with pytest.warns(UserWarning, match=r"2: .*NaN.* \[FS306\], and 5 more errors; "):
        full = wait(guard)[-1]
    assert codes_of(full) == {codes.NON_FINITE}
    assert guard.last_proven == guard.last_verified == tmp_path / "1"


def test_a_tower_that_a_step_lacks_is_found_by_headers(guard: SaveGuard, tmp_path: Path) -> None:
    guard.after_save(save(tmp_path / "1"))
    wait(guard)
    with pytest.warns(UserWarning, match="tower.0.weight"):
        verdict = guard.after_save(save(tmp_path / "2", without="tower"))
    assert codes_of(verdict) <= {codes.MISSING_TENSOR, codes.MISSING_LAYER} and not verdict.ok
    assert guard.last_proven == tmp_path / "1" and guard.unfinished == []
    # The good one before is what the next is compared with.
    with pytest.warns(UserWarning, match="tower.0.weight"):
        assert not guard.after_save(save(tmp_path / "3", without="tower")).ok


def test_the_first_save_is_compared_with_a_given_checkpoint(tmp_path: Path) -> None:
    guard = SaveGuard(rank=0, world=1, like=save(tmp_path / "base"))
    with pytest.warns(UserWarning, match="tower.0.weight"):
        assert not guard.after_save(save(tmp_path / "1", without="tower")).ok


def test_another_dtype_than_in_the_step_before_is_found(guard: SaveGuard, tmp_path: Path) -> None:
    guard.after_save(save(tmp_path / "1"))
    verdict = guard.after_save(save(tmp_path / "2", dtype=np.float16))
    assert verdict is not None and any(f.got and "f16" in f.got.lower() for f in verdict.findings)
    wait(guard)


def test_a_reference_that_was_deleted_is_not_missed(guard: SaveGuard, tmp_path: Path) -> None:
    guard.after_save(save(tmp_path / "1"))
    wait(guard)
    shutil.rmtree(tmp_path / "1")
    assert guard.after_save(save(tmp_path / "2")).ok
    # Of this one only a part is deleted so far.
    wait(guard)
    (tmp_path / "2/model.safetensors").unlink()
    assert guard.after_save(save(tmp_path / "3")).ok
    wait(guard)
    assert guard.last_verified == tmp_path / "3"


def test_a_save_in_the_same_folder_takes_the_place_of_the_one_before(
    guard: SaveGuard, tmp_path: Path
) -> None:
    for _ in range(2):
        assert guard.after_save(save(tmp_path / "latest")).ok
        wait(guard)
    assert guard.last_verified == tmp_path / "latest" and len(guard.results()) == 2


def test_a_process_that_reads_a_folder_is_ended_when_it_is_saved_again(
    guard: SaveGuard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[save_guard._Run] = []
    start = save_guard._start
    monkeypatch.setattr(save_guard, "_start", lambda *given: started.append(start(*given)) or started[-1])
    for _ in range(2):
        guard.after_save(save(tmp_path / "latest"))
    assert len(started) == 2 and started[0].process.returncode is not None
    assert [v.path.name for v in wait(guard)] == ["latest"]


def test_a_process_that_cannot_start_is_warned_of(
    guard: SaveGuard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.warns(UserWarning, match="only its headers are checked"):
        assert guard.after_save(save(tmp_path / "1")).ok
    assert guard.last_proven == tmp_path / "1" and guard.unfinished == []


def test_a_defect_of_a_check_does_not_end_a_training(
    guard: SaveGuard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_guard, "open_checkpoint", lambda *_, **__: {}["no such key"])
    with pytest.warns(UserWarning, match="KeyError: 'no such key'"):
        assert codes_of(guard.after_save(save(tmp_path / "1"))) == {codes.INTERNAL}


def test_a_folder_that_cannot_be_created_is_refused(guard: SaveGuard, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FastshardError, match="FS502"):
        guard.before_training(tmp_path / "file/folder")


def test_a_save_that_never_came_is_found(guard: SaveGuard, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="FS501"):
        assert codes_of(guard.after_save(tmp_path / "none")) == {codes.NO_SUCH_PATH}
    assert guard.last_proven is None and guard.unfinished == []


def test_a_save_that_is_deleted_while_it_is_verified_has_no_result(guard: SaveGuard, tmp_path: Path) -> None:
    path = save(tmp_path / "1")
    guard.after_save(path)
    shutil.rmtree(path)
    assert wait(guard) == [] and guard.unfinished == []


def test_at_most_one_process_runs_and_the_newest_save_waits(
    guard: SaveGuard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that holds until it is let go stands for a verification that takes longer than a step."""
    started: list[save_guard._Run] = []
    start = save_guard._start

    def start_held(path: Path, threads: int | None) -> save_guard._Run:
        run = start(path, threads)
        if not started:
            run.process.wait(HANG)
            waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            run = save_guard._Run(run.path, waiting, run.output, run.errors)
        started.append(run)
        return run

    monkeypatch.setattr(save_guard, "_start", start_held)
    for number in (1, 2, 3):
        guard.after_save(save(tmp_path / str(number)))
    assert guard.unfinished == [tmp_path / "1", tmp_path / "3"] and len(started) == 1
    assert guard.results() == []
    process = started[0].process
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    assert [v.path.name for v in wait(guard)] == ["1", "3"]
    assert guard.last_verified == guard.last_proven == tmp_path / "3"


def test_the_background_process_has_the_lowest_priority(
    guard: SaveGuard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(save_guard.os, "setpriority", lambda _which, pid, nice: seen.append((pid, nice)))
    guard.after_save(save(tmp_path / "1"))
    assert guard._running is not None and seen == [(guard._running.process.pid, 19)]
    wait(guard)


def test_a_process_that_was_killed_is_warned_of_and_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = SaveGuard(rank=0, world=1, on_failure="raise")
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **given: popen([sys.executable, "-c", script], **given)
    )
    guard.after_save(save(tmp_path / "1"))
    with pytest.warns(UserWarning, match="the verification ended with exit code -9"):
        (full,) = wait(guard)
    assert codes_of(full) == {codes.INTERRUPTED}
    assert guard.last_verified is None and guard.last_proven == tmp_path / "1", "by headers"


def test_errors_are_raised_where_that_is_asked_for(tmp_path: Path) -> None:
    guard = SaveGuard(rank=0, world=1, on_failure="raise")
    guard.after_save(save(tmp_path / "1"))
    wait(guard)
    with pytest.raises(fastshard.IncompleteError, match="tower") as caught:
        guard.after_save(save(tmp_path / "2", without="tower"))
    assert str(tmp_path / "2") in str(caught.value)
    guard.after_save(save(tmp_path / "3", value=np.nan))
    with pytest.raises(fastshard.ProblemError, match="FS306"):
        wait(guard)
    assert guard.last_proven == tmp_path / "1"


def test_a_failure_is_logged_too(guard: SaveGuard, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fastshard"), pytest.warns(UserWarning):
        guard.after_save(tmp_path / "none")
    assert [(r.name, r.levelname) for r in caplog.records] == [("fastshard.integrations", "WARNING")]


def test_other_ranks_do_nothing(tmp_path: Path) -> None:
    guard = SaveGuard(rank=1, world=2)
    assert guard.after_save(tmp_path / "none") is None
    assert guard.results() == [] and guard.last_proven is None and guard.unfinished == []


def test_functions_use_the_guard_that_was_made_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_guard, "_current", None)
    guard = integrations.before_training(tmp_path / "new/folder", 0, 1)
    assert list((tmp_path / "new/folder").iterdir()) == []
    assert integrations.after_save(save(tmp_path / "new/folder/1")).ok
    assert [v.path.name for v in wait(guard)] == ["1"]


@pytest.mark.parametrize(
    "options",
    [{"on_failure": "stop"}, {"rank": 3}, {"rank": 3, "world": 2}],
    ids=["on_failure", "rank", "world"],
)
def test_wrong_values_are_refused(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(FastshardError, match="FS515"):
        SaveGuard(**options).after_save(tmp_path)


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert SaveGuard().after_save(tmp_path / "none") is None


def test_importing_loads_no_framework() -> None:
    script = "import sys, fastshard.integrations; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
