"""Megatron-LM's terms for attention with heads (windows, sinks and YaRN) and for gpt-oss's activation.

source: Megatron-LM megatron/core/transformer/{transformer_config,utils,dot_product_attention,mlp}.py,
megatron/core/models/gpt/gpt_model.py, megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py,
megatron/training/argument_utils.py (_apply_yarn_config_from_args)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..common.config_text import shown
from . import config_fields
from .config_fields import refused
from .megatron_sizes import LABEL, MOST_LAYERS, read_flag, read_real, size
from .model import Lack, Model, Rope

#: YaRN arguments by transformers' keys, with Megatron's defaults.
YARN: dict[str, tuple[str, float]] = {
    "factor": ("rotary_scaling_factor", 1.0),
    "original_max_position_embeddings": ("yarn_original_max_position_embeddings", 4096),
    "beta_fast": ("yarn_beta_fast", 32.0),
    "beta_slow": ("yarn_beta_slow", 1.0),
}
#: Other YaRN arguments.
ROUNDED, MSCALES = "yarn_correction_range_round_to_int", ("mscale", "mscale_all_dim")
#: transformers' name of an MLP whose gate is ``x * sigmoid(1.702 x)``, with x clamped to at most 7, and whose
#: other factor is clamped to -7 to 7, plus 1. source: transformers models/gpt_oss (GptOssExperts)
CLAMPED_SWIGLU = "clamped_swiglu"
#: The same activation as arguments. source: megatron/core/fusions/fused_bias_geglu.py (quick_gelu)
CLAMPED = {"quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
#: The argument for an additional score per head in its softmax, and the value for a trained one.
SOFTMAX, LEARNABLE = "softmax_type", "learnable"
#: The argument that states which layers have a window.
SKIPPED = "window_attn_skip_freq"


def read_windows(args: Mapping[str, Any]) -> tuple[int | None, list[int], list[Lack]]:
    """Return the window in positions, the layers that see all positions, and the unsupported settings.

    The window includes the token itself. The argument states the numbers of positions to the left, without
    the token, and to the right; -1 means all. The result is None if every layer sees all positions.

    Raises:
        FastshardError: ``FS211`` if it is not a pair of integers.
    """
    value = args.get("window_size")
    if value is None:
        return None, [], []
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) or n >= 1 << 48 for n in value)
    ):
        raise refused(f"{LABEL}window_size", "a pair of integers", value)
    left, right = value
    if left < 0 and right <= 0:
        return None, [], []
    lacking = [] if right <= 0 else [Lack("window_size", "none to the right", str(value))]
    full = _list_full_layers(args)
    if full is None:
        expected = "None, a number, or one number for each of num_layers"
        lacking.append(Lack(SKIPPED, expected, str(args[SKIPPED])[:80]))
    return int(left) + 1, full or [], lacking


def _list_full_layers(args: Mapping[str, Any]) -> list[int] | None:
    """List the layers that see all positions although there is a window; None for an invalid pattern.

    source: megatron/core/transformer/utils.py (is_layer_window_attention)
    """
    layers, every = size(args, "num_layers") or 0, args.get(SKIPPED)
    if every is None:
        return []
    if layers > MOST_LAYERS:
        return None
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return [layer for layer in range(layers) if (layer + 1) % every == 0]
    if isinstance(every, list) and len(every) == layers and all(one in (0, 1) for one in every):
        return [layer for layer, one in enumerate(every) if not one]
    return None


def write_windows(model: Model, layers: int) -> dict[str, Any]:
    """Return the arguments for a model's windows; none for a model without windows."""
    if model.window is None:
        return {}
    # Positions to the left besides the token itself, and to the right.
    out: dict[str, Any] = {"window_size": (model.window - 1, 0)}
    windowed = model.windowed_layers
    return out if windowed is None else {**out, SKIPPED: [int(layer in windowed) for layer in range(layers)]}


def read_yarn(args: Mapping[str, Any], rope: Rope) -> tuple[Rope, list[Lack]]:
    """Return the rotary embedding of heads with YaRN, and its features that no other framework supports.

    Unstated arguments take the defaults that :func:`find_unstated_of_yarn` reports.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    scaling: dict[str, Any] = {key: read_real(args, *argument) for key, argument in YARN.items()}
    scaling["original_max_position_embeddings"] = int(scaling["original_max_position_embeddings"])
    if args.get(ROUNDED) is not None and not read_flag(args, ROUNDED):
        scaling["truncate"] = False
    some, every = (_read_mscale(args, key, default) for key, default in zip(MSCALES, (1.0, 0.0), strict=True))
    if some and every:
        scaling |= {"mscale": some, "mscale_all_dim": every}
    elif (some, every) != (1.0, 0.0):
        factor = scaling["factor"]
        scaling["attention_factor"] = _scale(factor, some) / _scale(factor, every)
    lacking = [] if rope.share == 1 else [Lack("rotary_percent", "1.0 with YaRN", f"{rope.share:g}")]
    if args.get(YARN["factor"][0]) is None:
        lacking.append(Lack(YARN["factor"][0], "a number with YaRN", "None"))
    elif scaling["factor"] == 1:
        # Rotations are those without it, and so is the attention's scale.
        return Rope(rope.base), lacking
    return Rope(rope.base, 1.0, "yarn", scaling), lacking


def find_unstated_of_yarn(args: Mapping[str, Any]) -> str | None:
    """Find the first YaRN argument that is not stated and whose default changes the rotations."""
    return next((argument for argument, _ in YARN.values() if args.get(argument) is None), None)


def _read_mscale(args: Mapping[str, Any], key: str, default: float) -> float:
    """Return a factor of the attention's scale, which may be 0."""
    return 0.0 if args.get(key) == 0 and args.get(key) is not False else read_real(args, key, default) or 0.0


