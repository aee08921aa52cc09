"""torchtitan's names of Qwen3.5, dense and MoE, both ways.

The tensors are laid out by hand, as torchtitan's model names and uses them. Its own adapter also transposes
the experts, because it expects another order than transformers 5 has. What its layers compute decides.
source: torchtitan models/qwen3_5/{model,gdn,state_dict_adapter}.py, models/common/moe.py (w1_EFD, w2_EDF)
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import delta_maker
import moe_maker
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from fastshard import convert
from helpers import assert_refused, cli, read_result
from safetensors.torch import load_file, save_file
from test_spellings import equal, loaded

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "moe": ("qwen3_5_moe_text", {}),
    "dense": ("qwen3_5_text", {}),
    "tied": ("qwen3_5_text", {"tie_word_embeddings": True}),
}
_MODULES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn.wq",
    "self_attn.k_proj": "attn.wk",
    "self_attn.v_proj": "attn.wv",
    "self_attn.o_proj": "attn.wo",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "linear_attn.in_proj_z": "attn.in_proj_z",
    "linear_attn.in_proj_a": "attn.in_proj_a",
    "linear_attn.in_proj_b": "attn.in_proj_b",
    "linear_attn.norm": "attn.norm",
    "linear_attn.out_proj": "attn.out_proj",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate": "moe.router.gate",
    "mlp.shared_expert.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_expert.up_proj": "moe.shared_experts.w3",
    "mlp.shared_expert.down_proj": "moe.shared_experts.w2",
    "mlp.shared_expert_gate": "moe.shared_experts.gate",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}


@cache
def files(kind: str) -> tuple[dict[str, torch.Tensor], str, torch.Tensor]:
    """The tensors of a model with experts in one tensor, the text of config.json, and the logits."""
    model_type, changes = KINDS[kind]
    made = delta_maker.model(kind=model_type, **changes)
    with TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        tensors = delta_maker.stack_experts(load_file(Path(folder) / "model.safetensors"))
        return tensors, (Path(folder) / "config.json").read_text(), moe_maker.logits(made)


def hf(kind: str, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    tensors, config, _ = files(kind)
    (folder / "config.json").write_text(json.dumps(json.loads(config) | changes))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def by_hand(kind: str) -> dict[str, torch.Tensor]:
    """What torchtitan has of a model."""
    tensors, config, _ = files(kind)
    sizes = json.loads(config)
    keys = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = tensor
            continue
        _, _, layer, *inner = name.split(".")
        module, _, leaf = ".".join(inner).rpartition(".")
        at = f"layers.{layer}."
        if leaf == "gate_up_proj":
            # F.linear(x, gate_up_proj[e]) in transformers, x @ w1_EFD[e].T in torchtitan.
            gate, up = tensor.chunk(2, 1)
            experts = f"{at}moe.routed_experts.inner_experts."
            found[f"{experts}w1_EFD"], found[f"{experts}w3_EFD"] = gate, up
        elif leaf == "down_proj":
            found[f"{at}moe.routed_experts.inner_experts.w2_EDF"] = tensor
        elif module in ("linear_attn.in_proj_qkv", "linear_attn.conv1d"):
            word = "in_proj" if module.endswith("qkv") else "conv"
            parts = tensor.split([keys, keys, len(tensor) - 2 * keys])
            found |= {f"{at}attn.{word}_{p}.weight": t for p, t in zip("qkv", parts, strict=True)}
        elif module == "linear_attn":
            found[f"{at}attn.{leaf}"] = tensor
        else:
            found[f"{at}{_MODULES[module]}.{leaf}"] = tensor
    if kind == "tied":
        # A state dict has a tied head under its own name too.
        found["lm_head.weight"] = found["tok_embeddings.weight"]
    return {name: tensor.contiguous() for name, tensor in found.items()}


def titan(kind: str, folder: Path, state: dict[str, torch.Tensor] | None = None) -> Path:
    """torchtitan's checkpoint, with the model's config.json beside it."""
    dcp.save(by_hand(kind) if state is None else state, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(files(kind)[1])
    return folder


def assert_back(folder: Path, kind: str) -> None:
    have, want = delta_maker.stack_experts(read_result(folder)), files(kind)[0]
    equal({name: have[name] for name in have if name in want}, want)
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(moe_maker.logits(made.eval()), files(kind)[2])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_as_torchtitan_lays_it_out(kind: str, tp: int, tmp_path: Path) -> None:
    ran = cli("convert", hf(kind, tmp_path / "hf"), tmp_path / "out", "--to", "dcp:torchtitan", "--tp", tp)
    assert ran.code == 0, ran.out
    equal(loaded(tmp_path / "out"), by_hand(kind))
    assert cli("convert", tmp_path / "out", tmp_path / "back", "--to", "hf").code == 0
    assert_back(tmp_path / "back", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_torchtitans_checkpoint_converts(kind: str, tmp_path: Path) -> None:
    source = titan(kind, tmp_path / "in")
    assert cli("convert", source, tmp_path / "back", "--to", "hf").code == 0
    assert_back(tmp_path / "back", kind)
    # A merge keeps the names that it finds.
    assert cli("merge", source, tmp_path / "merged").code == 0
    equal(read_result(tmp_path / "merged"), by_hand(kind))


def test_older_names_of_experts_are_read(tmp_path: Path) -> None:
    state = {}
    for name, tensor in by_hand("moe").items():
        older = name.replace("routed_experts.inner_experts", "experts")
        state[older.removesuffix("_EFD").removesuffix("_EDF")] = tensor
    assert cli("convert", titan("moe", tmp_path / "in", state), tmp_path / "back", "--to", "hf").code == 0
    assert_back(tmp_path / "back", "moe")


def test_it_goes_to_megatron_and_back(tmp_path: Path) -> None:
    convert(titan("moe", tmp_path / "in"), tmp_path / "megatron", to="megatron", tp=2, ep=2)
    # Two classes of transformers have these tensors, and torchtitan computes one of them.
    config = hf("moe", tmp_path / "hf") / "config.json"
    convert(tmp_path / "megatron", tmp_path / "again", to="dcp:torchtitan", vocab_size=250, config=config)
    equal(loaded(tmp_path / "again"), by_hand("moe"))


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_every_lost_tensor_is_named(kind: str, tmp_path: Path) -> None:
    state = by_hand(kind)
    lost_names = sorted(name for name in state if name.startswith(("layers.1.", "layers.3.", "norm.")))
    for i, lost in enumerate(lost_names):
        source = titan(kind, tmp_path / str(i), {n: t for n, t in state.items() if n != lost})
        ran = cli("convert", source, tmp_path / "out", "--to", "hf")
        assert ran.code == 3 and [f["tensor"] for f in ran.errors] == [lost], ran.out
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["layers.1.attn.wq.weight", "layers.3.attn.A_log", "layers.1.moe.extra"])
def test_a_tensor_that_the_model_does_not_have_is_refused(name: str, tmp_path: Path) -> None:
    source = titan("moe", tmp_path / "in", by_hand("moe") | {name: torch.zeros(8)})
    assert_refused(source, tmp_path / "out", "FS207", command=("convert", "--to", "hf"), tensor=name)


def test_what_torchtitan_does_not_compute_is_refused(tmp_path: Path) -> None:
    command = ("convert", "--to", "dcp:torchtitan")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    source = hf("dense", tmp_path / "yarn", rope_parameters=yarn | {"partial_rotary_factor": 0.5})
    assert_refused(source, tmp_path / "out", "FS514", exit=2, command=command)
    delta_maker.save_with_further_layer(tmp_path / "next")
    assert_refused(tmp_path / "next", tmp_path / "out", "FS514", exit=2, command=command)
