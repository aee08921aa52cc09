"""Tiny DeepSeek-V3 models as MaxText holds and computes them, by MaxText's own definitions.

MaxText does not install on the Python of these tests. What it holds follows its converter, with numpy alone;
what it computes follows its layers, in plain torch float32.
source: MaxText checkpoint_conversion/standalone_scripts/convert_deepseek_family_ckpt.py and its twin for
    layers apart, layers/{attention_mla,embeddings,linears,moe,normalizations}.py, models/deepseek.py
"""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import deepseek_maker
import moe_maker
import numpy as np
import torch
import yaml
from jax_maker import Tree, as_numpy, saved_orbax
from safetensors.torch import load_file
from torch.nn import functional as F

#: Settings of tiny models by what is special in each.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "straight": {"q_lora_rank": None, "first_k_dense_replace": 2, "n_shared_experts": 2},
    "yarn": {"rope_parameters": deepseek_maker.YARN, "n_group": 1, "topk_group": 1},
}
_PLAIN_YARN = {k: v for k, v in deepseek_maker.YARN.items() if not k.startswith("mscale")}
#: Further settings of YaRN that MaxText computes, too.
ROPES: dict[str, dict[str, Any]] = {
    "scaled rotations": _PLAIN_YARN,
    "nothing scaled": _PLAIN_YARN | {"attention_factor": 1.0},
    "both scaled": _PLAIN_YARN | {"mscale_all_dim": 0.7},
    "as Kimi-K2": deepseek_maker.YARN | {"beta_fast": 1, "beta_slow": 1},
    "not truncated": deepseek_maker.YARN | {"truncate": False, "mscale": 0.5, "mscale_all_dim": 0.5},
}
#: A projection and what it is called here, in layers of both kinds.
_ATTENTION = {
    "q_proj": "query",
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_b_proj": "wkv_b",
    "o_proj": "out",
}
_MLP = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}