def _scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def write_yarn(rope: Rope, max_positions: int | None) -> dict[str, Any]:
    """Return the YaRN arguments for an embedding that :func:`list_lacks_of_yarn` accepts.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    scaling = {
        "original_max_position_embeddings": max_positions,
        **{key: value for key, value in rope.scaling.items() if value is not None},
    }
    out: dict[str, Any] = {"position_embedding_type": "yarn"}
    for key, (argument, default) in YARN.items():
        out[argument] = config_fields.positive_number(scaling, key, default)
    # What is stated as null is false there.
    out[ROUNDED] = bool(rope.scaling.get("truncate", True))
    some, every = 1.0, 0.0
    if (stated := scaling.get("attention_factor")) is not None:
        # transformers takes it before the other two. Of Megatron's two one is enough for any scale.
        some = _find_mscale(out["rotary_scaling_factor"], float(stated))
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        some, every = (config_fields.positive_number(scaling, key, 1.0) for key in MSCALES)
    return {**out, "mscale": some, "mscale_all_dim": every}


def _find_mscale(factor: float, scale: float) -> float:
    """Return the number for which YaRN gives the stated scale of attention."""
    if factor <= 1 or math.isclose(scale, _scale(factor, 1.0), rel_tol=1e-12):
        return 1.0
    return (scale - 1.0) / (0.1 * math.log(factor))


def list_lacks_of_yarn(rope: Rope) -> list[Lack]:
    """List YaRN features of a model with heads that Megatron-LM's YaRN lacks.

    source: transformers modeling_rope_utils.py (_compute_yarn_parameters)
    """
    known = {*YARN, *MSCALES, "rope_type", "type", "rope_theta", "truncate", "attention_factor"}
    known |= {"partial_rotary_factor"}
    scaling = {key: value for key, value in rope.scaling.items() if value is not None}
    lacking = [
        Lack(f"rope_scaling ({key})", "none", shown(scaling[key])) for key in sorted(scaling.keys() - known)
    ]
    if rope.share != 1:
        lacking.append(Lack("share of a head that is rotated", "1 with YaRN", f"{rope.share:g}"))
    if not isinstance(truncated := scaling.get("truncate", True), bool):
        lacking.append(Lack("rope_scaling (truncate)", "true or false", shown(truncated)))
    numbers = {
        key: float(value)
        for key, value in scaling.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    factor, scale = numbers.get("factor"), numbers.get("attention_factor")
    if factor is None:
        lacking.append(Lack("rope_scaling (factor)", "a number", shown(scaling.get("factor"))))
    elif "attention_factor" in scaling:
        expected = "a number of 1 or more" if factor > 1 else "1, because the factor scales nothing"
        if scale is None or scale < 1 or (factor <= 1 and not math.isclose(scale, 1.0)):
            got = shown(scaling["attention_factor"])
            lacking.append(Lack("rope_scaling (attention_factor)", expected, got))
    return lacking


def list_lacks_of_activation(args: Mapping[str, Any]) -> list[Lack]:
    """List differences between an MLP with quick GELU and that of gpt-oss, the only one that other frameworks
    support.
    """
    if not args.get("quick_geglu"):
        return []
    return [
        Lack(key, f"{value} with quick_geglu", str(args.get(key))[:80])
        for key, value in CLAMPED.items()
        if args.get(key) != value
    ]


def is_gated(args: Mapping[str, Any]) -> bool | None:
    """Return True if the MLP has a gate; None if the arguments do not state it."""
    flags = [args.get(key) for key in ("swiglu", "quick_geglu") if isinstance(args.get(key), bool)]
    return any(flags) if isinstance(args.get("swiglu"), bool) else True if any(flags) else None


def list_described(args: Mapping[str, Any]) -> frozenset[str]:
    """Return the arguments of this module that a model's description covers."""
    of_activation = frozenset(CLAMPED) if args.get("quick_geglu") else frozenset[str]()
    return of_activation | ({SOFTMAX} if args.get(SOFTMAX) == LEARNABLE else frozenset())
