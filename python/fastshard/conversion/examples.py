"""Small checkpoints to try commands on: ``python -m fastshard.examples gpt_neox run --to gpt_neox --tp 2``.

The weights are random but the same in every run. OUT then contains the files of a training run or of a
published model, without a manifest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import FastshardError, Writer, convert
from ..checkpoint.manifests import MANIFEST_NAME
from ..common.options import StrPath
from ..targets.registry import TARGETS

__all__ = ["CONFIGS", "make", "tensors"]

#: The config.json of each model. All sizes are divisible by 4; the vocabulary size is not a multiple of any
#: size to which frameworks pad it.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": 500,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-05,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 500,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
    },
}


def _gpt_neox(c: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = c["hidden_size"], c["intermediate_size"]
    linear = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (wide, hidden),
        "mlp.dense_4h_to_h": (hidden, wide),
    }
    yield "gpt_neox.embed_in.weight", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        outer = f"gpt_neox.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{outer}{name}.weight", (hidden,)
            yield f"{outer}{name}.bias", (hidden,)
        for name, shape in linear.items():
            yield f"{outer}{name}.weight", shape
            yield f"{outer}{name}.bias", shape[:1]
    yield "gpt_neox.final_layer_norm.weight", (hidden,)
    yield "gpt_neox.final_layer_norm.bias", (hidden,)
    yield "embed_out.weight", (c["vocab_size"], hidden)


def _llama(c: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = c["hidden_size"], c["intermediate_size"]
    keys = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        outer = f"model.layers.{layer}."
        yield f"{outer}input_layernorm.weight", (hidden,)
        yield f"{outer}self_attn.q_proj.weight", (hidden, hidden)
        yield f"{outer}self_attn.k_proj.weight", (keys, hidden)
        yield f"{outer}self_attn.v_proj.weight", (keys, hidden)
        yield f"{outer}self_attn.o_proj.weight", (hidden, hidden)
        yield f"{outer}post_attention_layernorm.weight", (hidden,)
        yield f"{outer}mlp.gate_proj.weight", (wide, hidden)
        yield f"{outer}mlp.up_proj.weight", (wide, hidden)
        yield f"{outer}mlp.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)


_SHAPES = {"gpt_neox": _gpt_neox, "llama": _llama}


def tensors(model: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield random float32 tensors of a model by Hugging Face names: norm weights near 1, others near 0."""
    random = np.random.default_rng(0)
    for name, shape in _SHAPES[model](CONFIGS[model]):
        value = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        is_norm = "norm" in name and name.endswith(".weight")
        yield name, value + np.float32(1) if is_norm else value


def make(model: str, out: StrPath, to: str = "hf", **options: Any) -> None:
    """Write a small checkpoint of a model.

    Args:
        model: a key of :data:`CONFIGS`.
        out: a new or an empty directory.
        to: target format, as for :func:`fastshard.convert`.
        options: further options of :func:`fastshard.convert`, e.g. ``tp=2``.

    Raises:
        FastshardError: if the checkpoint cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = out if to == "hf" else Path(folder) / model
        with Writer(plain, config=CONFIGS[model], fsync=False) as writer:
            for name, value in tensors(model):
                writer[name] = value
        if to != "hf":
            convert(plain, out, to=to, fsync=False, **options)
    Path(out, MANIFEST_NAME).unlink()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fastshard.examples",
        description="Writes a small checkpoint with random weights for trying out fastshard.",
        allow_abbrev=False,
    )
    parser.add_argument("model", choices=sorted(CONFIGS))
    parser.add_argument("out", metavar="OUT", help="a new or an empty directory")
    parser.add_argument(
        "--to", choices=list(TARGETS), default="hf", help="format of the checkpoint (default: hf)"
    )
    parser.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline stages")
    a = parser.parse_args()
    options = {name: value for name in ("tp", "pp") if (value := getattr(a, name)) is not None}
    try:
        make(a.model, a.out, a.to, **options)
    except FastshardError as error:
        print(error, file=sys.stderr)
        return 2
    files = [file for file in Path(a.out).rglob("*") if file.is_file()]
    print(f"{a.out}: {len(files)} files, {sum(file.stat().st_size for file in files)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
