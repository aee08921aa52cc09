"""Runs that are stopped, killed or disturbed: nothing half-published, and --resume completes them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fastshard
import pytest
import torch
from helpers import read_result, sha256, spawn, state_of
from holding import HANG, Steps, needs_steps
from safetensors.torch import save_file

pytestmark = needs_steps

#: Each tensor is at least one tile.
TP, TENSORS, ROWS, COLUMNS = 4, 16, 512, 256


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 MiB in four ranks, divided along the columns."""
    root = tmp_path_factory.mktemp("source") / "ckpt"
    root.mkdir()
    layout = {"tp": TP, "tp_dim": {f"w{i}": 1 for i in range(TENSORS)}}
    (root / "layout.json").write_text(json.dumps(layout))
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(ROWS, COLUMNS, generator=generator)
    for rank in range(TP):
        shard = {f"w{i}": base + 10 * rank + i for i in range(TENSORS)}
        save_file(shard, root / f"tp_rank_{rank:02d}.safetensors")
    return root


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that holds what a run leaves, and nothing else."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.fixture(scope="module")
def expected(ckpt: Path) -> dict[str, str]:
    ranks = [fastshard.open(ckpt / f"tp_rank_{rank:02d}.safetensors") for rank in range(TP)]
    return {
        f"w{i}": sha256(torch.cat([rank[f"w{i}"].torch() for rank in ranks], dim=1)) for i in range(TENSORS)
    }


@pytest.fixture
def steps() -> Iterator[Steps]:
    """Holds runs before their fourth tile: three are done."""
    with Steps("tile-3") as held:
        yield held


def start(
    source: Path, out: Path, *options: str, steps: Steps | None = None, threads: int = 1
) -> subprocess.Popen[str]:
    environment = {} if steps is None else {"env": steps.environment}
    return spawn(
        "merge", source, out, "--threads", threads, "--fsync", "none", "--json", *options, **environment
    )


def complete(source: Path, out: Path, expected: dict[str, str]) -> None:
    process = start(source, out, "--resume")
    stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 0, stdout + stderr
    assert {name: sha256(t) for name, t in read_result(out).items()} == expected
    assert [p.name for p in out.parent.iterdir()] == [out.name], "something of the interrupted run was left"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_soon_and_resume_completes(
    number: signal.Signals, threads: int, ckpt: Path, place: Path, expected: dict[str, str], steps: Steps
) -> None:
    """Soon: each thread ends the tile that it is at, and begins no other."""
    out = place / "out"
    steps.hold("tile-4")
    process = start(ckpt, out, steps=steps, threads=threads)
    held = [steps.wait(f"tile-{3 + thread}", process) for thread in range(threads)]
    process.send_signal(number)
    steps.wait("cancelled", process)
    for thread in held:
        thread.release()
    stdout, stderr = process.communicate(timeout=HANG)
    begun = sorted(name for name in steps.reached() if name.startswith("tile-"))
    assert begun == [f"tile-{i}" for i in range(3 + threads)]
    assert process.returncode == 128 + number, stdout + stderr
    document = json.loads(stdout)
    assert (document["exit_code"], document["written"]) == (128 + number, False)
    assert [f["code"] for f in document["findings"]] == ["FS510"]
    (staging,) = place.glob(".out.fastshard-*")
    (finding,) = document["findings"]
    assert str(staging) in finding["help"] and finding["run"][0].endswith(" --resume")
    assert "Traceback" not in stderr
    assert not out.exists()
    complete(ckpt, out, expected)


