"""Configs given as references: whether anything tells which tensors a config.json calls for."""

from __future__ import annotations

from typing import Any

from ..common.config_text import shown
from ..common.errors import FastshardError
from ..models import config_json

__all__ = ["refuse_untold"]


def refuse_untold(config: dict[str, Any], file: str) -> None:
    """Refuses a config if no layout table tells which tensors it calls for; by one that does, a source with this config is read.

    Args:
        config: content of ``config.json``.
        file: its path, for messages.

    Raises:
        FastshardError: ``FS514`` for a model whose tensors nothing tells.
    """
    if config_json.layout_of(config, file) is not None:
        return
    raise FastshardError.of(
        "FS514",
        f"no table for model_type {shown(config.get('model_type'))}: its config does not say which tensors the model has",
        file=file,
        help="pass a good checkpoint of the model with --like, or describe the model in a table of your own (--layout FILE)",
    )
