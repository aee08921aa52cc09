"""The logits of a model from its shards, against accelerate's disk offload of a converted copy (P21).

    python benches/all_bars.py --only P21

Both sides compute the same 512 tokens in bfloat16, a layer at a time; the logits are compared by hash. The
peer's converted copy is written before, and costs it nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import fastshard
import torch
from compare import peer
from measure import Place, Result, Side, Target, compare, expect_same, find_lack, remove

#: Sizes of a Llama of 7B; the number of layers follows from the bytes.
HIDDEN, INTERMEDIATE, VOCABULARY, HEADS = 4096, 11008, 32000, 32
LENGTH = 512


def list_shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List the tensors of a Llama, by their names and shapes."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        before = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{before}.self_attn.{name}.weight", (HIDDEN, HIDDEN)
        yield f"{before}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{before}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{before}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"{before}.input_layernorm.weight", (HIDDEN,)
        yield f"{before}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write_model(folder: Path, size: int) -> int:
    """Write a Llama of about so many bytes in bfloat16, with random weights; return its bytes."""
    table = 2 * 2 * VOCABULARY * HIDDEN
    layers = max(1, (size - table) // (2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    nbytes = 0
    with fastshard.Writer(folder, config=config, fsync=False, max_shard_size="2GB") as writer:
        for name, shape in list_shapes(layers):
            tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
            writer[name] = torch.ones_like(tensor) if len(shape) == 1 else tensor
            nbytes += tensor.nbytes
    return nbytes


def read_digest(out: Path) -> dict[str, str]:
    """Read the hash of the logits that a side left."""
    return {"logits": hashlib.sha256((out / "logits").read_bytes()).hexdigest()}


def measure_p21(place: Place) -> Iterator[Result]:
    """Logits from two tensor-parallel ranks of Megatron-LM, and from their converted copy."""
    result = Result(
        "loss from the shards",
        "fastshard",
        "accelerate",
        (Target("wall_ratio", 1.0, least_bytes=2 << 30), Target("memory_ratio", 1.1, least_bytes=2 << 30)),
        0,
    )
    if reason := find_lack("accelerate") or find_lack("transformers"):
        result.reason = reason
        yield result
        return
    converted, shards, out = place.memory / "hf", place.memory / "ranks", place.memory / "logits"
    result.nbytes = write_model(converted, place.size)
    fastshard.convert(converted, shards, to="megatron:legacy", tp=2, fsync=False)
    tokens = place.memory / "tokens.json"
    tokens.write_text(json.dumps([(7 * n) % VOCABULARY for n in range(LENGTH)]))
    arguments = {"source": str(shards), "tokens": str(tokens), "out": str(out)}
    ours = Side("fastshard", "layerwise", arguments)
    theirs = peer(
        "accelerate", "disk_offload", converted, out, tokens=str(tokens), folder=str(place.memory / "offload")
    )
    yield compare(
        result, [theirs, ours], place.rounds, source=shards, out=out, check=expect_same(read_digest)
    )
    for path in (converted, shards):
        remove(path)
    tokens.unlink()
