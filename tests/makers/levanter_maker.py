"""Writes steps as Levanter lays them out, from the state dict of a model of transformers; needs no jax.

source: Levanter checkpoint.py (save_checkpoint), tensorstore_serialization.py (_create_ocdbt_spec),
    layers/attention.py (Attention.init), models/llama.py; haliax nn/linear.py (Linear.init)

Levanter's own saves of such models were read right when this was written: Llama with layers stacked and
apart, Mistral, Qwen2 and Qwen3, of marin-levanter and marin-haliax 0.2.20.dev202606180959 with jax 0.10.2 on
a CPU; and plain zarr v2 of the serialization of Levanter 1.2 (September 2025).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from orbax_maker import write

ABOUT = {"step": 20, "timestamp": "2026-01-01T00:00:00", "is_temporary": False}
Arrays = dict[str, np.ndarray]


def as_levanter(model: Any, *, stacked: bool = True) -> Arrays:
    """The arrays of a model in the axes of haliax, by their paths: heads apart, outputs first."""
    config = model.config
    groups, hidden = config.num_key_value_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    each = config.num_attention_heads // groups
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj/weight": (groups, each, size, hidden),
        "k_proj/weight": (groups, size, hidden),
        "v_proj/weight": (groups, size, hidden),
        "o_proj/weight": (hidden, groups * each, size),
        "q_proj/bias": (groups, each, size),
        "k_proj/bias": (groups, size),
        "v_proj/bias": (groups, size),
    }
    out: Arrays = {}
    layers: dict[str, list[np.ndarray]] = {}
    for name, tensor in model.state_dict().items():
        values = tensor.detach().to(torch.float32).numpy()
        parts = name.split(".")
        if name == "model.embed_tokens.weight":
            out["embeddings/token_embeddings/weight"] = values
        elif name == "model.norm.weight":
            out["transformer/norm/weight"] = values
        elif name == "lm_head.weight":
            if not config.tie_word_embeddings:
                out["lm_head/weight"] = values
        else:
            inner = "/".join(parts[3:])
            layers.setdefault(inner, []).append(
                values.reshape(shapes.get("/".join(parts[-2:]), values.shape))
            )
    for inner, each_layer in layers.items():
        if stacked:
            out[f"transformer/layers/stacked/{inner}"] = np.stack(each_layer)
        else:
            out |= {f"transformer/layers/blocks/{n}/{inner}": one for n, one in enumerate(each_layer)}
    return out


def as_train_state(model: Arrays) -> Arrays:
    """The model beside what a trainer keeps; the moments are what the model's part must not be taken for."""
    state: Arrays = {f"model/{name}": values for name, values in model.items()}
    for slot, factor in (("mu", 3.0), ("nu", 5.0)):
        state |= {f"opt_state/inner_state/1/{slot}/{name}": values * factor for name, values in model.items()}
    state["opt_state/count"] = state["step"] = np.array(20, np.int32)
    state["training_key"] = np.array([1, 2], np.uint32)
    return state


def save(step: Path, arrays: Arrays, *, ocdbt: bool = True, chunks: int = 1, **about: Any) -> Path:
    """Writes a step: into one OCDBT store as zarr v3, or each array as a folder of zarr v2, as until 2025.

    `chunks` are those of the last axis, as of arrays that lie on several devices.
    """
    step.mkdir(parents=True)
    for name, values in arrays.items():
        shape = list(values.shape)
        if shape and shape[-1] % chunks == 0:
            shape[-1] //= chunks
        write(
            step, name, values, [max(n, 1) for n in shape], zarr=3 if ocdbt else 2, ocdbt=ocdbt, elide=ocdbt
        )
    (step / "metadata.json").write_text(json.dumps(ABOUT | about))
    return step
