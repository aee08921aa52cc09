"""The Hugging Face target: its layout, facts and the ``config.json`` that ``from_pretrained`` needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..configs import shown
from ..errors import FastshardError, Finding
from . import hf_config, maxtext_config, megatron_config, neox_to_hf
from .base import Bound, Completed, Source

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
#: Layouts whose config is MaxText's.
_JAX = ("maxtext.llama", "maxtext.gpt3", "paxml.gpt3")


@dataclass
class HfTarget:
    """A checkpoint that ``from_pretrained`` loads, to be made of a source."""

    source: Source
    layout: str
    facts: dict[str, bool]
    name: str = "hf"

    @classmethod
    def of(cls, source: Source) -> HfTarget:
        """What the source allows.

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
                    f"no layout for model_type {shown(config.get('model_type'))}"
                    + (
                        " with dense layers among the others"
                        if str(config.get("model_type")) in hf_config.LAYOUTS
                        else ""
                    )
                    if config
                    else "the model's config is not known",
                    help="give the config.json with --config; `fastshard merge` needs none",
                )
            return cls(source, layout, hf_config.axes_and_facts(config)[1])
        if "features" in source.values and source.family in ("gpt_neox", "llama"):
            return cls(source, *neox_to_hf.facts_of(source))
        if source.layout in ("megatron.legacy", "megatron.dist"):
            return cls(source, *megatron_config.facts_of(source))
        if source.layout in _JAX:
            return cls(source, *maxtext_config.facts_of(source))
        raise FastshardError.of("FS514", f"no Hugging Face layout for the family {source.family!r} yet")

    def request(self, table: str) -> dict[str, Any]:
        """The target's side of the core's request."""
        return {"name": self.name, "layout": table, "facts": self.facts}

    def config(self, axes: dict[str, int]) -> tuple[dict[str, Any], list[Finding]]:
        """The model's config.json without its dtype, and what had to be assumed; sizes come from tensors."""
        if self.source.hf_names:
            config = dict(self.source.config or {})
            if "V" in axes:
                config["vocab_size"] = axes["V"]
            return config, []
        if self.source.layout in ("megatron.legacy", "megatron.dist"):
            return megatron_config.config_json(self.source, axes)
        if self.source.layout in _JAX:
            return maxtext_config.config_json(self.source, axes)
        return neox_to_hf.config_json(self.source, axes)

    def complete(self, bound: Bound) -> Completed:
        """The config.json of the result, and what had to be assumed."""
        config, assumed = self.config(bound.axes)
        text = json.dumps(hf_config.with_dtype(config, bound.dtype), indent=2) + "\n"
        return [], {"config.json": text}, assumed
