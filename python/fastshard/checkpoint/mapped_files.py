"""Memory maps of source files, from descriptors that are already open, because a name may now refer to
another file."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Map = TypeVar("Map", bound=mmap.mmap)

#: Maximum number of private maps of a file; each takes a descriptor.
_PRIVATE = 8


class _Private(mmap.mmap):
    """A copy-on-write map of a complete file; no byte of it is handed out twice."""

    ranges: list[tuple[int, int]]

    def lend(self, start: int, length: int) -> Bytes | None:
        """Return a view of a range; None if a part of it was handed out before."""
        at = bisect(self.ranges, (start, start))
        if at and self.ranges[at - 1][1] > start:
            return None
        if at < len(self.ranges) and self.ranges[at][0] < start + length:
            return None
        self.ranges.insert(at, (start, start + length))
        import numpy as np

        view = np.frombuffer(self, dtype=np.uint8, count=length, offset=start)
        # What was written to it goes with the view, not with the last view of the file.
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if pages > 0:
            weakref.finalize(view, self.madvise, mmap.MADV_DONTNEED, first, pages).atexit = False
        return view


class Maps:
    """Maps of a plan's files, which views share; a map is closed with its last view.

    Regardless of the number of views, a file takes one descriptor for views that only read, and a few for
    those that may be written to.
    """

    def __init__(self, descriptor: Callable[[int], int | None]) -> None:
        """Store ``descriptor``, which returns a new descriptor of a file, or None if the file must be
        read."""
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._shared: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
        self._private: dict[int, list[weakref.ref[_Private]]] = {}

    def view(self, file: int, start: int, length: int, *, private: bool) -> Bytes | None:
        """Return a view of bytes of a file: read-only, or ``private`` to the caller, who may write to it.

        Return None if the bytes cannot be mapped: on a network filesystem, or if memory or descriptors run
        out.
        """
        with self._lock:
            try:
                return self._lend(file, start, length) if private else self._read_only(file, start, length)
            except (OSError, ValueError):
                # A file cut short since is among these: reading it says so by name.
                return None

    def _read_only(self, file: int, start: int, length: int) -> Bytes | None:
        shared = self._shared.get(file)
        if shared is None:
            shared = self._map(file, mmap.mmap, mmap.ACCESS_READ)
            if shared is None:
                return None
            self._shared[file] = shared
        import numpy as np

        return np.frombuffer(shared, dtype=np.uint8, count=length, offset=start)

    def _lend(self, file: int, start: int, length: int) -> Bytes | None:
        alive = [private for ref in self._private.get(file, []) if (private := ref()) is not None]
        for private in alive:
            if (view := private.lend(start, length)) is not None:
                return view
        if len(alive) >= _PRIVATE:
            return None
        fresh = self._map(file, _Private, mmap.ACCESS_COPY)
        if fresh is None:
            return None
        fresh.ranges = []
        self._private[file] = [weakref.ref(private) for private in (*alive, fresh)]
        return fresh.lend(start, length)

    def _map(self, file: int, kind: type[Map], access: int) -> Map | None:
        descriptor = self._descriptor(file)
        if descriptor is None:
            return None
        try:
            return kind(descriptor, 0, access=access)
        finally:
            os.close(descriptor)
