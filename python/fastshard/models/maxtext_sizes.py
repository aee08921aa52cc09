"""Sizes in MaxText's yml, and the extents of the tables' axes by them.

source: MaxText configs/base.yml and configs/models, configs/types.py, layers/attentions.py, models/{llama2,gpt3}.py
"""

from __future__ import annotations

from typing import Any

from ..common.errors import FastshardError
from . import config_json
from .config_fields import integer, whole_number
from .maxtext import is_maxtext


def _scales(config: dict[str, Any]) -> dict[str, int]:
    """Factors of ``global_parameter_scale``. source: MaxText configs/types.py, get_individual_scales"""
    scale = whole_number(config, "global_parameter_scale", 1)
    if scale & (scale - 1) or scale > 1 << 30:
        raise FastshardError.of(
            "FS211", "config: global_parameter_scale", expected="a power of two", got=str(scale)
        )
    times, rest = divmod(scale.bit_length() - 1, 3)
    heads, width = 1 << times + (rest > 0), 1 << times + (rest > 1)
    return {"emb_dim": width, "num_query_heads": heads, "num_kv_heads": heads, "mlp_dim": heads,
            "num_decoder_layers": 1 << times}  # fmt: skip


def sizes(config: dict[str, Any]) -> dict[str, int]:
    """Sizes that the yml states; those that it leaves to MaxText's defaults are not among them.

    Raises:
        FastshardError: ``FS211`` for one that is no positive whole number.
    """
    out = {}
    for name, times in _scales(config).items():
        if config.get(f"base_{name}") is not None:
            out[name] = whole_number(config, f"base_{name}", 1) * times
        elif config.get(name) is not None:
            # MaxText's own copy of a run's config has the products.
            out[name] = whole_number(config, name, 1)
    out |= {
        key: whole_number(config, key, 1) for key in ("head_dim", "vocab_size") if config.get(key) is not None
    }
    if (integer(config, "trainable_position_size") or -1) > 0:
        out["trainable_position_size"] = whole_number(config, "trainable_position_size", 1)
    return out


def axes_of(config: dict[str, Any], family: str) -> dict[str, int]:
    """Extents of the tables' axes that a yml or a ``config.json`` states.

    Raises:
        FastshardError: ``FS211`` for sizes that are none or do not divide.
    """
    if not is_maxtext(config):
        if family != "llama":
            return {}
        # A model type without a table may have been trained as one that has the same sizes.
        return config_json.described(config, layout=config_json.layout_of(config) or "hf.llama")[0]
    have = sizes(config)
    names = {"H": "emb_dim", "F": "mlp_dim", "L": "num_decoder_layers", "d": "head_dim", "V": "vocab_size",
             "P": "vocab_size", "S": "trainable_position_size"}  # fmt: skip
    axes = {axis: have[name] for axis, name in names.items() if name in have}
    heads, groups = have.get("num_query_heads"), have.get("num_kv_heads")
    if family == "gpt3":
        axes |= {"h": heads} if heads else {}
        return axes
    axes.pop("S", None)
    axes |= {"g": groups} if groups else {}
    if heads and groups:
        if heads % groups:
            raise FastshardError.of(
                "FS211",
                "config: base_num_query_heads over base_num_kv_heads",
                expected=f"a multiple of {groups}",
                got=str(heads),
            )
        axes["r"] = heads // groups
    return axes
