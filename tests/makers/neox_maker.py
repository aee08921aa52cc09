"""Writes GPT-NeoX checkpoints of random weights, and merges their shards in plain torch.

The layout follows megatron/checkpointing.py and model/transformer.py of GPT-NeoX; nothing of
fastshard is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

Shard = dict[str, torch.Tensor]

#: Tensors that each rank holds a copy of, whatever the residual.
REPLICATED = (
    "layernorm.weight",
    "layernorm.bias",
    "norm.weight",
    "norm.bias",
    "norm.scale",
    "layernorm.scale",
    "layernorm.norm.weight",
    "layernorm.norm.bias",
    "norm.norm.weight",
    "norm.norm.bias",
    "layer_norm_weight",
    "layer_norm_bias",
    "attention.proj.bias",
    "mlp.fc2_bias",
)
ROW_BIAS = ("attention.dense.bias", "mlp.linear2.bias")
ROW_WEIGHT = (
    "attention.dense.weight",
    "attention.proj.weight",
    "mlp.linear2.weight",
    "mlp.fc2_weight",
    "mlp.w2.weight",
)


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
    #: layernorm, rmsnorm, te_layernorm or te_rmsnorm
    norm: str = "layernorm"
    activation: str = "gelu"
    #: None as in configs without num_kv_heads
    kv_heads: int | None = None
    biases: bool = True
    te_mha: bool = False
    te_mlp: bool = False
    #: te_columnparallel and te_rowparallel
    te_linear: bool = False
    #: The unused post_attention_layernorm of GPT-NeoX before #1355.
    stale_norm: bool = False
    #: w1, w2, w3 instead of linear1 and linear2
    split_gate: bool = False
    #: What Transformer Engine's modules hold as `_extra_state`.
    extra_state: Any = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def gated(self) -> bool:
        """Whether the first projection of the MLP is two."""
        return self.split_gate or self.activation in ("swiglu", "geglu", "reglu")

    @property
    def gqa(self) -> bool:
        """Whether there are fewer key/value heads than heads."""
        return self.kv_heads not in (None, self.heads)

    @property
    def padded(self) -> int:
        """Vocabulary padded as NeoX does: to a multiple of 128 per rank."""
        multiple = 128 * self.tp
        return -(-self.vocab // multiple) * multiple

    def config(self) -> dict[str, Any]:
        """The training config; NeoX mixes '-' and '_' in its keys."""
        return {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "num-attention-heads": self.heads,
            "max-position-embeddings": 64,
            "seq-length": 64,
            "model-parallel-size": self.tp,
            "norm": self.norm,
            "pos-emb": "rotary",
            "rotary_pct": self.rotary_pct,
            "gpt_j_residual": self.residual,
            "no-weight-tying": not self.tied,
            "make_vocab_size_divisible_by": 128,
            "activation": self.activation,
            **({} if self.kv_heads is None else {"num_kv_heads": self.kv_heads}),
            **self.more,
        }

    def arguments(self) -> dict[str, Any]:
        """What the rank files carry."""
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "max_position_embeddings": 64,
            "make_vocab_size_divisible_by": 128,
            "padded_vocab_size": self.padded,
            "tokenizer_type": "HFTokenizer",
            "model_parallel_size": self.tp,
        }


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

    def norm(prefix: str, weight: str = "", bias: str = "") -> None:
        names = {
            "layernorm": (".weight", ".bias"),
            "rmsnorm": (".scale", ""),
            "te_layernorm": (".norm.weight", ".norm.bias"),
            "te_rmsnorm": (".norm.weight", ""),
        }
        own_weight, own_bias = names[spec.norm]
        same(f"{prefix}{weight or own_weight}", h, around=1.0)
        if own_bias and (bias or not weight):
            same(f"{prefix}{bias or own_bias}", h)

    def linear(name: str, rows: int, columns: int, kind: str, te: bool, join: str = ".") -> None:
        """A projection divided by rows ("column" parallel) or columns ("row" parallel)."""
        column = kind == "column"
        each(f"{name}{join}weight", *((rows // t, columns) if column else (rows, columns // t)))
        if spec.biases and not spec.split_gate:
            if column:
                each(f"{name}{join}bias", rows // t)
            elif spec.zero_row_bias:
                for shard in shards:
                    shard[f"{name}{join}bias"] = torch.zeros(h, dtype=spec.dtype)
            else:
                (same if te or not spec.residual else each)(f"{name}{join}bias", rows)
        if te and join == ".":
            extra(name)

    def extra(module: str) -> None:
        for shard in shards:
            shard[f"{module}._extra_state"] = spec.extra_state

    each("0.word_embeddings.weight", spec.padded // t, h)
    width = h // spec.heads
    fused = (spec.heads + 2 * (spec.kv_heads or spec.heads)) * width
    for layer in range(2, spec.layers + 2):
        norm(f"{layer}.input_layernorm")
        qkv, out = ("qkv", "proj") if spec.te_mha else ("query_key_value", "dense")
        te = spec.te_mha or spec.te_linear
        linear(f"{layer}.attention.{qkv}", fused, h, "column", te)
        linear(f"{layer}.attention.{out}", h, h, "row", te)
        if spec.te_mha:
            extra(f"{layer}.attention.core_attention")
        inner = 2 * f if spec.gated else f
        if spec.te_mlp:
            norm(f"{layer}.mlp", ".layer_norm_weight", ".layer_norm_bias")
            linear(f"{layer}.mlp.fc1", inner, h, "column", True, "_")
            linear(f"{layer}.mlp.fc2", h, f, "row", True, "_")
            extra(f"{layer}.mlp")
        else:
            norm(f"{layer}.post_attention_layernorm")
            if spec.split_gate:
                linear(f"{layer}.mlp.w1", f, h, "column", False)
                linear(f"{layer}.mlp.w3", f, h, "column", False)
                linear(f"{layer}.mlp.w2", h, f, "row", False)
            else:
                linear(f"{layer}.mlp.linear1", inner, h, "column", spec.te_linear)
                linear(f"{layer}.mlp.linear2", h, f, "row", spec.te_linear)
        if spec.stale_norm:
            for shard in shards:
                shard[f"{layer}.post_attention_layernorm.weight"] = torch.ones(h, dtype=spec.dtype)
                shard[f"{layer}.post_attention_layernorm.bias"] = torch.zeros(h, dtype=spec.dtype)
    norm(f"{spec.layers + 3}.norm")
    if not spec.tied:
        each(f"{spec.layers + 4}.final_linear.weight", spec.padded // t, h, scale=0.1)
    return shards


def rank_state(spec: Spec, module: Any = None, iteration: int = 7) -> dict[str, Any]:
    """A rank file as DeepSpeed writes it."""
    return {
        "module": module,
        "optimizer": None,
        "global_steps": iteration,
        "global_samples": 16 * iteration,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": spec.tp,
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": "0.16.0",
        "iteration": iteration,
        "args": spec.arguments(),
        "sparse_tensor_module_names": set(),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8)},
    }


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


def merge(shards: list[Shard], *, residual: bool, spec: Spec | None = None) -> dict[str, torch.Tensor]:
    """What a run with tp 1 would hold: sums in float32 in rank order, rounded once."""
    spec = spec or Spec()
    width = spec.hidden // spec.heads
    merged = {}
    for name, first in shards[0].items():
        if "_extra_state" in name or (spec.te_mlp and "post_attention_layernorm" in name):
            continue
        pieces = [shard[name] for shard in shards]
        if name.endswith(ROW_BIAS) and residual and not spec.te_linear:
            total = pieces[0].float()
            for piece in pieces[1:]:
                total = total + piece.float()
            merged[name] = total.to(first.dtype)
        elif name.endswith((*REPLICATED, *ROW_BIAS)):
            assert all(torch.equal(piece, first) for piece in pieces)
            merged[name] = first
        elif "attention.query_key_value" in name and spec.gqa:
            # [q_r; k_r; v_r] on each rank
            kv = (spec.kv_heads or 0) * width // len(shards)
            split = [piece.split([first.shape[0] - 2 * kv, kv, kv]) for piece in pieces]
            merged[name] = torch.cat([part for parts in zip(*split, strict=True) for part in parts])
        elif ("mlp.linear1" in name or "mlp.fc1" in name) and spec.gated:
            halves = [piece.chunk(2) for piece in pieces]
            merged[name] = torch.cat([part for parts in zip(*halves, strict=True) for part in parts])
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
