"""GLM-4.5 to Megatron-LM and back: DeepSeek-V3's mixture with keys and values of heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepseek_maker
import moe_maker
import pytest
import torch
from helpers import assert_refused, cli, edit_safetensors
from megatron_trips import convert, same, to_hf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        ({}, ("--tp", 2, "--pp", 2, "--ep", 2)),
        ({"use_qk_norm": False, "first_k_dense_replace": 2}, ("--tp", 2, "--ep", 4, "--etp", 1)),
        ({"attention_bias": False, "n_group": 4, "topk_group": 2}, ("--pp", 4)),
        ({"first_k_dense_replace": 0, "tie_word_embeddings": True, "n_shared_experts": 2}, ("--ep", 8)),
    ],
    ids=["plain", "air", "groups", "tied"],
)
def test_it_comes_back_with_the_logits(
    changes: dict[str, Any], degrees: tuple[object, ...], form: str, tmp_path: Path
) -> None:
    model = moe_maker.glm(**changes)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, *degrees)
    ran = cli("verify", tmp_path / "megatron")
    assert ran.code == 0, ran.out
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert type(after).__name__ == "Glm4MoeForCausalLM"
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_its_layers_that_predict_further_tokens_come_back(form: str, tmp_path: Path) -> None:
    moe_maker.glm(num_mtp_layers=1).save_pretrained(tmp_path / "hf")
    want = deepseek_maker.add_further_layers(tmp_path / "hf", 1)
    assert "model.layers.4.self_attn.q_norm.weight" in want
    assert cli("verify", tmp_path / "hf", "--error", "FS116").code == 0
    convert(tmp_path / "hf", tmp_path / "megatron", form, "--tp", 2, "--ep", 2)
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), want)
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("part", ["self_attn.q_norm.weight", "self_attn.v_proj.bias", "mlp.gate.weight"])
def test_a_missing_tensor_is_found(part: str, tmp_path: Path) -> None:
    moe_maker.glm().save_pretrained(tmp_path / "hf")
    lost = f"model.layers.2.{part}"
    edit_safetensors(tmp_path / "hf/model.safetensors", lambda tensors: tensors.pop(lost))
    ran = assert_refused(
        tmp_path / "hf", tmp_path / "out", "FS102", exit=3, command=("convert", "--to", "megatron")
    )
    assert [finding["tensor"] for finding in ran.errors] == [lost]


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("maxtext", "no MaxText layout for the family 'glm4_moe'"),
        ("dcp:torchtitan", "torchtitan has no model of the type 'glm4_moe'"),
    ],
)
def test_trainers_that_do_not_have_it_refuse_it_by_name(to: str, message: str, tmp_path: Path) -> None:
    moe_maker.glm().save_pretrained(tmp_path / "hf")
    ran = assert_refused(tmp_path / "hf", tmp_path / "out", "FS514", exit=2, command=("convert", "--to", to))
    assert message in ran.errors[0]["message"]
