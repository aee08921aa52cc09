"""The roster of a model that nothing but a config tells of: which tensors a config.json calls for."""

from __future__ import annotations

from typing import Any

from . import _core
from .configs import shown
from .errors import FastshardError
from .models import config_json

__all__ = ["roster_of_config"]


def roster_of_config(config: dict[str, Any], file: str) -> _core.Roster | None:
    """The tensors that a config calls for; None where a layout table tells them, by which a source with this config is read.

    Args:
        config: content of ``config.json``.
        file: its path, for messages.

    Raises:
        FastshardError: ``FS514`` for a model whose tensors nothing tells.
    """
    if config_json.layout_of(config, file) is not None:
        return None
    raise FastshardError.of(
        "FS514",
        f"no table for model_type {shown(config.get('model_type'))}: its config does not tell which tensors there must be",
        file=file,
        help="give a good checkpoint of the model with --like, or describe the model in a table of your own (--layout FILE)",
    )
