"""Hugging Face ``config.json``: what it says about axes and facts, and how one is written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .. import _core, layouts
from ..configs import shown
from ..errors import FastshardError, from_core
from .fields import count

#: model_type -> layout table. source: transformers models/*/modeling_*.py
LAYOUTS = {"gpt_neox": "hf.gpt_neox", "llama": "hf.llama", "mistral": "hf.llama", "qwen2": "hf.llama",
           "qwen3": "hf.llama", "mixtral": "hf.mixtral", "qwen2_moe": "hf.qwen_moe",
           "qwen3_moe": "hf.qwen_moe"}  # fmt: skip


#: How the names of the model itself begin, without its head. source: base_model_prefix in transformers
BASES = {"hf.gpt_neox": "gpt_neox.", "hf.llama": "model.", "hf.mixtral": "model.", "hf.qwen_moe": "model."}
#: The output layer in the models known.
HEADS = ("lm_head.weight", "embed_out.weight")
#: What takes its place. source: transformers modeling_layers.py (GenericFor...), models/gpt_neox/modeling_gpt_neox.py
_OTHER_HEADS = {
    "ForSequenceClassification": "score.weight", "ForTokenClassification": "score.weight",
    "GPTNeoXForTokenClassification": "classifier.weight", "ForQuestionAnswering": "qa_outputs.weight",
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """The class of transformers that a config names."""

    name: str
    #: True for one with an output layer over the vocabulary.
    is_causal: bool
    #: The tensor that it has in the place of one, if its name tells.
    head: str | None = None


def architecture_of(config: dict[str, Any]) -> Architecture | None:
    """The first of a config's ``architectures``; None if it states none."""
    stated = config.get("architectures")
    name = stated[0] if isinstance(stated, list) and stated else None
    if not isinstance(name, str):
        return None
    # Code of its own may call things otherwise.
    ends = [end for end in _OTHER_HEADS if name.endswith(end)] if "auto_map" not in config else []
    head = _OTHER_HEADS[max(ends, key=len)] if ends else None
    return Architecture(name, "ForCausalLM" in name or "LMHeadModel" in name, head)


def layout_of(config: dict[str, Any]) -> str | None:
    """Name of the layout table for a config; None for a model type without one."""
    model_type = str(config.get("model_type"))
    stated, known = layouts.of_model_type(model_type), LAYOUTS.get(model_type)
    # Layers with experts and layers without: a position on L has tensors of two kinds.
    mixed = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    if stated is not None and layouts.is_registered(stated):
        return stated
    return stated if known is None or (known == "hf.qwen_moe" and mixed) else known


def is_of_transformers(layout: str | None) -> bool:
    """True for a table that comes with fastshard and is for a model type of transformers."""
    if layout is None or layouts.is_registered(layout) or layout not in layouts.names():
        return False
    return layout in BASES or bool(layouts.table(layout).model_types)


#: Extents of axes, facts, and sets by name: the axis and the positions.
Described = tuple[dict[str, int], dict[str, bool], dict[str, tuple[str, list[int]]]]


def described(
    config: dict[str, Any], file: str | None = None, names: Iterable[str] = (), layout: str | None = None
) -> Described:
    """What a config says of a layout's axes (as stored by one unsharded file), facts and sets.

    Args:
        config: content of ``config.json``.
        file: its path, for messages.
        names: of the tensors stored, for what no config says: whether experts are stacked, and whether
            a tied head is stored too.
        layout: the table, if it is not that of the model type.

    Raises:
        FastshardError: ``FS211`` for a value that does not fit.
    """
    layout = layout or layout_of(config)
    if layout is None or not layouts.table(layout).has_config:
        return (*_axes_and_facts(config, file, names), {})
    try:
        return layouts.table(layout).describe(json.dumps(_finite(config)), list(names), file)
    except _core.CoreError as error:
        raise from_core(error) from None


def blocks(config: dict[str, Any], layout: str, file: str | None = None) -> dict[str, list[int]]:
    """Extents of a block of elements that share a scale, by storage form of a layout.

    Raises:
        FastshardError: ``FS211`` for a value that does not fit.
    """
    try:
        return layouts.table(layout).blocks(json.dumps(_finite(config)), file)
    except _core.CoreError as error:
        raise from_core(error) from None


