"""Runs that are stopped, killed or disturbed: nothing half-published, and --resume completes them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fastshard
import pytest
import torch
from helpers import read_result, sha256, spawn, state_of
from safetensors.torch import save_file

TP, TENSORS, ROWS, COLUMNS = 4, 16, 4096, 1024


@pytest.fixture(scope="module")
def big() -> Iterator[Path]:
    """1 GiB in four ranks, divided along the columns; in memory where the system has such a place."""
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="fastshard-test-") as folder:
        root = Path(folder) / "ckpt"
        root.mkdir()
        layout = {"tp": TP, "tp_dim": {f"w{i}": 1 for i in range(TENSORS)}}
        (root / "layout.json").write_text(json.dumps(layout))
        generator = torch.Generator().manual_seed(3)
        base = torch.randn(ROWS, COLUMNS, generator=generator)
        for rank in range(TP):
            shard = {f"w{i}": base + 10 * rank + i for i in range(TENSORS)}
            save_file(shard, root / f"tp_rank_{rank:02d}.safetensors")
        yield root


@pytest.fixture
def place(big: Path) -> Iterator[Path]:
    """A folder beside the big checkpoint, on the same disk."""
    folder = Path(tempfile.mkdtemp(dir=big.parent))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def expected(big: Path) -> dict[str, str]:
    ranks = [fastshard.open(big / f"tp_rank_{rank:02d}.safetensors") for rank in range(TP)]
    return {
        f"w{i}": sha256(torch.cat([rank[f"w{i}"].torch() for rank in ranks], dim=1)) for i in range(TENSORS)
    }


def start(big: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    return spawn("merge", big, out, "--threads", "1", "--fsync", "none", "--json", *options)


def wait_until_writing(process: subprocess.Popen[str], folder: Path) -> None:
    """Waits for the staged files of a run."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(p.is_file() and p.suffix == ".safetensors" for p in folder.rglob("*")):
            return
        assert process.poll() is None, f"the run ended before it could be stopped: {process.communicate()}"
        time.sleep(0.001)
    raise AssertionError("nothing was ever written")


def complete(big: Path, out: Path, expected: dict[str, str]) -> None:
    process = start(big, out, "--resume")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stdout + stderr
    assert {name: sha256(t) for name, t in read_result(out).items()} == expected
    assert [p.name for p in out.parent.iterdir()] == [out.name], "something of the interrupted run was left"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_soon_and_resume_completes(
    number: signal.Signals, big: Path, place: Path, expected: dict[str, str]
) -> None:
    out = place / "out"
    process = start(big, out)
    wait_until_writing(process, place)
    begin = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begin < 2
    assert process.returncode == 128 + number, stdout + stderr
    document = json.loads(stdout)
    assert (document["exit_code"], document["published"]) == (128 + number, False)
    assert [f["code"] for f in document["findings"]] == ["FS510"]
    (staging,) = place.glob(".out.fastshard-*")
    assert "--resume" in document["findings"][0]["help"] and str(staging) in document["findings"][0]["help"]
    assert "Traceback" not in stderr
    assert not out.exists()
    complete(big, out, expected)


def test_resumed_run_has_statistics_of_all_it_wrote(big: Path, place: Path, expected: dict[str, str]) -> None:
    out = place / "out"
    process = start(big, out)
    wait_until_writing(process, place)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert not out.exists()
    stdout, stderr = start(big, out, "--resume", "--stats").communicate(timeout=120)
    tensors = json.loads((out / "fastshard.manifest.json").read_text())["tensors"]
    assert len(tensors) == TENSORS, stdout + stderr
    assert {name: sha256(t) for name, t in read_result(out).items()} == expected
    for tensor in tensors:
        assert tensor["stats"]["count"] == TP * ROWS * COLUMNS
        # Ranks hold the same normal numbers around 0, 10, 20 and 30, plus the tensor's own number.
        assert tensor["stats"]["mean"] == pytest.approx(15 + int(tensor["name"][1:]), abs=0.01)


