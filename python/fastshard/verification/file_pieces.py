"""Contents of files, on this machine or in stores, a piece at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..common import safe_files
from ..common.stored_places import is_stored

__all__ = ["read_pieces"]

#: Bytes of a piece of a local file.
_PIECE = 1 << 20


def read_pieces(path: Path) -> Iterator[bytes]:
    """Read a file from begin to end; a file of a store takes no space here.

    Raises:
        FastshardError: if it cannot be read; ``FS506`` if a file of a store has changed.
    """
    if is_stored(path):
        from ..stores.placeholders import read_pieces as read_stored_pieces

        yield from read_stored_pieces(path)
        return
    with safe_files.opened(path) as descriptor:
        while piece := os.read(descriptor, _PIECE):
            yield piece
