"""A writer of stores of arrays (zarr, OCDBT) through TensorStore: the core hands over one block at a time."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import shutil
import threading
from collections import deque
from pathlib import Path
from typing import Any

from ..common import codes
from ..common.dtypes import numpy_dtype
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass
from ..common.regex import compile_when_used
from .array_reader import library
from .dtypes import ZARR2, ZARR3, fill

#: TensorStore's errors for full storage.
_NO_SPACE = compile_when_used(r"\b(ENOSPC|EDQUOT)\b")
#: Maximum number of bytes that are being encoded or sent to the store at a time; each block waits for a
#: commit.
_UNDER_WAY = 16 << 20
#: Values up to this many bytes are stored in the nodes of OCDBT's tree, as in Orbax.
#: source: orbax/checkpoint/_src/serialization/ocdbt_utils.py, type_handlers.py
_INLINE = 1024
#: Size of a node of that tree in bytes. Each commit rewrites the nodes on its path, and blocks are committed
#: as they arrive.
_NODE = 64 << 10


@dataclass(frozen=True)
class Array:
    """An array to write; ``dtype`` is the safetensors name, ``block`` the shape of a chunk."""

    key: str
    dtype: str
    shape: list[int]
    block: list[int]

    def keys(self, zarr: int) -> set[str]:
        """Return the keys that the store must have once the array is complete: metadata and every chunk."""
        grid = [range(-(-n // b)) for n, b in zip(self.shape, self.block, strict=True)]
        if zarr == 3:
            chunks = {"/".join(["c", *map(str, index)]) for index in itertools.product(*grid)}
            names = {"zarr.json", *chunks}
        else:
            chunks = {".".join(map(str, index)) or "0" for index in itertools.product(*grid)}
            names = {".zarray", *chunks}
        return {f"{self.key}/{name}" for name in names}

    def metadata(self, zarr: int) -> dict[str, Any]:
        """Return the array's metadata as Orbax writes it, so that every version of Orbax reads the array.

        source: orbax/checkpoint/_src/serialization/tensorstore_utils.py (ArrayWriteSpec); measured with
            0.12.8
        """
        if zarr == 2:
            return {
                "zarr_format": 2,
                "shape": self.shape,
                "chunks": [max(1, n) for n in self.block],
                "dtype": ZARR2[self.dtype],
                "compressor": {"id": "zstd", "level": 1},
                "fill_value": None,
                "filters": None,
                "order": "C",
                "dimension_separator": ".",
            }
        chunk = {"chunk_shape": [max(1, n) for n in self.block]}
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        sharding = {
            **chunk,
            "codecs": [little, {"name": "zstd", "configuration": {"level": 3, "checksum": False}}],
            "index_codecs": [little, {"name": "crc32c"}],
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": self.shape,
            "data_type": ZARR3[self.dtype],
            "chunk_grid": {"name": "regular", "configuration": chunk},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "fill_value": fill(self.dtype),
        }


class StoreWriter:
    """A writer of one store, whose methods the core calls; it calls :meth:`write` from several threads at a
    time.

    :meth:`begin`, :meth:`write` and :meth:`finish` return None, or a JSON array of findings.
    """

    def __init__(self) -> None:
        self._ts = library()
        self._lock = threading.Lock()
        self._arrays: dict[str, Array] = {}
        self._open: dict[str, Any] = {}
        self._under_way: deque[tuple[bytearray | mmap.mmap, Any]] = deque()
        self._bytes = 0
        self._spare: list[bytearray | mmap.mmap] = []
        self._how: dict[str, Any] = {}
        self._context: Any = None

    def begin(self, folder: str, how: dict[str, Any], arrays: list[dict[str, Any]]) -> list[Finding] | None:
        """Create the store in ``folder`` from scratch, and remove leftovers of an interrupted run."""
        # TensorStore takes no path with `..` in it.
        path = Path(folder).resolve()
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        self._how = {**how, "folder": str(path)}
        # What is published is brought to disk as a whole, once.
        self._context = self._ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})
        self._arrays = {a["key"]: Array(**a) for a in arrays}
        return self._catch_findings(lambda: self._create(list(self._arrays.values())))

    def _create(self, arrays: list[Array]) -> None:
        zarr = self._how["zarr"]
        # Together, so that they share commits; not all at once, for the memory's sake.
        for start in range(0, len(arrays), 256):
            opening = {
                array.key: self._ts.open(
                    {
                        "driver": "zarr" if zarr == 2 else "zarr3",
                        "kvstore": self._kvstore(array.key + "/"),
                        "metadata": array.metadata(zarr),
                        # Chunks of zeros are written too: a missing one is a lost one.
                        "store_data_equal_to_fill_value": True,
                    },
                    create=True,
                    context=self._context,
                )
                for array in arrays[start : start + 256]
            }
            failed: Exception | None = None
            for key, future in opening.items():
                try:
                    self._open[key] = future.result()
                except Exception as error:
                    # The others are waited for: they would go on to write into a folder that is being
                    # removed.
                    failed = failed or error
            if failed is not None:
                raise failed

    def _kvstore(self, path: str) -> dict[str, Any]:
        folder = self._how["folder"].rstrip("/") + "/"
        if not self._how["ocdbt"]:
            return {"driver": "file", "path": folder + path}
        return {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": folder},
            "path": path,
            "config": {"max_inline_value_bytes": _INLINE, "max_decoded_node_bytes": _NODE},
        }

    def take_spare(self, size: int) -> bytearray | mmap.mmap | None:
        """Return a used buffer of ``size`` bytes, if any, because fresh memory is expensive.

        TensorStore may still refer to it; the core uses it only if nothing does.
        """
        with self._lock:
            for number, spare in enumerate(self._spare):
                if len(spare) == size:
                    return self._spare.pop(number)
            # Blocks of another array come now.
            self._spare.clear()
        return None

    def write(
        self, key: str, index: list[int], shape: list[int], data: bytearray | mmap.mmap
    ) -> list[Finding] | None:
        """Store the block at ``index``; ``data`` has its elements in C order and must not change
        afterwards."""
        return self._catch_findings(lambda: self._write(key, index, shape, data))

    def _write(self, key: str, index: list[int], shape: list[int], data: bytearray | mmap.mmap) -> None:
        import numpy as np

        array = self._arrays[key]
        block = np.frombuffer(data, numpy_dtype(array.dtype)).reshape(shape)
        place = tuple(slice(i * b, i * b + n) for i, b, n in zip(index, array.block, shape, strict=True))
        target = self._open[key][place] if place else self._open[key]
        # Encoded where it lies: no copy is taken of it.
        future = target.write(block, can_reference_source_data_indefinitely=True)
        future.copy.result()
        done = []
        with self._lock:
            self._under_way.append((data, future.commit))
            self._bytes += len(data)
            while self._bytes > _UNDER_WAY:
                done.append(self._under_way.popleft())
                self._bytes -= len(done[-1][0])
        for _, commit in done:
            commit.result()
        with self._lock:
            self._spare += [written for written, _ in done]

    def finish(self) -> list[Finding] | None:
        """Wait for all pending writes, and look up every key that must exist."""
        return self._catch_findings(self._finish)

    def _finish(self) -> None:
        while self._under_way:
            self._under_way.popleft()[1].result()
        self._open.clear()
        self._spare.clear()
        store = self._ts.KvStore.open(self._kvstore(""), context=self._context).result()
        there = {key.decode() for key in store.list().result()}
        for array in self._arrays.values():
            if lacking := sorted(array.keys(self._how["zarr"]) - there):
                raise FastshardError.of(
                    codes.IO,
                    f"{len(lacking)} keys of the store just written are not in it",
                    tensor=array.key,
                    expected=lacking[0],
                    help="look at the logs of the file system, then run again; it lost data that was written",
                )

    def abort(self) -> None:
        """Wait for pending writes and ignore their results, because the store will be removed."""
        while self._under_way:
            with contextlib.suppress(Exception):
                self._under_way.popleft()[1].result()
        self._open.clear()

    def _catch_findings(self, work: Any) -> list[Finding] | None:
        try:
            work()
        except FastshardError as error:
            return error.findings
        except Exception as error:
            # TensorStore raises ValueError for what the system says of files.
            code = codes.NO_SPACE if _NO_SPACE.search(str(error)) else codes.IO
            finding = Finding.of(code, f"the store cannot be written: {error}", file=self._how.get("folder"))
            return [finding]
        return None


def writer() -> StoreWriter:
    """Return a writer.

    Raises:
        FastshardError: ``FS514`` if TensorStore is not installed.
    """
    return StoreWriter()
