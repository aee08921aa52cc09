"""Tiny models of Qwen3-Next and Qwen3.5-MoE as MaxText holds and computes them, by MaxText's own definitions.

MaxText does not install on the Python of these tests. What it holds follows its param_mapping.py, with numpy
alone; what it computes follows its layers, in plain torch float32.
source: MaxText checkpoint_conversion/utils/param_mapping.py (QWEN3_NEXT_*, QWEN3_5_*), models/qwen3.py,
    layers/{attentions,embeddings,moe,normalizations}.py, configs/models/qwen3-next-80b-a3b.yml
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import delta_maker
import moe_maker
import numpy as np
import torch
import yaml
from jax_maker import Tree, as_numpy, saved_orbax
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu, softplus

#: Model type and settings of tiny models, by what is special in each. MaxText's shared expert is as large as
#: each routed expert.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("qwen3_next", {}),
    "3.5": ("qwen3_5_moe_text", {}),
    "cycle of two": ("qwen3_next", {"full_attention_interval": 2, "linear_num_key_heads": 2}),
    "tied": ("qwen3_5_moe_text", {"tie_word_embeddings": True, "linear_num_value_heads": 4}),
}
_SIZES = {"num_hidden_layers": 8, "shared_expert_intermediate_size": 24}
DECODER_BLOCKS = {"qwen3_next": "qwen3_next", "qwen3_5_moe_text": "qwen3_5"}


def find_cycle(config: Any) -> int:
    """The number of layers in a cycle, of which the last has attention."""
    return int(config.layer_types.index("full_attention")) + 1


def _arrange_layer(hf: Tree, at: str, config: Any) -> Tree:
    hidden, d = config.hidden_size, config.head_dim
    mlp, count = f"{at}mlp.", config.num_experts
    gate_up = hf[f"{mlp}experts.gate_up_proj"].reshape(count, 2, -1, hidden)
    layer = {
        "input_layernorm.scale": hf[f"{at}input_layernorm.weight"],
        "post_attention_layernorm.scale": hf[f"{at}post_attention_layernorm.weight"],
        "mlp.routed_experts.gate.kernel": hf[f"{mlp}gate.weight"].T,
        "mlp.routed_experts.wi_0": gate_up[:, 0].transpose(0, 2, 1),
        "mlp.routed_experts.wi_1": gate_up[:, 1].transpose(0, 2, 1),
        "mlp.routed_experts.wo": hf[f"{mlp}experts.down_proj"].transpose(0, 2, 1),
        "mlp.shared_expert.wi_0.kernel": hf[f"{mlp}shared_expert.gate_proj.weight"].T,
        "mlp.shared_expert.wi_1.kernel": hf[f"{mlp}shared_expert.up_proj.weight"].T,
        "mlp.shared_expert.wo.kernel": hf[f"{mlp}shared_expert.down_proj.weight"].T,
        "mlp.shared_expert_gate.kernel": hf[f"{mlp}shared_expert_gate.weight"].T,
    }
    if f"{at}self_attn.q_proj.weight" in hf:
        own = f"{at}self_attn."
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        for name, shape in (("query", (heads, 2 * d)), ("key", (groups, d)), ("value", (groups, d))):
            kernel = hf[f"{own}{name[0]}_proj.weight"].T.reshape(hidden, *shape)
            layer[f"attention.attention.{name}.kernel"] = kernel
        layer["attention.attention.out.kernel"] = hf[f"{own}o_proj.weight"].T
        layer["attention.attention.query_norm.scale"] = hf[f"{own}q_norm.weight"]
        layer["attention.attention.key_norm.scale"] = hf[f"{own}k_norm.weight"]
        return layer
    own, keys = f"{at}linear_attn.", config.linear_num_key_heads
    if f"{own}in_proj_qkvz.weight" in hf:
        qkvz, ba = hf[f"{own}in_proj_qkvz.weight"], hf[f"{own}in_proj_ba.weight"]
    else:
        # concat_qkvz_and_transpose, concat_ba_and_transpose: head of keys by head of keys.
        width = keys * config.linear_key_head_dim
        q, k, v = np.split(hf[f"{own}in_proj_qkv.weight"], [width, 2 * width])
        parts = (q, k, v, hf[f"{own}in_proj_z.weight"])
        qkvz = np.concatenate([part.reshape(keys, -1, hidden) for part in parts], 1).reshape(-1, hidden)
        gates = (hf[f"{own}in_proj_b.weight"], hf[f"{own}in_proj_a.weight"])
        ba = np.concatenate([part.reshape(keys, -1, hidden) for part in gates], 1).reshape(-1, hidden)
    return layer | {
        "attention.in_proj_qkvz.kernel": qkvz.T,
        "attention.in_proj_ba.kernel": ba.T,
        "attention.conv1d.kernel": hf[f"{own}conv1d.weight"].transpose(2, 1, 0),
        "attention.A_log": hf[f"{own}A_log"],
        "attention.dt_bias": hf[f"{own}dt_bias"],
        "attention.norm.rms_norm.scale": hf[f"{own}norm.weight"],
        "attention.out_proj.kernel": hf[f"{own}out_proj.weight"].T,
    }


def arrange(hf: Tree, config: Any, scan: int | None) -> Tree:
    """What MaxText has of a model, besides the step.

    Args:
        hf: tensors as the hub has them, experts in one tensor.
        config: transformers' config of the model.
        scan: axis of the layers; None for layers apart.
    """
    out = {
        "token_embedder.embedding": hf["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": hf["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        out["decoder.logits_dense.kernel"] = hf["lm_head.weight"].T
    count, cycle = config.num_hidden_layers, find_cycle(config)
    layers = [_arrange_layer(hf, f"model.layers.{i}.", config) for i in range(count)]
    for place in range(cycle if scan is not None else 0):
        for name in layers[place]:
            stack = np.stack([layer[name] for layer in layers[place::cycle]])
            # flax takes an axis beyond a vector's own for its last. source: flax core/axes_scan.py
            axis = min(scan, stack.ndim - 1) if scan is not None and scan >= 0 else -1
            out[f"decoder.layers.layer_{place}.{name}"] = np.moveaxis(stack, 0, axis)
    if scan is None:
        for n, layer in enumerate(layers):
            out |= {f"decoder.layers_{n}.{name}": array for name, array in layer.items()}
    return {f"params.params.{name}": np.ascontiguousarray(array) for name, array in out.items()}


def _norm(x: torch.Tensor, scale: torch.Tensor, eps: float, offset: float = 1.0) -> torch.Tensor:
    """RMSNorm, whose scale is stored less the offset."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (scale + offset)


