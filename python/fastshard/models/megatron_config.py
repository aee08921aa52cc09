"""Settings that a ``--config`` states for a Megatron-LM checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.config_text import shown
from ..layouts import tables
from . import megatron_heads
from .huggingface import rope_of
from .megatron import OF_CONFIG, SETTINGS, UNTIED
from .megatron_mixtures import YARN
from .megatron_sizes import DELTA_VALUES, MOST_LAYERS, OF_DELTA, OF_INDEXER
from .model import Lack
from .overridden_settings import is_config_json, read_settings

_POSITIONS = "max_position_embeddings"


def read_config_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Lack]]:
    """Read the settings that a config states, as arguments, and those for which there is no argument.

    Args:
        config: arguments of Megatron-LM by name, or a config.json.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    if not is_config_json(config):
        named = {str(key).replace("-", "_"): value for key, value in config.items()}
        return {key: value for key, value in named.items() if key in SETTINGS and value is not None}, []
    of = tables.classes().get(str(config.get("model_type")))
    settings = read_settings(config)
    if of is not None and "partial_rotary_factor" in of.defaults:
        settings.setdefault("partial_rotary_factor", of.defaults["partial_rotary_factor"])
    kind, window = settings.get("rope_type", "default"), settings.get("sliding_window")
    lacking = []
    if "rope_by_layers" in settings:
        lacking.append(
            Lack("rope_parameters by kinds of layers", "one set", shown(settings["rope_by_layers"]))
        )
    is_latent = config.get("kv_lora_rank") is not None
    if kind not in ("default", "llama3", "yarn"):
        lacking.append(Lack("rope_scaling", "default | llama3 | yarn", kind))
    if isinstance(window, list):
        lacking.append(Lack("sliding window in some layers", "none", ", ".join(window)))
    found = {key: settings[name] for name, key in OF_CONFIG.items() if name in settings}
    if isinstance(base := found.get("rotary_base"), float) and base.is_integer():
        found["rotary_base"] = int(base)
    if "experts" in settings:
        size = settings.get("expert_size", settings.get("intermediate_size"))
        found |= {} if size is None else {"moe_ffn_hidden_size": size}
        found.pop("ffn_hidden_size", None)
    if {"num_key_value_heads", "num_attention_heads"} <= settings.keys():
        found["group_query_attention"] = settings["num_key_value_heads"] != settings["num_attention_heads"]
    if "rope_type" in settings:
        found["use_rope_scaling"] = kind == "llama3"
        found |= {"rope_scaling_factor": settings["rope.factor"]} if "rope.factor" in settings else {}
    if "sliding_window" in settings and not isinstance(window, list):
        found["window_size"] = None if window is None else (window - 1, 0)
        is_set = of is not None and of.window == "set"
        found |= _read_windowed_layers(settings) if is_set else {megatron_heads.SKIPPED: None}
    if of is not None and of.activation == megatron_heads.CLAMPED_SWIGLU:
        found |= {"swiglu": False, **megatron_heads.CLAMPED}
    if of is not None and of.sinks:
        found[megatron_heads.SOFTMAX] = megatron_heads.LEARNABLE
    if of is not None:
        lacking += [
            Lack(key, shown(value), shown(config[key]))
            for key, value in of.fixed.items()
            if config.get(key) not in (None, value)
        ]
    if isinstance(tied := config.get("tie_word_embeddings"), bool):
        found[UNTIED] = not tied
    if is_latent:
        of_latent, unlike = _read_config_of_latent(config, settings)
        # The size of a head is that of its rotated part there.
        of_heads = ("kv_channels", "use_rope_scaling", "rope_scaling_factor")
        found = {key: value for key, value in found.items() if key not in of_heads}
        found |= of_latent
        lacking += unlike
    else:
        rope, _ = rope_of(config if of is None or "rope_type" in settings else {**of.defaults, **config})
        if rope.kind == "yarn":
            lacking += (unlike := megatron_heads.list_lacks_of_yarn(rope))
            if not unlike:
                positions = settings.get(
                    "max_position_embeddings", (of.defaults if of else {}).get(_POSITIONS)
                )
                found |= megatron_heads.write_yarn(rope, positions)
        elif "rope_type" in settings or "rope_theta" in settings:
            found["position_embedding_type"] = "rope"
        found |= _read_config_of_delta(config, settings)
        found |= _read_config_of_experts(config, settings) if "experts" in settings else {}
    if (act := settings.get("hidden_act")) is not None and str(act) not in ("silu", "swish"):
        lacking.append(Lack("hidden_act", "silu", shown(act)))
    return found, lacking


