"""DeepSeek-V3.2 and Kimi-K2.5 to Megatron-LM and back: an indexer in each layer, a tower beside the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepseek_maker
import moe_maker
import pytest
import torch
from helpers import cli, edit_pt, edit_safetensors, load_pt, read_result
from megatron_trips import convert, same, to_hf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

V32 = "deepseek_v32"
INDEXER = "self_attention.core_attention.indexer."


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        ({}, ("--tp", 2, "--pp", 2, "--ep", 2)),
        ({"rope_parameters": deepseek_maker.YARN}, ("--tp", 4, "--ep", 2, "--etp", 2)),
        ({"first_k_dense_replace": 0, "tie_word_embeddings": True}, ("--ep", 8)),
    ],
    ids=["plain", "yarn", "tied"],
)
def test_an_indexer_comes_back_with_the_logits(
    changes: dict[str, Any], degrees: tuple[object, ...], form: str, tmp_path: Path
) -> None:
    model = deepseek_maker.model(kind=V32, **changes)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, *degrees)
    ran = cli("verify", tmp_path / "megatron")
    assert ran.code == 0, ran.out
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert after.config.model_type == V32 and after.config.index_topk == 4
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))
    assert not torch.equal(moe_maker.logits(_with_all_tokens(tmp_path / "back")), moe_maker.logits(model))


def _with_all_tokens(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, index_topk=64).eval()


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_its_layers_that_predict_further_tokens_come_back(form: str, tmp_path: Path) -> None:
    want = deepseek_maker.save_with_further_layers(tmp_path / "hf", 1, V32)
    assert "model.layers.4.self_attn.indexer.wk.weight" in want
    convert(tmp_path / "hf", tmp_path / "megatron", form, "--tp", 2, "--ep", 2)
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), want)


def test_every_rank_has_the_whole_indexer(tmp_path: Path) -> None:
    deepseek_maker.model(kind=V32).save_pretrained(tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "megatron", "--to", "megatron:legacy", "--tp", 2)
    assert ran.code == 0 and "dsa_indexer_rope_interleaved" in ran.out, ran.out
    want = load_file(tmp_path / "hf/model.safetensors")
    for rank in range(2):
        content = load_pt(tmp_path / f"megatron/release/mp_rank_0{rank}/model_optim_rng.pt")
        for name, own in {
            "linear_wq_b.weight": "wq_b.weight",
            "linear_wk.weight": "wk.weight",
            "k_norm.weight": "k_norm.weight",
            "k_norm.bias": "k_norm.bias",
            "linear_weights_proj.weight": "weights_proj.weight",
        }.items():
            have = content["model"][f"decoder.layers.1.{INDEXER}{name}"]
            assert torch.equal(have, want[f"model.layers.1.self_attn.indexer.{own}"]), name
        args = content["args"]
        assert (args.dsa_indexer_n_heads, args.dsa_indexer_head_dim, args.dsa_indexer_topk) == (3, 10, 4)
        assert args.experimental_attention_variant == "dsa" and args.dsa_indexer_rope_interleaved is False


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize("lost", ["linear_wk.weight", "k_norm.bias"])
def test_a_lost_part_of_it_is_missed(lost: str, form: str, tmp_path: Path) -> None:
    deepseek_maker.model(kind=V32).save_pretrained(tmp_path / "hf")
    name = "model.layers.2.self_attn.indexer." + lost.removeprefix("linear_")
    edit_safetensors(tmp_path / "hf/model.safetensors", lambda tensors: tensors.pop(name))
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", f"megatron:{form}")
    assert ran.code != 0 and name in ran.out and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        # Older versions state nothing, and rotate the last part of each head.
        ("dsa_indexer_rope_interleaved", None),
        ("dsa_indexer_rope_interleaved", True),
        ("dsa_indexer_scoring_relu", False),
        ("dsa_indexer_k_norm_epsilon", 1e-5),
        ("dsa_indexer_topk", None),
        ("dsa_indexer_head_dim", 4),
        ("dsa_indexer_topk_freq", 4),
    ],
)
def test_an_indexer_that_computes_otherwise_is_refused(key: str, value: object, tmp_path: Path) -> None:
    deepseek_maker.model(kind=V32).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "legacy")
    for file in (tmp_path / "megatron/release").rglob("*.pt"):
        edit_pt(file, lambda content: setattr(content["args"], key, value))
    (tmp_path / "megatron/fastshard.manifest.json").unlink()
    ran = cli("convert", tmp_path / "megatron", tmp_path / "out", "--to", "hf", "--vocab-size", 250)
    assert ran.code == 2 and key in json.dumps(ran.errors) and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize("target", ["dcp:torchtitan", "maxtext"])
def test_frameworks_without_it_refuse_it_by_name(target: str, tmp_path: Path) -> None:
    deepseek_maker.model(kind=V32).save_pretrained(tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", target)
    assert ran.code == 2 and ran.having("FS514") and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2"])
def test_kimi_with_a_tower_is_converted_and_comes_back(name: str, tmp_path: Path) -> None:
    want = deepseek_maker.save_with_tower(tmp_path / "whole")
    config = json.loads((tmp_path / "whole/config.json").read_text())
    config["text_config"]["model_type"] = name
    (tmp_path / "whole/config.json").write_text(json.dumps(config))
    assert "language_model.lm_head.weight" in want
    ran = cli("convert", tmp_path / "whole", tmp_path / "megatron", "--to", "megatron", "--tp", 2, "--ep", 2)
    assert ran.code == 0 and ran.having("FS212", severity="warning"), ran.out
    back = to_hf(tmp_path / "megatron", tmp_path / "back", "--config", tmp_path / "whole/config.json")
    text = {key: tensor for key, tensor in want.items() if key.startswith("language_model.")}
    assert {f"language_model.{key}" for key in back} == text.keys()
    assert all(torch.equal(back[key.removeprefix("language_model.")], value) for key, value in text.items())
    ran = cli("merge", tmp_path / "back", tmp_path / "out", "--fill-from", tmp_path / "whole")
    assert ran.code == 0, ran.out
    same(read_result(tmp_path / "out"), want)


def test_kimi_as_transformers_saves_it_is_merged(tmp_path: Path) -> None:
    """Its text layers lie under the tower's name there, by which it finds them again."""
    want = deepseek_maker.save_with_tower(tmp_path / "whole", as_the_hub=False)
    assert any(".blocks." in name for name in want if name.startswith("language_model."))
    ran = cli("merge", tmp_path / "whole", tmp_path / "out")
    assert ran.code == 0, ran.out
    same(read_result(tmp_path / "out"), want)


def test_kinds_of_layers_in_a_config_are_those_of_the_model(tmp_path: Path) -> None:
    model = deepseek_maker.model(kind=V32, mlp_layer_types=["dense", "dense", "sparse", "sparse"])
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "legacy", "--ep", 2)
    back = to_hf(tmp_path / "megatron", tmp_path / "back", "--config", tmp_path / "hf/config.json")
    same(back, load_file(tmp_path / "hf/model.safetensors"))