def _finite(value: Any) -> Any:
    """The same without numbers that JSON has none of: transformers writes some limits as Infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def axes_and_facts(config: dict[str, Any]) -> tuple[dict[str, int], dict[str, bool]]:
    """Axes and facts of :func:`described`, whatever is stored."""
    return described(config)[:2]


def _axes_and_facts(
    config: dict[str, Any], file: str | None, names: Iterable[str]
) -> tuple[dict[str, int], dict[str, bool]]:
    """The same for tables that say nothing of configs.

    Raises:
        FastshardError: ``FS211`` if a size is not a positive number or heads do not divide.
    """
    hidden = count(config, "hidden_size", file=file)
    heads = count(config, "num_attention_heads", file=file)
    vocab = count(config, "vocab_size", file=file)
    axes = {
        "H": hidden,
        "L": count(config, "num_hidden_layers", file=file),
        "F": count(config, "intermediate_size", file=file),
    }
    axes |= {"V": vocab, "P": vocab}
    head_dim = count(config, "head_dim", file=file)
    if head_dim is None and hidden and heads:
        if hidden % heads:
            raise FastshardError.of(
                "FS211",
                "config: hidden_size over num_attention_heads",
                file=file,
                expected=f"a multiple of {heads}",
                got=str(hidden),
            )
        head_dim = hidden // heads
    axes["d"] = head_dim
    # transformers: tie_word_embeddings defaults to False for these three model types.
    facts = {"tied": bool(config.get("tie_word_embeddings", False))}
    facts["head"] = not facts["tied"] or any(name.endswith(HEADS) for name in names)
    if config.get("model_type") == "gpt_neox":
        axes["g"] = heads
        # transformers: configuration_gpt_neox.py, attention_bias = True
        facts["attention_bias"] = bool(config.get("attention_bias", True))
    else:
        groups = count(config, "num_key_value_heads", file=file) or heads
        if heads and groups and heads % groups:
            raise FastshardError.of(
                "FS211",
                "config: num_attention_heads over num_key_value_heads",
                file=file,
                expected=f"a multiple of {groups}",
                got=str(heads),
            )
        axes["g"] = groups
        axes["r"] = heads // groups if heads and groups else None
        kind = config.get("model_type")
        # Qwen2 has biases on q, k and v, whatever its config says; Qwen3 norms q and k.
        facts["attention_bias"] = kind == "qwen2" or bool(config.get("attention_bias", False))
        facts["out_bias"] = kind != "qwen2" and facts["attention_bias"]
        facts["qk_norm"] = kind == "qwen3"
        facts["mlp_bias"] = bool(config.get("mlp_bias", False))
        if layout_of(config) in ("hf.mixtral", "hf.qwen_moe"):
            _experts(config, file, axes, facts)
            facts["stacked_experts"] = any(name.endswith(".experts.gate_up_proj") for name in names)
    return {k: v for k, v in axes.items() if v is not None}, facts


def _experts(
    config: dict[str, Any], file: str | None, axes: dict[str, int | None], facts: dict[str, bool]
) -> None:
    """What a mixture of experts has besides. source: transformers models/{mixtral,qwen2_moe,qwen3_moe}"""
    kind = config.get("model_type")
    axes["E"] = count(config, "num_local_experts", file=file) or count(config, "num_experts", file=file)
    if kind == "mixtral":
        return
    axes["F"] = count(config, "moe_intermediate_size", file=file)
    facts["shared_expert"] = kind == "qwen2_moe"
    if kind == "qwen2_moe":
        axes["S"] = count(config, "shared_expert_intermediate_size", file=file)
        # Biases on q, k and v, and its config can do without them.
        facts |= {"attention_bias": bool(config.get("qkv_bias", True)), "out_bias": False}
    facts["qk_norm"] = kind == "qwen3_moe"


def weight_block(config: dict[str, Any] | None) -> list[int]:
    """Extents of the blocks that share a scale, as ``quantization_config`` states them; empty if it does not.

    source: transformers quantizers, ``weight_block_size`` of FineGrainedFP8Config
    """
    stated = (config or {}).get("quantization_config")
    block = stated.get("weight_block_size") if isinstance(stated, dict) else None
    sizes = isinstance(block, list) and all(isinstance(n, int) and 0 < n < 1 << 32 for n in block)
    return list(block) if isinstance(block, list) and sizes else []


def unquantised(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the same model with plain weights."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def quantised_by(config: dict[str, Any]) -> str | None:
    """The method by which a model's weights are quantised, as its config states it; None for plain weights."""
    stated = config.get("quantization_config")
    return shown(stated.get("quant_method")) if isinstance(stated, dict) else None


def dtype_of(config: dict[str, Any]) -> Any:
    """The dtype that a config states for the weights; None for none."""
    return config.get("dtype", config.get("torch_dtype"))


def with_rows(config: dict[str, Any], rows: int | None) -> dict[str, Any]:
    """The config with the rows of the vocabulary that are written, where it states any."""
    if rows is None or not isinstance(config.get("vocab_size"), int) or config["vocab_size"] == rows:
        return config
    return {**config, "vocab_size": rows}


def with_dtype(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """The config with the weights' dtype, by its torch name."""
    if not dtype:
        return config
    # transformers 4 reads torch_dtype, 5 reads dtype and writes only that.
    key = "dtype" if "dtype" in config else "torch_dtype"
    # A config of several models (text_config, vision_config) says it for each.
    parts = {
        name: {**part, own: dtype}
        for name, part in config.items()
        if isinstance(part, dict) and name.endswith("_config")
        for own in ("dtype", "torch_dtype")
        if own in part
    }
    return {**config, **parts, key: dtype}


def layout_by_names(names: Iterable[str]) -> str | None:
    """The layout table that a model's names tell of, where no config does."""
    have = set(names)
    if "model.embed_tokens.weight" in have and "model.layers.0.mlp.gate_proj.weight" in have:
        return "hf.llama"
    return "hf.gpt_neox" if "gpt_neox.embed_in.weight" in have else None


def facts_by_names(names: Iterable[str]) -> dict[str, bool]:
    """Facts that the presence of tensors decides."""
    have = list(names)
    return {
        "tied": not any(name in HEADS for name in have),
        "head": any(name in HEADS for name in have),
        "attention_bias": any(name.endswith(("q_proj.bias", "query_key_value.bias")) for name in have),
        "out_bias": any(name.endswith("o_proj.bias") for name in have),
        "qk_norm": any(name.endswith("q_norm.weight") for name in have),
        "mlp_bias": any(name.endswith("gate_proj.bias") for name in have),
    }
