"""Copies that differ, and files that are copies of one another: the finding accuses a file only where
something says that it is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from helpers import FIXTURES, NEOX, STEP, cli, copy, edit_pt, edit_safetensors, layer_file

TP4 = FIXTURES / "sharded/tp4_micro"
HF = FIXTURES / "sharded/hf_sharded"
NORM = "model.layers.0.input_layernorm.weight"


def rank(number: int) -> str:
    return f"tp_rank_{number:02}.safetensors"


@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_copies_that_differ_neither_is_accused(wrong: int, tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    edit_pt(ckpt / STEP / layer_file(3, wrong), lambda state: state["input_layernorm.weight"].add_(1))
    [found] = cli("verify", ckpt).having("FS302")
    assert "the copies of tp 0 and tp 1 differ" in found["message"] and "rank" not in found
    assert found["files"] == [f"{STEP}/{layer_file(3, r)}" for r in (0, 1)]
    assert "both" in found["help"] or "these ranks" in found["help"]


@pytest.mark.parametrize("wrong", range(4))
def test_of_four_copies_the_odd_one_is_accused(wrong: int, tmp_path: Path) -> None:
    ckpt = shutil.copytree(TP4, tmp_path / "ckpt")
    edit_safetensors(ckpt / rank(wrong), lambda tensors: tensors[NORM].add_(1))
    [found] = cli("verify", ckpt).having("FS302")
    assert (found["file"], found["rank"]) == (rank(wrong), f"tp {wrong}"), found
    assert "differs from those of 3 other ranks" in found["message"]


def test_of_four_copies_of_two_kinds_none_is_accused(tmp_path: Path) -> None:
    ckpt = shutil.copytree(TP4, tmp_path / "ckpt")
    for number in (0, 2):
        edit_safetensors(ckpt / rank(number), lambda tensors: tensors[NORM].add_(1))
    [found] = cli("verify", ckpt).having("FS302")
    assert "the copies of 4 ranks differ" in found["message"] and len(found["files"]) == 4


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (2, 3)])
def test_a_file_copied_over_another_is_one_finding_that_names_both(
    source: int, target: int, tmp_path: Path
) -> None:
    ckpt = shutil.copytree(TP4, tmp_path / "ckpt")
    shutil.copyfile(ckpt / rank(source), ckpt / rank(target))
    [found] = cli("verify", ckpt).having("FS303")
    assert found["files"] == sorted([rank(source), rank(target)]), found
    low, high = sorted((source, target))
    assert f"tp {low} and tp {high} hold the same" in found["message"]
    for name in found["files"]:
        assert cli("verify", ckpt, "--accept", f"copies={name}").code == 0


def test_four_files_that_are_one_are_one_finding(tmp_path: Path) -> None:
    ckpt = shutil.copytree(TP4, tmp_path / "ckpt")
    for target in (1, 2, 3):
        shutil.copyfile(ckpt / rank(0), ckpt / rank(target))
    [found] = cli("verify", ckpt).having("FS303")
    assert len(found["files"]) == 4 and "tp 0, tp 1, tp 2 and tp 3 hold" in found["message"]
    # One of them is the original, and the others are named.
    accept = [word for number in (1, 2) for word in ("--accept", f"copies={rank(number)}")]
    assert cli("verify", ckpt, *accept).code == 1
    assert cli("verify", ckpt, *accept, "--accept", f"copies={rank(3)}").code == 0


def test_looking_only_does_not_make_it_good(tmp_path: Path) -> None:
    ckpt = shutil.copytree(TP4, tmp_path / "ckpt")
    shutil.copyfile(ckpt / rank(0), ckpt / rank(1))
    document = cli("verify", ckpt, "--exit-zero").doc
    assert (document["exit_code"], document["verdict"], document["ok"]) == (0, "BROKEN", False)


@pytest.mark.parametrize("to", ["megatron", "megatron:legacy", "tp-safetensors"])
def test_ranks_of_padding_alone_are_no_lost_shards(to: str, tmp_path: Path) -> None:
    """Of a small vocabulary that is padded for each rank the last ranks have no rows."""
    tiny_models.model("llama", tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", to, "--tp", 4)
    assert ran.code == 0 and not ran.having("FS313"), ran.out


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_the_name_inside_of_a_file_decides_which_is_the_copy(
    source: int, target: int, tmp_path: Path
) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    shutil.copyfile(ckpt / STEP / layer_file(3, source), ckpt / STEP / layer_file(3, target))
    ran = cli("verify", ckpt)
    [found] = ran.having("FS303")
    assert found["file"] == f"{STEP}/{layer_file(3, target)}"
    text = cli("verify", ckpt, json_output=False).out
    assert "would go unnoticed" not in text


@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_copies_one_of_another_layer_is_accused(wrong: int, tmp_path: Path) -> None:
    """The other copy is as far from it, and nearer to no layer but its own."""
    ckpt = copy(NEOX, tmp_path / "ckpt")
    state = torch.load(ckpt / STEP / layer_file(2, wrong), weights_only=True)
    name = "input_layernorm.weight"
    edit_pt(ckpt / STEP / layer_file(3, wrong), lambda own: own.update({name: state[name].clone()}))
    ran = cli("merge", ckpt, tmp_path / "out", "--replicas", "mean")
    assert ran.code == 1
    accused = {(f.get("file"), f.get("rank")) for f in ran.having("FS305")}
    assert accused == {(f"{STEP}/{layer_file(3, wrong)}", f"tp {wrong}")}, ran.errors


def test_of_two_ranks_whose_layers_are_swapped_neither_is_accused(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    one, other = (ckpt / STEP / layer_file(layer, 1) for layer in (2, 3))
    states = [torch.load(path, weights_only=True) for path in (one, other)]
    for path, state in zip((one, other), reversed(states), strict=True):
        edit_pt(path, lambda own, state=state: own.update({n: t.clone() for n, t in state.items()}))
    ran = cli("merge", ckpt, tmp_path / "out", "--replicas", "mean")
    found = ran.having("FS305")
    assert ran.code == 1 and found and all("rank" not in f for f in found), found
    assert all("the copies of tp 0 and tp 1" in f["message"] for f in found)


def zeroed(folder: Path) -> str:
    """A checkpoint of which one matrix is zero; the matrix."""
    shutil.copytree(HF, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.mlp.up_proj.weight"
    edit_safetensors(folder / index[name], lambda tensors: tensors[name].zero_())
    return name


@pytest.mark.parametrize(
    "command", [("merge",), ("convert", "--to", "hf"), ("merge", "--stats")], ids=" ".join
)
def test_a_matrix_of_zeros_is_not_written_in_silence(command: tuple[str, ...], tmp_path: Path) -> None:
    name = zeroed(tmp_path / "ckpt")
    verb, *options = command
    ran = cli(verb, tmp_path / "ckpt", tmp_path / "out", *options)
    assert ran.code == 0 and [f["tensor"] for f in ran.having("FS313")] == [name]
    manifest = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    assert [f["tensor"] for f in manifest["findings"] if f["code"] == "FS313"] == [name]
    ran = cli(verb, tmp_path / "ckpt", tmp_path / "no", *options, "--fail-on", "warning")
    assert ran.code == 1 and not (tmp_path / "no").exists()


def test_a_matrix_of_zeros_that_several_processes_make_is_told(tmp_path: Path) -> None:
    name = zeroed(tmp_path / "ckpt")
    out = tmp_path / "out"
    run = cli("split", tmp_path / "ckpt", out, "--parts", 3).doc["run"]
    for part in range(3):
        assert cli("make-part", part, out, "--run", run).code == 0
    ran = cli("commit", out, "--run", run)
    assert ran.code == 0 and [f["tensor"] for f in ran.having("FS313")] == [name], ran.out


def test_a_good_checkpoint_is_merged_without_a_word_of_zeros(tmp_path: Path) -> None:
    assert not cli("merge", HF, tmp_path / "out").having("FS313")


def test_an_index_that_gives_a_file_a_name_that_it_does_not_have(tmp_path: Path) -> None:
    ckpt = shutil.copytree(HF, tmp_path / "ckpt")
    index = ckpt / "model.safetensors.index.json"
    renamed, wrong = "model-00002-of-00004.safetensors", "model-00009-of-00004.safetensors"
    index.write_text(index.read_text().replace(renamed, wrong))
    ran = cli("verify", ckpt)
    [found] = [f for f in ran.findings if f["severity"] != "note"]
    assert (ran.code, found["code"], found["file"]) == (1, "FS115", index.name)
    assert (found["got"], found["expected"]) == (wrong, renamed)
    (ckpt / renamed).unlink()
    ran = cli("verify", ckpt)
    assert ran.code == 3 and [f["file"] for f in ran.having("FS101") if f["severity"] == "error"] == [wrong]
