"""What each small file held when a call first read it: what is read twice, or is copied later, has one
content.

Whoever may write to a checkpoint's folder could put another file, or a link to one, in a name's place between
a decision and a copy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

from . import codes
from .errors import FastshardError
from .options import StrPath

#: BLAKE3 of contents by absolute path; None outside a call.
_DIGESTS: ContextVar[dict[str, str] | None] = ContextVar("digests", default=None)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keeps the digests of what is read inside; within another such call it keeps them there."""
    if _DIGESTS.get() is not None:
        yield
        return
    token = _DIGESTS.set({})
    try:
        yield
    finally:
        _DIGESTS.reset(token)


def current() -> dict[str, str]:
    """Gives the digests of this call, which grow with what it reads; none outside a call."""
    digests = _DIGESTS.get()
    return {} if digests is None else digests


def adopt(digests: Mapping[str, str]) -> None:
    """Takes over what an earlier call has read of a checkpoint that is open."""
    own = _DIGESTS.get()
    if own is not None and own is not digests:
        for path, digest in digests.items():
            own.setdefault(path, digest)


def compare(path: StrPath, digest: str) -> None:
    """Compares a file's content with what it was when it was first read, and keeps the first.

    Raises:
        FastshardError: ``FS506`` if it is another.
    """
    digests = _DIGESTS.get()
    if digests is None:
        return
    first = digests.setdefault(os.path.abspath(path), digest)  # noqa: PTH100 - takes any path
    if first != digest:
        raise FastshardError.of(
            codes.SOURCE_CHANGED,
            "other bytes than when it was first read",
            file=os.fspath(path),
            expected=f"blake3 {first}",
            got=f"blake3 {digest}",
            help="run again, or open it again, once nothing writes to the checkpoint",
        )
