"""EasyLM's streams: the place of each array in the file, found without reading or decoding the arrays.

A stream has one record per array, a msgpack pair: the keys that lead to the array, and Flax's encoding of it.
Streams are untrusted. Each length is compared with that of the enclosing object, nesting is limited to that
of the grammar, and payloads are skipped.

source: EasyLM checkpoint.py (StreamingCheckpointer.save_train_state_to_file); flax serialization.py
    (to_bytes, _ndarray_to_bytes, _chunk); msgpack spec.md
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from ... import _core
from ...common import codes, safe_files
from ...common.config_text import shown
from ...common.dtypes import ML_DTYPES_NAMES, NUMPY_NAMES, item_size
from ...common.errors import FastshardError, from_core
from ...common.records import dataclass

#: The first byte of a record, which is a pair.
_PAIR = 0x92
#: Flax's extension types in msgpack. source: flax serialization.py (_MsgpackExtType)
_NDARRAY, _SCALAR = 1, 3
_CHUNKED = "__msgpack_chunked_array__"
#: Maximum numbers of arrays, of chunks per array and of keys per array; maximum length of a key in bytes;
#: maximum number of dimensions.
_MOST_ARRAYS, _MOST_CHUNKS, _MOST_KEYS, _LONGEST_KEY, _MOST_DIMENSIONS = 1 << 17, 1 << 14, 64, 512, 32
#: Number of bytes to read at once when looking for headers.
_WINDOW = 1024
#: numpy dtype name -> safetensors dtype name.
_DTYPES = {stored: name for name, stored in (NUMPY_NAMES | ML_DTYPES_NAMES).items()}
#: First byte -> number of length bytes that follow, by kind of object.
_TEXT = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXT = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_UINT = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
#: First byte of a single value in place of an array -> its size in bytes.
_LONE = {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9} | {
    first: 1 + size for first, size in _UINT.items()
}


@dataclass(frozen=True)
class StoredArray:
    """An array in a stream: its C-ordered, little-endian bytes, in one or several extents."""

    #: Keys joined by dots.
    name: str
    keys: tuple[str, ...]
    #: dtype by its safetensors name.
    dtype: str
    shape: tuple[int, ...]
    #: (offset in the file, number of bytes)
    extents: tuple[tuple[int, int], ...]


def is_stream(path: Path) -> bool:
    """Return True if a file begins like a stream: with a pair whose first item is a list of strings."""
    head = safe_files.read_bytes(path, 3, whole=False)
    if len(head) < 3 or head[0] != _PAIR or not 0x91 <= head[1] <= 0x9F:
        return False
    return 0xA0 <= head[2] <= 0xBF or head[2] in _TEXT


def scan(path: Path, label: str) -> list[StoredArray]:
    """Find the arrays of a stream.

    Raises:
        FastshardError: ``FS312`` for a stream that ends within a record, ``FS601`` for a file that is not a
            stream, ``FS206`` for two arrays of the same name, ``FS514`` for a dtype that safetensors lacks.
    """
    with safe_files.opened(path, label=label, most=0) as descriptor:
        scanner = _Scanner(path, label, descriptor)
        found: dict[str, StoredArray] = {}
        for array in scanner.scan_records():
            if (other := found.get(array.name)) is not None:
                raise _refuse_same_name(array, other, label)
            if len(found) >= _MOST_ARRAYS:
                raise scanner.refuse(f"more than {_MOST_ARRAYS} arrays")
            found[array.name] = array
        return list(found.values())


def _refuse_same_name(array: StoredArray, other: StoredArray, label: str) -> FastshardError:
    """Build the error for two records of the same name; their keys may differ, because a key may contain a
    dot.
    """
    if array.keys == other.keys:
        return FastshardError.of(
            codes.OVERLAP,
            "two records of the stream have the same name: nothing states which one to use",
            file=label,
            tensor=array.name,
            expected="one record",
            help="copy the stream again from the node that wrote it",
        )
    return FastshardError.of(
        codes.OVERLAP,
        "the keys of two records differ, but give the same name when joined by dots",
        file=label,
        tensor=array.name,
        expected="keys without dots",
        got=" and ".join("/".join(one.keys) for one in (other, array)),
        help="save the model again with modules and parameters that have no dot in their names",
    )


class _Scanner:
    """A position in a file, with methods that read from there."""

    def __init__(self, path: Path, label: str, descriptor: int) -> None:
        self._path, self._label, self._descriptor = path, label, descriptor
        self._size = os.fstat(descriptor).st_size
        #: Offset of the next byte to read.
        self._at = 0
        self._window, self._window_at = b"", 0
        #: The array that is being read, for messages.
        self._name: str | None = None
        self._keys: tuple[str, ...] = ()

    def refuse(self, what: str) -> FastshardError:
        """Build the error for bytes that do not occur in streams."""
        return FastshardError.of(
            codes.UNSAFE_HEADER,
            f"malformed stream of EasyLM: {what}",
            file=self._label,
            tensor=self._name,
            got=f"byte {self._at}",
            help="copy the stream again from the node that wrote it; if it is the same there, save it again",
        )

    def _cut(self, end: int) -> FastshardError:
        """Build the error for a stream that ends too early."""
        return FastshardError.of(
            codes.TRUNCATED,
            "the stream ends within a record",
            file=self._label,
            tensor=self._name,
            expected=f"at least {end} bytes",
            got=f"{self._size} bytes",
            help="copy the stream again from the node that wrote it; if it is truncated there, choose "
            "another step",
        )

    def _take(self, count: int, end: int) -> bytes:
        """Read a few bytes, which must be before ``end``."""
        if self._at + count > end:
            raise self._cut(self._at + count) if end == self._size else self.refuse("a length")
        if not (self._window_at <= self._at and self._at + count <= self._window_at + len(self._window)):
            size = min(max(count, _WINDOW), self._size - self._at)
            try:
                _core.bring(self._path, self._at, self._at + size)
                self._window = os.pread(self._descriptor, size, self._at)
            except _core.CoreError as error:
                raise from_core(error) from None
            except OSError as error:
                raise FastshardError.of(
                    codes.IO, f"cannot read: {error.strerror}", file=self._label
                ) from None
            self._window_at = self._at
            if len(self._window) < count:
                raise self._cut(self._at + count)
        start = self._at - self._window_at
        self._at += count
        return self._window[start : start + count]

    def _take_int(self, size: int, end: int) -> int:
        return int.from_bytes(self._take(size, end), "big")

    def _take_length(self, end: int, sizes: dict[int, int], what: str, *, short: tuple[int, int]) -> int:
        """Read a header, and return the length in it; the first bytes in ``short`` contain the length
        themselves.
        """
        first = self._take(1, end)[0]
        if first in sizes:
            return self._take_int(sizes[first], end)
        if short[0] <= first <= short[1]:
            return first - short[0]
        self._at -= 1
        raise self.refuse(f"no {what}")

    def _take_end(self, length: int, end: int) -> int:
        """Return the end of an object of a given length, which must be inside the enclosing one."""
        inner = self._at + length
        if inner > end:
            raise self._cut(inner) if end == self._size else self.refuse(f"a length of {length}")
        return inner

    def _take_text(self, end: int, what: str) -> str:
        length = self._take_length(end, _TEXT | _BYTES, what, short=(0xA0, 0xBF))
        if length > _LONGEST_KEY:
            raise self.refuse(f"{what} of {length} bytes")
        try:
            return self._take(length, end).decode("utf-8")
        except UnicodeDecodeError:
            raise self.refuse(f"{what} that is not text") from None

    def _take_count(self, end: int, what: str, most: int) -> int:
        """Read the header of a list, and return its length."""
        count = self._take_length(end, {0xDC: 2, 0xDD: 4}, what, short=(0x90, 0x9F))
        if count > most:
            raise self.refuse(f"{count} {what}")
        return count

    def _take_pairs(self, end: int, what: str, most: int) -> int:
        """Read the header of a map, and return its length."""
        count = self._take_length(end, {0xDE: 2, 0xDF: 4}, what, short=(0x80, 0x8F))
        if count > most:
            raise self.refuse(f"{count} {what}")
        return count

    def _take_number(self, end: int) -> int:
        return self._take_length(end, _UINT, "size of a dimension", short=(0x00, 0x7F))

    def scan_records(self) -> Iterator[StoredArray]:
        """Yield the array of each record; records without an array are skipped."""
        while self._at < self._size:
            self._name = None
            if self._take(1, self._size)[0] != _PAIR:
                self._at -= 1
                raise self.refuse(
                    "a record that is not a pair of keys and array"
                    if self._at
                    else "the stream does not begin with a record"
                )
            keys = [
                self._take_text(self._size, "key")
                for _ in range(self._take_count(self._size, "keys", _MOST_KEYS))
            ]
            if not (keys and all(keys)):
                raise self.refuse("an array without a name")
            self._keys, self._name = tuple(keys), ".".join(keys)
            length = self._take_length(self._size, _BYTES | _TEXT, "bytes of an array", short=(0xA0, 0xBF))
            end = self._take_end(length, self._size)
            array = self._scan_value(self._name, end)
            self._at = end
            if array is not None:
                yield array

    def _scan_value(self, name: str, end: int) -> StoredArray | None:
        """Read Flax's encoding of a value; None for a number or a mark, which are not tensors."""
        first = self._take(1, end)[0]
        if first <= 0x7F or first >= 0xE0 or first in _LONE:
            self._at += _LONE.get(first, 1) - 1
            self._require_end(end)
            return None
        self._at -= 1
        if 0x80 <= first <= 0x8F:
            return self._scan_chunks(name, end)
        dtype, shape, extent = self._scan_array(end)
        self._require_end(end)
        return StoredArray(name, self._keys, dtype, shape, (extent,))

    def _require_end(self, end: int) -> None:
        if self._at != end:
            raise self.refuse("bytes outside any record")

    def _scan_array(self, end: int) -> tuple[str, tuple[int, ...], tuple[int, int]]:
        """Read an array's dtype, shape and place, and skip its elements."""
        first = self._take(1, end)[0]
        if first in _FIXED_EXT:
            length = _FIXED_EXT[first]
        elif first in _EXT:
            length = self._take_int(_EXT[first], end)
        else:
            self._at -= 1
            raise self.refuse("no array")
        if self._take(1, end)[0] not in (_NDARRAY, _SCALAR):
            raise self.refuse("an object other than an array")
        inner = self._take_end(length, end)
        if self._take_count(inner, "parts of an array", 3) != 3:
            raise self.refuse("an array without exactly three parts")
        shape = tuple(
            self._take_number(inner) for _ in range(self._take_count(inner, "dimensions", _MOST_DIMENSIONS))
        )
        stored = self._take_text(inner, "type of elements")
        if stored not in _DTYPES:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "arrays of this dtype are not supported",
                file=self._label,
                tensor=self._name,
                expected="a numpy dtype that safetensors has a name for, or bfloat16",
                got=shown(stored),
                help="copy the stream again if this is not a dtype; else save it with another dtype",
            )
        dtype = _DTYPES[stored]
        size = self._take_length(inner, _BYTES | _TEXT, "bytes of the elements", short=(0xA0, 0xBF))
        start, stop = self._at, self._take_end(size, inner)
        if math.prod(shape) * item_size(dtype) != size:
            raise self.refuse(f"{size} bytes of elements for {shown(list(shape))} of {stored}")
        self._at = stop
        self._require_end(inner)
        return dtype, shape, (start, size)

    def _scan_chunks(self, name: str, end: int) -> StoredArray | None:
        """Read an array that Flax divided because msgpack limits the size of an object.

        source: flax serialization.py (_chunk): a map of the mark, the shape and the flat parts
        """
        count = self._take_pairs(end, "parts of a divided array", 3)
        if count == 0:
            self._require_end(end)
            return None
        shape: tuple[int, ...] | None = None
        parts: list[tuple[str, tuple[int, ...], tuple[int, int]]] | None = None
        is_marked = False
        for _ in range(count):
            key = self._take_text(end, "key")
            if key == _CHUNKED and not is_marked:
                is_marked = self._take(1, end)[0] == 0xC3
            elif key == "shape" and shape is None:
                shape = tuple(self._take_number(end) for _ in self._numbered(end, _MOST_DIMENSIONS))
            elif key == "chunks" and parts is None:
                parts = [self._scan_array(end) for _ in self._numbered(end, _MOST_CHUNKS)]
            else:
                raise self.refuse("a tree where an array should be")
        self._require_end(end)
        if not is_marked or shape is None or not parts:
            raise self.refuse("a tree where an array should be")
        dtypes = {dtype for dtype, _, _ in parts}
        items = sum(math.prod(part) for _, part, _ in parts)
        if len(dtypes) > 1 or any(len(part) != 1 for _, part, _ in parts) or items != math.prod(shape):
            raise self.refuse("parts that do not add up to the array")
        return StoredArray(name, self._keys, dtypes.pop(), shape, tuple(extent for _, _, extent in parts))

    def _numbered(self, end: int, most: int) -> Iterator[int]:
        """Yield the numbers of a map that represents a list: its keys count from zero."""
        for number in range(self._take_pairs(end, "numbered parts", most)):
            if self._take_text(end, "number") != str(number):
                raise self.refuse("parts in the wrong order")
            yield number