def arrange(hf: Tree, config: Any, scan: int | None) -> Tree:
    """What MaxText has of a model, besides the step.

    Args:
        hf: tensors as transformers writes them to disk, one for each expert.
        config: transformers' config of the model.
        scan: axis of the layers; None for layers apart.
    """
    heads, width = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    shapes = {
        "query": (config.hidden_size, heads, width),
        "wq_b": (config.q_lora_rank, heads, width),
        "wkv_b": (config.kv_lora_rank, heads, config.qk_nope_head_dim + config.v_head_dim),
        "out": (heads, config.v_head_dim, config.hidden_size),
    }
    out = {
        "token_embedder.embedding": hf["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": hf["model.norm.weight"],
        "decoder.logits_dense.kernel": hf["lm_head.weight"].transpose(),
    }
    kinds: dict[str, list[Tree]] = {"dense_layers": [], "moe_layers": []}
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        layer = {
            "pre_self_attention_layer_norm.scale": hf[f"{at}input_layernorm.weight"],
            "post_self_attention_layer_norm.scale": hf[f"{at}post_attention_layernorm.weight"],
            "self_attention.kv_norm.scale": hf[f"{at}self_attn.kv_a_layernorm.weight"],
        }
        if config.q_lora_rank:
            layer["self_attention.q_norm.scale"] = hf[f"{at}self_attn.q_a_layernorm.weight"]
        for theirs, ours in _ATTENTION.items():
            if f"{at}self_attn.{theirs}.weight" in hf:
                turned = hf[f"{at}self_attn.{theirs}.weight"].transpose()
                layer[f"self_attention.{ours}.kernel"] = np.reshape(turned, shapes.get(ours, turned.shape))
        if i < config.first_k_dense_replace:
            layer |= {f"mlp.{o}.kernel": hf[f"{at}mlp.{t}.weight"].transpose() for o, t in _MLP.items()}
            kinds["dense_layers"].append(layer)
            continue
        block = "DeepSeekMoeBlock_0."
        layer[f"{block}MoeBlock_0.gate.kernel"] = hf[f"{at}mlp.gate.weight"].transpose()
        layer[f"{block}MoeBlock_0.gate.bias"] = hf[f"{at}mlp.gate.e_score_correction_bias"]
        for ours, theirs in _MLP.items():
            shared = hf[f"{at}mlp.shared_experts.{theirs}.weight"].transpose()
            layer[f"{block}shared_experts.{ours}.kernel"] = shared
            experts = range(config.n_routed_experts)
            layer[f"{block}MoeBlock_0.{ours}"] = np.stack(
                [hf[f"{at}mlp.experts.{k}.{theirs}.weight"].transpose() for k in experts]
            )
        kinds["moe_layers"].append(layer)
    for kind, layers in kinds.items():
        for name in layers[0]:
            if scan is None:
                out |= {f"decoder.{kind}_{n}.{name}": layer[name] for n, layer in enumerate(layers)}
                continue
            stack = np.zeros((len(layers), *layers[0][name].shape), layers[0][name].dtype)
            for n, layer in enumerate(layers):
                stack[n, ...] = layer[name]
            # flax takes an axis beyond a vector's own for its last. source: flax core/axes_scan.py
            out[f"decoder.{kind}.{name}"] = np.moveaxis(stack, 0, min(scan, stack.ndim - 1))
    return {f"params.params.{name}": array for name, array in out.items()}


def _norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def _rotate(x: torch.Tensor, yml: dict[str, Any]) -> torch.Tensor:
    """YarnRotaryEmbedding; x is [B, S, N, D]."""
    assert yml["rope_type"] == "yarn"
    dim, base, factor = x.shape[-1], float(yml["rope_max_timescale"]), yml["rope_factor"]
    half = dim // 2
    freqs = 1.0 / (base ** (2.0 * torch.arange(half, dtype=torch.float32) / dim))

    def correction(rotations: float) -> float:
        longest = yml["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(longest) / (2 * math.log(base))

    low, high = correction(yml.get("beta_fast", 32)), correction(yml.get("beta_slow", 1))
    if yml.get("rope_truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    smooth = 1 - ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clip(0, 1)
    freqs = freqs / factor * (1 - smooth) + freqs * smooth
    angles = torch.outer(torch.arange(yml["max_position_embeddings"], dtype=torch.float32), freqs)
    turn = torch.polar(torch.ones_like(angles), angles)[: x.shape[1], None, :]
    pairs = x.unflatten(-1, (half, 2)) if yml.get("rope_interleave", True) else x.unflatten(-1, (2, half)).mT
    turned = torch.complex(pairs[..., 0].contiguous(), pairs[..., 1].contiguous()) * turn
    out = torch.cat([turned.real, turned.imag], -1)
    return out * (0.1 * math.log(factor) + 1.0) if yml.get("rope_attention_scaling") and factor > 1 else out


def _choose(scores: torch.Tensor, bias: torch.Tensor, yml: dict[str, Any], name: str) -> torch.Tensor:
    """The share of each expert: GateLogit after its product, and RoutedMoE.get_topk."""
    routed = name.startswith(("deepseek3", "deepseek4"))
    before, after = scores, scores + bias
    if routed:
        mask = torch.ones_like(after)
        groups = yml.get("n_routing_groups", -1)
        if groups != -1:
            best = after.unflatten(-1, (groups, -1)).topk(2, -1)[0].sum(-1)
            chosen = F.one_hot(best.topk(yml["topk_routing_group"], -1)[1], groups).sum(-2)
            mask = chosen.repeat_interleave(after.shape[-1] // groups, -1)
        index = torch.where(mask > 0, after, -torch.inf).topk(yml["num_experts_per_tok"], -1)[1]
        weights = before.gather(-1, index)
    else:
        weights, index = after.topk(yml["num_experts_per_tok"], -1)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * yml["routed_scaling_factor"]
    return torch.zeros_like(scores).scatter(-1, index, weights)


def compute(
    tree: Tree, yml: dict[str, Any], tokens: torch.Tensor, name: str = "deepseek3-671b"
) -> torch.Tensor:
    """Logits of MaxText for a tree that it restores, the yml that it is run with, and its model_name."""
    names = {key.removeprefix("params.params."): a for key, a in tree.items() if key != "step"}
    arrays = {key: torch.from_numpy(np.ascontiguousarray(a)).float() for key, a in names.items()}
    used = set()
    dense_layers = yml["first_num_dense_layers"]

    def get(own: str, layer: int | None = None) -> torch.Tensor:
        if layer is not None:
            kind = "dense_layers" if layer < dense_layers else "moe_layers"
            number = layer if layer < dense_layers else layer - dense_layers
            if yml["scan_layers"]:
                used.add(f"decoder.{kind}.{own}")
                stack = arrays[f"decoder.{kind}.{own}"]
                axis = min(yml["param_scan_axis"], stack.ndim - 1)
                rest = yml["base_num_decoder_layers"] - dense_layers
                assert stack.shape[axis] == (dense_layers if layer < dense_layers else rest)
                return stack.select(axis, number)
            own = f"decoder.{kind}_{number}.{own}"
        used.add(own)
        return arrays[own]

    def mlp(x: torch.Tensor, at: str, layer: int) -> torch.Tensor:
        first, second, last = (get(f"{at}.{own}.kernel", layer) for own in ("wi_0", "wi_1", "wo"))
        return (F.silu(x @ first) * (x @ second)) @ last

    eps, nope, rank = float(yml["normalization_layer_epsilon"]), yml["qk_nope_head_dim"], yml["kv_lora_rank"]
    assert yml["attention_type"] == "mla" and yml["decoder_block"] == "deepseek"
    assert yml["routed_score_func"] == "sigmoid" and yml["routed_bias"] is True
    scale = (nope + yml["qk_rope_head_dim"]) ** -0.5
    if yml["max_position_embeddings"] > yml["original_max_position_embeddings"]:
        scale *= (0.1 * yml.get("mscale", 1.0) * math.log(yml["rope_factor"]) + 1.0) ** 2
    x = get("token_embedder.embedding")[tokens]
    hidden = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
    for i in range(yml["base_num_decoder_layers"]):
        y = _norm(x, get("pre_self_attention_layer_norm.scale", i), eps)
        if yml.get("q_lora_rank", 0):
            low = _norm(y @ get("self_attention.wq_a.kernel", i), get("self_attention.q_norm.scale", i), eps)
            q = torch.einsum("bsq,qnd->bsnd", low, get("self_attention.wq_b.kernel", i))
        else:
            q = torch.einsum("bsh,hnd->bsnd", y, get("self_attention.query.kernel", i))
        q = torch.cat([q[..., :nope], _rotate(q[..., nope:], yml)], -1) * scale
        low, turned = (y @ get("self_attention.wkv_a.kernel", i)).tensor_split([rank], -1)
        low = _norm(low, get("self_attention.kv_norm.scale", i), eps)
        turned = _rotate(turned[:, :, None], yml)
        up = torch.einsum("bsk,knd->bsnd", low, get("self_attention.wkv_b.kernel", i))
        k, v = up.tensor_split([nope], -1)
        k = torch.cat([k, turned.expand(-1, -1, k.shape[2], -1)], -1)
        weights = (torch.einsum("bsnd,btnd->bnst", q, k) + hidden).softmax(-1)
        mixed = torch.einsum("bnst,btnd->bsnd", weights, v)
        x = x + torch.einsum("bsnd,ndh->bsh", mixed, get("self_attention.out.kernel", i))
        y = _norm(x, get("post_self_attention_layer_norm.scale", i), eps)
        if i < dense_layers:
            x = x + mlp(y, "mlp", i)
            continue
        block = "DeepSeekMoeBlock_0.MoeBlock_0"
        scores = (y @ get(f"{block}.gate.kernel", i)).sigmoid()
        share = _choose(scores, get(f"{block}.gate.bias", i), yml, name)
        first, second = (torch.einsum("bsm,emh->bseh", y, get(f"{block}.{w}", i)) for w in ("wi_0", "wi_1"))
        routed = torch.einsum("bseh,ehm,bse->bsm", F.silu(first) * second, get(f"{block}.wo", i), share)
        x = x + routed + mlp(y, "DeepSeekMoeBlock_0.shared_experts", i)
    assert not yml["logits_via_embedding"]
    logits = _norm(x, get("decoder.decoder_norm.scale"), eps) @ get("decoder.logits_dense.kernel")
    assert used == arrays.keys()
    return logits


def files(kind: str, folder: Path | None = None, **changes: Any) -> tuple[Any, Tree, torch.Tensor]:
    """Config, tensors and logits of a model that transformers saves, in a folder if one is given."""
    made = deepseek_maker.model(**KINDS[kind] | changes)
    if folder is None:
        with TemporaryDirectory() as temporary:
            return files(kind, Path(temporary), **changes)
    made.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    return made.config, {name: as_numpy(t).copy() for name, t in tensors.items()}, moe_maker.logits(made)


def yml_of(config: Any, **more: Any) -> dict[str, Any]:
    """What the yml of such a model in MaxText's configs/models states, and the groups of its run."""
    out = {
        "base_emb_dim": config.hidden_size,
        "base_num_query_heads": config.num_attention_heads,
        "base_num_kv_heads": config.num_attention_heads,
        "base_mlp_dim": config.intermediate_size,
        "base_moe_mlp_dim": config.moe_intermediate_size,
        "base_num_decoder_layers": config.num_hidden_layers,
        "first_num_dense_layers": config.first_k_dense_replace,
        "mlp_activations": ["silu", "linear"],
        "vocab_size": config.vocab_size,
        "logits_via_embedding": False,
        "normalization_layer_epsilon": config.rms_norm_eps,
        "num_experts": config.n_routed_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "shared_experts": config.n_shared_experts,
        "routed_scaling_factor": config.routed_scaling_factor,
        "routed_score_func": "sigmoid",
        "routed_bias": True,
        "n_routing_groups": config.n_group if config.n_group > 1 else -1,
        "topk_routing_group": config.topk_group if config.n_group > 1 else -1,
        "decoder_block": "deepseek",
        "attention_type": "mla",
        "q_lora_rank": config.q_lora_rank or 0,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "yarn",
        "rope_max_timescale": 10_000,
        "max_position_embeddings": config.max_position_embeddings,
    }
    scaled = config.rope_parameters["rope_type"] == "yarn"
    out["rope_factor"] = 4 if scaled else 1
    out["original_max_position_embeddings"] = 16 if scaled else config.max_position_embeddings
    return out | ({"mscale": 1.0} if scaled else {}) | more


def checkpoint(kind: str, folder: Path, scan: int | None = 1, tree: Tree | None = None, **yml: Any) -> Path:
    """A checkpoint of MaxText's own, with a yml beside it."""
    config, tensors, _ = files(kind)
    saved_orbax(arrange(tensors, config, scan) if tree is None else tree, folder)
    stated = {key: value for key, value in yml_of(config, **yml).items() if value is not None}
    (folder / "maxtext_model.yml").write_text(yaml.safe_dump(stated))
    return folder
