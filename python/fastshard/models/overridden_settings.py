"""Settings that both a checkpoint and ``--config`` state: ``--config`` wins, and each difference is reported
as a note.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError, Finding
from ..layouts import tables
from .config_fields import count
from .config_json import TEXT_PARTS
from .huggingface import add_defaults, find_windows, rope_of

#: Setting names, each with its names in config.json. The first one is what most classes use.
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "hidden_act": ("hidden_act", "activation_function", "hidden_activation"),
    "parallel": ("use_parallel_residual",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "best_experts": ("num_experts_per_tok",),
    "expert_size": ("moe_intermediate_size",),
}
_BASES = ("rope_theta", "rotary_emb_base")
_SHARES = ("partial_rotary_factor", "rotary_pct")
_TABLES = ("rope_parameters", "rope_scaling")


def is_config_json(config: Mapping[str, Any]) -> bool:
    """Return True for a config of transformers, False for a training config."""
    return "model_type" in config or "architectures" in config


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings that a config.json states, under one name each; defaults are omitted.

    Raises:
        FastshardError: ``FS211`` for an invalid rotary embedding or window.
    """
    found = {}
    for name, keys in _NAMES.items():
        if (key := next((key for key in keys if config.get(key) is not None), None)) is not None:
            found[name] = config[key]
    rope, several = rope_of(config)
    flat = {**config, **{k: v for table in _TABLES for k, v in (config.get(table) or {}).items()}}
    if several:
        found["rope_by_layers"] = {table: config[table] for table in _TABLES if config.get(table)}
    else:
        if any(flat.get(key) is not None for key in _BASES):
            found["rope_theta"] = rope.base
        if any(flat.get(key) is not None for key in _SHARES):
            found["partial_rotary_factor"] = rope.share
        if any(table in config for table in _TABLES):
            found["rope_type"] = rope.kind
            scaling = rope.scaling if rope.kind != "default" else {}
            found |= {
                f"rope.{key}": value for key, value in scaling.items() if isinstance(value, (int, float))
            }
            found.pop("rope.rope_theta", None)
            found.pop("rope.partial_rotary_factor", None)
    of = tables.classes().get(str(config.get("model_type")))
    if of is not None and any(key in config for key in ("sliding_window", "layer_types")):
        window, some = find_windows(add_defaults(config, of), of)
        found["sliding_window"] = [lack.got for lack in some] or window
        if of.window == "set" and config.get("layer_types") is not None:
            found["layer_types"] = config["layer_types"]
    elif of is None and config.get("sliding_window") is not None:
        found["sliding_window"] = config["sliding_window"]
    return found


def find_overridden_settings(
    own: Mapping[str, Any],
    override: Mapping[str, Any],
    keys: Collection[str],
    file: str | None,
    label: str = "",
) -> list[Finding]:
    """Note each setting for which ``--config`` and the checkpoint state different values.

    Args:
        own: values that the checkpoint states.
        override: values that ``--config`` states, under the same keys.
        keys: keys that are settings of the model.
        file: the file of the checkpoint that states them.
        label: prefix of the keys in messages.
    """
    return [
        Finding.of(
            codes.CONFIG_DISAGREES,
            f"{label}{key}: --config and the checkpoint state different values; the value of --config is "
            "used",
            severity="note",
            file=file,
            expected=f"{_short(value)}, as --config states",
            got=f"{_short(own[key])}, as the checkpoint states",
            help="leave out --config to use the checkpoint's value",
        )
        for key, value in override.items()
        if key in keys and own.get(key) is not None and not is_equal(own[key], value)
    ]


def find_missing_rows(config: Mapping[str, Any], rows: Any, file: str | None) -> list[Finding]:
    """Report that ``--config`` states more tokens than the checkpoint has rows for.

    Fewer tokens are not a contradiction: frameworks pad the vocabulary, a base model's config.json does not
    count added tokens, and ``--vocab-size`` drops rows.

    Args:
        config: content of the config.json of ``--config``.
        rows: rows of the vocabulary, as the checkpoint states them; None if it does not.
        file: the file that states them.

    Raises:
        FastshardError: ``FS211`` if the config states no number.
    """
    tokens = count(config, "vocab_size")
    if tokens is None or not isinstance(rows, int) or tokens <= rows:
        return []
    return [
        Finding.of(
            codes.CONFIG_DISAGREES,
            "vocab_size: --config states more tokens than the checkpoint has rows",
            file=file,
            expected=f"at least {tokens} rows",
            got=str(rows),
            help="pass the config of this checkpoint",
            run=["--config FILE"],
        )
    ]


def find_overridden_config(own: Mapping[str, Any], override: Mapping[str, Any], file: str) -> list[Finding]:
    """Note each setting in which two config.json files differ, at every nesting level.

    Args:
        own: content of the checkpoint's config.json.
        override: content of the config.json of ``--config``.
        file: the checkpoint's file, for messages.
    """
    findings = []
    theirs = dict(_parts(override))
    for prefix, part in _parts(own):
        try:
            settings = read_settings(part)
        except FastshardError:
            # What is wrong with it may be why there is another one.
            continue
        other = read_settings(theirs.get(prefix, {}))
        findings += find_overridden_settings(settings, other, other.keys(), file, prefix)
    return findings


def is_equal(one: Any, other: Any) -> bool:
    """Return True for equal values: a pair may be a list or a tuple, but False does not equal zero."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _short(value: Any) -> str:
    """Format a value, such as a pair of numbers, for a message."""
    return str(list(value)) if isinstance(value, (list, tuple)) and len(value) <= 4 else shown(value)


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", config
    for key in TEXT_PARTS:
        if isinstance(part := config.get(key), Mapping):
            yield f"{key}.", part
