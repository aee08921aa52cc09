"""Tiny models of gpt-oss as MaxText holds and computes them, by MaxText's own definitions.

MaxText does not install on the Python of these tests. What it holds follows its param_mapping.py, with numpy
alone; what it computes follows its layers, in plain torch float32.
source: MaxText checkpoint_conversion/utils/param_mapping.py (GPT_OSS_*), models/gpt_oss.py,
    layers/{attentions,attention_op,embeddings,moe,normalizations}.py, configs/models/gpt-oss-20b.yml
"""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpt_oss_maker
import moe_maker
import numpy as np
import torch
import yaml
from jax_maker import Tree, as_numpy, saved_orbax
from safetensors.torch import load_file

_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
#: Settings of tiny models by what is special in each.
KINDS: dict[str, dict[str, Any]] = {
    "yarn": {},
    "plain": {"rope_parameters": _PLAIN, "num_key_value_heads": 4, "num_experts_per_tok": 3},
    "unscaled": {"rope_parameters": gpt_oss_maker.YARN | {"attention_factor": 1.0, "truncate": True}},
}
CYCLE = 2


def arrange(hf: Tree, config: Any, scan: int | None) -> Tree:
    """What MaxText has of a model, besides the step.

    Args:
        hf: tensors as transformers writes them to disk.
        config: transformers' config of the model.
        scan: axis of the layers; None for layers apart.
    """
    hidden, d = config.hidden_size, config.head_dim
    counts = {"query": config.num_attention_heads} | dict.fromkeys(
        ("key", "value"), config.num_key_value_heads
    )
    out = {
        "token_embedder.embedding": hf["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": hf["model.norm.weight"],
        "decoder.logits_dense.kernel": hf["lm_head.weight"].T,
    }
    layers: list[Tree] = []
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        layer = {
            "pre_self_attention_layer_norm.scale": hf[f"{at}input_layernorm.weight"],
            "post_self_attention_layer_norm.scale": hf[f"{at}post_attention_layernorm.weight"],
            "GptOssAttention.sinks": hf[f"{attention}sinks"],
            "GptOssAttention.out.bias": hf[f"{attention}o_proj.bias"],
            "GptOssAttention.out.kernel": hf[f"{attention}o_proj.weight"].T.reshape(
                counts["query"], d, hidden
            ),
            "GptOssMlp.gate.kernel": hf[f"{mlp}router.weight"].T,
            "GptOssMlp.gate.bias": hf[f"{mlp}router.bias"],
            "GptOssMlp.wo": hf[f"{mlp}experts.down_proj"],
            "GptOssMlp.wo_bias": hf[f"{mlp}experts.down_proj_bias"],
        }
        for name, count in counts.items():
            theirs = f"{attention}{name[0]}_proj"
            layer[f"GptOssAttention.{name}.kernel"] = hf[f"{theirs}.weight"].T.reshape(hidden, count, d)
            layer[f"GptOssAttention.{name}.bias"] = hf[f"{theirs}.bias"].reshape(count, d)
        for own, theirs in (("", "gate_up_proj"), ("_bias", "gate_up_proj_bias")):
            both = hf[f"{mlp}experts.{theirs}"]
            layer[f"GptOssMlp.wi_0{own}"], layer[f"GptOssMlp.wi_1{own}"] = both[..., ::2], both[..., 1::2]
        layers.append(layer)
    for name in layers[0]:
        if scan is None:
            out |= {f"decoder.layers_{n}.{name}": layer[name] for n, layer in enumerate(layers)}
            continue
        for place in range(CYCLE):
            stack = np.stack([layer[name] for layer in layers[place::CYCLE]])
            # flax takes an axis beyond a vector's own for its last. source: flax core/axes_scan.py
            axis = min(scan, stack.ndim - 1) if scan >= 0 else scan
            out[f"decoder.layers.layers_{place}.{name}"] = np.moveaxis(stack, 0, axis)
    return {f"params.params.{name}": np.ascontiguousarray(array) for name, array in out.items()}


def _norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def _rotate(x: torch.Tensor, yml: dict[str, Any]) -> torch.Tensor:
    """RotaryEmbedding, or YarnRotaryEmbedding; x is [B, S, N, D]."""
    dim, base = x.shape[-1], float(yml["rope_max_timescale"])
    half = dim // 2
    freqs = 1.0 / (base ** (2.0 * torch.arange(half, dtype=torch.float32) / dim))
    scale, interleaved = 1.0, False
    if yml["rope_type"] == "yarn":
        factor = yml["rope_factor"]

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
        interleaved = yml.get("rope_interleave", True)
        if yml.get("rope_attention_scaling") and factor > 1:
            scale = 0.1 * math.log(factor) + 1.0
    angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), freqs)[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat(turned, -1) * scale


def compute(tree: Tree, yml: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of MaxText for a tree that it restores and the yml that it is run with."""
    names = {key.removeprefix("params.params."): a for key, a in tree.items() if key != "step"}
    arrays = {key: torch.from_numpy(np.ascontiguousarray(a)).float() for key, a in names.items()}
    used = set()
    count, cycle = yml["base_num_decoder_layers"], yml["inhomogeneous_layer_cycle_interval"]

    def get(own: str, layer: int | None = None) -> torch.Tensor:
        if layer is not None and yml["scan_layers"]:
            name = f"decoder.layers.layers_{layer % cycle}.{own}"
            used.add(name)
            stack = arrays[name]
            axis = min(yml["param_scan_axis"], stack.ndim - 1)
            assert stack.shape[axis] == count // cycle
            return stack.select(axis, layer // cycle)
        name = own if layer is None else f"decoder.layers_{layer}.{own}"
        used.add(name)
        return arrays[name]

    assert yml["decoder_block"] == "gpt_oss" and yml["mlp_activations"] == ["sigmoid", "linear"]
    assert yml["attention_bias"] and yml["attention_sink"] and yml["routed_bias"] and yml["mlp_bias"]
    assert count % cycle == 0 or not yml["scan_layers"]
    eps, limit, d = (
        float(yml["normalization_layer_epsilon"]),
        yml["mlp_activations_limit"],
        yml["head_dim"],
    )
    x = get("token_embedder.embedding")[tokens]
    length = tokens.shape[1]
    causal = torch.full((length, length), float("-inf")).triu(1)
    # A token sees those whose column is beyond its row less the window.
    local = causal + torch.full((length, length), float("-inf")).tril(-yml["sliding_window_size"])
    for i in range(count):
        y = _norm(x, get("pre_self_attention_layer_norm.scale", i), eps)
        q, k, v = (
            torch.einsum("bsh,hnd->bsnd", y, get(f"GptOssAttention.{name}.kernel", i))
            + get(f"GptOssAttention.{name}.bias", i)
            for name in ("query", "key", "value")
        )
        q, k = _rotate(q, yml) * d**-0.5, _rotate(k, yml)
        k, v = (a.repeat_interleave(q.shape[2] // a.shape[2], 2) for a in (k, v))
        logits = torch.einsum("bsnd,btnd->bnst", q, k) + (causal if i % 2 else local)
        sinks = get("GptOssAttention.sinks", i)[None, :, None, None].expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        mixed = torch.einsum("bnst,btnd->bsnd", weights, v)
        mixed = torch.einsum("bsnd,ndh->bsh", mixed, get("GptOssAttention.out.kernel", i))
        x = x + mixed + get("GptOssAttention.out.bias", i)
        y = _norm(x, get("post_self_attention_layer_norm.scale", i), eps)
        scores = y @ get("GptOssMlp.gate.kernel", i) + get("GptOssMlp.gate.bias", i)
        # get_topk: the best by their logits, then the softmax over these alone.
        best, chosen = scores.topk(yml["num_experts_per_tok"])
        share = torch.zeros(*y.shape[:2], yml["num_experts"]).scatter(-1, chosen, best.softmax(-1))
        first, second = (
            torch.einsum("bsm,emh->bseh", y, get(f"GptOssMlp.{w}", i)) + get(f"GptOssMlp.{w}_bias", i)
            for w in ("wi_0", "wi_1")
        )
        first, second = first.clip(max=limit), second.clip(-limit, limit)
        inner = first * (first * 1.702).sigmoid() * (second + 1)
        last = torch.einsum("bseh,ehm->bsem", inner, get("GptOssMlp.wo", i)) + get("GptOssMlp.wo_bias", i)
        x = x + torch.einsum("bsem,bse->bsm", last, share)
    assert not yml["logits_via_embedding"]
    logits = _norm(x, get("decoder.decoder_norm.scale"), eps) @ get("decoder.logits_dense.kernel")
    assert used == arrays.keys()
    return logits


def files(kind: str, folder: Path | None = None, **changes: Any) -> tuple[Any, Tree, torch.Tensor]:
    """Config, tensors and logits of a model that transformers saves, in a folder if one is given."""
    made = gpt_oss_maker.model(**KINDS[kind] | changes)
    if folder is None:
        with TemporaryDirectory() as temporary:
            return files(kind, Path(temporary), **changes)
    made.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    return made.config, {name: as_numpy(t).copy() for name, t in tensors.items()}, moe_maker.logits(made)


def yml_of(config: Any, **more: Any) -> dict[str, Any]:
    """What the yml of such a model in MaxText's configs/models states."""
    rope = config.rope_parameters
    out = {
        "base_emb_dim": config.hidden_size,
        "base_num_query_heads": config.num_attention_heads,
        "base_num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "sliding_window_size": config.sliding_window,
        "attention_bias": True,
        "attention_sink": True,
        "rope_max_timescale": int(rope["rope_theta"]),
        "max_position_embeddings": config.max_position_embeddings,
        "base_mlp_dim": config.intermediate_size,
        "base_moe_mlp_dim": config.intermediate_size,
        "mlp_activations": ["sigmoid", "linear"],
        "mlp_activations_limit": 7.0,
        "routed_bias": True,
        "mlp_bias": True,
        "num_experts": config.num_local_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "base_num_decoder_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "normalization_layer_epsilon": config.rms_norm_eps,
        "logits_via_embedding": False,
        "decoder_block": "gpt_oss",
        "inhomogeneous_layer_cycle_interval": CYCLE,
    }
    if rope["rope_type"] == "yarn":
        out |= {
            "rope_type": "yarn",
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "rope_factor": int(rope["factor"]),
            "beta_fast": 32,
            "beta_slow": 1,
            "rope_interleave": False,
            "rope_truncate": rope["truncate"],
            "rope_attention_scaling": rope.get("attention_factor") is None,
        }
    return out | more


def checkpoint(kind: str, folder: Path, scan: int | None = 1, tree: Tree | None = None, **yml: Any) -> Path:
    """A checkpoint of MaxText's own, with a yml beside it."""
    config, tensors, _ = files(kind)
    saved_orbax(arrange(tensors, config, scan) if tree is None else tree, folder)
    stated = {key: value for key, value in yml_of(config, **yml).items() if value is not None}
    (folder / "maxtext_model.yml").write_text(yaml.safe_dump(stated))
    return folder
