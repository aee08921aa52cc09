"""Stores on other hosts' disks, brought here range by range while TensorStore reads them: it knows files alone, and finds holes
in those that stand for others."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from .. import _core
from ..errors import from_core
from .ocdbt_index import Place

#: What an OCDBT database's manifests are called. source: tensorstore/kvstore/ocdbt/index.rst
_MANIFEST = "manifest"


class Lent:
    """The files of a store on another host's disk.

    Nothing of them may be read that was not brought: what was not is zeros.
    """

    def __init__(self, folder: Path, *, ocdbt: bool) -> None:
        self._folder = folder
        self._ocdbt = ocdbt
        self._places: dict[str, Place] = {}
        #: Ranges that are being read, by how many.
        self._used: Counter[Place] = Counter()
        self._lock = threading.Lock()
        if ocdbt:
            for name in sorted(os.listdir(folder)):  # noqa: PTH208 - names, not paths
                if name.startswith(_MANIFEST):
                    self.bring((name, 0, self._size(name)))

    def _size(self, name: str) -> int:
        return os.stat(self._folder / name).st_size  # noqa: PTH116 - once for every chunk

    def bring(self, place: Place) -> None:
        """Brings a range, for good.

        Raises:
            FastshardError: what keeps it from coming.
        """
        name, offset, length = place
        try:
            _core.bring(self._folder / name, offset, offset + length)
        except _core.CoreError as error:
            raise from_core(error) from None

    def placed(self, places: Mapping[str, Place]) -> None:
        """Takes note of where the values of keys lie; in a plain store each is a file."""
        self._places.update(places)

    def _place(self, key: str) -> Place | None:
        if self._ocdbt:
            # Those that the index itself holds have none.
            return self._places.get(key)
        return (key, 0, self._size(key)) if (self._folder / key).is_file() else None

    @contextlib.contextmanager
    def held(self, key: str) -> Iterator[None]:
        """Has the value of a key here as long as it is read.

        Raises:
            FastshardError: what keeps it from coming.
        """
        place = self._place(key)
        if place is None:
            yield
            return
        with self._lock:
            self._used[place] += 1
        try:
            self.bring(place)
            yield
        finally:
            with self._lock:
                self._used[place] -= 1
                if not self._used[place]:
                    del self._used[place]
                    # What was read is needed no more, and memory may be all that lies below.
                    with contextlib.suppress(_core.CoreError):
                        _core.let_go(self._folder / place[0], place[1], place[1] + place[2])

    def send(self, key: str) -> None:
        """Says that the value of a key will be read.

        Raises:
            FastshardError: what keeps that from being said.
        """
        place = self._place(key)
        if place is None:
            return
        name, offset, length = place
        try:
            _core.will_read(self._folder / name, offset, offset + length)
        except _core.CoreError as error:
            raise from_core(error) from None
