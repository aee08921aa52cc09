"""A reader of key-value stores of arrays (plain files, OCDBT) through TensorStore."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import _core
from ..common import codes, memory_budget
from ..common.dtypes import numpy_dtype
from ..common.errors import FastshardError
from ..common.optional_imports import imported
from . import ocdbt_index
from .remote_ranges import RemoteStore

#: Divisor of the memory budget for the cache of OCDBT index nodes, which each have thousands of keys and
#: would otherwise be decoded again for every chunk. Then the size in bytes without a budget, the minimum and
#: the maximum.
_INDEX_PART, _INDEX, _INDEX_LEAST, _INDEX_MOST = 16, 16 << 20, 4 << 20, 64 << 20
#: Maximum number of arrays that a store keeps open.
_OPEN = 64
#: mallopt's parameters. source: malloc.h of glibc
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Divisor of the memory budget for the size up to which a chunk is allocated on the heap, and freed memory at
#: its end is kept. Then the size in bytes without a budget, the minimum and the maximum. source: glibc
#: malloc.c, DEFAULT_MMAP_THRESHOLD_MAX
_HEAP_PART, _HEAP, _LEAST, _MOST = 32, 8 << 20, 1 << 20, 32 << 20


class Box(NamedTuple):
    """A box of an array, and how the array is stored."""

    name: str
    #: The key of the chunk that contains it.
    key: str
    #: TensorStore's driver: ``zarr`` or ``zarr3``.
    driver: str
    metadata: dict[str, Any]
    #: Dtype by its safetensors name.
    dtype: str
    #: True to read missing data as the fill value; the caller then knows that the chunk itself exists.
    fills_missing: bool
    #: First index.
    lo: list[int]
    extent: list[int]


def library() -> Any:
    """Import TensorStore.

    Raises:
        FastshardError: ``FS514`` if it is not installed, and as :func:`refuse_fork`.
    """
    tensorstore = imported("tensorstore", purpose="zarr and OCDBT are read by TensorStore", extra="orbax")
    refuse_fork()
    _share_heap(_share(_HEAP_PART, _HEAP, _LEAST, _MOST))
    return tensorstore


@functools.cache
def _first_process() -> int:
    """Return the process that used TensorStore first; a process forked from it returns the same."""
    return os.getpid()


def refuse_fork() -> None:
    """Refuse a process that was forked from one that has used TensorStore, because it lacks TensorStore's
    threads.

    Raises:
        FastshardError: ``FS514``; TensorStore would end the process by SIGABRT.
    """
    if os.getpid() != _first_process():
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "this process was forked from one that has used TensorStore, which cannot be used in it",
            expected="a process that is spawned: multiprocessing.set_start_method('spawn')",
            got=f"process {os.getpid()}, forked from process {_first_process()}",
            help="start worker processes by spawn, or before the first checkpoint of Orbax, MaxText or Paxml "
            "is opened",
        )


def _share(part: int, default: int, least: int, most: int) -> int:
    """Return a part of the memory budget in bytes, within bounds."""
    limit = memory_budget.get_limit()
    return default if limit is None else min(max(limit // part, least), most)


@functools.lru_cache(1)
def _share_heap(threshold: int) -> None:
    """Make all threads allocate chunks up to a size from one heap.

    A buffer is allocated for each chunk, on many threads. With a heap for each thread, glibc keeps twice the
    memory that is in use. With a mapping for each buffer, the system faults in every page again, which takes
    half of a run's CPU time.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, threshold)
        mallopt(_TRIM_THRESHOLD, threshold)


def new_context() -> Any:
    """Return the context that the stores of one checkpoint share.

    It caches index nodes but no chunks, because the core keeps the chunks that it needs.
    """
    index = _share(_INDEX_PART, _INDEX, _INDEX_LEAST, _INDEX_MOST)
    return library().Context(
        {"cache_pool": {"total_bytes_limit": 0}, "cache_pool#index": {"total_bytes_limit": index}}
    )