def _rotate(x: torch.Tensor, yml: dict[str, Any]) -> torch.Tensor:
    """PartialRotaryEmbedding; x is [B, S, N, D]."""
    dim = int(x.shape[-1] * yml["partial_rotary_factor"])
    turned, passed = x[..., :dim], x[..., dim:]
    timescale = float(yml["rope_max_timescale"]) ** (2.0 * torch.arange(dim // 2) / dim)
    angle = (torch.arange(x.shape[1])[:, None] / timescale)[:, None]
    a, b = turned.chunk(2, -1)
    rotated = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat([*rotated, passed], -1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """l2norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _compute_delta(y: torch.Tensor, get: Any, yml: dict[str, Any], eps: float) -> torch.Tensor:
    """Qwen3NextGatedDeltaNet, position by position."""
    keys, values = yml["gdn_num_key_heads"], yml["gdn_num_value_heads"]
    kd, vd, per = yml["gdn_key_head_dim"], yml["gdn_value_head_dim"], values // keys
    batch, length, _ = y.shape
    mixed = (y @ get("in_proj_qkvz.kernel")).reshape(batch, length, keys, -1)
    q, k, v, z = mixed.split([kd, kd, per * vd, per * vd], -1)
    b, a = (y @ get("in_proj_ba.kernel")).reshape(batch, length, keys, -1).split([per, per], -1)
    flat = torch.cat([part.reshape(batch, length, -1) for part in (q, k, v)], -1)
    kernel = get("conv1d.kernel")
    assert kernel.shape[0] == yml["gdn_conv_kernel_dim"]
    padded = torch.cat([flat.new_zeros(batch, len(kernel) - 1, flat.shape[-1]), flat], 1)
    mixed = silu(sum(padded[:, n : n + length] * kernel[n, 0] for n in range(len(kernel))))
    q, k, v = mixed.split([keys * kd, keys * kd, values * vd], -1)
    q, k = (part.reshape(batch, length, keys, kd).repeat_interleave(per, 2) for part in (q, k))
    v, beta = v.reshape(batch, length, values, vd), b.reshape(batch, length, values).sigmoid()
    gate = -get("A_log").exp() * softplus(a.reshape(batch, length, values) + get("dt_bias"))
    q, k = _unit(q) * kd**-0.5, _unit(k)
    state, outputs = y.new_zeros(batch, values, kd, vd), []
    for t in range(length):
        state = state * gate[:, t, :, None, None].exp()
        held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        change = (v[:, t] - held) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    out = _norm(torch.stack(outputs, 1), get("norm.rms_norm.scale"), eps, 0.0)
    out = out * silu(z.reshape(batch, length, values, vd))
    return out.reshape(batch, length, -1) @ get("out_proj.kernel")


def _compute_attention(y: torch.Tensor, get: Any, yml: dict[str, Any], eps: float) -> torch.Tensor:
    """Qwen3NextFullAttention."""
    length, d = y.shape[1], yml["head_dim"]
    q, k, v = (
        torch.einsum("bsh,hnd->bsnd", y, get(f"attention.{name}.kernel"))
        for name in ("query", "key", "value")
    )
    q, gate = q.chunk(2, -1)
    q = _rotate(_norm(q, get("attention.query_norm.scale"), eps), yml) * d**-0.5
    k = _rotate(_norm(k, get("attention.key_norm.scale"), eps), yml)
    k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], 2) for part in (k, v))
    logits = torch.einsum("bsnd,btnd->bnst", q, k) + torch.full((length, length), float("-inf")).triu(1)
    mixed = torch.einsum("bnst,btnd->bsnd", logits.softmax(-1), v) * gate.sigmoid()
    return mixed.reshape(*y.shape[:2], -1) @ get("attention.out.kernel")


def compute(tree: Tree, yml: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of MaxText for a tree that it restores and the yml that it is run with."""
    names = {key.removeprefix("params.params."): a for key, a in tree.items() if key != "step"}
    arrays = {key: torch.from_numpy(np.ascontiguousarray(a)).float() for key, a in names.items()}
    used = set()
    count, cycle = yml["base_num_decoder_layers"], yml["inhomogeneous_layer_cycle_interval"]
    assert yml["decoder_block"] in ("qwen3_next", "qwen3_5") and yml["mlp_activations"] == ["silu", "linear"]
    assert yml["rope_type"] == "default" and not yml.get("use_qk_norm") and yml["shared_experts"] == 1
    assert count % cycle == 0 or not yml["scan_layers"]
    eps = float(yml["normalization_layer_epsilon"])

    def get(own: str, layer: int | None = None) -> torch.Tensor:
        if layer is not None and yml["scan_layers"]:
            name = f"decoder.layers.layer_{layer % cycle}.{own}"
            used.add(name)
            stack = arrays[name]
            axis = min(yml["param_scan_axis"], stack.ndim - 1)
            assert stack.shape[axis] == count // cycle
            return stack.select(axis, layer // cycle)
        name = own if layer is None else f"decoder.layers_{layer}.{own}"
        used.add(name)
        return arrays[name]

    x = get("token_embedder.embedding")[tokens]
    for i in range(count):

        def own(name: str, layer: int = i) -> torch.Tensor:
            return get(f"attention.{name}", layer)

        y = _norm(x, get("input_layernorm.scale", i), eps)
        attend = _compute_delta if (i + 1) % cycle else _compute_attention
        x = x + attend(y, own, yml, eps)
        y = _norm(x, get("post_attention_layernorm.scale", i), eps)
        # get_topk: the best by their logits, then the softmax over these alone.
        best, chosen = (y @ get("mlp.routed_experts.gate.kernel", i)).topk(yml["num_experts_per_tok"])
        share = torch.zeros(*y.shape[:2], yml["num_experts"]).scatter(-1, chosen, best.softmax(-1))
        first, second = (
            torch.einsum("bsm,emh->bseh", y, get(f"mlp.routed_experts.{w}", i)) for w in ("wi_0", "wi_1")
        )
        last = torch.einsum("bseh,ehm->bsem", silu(first) * second, get("mlp.routed_experts.wo", i))
        routed = torch.einsum("bsem,bse->bsm", last, share)
        first, second = (y @ get(f"mlp.shared_expert.{w}.kernel", i) for w in ("wi_0", "wi_1"))
        shared = (silu(first) * second) @ get("mlp.shared_expert.wo.kernel", i)
        x = x + routed + shared * (y @ get("mlp.shared_expert_gate.kernel", i)).sigmoid()
    x = _norm(x, get("decoder.decoder_norm.scale"), eps)
    if yml["logits_via_embedding"]:
        assert yml["normalize_embedding_logits"] is False
        logits = x @ get("token_embedder.embedding").T
    else:
        logits = x @ get("decoder.logits_dense.kernel")
    assert used == arrays.keys()
    return logits


def files(kind: str, folder: Path | None = None, **changes: Any) -> tuple[Any, Tree, torch.Tensor]:
    """Config, tensors and logits of a model that transformers saves, in a folder if one is given.

    The tensors have experts in one tensor; the folder has them so only where the hub has them so.
    """
    if folder is None:
        with TemporaryDirectory() as temporary:
            return files(kind, Path(temporary), **changes)
    model_type, settings = KINDS[kind]
    made = delta_maker.model(kind=model_type, **_SIZES | settings | changes)
    made.save_pretrained(folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    stacked = delta_maker.stack_experts(state)
    if model_type != "qwen3_next":
        save_file(stacked, file, metadata={"format": "pt"})
    tensors = {name: as_numpy(tensor).copy() for name, tensor in stacked.items()}
    return made.config, tensors, moe_maker.logits(made)


def yml_of(config: Any, **more: Any) -> dict[str, Any]:
    """What the yml of such a model in MaxText's configs/models states."""
    return {
        "decoder_block": DECODER_BLOCKS[config.model_type],
        "base_emb_dim": config.hidden_size,
        "base_num_decoder_layers": config.num_hidden_layers,
        "base_num_query_heads": config.num_attention_heads,
        "base_num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "normalization_layer_epsilon": config.rms_norm_eps,
        "base_mlp_dim": config.moe_intermediate_size,
        "base_moe_mlp_dim": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "shared_experts": 1,
        "num_experts_per_tok": config.num_experts_per_tok,
        "norm_topk_prob": True,
        "inhomogeneous_layer_cycle_interval": find_cycle(config),
        "gdn_conv_kernel_dim": config.linear_conv_kernel_dim,
        "gdn_key_head_dim": config.linear_key_head_dim,
        "gdn_value_head_dim": config.linear_value_head_dim,
        "gdn_num_key_heads": config.linear_num_key_heads,
        "gdn_num_value_heads": config.linear_num_value_heads,
        "rope_max_timescale": int(config.rope_parameters["rope_theta"]),
        "partial_rotary_factor": config.rope_parameters["partial_rotary_factor"],
        "logits_via_embedding": bool(config.tie_word_embeddings),
        **({"normalize_embedding_logits": False} if config.tie_word_embeddings else {}),
        **more,
    }


def checkpoint(kind: str, folder: Path, scan: int | None = 1, tree: Tree | None = None, **yml: Any) -> Path:
    """A checkpoint of MaxText's own, with a yml beside it."""
    config, tensors, _ = files(kind)
    saved_orbax(arrange(tensors, config, scan) if tree is None else tree, folder)
    stated = {key: value for key, value in yml_of(config, **yml).items() if value is not None}
    (folder / "maxtext_model.yml").write_text(yaml.safe_dump(stated))
    return folder
