"""A Hugging Face state dict under the names of other trainers.

The names, and which tensor is turned, are read in torchtitan models/llama3 and OLMo-core nn/hf/convert.py;
those of experts and of DeepSeek-V3 in torchtitan models/{qwen3,deepseek_v3}/state_dict_adapter.py and
models/common/moe.py.
"""

from __future__ import annotations

import re

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


#: Of a layer with experts or with attention over a latent, besides those of TITAN.
TITAN_MOE = {
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "mlp.gate": "moe.router.gate",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
}
#: What torchtitan calls the stacked experts and the bias of the router since July 2026, what it called them
#: since May 2026, and before.
TITAN_EXPERTS = (
    ({"gate": "w1_EFD", "up": "w3_EFD", "down": "w2_EDF"}, "routed_experts.inner_experts", "expert_bias_E"),
    ({"gate": "w1_EFD", "up": "w3_EFD", "down": "w2_EDF"}, "experts", "expert_bias_E"),
    ({"gate": "w1", "up": "w3", "down": "w2"}, "experts", "expert_bias"),
)
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def titan_moe(
    state: dict[str, torch.Tensor], sizes: dict[str, int], *, age: int = 0, halves: bool = False
) -> dict[str, torch.Tensor]:
    """A Hugging Face file of Qwen3-MoE or DeepSeek-V3, one tensor for each expert, as torchtitan has it.

    Args:
        state: the tensors of the file.
        sizes: the config, for DeepSeek-V3.
        age: which of TITAN_EXPERTS.
        halves: whether rotary pairs of the file lie one half after the other; torchtitan's lie side by side.
    """
    words, holder, bias = TITAN_EXPERTS[age]
    mla = "kv_lora_rank" in sizes
    table = TITAN | TITAN_MOE | ({"self_attn.q_proj": "attention.wq"} if mla else {})
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in state.items():
        if match := _EXPERT.fullmatch(name):
            layer, number, part = match.groups()
            experts.setdefault(f"layers.{layer}.moe.{holder}.{words[part]}", {})[int(number)] = tensor
            continue
        value = tensor.clone()
        if halves and name.endswith(("q_b_proj.weight", "q_proj.weight", "kv_a_proj_with_mqa.weight")):
            heads = 1 if "kv_a" in name else sizes["num_attention_heads"]
            rope = sizes["qk_rope_head_dim"]
            rows = value.view(heads, -1, value.shape[-1])
            first, second = rows[:, -rope : -rope // 2], rows[:, -rope // 2 :]
            paired = torch.stack((first, second), 2).flatten(1, 2)
            value = torch.cat((rows[:, :-rope], paired), 1).reshape(value.shape)
        if name.startswith("model.layers."):
            _, _, layer, *inner = name.split(".")
            own = ".".join(inner)
            name = (
                f"layers.{layer}.moe.{bias}"
                if own == "mlp.gate.e_score_correction_bias"
                else f"layers.{layer}.{table[own.removesuffix('.weight')]}.weight"
            )
        whole = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}
        found[whole.get(name, name)] = value
    return found | {name: torch.stack([one[n] for n in range(len(one))]) for name, one in experts.items()}


#: Of a layer of gpt-oss, besides those of TITAN; and what its stacked experts were called, as
#: in TITAN_EXPERTS.
TITAN_GPT_OSS = {"self_attn.sinks": "attention.sinks", "mlp.router": "moe.router.gate"}
_OSS_SUFFIXES = {"mlp1_weight": "EGD", "mlp1_bias": "EG", "mlp2_weight": "EDF", "mlp2_bias": "ED"}
_OSS_EXPERTS = {"gate_up_proj": "mlp1", "down_proj": "mlp2"}


def titan_gpt_oss(state: dict[str, torch.Tensor], age: int = 0) -> dict[str, torch.Tensor]:
    """A Hugging Face file of gpt-oss as torchtitan has it: its experts have outputs first.

    Args:
        state: the tensors of the file.
        age: 0 for names since July 2026, 1 for those since May 2026, and 2 for those before.
    """
    found = {}
    for name, tensor in state.items():
        value = tensor.clone()
        if name.startswith("model.layers."):
            _, _, layer, *inner = name.split(".")
            own = ".".join(inner)
            if own.startswith("mlp.experts."):
                word = own.removeprefix("mlp.experts.").removesuffix("_bias")
                kind = f"{_OSS_EXPERTS[word]}_{'bias' if own.endswith('_bias') else 'weight'}"
                value = value if own.endswith("_bias") else value.transpose(1, 2).contiguous()
                holder = "experts" if age else "routed_experts.inner_experts"
                suffix = "" if age == 2 else f"_{_OSS_SUFFIXES[kind]}"
                name = f"layers.{layer}.moe.{holder}.{kind}{suffix}"
            elif own == "self_attn.sinks":
                name = f"layers.{layer}.{TITAN_GPT_OSS[own]}"
            else:
                module, _, last = own.rpartition(".")
                name = f"layers.{layer}.{(TITAN | TITAN_GPT_OSS)[module]}.{last}"
                name = name.replace("qkv_linear.", "") if age == 2 else name
        whole = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}
        found[whole.get(name, name)] = value
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
