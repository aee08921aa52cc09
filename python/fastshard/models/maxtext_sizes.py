"""Sizes in MaxText's yml, and the extents of table axes that they determine.

source: MaxText configs/base.yml and configs/models, configs/types.py, layers/attentions.py,
    models/{llama2,gpt3}.py
"""

from __future__ import annotations

from typing import Any

from ..common import codes
from ..common.errors import FastshardError, Finding
from . import config_json, maxtext_delta, maxtext_gemma, maxtext_latent, maxtext_windows
from .config_fields import integer, whole_number
from .maxtext import (
    count_joined_layers,
    find_joined_layers,
    has_local_rope,
    is_delta,
    is_gemma,
    is_latent,
    is_maxtext,
    is_mixture,
)
from .overridden_settings import find_overridden_settings, is_config_json, read_settings


def _scales(config: dict[str, Any]) -> dict[str, int]:
    """Return the factors of ``global_parameter_scale``.

    source: MaxText configs/types.py, get_individual_scales
    """
    scale = whole_number(config, "global_parameter_scale", 1)
    if scale & (scale - 1) or scale > 1 << 30:
        raise FastshardError.of(
            codes.BAD_VALUE, "config: global_parameter_scale", expected="a power of two", got=str(scale)
        )
    times, rest = divmod(scale.bit_length() - 1, 3)
    heads, width = 1 << times + (rest > 0), 1 << times + (rest > 1)
    return {
        "emb_dim": width,
        "num_query_heads": heads,
        "num_kv_heads": heads,
        "mlp_dim": heads,
        "moe_mlp_dim": heads,
        "num_decoder_layers": 1 << times,
    }


def sizes(config: dict[str, Any]) -> dict[str, int]:
    """Return the sizes that the yml states, excluding those that it leaves to MaxText's defaults.

    Raises:
        FastshardError: ``FS211`` for one that is not a positive integer, ``FS215`` for a product that
            contradicts its base.
    """
    out = {}
    for name, times in _scales(config).items():
        if name == "moe_mlp_dim" and not any(_is_size(config, key) for key in (f"base_{name}", name)):
            # -1: no mixture.
            continue
        if config.get(f"base_{name}") is not None:
            out[name] = whole_number(config, f"base_{name}", 1) * times
            if config.get(name) is not None and whole_number(config, name, 1) != out[name]:
                base = config[f"base_{name}"]
                raise FastshardError.of(
                    codes.CONFIG_DISAGREES,
                    f"base_{name} is {base}, but {name} is {config[name]}: the config states two values of "
                    "one setting",
                    expected=f"{name}: {out[name]}",
                    got=f"{name}: {config[name]}",
                    help=f"correct the config: keep base_{name} or {name}, with the value that the model was "
                    "trained with",
                )
        elif config.get(name) is not None:
            # MaxText's own copy of a run's config has the products.
            out[name] = whole_number(config, name, 1)
    out |= {
        key: whole_number(config, key, 1) for key in ("head_dim", "vocab_size") if config.get(key) is not None
    }
    out |= {"num_experts": whole_number(config, "num_experts", 1)} if config.get("num_experts") else {}
    # A rank of 0: queries come straight from the state.
    others = (
        "trainable_position_size",
        *maxtext_latent.SIZES.values(),
        *maxtext_delta.SIZES.values(),
        maxtext_delta.VALUES,
        "shared_experts",
        "first_num_dense_layers",
    )
    return out | {key: whole_number(config, key, 1) for key in others if _is_size(config, key)}


def _is_size(config: dict[str, Any], key: str) -> bool:
    """Return True for a size; False if it is not stated, or is turned off by MaxText's default of -1."""
    return (integer(config, key) or -1) > 0


def axes_of(config: dict[str, Any], family: str) -> dict[str, int]:
    """Return the extents of the table axes that a yml or a ``config.json`` states.

    Raises:
        FastshardError: ``FS211`` for values that are not sizes, or are not divisible.
    """
    if not is_maxtext(config):
        if family == "gpt3":
            return {}
        # A model type without a table may have been trained as one that has the same sizes.
        axes = config_json.described(config, layout=config_json.layout_of(config) or f"hf.{family}")[0]
        if is_delta(family) and "L" in axes:
            # MaxText has no layers that predict further tokens.
            axes |= {"L": whole_number(config, "num_hidden_layers", 1)}
        return axes
    have = sizes(config)
    names = {
        "H": "emb_dim",
        "F": "mlp_dim",
        "L": "num_decoder_layers",
        "d": "head_dim",
        "V": "vocab_size",
        "P": "vocab_size",
        "S": "trainable_position_size",
    }
    if is_mixture(family):
        # source: MaxText configs/types.py: mlp_dim is the same
        names |= {"E": "num_experts", "F": "moe_mlp_dim" if "moe_mlp_dim" in have else "mlp_dim"}
    axes = {axis: have[name] for axis, name in names.items() if name in have}
    heads, groups = have.get("num_query_heads"), have.get("num_kv_heads")
    if family == "gpt3":
        axes |= {"h": heads} if heads else {}
        return axes
    axes.pop("S", None)
    if is_latent(family):
        return _axes_of_latent(axes, have)
    if is_delta(family):
        axes |= _axes_of_delta(have)
        axes.pop("F", None)
    axes |= {"g": groups} if groups else {}
    if heads and groups:
        if heads % groups:
            raise FastshardError.of(
                codes.BAD_VALUE,
                "config: base_num_query_heads over base_num_kv_heads",
                expected=f"a multiple of {groups}",
                got=str(heads),
            )
        axes["r"] = heads // groups
    if "L" in axes:
        axes["L"] *= find_joined_layers(family)
    if not is_gemma(family):
        return axes
    divisor = maxtext_gemma.read_divisor(config, axes, has_local_rope(family))
    return axes | ({"s": divisor} if divisor else {})