class Store:
    """A directory with arrays: their folders, or an OCDBT database."""

    def __init__(self, path: Path, *, ocdbt: bool, label: str, context: Any = None) -> None:
        self._ts = library()
        #: Its files, if they are on another host's disk.
        self.remote = RemoteStore(path, ocdbt=ocdbt) if _core.is_remote(path) else None
        self.label = label
        # TensorStore takes no path with `..` in it.
        self._folder = f"{path.resolve()}/"
        self._ocdbt = ocdbt
        self._context = new_context() if context is None else context
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._kv = self._wait(lambda: self._ts.KvStore.open(self._spec(""), context=self._context).result())

    def _spec(self, path: str) -> dict[str, Any]:
        base = {"driver": "file", "path": self._folder}
        if self._ocdbt:
            return {"driver": "ocdbt", "base": base, "path": path, "cache_pool": "cache_pool#index"}
        return {"driver": "file", "path": self._folder + path}

    def _wait(self, work: Any, tensor: str | None = None) -> Any:
        refuse_fork()
        try:
            return work()
        except FastshardError:
            raise
        except Exception as error:
            # TensorStore raises ValueError for what it finds in stores, and adds where in its sources.
            message = str(error).partition(" [source locations")[0]
            raise FastshardError.of(
                codes.UNSAFE_HEADER,
                f"the store cannot be read: {message}",
                file=self.label,
                tensor=tensor,
                help="copy the file again from the host that wrote it: it is damaged or truncated",
            ) from None

    def placed(self, sizes: Mapping[str, int]) -> tuple[list[str], dict[str, str]]:
        """Return the keys of an OCDBT store whose values exist, and the keys of missing values with the
        reason.

        The function reads only the index and no values.

        Args:
            sizes: files below the store's folder that may be read, with their sizes in bytes.
        """
        base = {"driver": "file", "path": self._folder}
        bring = self.remote.bring if self.remote else lambda place: None
        there: list[str] = []
        lost: dict[str, str] = {}
        places = {}
        for key, place in self._wait(lambda: list(ocdbt_index.walk(self._ts, base, sizes, bring))):
            why = place and ocdbt_index.unreadable(place, sizes)
            if why:
                lost[key] = why
            else:
                there.append(key)
                if self.remote and place:
                    places[key] = place
        if self.remote:
            self.remote.placed(places)
        return there, lost

    def _fetch(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Fetch the value of a key, if its files are on another host."""
        return self.remote.fetch(key) if self.remote else contextlib.nullcontext()

    def read(self, key: str, limit: int | None = None) -> bytes:
        """Return the value of a key as it is stored.

        Raises:
            FastshardError: ``FS601`` if it cannot be read or has more than ``limit`` bytes.
        """
        with self._fetch(key):
            value: bytes = self._wait(lambda: self._kv.read(key).result().value, key)
        if limit is not None and len(value) > limit:
            raise FastshardError.of(
                codes.UNSAFE_HEADER, f"a value of {len(value)} bytes", file=self.label, tensor=key
            )
        return value

    def has(self, key: str) -> bool:
        """Return True if the key exists now."""
        one = self._ts.KvStore.KeyRange(key, key + "\0")
        return bool(self._wait(lambda: self._kv.list(one).result(), key))

    def _array(self, box: Box) -> Any:
        with self._lock:
            if box.name in self._open:
                self._open.move_to_end(box.name)
                return self._open[box.name]
        spec = {
            "driver": box.driver,
            "kvstore": self._spec(box.name + "/"),
            "metadata": box.metadata,
            "fill_missing_data_reads": box.fills_missing,
        }
        # The metadata may lie in another host's store.
        opening = {"open": True, "assume_metadata": True, "context": self._context}
        array = self._wait(lambda: self._ts.open(spec, **opening).result(), box.name)
        with self._lock:
            self._open[box.name] = array
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return array

    def _view(self, box: Box) -> Any:
        array = self._array(box)
        if array.dtype.numpy_dtype != (wanted := numpy_dtype(box.dtype)):
            array = self._wait(lambda: self._ts.cast(array, self._ts.dtype(wanted)), box.name)
        place = tuple(slice(at, at + n) for at, n in zip(box.lo, box.extent, strict=True))
        return self._wait(lambda: array[place] if place else array, box.name)

    def decode(self, box: Box, view: memoryview) -> None:
        """Fill ``view`` with the C-ordered elements of a box.

        Raises:
            FastshardError: ``FS601`` if a chunk is missing or cannot be decoded.
        """
        import numpy as np

        stored = self._view(box)
        # Decoded straight to where it is wanted: one copy less of what may be many MiB.
        target = self._ts.array(np.frombuffer(view, stored.dtype.numpy_dtype).reshape(box.extent))
        with self._fetch(box.key):
            self._wait(lambda: target.write(stored).result(), box.name)

    def decoded(self, box: Box) -> bytes:
        """Return the elements of a box as bytes, in C order."""
        stored = self._view(box)
        with self._fetch(box.key):
            found: bytes = self._wait(lambda: stored.read(order="C").result(), box.name).tobytes()
        return found
