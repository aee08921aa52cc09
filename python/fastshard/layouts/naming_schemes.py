"""Other frameworks' names for Hugging Face models, with separate tables for each framework."""

from __future__ import annotations

from .tables import names

#: Prefix of a framework's table names, the framework's name, and the model types that it also computes.
#: source: torchtitan models/{llama3,qwen3,qwen3_5,deepseek_v3,gpt_oss}, OLMo-core nn/hf/convert.py
_FRAMEWORKS = {
    "torchtitan": (
        "torchtitan",
        ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_text", "qwen3_5_moe_text"),
    ),
    "olmo_core": ("OLMo-core", ("llama", "qwen3", "olmo2", "olmo3")),
}


def table_of(spelling: str, layout: str) -> str | None:
    """Return the name of a framework's table for a Hugging Face layout; None if it has none."""
    name = f"{spelling}.{layout.removeprefix('hf.')}"
    return name if layout.startswith("hf.") and name in names() else None


def tables(layout: str) -> dict[str, str]:
    """List the tables with other names for a model, by the framework's name in ``--to dcp:...``."""
    return {spelling: name for spelling in _FRAMEWORKS if (name := table_of(spelling, layout)) is not None}


def framework(spelling: str) -> str:
    """Return the framework's name for messages."""
    return _FRAMEWORKS[spelling][0]


def model_types(spelling: str) -> tuple[str, ...]:
    """Return the model types that a framework supports."""
    return _FRAMEWORKS[spelling][1]
