"""Tiny mixtures of experts: transformers makes the model, the shards are cut here by Megatron-LM's own rules.

That these rules are Megatron's is shown by the fixtures ``moe_megatron_*``, which real megatron-core 0.16.1
models saved (``real_megatron/make_moe.py``), and by the check that both hold the same. The two grouped forms
need kernels that no CPU has; their names and shapes follow megatron/core/transformer/moe/experts.py and
megatron/core/extensions/transformer_engine.py (TEGroupedLinear: ``weight0``, ``weight1``, ...).
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

#: More vocabulary than a multiple of 128, so that Megatron pads it.
SIZES: dict[str, int] = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
PADDED = 256
TOKENS = torch.arange(24).reshape(2, 12) * 31 % 250

State = dict[str, torch.Tensor]


def _filled(made: Any, seed: int) -> Any:
    """With weights whose router tells the experts apart."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made.eval()


def model(seed: int = 0, **changes: Any) -> Any:
    """A tiny Mixtral."""
    return _filled(MixtralForCausalLM(MixtralConfig(**(SIZES | {"rope_theta": 1e4} | changes))), seed)


def qwen(version: int, seed: int = 0, **changes: Any) -> Any:
    """A tiny Qwen2-MoE (a shared expert, biases) or Qwen3-MoE (norms of q and k)."""
    sizes = {key: value for key, value in SIZES.items() if key != "num_local_experts"}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 24, "intermediate_size": 40, "rope_theta": 1e4}
    if version == 2:
        return _filled(
            Qwen2MoeForCausalLM(
                Qwen2MoeConfig(**(sizes | {"shared_expert_intermediate_size": 16} | changes))
            ),
            seed,
        )
    return _filled(Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | {"head_dim": 8} | changes))), seed)


def glm(seed: int = 0, **changes: Any) -> Any:
    """A tiny GLM-4.5: DeepSeek-V3's mixture with heads, of which a half is rotated, and biases."""
    sizes = {key: value for key, value in SIZES.items() if key != "num_local_experts"} | {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    made = _filled(Glm4MoeForCausalLM(Glm4MoeConfig(**(sizes | changes))), seed)
    for name, buffer in made.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)
    return made


def logits(made: Any) -> torch.Tensor:
    with torch.no_grad():
        return made(TOKENS).logits


