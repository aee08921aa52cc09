"""Resharding: per-rank safetensors at any degree, from every source whose family has Hugging Face names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fastshard.manifests import MANIFEST_NAME
from helpers import FIXTURES, HF, assert_refused, cli, read_result
from safetensors import safe_open
from safetensors.torch import load_file

SHARDED = FIXTURES / "sharded"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_hugging_face_and_back_is_bit_exact(tp: int, tmp_path: Path) -> None:
    ran = cli("convert", HF, tmp_path / "ranks", "--to", "tp-safetensors", "--tp", tp)
    assert ran.code == 0, ran.out
    assert cli("verify", tmp_path / "ranks").code == 0
    for command in (("merge",), ("convert", "--to", "hf")):
        out = tmp_path / command[0]
        assert cli(command[0], tmp_path / "ranks", out, *command[1:]).code == 0
        have, want = read_result(out), read_result(HF)
        assert set(have) == set(want)
        for name, tensor in want.items():
            # A merge keeps the padded vocabulary only where nothing states the true one.
            assert torch.equal(have[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_ranks_equal_those_of_the_fixture(tmp_path: Path) -> None:
    assert cli("convert", HF, tmp_path / "out", "--to", "tp-safetensors", "--tp", 4).code == 0
    theirs = json.loads((SHARDED / "tp4_vocabpad/layout.json").read_text())
    ours = json.loads((tmp_path / "out/layout.json").read_text())
    assert ours["tp_dim"] == theirs["tp_dim"]
    for rank in range(4):
        name = f"tp_rank_{rank:02d}.safetensors"
        have, want = load_file(tmp_path / "out" / name), load_file(SHARDED / "tp4_vocabpad" / name)
        assert set(have) == set(want)
        for key, tensor in want.items():
            assert torch.equal(have[key].view(torch.uint8), tensor.view(torch.uint8)), (rank, key)


@pytest.mark.parametrize("source", ["megatron_legacy_tp2_pp2", "megatron_torch_dist_tp2_pp2"])
def test_megatron_is_resharded_as_the_same_model(source: str, tmp_path: Path) -> None:
    options = ("--vocab-size", "1000", "--to", "tp-safetensors", "--tp", 4)
    assert cli("convert", SHARDED / source, tmp_path / "out", *options).code == 0
    for rank in range(4):
        name = f"tp_rank_{rank:02d}.safetensors"
        have, want = load_file(tmp_path / "out" / name), load_file(SHARDED / "tp4_vocabpad" / name)
        assert all(torch.equal(have[key].view(torch.uint8), want[key].view(torch.uint8)) for key in want)


def test_neox_is_resharded(tmp_path: Path) -> None:
    source = FIXTURES / "gpt_neox/llama_gqa_pp_tp2"
    assert cli("convert", source, tmp_path / "ranks", "--to", "tp-safetensors", "--tp", 2).code == 0
    assert cli("convert", tmp_path / "ranks", tmp_path / "back", "--to", "hf").code == 0
    assert cli("convert", source, tmp_path / "hf", "--to", "hf").code == 0
    have, want = read_result(tmp_path / "back"), read_result(tmp_path / "hf")
    assert all(torch.equal(have[name], tensor) for name, tensor in want.items())


def test_a_degree_that_does_not_divide_names_those_that_do(tmp_path: Path) -> None:
    assert_refused(
        HF,
        tmp_path / "out",
        "FS204",
        exit=2,
        command=("convert", "--to", "tp-safetensors", "--tp", "8"),
        expected="1, 2, 4",
    )


def test_no_index_names_a_slice_as_the_whole(tmp_path: Path) -> None:
    out = tmp_path / "ranks"
    assert cli("convert", HF, out, "--to", "tp-safetensors", "--tp", 2).code == 0
    assert sorted(p.name for p in out.glob("*.safetensors*")) == [
        "tp_rank_00.safetensors",
        "tp_rank_01.safetensors",
    ]
    assert cli("verify", out).code == 0
    whole = cli("merge", out, tmp_path / "whole")
    assert whole.code == 0
    # As earlier versions published it: each name at the last rank's file.
    (out / MANIFEST_NAME).unlink()
    with safe_open(out / "tp_rank_01.safetensors", framework="pt") as file:
        names = list(file.keys())
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "tp_rank_01.safetensors")}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    ran = cli("verify", out)
    assert ran.code == 1
    (told,) = ran.having("FS208")
    assert told["severity"] == "error" and told["file"] == "model.safetensors.index.json"
    # The ranks' files are right all the same.
    ran = cli("merge", out, tmp_path / "again")
    assert ran.code == 0 and ran.having("FS208")[0]["severity"] == "warning"
    again, before = read_result(tmp_path / "again"), read_result(tmp_path / "whole")
    assert again.keys() == before.keys() and all(torch.equal(again[n], before[n]) for n in before)
