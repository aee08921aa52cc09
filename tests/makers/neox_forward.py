"""GPT-NeoX's forward pass in plain torch float32, as tensor-parallel ranks compute it.

Every rank's partial output is made from its own shard; the all-reduce is a sum over ranks. Nothing
is merged, so a wrong merge rule cannot hide here. source: GPT-NeoX megatron/model/transformer.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn import functional as F

Shard = dict[str, torch.Tensor]


def read_shards(root: Path) -> tuple[list[Shard], dict[str, Any]]:
    """Tensors of each rank under `LL.name`, and the config with '_' in its keys."""
    step = root / (root / "latest").read_text().strip()
    config = yaml.safe_load(next(step.glob("configs/*.yml")).read_text())
    config = {str(k).replace("-", "_"): v for k, v in config.items()}
    shards: list[Shard] = []
    for rank in range(config["model_parallel_size"]):
        shard: Shard = {}
        for file in sorted(step.glob(f"layer_*-model_{rank:02d}-model_states.pt")):
            layer = int(file.name.split("_")[1].split("-")[0])
            shard |= {f"{layer}.{k}": v for k, v in torch.load(file, weights_only=False).items()}
        if not shard:
            state = torch.load(step / f"mp_rank_{rank:02d}_model_states.pt", weights_only=False)
            shard = {k.removeprefix("sequential."): v for k, v in state["module"].items()}
        legacy = {"dense_h_to_4h": "linear1", "dense_4h_to_h": "linear2"}
        for old, new in legacy.items():
            shard = {k.replace(old, new): v for k, v in shard.items()}
        shards.append({k: v.float() for k, v in shard.items() if not k.endswith("_extra_state")})
    return shards, config


def _norm(x: torch.Tensor, shard: Shard, name: str, eps: float) -> torch.Tensor:
    """A norm of any kind, by the names of its tensors; `name` ends before the separator."""
    weight, bias = f"{name}.weight", f"{name}.bias"
    if f"{name}.norm.weight" in shard:
        weight, bias = f"{name}.norm.weight", f"{name}.norm.bias"
    elif f"{name}.layer_norm_weight" in shard:
        weight, bias = f"{name}.layer_norm_weight", f"{name}.layer_norm_bias"
    if f"{name}.scale" in shard or bias not in shard:
        # source: megatron/model/norms.py RMSNorm: x / (rms + eps)
        rms = x.norm(2, dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
        return x / (rms + eps) * shard[f"{name}.scale" if f"{name}.scale" in shard else weight]
    return F.layer_norm(x, x.shape[-1:], shard[weight], shard[bias], eps)


def _rotate(x: torch.Tensor, dims: int, base: float = 10000.0) -> torch.Tensor:
    """Rotary embedding of the first `dims` of each head; x is [batch, heads, sequence, head]."""
    turned, kept = x[..., :dims], x[..., dims:]
    frequency = 1.0 / base ** (torch.arange(0, dims, 2).float() / dims)
    angle = torch.outer(torch.arange(x.shape[-2]).float(), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()
    return torch.cat((turned, kept), dim=-1)


def _attention(x: torch.Tensor, shard: Shard, layer: int, config: dict[str, Any]) -> torch.Tensor:
    """One rank's partial output, without the row bias."""
    prefix = f"{layer}.attention"
    heads, tp = config["num_attention_heads"], config["model_parallel_size"]
    head = config["hidden_size"] // heads
    rotary = int(head * config.get("rotary_pct", 1.0))
    kv = config.get("num_kv_heads") or heads
    mine, groups = heads // tp, kv // tp
    te = f"{prefix}.qkv.weight" in shard
    fused, out = (
        (f"{prefix}.qkv", f"{prefix}.proj") if te else (f"{prefix}.query_key_value", f"{prefix}.dense")
    )
    qkv = F.linear(x, shard[f"{fused}.weight"], shard.get(f"{fused}.bias"))
    batch, sequence, _ = qkv.shape
    if te:
        # interleaved per group: its queries, its key, its value
        rows = qkv.view(batch, sequence, groups, mine // groups + 2, head)
        q, k, v = rows.split([mine // groups, 1, 1], dim=3)
        q = q.reshape(batch, sequence, mine, head)
        k, v = k.squeeze(3), v.squeeze(3)
    elif kv != heads:
        q, k, v = qkv.split([mine * head, groups * head, groups * head], dim=-1)
        q = q.view(batch, sequence, mine, head)
        k, v = k.view(batch, sequence, groups, head), v.view(batch, sequence, groups, head)
    else:
        q, k, v = qkv.view(batch, sequence, mine, 3 * head).split(head, dim=-1)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = (z.repeat_interleave(mine // groups, dim=1) for z in (k, v))
    base = float(config.get("rotary_emb_base", 10000))
    scores = _rotate(q, rotary, base) @ _rotate(k, rotary, base).transpose(-1, -2) / math.sqrt(head)
    past = torch.arange(sequence)[:, None] - torch.arange(sequence)[None, :]
    hidden = past < 0
    if (window := config.get("sliding_window_width")) is not None:
        # flash-attn's window_size=(window, -1): so many keys besides the position's own.
        assert {kind for block in config["attention_config"] for kind in block[0]} == {"flash"}
        hidden = hidden | (past > window)
    mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    mixed = mixed.transpose(1, 2).reshape(batch, sequence, -1)
    return F.linear(mixed, shard[f"{out}.weight"])


def _mlp(x: torch.Tensor, shard: Shard, layer: int, config: dict[str, Any], eps: float) -> torch.Tensor:
    """One rank's partial output with the norm before it, without the row bias."""
    prefix = f"{layer}.mlp"
    activation = str(config.get("activation", "gelu"))
    gate = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}.get(activation)
    if f"{prefix}.fc1_weight" in shard:
        # Transformer Engine's eps is fixed; its activation is on the first half.
        x = _norm(x, shard, prefix, 1e-8 if "rms" in str(config.get("norm")) else 1e-5)
        inner = F.linear(x, shard[f"{prefix}.fc1_weight"], shard.get(f"{prefix}.fc1_bias"))
        if gate:
            first, second = inner.chunk(2, dim=-1)
            inner = gate(first) * second
        else:
            inner = F.gelu(inner)
        return F.linear(inner, shard[f"{prefix}.fc2_weight"])
    x = _norm(x, shard, f"{layer}.post_attention_layernorm", eps)
    if f"{prefix}.w1.weight" in shard:
        inner = F.silu(F.linear(x, shard[f"{prefix}.w1.weight"])) * F.linear(x, shard[f"{prefix}.w3.weight"])
        return F.linear(inner, shard[f"{prefix}.w2.weight"])
    inner = F.linear(x, shard[f"{prefix}.linear1.weight"], shard.get(f"{prefix}.linear1.bias"))
    if gate:
        up, second = inner.chunk(2, dim=-1)
        inner = gate(second) * up
    else:
        inner = F.gelu(inner, approximate="tanh" if config.get("bias_gelu_fusion") else "none")
    return F.linear(inner, shard[f"{prefix}.linear2.weight"])


def _biases(shards: list[Shard], te: str, own: str, every: bool) -> torch.Tensor | float:
    """What the ranks' row biases add up to: TE's and those of a sequential residual are added once."""
    if te in shards[0]:
        return shards[0][te]
    if own not in shards[0]:
        return 0.0
    return sum(shard[own] for shard in shards) if every else shards[0][own]


def logits(shards: list[Shard], config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Logits over the padded vocabulary."""
    rms = "rms" in str(config.get("norm"))
    eps = config.get("rms_norm_epsilon", 1e-8) if rms else config.get("layernorm_epsilon", 1e-5)
    layers = config["num_layers"]
    residual = config["gpt_j_residual"]
    te_linear = config.get("te_rowparallel", False)
    rows = shards[0]["0.word_embeddings.weight"].shape[0]
    # Vocabulary-parallel embedding: a rank contributes zeros for tokens that are not its own.
    x = torch.zeros(*tokens.shape, config["hidden_size"])
    for rank, shard in enumerate(shards):
        mine = (tokens >= rank * rows) & (tokens < (rank + 1) * rows)
        found = F.embedding((tokens - rank * rows).clamp(0, rows - 1), shard["0.word_embeddings.weight"])
        x = x + found * mine.unsqueeze(-1)
    for layer in range(2, layers + 2):
        names = (f"{layer}.attention.proj.bias", f"{layer}.attention.dense.bias")
        attention_bias = _biases(shards, *names, every=residual and not te_linear)
        names = (f"{layer}.mlp.fc2_bias", f"{layer}.mlp.linear2.bias")
        mlp_bias = _biases(shards, *names, every=residual and not te_linear)

        def attention(x: torch.Tensor, layer: int = layer) -> torch.Tensor:
            terms = [
                _attention(_norm(x, s, f"{layer}.input_layernorm", eps), s, layer, config) for s in shards
            ]
            return torch.stack(terms).sum(0)

        def mlp(x: torch.Tensor, layer: int = layer) -> torch.Tensor:
            return torch.stack([_mlp(x, s, layer, config, eps) for s in shards]).sum(0)

        if residual:
            x = x + attention(x) + attention_bias + mlp(x) + mlp_bias
        else:
            x = x + attention(x) + attention_bias
            x = x + mlp(x) + mlp_bias
    x = _norm(x, shards[0], f"{layers + 3}.norm", eps)
    out = f"{layers + 4}.final_linear.weight"
    name = out if out in shards[0] else "0.word_embeddings.weight"
    return torch.cat([F.linear(x, shard[name]) for shard in shards], dim=-1)
