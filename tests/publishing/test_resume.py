"""What --resume keeps of an interrupted run is what that run wrote; the rest is made as if it had never
been."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fastshard
import numpy as np
import pytest
from fastshard.conversion.distributed import split_runs
from helpers import cli, in_a_mount, read_result
from holding import HANG
from safetensors.numpy import save_file

TENSORS = 16


@pytest.fixture(scope="module")
def big() -> Iterator[Path]:
    """256 MiB: long enough to be stopped in its midst. In memory where the system has such a place."""
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="fastshard-test-") as folder:
        base = np.random.default_rng(1).standard_normal((4096, 1024)).astype("f4")
        save_file({f"w{i}": base + i for i in range(TENSORS)}, Path(folder) / "model.safetensors")
        yield Path(folder)


@pytest.fixture
def place(big: Path) -> Iterator[Path]:
    """A folder beside it."""
    with tempfile.TemporaryDirectory(dir=big.parent, prefix="fastshard-test-") as folder:
        yield Path(folder)


@pytest.fixture
def source(big: Path, place: Path) -> Path:
    folder = place / "src"
    folder.mkdir()
    os.link(big / "model.safetensors", folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer.json").write_text('{"old": "tokenizer"}')
    return folder


def interrupted(source: Path, out: Path) -> Path:
    """The data folder of a run that was stopped in its midst."""

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fastshard.merge(source, out, threads=1, fsync=False, memory="2GiB", progress=stop)
    (folder,) = out.parent.glob(f".{out.name}.fastshard-*")
    assert (folder / "journal").stat().st_size > 100, "tiles are journalled"
    return folder / "data"


def zeros(data: Path) -> None:
    """Lost, and made anew at its full size by a run that was killed."""
    file = data / "model.safetensors"
    size = file.stat().st_size
    file.unlink()
    with file.open("wb") as made:
        made.truncate(size)


def one_byte(data: Path) -> None:
    with (data / "model.safetensors").open("r+b") as file:
        file.seek(4096 + 77)
        (byte,) = file.read(1)
        file.seek(4096 + 77)
        file.write(bytes([byte ^ 1]))


def shorter(data: Path) -> None:
    with (data / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 20)


CHANGES: list[Callable[[Path], None]] = [
    zeros,
    one_byte,
    shorter,
    lambda data: (data / "model.safetensors").unlink(),
    lambda data: None,
]


@pytest.mark.parametrize("change", CHANGES, ids=["zeros", "one byte", "shorter", "gone", "as it was"])
def test_data_that_is_not_what_was_written_is_made_again(
    change: Callable[[Path], None], source: Path, place: Path
) -> None:
    out = place / "out"
    change(interrupted(source, out))
    fastshard.merge(source, out, resume=True, memory="2GiB")
    want = read_result(source)
    assert all((tensor == want[name]).all() for name, tensor in read_result(out).items())
    assert cli("verify", out).code == 0


def test_a_file_lost_twice(source: Path, place: Path) -> None:
    """The record of a tile must not outlive the file that it speaks of, whichever run made it anew."""
    out = place / "out"
    zeros(interrupted(source, out))
    shorter(interrupted_again(source, out))
    fastshard.merge(source, out, resume=True, memory="2GiB")
    want = read_result(source)
    assert all((tensor == want[name]).all() for name, tensor in read_result(out).items())


def interrupted_again(source: Path, out: Path) -> Path:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fastshard.merge(source, out, threads=1, fsync=False, memory="2GiB", resume=True, progress=stop)
    (folder,) = out.parent.glob(f".{out.name}.fastshard-*")
    return folder / "data"


def test_what_this_run_does_not_write_is_not_published(source: Path, place: Path) -> None:
    out = place / "out"
    data = interrupted(source, out)
    (data / "tokenizer.json").write_text("of the interrupted run")
    (data / "model-00009-of-00009.safetensors").write_text("of another")
    (data / "deep/er").mkdir(parents=True)
    (data / "deep/er/file").write_text("left")
    (source / "tokenizer.json").unlink()
    fastshard.merge(source, out, resume=True, memory="2GiB")
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "fastshard.manifest.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("now", ["gone", "changed", "added", "same"])
def test_companions_are_those_of_the_command_that_publishes(now: str, source: Path, place: Path) -> None:
    """A run that was complete but could not publish is finished with the files that are there now."""
    out = place / "out"

    def in_the_way(done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "mine").write_text("mine")

    with pytest.raises(fastshard.FastshardError) as caught:
        fastshard.merge(source, out, threads=1, fsync=False, memory="2GiB", progress=in_the_way)
    assert caught.value.code == "FS516"
    (out / "mine").unlink()
    out.rmdir()
    expected = {"tokenizer.json": '{"old": "tokenizer"}', "config.json": '{"model_type": "none"}'}
    if now == "gone":
        (source / "tokenizer.json").unlink()
        del expected["tokenizer.json"]
    elif now == "changed":
        expected["tokenizer.json"] = '{"new": "tokenizer"}'
        (source / "tokenizer.json").write_text(expected["tokenizer.json"])
    elif now == "added":
        expected["generation_config.json"] = "{}"
        (source / "generation_config.json").write_text("{}")
    fastshard.merge(source, out, resume=True, memory="2GiB")
    texts = {p.name: p.read_text() for p in out.glob("*.json") if p.name != "fastshard.manifest.json"}
    assert texts == expected
    assert cli("verify", out).code == 0
    assert sorted(p.name for p in place.iterdir()) == ["out", "src"]


def test_a_full_disk_keeps_what_is_written(source: Path, place: Path) -> None:
    disk = place / "disk"
    disk.mkdir()
    script = """
        mount -t tmpfs -o size=100m none "$1"
        "$PYTHON" -m fastshard merge "$2" "$1/out" --threads 1 --sparse && exit 99 || [ $? = 2 ]
        test ! -e "$1/out"; ls -i "$1"/.out.fastshard-*/data/model.safetensors >&2
        mount -o remount,size=400m "$1"
        "$PYTHON" -m fastshard merge "$2" "$1/out" --threads 1 --sparse --resume
        ls -i "$1/out/model.safetensors" >&2
        "$PYTHON" -m fastshard verify "$1/out"; "$PYTHON" -m fastshard diff "$1/out" "$2"; ls -A "$1" >&2
    """
    done = in_a_mount(script, disk, source)
    if "mount" in done.stderr and "permission denied" in done.stderr.lower():
        pytest.skip(f"this system lets nobody mount: {done.stderr.strip()}")
    assert done.returncode == 0, done
    assert "FS503" in done.stderr and " --resume\n" in done.stderr
    before, after = (
        line.split()[0] for line in done.stderr.splitlines() if line.endswith("/model.safetensors")
    )
    assert before == after, "it was continued, not begun anew"
    assert done.stderr.splitlines()[-1] == "out"


def test_an_error_before_anything_is_written_leaves_nothing(source: Path, place: Path) -> None:
    out = place / "out"
    script = 'ulimit -f 16; exec "$0" -m fastshard merge "$1" "$2"'
    failed = subprocess.run(
        ["sh", "-c", script, sys.executable, str(source), str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert failed.returncode == 2, failed
    assert sorted(p.name for p in place.iterdir()) == ["src"]


def test_a_file_that_comes_during_the_run_is_not_lost(source: Path, place: Path) -> None:
    out = place / "out"
    fastshard.merge(source, out, fsync=False, memory="2GiB")
    calls = []

    def write(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 1:
            (out / "meanwhile.txt").write_text("precious")

    with pytest.raises(fastshard.FastshardError) as caught:
        fastshard.merge(source, out, overwrite=True, threads=1, fsync=False, memory="2GiB", progress=write)
    assert caught.value.code == "FS516" and "meanwhile.txt" in str(caught.value)
    assert (out / "meanwhile.txt").read_text() == "precious"
    assert cli("verify", out).having("FS108", file="meanwhile.txt", severity="warning")
    (out / "meanwhile.txt").unlink()
    fastshard.merge(source, out, overwrite=True, resume=True, fsync=False, memory="2GiB")
    assert sorted(p.name for p in place.iterdir()) == ["out", "src"]


def test_a_hard_link_in_the_staging_folder_is_not_written_through(source: Path, place: Path) -> None:
    """As backups by `cp -al` make them, and whoever puts a file of the same name there."""
    out, mine = place / "out", place / "mine"
    mine.write_text("mine")
    staged = interrupted(source, out) / "model.safetensors"
    staged.unlink()
    os.link(mine, staged)
    fastshard.merge(source, out, resume=True, memory="2GiB")
    assert (mine.read_text(), mine.stat().st_nlink) == ("mine", 1)
    want = read_result(source)
    assert all((tensor == want[name]).all() for name, tensor in read_result(out).items())


def test_a_backup_of_hard_links_stays_as_it_was(source: Path, place: Path) -> None:
    out, backup = place / "out", place / "backup"
    folder = interrupted(source, out).parent
    subprocess.run(["cp", "-al", folder, backup], check=True)
    before = {p: p.read_bytes() for p in sorted(backup.rglob("*")) if p.is_file()}
    fastshard.merge(source, out, resume=True, memory="2GiB")
    assert {p: p.read_bytes() for p in sorted(backup.rglob("*")) if p.is_file()} == before
    assert all(p.stat().st_nlink == 1 for p in out.iterdir())


@pytest.mark.parametrize("size", ["as it was", "other"])
def test_a_hard_link_among_the_files_of_parts(size: str, place: Path) -> None:
    ckpt, out, mine = place / "ckpt", place / "out", place / "mine"
    ckpt.mkdir()
    save_file({"w": np.ones((64, 64), "f4")}, ckpt / "model.safetensors")
    run = split_runs.split(ckpt, out, None, parts=1)
    (staged,) = out.parent.glob(".out.fastshard-*/data*/model.safetensors")
    content = b"mine" if size == "other" else b"m" * staged.stat().st_size
    mine.write_bytes(content)
    staged.unlink()
    os.link(mine, staged)
    # Others may have it open: this process cannot make it anew.
    with pytest.raises(fastshard.FastshardError):
        split_runs.make_part(out, 0, run.id)
    assert mine.read_bytes() == content
    fastshard.merge(ckpt, out, resume=True)
    assert (mine.read_bytes(), mine.stat().st_nlink) == (content, 1)
    assert (read_result(out)["w"] == 1).all() and cli("verify", out).code == 0
