"""How much the complete checkpoint holds, told by what is left of a damaged one: the truth, or nothing."""

from __future__ import annotations

from pathlib import Path

import fastshard
import pytest
from damage import CASES, made
from helpers import FIXTURES, cli, copy

#: Nothing tells the sizes: no tensor is named that ranges of optimizer state held, the file with all names is lost, or a
#: tensor outside of all layers has the wrong shape. Of a lone host all arrays are there, in part.
UNKNOWN = ("zero3_missing_rank", "tp_no_layout_no_config", "hf_embed_is_a_slice", "orbax_lone_host",
           "orbax_lone_host_that_is_not_primary")  # fmt: skip
#: Cannot be opened.
UNOPENED = ("neox_latest_points_nowhere", "dcp_no_metadata", "hf_index_is_no_json")
#: Each file of these is taken away, one after the other.
WHOLE = {
    "gpt_neox/llama_gqa_pp_tp2": "layer_*-model_0[01]-*.pt",
    "gpt_neox/neox_legacy_pp_tp2_tied": "layer_*-model_00-*.pt",
    "sharded/megatron_legacy_tp2_pp2": "model_optim_rng.pt",
    "sharded/megatron_torch_dist_tp2_pp2": "*.distcp",
    "sharded/moe_megatron_torch_dist_tp2_ep2": "*.distcp",
    "sharded/dcp_fsdp2": "*.distcp",
    "sharded/tp4_vocabpad": "*.safetensors",
    "sharded/hf_sharded": "*.safetensors",
    "deepspeed/zero3_bf16_dp2": "*.pt",
}


def total(path: Path) -> int | None:
    return fastshard.open(path)._plan.expected_parameters


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNOPENED])
def test_it_is_that_of_the_checkpoint_before_the_damage(name: str, tmp_path: Path) -> None:
    source, _ = CASES[name]
    root = made(name, tmp_path / "ckpt")
    told = total(root)
    assert told in (None, total(FIXTURES / source))
    assert (told is None) == (name in UNKNOWN) or not fastshard.open(root).incomplete


@pytest.mark.parametrize("fixture", WHOLE)
def test_it_is_true_or_nothing_without_any_one_file(fixture: str, tmp_path: Path) -> None:
    source = FIXTURES / fixture
    names = {*fastshard.open(source)}
    files = sorted(file.relative_to(source) for file in source.rglob(WHOLE[fixture]))
    assert files
    for number, file in enumerate(files):
        root = copy(source, tmp_path / str(number))
        (root / file).unlink()
        told, opened = total(root), fastshard.open(root)
        assert {*opened} <= names, file
        if fixture in ("deepspeed/zero3_bf16_dp2", "sharded/hf_sharded"):
            assert told in (None, total(source))
        elif opened.incomplete:
            assert told == total(source), file


def test_it_is_shown(tmp_path: Path) -> None:
    root = made("neox_missing_shard", tmp_path / "ckpt")
    ran = cli("inspect", root, "--exit-zero", json_output=False)
    doc = cli("inspect", root, "--exit-zero").doc
    assert doc["expected_parameters"] == total(FIXTURES / CASES["neox_missing_shard"][0]) > doc["parameters"]
    assert f"{doc['parameters']:,} of {doc['expected_parameters']:,} in complete tensors" in ran.out
