"""Several paths of which some are files: all of them are parts of one checkpoint, and none is passed over."""

from __future__ import annotations

import shutil
from pathlib import Path

import fastshard
import pytest
import torch
from helpers import FIXTURES, cli, copy
from safetensors.torch import save_file

HF = FIXTURES / "sharded/hf_sharded"
TP4 = FIXTURES / "sharded/tp4_micro"
NEOX = Path(__file__).parents[1] / "fixtures/gpt_neox/neox_pp_tp2"


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(p for p in folder.glob(pattern) if p.is_file())


@pytest.mark.parametrize("source", [HF, TP4, FIXTURES / "sharded/dcp_tp_micro"], ids=lambda p: p.name)
def test_files_named_one_by_one_are_what_their_folder_is(source: Path, tmp_path: Path) -> None:
    whole, named = fastshard.open(source), fastshard.open(*files(source))
    assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in named.items()}
    assert cli("verify", *files(source)).code == 0
    one, other = tmp_path / "one", tmp_path / "other"
    assert cli("merge", source, one).code == 0
    assert cli("merge", *files(source), other).code == 0
    assert cli("diff", one, other).code == 0


def test_weights_alone_are_judged_by_the_config_beside_them(tmp_path: Path) -> None:
    ckpt = shutil.copytree(HF, tmp_path / "ckpt")
    assert "complete" in cli("verify", *files(ckpt, "*.safetensors"), json_output=False).out
    lost = files(ckpt, "*.safetensors")[-1]
    lost.unlink()
    ran = cli("verify", *files(ckpt, "*.safetensors"))
    assert ran.code == 3 and ran.having("FS101"), ran.out


@pytest.mark.parametrize("verb", ["verify", "inspect", "merge"])
def test_a_file_beside_a_folder_hides_nothing_of_the_folder(verb: str, tmp_path: Path) -> None:
    """A word too many on the command line made it read that file alone, and nothing of the broken folder."""
    ckpt = copy(NEOX, tmp_path / "ckpt")
    next(ckpt.glob("*/layer_03-model_01*")).unlink()
    (tmp_path / "notes.txt").write_text("x")
    out = [tmp_path / "out"] if verb == "merge" else []
    for paths in (
        [ckpt, tmp_path / "notes.txt"],
        [tmp_path / "notes.txt", ckpt],
        [*files(ckpt), *ckpt.glob("global*")],
    ):
        assert cli(verb, *paths, *out).code == 3
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cut", [1, 2])
def test_every_named_file_is_read(cut: int, tmp_path: Path) -> None:
    ckpt = shutil.copytree(HF, tmp_path / "ckpt")
    broken = files(ckpt, "*.safetensors")[cut]
    broken.write_bytes(broken.read_bytes()[:-100])
    for verb, out in (("verify", []), ("merge", [tmp_path / "out"])):
        ran = cli(verb, *files(ckpt, "*.safetensors"), *out)
        assert ran.code == 1 and ran.having("FS312"), ran.out
    assert not (tmp_path / "out").exists()


def test_weights_that_are_no_part_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(2)}, other)
    for verb, out in (("verify", []), ("merge", [tmp_path / "out"])):
        ran = cli(verb, HF, other, *out)
        assert ran.code == 2 and "not part of the checkpoint" in ran.errors[0]["message"], ran.out
        assert str(other) in ran.errors[0]["message"]
    assert not (tmp_path / "out").exists()
    again = tmp_path / "again.safetensors"
    shutil.copyfile(other, again)
    ran = cli("verify", other, again)
    assert ran.code == 2 and ran.errors[0]["code"] == "FS513"


def test_one_file_is_still_a_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    assert cli("verify", tmp_path / "other.safetensors").code == 0


@pytest.mark.parametrize("verb", ["verify", "inspect", "merge"])
def test_of_two_checkpoints_none_is_passed_over(verb: str, tmp_path: Path) -> None:
    """They were taken for parts of one, of which nothing was read of the second."""
    dcp = FIXTURES / "sharded/dcp_tp_micro"
    megatron = FIXTURES / "sharded/megatron_legacy_tp2_pp2"
    out = [tmp_path / "out"] if verb == "merge" else []
    for one, other in ((HF, dcp), (dcp, HF), (NEOX, HF), (HF, NEOX), (megatron, TP4), (TP4, megatron)):
        ran = cli(verb, one, other, *out)
        assert ran.code != 0, (one.name, other.name)
        assert "not part of the checkpoint" in ran.errors[0]["message"], (one.name, other.name, ran.errors)
    assert not (tmp_path / "out").exists()


def test_a_directory_without_tensors_may_be_among_them(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/train.log").write_text("loss 1.0")
    assert cli("verify", HF, tmp_path / "logs").code == 0


@pytest.mark.parametrize("name", ["rng_state_1.pth", "dataloader_rank1.pt", "optimizer.pt"])
def test_a_host_may_have_nothing_but_a_trainers_state(name: str, tmp_path: Path) -> None:
    (tmp_path / "host1").mkdir()
    torch.save({"state": torch.ones(2)}, tmp_path / "host1" / name)
    for source in (HF, FIXTURES / "sharded/dcp_tp_micro"):
        assert cli("verify", source, tmp_path / "host1").code == 0, source


def test_all_files_of_a_folder_may_be_named_whatever_lies_there(tmp_path: Path) -> None:
    ckpt = shutil.copytree(HF, tmp_path / "ckpt")
    for name in ("LICENSE", "README.md", "tokenizer.model", "modeling.py"):
        (ckpt / name).write_text("x")
    torch.save({"state": torch.ones(2)}, ckpt / "rng_state.pth")
    assert cli("verify", *files(ckpt)).code == 0
    assert cli("verify", ckpt, ckpt / "tokenizer.model", ckpt / "rng_state.pth").code == 0


def test_the_cause_is_told_and_not_hidden_by_paths_that_are_not_read(tmp_path: Path) -> None:
    whole = shutil.copytree(FIXTURES / "sharded/megatron_legacy_tp2_pp2", tmp_path / "whole")
    step = whole / "iter_0000010"
    for host, ranks in (
        ("a/iter_0000010", ("mp_rank_00_000", "mp_rank_00_001")),
        ("b/iter_0000020", ("mp_rank_01_000", "mp_rank_01_001")),
    ):
        for rank in ranks:
            shutil.copytree(step / rank, tmp_path / host / rank)
    ran = cli("inspect", tmp_path / "a", tmp_path / "b")
    assert ran.code != 0 and not ran.having("FS515"), ran.errors


def test_a_config_in_a_folder_that_anybody_may_write_to_decides_nothing(tmp_path: Path) -> None:
    ckpt = shutil.copytree(HF, tmp_path / "ckpt")
    shards = files(ckpt, "*.safetensors")
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    moved = loose / shards[-1].name
    shards[-1].rename(moved)
    (loose / "config.json").write_text("{}")
    ran = cli("verify", *shards[:-1], moved)
    assert not ran.having("FS110"), ran.errors
