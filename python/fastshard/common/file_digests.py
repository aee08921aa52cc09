"""Digests of small files at their first read in a call. A file that changes before it is read or copied again
is refused.

Otherwise anyone with write access to a checkpoint's folder could replace a file, or link it to another one,
after it was checked and before it is copied.
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
    """Record the digests of files that the block reads.

    A nested call adds to the digests of the outer one.
    """
    if _DIGESTS.get() is not None:
        yield
        return
    token = _DIGESTS.set({})
    try:
        yield
    finally:
        _DIGESTS.reset(token)


def current() -> dict[str, str]:
    """Return the digests of the current call, which adds one for each file it reads; an empty dict outside a
    call."""
    digests = _DIGESTS.get()
    return {} if digests is None else digests


def adopt(digests: Mapping[str, str]) -> None:
    """Adopt the digests of files that an earlier call read from an open checkpoint."""
    own = _DIGESTS.get()
    if own is not None and own is not digests:
        for path, digest in digests.items():
            own.setdefault(path, digest)


def compare(path: StrPath, digest: str) -> None:
    """Compare a file's digest with its digest at the first read, which the call records.

    Raises:
        FastshardError: ``FS506`` if the digest has changed.
    """
    digests = _DIGESTS.get()
    if digests is None:
        return
    first = digests.setdefault(os.path.abspath(path), digest)  # noqa: PTH100 - takes any path
    if first != digest:
        raise FastshardError.of(
            codes.SOURCE_CHANGED,
            "the file's content changed after it was first read",
            file=os.fspath(path),
            expected=f"blake3 {first}",
            got=f"blake3 {digest}",
            help="run the command again, or open the checkpoint again, once nothing writes to it",
        )
