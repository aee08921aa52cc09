"""Libraries that come with an extra: imported when they are needed, and named where they are not installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .errors import FastshardError

__all__ = ["imported"]


def imported(*modules: str, told: str, extra: str) -> Any:
    """The first of these modules; all are imported.

    Args:
        modules: names of modules of one library.
        told: what the library does, for people.
        extra: the extra of fastshard that brings it.

    Raises:
        FastshardError: ``FS514`` if it is not installed.
    """
    try:
        first, *_ = [import_module(name) for name in modules]
    except ImportError as error:
        raise FastshardError.of(
            "FS514", f"{told}: {error}", help=f"install it: pip install 'fastshard[{extra}]'"
        ) from None
    return first
