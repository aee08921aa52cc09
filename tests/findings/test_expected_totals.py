"""How much the complete checkpoint holds, told by what is left of a damaged one: the truth, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import fastshard
import pytest
import torch
from damage import CASES, made
from helpers import FIXTURES, cli, copy
from safetensors.torch import save_file

#: Nothing tells the sizes: no tensor is named that ranges of optimizer state held, the file with all names is
#: lost, or a tensor that no layout gives a shape has the wrong one, or lacks a chunk.
UNKNOWN = (
    "zero3_missing_rank",
    "tp_no_layout_no_config",
    "hf_embed_is_a_slice",
    "orbax_lone_host",
    "orbax_lone_host_that_is_not_primary",
    "maxtext_missing_chunk",
    "paxml_missing_chunk",
)
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


def test_a_layer_may_be_wider_than_the_others(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    root.mkdir()
    weight_map = {}
    for layer, width in enumerate((8, 8, 8, 16)):
        name, file = f"model.layers.{layer}.mlp.up.weight", f"model-0000{layer + 1}-of-00004.safetensors"
        save_file({name: torch.ones(width, 4)}, root / file)
        weight_map[name] = file
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert total(root) == 160
    (root / "model-00004-of-00004.safetensors").unlink()
    assert fastshard.open(root).incomplete == ["model.layers.3.mlp.up.weight"] and total(root) is None


def test_a_file_whose_names_nothing_lists_may_have_held_more(tmp_path: Path) -> None:
    root = copy(FIXTURES / "sharded/dcp_hf_rank_sharded_micro", tmp_path / "ckpt")
    for file in root.rglob("*.json"):
        if file.name != "config.json":
            file.unlink()
    for file in root.rglob("shard-00002-model-00002*"):
        file.unlink()
    assert fastshard.open(root).incomplete and total(root) is None


def test_files_of_a_store_are_counted_on_all_hosts() -> None:
    nodes = [FIXTURES / "orbax/mp2_local_BROKEN_063_zarr3" / f"node{i}" for i in range(2)]
    files = [file for node in nodes for file in node.rglob("*") if file.is_file()]
    assert fastshard.open(*nodes).extent == (len(files), sum(file.stat().st_size for file in files))
