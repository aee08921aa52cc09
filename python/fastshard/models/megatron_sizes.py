"""Sizes and layers that Megatron-LM's arguments state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import config_fields
from .config_fields import refused

#: Tables of models whose layers differ: with heads or multi-latent attention, and with gated delta nets in
#: some layers.
MIXED_TABLE, DELTA_TABLE = "megatron.mixed", "megatron.delta"
MIXED_TABLES = (MIXED_TABLE, DELTA_TABLE)

LABEL = "args."
#: Arguments for the sizes of gated delta nets, by the axes of their table. source: transformer_config.py
OF_DELTA = {
    "k": "linear_num_key_heads",
    "kd": "linear_key_head_dim",
    "ud": "linear_value_head_dim",
    "C": "linear_conv_kernel_dim",
}
DELTA_VALUES = "linear_num_value_heads"
#: The argument for other kinds of attention, and two of its values: for layers with gated delta nets, and for
#: attention to the tokens that an indexer chooses.
VARIANT, DELTA_NET, INDEXED = "experimental_attention_variant", "gated_delta_net", "dsa"
#: Arguments for an indexer's settings, by their config.json keys.
#: source: Megatron-LM transformer_config.py (dsa_indexer_*)
OF_INDEXER = {
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}


def size(args: Mapping[str, Any], key: str) -> int | None:
    """Return a size or degree among the arguments; None if it is not stated.

    Raises:
        FastshardError: ``FS211`` if it is not a positive integer.
    """
    return config_fields.count(args, key, LABEL)


def is_indexed(args: Mapping[str, Any]) -> bool:
    """Return True for multi-latent attention whose indexer chooses the tokens that it sees."""
    return args.get(VARIANT) == INDEXED and bool(args.get("multi_latent_attention"))


def count_further_layers(args: Mapping[str, Any]) -> int:
    """Count the MTP layers.

    Raises:
        FastshardError: ``FS211`` if the argument is not a number of layers.
    """
    return size(args, "mtp_num_layers") or 0 if args.get("mtp_num_layers") else 0


#: Maximum number of layers; larger numbers are not enumerated.
MOST_LAYERS = 1 << 18


def list_layers(args: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """List the layers with experts and the layers without experts of an MoE model.

    None if the arguments do not state a pattern for all layers.
    source: megatron/core/models/gpt/gpt_layer_specs.py (get_gpt_decoder_layer_specs)

    Raises:
        FastshardError: ``FS211`` for an invalid number of layers.
    """
    layers, every = size(args, "num_layers"), args.get("moe_layer_freq")
    every = 1 if every is None else every
    if layers is None or layers > MOST_LAYERS:
        return None
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        pattern = [int(layer % every == 0) for layer in range(layers)]
    elif isinstance(every, list) and len(every) == layers and all(one in (0, 1) for one in every):
        pattern = every
    else:
        return None
    return [n for n, one in enumerate(pattern) if one], [n for n, one in enumerate(pattern) if not one]


def list_delta_layers(args: Mapping[str, Any]) -> list[int]:
    """List the layers with gated delta nets; none if the arguments do not state a pattern for all layers.

    source: megatron/core/models/gpt/experimental_attention_variant_module_specs.py
    (get_linear_attention_pattern)

    Raises:
        FastshardError: ``FS211`` for an invalid number of layers.
    """
    layers, every = size(args, "num_layers"), args.get("linear_attention_freq")
    if args.get("experimental_attention_variant") != DELTA_NET or layers is None or layers > MOST_LAYERS:
        return []
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return [layer for layer in range(layers) if (layer + 1) % every]
    if isinstance(every, list) and len(every) == layers and all(one in (0, 1) for one in every):
        return [layer for layer, one in enumerate(every) if one]
    return []


def axes_of_mixed(args: Mapping[str, Any]) -> dict[str, int]:
    """Return the extents of the axes in the table for layers that differ, where the arguments state them.

    Raises:
        FastshardError: ``FS211`` for a value that is not a size.
    """
    axes = axes_of(args, False)
    latent = read_flag(args, "multi_latent_attention")
    if "L" in axes:
        axes["L"] += count_further_layers(args)
    further = {
        "J": axes.get("H"),
        "E": size(args, "num_experts"),
        "M": size(args, "moe_ffn_hidden_size") or axes.get("F"),
        "S": size(args, "moe_shared_expert_intermediate_size"),
    }
    if latent:
        axes = {axis: extent for axis, extent in axes.items() if axis not in ("g", "r", "d")}
        further |= {
            "a": size(args, "num_attention_heads"),
            "Q": size(args, "q_lora_rank"),
            "K": size(args, "kv_lora_rank"),
            "nope": size(args, "qk_head_dim"),
            "rope": size(args, "qk_pos_emb_head_dim"),
            "vd": size(args, "v_head_dim"),
        }
    if is_indexed(args):
        further |= _axes_of_indexer(args)
    further |= {axis: size(args, argument) for axis, argument in OF_DELTA.items()}
    keys, values = further["k"], size(args, DELTA_VALUES)
    further["u"] = _divide(values, keys, DELTA_VALUES)
    return axes | {axis: extent for axis, extent in further.items() if extent is not None}


def _axes_of_indexer(args: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the extents of an indexer: heads, rotated pairs per head, and the unrotated part of a head."""
    whole, rotated = size(args, OF_INDEXER["index_head_dim"]), size(args, "qk_pos_emb_head_dim")
    heads = size(args, OF_INDEXER["index_n_heads"])
    if whole is None or rotated is None:
        return {"ih": heads}
    if whole <= rotated or rotated % 2:
        expected = f"more than {rotated}, the size of the rotated part"
        raise refused(f"{LABEL}{OF_INDEXER['index_head_dim']}", expected, whole)
    return {"ih": heads, "ic": rotated // 2, "ix": whole - rotated}


def _divide(heads: int | None, groups: int | None, key: str) -> int | None:
    """Return the number of heads in each group; None if either number is not stated.

    Raises:
        FastshardError: ``FS211`` if the groups have different sizes.
    """
    if heads is None or groups is None:
        return None
    if heads % groups:
        raise refused(f"{LABEL}{key}", f"a multiple of {groups}", heads)
    return heads // groups


def axes_of(args: Mapping[str, Any], moe: bool) -> dict[str, int]:
    """Return the extents of table axes that the arguments state, to be compared with the tensors.

    Raises:
        FastshardError: ``FS211`` for a value that is not a size.
    """
    heads, groups = size(args, "num_attention_heads"), size(args, "num_query_groups")
    groups = groups if args.get("group_query_attention") and groups else heads
    axes = {
        "L": size(args, "num_layers"),
        "H": size(args, "hidden_size"),
        "g": groups,
        "r": _divide(heads, groups, "num_attention_heads"),
        "d": size(args, "kv_channels"),
        "P": size(args, "padded_vocab_size"),
        "F": size(args, "ffn_hidden_size"),
    }
    if moe:
        axes["E"] = size(args, "num_experts")
        axes["F"] = size(args, "moe_ffn_hidden_size") or axes["F"]
    if axes["d"] is None and axes["H"] and heads and axes["H"] % heads == 0:
        axes["d"] = axes["H"] // heads
    return {axis: extent for axis, extent in axes.items() if extent is not None}


def read_real(args: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive number from the arguments, or the default if it is not stated.

    Raises:
        FastshardError: ``FS211`` for another value.
    """
    value = args.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 63:
        raise refused(f"{LABEL}{key}", "a positive number", value)
    return value


def read_flag(args: Mapping[str, Any], key: str) -> bool:
    """Return a boolean from the arguments; False if it is not stated.

    Raises:
        FastshardError: ``FS211`` for another value.
    """
    value = args.get(key)
    if value not in (None, True, False):
        raise refused(f"{LABEL}{key}", "True or False", value)
    return bool(value)
