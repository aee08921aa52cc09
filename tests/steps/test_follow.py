"""`fastshard steps --follow`: new steps are judged when they are saved. Time moves by hand."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard.verification.follow_run as follow_run
import pytest
from fastshard.common import codes
from fastshard.verification.follow_run import FollowedStep, RunFollower, run_command
from helpers import FIXTURES, HF, cli, spawn, state_of
from holding import HANG
from runs import copy_steps
from safetensors.torch import load_file, save_file

REST = 60.0
SHARD = "model-00002-of-00004.safetensors"


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def follower(run: Path, clock: Clock, **options: Any) -> RunFollower:
    return RunFollower(run, rest=REST, clock=clock, memory="2GiB", **options)


def names(followed: list[FollowedStep]) -> list[tuple[str, str]]:
    return [(one.step.name, one.step.verdict) for one in followed]


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the tensors of a file."""
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def test_a_step_is_judged_when_its_files_rest(tmp_path: Path) -> None:
    clock, run = Clock(), copy_steps(HF, tmp_path / "run", "checkpoint-1")
    following = follower(run, clock)
    assert following.follow_once() == []
    shutil.copytree(HF, run / "checkpoint-2")
    (run / "checkpoint-2" / SHARD).unlink()
    assert following.follow_once() == []
    clock.now += REST - 1
    # Its last file comes: the time begins anew.
    shutil.copy(HF / SHARD, run / "checkpoint-2")
    assert following.follow_once() == []
    clock.now += REST - 1
    assert following.follow_once() == []
    clock.now += 1
    before = state_of(run)
    (followed,) = following.follow_once()
    assert names([followed]) == [("checkpoint-2", "complete")] and followed.finding is None
    assert followed.describe() == "checkpoint-2: complete; the same tensors as checkpoint-1"
    assert state_of(run) == before
    clock.now += REST
    assert following.follow_once() == []


def test_a_step_that_a_tracker_names_is_judged_at_once(tmp_path: Path) -> None:
    step, clock = FIXTURES / "sharded/megatron_legacy_tp2_pp2/iter_0000010", Clock()
    run = copy_steps(step, tmp_path / "run", "iter_0000010")
    following = follower(run, clock)
    shutil.copytree(step, run / "iter_0000020")
    assert following.follow_once() == []
    (run / "latest_checkpointed_iteration.txt").write_text("20")
    assert names(following.follow_once()) == [("iter_0000020", "complete")]


def test_a_run_may_begin_later_and_temporary_names_are_not_judged(tmp_path: Path) -> None:
    clock, run = Clock(), tmp_path / "run"
    run.mkdir()
    following = follower(run, clock)
    assert following.follow_once() == []
    shutil.copytree(HF, run / "tmp-checkpoint-1")
    (run / "checkpoint-2").mkdir()
    for _ in range(2):
        assert following.follow_once() == []
        clock.now += REST
    (run / "tmp-checkpoint-1").rename(run / "checkpoint-1")
    assert following.follow_once() == []
    clock.now += REST
    (followed,) = following.follow_once()
    assert (names([followed]), followed.previous) == ([("checkpoint-1", "complete")], None)


def test_a_step_with_errors_is_told_once_and_again_when_it_changes(tmp_path: Path) -> None:
    clock, run = Clock(), copy_steps(HF, tmp_path / "run", "checkpoint-1", "checkpoint-2")
    (run / "checkpoint-2" / SHARD).unlink()
    following = follower(run, clock)
    assert following.follow_once() == []
    clock.now += REST
    (followed,) = following.follow_once()
    assert names([followed]) == [("checkpoint-2", "incomplete")]
    assert followed.finding is not None and followed.finding.code == codes.MISSING_FILE
    clock.now += REST
    assert following.follow_once() == []
    shutil.copy(HF / SHARD, run / "checkpoint-2")
    assert following.follow_once() == []
    clock.now += REST
    assert names(following.follow_once()) == [("checkpoint-2", "complete")]


@pytest.mark.parametrize("is_known", [True, False], ids=["from-the-beginning", "judged"])
def test_a_complete_step_that_is_saved_anew_is_judged_again(is_known: bool, tmp_path: Path) -> None:
    clock, run = Clock(), copy_steps(HF, tmp_path / "run", "checkpoint-1", "checkpoint-2")
    if not is_known:
        (run / "checkpoint-2").rename(tmp_path / "later")
    following = follower(run, clock)
    if not is_known:
        (tmp_path / "later").rename(run / "checkpoint-2")
        following.follow_once()
        clock.now += REST
        assert names(following.follow_once()) == [("checkpoint-2", "complete")]
    # A run that went back to an older step saves this one again.
    shutil.rmtree(run / "checkpoint-2")
    shutil.copytree(HF, run / "checkpoint-2")
    (run / "checkpoint-2" / SHARD).unlink()
    assert following.follow_once() == []
    clock.now += REST
    assert names(following.follow_once()) == [("checkpoint-2", "incomplete")]
    assert following.follow_once() == []


