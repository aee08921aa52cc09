"""The only reader of config values: numbers and choices from untrusted files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError

#: Above this, a float does not represent every integer.
_EXACT = 1 << 53


def positive_number(config: Mapping[str, Any], key: str, default: float, label: str = "config: ") -> float:
    """Read a positive number; YAML parses `1e-5` as text.

    Raises:
        FastshardError: ``FS211`` if it is not a positive number.
    """
    value = config.get(key, default)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if not 0 < number < float("inf") or isinstance(value, bool):
        raise refused(f"{label}{key}", "a positive number", value)
    return number


def whole_number(config: Mapping[str, Any], key: str, default: int, label: str = "config: ") -> int:
    """Read a positive integer within the range of today's formats.

    Raises:
        FastshardError: ``FS211`` if it is not a positive integer.
    """
    number = positive_number(config, key, default, label)
    if not number.is_integer() or number >= _EXACT:
        raise refused(f"{label}{key}", "a positive integer", config.get(key))
    return int(number)


def count(
    config: Mapping[str, Any], key: str, label: str = "config: ", file: str | None = None
) -> int | None:
    """Read a size, which must be an integer, not text or a float; None if it is not stated.

    Raises:
        FastshardError: ``FS211`` if it is something else.
    """
    value = config.get(key)
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 48
    ):
        raise refused(f"{label}{key}", "a positive integer", value, file)
    return value


def integer(config: Mapping[str, Any], key: str, label: str = "config: ") -> int | None:
    """Read an integer, which may be negative; None if it is not stated.

    Raises:
        FastshardError: ``FS211`` if it is something else.
    """
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 31):
        raise refused(f"{label}{key}", "an integer", value)
    return value


def flag(config: Mapping[str, Any], key: str, label: str = "config: ") -> bool | None:
    """Read a boolean; None if it is not stated.

    Raises:
        FastshardError: ``FS211`` if it is not a boolean.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise refused(f"{label}{key}", "true or false", value)
    return value


def refused(what: str, expected: str, got: Any, file: str | None = None) -> FastshardError:
    """Build the error for an invalid value."""
    return FastshardError.of(codes.BAD_VALUE, what, file=file, expected=expected, got=shown(got))