def _read_windowed_layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read which layers have a window, as the argument's value: every second layer unless a list states
    otherwise.
    """
    layers, kinds = _count_layers(settings), settings.get("layer_types")
    if isinstance(kinds, list):
        return {megatron_heads.SKIPPED: [int(kind == "sliding_attention") for kind in kinds]}
    if layers is None:
        return {}
    return {megatron_heads.SKIPPED: [int(layer % 2 == 0) for layer in range(layers)]}


def _count_layers(settings: Mapping[str, Any]) -> int | None:
    """Return the number of layers that a config states; None for a number too large for a list of layers."""
    layers = settings.get("num_hidden_layers")
    return layers if isinstance(layers, int) and layers <= MOST_LAYERS else None


def _read_config_of_delta(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings of gated delta nets that a config.json states, as arguments.

    Args:
        config: the content of the file.
        settings: the settings that :func:`.read_settings` found in it.
    """
    found = {key: config[key] for key in (*OF_DELTA.values(), DELTA_VALUES) if config.get(key) is not None}
    layers, types = _count_layers(settings), config.get("layer_types")
    every = config.get("full_attention_interval")
    if isinstance(types, list) and ("linear_attention" in types or found):
        found["linear_attention_freq"] = [int(one == "linear_attention") for one in types]
    elif isinstance(layers, int) and isinstance(every, int) and every > 0:
        found["linear_attention_freq"] = [int((layer + 1) % every != 0) for layer in range(layers)]
    return found


def _read_config_of_experts(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the expert settings that a config.json states, as arguments.

    Args:
        config: the content of the file.
        settings: the settings that :func:`.read_settings` found in it.
    """
    found: dict[str, Any] = {}
    if (shared := config.get("shared_expert_intermediate_size")) is not None:
        found["moe_shared_expert_intermediate_size"] = shared
    if isinstance(normalised := config.get("norm_topk_prob"), bool):
        found["moe_router_pre_softmax"] = not normalised
    layers = _count_layers(settings)
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if isinstance(layers, int) and isinstance(dense, list) and isinstance(step, int) and step > 0:
        pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
        found |= {} if all(pattern) else {"moe_layer_freq": pattern}
    return found


#: Arguments for DeepSeek settings, by their config.json keys.
_OF_DEEPSEEK = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
#: Values of config.json keys that Megatron-LM supports for such a model.
_FIXED_OF_DEEPSEEK: dict[str, Any] = {
    "norm_topk_prob": True,
    "rope_interleave": True,
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def _read_config_of_latent(
    config: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Lack]]:
    """Read the settings of multi-latent attention that a config.json states, as arguments.

    Returns the settings, and those for which there is no argument.

    Args:
        config: the content of the file.
        settings: the settings that :func:`.read_settings` found in it.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    found = {
        to: config[key] for key, to in (_OF_DEEPSEEK | OF_INDEXER).items() if config.get(key) is not None
    }
    lacking = [
        Lack(key, shown(value), shown(config[key]))
        for key, value in _FIXED_OF_DEEPSEEK.items()
        if config.get(key) not in (None, value)
    ]
    layers, dense = _count_layers(settings), config.get("first_k_dense_replace")
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        found["moe_layer_freq"] = [int(kind != "dense") for kind in kinds]
    elif isinstance(layers, int) and isinstance(dense, int) and 0 <= dense <= layers:
        found["moe_layer_freq"] = [0] * dense + [1] * (layers - dense)
    shared, expert = config.get("n_shared_experts"), settings.get("expert_size")
    if isinstance(shared, int) and isinstance(expert, int):
        found["moe_shared_expert_intermediate_size"] = shared * expert or None
    groups, best = config.get("n_group"), config.get("topk_group")
    if groups is not None and best is not None and groups != best:
        found |= {"moe_router_num_groups": groups, "moe_router_group_topk": best}
    if "rope_type" in settings:
        is_scaled = settings["rope_type"] == "yarn"
        found["rope_type"] = "yarn" if is_scaled else "rope"
        for key, (argument, _) in YARN.items():
            if is_scaled and f"rope.{key}" in settings:
                found[argument] = settings[f"rope.{key}"]
        every = settings.get("rope.mscale_all_dim") or 0.0
        found |= {"mscale_all_dim": every, "mscale": settings.get("rope.mscale", 1.0) if every else 1.0}
    return found, lacking