def test_killed_run_is_resumed(big: Path, place: Path, expected: dict[str, str]) -> None:
    out = place / "out"
    process = start(big, out)
    wait_until_writing(process, place)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    complete(big, out, expected)


def test_leftover_of_a_killed_run_is_said_without_resume(big: Path, place: Path) -> None:
    out = place / "out"
    process = start(big, out)
    wait_until_writing(process, place)
    process.kill()
    process.communicate()
    again = start(big, out)
    stdout, _ = again.communicate(timeout=60)
    assert again.returncode == 2
    assert "FS508" in stdout and "--resume" in stdout
    assert not out.exists()


def test_second_run_does_not_disturb_the_first(big: Path, place: Path, expected: dict[str, str]) -> None:
    out = place / "out"
    first = start(big, out)
    wait_until_writing(first, place)
    second = start(big, out, "--resume")
    stdout, _ = second.communicate(timeout=120)
    if second.returncode:
        assert second.returncode == 2
        assert json.loads(stdout)["findings"][0]["code"] in ("FS509", "FS504", "FS516")
    assert first.wait(timeout=120) == 0
    first.communicate()
    assert {name: sha256(t) for name, t in read_result(out).items()} == expected


def test_resume_with_a_source_changed_since_takes_nothing_stale(big: Path, place: Path) -> None:
    ckpt, out = place / "ckpt", place / "results/out"
    shutil.copytree(big, ckpt)
    out.parent.mkdir()
    reached: list[int] = []

    def stop(done: int, total: int) -> None:
        if 0 < done < total:
            reached.append(done)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fastshard.merge(ckpt, out, threads=1, fsync=False, memory="2GiB", progress=stop)
    assert reached and not out.exists()
    # Same names, shapes and sizes: only the bytes and the time differ.
    changed = {f"w{i}": torch.full((ROWS, COLUMNS), float(i)) for i in range(TENSORS)}
    for rank in range(TP):
        save_file(
            {k: v + 10 * rank + torch.arange(COLUMNS) for k, v in changed.items()},
            ckpt / f"tp_rank_{rank:02d}.safetensors",
        )
    process = start(ckpt, out, "--resume")
    stdout, stderr = process.communicate(timeout=120)
    if process.returncode:
        assert process.returncode in (1, 2), stdout + stderr
        assert not out.exists()
        return
    result = read_result(out)
    for i in range(TENSORS):
        want = torch.cat([changed[f"w{i}"] + 10 * rank + torch.arange(COLUMNS) for rank in range(TP)], dim=1)
        assert torch.equal(result[f"w{i}"], want), "parts of the old source were kept"


def test_source_that_changes_while_it_is_read_is_refused(big: Path, place: Path) -> None:
    ckpt = place / "ckpt"
    shutil.copytree(big, ckpt)
    file = ckpt / "tp_rank_03.safetensors"
    calls = []

    def append(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == 1:
            with file.open("ab") as handle:
                handle.write(b"more")

    with pytest.raises(fastshard.ProblemError) as caught:
        fastshard.merge(ckpt, place / "out", threads=1, fsync=False, memory="2GiB", progress=append)
    assert calls
    assert caught.value.code == "FS506"
    assert caught.value.path and "tp_rank_03.safetensors" in caught.value.path
    assert sorted(p.name for p in place.iterdir() if "fastshard" not in p.name) == ["ckpt"]


def test_progress_is_called_and_ends_with_everything(big: Path, place: Path) -> None:
    calls: list[tuple[int, int]] = []
    fastshard.merge(big, place / "out", fsync=False, memory="2GiB", progress=lambda *step: calls.append(step))
    done = [d for d, _ in calls]
    assert done == sorted(done) and len(calls) > 1
    assert calls[-1][0] == calls[-1][1] >= TP * TENSORS * ROWS * COLUMNS * 4


def test_callback_that_raises_stops_the_run(big: Path, place: Path) -> None:
    before = state_of(big)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fastshard.merge(big, place / "out", threads=1, fsync=False, memory="2GiB", progress=fail)
    assert not (place / "out").exists()
    assert state_of(big) == before
