"""Stores on other hosts' disks: ranges are fetched into sparse placeholder files, which TensorStore reads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .. import _core
from ..common.errors import from_core
from ..common.records import dataclass, field
from .ocdbt_index import Place

#: Prefix of the names of an OCDBT database's manifests. source: tensorstore/kvstore/ocdbt/index.rst
_MANIFEST = "manifest"
#: Number of unused ranges to keep, because a shard is read once for each of its parts.
_KEPT = 8

#: File, first byte, one past the last.
Range = tuple[Path, int, int]


@dataclass
class _Brought:
    """A fetched range that is being read, or was read recently."""

    readers: int = 0
    here: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


# Stores that are opened twice, or lie in one another, share files.
_ranges: dict[Range, _Brought] = {}
#: Unused ranges, the oldest first.
_idle: OrderedDict[Range, None] = OrderedDict()
_lock = threading.Lock()


@contextlib.contextmanager
def fetch_range(wanted: Range) -> Iterator[None]:
    """Fetch a range to this host, and keep it here while it is read.

    Raises:
        FastshardError: if it cannot be fetched.
    """
    with _lock:
        brought = _ranges.setdefault(wanted, _Brought())
        brought.readers += 1
        _idle.pop(wanted, None)
    try:
        with brought.lock:
            if not brought.here:
                _bring(wanted)
                brought.here = True
        yield
    finally:
        with _lock:
            brought.readers -= 1
            if not brought.readers:
                _idle[wanted] = None
            while len(_idle) > _KEPT:
                oldest, _ = _idle.popitem(last=False)
                del _ranges[oldest]
                # Memory may be all that lies below. A folder that is gone took all of it along.
                with contextlib.suppress(_core.CoreError):
                    _core.let_go(*oldest)


def forget(folder: Path) -> None:
    """Forget the ranges that were fetched into files below a folder that is about to be removed."""
    with _lock:
        for wanted in [w for w in _ranges if w[0].is_relative_to(folder)]:
            del _ranges[wanted]
            _idle.pop(wanted, None)


def _bring(wanted: Range) -> None:
    try:
        _core.bring(*wanted)
    except _core.CoreError as error:
        raise from_core(error) from None


class RemoteStore:
    """The files of a store on another host's disk.

    Only fetched ranges may be read; all others are zeros.
    """

    def __init__(self, folder: Path, *, ocdbt: bool) -> None:
        self._folder = folder.resolve()
        self._ocdbt = ocdbt
        self._places: dict[str, Place] = {}
        if ocdbt:
            for name in sorted(os.listdir(self._folder)):  # noqa: PTH208 - names, not paths
                if name.startswith(_MANIFEST):
                    self.bring((name, 0, self._size(name)))

    def _size(self, name: str) -> int:
        return os.stat(self._folder / name).st_size  # noqa: PTH116 - once for every chunk

    def bring(self, place: Place) -> None:
        """Fetch a range to this host and keep it.

        Raises:
            FastshardError: if the range cannot be fetched.
        """
        _bring(self._range(place))

    def _range(self, place: Place) -> Range:
        name, offset, length = place
        return self._folder / name, offset, offset + length

    def placed(self, places: Mapping[str, Place]) -> None:
        """Record the places of keys' values; in a plain store each is a file."""
        self._places.update(places)

    def range_of(self, key: str) -> Range | None:
        """Return the range of a key's value; None for a missing key, or for a value in the index itself."""
        if self._ocdbt:
            place = self._places.get(key)
            return place and self._range(place)
        return self._range((key, 0, self._size(key))) if (self._folder / key).is_file() else None

    def fetch(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Fetch the value of a key, and keep it here while it is read.

        Raises:
            FastshardError: if the value cannot be fetched.
        """
        wanted = self.range_of(key)
        return fetch_range(wanted) if wanted else contextlib.nullcontext()


def send(wanted: Iterable[tuple[RemoteStore, str]]) -> None:
    """Announce that the values of keys will be read, in this order.

    Raises:
        FastshardError: if the announcement fails.
    """
    ranges = [found for store, key in wanted if (found := store.range_of(key))]
    try:
        _core.will_read(ranges)
    except _core.CoreError as error:
        raise from_core(error) from None
