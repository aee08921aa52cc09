"""Where results go, and what may not be overwritten, filled up or changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fastshard
import pytest
from helpers import HF, NEOX, TP4, assert_refused, cli, copy, in_a_mount, read_result, state_of
from holding import HANG


def test_destination_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert_refused(TP4, tmp_path / "out", "FS504", exit=2)
    assert (tmp_path / "out").read_text() == "mine"


def test_destination_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    assert_refused(TP4, tmp_path / "out", "FS504", exit=2)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_destination_that_is_empty(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert cli("merge", TP4, tmp_path / "out").code == 0
    assert len(read_result(tmp_path / "out")) == 21


def test_overwrite_replaces_all_of_an_older_result(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("merge", HF, out, "--max-shard-size", "100KB").code == 0
    old = {p.name for p in out.iterdir()}
    assert_refused(TP4, out, "FS504", exit=2)
    assert cli("merge", TP4, out, "--overwrite").code == 0
    assert len(read_result(out)) == 21
    assert len(list(out.glob("*.safetensors"))) == 1 < len(old)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"], (
        "the old result or a staging folder was left"
    )


def test_refused_run_with_overwrite_keeps_the_older_result(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("merge", TP4, out).code == 0
    before = state_of(out)
    bad = copy(TP4, tmp_path / "bad")
    (bad / "tp_rank_01.safetensors").unlink()
    assert cli("merge", bad, out, "--overwrite").code == 3
    assert state_of(out) == before


@pytest.mark.parametrize("place", ["ckpt", "ckpt/out", "ckpt/global_step4/out", "link/out"])
def test_destination_inside_the_source(place: str, tmp_path: Path) -> None:
    copy(NEOX, tmp_path / "ckpt")
    (tmp_path / "link").symlink_to("ckpt")
    before = state_of(tmp_path / "ckpt")
    for options in ((), ("--overwrite",)):
        ran = cli("merge", tmp_path / "ckpt", tmp_path / place, *options)
        assert ran.code == 2
        assert ran.having("FS505") or ran.having("FS504")
    assert ran.having("FS505")
    assert state_of(tmp_path / "ckpt") == before


@pytest.mark.parametrize("linked", [False, True])
def test_source_inside_the_destination(linked: bool, tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "out/deep/ckpt")
    out = tmp_path / "out"
    if linked:
        out = tmp_path / "link"
        out.symlink_to("out")
    before = state_of(tmp_path / "out")
    ran = cli("merge", ckpt, out, "--overwrite")
    assert ran.code == 2 and ran.having("FS505")
    assert state_of(tmp_path / "out") == before


def test_destination_beside_a_single_source_file(tmp_path: Path) -> None:
    copy(HF, tmp_path / "ckpt")
    words = tmp_path / "ckpt/model-00001-of-00004.safetensors", "--accept", "part"
    assert cli("merge", words[0], tmp_path / "ckpt/out", *words[1:]).code == 0
    before = state_of(tmp_path / "ckpt")
    ran = cli("merge", words[0], tmp_path / "ckpt", "--overwrite", *words[1:])
    assert ran.code == 2 and ran.having("FS505")
    assert state_of(tmp_path / "ckpt") == before


def test_destination_whose_parent_does_not_exist(tmp_path: Path) -> None:
    ran = cli("merge", TP4, tmp_path / "a/b/out")
    assert ran.code in (0, 2)
    assert (tmp_path / "a").exists() == (ran.code == 0)


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    """A folder to mount on."""
    probe = in_a_mount('mount -t tmpfs none "$1"', tmp_path)
    if probe.returncode:
        pytest.skip(f"this system lets nobody mount: {probe.stderr.strip()}")
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_too_little_space_is_said_before_a_byte_is_written(mounts: Path) -> None:
    done = in_a_mount(
        'mount -t tmpfs -o size=200k none "$1"; "$PYTHON" -m fastshard merge "$2" "$1/out" --json && exit 99 '
        "|| c=$?; "
        'ls -A "$1" >&2; exit $c',
        mounts,
        HF,
    )
    assert done.returncode == 2, done
    assert '"FS503"' in done.stdout and done.stderr == ""


def test_too_few_inodes_are_said_before_a_byte_is_written(mounts: Path) -> None:
    done = in_a_mount(
        'mount -t tmpfs -o nr_inodes=4 none "$1"; "$PYTHON" -m fastshard merge "$2" "$1/out" --json && exit '
        "99 || c=$?; "
        'ls -A "$1" >&2; exit $c',
        mounts,
        TP4,
    )
    assert done.returncode == 2, done
    assert '"FS503"' in done.stdout and done.stderr == ""


def test_destination_that_may_not_be_written(mounts: Path) -> None:
    done = in_a_mount(
        'mount -t tmpfs none "$1"; mount -o remount,ro "$1"; "$PYTHON" -m fastshard merge "$2" "$1/out" '
        "--json",
        mounts,
        TP4,
    )
    assert done.returncode == 2, done
    assert '"FS502"' in done.stdout and "Traceback" not in done.stderr


def test_source_that_may_not_be_written_is_enough(mounts: Path, tmp_path: Path) -> None:
    done = in_a_mount(
        'cp -r "$2" "$1/ckpt"; mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"; '
        '"$PYTHON" -m fastshard merge "$1/ckpt" "$3" && "$PYTHON" -m fastshard verify "$1/ckpt"',
        mounts,
        TP4,
        tmp_path / "out",
    )
    assert done.returncode == 0, done
    assert len(read_result(tmp_path / "out")) == 21


def test_manifest_into_a_place_that_may_not_be_written(mounts: Path) -> None:
    done = in_a_mount(
        'mount -t tmpfs none "$1"; cp -r "$2" "$1/ckpt"; mount -o remount,ro "$1"; '
        '"$PYTHON" -m fastshard manifest "$1/ckpt" --json',
        mounts,
        TP4,
    )
    assert done.returncode == 2, done
    assert '"FS502"' in done.stdout and "Traceback" not in done.stderr


def test_file_size_limit_is_an_error_and_publishes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "sh",
            "-c",
            'ulimit -f 64; exec "$0" -m fastshard merge "$1" "$2" --json',
            sys.executable,
            HF,
            tmp_path / "out",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert not (tmp_path / "out").exists()


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        fastshard.merge(TP4, tmp_path / "out", memory="2GiB")
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o640}
