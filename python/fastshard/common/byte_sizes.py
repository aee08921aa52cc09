"""Parsing of human-readable sizes."""

from __future__ import annotations

import re

from . import codes
from .errors import FastshardError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    # As other programs mean one letter: docker, java, systemd.
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}


def parse_size(text: str | int, name: str = "size") -> int:
    """Return the number of bytes that a size such as ``5GB``, ``256MiB`` or ``4g`` (GiB) states.

    Raises:
        FastshardError: ``FS515`` if the text is not a valid size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = re.fullmatch(r"\s*(\d+)(?:\.(\d+))?\s*([A-Za-z]*)\s*", str(text))
        unit = match and _UNITS.get(match[3].upper())
        if not match or unit is None:
            raise FastshardError.of(
                codes.USAGE, f"{name}: {text!r} is not a size", expected="a size like 5GB or 256MiB"
            )
        part = match[2] or ""
        size = int(match[1] + part) * unit // 10 ** len(part)
    if size < 1 or size >= 1 << 63:
        expected = "more than 0 bytes" if size < 1 else "less than 8 EiB"
        raise FastshardError.of(codes.USAGE, f"{name}", expected=expected, got=repr(text))
    return int(size)