#: What a thread begins, by verb: the place at which it is held, and the next one of its kind.
LOOPS = {
    "headers": (["inspect", "IN"], "file-1"),
    "verify": (["verify", "IN"], "tile-3"),
    "comparisons": (["verify", "ALIKE"], "compare-1"),
    "diff": (["diff", "IN", "IN"], "tile-3"),
    "stats": (["stats", "IN"], "tile-3"),
    "manifest": (["manifest", "IN", "-o", "FILE"], "tile-3"),
    "piece": (["verify", "PIECE"], "hash-1"),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_stops_at_its_next_turn(
    loop: str, number: signal.Signals, ckpt: Path, tmp_path: Path
) -> None:
    argv, place = LOOPS[loop]
    places = {
        "IN": ckpt,
        "FILE": tmp_path / "manifest.json",
        "ALIKE": tmp_path / "alike",
        "PIECE": tmp_path / "piece",
    }
    if loop == "comparisons":
        shutil.copytree(ckpt, places["ALIKE"])
        for rank in range(1, TP):
            shutil.copy(ckpt / "tp_rank_00.safetensors", places["ALIKE"] / f"tp_rank_{rank:02d}.safetensors")
    if loop == "piece":
        fastshard.copy_local(ckpt, places["PIECE"])
    with Steps(place) as steps:
        words = [places.get(word, word) for word in argv]
        process = spawn(*words, "--threads", 1, "--json", env=steps.environment)
        held = steps.wait(place, process)
        process.send_signal(number)
        steps.wait("cancelled", process)
        held.release()
        stdout, stderr = process.communicate(timeout=HANG)
        kind, _, count = place.partition("-")
        begun = [name for name in steps.reached() if name.startswith(f"{kind}-")]
    assert len(begun) == int(count) + 1, begun
    assert process.returncode == 128 + number, stdout + stderr
    assert [f["code"] for f in json.loads(stdout)["findings"]] == ["FS510"]
    assert "Traceback" not in stderr and not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["draft", "place"])
def test_planning_need_not_end_for_a_signal(place: str, number: signal.Signals, ckpt: Path) -> None:
    with Steps(place) as steps:
        process = spawn("merge", ckpt, ckpt.parent / "out", "--json", env=steps.environment)
        steps.wait(place, process)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 128 + number, stdout + stderr
    assert [f["code"] for f in json.loads(stdout)["findings"]] == ["FS510"]
    assert "Traceback" not in stderr and [p.name for p in ckpt.parent.iterdir()] == [ckpt.name]


def test_resumed_run_has_statistics_of_all_it_wrote(
    ckpt: Path, place: Path, expected: dict[str, str], steps: Steps
) -> None:
    out = place / "out"
    process = start(ckpt, out, steps=steps)
    held = steps.wait("tile-3", process)
    process.send_signal(signal.SIGINT)
    steps.wait("cancelled", process)
    held.release()
    process.communicate(timeout=HANG)
    assert process.returncode == 130 and not out.exists()
    stdout, stderr = start(ckpt, out, "--resume", "--stats").communicate(timeout=HANG)
    tensors = json.loads((out / "fastshard.manifest.json").read_text())["tensors"]
    assert len(tensors) == TENSORS, stdout + stderr
    assert {name: sha256(t) for name, t in read_result(out).items()} == expected
    for tensor in tensors:
        assert tensor["stats"]["count"] == TP * ROWS * COLUMNS
        # Ranks hold the same normal numbers around 0, 10, 20 and 30, plus the tensor's own number.
        assert tensor["stats"]["mean"] == pytest.approx(15 + int(tensor["name"][1:]), abs=0.01)


