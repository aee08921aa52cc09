"""--overwrite replaces an older result of fastshard, unedited, and nothing else."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fastshard
import numpy as np
import pytest
from helpers import HF, NEOX, TP4, cli, read_result, spawn, state_of
from holding import HANG, Steps, needs_steps
from safetensors.numpy import save_file

OLDER = {
    "merge": ("merge", HF),
    "hf": ("convert", NEOX, "--to", "hf"),
    "gpt_neox": ("convert", NEOX, "--to", "gpt_neox", "--tp", "2"),
    "tp": ("convert", HF, "--to", "tp-safetensors", "--tp", "2"),
    "dcp": ("convert", HF, "--to", "dcp", "--tp", "2"),
    "orbax": ("convert", HF, "--to", "orbax"),
    "zarr2": ("convert", HF, "--to", "orbax", "--zarr2"),
}


def make(target: str, out: Path) -> None:
    command, source, *options = OLDER[target]
    ran = cli(command, source, out, *options)
    assert ran.code == 0, ran.out


@pytest.mark.parametrize("target", OLDER)
def test_every_published_file_is_in_the_manifest(target: str, tmp_path: Path) -> None:
    make(target, tmp_path / "out")
    document = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    listed = {f["name"]: f for f in document["files"]}
    there = {
        p.relative_to(tmp_path / "out").as_posix(): p for p in (tmp_path / "out").rglob("*") if p.is_file()
    }
    assert set(there) - {"fastshard.manifest.json"} == set(listed)
    for name, file in listed.items():
        assert file["size"] == there[name].stat().st_size
        assert ("blake3" in file) != ("mtime_ns" in file)
        if "mtime_ns" in file:
            assert file["mtime_ns"] == there[name].stat().st_mtime_ns


@pytest.mark.parametrize("target", OLDER)
def test_an_older_result_is_replaced(target: str, tmp_path: Path) -> None:
    make(target, tmp_path / "out")
    ran = cli("merge", TP4, tmp_path / "out", "--overwrite")
    assert ran.code == 0, ran.out
    assert len(read_result(tmp_path / "out")) == 21
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def edit(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\n ")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file": lambda out: (out / "notes.txt").write_text("mine"),
    "a readme": lambda out: (out / "README.md").write_text("mine"),
    "a repository": lambda out: subprocess.run(["git", "init", "-q", out], check=True),
    "a folder": lambda out: (out / "src").mkdir(),
    "a link": lambda out: (out / "link").symlink_to("model.safetensors"),
    "an edited config": lambda out: edit(out / "config.json"),
    "an edited index": lambda out: edit(out / "model.safetensors.index.json"),
    "a shard by another tool": lambda out: save_file({"w": np.zeros(3)}, next(out.glob("*.safetensors"))),
    "a touched large shard": lambda out: os.utime(
        max(out.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    ),
    "no manifest": lambda out: (out / "fastshard.manifest.json").unlink(),
    "an inventory": lambda out: fastshard.manifest(out, memory="2GiB"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_anything_else_is_kept_and_named(what: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    rng = np.random.default_rng(0)
    save_file({f"w{i}": rng.random((300, 300)) for i in range(3)}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "none"}')
    out = tmp_path / "out"
    assert cli("merge", source, out, "--max-shard-size", "1MB").code == 0
    # Untouched it may be replaced; so what follows is due to the change.
    assert cli("merge", source, out, "--max-shard-size", "1MB", "--overwrite").code == 0
    FOREIGN[what](out)
    before = state_of(out)
    ran = cli("merge", source, out, "--max-shard-size", "1MB", "--overwrite")
    assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS504"], ran.out
    assert state_of(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src"]


def test_what_a_reader_leaves_behind_does_not_count(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make("hf", out)
    for leaving in (
        ".cache/huggingface/.gitignore",
        ".gitattributes",
        "__pycache__/modeling.cpython-311.pyc",
    ):
        (out / leaving).parent.mkdir(parents=True, exist_ok=True)
        (out / leaving).write_text("left")
    assert cli("verify", out).code == 0
    assert cli("convert", NEOX, out, "--to", "hf", "--overwrite").code == 0
    assert not (out / ".cache").exists()


def run_in(folder: Path, *argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastshard", *map(str, argv)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("name", [".", "..", "../out"])
def test_the_working_directory_is_never_replaced(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make("merge", out)
    before = state_of(out)
    done = run_in(out, "merge", TP4, name, "--overwrite")
    assert done.returncode == 2 and "FS504" in done.stderr, done
    assert state_of(out) == before


def killed_at(place: str, out: Path, *options: str) -> None:
    """A merge that is killed at a place of its publishing."""
    with Steps(place) as steps:
        process = spawn("merge", TP4, out, *options, env=steps.environment)
        steps.wait(place)
        process.kill()
        process.communicate(timeout=HANG)


@needs_steps
@pytest.mark.parametrize(
    ("place", "version", "words"),
    [
        ("sealed", "newer", "it holds the newer result; {out} is not replaced yet"),
        ("published", "older", "it holds the older result; {out} is the newer result"),
    ],
)
def test_clean_says_which_result_a_killed_run_left(
    place: str, version: str, words: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make("hf", out)
    older = state_of(out)
    killed_at(place, out, "--overwrite")
    text = cli("clean", out, json_output=False).out
    assert words.format(out=out) in text and "run the same command with --resume" in text
    [left] = cli("clean", out).doc["leftovers"]
    [stored] = left["results"]
    assert (left["fate"], stored["version"], stored["complete"]) == ("complete", version, True)
    assert stored["command"] in text
    at_out = state_of(out)
    assert subprocess.run(["sh", "-c", stored["command"]], check=False).returncode == 0
    apart = tmp_path / f"out-{version}"
    assert state_of(out) == at_out
    assert (state_of(out) == older) == (version == "newer")
    assert (state_of(apart) == older) == (version == "older")
    for folder in (out, apart):
        ran = cli("verify", folder)
        assert ran.code == 0, ran.out
    # What is left then is the clean-up of the run, or nothing that anybody can go on with.
    [left] = cli("clean", out, "--abandon", left["run"]).doc["leftovers"]
    assert (left["fate"], left["results"]) == ("removed", [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", f"out-{version}"]


@needs_steps
@pytest.mark.parametrize("place", ["sealed", "published"])
def test_a_killed_run_is_resumed_after_its_older_result_was_looked_at(place: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make("hf", out)
    killed_at(place, out, "--overwrite")
    assert [left["fate"] for left in cli("clean", out).doc["leftovers"]] == ["complete"]
    assert cli("merge", TP4, out, "--overwrite", "--resume").code == 0
    assert len(read_result(out)) == 21
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@needs_steps
def test_a_new_result_that_was_never_published_is_got_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_at("sealed", out)
    text = cli("clean", out, json_output=False).out
    assert f"it holds the newer result; {out} does not exist" in text
    [[stored]] = [left["results"] for left in cli("clean", out).doc["leftovers"]]
    assert stored["command"].endswith(f" {out}")
    assert subprocess.run(["sh", "-c", stored["command"]], check=False).returncode == 0
    assert cli("verify", out).code == 0
    assert "its result is in place" in cli("clean", out, json_output=False).out


@needs_steps
def test_a_part_of_an_older_result_is_not_called_the_result(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make("hf", out)
    killed_at("published", out, "--overwrite")
    [data] = tmp_path.glob(".out.fastshard-*/data")
    next(data.glob("*.safetensors")).unlink()
    assert "it holds a part of the older result" in cli("clean", out, json_output=False).out
    [[stored]] = [left["results"] for left in cli("clean", out).doc["leftovers"]]
    assert (stored["version"], stored["complete"], stored["command"]) == ("older", False, None)


def test_an_empty_working_directory_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    inode = out.stat().st_ino
    assert run_in(out, "merge", TP4, ".").returncode == 0
    assert out.stat().st_ino == inode, "whoever works there sees the result"
    assert len(read_result(out)) == 21
    assert not list(out.glob(".fastshard-*"))


def test_a_home_is_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make("merge", out)
    before = state_of(out)
    done = run_in(tmp_path, "merge", TP4, "out", "--overwrite", HOME=str(out))
    assert done.returncode == 2 and "FS504" in done.stderr, done
    assert state_of(out) == before


def test_a_writer_replaces_its_own_result_only(tmp_path: Path) -> None:
    def write(value: float) -> None:
        with fastshard.Writer(tmp_path / "out", overwrite=True, config={"a": 1}) as writer:
            writer["w"] = np.full((4, 4), value)

    write(1.0)
    write(2.0)
    assert (read_result(tmp_path / "out")["w"] == 2.0).all()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(fastshard.FastshardError, match="mine"):
        write(3.0)
    assert (tmp_path / "out/mine").read_text() == "mine"
    assert (read_result(tmp_path / "out")["w"] == 2.0).all()


def test_a_staging_folder_is_private(tmp_path: Path) -> None:
    modes = []

    def look(done: int, total: int) -> None:
        modes.extend(stat.S_IMODE(p.stat().st_mode) for p in tmp_path.glob(".out.fastshard-*"))

    fastshard.merge(HF, tmp_path / "out", memory="2GiB", progress=look)
    assert set(modes) <= {0o700}
    # The result's own mode is the usual one.
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.skipif(os.geteuid() != 0, reason="a folder of another user takes root to make")
def test_links_that_another_user_planted_are_not_followed(tmp_path: Path) -> None:
    """In a directory where everybody may write, the staging folder's name can be foreseen."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    victim = tmp_path / "victim"
    (victim / "models").mkdir(parents=True)
    (victim / "precious").write_text("precious")
    (victim / "models/model-00001-of-00004.safetensors").write_text("a good model")
    before = state_of(victim)
    planted = shared / f".out.fastshard-{fastshard.plan(HF).digest[:16]}"
    planted.mkdir()
    (planted / "plan").write_text("{}")
    (planted / "journal").symlink_to(victim / "precious")
    (planted / "data").symlink_to(victim / "models")
    for path in (planted, *planted.iterdir()):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    planted.chmod(0o777)
    for options in ((), ("--resume",)):
        ran = cli("merge", HF, shared / "out", *options)
        assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS502"], ran.out
        assert "--resume" not in ran.out
    assert state_of(victim) == before
    assert not (shared / "out").exists()
