"""Commands in the form of other tools, against those tools or what they are known to write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import FIXTURES, NEOX, cli, read_result
from safetensors.torch import load_file
from test_deepspeed import assert_tensors

ZEROS = sorted(p for p in (FIXTURES / "deepspeed").iterdir() if p.name.startswith("zero"))


@pytest.mark.parametrize("source", ZEROS, ids=lambda p: p.name)
def test_zero_to_fp32_takes_that_tools_words(source: Path, tmp_path: Path) -> None:
    wanted = json.loads((source / "expected.json").read_text())
    argv = (
        "zero-to-fp32",
        source,
        tmp_path / "out",
        "--safe_serialization",
        "-t",
        "global_step4",
        "--max_shard_size",
        "4KB",
    )
    ran = cli(*argv)
    assert ran.code == 0 and ran.doc["written"] and not ran.having("FS403", message="pytorch_model.bin")
    assert_tensors(tmp_path / "out", wanted["tensors"])
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    ran = cli("zero-to-fp32", source, tmp_path / "trained", "--exclude_frozen_parameters")
    assert ran.code == 0 and ran.having("FS403", message="pytorch_model.bin")
    have = read_result(tmp_path / "trained")
    frozen = set(wanted["frozen"])
    assert frozen and set(have) == set(wanted["tensors"]) - frozen


def test_zero_to_fp32_of_a_rank_that_is_missing(tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / "deepspeed/zero2_fp32_dp2", tmp_path / "ckpt")
    next((source / "global_step4").glob("*zero_pp_rank_1*optim*")).unlink()
    ran = cli("zero-to-fp32", source, tmp_path / "out")
    assert ran.code == 3 and not (tmp_path / "out").exists()


def test_zero_to_fp32_of_what_has_no_masters(tmp_path: Path) -> None:
    ran = cli("zero-to-fp32", NEOX, tmp_path / "out")
    assert (ran.code, ran.findings[0]["code"]) == (2, "FS402") and "merge" in ran.findings[0]["help"]


def test_consolidate_is_what_torch_makes_of_rank_shards(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    source = FIXTURES / "sharded/dcp_hf_rank_sharded_micro/sharded"
    ran = cli("consolidate", source, tmp_path / "ours")
    assert ran.code == 0, ran.out
    theirs: dict[str, torch.Tensor] = {}
    shards = shutil.copytree(source, tmp_path / "shards", ignore=shutil.ignore_patterns("expected.json"))
    (tmp_path / "theirs").mkdir()
    consolidate_safetensors_files(
        str(shards),
        str(tmp_path / "theirs"),
        fqn_to_index_mapping=dict.fromkeys(read_result(tmp_path / "ours"), 1),
    )
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        theirs |= load_file(file)
    # torch 2.15 leaves scalars as it has made room for them: zero.
    assert theirs["scalar0d"] == 0
    held = (load_file(file) for file in shards.glob("*.safetensors"))
    theirs["scalar0d"] = next(shard["scalar0d"] for shard in held if "scalar0d" in shard)
    same(read_result(tmp_path / "ours"), theirs)


def test_consolidate_is_what_torch_makes_of_dcp(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    source = FIXTURES / "sharded/dcp_tp_micro"
    assert cli("consolidate", source, tmp_path / "ours").code == 0
    dcp_to_torch_save(source, tmp_path / "theirs.pt")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=False)
    same(
        read_result(tmp_path / "ours"), {k: v for k, v in flat(theirs).items() if isinstance(v, torch.Tensor)}
    )


def flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in tree.items():
        made |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return made


def same(ours: dict[str, torch.Tensor], theirs: dict[str, object]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        other = theirs[name]
        assert (
            isinstance(other, torch.Tensor) and tensor.dtype == other.dtype and torch.equal(tensor, other)
        ), name


def test_consolidate_publishes_nothing_of_what_is_not_whole(tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / "sharded/dcp_tp_micro", tmp_path / "ckpt")
    (source / "__1_0.distcp").unlink()
    ran = cli("consolidate", source, tmp_path / "out")
    assert ran.code == 3 and not (tmp_path / "out").exists()
