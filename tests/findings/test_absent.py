"""A piece of a checkpoint says what is elsewhere, and the commands that it prints bring it here."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import FIXTURES, NEOX, cli

#: What `rsync -a --ignore-existing HOST:FROM/ TO/` does where HOST is this machine.
RSYNC = """#!/bin/sh
[ "$1 $2" = "-a --ignore-existing" ] || exit 9
from="${3#HOST:}"; mkdir -p "$4" && cp -a -n "$OTHER/." "$4"
"""


def halves(source: Path, folder: Path) -> tuple[Path, Path]:
    """A checkpoint of which every second file lies on another host; texts lie on both."""
    here, there = folder / "it's here", folder / "other host/there"
    shutil.copytree(source, here)
    shutil.copytree(source, there)
    holding = sorted(p for p in here.rglob("*") if p.suffix in (".pt", ".safetensors", ".distcp"))
    for i, file in enumerate(holding):
        (file if i % 2 else there / file.relative_to(here)).unlink()
    return here, there


@pytest.mark.parametrize(
    "source", [NEOX, FIXTURES / "sharded/hf_sharded", FIXTURES / "sharded/dcp_fsdp2"], ids=lambda p: p.name
)
def test_the_printed_commands_bring_the_rest(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = halves(source, tmp_path)
    gone = {str(p.relative_to(there)) for p in there.rglob("*") if not (here / p.relative_to(there)).exists()}
    ran = cli("verify", here)
    assert ran.code == 3, ran.out
    told = json.loads(ran.out)["absent"]
    named = {file for files in told["files"].values() for file in files}
    # A file that no tensor is taken of is not missed.
    assert named and named <= gone
    copy, spread = told["commands"]
    assert shlex.split(spread)[:3] == ["fastshard", "merge", str(here)]
    text = cli("verify", here, json_output=False).out
    # Shards of a model that was downloaded are on no other host.
    assert (copy in text and spread in text) == (source.name != "hf_sharded")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rsync").write_text(RSYNC)
    (tmp_path / "bin/rsync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("OTHER", str(there))
    subprocess.run(copy, shell=True, check=True)
    assert cli("verify", here).code == 0


def test_the_printed_commands_bring_the_chunks_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = FIXTURES / "orbax/mp2_local_BROKEN_063_zarr3"
    here = tmp_path / "it's here"
    shutil.copytree(broken / "node0", here)
    ran = cli("verify", here)
    assert ran.code == 3, ran.out
    told = json.loads(ran.out)["absent"]
    assert told["files"] == {} and len(told["chunks"]["process 1"]) == 8
    text = cli("verify", here, json_output=False).out
    assert all(command in text for command in told["commands"])
    bring, merge, spread = told["commands"]
    assert shlex.split(spread)[:3] == ["fastshard", "merge", str(here)]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rsync").write_text(
        '#!/bin/sh\n[ "$1" = -a ] || exit 9\nmkdir "$3" && cp -a "$OTHER/." "$3"\n'
    )
    (tmp_path / "bin/rsync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("OTHER", str(broken / "node1"))
    subprocess.run(bring, shell=True, check=True)
    words = [str(tmp_path / "out") if word == "OUT" else word for word in shlex.split(merge)]
    assert words[0] == "fastshard" and cli(*words[1:]).code == 0


def test_nothing_is_said_of_a_whole_one() -> None:
    ran = cli("verify", NEOX)
    assert "absent" not in json.loads(ran.out)


def test_whole_layers_are_among_what_is_elsewhere(tmp_path: Path) -> None:
    """Of a layer none of whose files is there no file is a finding of its own."""
    ckpt = shutil.copytree(NEOX, tmp_path / "ckpt")
    for file in (*ckpt.rglob("layer_04*"), *ckpt.rglob("layer_03-model_01*")):
        file.unlink()
    ran = cli("verify", ckpt)
    assert ran.doc["absent"]["layers"] == ["layer 4"]
    text = cli("verify", ckpt, json_output=False).out
    assert "all files of layer 04 are missing" in text
    for file in ckpt.rglob("layer_03*"):
        file.unlink()
    text = cli("verify", ckpt, json_output=False).out
    assert "all files of layer 03 are missing" in text and "all files of layer 04 are missing" in text
    assert "rsync -a --ignore-existing" in text


def test_a_folder_beside_it_that_holds_the_rest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By names alone, and not a copy or another step: these have what is here, too."""
    node0, node1 = tmp_path / "node0", tmp_path / "node1"
    shutil.copytree(FIXTURES / "sharded/megatron_legacy_tp2_pp2", node0)
    (node1 / "iter_0000010").mkdir(parents=True)
    for folder in sorted(node0.glob("iter_*/mp_rank_*_001")):
        shutil.move(folder, node1 / "iter_0000010")
    shutil.copytree(node0, tmp_path / "node2")
    shutil.copytree(FIXTURES / "sharded/megatron_legacy_tp2_pp2", tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    ran = cli("verify", "node0", json_output=False)
    assert "node1 holds 2 of the 2 missing files\n" in ran.out and "copy" not in ran.out.replace(
        "copy these", ""
    )
    command = ran.out.split("name all directories of one checkpoint:\n")[1].splitlines()[0]
    assert shlex.split(command) == ["fastshard", "verify", "node0", "node1"]
    assert cli(*shlex.split(command)[1:]).code == 0


def test_another_step_is_no_folder_that_holds_the_rest(tmp_path: Path) -> None:
    step = "iter_0000010"
    shutil.copytree(FIXTURES / "sharded/megatron_legacy_tp2_pp2" / step, tmp_path / step)
    later = tmp_path / "iter_0000020"
    shutil.copytree(tmp_path / step / "mp_rank_00_001", later / "mp_rank_00_001")
    shutil.rmtree(tmp_path / step / "mp_rank_00_001")
    (tmp_path / "locked").mkdir(mode=0)
    ran = cli("verify", tmp_path / step, json_output=False)
    assert ran.code == 3 and "HOST" in ran.out and "iter_0000020" not in ran.out