def _axes_of_latent(axes: dict[str, int], have: dict[str, int]) -> dict[str, int]:
    """Return the axes of a model with multi-latent attention, whose dense layers have a separate size.

    source: MaxText layers/attention_mla.py (MLA), layers/moe.py (RoutedAndSharedMoE)
    """
    names = {"F": "mlp_dim", "M": "moe_mlp_dim", "a": "num_query_heads", **maxtext_latent.SIZES}
    kept = {axis: size for axis, size in axes.items() if axis not in ("F", "d")}
    kept |= {axis: have[name] for axis, name in names.items() if name in have}
    shared = have.get("shared_experts")
    return kept | ({"S": shared * kept["M"]} if shared and "M" in kept else {})


def _axes_of_delta(have: dict[str, int]) -> dict[str, int]:
    """Return the axes of experts and gated delta nets. The shared expert has the same size as the others.

    source: MaxText models/qwen3.py (Qwen3NextGatedDeltaNet, Qwen3NextSparseMoeBlock)

    Raises:
        FastshardError: ``FS211`` if the number of value heads is not divisible by the number of key heads.
    """
    axes = {axis: have[key] for axis, key in maxtext_delta.SIZES.items() if key in have}
    if (size := have.get("moe_mlp_dim", have.get("mlp_dim"))) is not None:
        axes |= {"M": size, "S": size}
    values = have.get(maxtext_delta.VALUES)
    if values is not None and "k" in axes:
        if values % axes["k"]:
            raise FastshardError.of(
                codes.BAD_VALUE,
                f"config: {maxtext_delta.VALUES} over {maxtext_delta.SIZES['k']}",
                expected=f"a multiple of {axes['k']}",
                got=str(values),
            )
        axes["u"] = values // axes["k"]
    return axes


#: Keys of a yml for the settings that :func:`.read_settings` returns.
_OF_CONFIG = {
    "hidden_size": "base_emb_dim",
    "num_attention_heads": "base_num_query_heads",
    "num_key_value_heads": "base_num_kv_heads",
    "intermediate_size": "base_mlp_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "head_dim": "head_dim",
    "rope_theta": "rope_max_timescale",
    "eps": "normalization_layer_epsilon",
    "max_position_embeddings": "max_target_length",
    "experts": "num_experts",
    "best_experts": "num_experts_per_tok",
}
#: Keys of a yml that are settings of the model, besides its sizes.
_SETTINGS = (
    "rope_max_timescale",
    "normalization_layer_epsilon",
    "max_target_length",
    "rope_type",
    "rope_use_scale",
    "decoder_block",
    "mlp_activations",
    "logits_via_embedding",
    "normalize_embedding_logits",
    "vocab_size",
    "num_experts_per_tok",
    "norm_topk_prob",
    "use_qk_norm",
    *dict.fromkeys((*maxtext_latent.KEPT, *maxtext_windows.KEPT, *maxtext_delta.KEPT, *maxtext_gemma.KEPT)),
)


def read_config_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Read the settings that a yml or a config.json states, as keys of a yml; sizes are scaled.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    if is_config_json(config):
        settings = read_settings(config)
        found = {key: settings[name] for name, key in _OF_CONFIG.items() if name in settings}
        if "base_num_decoder_layers" in found:
            found["base_num_decoder_layers"] //= count_joined_layers(config)
        if "expert_size" in settings:
            found["base_mlp_dim"] = settings["expert_size"]
        tied = config.get("tie_word_embeddings")
        return found | ({"logits_via_embedding": tied} if isinstance(tied, bool) else {})
    found = {
        f"base_{name}" if f"base_{name}" in _OF_CONFIG.values() else name: n
        for name, n in sizes(config).items()
    }
    return found | {key: config[key] for key in _SETTINGS if config.get(key) is not None}


def find_overridden_yml(own: dict[str, Any], override: dict[str, Any], file: str) -> list[Finding]:
    """Note each setting of ``--config`` that differs from the yml next to a checkpoint.

    Args:
        own: content of the yml.
        override: content of the yml or config.json of ``--config``.
        file: the yml next to the checkpoint.
    """
    try:
        settings = read_config_settings(own)
    except FastshardError:
        # What is wrong with it may be why there is another one.
        return []
    others = read_config_settings(override)
    return find_overridden_settings(settings, others, others.keys(), file)
