"""Checked options of `open` about the source: the config is read, and a reference may provide it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import codes, safe_files
from ..common.config_text import checked, parse_json, parse_yaml
from ..common.errors import FastshardError
from ..common.options import OpenOptions, StrPath
from ..sources.base import Options, checked_accept

if TYPE_CHECKING:
    from ..expected.reference import Reference

__all__ = ["of"]


def of(given: OpenOptions, reference: Reference | None) -> Options:
    """Combine what the caller states about the source with what a reference states instead.

    Raises:
        FastshardError: ``FS211`` or ``FS515`` for invalid options.
    """
    config, path = _read_config(given.get("config"))
    if reference is not None and reference.roster is None:
        if config is not None:
            raise FastshardError.of(
                codes.USAGE, "both --config (or --expect) and --like pass a config", help="pass it once"
            )
        config, path = reference.config, str(reference.config_file)
    step, prefix, layout = given.get("step"), given.get("prefix"), given.get("layout")
    return Options(
        step=None if step is None else str(step),
        prefix=None if prefix is None else prefix.rstrip("."),
        config=config,
        config_path=path,
        accept=checked_accept(given.get("accept", ())),
        layout=None if layout is None else os.fspath(layout),
        reference_config=reference.own_config if reference is not None else None,
        given=given,
    )


def _read_config(config: StrPath | Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, str | None]:
    if config is None:
        return None, None
    if isinstance(config, Mapping):
        try:
            return dict(checked(config)), None
        except ValueError as error:
            raise FastshardError.of(codes.BAD_VALUE, f"not a config: {error}") from None
    path = Path(config)
    try:
        # JSON is YAML too, but its own reader gives better messages and is faster.
        text = safe_files.read_text(path, safe_files.MAX_CONFIG, code=codes.BAD_VALUE)
        content = (parse_json if path.suffix == ".json" else parse_yaml)(text)
    except ValueError as error:
        raise FastshardError.of(codes.BAD_VALUE, f"not a config: {error}", file=str(path)) from None
    if not isinstance(content, dict) or not content:
        raise FastshardError.of(codes.BAD_VALUE, "not a config: no keys", file=str(path))
    return content, str(path)