def test_other_tensors_than_in_the_step_before_are_errors(tmp_path: Path) -> None:
    """Without a config nothing else says that a tensor is missing."""
    clock, run = Clock(), tmp_path / "run"
    for step in ("checkpoint-1", "checkpoint-2"):
        (run / step).mkdir(parents=True)
        shutil.copy(FIXTURES / "maxtext_twins/a_hf_bf16_single/model.safetensors", run / step)
    following = follower(run, clock)
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-3")

    def edit(tensors: dict[str, Any]) -> None:
        first, second, third = list(tensors)[:3]
        tensors["new.weight"] = tensors.pop(first)
        tensors[second] = tensors[second].float()
        tensors[third] = tensors[third][:-1].clone()

    change(run / "checkpoint-3/model.safetensors", edit)
    assert following.follow_once() == []
    clock.now += REST
    (followed,) = following.follow_once()
    assert followed.previous == "checkpoint-2" and followed.step.complete
    assert sorted(finding.code for finding in followed.findings) == sorted(
        [codes.MISSING_TENSOR, codes.SHAPE, codes.DTYPE]
    )
    assert followed.notes == ("new: new.weight",) and followed.finding is not None
    assert json.loads(json.dumps(followed.to_dict()))["differences"][0]["severity"] == "error"


def test_values_are_compared_with_verify(tmp_path: Path) -> None:
    clock, run = Clock(), copy_steps(HF, tmp_path / "run", "checkpoint-1")
    following = follower(run, clock, verify=True, state=tmp_path / "state")
    shutil.copytree(HF, run / "checkpoint-2")
    changed: list[str] = []

    def edit(tensors: dict[str, Any]) -> None:
        changed.extend(name for name in tensors if tensors[name].ndim == 2)
        for name in changed:
            tensors[name] *= 1.5
        tensors[changed[0]] *= 100

    change(run / "checkpoint-2" / SHARD, edit)
    assert following.follow_once() == []
    clock.now += REST
    (followed,) = following.follow_once()
    assert followed.step.verified and followed.findings == ()
    unchanged, norm = followed.notes
    assert unchanged.startswith("unchanged: ") and not any(name in unchanged for name in changed)
    assert norm.startswith(f"norm of {changed[0]}: ") and changed
    assert (tmp_path / "state/checkpoint-2.manifest.json").is_file()


def test_a_step_that_changes_while_it_is_read_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, run = Clock(), copy_steps(HF, tmp_path / "run", "checkpoint-1")
    following = follower(run, clock)
    shutil.copytree(HF, run / "checkpoint-2")
    real = follow_run.judge_step

    def judge(path: Path, **options: Any) -> Any:
        (path / "late.txt").write_text("more")
        return real(path, **options)

    assert following.follow_once() == []
    clock.now += REST
    monkeypatch.setattr(follow_run, "judge_step", judge)
    assert following.follow_once() == []
    monkeypatch.setattr(follow_run, "judge_step", real)
    assert following.follow_once() == []
    clock.now += REST
    assert names(following.follow_once()) == [("checkpoint-2", "complete")]


def test_a_step_before_that_is_deleted_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, run = Clock(), copy_steps(HF, tmp_path / "run", "checkpoint-1")
    following = follower(run, clock)
    shutil.copytree(HF, run / "checkpoint-2")
    assert following.follow_once() == []
    clock.now += REST
    real = follow_run.judge_step

    def judge(path: Path, **options: Any) -> Any:
        shutil.rmtree(run / "checkpoint-1")
        return real(path, **options)

    monkeypatch.setattr(follow_run, "judge_step", judge)
    (followed,) = following.follow_once()
    assert followed.step.complete and "not compared with checkpoint-1" in followed.describe()


def test_a_command_has_the_finding_in_its_environment(tmp_path: Path) -> None:
    clock, run = Clock(), copy_steps(HF, tmp_path / "run", "checkpoint-1")
    (run / "checkpoint-1" / SHARD).unlink()
    following = follower(run, clock)
    following.follow_once()
    clock.now += REST
    (followed,) = following.follow_once()
    out = tmp_path / "out"
    line = 'printf "%s\\n" "$FASTSHARD_STEP" "$FASTSHARD_CODE" "$FASTSHARD_MESSAGE" "$FASTSHARD_FILE"'
    assert run_command(f"{line} > '{out}'", followed) == 0
    assert out.read_text().splitlines() == [
        "checkpoint-1",
        "FS101",
        f"{SHARD}: the file is missing",
        SHARD,
    ]
    assert run_command("exit 7", followed) == 7


@pytest.mark.parametrize("is_json", [False, True])
def test_a_signal_ends_it_and_each_line_stands_alone(is_json: bool, tmp_path: Path) -> None:
    run = copy_steps(HF, tmp_path / "run", "checkpoint-1", "checkpoint-2")
    (run / "checkpoint-2" / SHARD).unlink()
    out = tmp_path / "out"
    words = ["steps", run, "--follow", "--rest", "0", "--exec", f"echo $FASTSHARD_CODE >> '{out}'; exit 3"]
    process = spawn(*words, *(["--json"] if is_json else []))
    assert process.stdout is not None
    line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=HANG)
    assert process.returncode == 0 and "Traceback" not in err
    if is_json:
        document = json.loads(line)
        assert (document["name"], document["verdict"], rest) == ("checkpoint-2", "incomplete", "")
    else:
        assert line == f"checkpoint-2: incomplete; FS101: {SHARD}: the file is missing\n"
        assert rest == f"{run}: ENDED, 1 step judged (exit 0)\n"


def test_options_of_following_need_it(tmp_path: Path) -> None:
    for words in (["--rest", "3"], ["--exec", "true"]):
        assert cli("steps", HF, *words).having("FS515", message="need --follow")
    assert cli("steps", HF, "--follow", "--fix-tracker").having("FS515")
    assert cli("steps", tmp_path / "nowhere", "--follow").having("FS501")
