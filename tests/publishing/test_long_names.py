"""Names that take more memory than their tensors: the default budget grows with the plan, a stated one
holds."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import fastshard
import pytest
from holding import HANG

COUNT, LENGTH = 6000, 5000
#: Prints the exit code, and what the process held at most beyond what it began with, in MiB: the peak of
#: resident memory that the kernel keeps, without the pages of its own code that were read meanwhile. All of
#: fastshard is imported before: which modules a command loads is not what is asked.
MEASURED = """
import contextlib, importlib, json, pkgutil, sys
from pathlib import Path
import fastshard
from fastshard.cli import main

for module in pkgutil.walk_packages(fastshard.__path__, "fastshard."):
    if not module.name.endswith((".__main__", "integrations.transformers", "integrations.lightning")):
        # What needs an extra that is not installed.
        with contextlib.suppress(ImportError, fastshard.FastshardError):
            importlib.import_module(module.name)

def held(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024

# Sets the peak back to what is held now.
Path("/proc/self/clear_refs").write_text("5")
begun, code_pages = held("VmRSS"), held("RssFile")
code = main(sys.argv[1:])
print(json.dumps([code, held("VmHWM") - begun - (held("RssFile") - code_pages)]), file=sys.stderr)
"""


def measured(*argv: str) -> tuple[int, float, str]:
    """Runs a command in a process of its own: its exit code, the MiB that it held at most beyond what it
    began with, and what it said."""
    command = [sys.executable, "-c", MEASURED, *argv]
    run = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    code, beyond = json.loads(run.stderr.splitlines()[-1])
    return code, beyond, run.stdout + run.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 MB of names."""
    names = [f"{i:05d}" + "x" * (LENGTH - 5) for i in range(COUNT)]
    entries = {
        n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)
    }
    header = json.dumps(entries).encode()
    folder = tmp_path_factory.mktemp("names")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(struct.pack(f"<{COUNT}f", *range(COUNT)))
    return folder


def test_default_budget_grows_with_what_the_plan_takes(source: Path, tmp_path: Path) -> None:
    merged = fastshard.merge(source, tmp_path / "out", fsync=False)
    assert len(merged.document["tensors"]) == COUNT


COMMANDS = {
    "merge": ["merge", "CKPT", "OUT"],
    "convert": ["convert", "CKPT", "OUT", "--to", "dcp"],
    "plan": ["plan", "CKPT"],
    "verify": ["verify", "CKPT"],
    "manifest": ["manifest", "CKPT", "-o", "OUT"],
    "diff": ["diff", "CKPT", "CKPT"],
    "stats": ["stats", "CKPT"],
    "inspect": ["inspect", "CKPT"],
    "ls": ["ls", "CKPT"],
    "trace": ["trace", "CKPT", "00000"],
    "report": ["report", "CKPT", "-o", "OUT"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_budget_that_the_names_exceed_is_refused_before_it_is_used(
    command: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = [{"CKPT": str(source), "OUT": str(out)}.get(word, word) for word in COMMANDS[command]]
    code, beyond, said = measured(*argv, "--memory", "64MiB")
    assert code == 2 and "FS512" in said and "at least" in said
    assert "allow more memory" in said and "--memory 256MiB" in said
    # Nothing of the names was read yet.
    assert beyond < 16
    assert not out.exists()


@pytest.mark.parametrize("memory", [72, 100, 160, 240, 400])
def test_what_is_held_meanwhile_is_within_the_budget_or_little_more(
    memory: int, source: Path, tmp_path: Path
) -> None:
    argv = ["merge", str(source), str(tmp_path / "out"), "--memory", f"{memory}MiB"]
    code, beyond, said = measured(*argv)
    refused = code == 2 and "FS512" in said
    assert refused or code == 0
    assert refused != (tmp_path / "out").exists()
    assert beyond < memory * 1.25


def test_tensors_of_many_files_are_refused_before_they_are_kept(tmp_path: Path) -> None:
    """600,000 tensors of ten files, of which the plan alone takes a multiple of the budget; the finding
    counts them all."""
    for f in range(10):
        entries = ",".join(
            f'"layers.{f}.experts.{i}.weight":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}'
            for i in range(60_000)
        )
        header = f"{{{entries}}}".encode()
        file = tmp_path / f"model-{f + 1:05d}-of-00010.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(60_000))
    code, beyond, output = measured("inspect", str(tmp_path), "--memory", "256MiB")
    (least,) = re.findall("at least ([0-9]+) MiB", output)
    assert code == 2 and "FS512" in output and int(least) > 420
    assert beyond < 150


#: Bytes that each name takes at most while it is opened, resolved and planned: half as much again as was
#: measured.
BYTES_PER_NAME = 1400


def test_each_of_very_many_names_takes_few_bytes_of_a_plan(tmp_path: Path) -> None:
    """The difference of two processes counts names alone, whatever fastshard and Python take besides."""
    peaks = []
    for count in (1000, 101_000):
        entries = ",".join(
            f'"t{i:07d}":{{"dtype":"F32","shape":[1],"data_offsets":[{4 * i},{4 * i + 4}]}}'
            for i in range(count)
        )
        header = f"{{{entries}}}".encode()
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * count))
        code, beyond, _ = measured("plan", str(folder))
        assert code == 0
        peaks.append(beyond)
    assert (peaks[1] - peaks[0]) * 2**20 / 100_000 < BYTES_PER_NAME


@pytest.mark.parametrize("command", ["inspect", "verify", "merge"])
def test_a_model_of_very_many_tensors_is_planned_within_the_budget_or_refused(
    command: str, tmp_path: Path
) -> None:
    """100,000 tensors, as a mixture of experts has: what planning takes of each is asked for, not of its name
    alone."""
    entries = ",".join(
        f'"model.layers.{i // 1000}.mlp.experts.{i % 1000}.weight":'
        f'{{"dtype":"U8","shape":[1,1],"data_offsets":[{i},{i + 1}]}}'
        for i in range(100_000)
    )
    header = f"{{{entries}}}".encode()
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(range(256)) * 391
    )
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(8 + len(header) + 100_000)
    argv = [command, str(folder), *([str(tmp_path / "out")] if command == "merge" else [])]
    code, beyond, output = measured(*argv, "--memory", "112MiB")
    assert code == 2 and "FS512" in output
    assert beyond < 112


