"""The Hugging Face target: its layout, facts and the ``config.json`` that ``from_pretrained`` needs."""

from __future__ import annotations

from typing import Any

from ..errors import FastshardError, Finding
from . import hf_config, neox_to_hf
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
    if "features" in source.values and source.family in ("gpt_neox", "llama"):
        return neox_to_hf.facts_of(source)
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
        return hf_config.with_dtype(config, dtype), []
    out, findings = neox_to_hf.config_json(source, axes)
    return hf_config.with_dtype(out, dtype), findings
