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
            layer = int(file.name[6:8])
            shard |= {f"{layer}.{k}": v for k, v in torch.load(file, weights_only=True).items()}
        if not shard:
            state = torch.load(step / f"mp_rank_{rank:02d}_model_states.pt", weights_only=False)
            shard = {k.removeprefix("sequential."): v for k, v in state["module"].items()}
        legacy = {"dense_h_to_4h": "linear1", "dense_4h_to_h": "linear2"}
        for old, new in legacy.items():
            shard = {k.replace(old, new): v for k, v in shard.items()}
        shards.append({k: v.float() for k, v in shard.items()})
    return shards, config


def _norm(x: torch.Tensor, shard: Shard, name: str, eps: float) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], shard[f"{name}.weight"], shard[f"{name}.bias"], eps)


def _rotate(x: torch.Tensor, dims: int, base: float = 10000.0) -> torch.Tensor:
    """Rotary embedding of the first `dims` of each head; x is [batch, heads, sequence, head]."""
    turned, kept = x[..., :dims], x[..., dims:]
    frequency = 1.0 / base ** (torch.arange(0, dims, 2).float() / dims)
    angle = torch.outer(torch.arange(x.shape[-2]).float(), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()
    return torch.cat((turned, kept), dim=-1)


def _attention(x: torch.Tensor, shard: Shard, layer: int, head: int, rotary: int) -> torch.Tensor:
    """One rank's partial output, without the row bias."""
    prefix = f"{layer}.attention"
    qkv = F.linear(x, shard[f"{prefix}.query_key_value.weight"], shard[f"{prefix}.query_key_value.bias"])
    batch, sequence, _ = qkv.shape
    q, k, v = qkv.view(batch, sequence, -1, 3 * head).transpose(1, 2).split(head, dim=-1)
    scores = _rotate(q, rotary) @ _rotate(k, rotary).transpose(-1, -2) / math.sqrt(head)
    future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    mixed = mixed.transpose(1, 2).reshape(batch, sequence, -1)
    return F.linear(mixed, shard[f"{prefix}.dense.weight"])


def _mlp(x: torch.Tensor, shard: Shard, layer: int) -> torch.Tensor:
    """One rank's partial output, without the row bias."""
    inner = F.gelu(F.linear(x, shard[f"{layer}.mlp.linear1.weight"], shard[f"{layer}.mlp.linear1.bias"]))
    return F.linear(inner, shard[f"{layer}.mlp.linear2.weight"])


def logits(shards: list[Shard], config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Logits over the padded vocabulary."""
    head = config["hidden_size"] // config["num_attention_heads"]
    rotary = int(head * config["rotary_pct"])
    eps = config.get("layernorm_epsilon", 1e-5)
    layers = config["num_layers"]
    residual = config["gpt_j_residual"]
    rows = shards[0]["0.word_embeddings.weight"].shape[0]
    # Vocabulary-parallel embedding: a rank contributes zeros for tokens that are not its own.
    x = torch.zeros(*tokens.shape, config["hidden_size"])
    for rank, shard in enumerate(shards):
        mine = (tokens >= rank * rows) & (tokens < (rank + 1) * rows)
        found = F.embedding((tokens - rank * rows).clamp(0, rows - 1), shard["0.word_embeddings.weight"])
        x = x + found * mine.unsqueeze(-1)
    for layer in range(2, layers + 2):
        if residual:
            # Each rank adds its biases before the one all-reduce.
            terms = [
                _attention(_norm(x, s, f"{layer}.input_layernorm", eps), s, layer, head, rotary)
                + s[f"{layer}.attention.dense.bias"]
                + _mlp(_norm(x, s, f"{layer}.post_attention_layernorm", eps), s, layer)
                + s[f"{layer}.mlp.linear2.bias"]
                for s in shards
            ]
            x = x + torch.stack(terms).sum(0)
        else:
            # Two all-reduces; the bias is added once after each.
            terms = [
                _attention(_norm(x, s, f"{layer}.input_layernorm", eps), s, layer, head, rotary)
                for s in shards
            ]
            x = x + torch.stack(terms).sum(0) + shards[0][f"{layer}.attention.dense.bias"]
            terms = [_mlp(_norm(x, s, f"{layer}.post_attention_layernorm", eps), s, layer) for s in shards]
            x = x + torch.stack(terms).sum(0) + shards[0][f"{layer}.mlp.linear2.bias"]
    x = _norm(x, shards[0], f"{layers + 3}.norm", eps)
    out = f"{layers + 4}.final_linear.weight"
    name = out if out in shards[0] else "0.word_embeddings.weight"
    return torch.cat([F.linear(x, shard[name]) for shard in shards], dim=-1)