def in_300_files(folder: Path, each: int) -> Path:
    """So many long names in each file."""
    for f in range(300):
        names = [f"{f:03d}.{i:03d}." + "x" * (LENGTH - 8) for i in range(each)]
        entries = {
            n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)
        }
        header = json.dumps(entries).encode()
        file = folder / f"model-{f + 1:05d}-of-00300.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * len(names)))
    return folder


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 MB of names."""
    return in_300_files(tmp_path_factory.mktemp("files"), 20)


@pytest.fixture(scope="module", params=[20, pytest.param(100, marks=pytest.mark.slow)])
def too_many(
    request: pytest.FixtureRequest, many_files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What a plan would take more of than there is, and more than can be read."""
    return many_files if request.param == 20 else in_300_files(tmp_path_factory.mktemp("more"), request.param)


# What is no model is not converted.
@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "convert"])
def test_names_of_many_files_are_refused_within_the_budget(
    command: str, too_many: Path, tmp_path: Path
) -> None:
    """Each step of planning is refused before it takes more than there is."""
    out = tmp_path / "out"
    argv = [{"CKPT": str(too_many), "OUT": str(out)}.get(word, word) for word in COMMANDS[command]]
    code, beyond, said = measured(*argv, "--memory", "88MiB")
    assert code == 2 and "FS512" in said
    assert beyond < 88
    assert not out.exists()


@pytest.mark.parametrize("command", ["merge", "verify", "plan", "stats", "manifest"])
def test_what_is_done_and_said_of_many_long_names_takes_the_budget_or_little_more(
    command: str, many_files: Path, tmp_path: Path
) -> None:
    argv = [
        {"CKPT": str(many_files), "OUT": str(tmp_path / "out")}.get(word, word) for word in COMMANDS[command]
    ]
    # A budget counts what the process holds already, which is what all installed extras import.
    code, beyond, said = measured(*argv, "--memory", "400MiB")
    assert code == 0, said[-2000:]
    assert beyond < 450


def test_an_open_checkpoint_is_planned_within_the_budget_of_the_call(source: Path, tmp_path: Path) -> None:
    opened = fastshard.open(source)
    with pytest.raises(fastshard.FastshardError, match="FS512") as raised:
        fastshard.merge(opened, tmp_path / "out", memory="64MiB", fsync=False)
    assert "at least" in str(raised.value.expected)
    assert not (tmp_path / "out").exists()
    # It held for that call alone.
    assert len(fastshard.plan(opened).outputs) == COUNT


def test_a_text_beyond_the_budget_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", 64) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(64) + bytes(4)
    )
    index = {"weight_map": {"a": "model.safetensors"}, "metadata": {"note": "x" * (40 << 20)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    argv = ["plan", str(tmp_path), "--memory", "64MiB"]
    code, beyond, said = measured(*argv)
    assert code == 2 and "FS512" in said
    assert "model.safetensors.index.json" in said
    assert beyond < 16


def test_what_is_read_for_a_moment_is_given_back(tmp_path: Path) -> None:
    """Each torch file is searched from its end: 64 KiB that nobody keeps."""
    import torch

    for i in range(1500):
        folder = tmp_path / f"ckpt/global_step4/zero/p{i}"
        folder.mkdir(parents=True)
        torch.save({"param": torch.full((16400,), float(i))}, folder / "fp32.pt")
    argv = ["plan", str(tmp_path / "ckpt"), "--memory", "128MiB"]
    code, beyond, said = measured(*argv)
    assert code == 0, said
    assert beyond < 100


@pytest.mark.parametrize(("command", "most"), [("manifest", 125), ("attest", 134)])
def test_what_is_written_of_many_tensors_is_held_once(command: str, most: int, tmp_path: Path) -> None:
    """A text takes several times its bytes while it is made as a whole, and a document as much again."""
    count = 30_000
    entries = {
        f"t{i:05d}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(count)
    }
    header = json.dumps(entries).encode()
    content = struct.pack("<Q", len(header)) + header + struct.pack(f"<{count}f", *range(count))
    (tmp_path / "model.safetensors").write_bytes(content)
    argv = [command, str(tmp_path)]
    if command == "attest":
        fastshard.manifest(tmp_path)
    code, beyond, said = measured(*argv, "--memory", "1GiB")
    assert code == 0, said
    assert beyond < most
