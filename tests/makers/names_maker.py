"""A Hugging Face state dict under the names of other trainers.

The names, and which tensor is turned, are read in torchtitan models/llama3 and OLMo-core nn/hf/convert.py.
"""

from __future__ import annotations

import torch

#: Of one layer; the rest is in `rename`.
TITAN = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
OLMO = {
    "self_attn.q_proj": "attention.w_q",
    "self_attn.k_proj": "attention.w_k",
    "self_attn.v_proj": "attention.w_v",
    "self_attn.o_proj": "attention.w_out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
NORMS = {
    "llama": {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"},
    "olmo2": {
        "post_attention_layernorm": "attention_norm",
        "post_feedforward_layernorm": "feed_forward_norm",
    },
}


def titan(
    state: dict[str, torch.Tensor], heads: int, groups: int, *, turned: bool, meta: bool = False
) -> dict[str, torch.Tensor]:
    """Hugging Face's state dict as torchtitan has it; `meta` is the spelling of Meta and of torchtitan before
    2026."""
    found = {}
    for name, tensor in state.items():
        value = tensor.clone()
        for part, count in (("q_proj", heads), ("k_proj", groups)):
            if turned and part in name:
                rows, columns = value.shape
                value = (
                    value.view(count, 2, rows // count // 2, columns).transpose(1, 2).reshape(rows, columns)
                )
        if name.startswith("model.layers."):
            _, _, layer, *inner = name.split(".")
            name = f"layers.{layer}.{TITAN['.'.join(inner[:-1])]}.{inner[-1]}"
        name = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}.get(
            name, name
        )
        if meta:
            name = name.replace("qkv_linear.", "").replace("lm_head.", "output.")
        found[name] = value
    return found


def olmo(state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    table = OLMO | NORMS["olmo2" if kind == "olmo2" else "llama"]
    found = {}
    for name, tensor in state.items():
        if name.startswith("model.layers."):
            _, _, layer, *inner = name.split(".")
            name = f"blocks.{layer}.{table['.'.join(inner[:-1])]}.{inner[-1]}"
        whole = {
            "model.embed_tokens.weight": "embeddings.weight",
            "model.norm.weight": "lm_head.norm.weight",
            "lm_head.weight": "lm_head.w_out.weight",
        }
        found[f"model.{whole.get(name, name)}"] = tensor.clone()
    return found
