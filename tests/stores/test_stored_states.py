"""States of files in stores: for a run that is continued, and for a process that was forked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fastshard
import numpy as np
import pytest
from fastshard import FastshardError
from fastshard.common import codes
from fastshard.stores.placeholders import find_local_paths
from fastshard.stores.store import StoredFile
from folder_store import FolderStore, find_address, folders_served
from safetensors.numpy import load_file, save_file


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    with folders_served():
        yield


def save_constant(folder: Path, value: float) -> None:
    for rank in range(2):
        tensors = {f"{rank}.{layer}": np.full(1 << 19, value, np.float32) for layer in range(8)}
        save_file(tensors, folder / f"model-{rank + 1:05d}-of-00002.safetensors")


def read_file(self: FolderStore, file: StoredFile, offset: int, buffer: memoryview) -> None:
    with (self.base / file.path).open("rb") as opened:
        opened.seek(offset)
        assert opened.readinto(buffer) == len(buffer)


@pytest.mark.parametrize("time", [0, 1_700_000_000_000_000_000], ids=["no times", "the same second"])
def test_a_run_is_not_continued_with_other_content_of_the_same_size(
    time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    save_constant(folder, 1.0)
    real = FolderStore._describe
    state, requests = "first", 0

    def describe(self: FolderStore, path: Path) -> StoredFile:
        found = real(self, path)
        return StoredFile(found.path, found.size, state, time)

    def fail_late(self: FolderStore, file: StoredFile, offset: int, buffer: memoryview) -> None:
        nonlocal requests
        requests += len(buffer)
        if requests > 24 << 20:
            raise FastshardError.of(codes.IO, "the network is gone", file=file.path)
        read_file(self, file, offset, buffer)

    monkeypatch.setattr(FolderStore, "_describe", describe)
    monkeypatch.setattr(FolderStore, "read_into", fail_late)
    with pytest.raises(FastshardError):
        fastshard.merge(find_address(folder), out, threads=1)
    save_constant(folder, 2.0)
    state = "second"
    monkeypatch.setattr(FolderStore, "read_into", read_file)
    fastshard.merge(find_address(folder), out, threads=1, resume=True)
    values = [tensor for path in out.glob("*.safetensors") for tensor in load_file(path).values()]
    assert len(values) == 16 and all((tensor == 2.0).all() for tensor in values)


@pytest.mark.parametrize("time", [0, 1_700_000_000_000_000_000])
def test_a_placeholder_has_another_time_for_other_content(
    time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    times = []
    for state in ("first", "second", "first"):
        file = StoredFile("config.json", 2, state, time)
        monkeypatch.setattr(FolderStore, "_describe", lambda self, path, file=file: file)
        ((path,), _) = find_local_paths([find_address(tmp_path / "model")])
        times.append((Path(path) / "config.json").stat().st_mtime_ns)
    assert times[0] == times[2] != times[1]
    assert all(one // 1_000_000_000 == time // 1_000_000_000 for one in times if time)


def test_a_forked_process_leaves_the_placeholders_of_its_parent(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_constant(folder, 1.0)
    (tmp_path / "temporary").mkdir()
    script = (
        "import fastshard, folder_store, os, sys\n"
        "with folder_store.folders_served():\n"
        "    checkpoint = fastshard.open(sys.argv[1])\n"
        "    checkpoint['0.0'].numpy()\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        sys.exit(7)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "    print(fastshard.open(sys.argv[1])['1.7'].numpy()[-1])\n"
    )
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path / "temporary"),
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))),
    }
    ran = subprocess.run(
        [sys.executable, "-c", script, find_address(folder)], env=environment, capture_output=True, text=True
    )
    assert (ran.stdout, ran.stderr) == ("7\n1.0\n", "")
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_error_of_a_reader_names_the_file_and_quotes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_constant(folder, 1.0)
    checkpoint = fastshard.open(find_address(folder))

    def fail(*_: object) -> None:
        raise TypeError("https://host/file?signature=SECRET")

    monkeypatch.setattr(FolderStore, "read_into", fail)
    with pytest.raises(FastshardError) as caught:
        fastshard.merge(checkpoint, tmp_path / "out")
    (finding,) = caught.value.findings
    assert finding.code == codes.IO and "TypeError" in finding.message
    assert finding.file is not None and finding.file.startswith("model-0000")
    assert "SECRET" not in str(caught.value)
