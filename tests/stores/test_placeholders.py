"""Checkpoints in a store: each command does what it does on a disk, and reads no more than it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
from fastshard import FastshardError
from fastshard.common import codes
from fastshard.stores.placeholders import count_requests, find_local_paths
from folder_store import FolderStore, find_address, folders_served
from helpers import FIXTURES
from holding import HANG
from safetensors.numpy import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "trials"))

from sources import llama


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    with folders_served():
        yield


def list_checkpoints(fixtures: Path) -> list[Path]:
    kinds = [kind for kind in fixtures.iterdir() if kind.is_dir()]
    return sorted(path for kind in kinds for path in kind.iterdir() if path.is_dir())


def judge(path: str | Path) -> tuple[bool, list[dict[str, Any]]]:
    """Return the verdict and the findings of ``verify``, without the commands that they advise."""
    try:
        verdict = fastshard.verify(path)
    except FastshardError as error:
        return False, describe(error.findings, path)
    return verdict.ok, describe(verdict.findings, path)


def describe(findings: Any, path: str | Path) -> list[dict[str, Any]]:
    names = {str(path): "CKPT", Path(path).name: "CKPT"}
    found = [finding.to_dict() for finding in findings]
    for entry in found:
        for key in ("run", "help"):
            entry.pop(key, None)
        for key, value in entry.items():
            for name, placeholder in names.items():
                if isinstance(value, str):
                    entry[key] = value = value.replace(name, placeholder)
    return found


def test_every_verdict_is_that_of_the_same_files_on_a_disk() -> None:
    checkpoints = list_checkpoints(FIXTURES)
    assert len(checkpoints) > 10
    for checkpoint in checkpoints:
        assert judge(find_address(checkpoint)) == judge(checkpoint), checkpoint.name


def hash_folder(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in files
        if path.suffix == ".safetensors"
    }


@pytest.mark.parametrize(
    "name",
    [
        "sharded/dcp_fsdp2",
        "gpt_neox/llama_gqa_pp_tp2",
        "deepspeed/zero1_bf16_dp2",
        "maxtext_twins/a_mt_f32_scan",
    ],
)
def test_a_result_is_that_of_the_same_files_on_a_disk(name: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / name
    fastshard.merge(checkpoint, tmp_path / "disk")
    fastshard.merge(find_address(checkpoint), tmp_path / "store")
    assert hash_folder(tmp_path / "disk") == hash_folder(tmp_path / "store") != {}


def find_name(rank: int) -> str:
    return f"model-{rank + 1:05d}-of-00002.safetensors"


def save_model(folder: Path, rows: int = 4096) -> Path:
    generator = np.random.default_rng(0)
    folder.mkdir()
    for rank in range(2):
        tensors = {
            f"layers.{layer}.weight": generator.random((rows, 64), dtype=np.float32) for layer in range(4)
        }
        save_file(
            {f"{name}.{rank}": tensor for name, tensor in tensors.items()},
            folder / find_name(rank),
        )
    return folder


def test_headers_are_read_without_the_data(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", rows=16384)
    size = sum(path.stat().st_size for path in folder.iterdir())
    fastshard.inspect(find_address(folder))
    assert 0 < FolderStore.bytes_read <= 2 * (256 << 10) < size // 8


def test_values_are_read_from_the_store(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    checkpoint = fastshard.open(find_address(folder))
    for rank in range(2):
        for name, tensor in load_file(folder / find_name(rank)).items():
            assert np.array_equal(checkpoint[name].numpy(), tensor)
            assert np.array_equal(checkpoint[name][5:9], tensor[5:9])


def test_one_file_has_an_address_too(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    checkpoint = fastshard.open(find_address(folder / find_name(1)))
    assert sorted(checkpoint) == [f"layers.{layer}.weight.1" for layer in range(4)]


def test_a_file_that_is_replaced_meanwhile_gives_no_result(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    checkpoint = fastshard.open(find_address(folder))
    save_file({"layers.0.weight.0": np.zeros((4, 4), np.float32)}, tmp_path / "other")
    (tmp_path / "other").replace(folder / find_name(0))
    with pytest.raises(FastshardError) as caught:
        fastshard.merge(checkpoint, tmp_path / "out")
    assert {finding.code for finding in caught.value.findings} == {codes.SOURCE_CHANGED}
    assert not (tmp_path / "out").exists()
    # Opened anew it is another checkpoint.
    assert fastshard.open(find_address(folder))["layers.0.weight.0"].shape == (4, 4)


def test_the_same_files_have_the_same_placeholders(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    first, second = (find_local_paths([find_address(folder)])[0] for _ in range(2))
    assert first == second
    (folder / "config.json").write_text("{}")
    assert find_local_paths([find_address(folder)])[0] != first


def test_placeholders_are_removed_when_the_process_ends(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (tmp_path / "temporary").mkdir()
    script = (
        "import fastshard, folder_store, os, sys\n"
        "with folder_store.folders_served():\n"
        "    fastshard.inspect(sys.argv[1])\n"
        "    print(len(os.listdir(os.environ['TMPDIR'])))\n"
    )
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path / "temporary"),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    ran = subprocess.run(
        [sys.executable, "-c", script, find_address(folder)], env=environment, capture_output=True, text=True
    )
    assert ran.stdout == "1\n", ran.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_address_of_no_store_is_refused_by_its_scheme() -> None:
    with pytest.raises(FastshardError) as caught:
        fastshard.open("fs9://bucket/run")
    (finding,) = caught.value.findings
    assert finding.code == codes.UNSUPPORTED and finding.file == "fs9://bucket/run"


def test_a_folder_that_the_store_does_not_have_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as caught:
        fastshard.verify(find_address(tmp_path / "nothing"))
    assert [finding.code for finding in caught.value.findings] == [codes.NO_SUCH_PATH]


def test_a_manifest_names_the_store(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    fastshard.merge(find_address(folder), tmp_path / "out")
    document = json.loads((tmp_path / "out" / "fastshard.manifest.json").read_text())
    assert document["values"]["stores"] == [{"address": find_address(folder), "revision": None}]
    assert str(tempfile.gettempdir()) not in json.dumps(document).replace(find_address(folder), "")


def test_another_content_of_the_same_size_and_time_is_another_plan(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    plans = []
    for _ in range(2):
        plans.append(fastshard.plan(find_address(folder)).digest)
        file = folder / find_name(0)
        content, time = bytearray(file.read_bytes()), file.stat().st_mtime_ns
        content[-1] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(time + 1, time + 1))
    assert plans[0] != plans[1]


def test_a_forked_process_reads_what_its_parent_had_under_way(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", rows=1 << 17)
    script = (
        "import fastshard, folder_store, os, sys\n"
        "with folder_store.folders_served():\n"
        "    checkpoint = fastshard.open(sys.argv[1])\n"
        "    names = sorted(checkpoint)\n"
        "    first = checkpoint[names[0]].numpy().sum()\n"
        "    child = os.fork()\n"
        "    sums = [checkpoint[name].numpy().sum() for name in names]\n"
        "    assert sums[0] == first\n"
        "    if child:\n"
        "        assert os.waitpid(child, 0)[1] == 0\n"
        "        print('read by both')\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(fastshard.__file__).parents[1])])
    ran = subprocess.run(
        [sys.executable, "-c", script, find_address(folder)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert ran.stdout == "read by both\n", ran.stderr


def test_a_merge_from_a_store_stays_within_its_memory(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", rows=1 << 18)
    script = (
        "import fastshard, folder_store, sys, threading\n"
        "from pathlib import Path\n"
        "peak, ended = 0, threading.Event()\n"
        "def look():\n"
        "    global peak\n"
        "    while not ended.wait(0.002):\n"
        "        rows = [r for r in open('/proc/self/status') if r.startswith('RssAnon')]\n"
        "        peak = max(peak, int(rows[0].split()[1]))\n"
        "thread = threading.Thread(target=look)\n"
        "thread.start()\n"
        "with folder_store.folders_served():\n"
        "    fastshard.merge(sys.argv[1], sys.argv[2], memory='128MiB')\n"
        "ended.set()\n"
        "thread.join()\n"
        "print(peak >> 10)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(fastshard.__file__).parents[1])])
    ran = subprocess.run(
        [sys.executable, "-c", script, find_address(folder), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert ran.returncode == 0, ran.stderr
    assert 0 < int(ran.stdout) <= 128


def test_what_a_conversion_reads_is_requested_once_and_in_long_ranges(tmp_path: Path) -> None:
    source = llama(tmp_path / "llama", FIXTURES, 0, hidden=1024, ffn=2816, layers=2, vocab=4000)
    ranks, disk, out = tmp_path / "ranks", tmp_path / "disk", tmp_path / "out"
    fastshard.convert(source, ranks, to="megatron:legacy", tp=2, fsync=False)
    # With a manifest everything would be read once more.
    (ranks / "fastshard.manifest.json").unlink()
    size = sum(path.stat().st_size for path in ranks.rglob("*.pt"))
    fastshard.convert(ranks, disk, to="hf", fsync=False)
    requests, nbytes = count_requests()
    fastshard.convert(find_address(ranks), out, to="hf", fsync=False, threads=2)
    requests, nbytes = count_requests()[0] - requests, count_requests()[1] - nbytes
    assert nbytes <= size + (4 << 20)
    # 64 MB by 8 MiB at most from both files, and the local headers of their archives.
    assert requests < 60
    for path in sorted(disk.glob("*.safetensors")):
        assert (out / path.name).read_bytes() == path.read_bytes()
