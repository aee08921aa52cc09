"""The finding names the file that is the cause, and what follows from it is its effect."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FIXTURES, HF, NEOX, assert_refused, cli, copy, layer_file

MEGATRON = FIXTURES / "sharded" / "megatron_legacy_tp2_pp2"


class Call:
    """What an attacker puts in the place of a rank's tensors."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.where}",)


@pytest.mark.parametrize(
    "root, name",
    [
        (NEOX, f"global_step4/{layer_file(3, 1)}"),
        (MEGATRON, "mp_rank_01_001/model_optim_rng.pt"),
    ],
    ids=["GPT-NeoX", "Megatron-LM"],
)
def test_a_call_in_the_place_of_tensors_is_named_and_not_made(root: Path, name: str, tmp_path: Path) -> None:
    ckpt = copy(root, tmp_path / "ckpt")
    (file,) = ckpt.rglob(name.rpartition("/")[2]) if root == NEOX else [next(ckpt.rglob(name))]
    torch.save({"model": Call(tmp_path / "made")}, file)
    ran = assert_refused(ckpt, tmp_path / "out", "FS602", file=file.name)
    assert [f["code"] for f in ran.errors] == ["FS602"], ran.out
    seen = cli("verify", ckpt)
    assert [f["code"] for f in seen.errors] == ["FS602"] and seen.errors[0]["effect"], seen.out
    assert not (tmp_path / "made").exists()


def test_files_of_which_none_is_there_are_those_that_are_missing(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    for file in ckpt.rglob("layer_*"):
        file.unlink()
    ran = cli("verify", ckpt)
    (told,) = ran.errors
    assert (
        ran.code == 3
        and told["code"] == "FS101"
        and told["file"].endswith("layer_00-model_00-model_states.pt")
    )


def test_a_file_whose_header_is_malformed_is_the_one_cause(tmp_path: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    file = sorted(ckpt.glob("*.safetensors"))[1]
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].replace(b'"BF16"', b'"F999"', 1)
    assert header != raw[8 : 8 + size]
    file.write_bytes(raw[:8] + header + raw[8 + size :])
    ran = cli("verify", ckpt)
    assert [(f["code"], f["file"]) for f in ran.errors] == [("FS514", file.name)], ran.out
    lost = ran.errors[0]["effect"]
    assert lost["count"] > 9 and lost["of"] == 39


def test_experts_of_a_rank_that_is_missing_are_its_effect(tmp_path: Path) -> None:
    ckpt = copy(FIXTURES / "sharded/moe_megatron_legacy_tp2_ep2", tmp_path / "ckpt")
    for folder in ckpt.rglob("mp_rank_*_001"):
        shutil.rmtree(folder)
    ran = cli("verify", ckpt)
    (told,) = ran.errors
    assert (
        ran.code == 3 and told["code"] == "FS101" and told["rank"] == "ep 1" and told["effect"]["count"] == 8
    )


@pytest.mark.parametrize("is_known", [True, False])
def test_the_older_step_is_named_where_the_newer_one_is_broken(is_known: bool, tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (step,) = ckpt.glob("global_step*")
    newer = ckpt / "global_step99"
    newer.mkdir()
    names = (
        [p.name for p in step.glob("layer_00*")]
        if not is_known
        else [p.name for p in step.iterdir() if p.is_file()][1:]
    )
    for name in names:
        shutil.copy(step / name, newer / name)
    (ckpt / "latest").write_text("global_step99")
    ran = cli("verify", ckpt)
    assert ran.code != 0
    (told,) = ran.having("FS112")
    assert step.name in told["message"] and told["run"][0].endswith(f" --step {step.name}")
    printed = cli("verify", ckpt, json_output=False)
    assert f"--step {step.name}" in printed.out + printed.err
