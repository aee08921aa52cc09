"""Earlier lists of expected tensors, in the user's own cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from ..common import json_text

__all__ = ["folder", "keep", "read"]

#: Maximum size of a list in bytes; a list of 100,000 names takes 10 MB.
_MAX = 256 << 20


def folder(create: bool = False) -> Path | None:
    """Return the cache folder; None if it is missing, or if other users can write to it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    if not root.is_absolute():
        return None
    at = root / "fastshard" / "expected"
    with contextlib.suppress(OSError):
        if create:
            at.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            at.mkdir(mode=0o700, exist_ok=True)
        # A link may lead where others write.
        if all(_is_own(place) for place in (at.parent, at)):
            return at
    return None


def _is_own(at: Path) -> bool:
    about = at.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


def read(key: str) -> dict[str, Any] | None:
    """Read the document stored under a key; None if it is missing or damaged."""
    at = folder()
    if at is None:
        return None
    try:
        file = os.open(at / f"{key}.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as opened:
            about = os.fstat(opened.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_size > _MAX:
                return None
            digest, _, text = opened.read(_MAX).partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        return json_text.object_in(text) or None
    except OSError:
        return None


def keep(key: str, document: dict[str, Any]) -> None:
    """Store a document under a key, completely or not at all.

    If the document cannot be stored, the next run computes it again.
    """
    at = folder(create=True)
    if at is None:
        return
    text = json_text.compact(document).encode()
    with contextlib.suppress(OSError):
        handle, path = tempfile.mkstemp(dir=at)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
            Path(path).replace(at / f"{key}.json")
        except OSError:
            Path(path).unlink()
            raise
