"""Tiny models of transformers as MaxText holds and computes them, by MaxText's own definitions.

MaxText does not install on the Python of these tests. What it holds follows its param_mapping.py, with numpy
alone; what it computes follows its layers, in plain torch float32.
source: MaxText checkpoint_conversion/utils/param_mapping.py (MIXTRAL_*, QWEN_*),
    layers/{attentions,embeddings,linears,moe,normalizations}.py, models/{mixtral,qwen3}.py
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import moe_maker
import numpy as np
import torch
import yaml
from jax_maker import Tree, as_numpy, saved_orbax, scaled, with_layers
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

#: By transformers' model type: the experts' module there, the three projections of one, the module here.
MODULES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), "MoeBlock_0"),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), "moe_block"),
}


def arrange(hf: Tree, config: Any, scan: int | None) -> Tree:
    """What MaxText has of a model, besides the step, for rope_type default.

    Args:
        hf: tensors as transformers writes them to disk, one for each expert.
        config: transformers' config of the model.
        scan: axis of the layers; None for layers apart.
    """
    hidden, d = config.hidden_size, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    out = {
        "token_embedder.embedding": hf["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": hf["model.norm.weight"],
        "decoder.logits_dense.kernel": hf["lm_head.weight"].T,
    }
    apart: list[Tree] = []
    for i in range(config.num_hidden_layers):

        def w(name: str, at: int = i) -> np.ndarray:
            return hf[f"model.layers.{at}.{name}.weight"]

        q = w("self_attn.q_proj").T.reshape(hidden, heads, d)
        layer = {
            "pre_self_attention_layer_norm.scale": w("input_layernorm"),
            "post_self_attention_layer_norm.scale": w("post_attention_layernorm"),
            # Mixtral's query_hook_chain scales; Qwen has no hook that does.
            "self_attention.query.kernel": scaled(q, 1 / np.sqrt(d)) if config.model_type == "mixtral" else q,
            "self_attention.key.kernel": w("self_attn.k_proj").T.reshape(hidden, groups, d),
            "self_attention.value.kernel": w("self_attn.v_proj").T.reshape(hidden, groups, d),
            "self_attention.out.kernel": w("self_attn.o_proj").T.reshape(heads, d, hidden),
        }
        if config.model_type != "mixtral":
            layer["self_attention.query_norm.scale"] = w("self_attn.q_norm")
            layer["self_attention.key_norm.scale"] = w("self_attn.k_norm")
        if config.model_type in MODULES:
            theirs, projections, ours = MODULES[config.model_type]
            layer[f"{ours}.gate.kernel"] = w(f"{theirs}.gate").T
            count = getattr(config, "num_local_experts", None) or config.num_experts
            for name, projection in zip(("wi_0", "wi_1", "wo"), projections, strict=True):
                experts = [w(f"{theirs}.experts.{e}.{projection}").T for e in range(count)]
                layer[f"{ours}.{name}"] = np.stack(experts)
        else:
            for name, projection in (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj")):
                layer[f"mlp.{name}.kernel"] = w(f"mlp.{projection}").T
        apart.append(layer)
    return {f"params.params.{name}": array for name, array in {**out, **with_layers(apart, scan)}.items()}


def _norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def _rotate(x: torch.Tensor, base: float, interleaved: bool) -> torch.Tensor:
    """RotaryEmbedding (halves are pairs), or LLaMARotaryEmbedding (neighbours are); x is [B, S, N, D]."""
    d = x.shape[-1]
    angle = torch.arange(x.shape[1])[:, None, None] / base ** (torch.arange(0, d, 2) / d)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def compute(tree: Tree, yml: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of MaxText for a tree that it restores and the yml that it is run with."""
    names = {name.removeprefix("params.params."): a for name, a in tree.items() if name != "step"}
    arrays = {name: torch.from_numpy(np.ascontiguousarray(a)).float() for name, a in names.items()}
    used = set()

    def get(name: str, layer: int | None = None) -> torch.Tensor:
        if layer is not None and yml["scan_layers"]:
            stack = arrays[f"decoder.layers.{name}"]
            used.add(f"decoder.layers.{name}")
            # flax takes an axis beyond a vector's own for its last. source: flax core/axes_scan.py
            return stack.select(min(yml["param_scan_axis"], stack.ndim - 1), layer)
        name = name if layer is None else f"decoder.layers_{layer}.{name}"
        used.add(name)
        return arrays[name]

    eps, base = float(yml["normalization_layer_epsilon"]), float(yml["rope_max_timescale"])
    interleaved = yml["rope_type"].startswith("llama3.1")
    block = yml["decoder_block"]
    d = yml["head_dim"]
    # Blocks of qwen3 scale the query after the rotation, others have that in their weights.
    scale = d**-0.5 if block.startswith("qwen3") else 1.0
    x = get("token_embedder.embedding")[tokens]
    hidden = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
    for i in range(yml["base_num_decoder_layers"]):
        y = _norm(x, get("pre_self_attention_layer_norm.scale", i), eps)
        q, k, v = (
            torch.einsum("bsh,hnd->bsnd", y, get(f"self_attention.{name}.kernel", i))
            for name in ("query", "key", "value")
        )
        if block.startswith("qwen3") and yml["use_qk_norm"]:
            q = _norm(q, get("self_attention.query_norm.scale", i), eps)
            k = _norm(k, get("self_attention.key_norm.scale", i), eps)
        q, k = _rotate(q, base, interleaved) * scale, _rotate(k, base, interleaved)
        k, v = (a.repeat_interleave(q.shape[2] // a.shape[2], 2) for a in (k, v))
        weights = (torch.einsum("bsnd,btnd->bnst", q, k) + hidden).softmax(-1)
        mixed = torch.einsum("bnst,btnd->bsnd", weights, v)
        x = x + torch.einsum("bsnd,ndh->bsh", mixed, get("self_attention.out.kernel", i))
        y = _norm(x, get("post_self_attention_layer_norm.scale", i), eps)
        if block == "qwen3":
            up = y @ get("mlp.wi_1.kernel", i)
            x = x + (F.silu(y @ get("mlp.wi_0.kernel", i)) * up) @ get("mlp.wo.kernel", i)
            continue
        name = MODULES[block][2]
        # get_topk: the best by their logits, then the softmax over these alone.
        best, chosen = (y @ get(f"{name}.gate.kernel", i)).topk(yml["num_experts_per_tok"])
        best = best.softmax(-1)
        if yml.get("norm_topk_prob"):
            best = best / best.sum(-1, keepdim=True)
        share = torch.zeros(*y.shape[:2], yml["num_experts"]).scatter(-1, chosen, best)
        first, second = (torch.einsum("bsm,emh->bseh", y, get(f"{name}.{w}", i)) for w in ("wi_0", "wi_1"))
        x = x + torch.einsum("bseh,ehm,bse->bsm", F.silu(first) * second, get(f"{name}.wo", i), share)
    assert not yml["logits_via_embedding"]
    logits = _norm(x, get("decoder.decoder_norm.scale"), eps) @ get("decoder.logits_dense.kernel")
    assert used == arrays.keys()
    return logits


LAYERS = 3
#: A power of four, so that queries are scaled and scaled back exactly.
HEAD = {"num_hidden_layers": LAYERS, "head_dim": 16}
KINDS = ["mixtral", "qwen3_moe", "qwen3"]
MIXTURES = KINDS[:2]


def model(kind: str, **changes: Any) -> Any:
    if kind == "mixtral":
        return moe_maker.model(**HEAD | {"sliding_window": None} | changes)
    if kind == "qwen3_moe":
        return moe_maker.qwen(3, **HEAD | {"norm_topk_prob": True} | changes)
    sizes = {key: value for key, value in moe_maker.SIZES.items() if "expert" not in key}
    config = Qwen3Config(**sizes | HEAD | {"rope_theta": 1e4} | changes)
    return moe_maker._filled(Qwen3ForCausalLM(config), 0)


@cache
def told(kind: str) -> tuple[Any, Tree, torch.Tensor]:
    """Config, tensors as transformers writes them, and logits."""
    made = model(kind)
    with TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        tensors = load_file(f"{folder}/model.safetensors")
        return made.config, {name: as_numpy(t).copy() for name, t in tensors.items()}, moe_maker.logits(made)


def hf(kind: str, folder: Path, **changes: Any) -> Path:
    model(kind, **changes).save_pretrained(folder)
    return folder


def held(kind: str, scan: int | None) -> Tree:
    config, tensors, _ = told(kind)
    return arrange(tensors, config, scan)


def yml_of(kind: str, **more: Any) -> dict[str, Any]:
    """What the yml of such a model in MaxText's configs/models states."""
    config = told(kind)[0]
    out = {
        "decoder_block": kind,
        "base_emb_dim": config.hidden_size,
        "base_num_query_heads": config.num_attention_heads,
        "base_num_kv_heads": config.num_key_value_heads,
        "base_num_decoder_layers": LAYERS,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "base_mlp_dim": 24,
        "mlp_activations": ["silu", "linear"],
        "normalization_layer_epsilon": config.rms_norm_eps,
        "rope_max_timescale": 10_000,
        "logits_via_embedding": False,
    }
    if kind != "mixtral":
        out["use_qk_norm"] = True
    if kind in MIXTURES:
        out |= {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24}
    if kind == "qwen3_moe":
        out["norm_topk_prob"] = True
    return out | more


def checkpoint(kind: str, folder: Path, scan: int | None = 1, tree: Tree | None = None, **yml: Any) -> Path:
    """A checkpoint of MaxText's own, with a yml beside it."""
    saved_orbax(held(kind, scan) if tree is None else tree, folder)
    stated = {key: value for key, value in yml_of(kind, **yml).items() if value is not None}
    (folder / "maxtext_model.yml").write_text(yaml.safe_dump(stated))
    return folder
