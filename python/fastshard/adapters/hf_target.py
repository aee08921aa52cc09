"""The Hugging Face target: its layout, facts and the ``config.json`` that ``from_pretrained`` needs."""

from __future__ import annotations

from typing import Any

from ..errors import FastshardError, Finding
from . import hf_config
from .base import Source

#: Files that go along with a model if they are there.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

#: GPT-NeoX activation -> transformers. source: gpt-neox tools/ckpts/convert_neox_to_hf.py
_ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "mish": "mish",
    "geglu": "gelu",
}


def facts_of(source: Source) -> tuple[str, dict[str, bool]]:
    """Layout table and facts of the target for a source's family.

    Raises:
        FastshardError: ``FS514`` for a family without a Hugging Face layout, ``FS209`` if a fact
            that decides values is unknown.
    """
    config = source.config or {}
    if source.hf_names:
        layout = hf_config.layout_of(config)
        if layout is None:
            raise FastshardError.of(
                "FS514" if config else "FS209",
                f"no layout for model_type {config.get('model_type')!r}"
                if config
                else "the model's config is not known",
                help="give the config.json with --config; `fastshard merge` needs none",
            )
        return layout, hf_config.axes_and_facts(config)[1]
    if source.family == "gpt_neox":
        for key, wanted in (("pos_emb", "rotary"), ("norm", "layernorm")):
            value = config.get(key, wanted)
            if key == "norm" and value == "te_layernorm":
                value = wanted
            if value != wanted:
                raise FastshardError.of(
                    "FS514",
                    f"transformers has no GPT-NeoX model with this {key}",
                    expected=wanted,
                    got=str(value),
                )
        facts = {"attention_bias": bool(config.get("use_bias_in_attn_linear", True))}
        facts["tied"] = source.facts.get("tied", False)
        return "hf.gpt_neox", facts
    raise FastshardError.of("FS514", f"no Hugging Face layout for the family {source.family!r} yet")


def config_json(
    source: Source, axes: dict[str, int], dtype: str | None
) -> tuple[dict[str, Any], list[Finding]]:
    """The config.json of the result, and what had to be assumed.

    Args:
        source: the declaration of the source.
        axes: extents that the plan bound, e.g. ``F``; sizes come from tensors.
        dtype: torch name of the weights' dtype.
    """
    if source.hf_names:
        config = dict(source.config or {})
        if "V" in axes:
            config["vocab_size"] = axes["V"]
        return _with_dtype(config, dtype), []
    config = source.config or {}
    residual = source.facts.get("gpt_j_residual")
    if residual is None:
        raise FastshardError.of(
            "FS209",
            "the model depends on `gpt_j_residual`, which nothing here states",
            help="give the training config with --config (it must say gpt_j_residual: true or false)",
        )
    findings = []

    def known(key: str, default: Any) -> Any:
        if key not in config:
            findings.append(
                Finding.of(
                    "FS109",
                    f"config: {key} is stated nowhere; GPT-NeoX's default {default!r} is written",
                    severity="note",
                    file="config.json",
                )
            )
        return config.get(key, default)

    activation = str(known("activation", "gelu"))
    out = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": axes["V"],
        "hidden_size": axes["H"],
        "num_hidden_layers": axes["L"],
        "num_attention_heads": axes["h"],
        "intermediate_size": axes["F"],
        "hidden_act": _ACTIVATIONS.get(activation, activation),
        "max_position_embeddings": known("max_position_embeddings", 2048),
        "layer_norm_eps": known("layernorm_epsilon", 1e-5),
        "rotary_pct": known("rotary_pct", 1.0),
        "rotary_emb_base": known("rotary_emb_base", 10000),
        "use_parallel_residual": residual,
        "tie_word_embeddings": source.facts.get("tied", False),
        "attention_bias": bool(config.get("use_bias_in_attn_linear", True)),
        "use_cache": True,
        "bos_token_id": config.get("bos_token_id", 0),
        "eos_token_id": config.get("eos_token_id", 0),
    }
    return _with_dtype(out, dtype), findings


def _with_dtype(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    if dtype:
        # transformers 4 reads torch_dtype, 5 reads dtype and writes only that.
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = dtype
    return config