def killed(ckpt: Path, out: Path, steps: Steps) -> None:
    """A run that is killed when three tiles are done."""
    process = start(ckpt, out, steps=steps)
    steps.wait("tile-3", process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()


def test_killed_run_is_resumed(ckpt: Path, place: Path, expected: dict[str, str], steps: Steps) -> None:
    killed(ckpt, place / "out", steps)
    complete(ckpt, place / "out", expected)


@pytest.mark.parametrize("at", ["sealed", "published"])
def test_run_that_is_killed_while_it_publishes_is_resumed(
    at: str, ckpt: Path, place: Path, expected: dict[str, str]
) -> None:
    out = place / "out"
    with Steps(at) as steps:
        process = start(ckpt, out, steps=steps)
        steps.wait(at, process)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert out.exists() == (at == "published")
    complete(ckpt, out, expected)


def test_leftover_of_a_killed_run_is_said_without_resume(ckpt: Path, place: Path, steps: Steps) -> None:
    out = place / "out"
    killed(ckpt, out, steps)
    again = start(ckpt, out)
    stdout, _ = again.communicate(timeout=HANG)
    assert again.returncode == 2
    assert "FS508" in stdout and "--resume" in stdout
    assert not out.exists()


def test_second_run_does_not_disturb_the_first(
    ckpt: Path, place: Path, expected: dict[str, str], steps: Steps
) -> None:
    out = place / "out"
    first = start(ckpt, out, steps=steps)
    held = steps.wait("tile-3", first)
    second = start(ckpt, out, "--resume")
    stdout, _ = second.communicate(timeout=HANG)
    assert second.returncode == 2
    assert [f["code"] for f in json.loads(stdout)["findings"]] == ["FS509"]
    assert first.poll() is None
    held.release()
    first.communicate(timeout=HANG)
    assert first.returncode == 0
    assert {name: sha256(t) for name, t in read_result(out).items()} == expected


def test_resume_with_a_source_changed_since_takes_nothing_stale(
    ckpt: Path, tmp_path: Path, place: Path, steps: Steps
) -> None:
    source, out = tmp_path / "ckpt", place / "out"
    shutil.copytree(ckpt, source)
    killed(source, out, steps)
    # Same names, shapes and sizes: only the bytes and the time differ.
    changed = {f"w{i}": torch.full((ROWS, COLUMNS), float(i)) for i in range(TENSORS)}
    for rank in range(TP):
        save_file(
            {k: v + 10 * rank + torch.arange(COLUMNS) for k, v in changed.items()},
            source / f"tp_rank_{rank:02d}.safetensors",
        )
    process = start(source, out, "--resume")
    stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 0, stdout + stderr
    result = read_result(out)
    for i in range(TENSORS):
        want = torch.cat([changed[f"w{i}"] + 10 * rank + torch.arange(COLUMNS) for rank in range(TP)], dim=1)
        assert torch.equal(result[f"w{i}"], want), "parts of the old source were kept"


def test_source_that_changes_while_it_is_read_is_refused(
    ckpt: Path, tmp_path: Path, place: Path, steps: Steps
) -> None:
    source = tmp_path / "ckpt"
    shutil.copytree(ckpt, source)
    process = start(source, place / "out", steps=steps)
    held = steps.wait("tile-3", process)
    with (source / "tp_rank_03.safetensors").open("ab") as handle:
        handle.write(b"more")
    held.release()
    stdout, _ = process.communicate(timeout=HANG)
    assert process.returncode == 1
    (finding,) = json.loads(stdout)["findings"]
    assert finding["code"] == "FS506" and "tp_rank_03.safetensors" in finding["file"]
    assert not (place / "out").exists()


#: Merges from Python; the callback says what it is called with, and does something.
CALLED_BACK = """
import os, sys
import fastshard
def step(done, total):
    print(done, total, flush=True)
    {act}
fastshard.merge(sys.argv[1], sys.argv[2], threads=1, fsync=False, progress=step)
"""


def called_back(act: str, source: Path, out: Path, steps: Steps) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CALLED_BACK.format(act=act), source, out],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=steps.environment,
    )


def test_progress_is_called_and_ends_with_everything(ckpt: Path, place: Path, steps: Steps) -> None:
    process = called_back("", ckpt, place / "out", steps)
    held = steps.wait("tile-3", process)
    assert process.stdout is not None
    # Whether it was called before is not known; while the run is held it is.
    first = process.stdout.readline()
    while int(first.split()[0]) == 0:
        first = process.stdout.readline()
    held.release()
    stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 0, stderr
    calls = [tuple(map(int, line.split())) for line in [first, *stdout.splitlines()]]
    done = [d for d, _ in calls]
    assert done == sorted(done) and len(calls) > 1
    assert 0 < done[0] < calls[-1][1]
    assert calls[-1][0] == calls[-1][1] >= TP * TENSORS * ROWS * COLUMNS * 4


def test_callback_that_raises_stops_the_run(ckpt: Path, place: Path) -> None:
    before = state_of(ckpt)
    # It is called before the first tile too, where it does nothing yet.
    told = place / "told"
    with Steps("tile-0") as steps:
        act = f"if os.path.exists({str(told)!r}): raise RuntimeError('enough')"
        process = called_back(act, ckpt, place / "out", steps)
        held = steps.wait("tile-0", process)
        told.touch()
        steps.wait("cancelled", process)
        held.release()
        _, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 1 and "RuntimeError: enough\n" in stderr
    assert "tile-1" not in steps.reached()
    assert not (place / "out").exists()
    assert state_of(ckpt) == before
