"""Index files: JSON that names the files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from .. import regular
from ..discover import File, Listing
from ..errors import FastshardError


def read_json(listing: Listing, file: File, limit: int = regular.MAX_TEXT) -> Any:
    """Content of a JSON file of at most ``limit`` bytes.

    Raises:
        FastshardError: ``FS211`` if it is not JSON.
    """
    try:
        return json.loads(listing.read_text(file, limit))
    except (ValueError, RecursionError) as error:
        raise FastshardError.of("FS211", f"not valid JSON: {error}", file=file.path) from None


def safe_relative(name: object) -> bool:
    """True if a name of an index stays below its folder: relative, no ``..``, no control characters."""
    if not isinstance(name, str) or not name or len(name) > 4096:
        return False
    parts = PurePosixPath(name).parts
    return not (
        name.startswith("/")
        or "\\" in name
        or any(ord(c) < 32 or c == "\x7f" for c in name)
        or ".." in parts
        or (len(name) > 1 and name[1] == ":")
    )
