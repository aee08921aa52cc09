"""`fastshard find`: missing files of a checkpoint, looked for on other nodes' disks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import fastshard
import pytest
from fastshard.common import safe_files
from fastshard.verification.find_missing import describe
from helpers import FIXTURES, HF, NEOX, Ran, cli, copy, state_of

MEGATRON = FIXTURES / "sharded/megatron_legacy_tp2_pp2"
ZERO = FIXTURES / "deepspeed/zero1_bf16_dp2"
RANK = "model_optim_rng.pt"
ITERATION = "iter_0000010"


def split(source: Path, folder: Path, names: Iterable[str]) -> tuple[Path, Path]:
    """A checkpoint without some files, and a node's folder that has these alone."""
    run, node = copy(source, folder / "run"), folder / "node" / "run"
    for name in names:
        (node / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(run / name, node / name)
        if not any((run / name).parent.iterdir()):
            (run / name).parent.rmdir()
    return run, node


def bring(commands: Iterable[str]) -> None:
    for command in commands:
        subprocess.run(["bash", "-c", command], check=True)


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        (MEGATRON, [f"{ITERATION}/mp_rank_0{rank}_001/{RANK}" for rank in (0, 1)]),
        (MEGATRON, [f"{ITERATION}/mp_rank_01_000/{RANK}"]),
        (ZERO, ["global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]),
        (ZERO, ["global_step4/mp_rank_00_model_states.pt"]),
        (
            NEOX,
            [
                *(f"global_step4/layer_0{n}-model_0{tp}-model_states.pt" for n in (3, 4) for tp in (0, 1)),
                "global_step4/layer_00-model_01-model_states.pt",
            ],
        ),
        (HF, ["model-00002-of-00004.safetensors"]),
        (FIXTURES / "sharded/dcp_fsdp2", ["__1_0.distcp"]),
        (FIXTURES / "sharded/dcp_fsdp2", [".metadata"]),
    ],
    ids=["stage", "rank", "zero", "model_states", "neox", "hf", "dcp", "dcp-metadata"],
)
def test_what_another_node_has_is_found_and_the_commands_complete_the_checkpoint(
    source: Path, lost: list[str], tmp_path: Path
) -> None:
    run, node = split(source, tmp_path, lost)
    before = state_of(tmp_path)
    ran = cli("find", run, "--in", node.parent)
    assert (ran.code, ran.findings, ran.doc["verdict"]) == (0, [], "FOUND")
    found = {file["name"]: file for file in ran.doc["files"]}
    assert sorted(found) == sorted(lost)
    assert all(found[name]["found"] == str(node / name) for name in lost)
    assert state_of(tmp_path) == before
    bring(ran.doc["commands"])
    assert fastshard.inspect(run).complete
    assert all((run / name).stat().st_mtime_ns == (node / name).stat().st_mtime_ns for name in lost)
    assert cli("find", run, "--in", node).doc["files"] == []


def test_text_has_places_commands_and_what_is_not_found(tmp_path: Path) -> None:
    names = [f"{ITERATION}/mp_rank_0{rank}_001/{RANK}" for rank in (0, 1)]
    run, node = split(MEGATRON, tmp_path, names)
    (node / names[1]).unlink()
    ran = cli("find", run, "--in", node, json_output=False)
    assert ran.code == 3
    assert f"  {node / names[0]} (name and directory match)" in ran.out
    assert f"  mkdir -p {(run / names[0]).parent} && cp -p {node / names[0]} {run / names[0]}" in ran.out
    assert f"error FS101: {names[1]}: the file is missing" in ran.out
    assert ran.out.splitlines()[-1].endswith("(exit 3)")


def test_a_complete_checkpoint_lacks_nothing(tmp_path: Path) -> None:
    ran = cli("find", NEOX, "--in", tmp_path, json_output=False)
    assert (ran.code, ran.out) == (0, f"{NEOX}: OK, the headers show no missing file (exit 0)\n")


def test_files_of_other_ranks_and_steps_are_not_offered(tmp_path: Path) -> None:
    """Of a rank file's name only the folders say whose it is."""
    name = f"{ITERATION}/mp_rank_01_001/{RANK}"
    run, node = split(MEGATRON, tmp_path, [name])
    wrong = [
        node / "iter_0000020/mp_rank_01_001",
        node / ITERATION / "mp_rank_00_001",
        node / "mp_rank_01_001",
        node / ITERATION,
    ]
    for folder in wrong:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(node / name, folder / RANK)
    (node / name).unlink()
    ran = cli("find", run, "--in", node)
    assert (ran.code, ran.doc["commands"]) == (3, [])
    reason = ran.doc["files"][0]["reason"]
    assert "of step iter_0000020" in reason and f"nothing shows that it is mp_rank_01_001/{RANK}" in reason
    assert f"nothing shows that it is of step {ITERATION}" in reason


def test_a_manifest_finds_a_file_anywhere_and_refuses_others(tmp_path: Path) -> None:
    name = f"{ITERATION}/mp_rank_01_001/{RANK}"
    whole = copy(MEGATRON, tmp_path / "whole")
    fastshard.manifest(whole, memory="2GiB")
    run, node = split(whole, tmp_path, [name])
    flat = tmp_path / "flat"
    flat.mkdir()
    # At the right place lies what has the right size and another content, and a shorter file.
    content = bytearray((node / name).read_bytes())
    (flat / RANK).write_bytes(content)
    content[len(content) // 2] ^= 1
    (node / name).write_bytes(content)
    shorter = tmp_path / "shorter" / name
    shorter.parent.mkdir(parents=True)
    shorter.write_bytes(content[:-7])
    found = fastshard.find(run, [node, tmp_path / "shorter"], memory="2GiB")
    assert not found.complete and found.commands == []
    assert found.files[0].reason is not None and "bytes instead of" in found.files[0].reason
    assert "its hash differs from the manifest" in found.files[0].reason
    found = fastshard.find(run, [node, flat], memory="2GiB")
    assert found.complete and found.files[0].found == str(flat / RANK)
    assert found.files[0].evidence == "its hash matches the manifest"
    # The same with a manifest that is elsewhere.
    moved = tmp_path / "manifest.json"
    shutil.move(run / "fastshard.manifest.json", moved)
    assert not fastshard.find(run, [flat]).complete
    assert fastshard.find(run, [flat], expect=moved, memory="2GiB").complete


def test_two_candidates_with_different_content_are_listed_and_none_is_chosen(tmp_path: Path) -> None:
    lost = "model-00002-of-00004.safetensors"
    run, node = split(HF, tmp_path, [lost])
    one, other = tmp_path / "a", tmp_path / "b"
    for folder in (one, other):
        folder.mkdir()
        shutil.copy(node / lost, folder)
    found = fastshard.find(run, [one, other])
    assert found.complete and found.files[0].found == str(one / lost)
    content = bytearray((other / lost).read_bytes())
    content[-1] ^= 1
    (other / lost).write_bytes(content)
    ran = cli("find", run, "--in", one, other)
    assert (ran.code, ran.doc["commands"]) == (3, [])
    assert ran.doc["files"][0]["candidates"] == [str(one / lost), str(other / lost)]
    assert "differ" in ran.errors[0]["got"]


def test_a_file_that_is_cut_off_or_empty_is_not_offered(tmp_path: Path) -> None:
    lost = "model-00002-of-00004.safetensors"
    run, node = split(HF, tmp_path, [lost])
    (node / lost).write_bytes((node / lost).read_bytes()[:-100])
    ran = cli("find", run, "--in", node)
    assert (ran.code, ran.doc["commands"]) == (3, []) and str(node / lost) in ran.doc["files"][0]["reason"]
    (node / lost).write_bytes(b"")
    assert "no file with this name" in cli("find", run, "--in", node).doc["files"][0]["reason"]


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../b.safetensors"]
)
def test_names_that_leave_the_checkpoint_are_in_no_command(name: str, tmp_path: Path) -> None:
    run = copy(HF, tmp_path / "run")
    fastshard.manifest(run)
    manifest = run / "fastshard.manifest.json"
    document = json.loads(manifest.read_text())
    document["files"].append({"name": name, "size": 8, "identity": "0" * 64})
    manifest.write_text(json.dumps(document))
    node = tmp_path / "node"
    node.mkdir()
    (node / Path(name).name).write_bytes(b"12345678")
    ran = cli("find", run, "--in", node)
    assert ran.code == 3 and ran.doc["commands"] == []
    assert [file["reason"] for file in ran.doc["files"]] == ["its name points outside the checkpoint"]


def test_names_of_a_shell_are_quoted_and_control_characters_refused(tmp_path: Path) -> None:
    name = "model-00002-of-00004.safetensors"
    run, node = split(HF, tmp_path, [name])
    odd = tmp_path / "it's $(touch HERE); x"
    shutil.move(node, odd)
    ran = cli("find", run, "--in", odd)
    assert ran.code == 0
    bring(ran.doc["commands"])
    assert (run / name).is_file() and not list(tmp_path.rglob("HERE")) and not Path("HERE").exists()
    (run / name).unlink()
    hidden = tmp_path / "line\nbreak"
    shutil.move(odd, hidden)
    ran = cli("find", run, "--in", hidden)
    assert (ran.code, ran.doc["commands"]) == (3, [])
    assert "cannot be written in a command" in ran.doc["files"][0]["reason"]


def test_a_place_that_a_link_leads_out_of_is_refused(tmp_path: Path) -> None:
    name = f"{ITERATION}/mp_rank_01_001/{RANK}"
    run, node = split(MEGATRON, tmp_path, [name])
    (tmp_path / "outside").mkdir()
    (run / name).parent.symlink_to(tmp_path / "outside")
    ran = cli("find", run, "--in", node)
    assert (ran.code, ran.doc["commands"]) == (3, [])
    assert ran.doc["files"][0]["reason"] == "a link points outside the checkpoint"


def test_links_in_circles_and_special_files_are_passed_over(tmp_path: Path) -> None:
    lost = "model-00002-of-00004.safetensors"
    run, node = split(HF, tmp_path, [lost])
    (node / "loop").symlink_to(node)
    (node / "a").mkdir()
    (node / "a" / lost).symlink_to(node / "a" / lost)
    (node / "b").mkdir()
    os.mkfifo(node / "b" / lost)
    found = fastshard.find(run, [node])
    assert found.complete and found.files[0].found == str(node / lost)


def test_folders_that_cannot_be_read_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "model-00002-of-00004.safetensors"
    run, node = split(HF, tmp_path, [lost])
    closed = tmp_path / "node" / "closed"
    closed.mkdir()
    real = os.scandir

    def scandir(path: str) -> object:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    ran: Ran = cli("find", run, "--in", tmp_path / "node")
    assert ran.code == 0 and len(ran.doc["commands"]) == 1
    assert [(f["code"], f["severity"], f["file"]) for f in ran.findings] == [
        ("FS502", "warning", str(closed))
    ]
    (node / lost).unlink()
    ran = cli("find", run, "--in", tmp_path / "node")
    assert ran.code == 3 and {f["code"] for f in ran.findings} == {"FS101", "FS502"}


def test_what_is_missing_without_a_file_stays_missing(tmp_path: Path) -> None:
    run = copy(HF, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (run / "config.json").write_text(json.dumps(config))
    ran = cli("find", run, "--in", HF)
    assert ran.code == 3 and ran.doc["files"] == [] and ran.errors[0]["code"] == "FS103"


def test_a_folder_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    assert cli("find", NEOX, "--in", tmp_path / "nowhere").having("FS501", file="nowhere")
    assert cli("find", NEOX).code == 2
    with pytest.raises(fastshard.FastshardError, match="no such directory"):
        fastshard.find(NEOX, [""])


def test_several_roots_take_a_file_where_its_folder_is(tmp_path: Path) -> None:
    name = f"{ITERATION}/mp_rank_01_001/{RANK}"
    run, node = split(MEGATRON, tmp_path, [name])
    second = tmp_path / "second"
    (second / name).parent.mkdir(parents=True)
    shutil.move(run / ITERATION / "mp_rank_01_000", second / ITERATION / "mp_rank_01_000")
    found = fastshard.find([run, second], [node])
    assert found.complete and found.files[0].path == str(second / name)
    assert describe(found) == "1 of 1 missing file found"
    assert safe_files.is_file(found.files[0].found or "")
