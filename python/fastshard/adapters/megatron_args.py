"""The arguments that a Megatron-LM checkpoint carries, made of a Hugging Face config.

source: Megatron-LM megatron/training/arguments.py and checkpointing.py (`check_checkpoint_args`)
"""

from __future__ import annotations

from typing import Any

from ..configs import shown
from ..errors import FastshardError
from ..trees import Global
from .base import positive_number, whole_number
from .hf_config import rope_of
from .megatron_config import LLAMA3_SCALING


def _refuse(what: str, expected: str, got: Any) -> FastshardError:
    return FastshardError.of(
        "FS514", f"Megatron-LM has no model with this {what}", expected=expected, got=str(got)
    )


def facts_of(facts: dict[str, bool]) -> dict[str, bool]:
    """Facts of the Megatron layout for those of ``hf.llama``.

    Raises:
        FastshardError: ``FS514`` for biases on some of the projections that Megatron-LM gives to all.
    """
    biases = {key: facts[key] for key in ("attention_bias", "out_bias", "mlp_bias")}
    linear = facts["out_bias"]
    if facts["mlp_bias"] != linear or (linear and not facts["attention_bias"]):
        raise _refuse("set of biases", "on all linear layers, on q, k and v alone, or none", biases)
    return {
        "tied": facts["tied"],
        "qkv_bias": facts["attention_bias"],
        "linear_bias": linear,
        "qk_norm": facts["qk_norm"],
        "gated": True,
        "moe": False,
    }


def from_hf(config: dict[str, Any], axes: dict[str, int], facts: dict[str, bool]) -> dict[str, Any]:
    """Arguments that say what the model is; how it runs is left to the run.

    Args:
        config: ``config.json`` of a Llama, Mistral, Qwen2 or Qwen3.
        axes: extents that the plan bound.
        facts: facts of the Megatron layout.

    Raises:
        FastshardError: ``FS514`` for what Megatron-LM does not compute.
    """
    activation = str(config.get("hidden_act", "silu"))
    if activation not in ("silu", "swish"):
        raise _refuse("activation of a gated MLP", "silu", activation)
    rope = rope_of(config, "Megatron-LM", 1.0)
    kind, scaling = rope.kind, rope.scaling
    if kind not in ("default", "llama3"):
        raise _refuse("scaling of rotary embeddings", "default or llama3", kind)
    positions = whole_number(config, "max_position_embeddings", 2048)
    out: dict[str, Any] = {
        "num_layers": axes["L"],
        "hidden_size": axes["H"],
        "ffn_hidden_size": axes["F"],
        "num_attention_heads": axes["g"] * axes["r"],
        "group_query_attention": axes["r"] > 1,
        "num_query_groups": axes["g"],
        "kv_channels": axes["d"],
        "max_position_embeddings": positions,
        "seq_length": positions,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": positive_number(config, "rms_norm_eps", 1e-6),
        "apply_layernorm_1p": False,
        "add_bias_linear": facts["linear_bias"],
        "add_qkv_bias": facts["qkv_bias"] and not facts["linear_bias"],
        "qk_layernorm": facts["qk_norm"],
        "untie_embeddings_and_output_weights": not facts["tied"],
        "position_embedding_type": "rope",
        "rotary_base": rope.base,
        "rotary_percent": rope.share,
        "rotary_interleaved": False,
        "use_rope_scaling": kind == "llama3",
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", 0.0),
        "tokenizer_type": "HuggingFaceTokenizer",
    }
    if kind == "llama3":
        for key, value in LLAMA3_SCALING.items():
            if scaling.get(key, value) != value:
                raise _refuse(f"scaling of rotary embeddings ({key})", str(value), scaling[key])
        # transformers has no default for it.
        out["rope_scaling_factor"] = positive_number({"factor": None, **scaling}, "factor", 8.0)
    window = _window(config)
    if window is not None:
        # Positions to the left besides the token itself, and to the right.
        out["window_size"] = (window - 1, 0)
    return out


def _window(config: dict[str, Any]) -> int | None:
    """The positions that every layer sees; Mistral alone has such a window, Llama takes no notice of one.

    source: transformers models/{llama,mistral,qwen2,qwen3}/configuration_*.py
    """
    kind = config.get("model_type")
    if kind in ("qwen2", "qwen3"):
        # These have a window in some layers only, and only where they say so.
        types = config.get("layer_types")
        if config.get("use_sliding_window") or (types and "sliding_attention" in types):
            raise _refuse("sliding window in some layers", "none", shown(config.get("sliding_window")))
    if kind != "mistral":
        return None
    window = config.get("sliding_window", 4096)
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, int) or not 0 < window < 1 << 48:
        raise FastshardError.of(
            "FS211", "config: sliding_window", expected="a positive whole number", got=shown(window)
        )
    return window


def plain(args: dict[str, Any]) -> dict[str, Any]:
    """Those arguments of a source that are plain values: objects of its classes are not pickled again."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(is_plain(v) for v in value)
        return value is None or isinstance(value, (bool, int, float, str))

    return {key: value for key, value in args.items() if is_plain(value)}


def of_dtype(dtype: str | None) -> dict[str, Any]:
    """Arguments that name the precision of the weights, by its torch name."""
    if dtype not in ("bfloat16", "float16", "float32"):
        return {}
    return {"params_dtype": Global("torch", dtype), "bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
