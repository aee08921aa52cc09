"""Tiny models with gated delta nets in most layers and attention with an output gate in the others, by
transformers: Qwen3-Next, and Qwen3.5 with an MLP or a mixture of experts in each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

State = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
#: Classes and their configs, by the model type.
KINDS = {
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig),
    "qwen3_5_text": (Qwen3_5ForCausalLM, Qwen3_5TextConfig),
    "qwen3_5_moe_text": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig),
}
#: Sizes that a model without experts has not.
_OF_EXPERTS = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
)


def model(seed: int = 0, kind: str = "qwen3_next", **changes: Any) -> Any:
    """A tiny model whose router tells the experts apart."""
    torch.manual_seed(seed)
    of, config = KINDS[kind]
    sizes = SIZES if kind != "qwen3_5_text" else {k: v for k, v in SIZES.items() if k not in _OF_EXPERTS}
    network = of(config(**(sizes | changes)))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            # Larger matrices make a model in which rounding grows to 1e-2 in the logits.
            parameter.normal_(0, 0.08 if parameter.ndim > 1 else 0.3)
            if name.endswith("linear_attn.norm.weight"):
                # From 0.5 on, less 1 is exact: Megatron stores it so.
                parameter.abs_().add_(0.5)
    return network.eval()


def save_with_further_layer(folder: Path, **changes: Any) -> State:
    """Saves a model with the layer that predicts a further token, as the family's own files hold it.

    transformers has no such layer; its block is that of a layer with attention.
    source: Qwen/Qwen3-Next-80B-A3B-Instruct model.safetensors.index.json
    """
    model(**changes).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    begin, width = f"model.layers.{SIZES['num_hidden_layers'] - 1}.", SIZES["hidden_size"]
    torch.manual_seed(9)
    for name, tensor in list(state.items()):
        if name.startswith(begin):
            state["mtp.layers.0." + name.removeprefix(begin)] = torch.randn_like(tensor)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        state[f"mtp.{name}.weight"] = torch.randn(width)
    state["mtp.fc.weight"] = torch.randn(width, 2 * width)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return state


def stack_experts(state: State, below: str = "model.") -> State:
    """Returns the tensors with the experts of each layer below a name as the hub has them: in one tensor."""
    layers = sorted({name.partition(".experts.")[0] for name in state if ".mlp.experts." in name})
    stacked = dict(state)
    for layer in (layer for layer in layers if layer.startswith(below)):
        of = f"{layer}.experts."
        count = sum(name.startswith(of) and name.endswith(".up_proj.weight") for name in state)
        part = {
            kind: [stacked.pop(f"{of}{n}.{kind}_proj.weight") for n in range(count)]
            for kind in ("gate", "up", "down")
        }
        pairs = zip(part["gate"], part["up"], strict=True)
        stacked[f"{of}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        stacked[f"{of}down_proj"] = torch.stack(part["down"])
    return stacked


#: Classes of a text model beside a tower that sees, and their configs, by the model type of the text.
TOWERS = {
    "qwen3_5_text": (Qwen3_5ForConditionalGeneration, Qwen3_5Config),
    "qwen3_5_moe_text": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig),
}
_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def save_with_tower(folder: Path, kind: str, sizes: dict[str, Any] | None = None, **changes: Any) -> State:
    """Saves a text model beside a tower that sees, its experts as the hub has them.

    Args:
        folder: where the model is saved.
        kind: the model type of the text.
        sizes: sizes of the text model that differ from :data:`SIZES`.
        changes: settings of both the text model and the model around it.
    """
    torch.manual_seed(0)
    of, config = TOWERS[kind]
    text = SIZES if kind != "qwen3_5_text" else {k: v for k, v in SIZES.items() if k not in _OF_EXPERTS}
    text = text | (sizes or {})
    of(config(text_config=text | changes, vision_config=_TOWER, **changes)).save_pretrained(folder)
    state = stack_experts(load_file(folder / "model.safetensors"))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return state


def save_text_alone(whole: Path, folder: Path) -> None:
    """Saves the text model of a model with a tower, as transformers loads it."""
    AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).save_pretrained(folder)