def load_logits(folder: Path) -> torch.Tensor:
    """Logits of the model that transformers loads from a folder, in float32."""
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def _part(tensor: torch.Tensor, rank: int, degree: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(degree, dim)[rank]


def _experts(name: str, gate_up: torch.Tensor, down: torch.Tensor, form: str) -> State:
    """Experts of one rank, already divided: [e, 2 f, H] and [e, H, f]."""
    local, state = len(gate_up), {}
    if form == "flat":
        # GroupedMLP: [H, e * 2f] by its shape, but [e, H, 2f] by its bytes (`view` in its forward).
        first = gate_up.transpose(1, 2).contiguous()
        second = down.transpose(1, 2).contiguous()
        state[f"{name}.weight1"] = first.view(gate_up.shape[2], -1)
        state[f"{name}.weight2"] = second.view(-1, down.shape[1])
        return state
    for e in range(local):
        if form == "grouped":
            first_name, second_name = f"{name}.linear_fc1.weight{e}", f"{name}.linear_fc2.weight{e}"
        else:
            stem = f"{name}.local_experts.{e}"
            first_name, second_name = f"{stem}.linear_fc1.weight", f"{stem}.linear_fc2.weight"
        state[first_name], state[second_name] = gate_up[e].clone(), down[e].clone()
    return state


def rank_state(
    whole: State,
    place: tuple[int, int, int],
    degrees: tuple[int, int, int],
    form: str = "sequential",
    layers: int = 2,
) -> State:
    """One rank's tensors under Megatron's names; `whole` is the state of transformers' model in memory."""
    (tp_rank, stage, ep_rank), (tp, pp, ep) = place, degrees
    config = MixtralConfig(**SIZES)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    padded = {
        name: torch.cat([whole[name], torch.zeros(PADDED - config.vocab_size, config.hidden_size)])
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    state: State = {}
    if stage == 0:
        state["embedding.word_embeddings.weight"] = _part(padded["model.embed_tokens.weight"], tp_rank, tp)
    for local, layer in enumerate(range(stage * layers // pp, (stage + 1) * layers // pp)):
        ours, theirs = f"decoder.layers.{local}", f"model.layers.{layer}"
        q, k, v = (whole[f"{theirs}.self_attn.{x}_proj.weight"].chunk(groups) for x in "qkv")
        assert len(q[0]) == heads // groups * len(k[0])
        qkv = torch.cat([torch.cat(group) for group in zip(q, k, v, strict=True)])
        state[f"{ours}.input_layernorm.weight"] = whole[f"{theirs}.input_layernorm.weight"]
        state[f"{ours}.self_attention.linear_proj.weight"] = _part(
            whole[f"{theirs}.self_attn.o_proj.weight"], tp_rank, tp, 1
        )
        state[f"{ours}.self_attention.linear_qkv.weight"] = _part(qkv, tp_rank, tp)
        for x in "qk":
            # Qwen3 has them.
            if f"{theirs}.self_attn.{x}_norm.weight" in whole:
                norm = whole[f"{theirs}.self_attn.{x}_norm.weight"]
                state[f"{ours}.self_attention.{x}_layernorm.weight"] = norm
        state[f"{ours}.pre_mlp_layernorm.weight"] = whole[f"{theirs}.post_attention_layernorm.weight"]
        state[f"{ours}.mlp.router.weight"] = whole[f"{theirs}.mlp.gate.weight"]
        gate, up = whole[f"{theirs}.mlp.experts.gate_up_proj"].chunk(2, 1)
        down = whole[f"{theirs}.mlp.experts.down_proj"]
        first = torch.cat([_part(gate, tp_rank, tp, 1), _part(up, tp_rank, tp, 1)], 1)
        state |= _experts(
            f"{ours}.mlp.experts",
            _part(first, ep_rank, ep),
            _part(_part(down, tp_rank, tp, 2), ep_rank, ep),
            form,
        )
    if stage == pp - 1:
        state["decoder.final_layernorm.weight"] = whole["model.norm.weight"]
        state["output_layer.weight"] = _part(padded["lm_head.weight"], tp_rank, tp)
    return {name: tensor.clone().contiguous() for name, tensor in state.items()}


def arguments(tp: int, pp: int, ep: int, **changes: Any) -> Namespace:
    """What Megatron-LM's arguments say of the model. source: megatron/training/arguments.py"""
    known = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 24,
        "moe_ffn_hidden_size": 24,
        "kv_channels": 8,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "padded_vocab_size": PADDED,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "max_position_embeddings": 64,
        "untie_embeddings_and_output_weights": True,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": False,
        "moe_layer_freq": 1,
        "moe_router_score_function": "softmax",
        "moe_shared_expert_intermediate_size": None,
        "iteration": 10,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_grouped_gemm": False,
    }
    return Namespace(**(known | changes))


def rank_folder(place: tuple[int, int, int], degrees: tuple[int, int, int]) -> str:
    """source: megatron/training/checkpointing.py, get_checkpoint_name"""
    (tp_rank, stage, ep_rank), (_, pp, ep) = place, degrees
    return (
        f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if pp > 1 else "") + (f"_{ep_rank:03d}" if ep > 1 else "")
    )


def save_legacy(
    root: Path,
    whole: State,
    degrees: tuple[int, int, int],
    form: str = "sequential",
    layers: int = 2,
    **changes: Any,
) -> Path:
    """A checkpoint of the legacy form."""
    tp, pp, ep = degrees
    for place in [(t, p, e) for t in range(tp) for p in range(pp) for e in range(ep)]:
        folder = root / "iter_0000010" / rank_folder(place, degrees)
        folder.mkdir(parents=True)
        content = {
            "args": arguments(tp, pp, ep, **changes),
            "checkpoint_version": 3.0,
            "iteration": 10,
            "model": rank_state(whole, place, degrees, form, layers),
        }
        torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root
