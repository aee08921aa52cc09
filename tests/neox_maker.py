"""Writes GPT-NeoX checkpoints of random weights, and merges their shards in plain torch.

The layout follows megatron/checkpointing.py and model/transformer.py of GPT-NeoX; nothing of
fastshard is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

Shard = dict[str, torch.Tensor]

#: Tensors that each rank holds a copy of, whatever the residual.
REPLICATED = ("layernorm.weight", "layernorm.bias", "norm.weight", "norm.bias")
ROW_BIAS = ("attention.dense.bias", "mlp.linear2.bias")
ROW_WEIGHT = ("attention.dense.weight", "mlp.linear2.weight")


@dataclass
class Spec:
    """A model and how it is divided."""

    tp: int = 2
    hidden: int = 64
    heads: int = 8
    layers: int = 2
    inner: int = 256
    vocab: int = 600
    residual: bool = True
    tied: bool = False
    dtype: torch.dtype = torch.float32
    rotary_pct: float = 0.25
    seed: int = 1
    zero_row_bias: bool = False

    @property
    def padded(self) -> int:
        """Vocabulary padded as NeoX does: to a multiple of 128 per rank."""
        multiple = 128 * self.tp
        return -(-self.vocab // multiple) * multiple

    def config(self) -> dict[str, Any]:
        """The training config; NeoX mixes '-' and '_' in its keys."""
        return {
            "num-layers": self.layers, "hidden-size": self.hidden, "num-attention-heads": self.heads,
            "max-position-embeddings": 64, "seq-length": 64, "model-parallel-size": self.tp, "norm": "layernorm",
            "pos-emb": "rotary", "rotary_pct": self.rotary_pct, "gpt_j_residual": self.residual,
            "no-weight-tying": not self.tied, "make_vocab_size_divisible_by": 128, "activation": "gelu",
        }  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """What the rank files carry."""
        return {
            "num_layers": self.layers, "hidden_size": self.hidden, "num_attention_heads": self.heads,
            "max_position_embeddings": 64, "make_vocab_size_divisible_by": 128, "padded_vocab_size": self.padded,
            "tokenizer_type": "HFTokenizer", "model_parallel_size": self.tp,
        }  # fmt: skip


def make_shards(spec: Spec) -> list[Shard]:
    """Tensors of each rank, named `LL.name` by pipeline layer."""
    generator = torch.Generator().manual_seed(spec.seed)

    def random(*shape: int, scale: float = 0.2, around: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale + around).to(spec.dtype)

    h, f, t = spec.hidden, spec.inner, spec.tp
    shards: list[Shard] = [{} for _ in range(t)]

    def each(name: str, *shape: int, scale: float = 0.2) -> None:
        for shard in shards:
            shard[name] = random(*shape, scale=scale)

    def same(name: str, *shape: int, around: float = 0.0) -> None:
        value = random(*shape, around=around)
        for shard in shards:
            shard[name] = value.clone()

    each("0.word_embeddings.weight", spec.padded // t, h)
    for layer in range(2, spec.layers + 2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            same(f"{layer}.{norm}.weight", h, around=1.0)
            same(f"{layer}.{norm}.bias", h)
        each(f"{layer}.attention.query_key_value.weight", 3 * h // t, h)
        each(f"{layer}.attention.query_key_value.bias", 3 * h // t)
        each(f"{layer}.attention.dense.weight", h, h // t)
        each(f"{layer}.mlp.linear1.weight", f // t, h)
        each(f"{layer}.mlp.linear1.bias", f // t)
        each(f"{layer}.mlp.linear2.weight", h, f // t)
        for name in ROW_BIAS:
            if spec.zero_row_bias:
                for shard in shards:
                    shard[f"{layer}.{name}"] = torch.zeros(h, dtype=spec.dtype)
            else:
                (each if spec.residual else same)(f"{layer}.{name}", h)
    same(f"{spec.layers + 3}.norm.weight", h, around=1.0)
    same(f"{spec.layers + 3}.norm.bias", h)
    if not spec.tied:
        each(f"{spec.layers + 4}.final_linear.weight", spec.padded // t, h, scale=0.1)
    return shards


def rank_state(spec: Spec, module: Any = None, iteration: int = 7) -> dict[str, Any]:
    """A rank file as DeepSpeed writes it."""
    return {
        "module": module, "optimizer": None, "global_steps": iteration, "global_samples": 16 * iteration,
        "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": spec.tp, "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": "0.16.0", "iteration": iteration, "args": spec.arguments(), "sparse_tensor_module_names": set(),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8)},
    }  # fmt: skip


def write(root: Path, spec: Spec, shards: list[Shard] | None = None, *, pipeline: bool = True) -> Path:
    """Writes a checkpoint of step 7 and returns its root."""
    shards = make_shards(spec) if shards is None else shards
    step = root / "global_step7"
    (step / "configs").mkdir(parents=True)
    (root / "latest").write_text("global_step7")
    (step / "configs/config.yml").write_text(yaml.safe_dump(spec.config()))
    for rank, shard in enumerate(shards):
        module = None if pipeline else {f"sequential.{name}": tensor for name, tensor in shard.items()}
        torch.save(rank_state(spec, module), step / f"mp_rank_{rank:02d}_model_states.pt")
        for layer in sorted({int(name.split(".")[0]) for name in shard}) if pipeline else ():
            prefix = f"{layer}."
            content = {n.removeprefix(prefix): t for n, t in shard.items() if n.startswith(prefix)}
            torch.save(content, step / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    return root


def merge(shards: list[Shard], *, residual: bool) -> dict[str, torch.Tensor]:
    """What a run with tp 1 would hold: sums in float32 in rank order, rounded once."""
    merged = {}
    for name, first in shards[0].items():
        pieces = [shard[name] for shard in shards]
        if name.endswith(ROW_BIAS) and residual:
            total = pieces[0].float()
            for piece in pieces[1:]:
                total = total + piece.float()
            merged[name] = total.to(first.dtype)
        elif name.endswith((*REPLICATED, *ROW_BIAS)):
            assert all(torch.equal(piece, first) for piece in pieces)
            merged[name] = first
        else:
            merged[name] = torch.cat(pieces, dim=1 if name.endswith(ROW_WEIGHT) else 0)
    return merged


def hf_name(name: str, layers: int) -> str:
    """The Hugging Face name of a GPT-NeoX tensor."""
    number, rest = name.split(".", 1)
    layer = int(number)
    if layer == 0:
        return "gpt_neox.embed_in.weight"
    if layer == layers + 3:
        return rest.replace("norm.", "gpt_neox.final_layer_norm.")
    if layer == layers + 4:
        return "embed_out.weight"
    rest = rest.replace("mlp.linear1", "mlp.dense_h_to_4h").replace("mlp.linear2", "mlp.dense_4h_to_h")
    return f"gpt_neox.layers.{layer - 2}.{rest}"
