"""Qwen3.5 and 3.6 to Megatron-LM and back: gated delta nets, all layers with an MLP or all with experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import delta_maker
import moe_maker
import pytest
import torch
from helpers import ask_transformers_here, cli, edit_safetensors, load_pt, read_result
from megatron_trips import convert, same, to_hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

KINDS = ["qwen3_5_text", "qwen3_5_moe_text"]


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        ({}, ("--tp", 2, "--pp", 2)),
        ({"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3}, ("--tp", 4)),
        ({"tie_word_embeddings": True, "linear_num_value_heads": 4}, ("--tp", 2, "--pp", 4)),
        ({"layer_types": ["full_attention"] * 4}, ("--tp", 2)),
    ],
    ids=["plain", "types", "tied", "heads_alone"],
)
def test_they_come_back_with_their_logits(
    changes: dict[str, Any], degrees: tuple[object, ...], kind: str, form: str, tmp_path: Path
) -> None:
    model = delta_maker.model(kind=kind, **changes)
    model.save_pretrained(tmp_path / "hf")
    degrees = (*degrees, "--ep", 2) if "moe" in kind else degrees
    convert(tmp_path / "hf", tmp_path / "megatron", form, *degrees)
    ran = cli("verify", tmp_path / "megatron")
    assert ran.code == 0, ran.out
    back = to_hf(tmp_path / "megatron", tmp_path / "back", "--config", tmp_path / "hf/config.json")
    # As the hub has the experts, whatever the source has.
    same(back, delta_maker.stack_experts(load_file(tmp_path / "hf/model.safetensors")))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert after.config.model_type == kind
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))


def test_a_dense_model_is_known_without_a_config(tmp_path: Path) -> None:
    delta_maker.model(kind="qwen3_5_text").save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "legacy", "--tp", 2)
    ran = cli("convert", tmp_path / "megatron", tmp_path / "back", "--to", "hf", "--vocab-size", 250)
    assert ran.code == 0, ran.out
    same(read_result(tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_that_predicts_a_further_token_comes_back(kind: str, form: str, tmp_path: Path) -> None:
    want = delta_maker.save_with_further_layer(tmp_path / "hf", kind=kind)
    assert any(name.startswith("mtp.layers.0.mlp.") for name in want)
    convert(tmp_path / "hf", tmp_path / "megatron", form, "--tp", 2)
    args = load_pt(next((tmp_path / "megatron/release").rglob("*.pt")))["args"]
    assert (args.num_layers, args.mtp_num_layers, args.linear_attention_freq) == (4, 1, [1, 1, 1, 0])
    same(
        to_hf(tmp_path / "megatron", tmp_path / "back", "--config", tmp_path / "hf/config.json"),
        delta_maker.stack_experts(want),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "gone", ["mtp.fc.weight", "mtp.layers.0.self_attn.q_norm.weight", "mtp.layers.0.mlp."]
)
def test_a_part_of_that_layer_is_missed(gone: str, kind: str, tmp_path: Path) -> None:
    state = delta_maker.save_with_further_layer(tmp_path / "hf", kind=kind)
    name = next(name for name in state if name.startswith(gone))
    edit_safetensors(tmp_path / "hf/model.safetensors", lambda tensors: tensors.pop(name))
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert ran.code != 0 and name in ran.out and not (tmp_path / "out").exists()


@pytest.mark.parametrize("further", [False, True], ids=["apart", "further_stacked"])
def test_stacked_experts_mean_the_same(further: bool, tmp_path: Path) -> None:
    """The hub holds those of Qwen3.5 stacked but in the further layer, and all of 3.6."""
    state = delta_maker.save_with_further_layer(tmp_path / "hf", kind="qwen3_5_moe_text")
    convert(tmp_path / "hf", tmp_path / "want", "torch_dist", "--ep", 2)
    state = delta_maker.stack_experts(state, "" if further else "model.")
    save_file(state, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "have", "torch_dist", "--ep", 2)
    for file in (tmp_path / "want/release").iterdir():
        assert file.read_bytes() == (tmp_path / "have/release" / file.name).read_bytes(), file.name


def test_a_config_of_another_class_is_refused(tmp_path: Path) -> None:
    """In Megatron's names two classes have the same tensors: the config decides, if its class has them."""
    delta_maker.model(kind="qwen3_5_moe_text").save_pretrained(tmp_path / "hf")
    delta_maker.model(kind="qwen3_5_text").save_pretrained(tmp_path / "dense")
    convert(tmp_path / "hf", tmp_path / "megatron", "legacy", "--tp", 2)
    own = json.loads((tmp_path / "hf/config.json").read_text())
    for name, model_type, architecture in (
        ("next", "qwen3_next", "Qwen3NextForCausalLM"),
        ("own", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        ("unknown", "qwen9", "Qwen3NextForCausalLM"),
        ("dense", "qwen3_5_text", None),
        ("llama", "llama", None),
        ("moe", "qwen3_moe", None),
    ):
        config = tmp_path / f"{name}.json"
        config.write_text(json.dumps(own | {"model_type": model_type}))
        out = tmp_path / f"of_{name}"
        ran = cli(
            "convert", tmp_path / "megatron", out, "--to", "hf", "--vocab-size", 250, "--config", config
        )
        if architecture is None:
            assert ran.code == 2 and ran.having("FS514"), (name, ran.out)
            continue
        assert ran.code == 0, (name, ran.out)
        assert json.loads((out / "config.json").read_text())["architectures"] == [architecture]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_text_model_beside_a_tower_is_converted_and_comes_back(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    """Megatron-LM holds the text model alone: the tower is left out, said, and taken again."""
    want = delta_maker.save_with_tower(tmp_path / "whole", kind=kind, tie_word_embeddings=tied)
    ran = cli("convert", tmp_path / "whole", tmp_path / "megatron", "--to", "megatron:legacy", "--tp", 2)
    assert ran.code == 0 and ran.having("FS212", message="model.visual.*: 33 tensors are left out"), ran.out
    delta_maker.save_text_alone(tmp_path / "whole", tmp_path / "text")
    convert(tmp_path / "text", tmp_path / "same", "legacy", "--tp", 2)
    for file in (tmp_path / "same").rglob("*.pt"):
        assert file.read_bytes() == (tmp_path / "megatron" / file.relative_to(tmp_path / "same")).read_bytes()
    to_hf(tmp_path / "megatron", tmp_path / "back", "--config", tmp_path / "whole/config.json")
    ran = cli("merge", tmp_path / "back", tmp_path / "out", "--fill-from", tmp_path / "whole")
    assert ran.code == 0, ran.out
    same(read_result(tmp_path / "out"), want)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (
        config["architectures"] == json.loads((tmp_path / "whole/config.json").read_text())["architectures"]
    )
    lost = next(name for name in want if name.endswith("in_proj_qkv.weight"))
    edit_safetensors(tmp_path / "whole/model.safetensors", lambda tensors: tensors.pop(lost))
    ran = cli("convert", tmp_path / "whole", tmp_path / "bad", "--to", "megatron")
    assert ran.code != 0 and lost in ran.out and not (tmp_path / "bad").exists(), ran.out


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_tensor_of_a_tower_is_missed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table describes the text model; transformers lists the tower."""
    ask_transformers_here(monkeypatch, tmp_path / "cache")
    want = delta_maker.save_with_tower(tmp_path / "hf", kind=kind)
    assert cli("merge", tmp_path / "hf", tmp_path / "out").code == 0
    lost = "model.visual.blocks.0.attn.qkv.weight"
    edit_safetensors(tmp_path / "hf/model.safetensors", lambda tensors: tensors.pop(lost))
    for command in (("merge",), ("convert", "--to", "megatron")):
        ran = cli(command[0], tmp_path / "hf", tmp_path / "bad", *command[1:])
        assert ran.code == 3 and ran.having("FS102", tensor=lost), ran.out
        assert not (tmp_path / "bad").exists()
    tower = [name for name in want if name.startswith("model.visual.") and name != lost]
    edit_safetensors(tmp_path / "hf/model.safetensors", lambda tensors: [tensors.pop(n) for n in tower])
    ran = cli("merge", tmp_path / "hf", tmp_path / "bad")
    assert ran.code == 3 and not (tmp_path / "bad").exists(), ran.out


def test_a_text_model_without_a_name_is_that_of_its_whole(tmp_path: Path) -> None:
    delta_maker.save_with_tower(tmp_path / "hf", kind="qwen3_5_moe_text")
    convert(tmp_path / "hf", tmp_path / "want", "legacy", "--ep", 2)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    del config["text_config"]["model_type"]
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    convert(tmp_path / "hf", tmp_path / "have", "legacy", "--ep", 2)
    for file in (tmp_path / "want").rglob("*.pt"):
        assert file.read_bytes() == (tmp_path / "have" / file.relative_to(tmp_path / "want")).read_bytes()
    to_hf(tmp_path / "have", tmp_path / "back", "--config", tmp_path / "hf/config.json")
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "qwen3_5_moe_text"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_its_head_is_merged(kind: str, tmp_path: Path) -> None:
    """transformers saves it without the prefix that the table's names have."""
    delta_maker.model(kind=kind).model.save_pretrained(tmp_path / "hf")
    ran = cli("merge", tmp_path / "hf", tmp_path / "out")
    assert ran.code == 0, ran.out
    same(read_result(tmp_path / "out"), load_file(tmp_path / "hf/model.safetensors"))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"]},
        {"linear_key_head_dim": 7},
        {"linear_num_value_heads": 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_config_of_other_layers_is_not_passed_over(changes: dict[str, Any], tmp_path: Path) -> None:
    delta_maker.model(kind="qwen3_5_text").save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "legacy", "--tp", 2)
    config = json.loads((tmp_path / "hf/config.json").read_text()) | changes
    (tmp_path / "other.json").write_text(json.dumps(config))
    command = ("--to", "hf", "--vocab-size", 250, "--config", tmp_path / "other.json")
    ran = cli("convert", tmp_path / "megatron", tmp_path / "out", *command)
    assert ran.code != 0 and not (tmp_path / "out").exists(), ran.out
