"""Tiny models of DeepSeek-V3's kind, by transformers: attention over a latent, dense layers first, shared
experts, groups of experts; of V3.2, whose indexer chooses the tokens that attention sees; and of Kimi-K2.5,
which has a tower that sees beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
)

State = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "num_nextn_predict_layers": 0,
}
#: Of an indexer: fewer tokens than the tests' text has.
INDEXER = {"index_n_heads": 3, "index_head_dim": 10, "index_topk": 4}
#: As DeepSeek-V3's own config.json has it.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def save_with_further_layers(folder: Path, depth: int, kind: str = "deepseek_v3") -> State:
    """Saves a model with layers that predict further tokens, as DeepSeek-V3's own files hold them."""
    model(kind=kind, num_nextn_predict_layers=depth).save_pretrained(folder)
    return add_further_layers(folder, depth)


def add_further_layers(folder: Path, depth: int) -> State:
    """Adds layers that predict further tokens to the files of a model.

    transformers has no such layers; their block is that of a layer with experts, their embedding and head are
    copies. source: deepseek-ai/DeepSeek-V3 README_WEIGHTS.md; zai-org/GLM-4.5 has the same
    """
    state = load_file(folder / "model.safetensors")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    width = len(state["model.norm.weight"])
    torch.manual_seed(9)
    for layer in range(layers, layers + depth):
        begin = f"model.layers.{layer}."
        for name, tensor in list(state.items()):
            if name.startswith(f"model.layers.{layers - 1}."):
                state[begin + name.split(".", 3)[3]] = torch.randn_like(tensor)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            state[f"{begin}{name}.weight"] = torch.randn(width)
        state[f"{begin}eh_proj.weight"] = torch.randn(width, 2 * width)
        state[f"{begin}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        state[f"{begin}shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return state


def model(seed: int = 0, kind: str = "deepseek_v3", **changes: Any) -> Any:
    """A tiny model whose router tells the experts apart."""
    torch.manual_seed(seed)
    if kind == "deepseek_v32":
        network = DeepseekV32ForCausalLM(DeepseekV32Config(**(SIZES | INDEXER | changes)))
    else:
        network = DeepseekV3ForCausalLM(DeepseekV3Config(**(SIZES | changes)))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.3)
        for name, buffer in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return network.eval()


def save_with_tower(folder: Path, *, as_the_hub: bool = True, **changes: Any) -> State:
    """Saves a DeepSeek-V3 beside a tower that sees: Kimi-K2.5."""
    torch.manual_seed(0)
    tower = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    }
    text = SIZES | {"model_type": "deepseek_v3"} | changes
    config = Kimi_K25Config(
        text_config=text, vision_config=tower, projection_hidden_size=16, tie_word_embeddings=False
    )
    Kimi_K25ForConditionalGeneration(config).save_pretrained(folder)
    if not as_the_hub:
        return load_file(folder / "model.safetensors")
    # transformers 5.24 saves the text model's layers under the name of the tower's, and not under their own.
    # source: moonshotai/Kimi-K2.5 model.safetensors.index.json
    state = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return state
