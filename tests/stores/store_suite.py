"""What every store promises (`fastshard.stores.store.Store`), as tests of a class.

A new kind of store is tested by one class, with fixtures that give a :class:`Fixture`:

.. code-block:: python

    class TestMine(StorePromises):
        @pytest.fixture
        def made(self) -> Fixture: ...
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from fastshard.common import codes
from fastshard.common.errors import FastshardError
from fastshard.stores.store import Store, StoredFile, read_range

_RANDOM = random.Random(20261129)
#: Names that are legal in a file system and often go wrong in addresses.
FILES = {
    "model-00001-of-00002.safetensors": _RANDOM.randbytes(300_001),
    "config.json": b"{}\n",
    "empty.txt": b"",
    "global_step10/mp_rank_00_model_states.pt": _RANDOM.randbytes(4096),
    "global_step10/deep/er/x.bin": _RANDOM.randbytes(10),
    "odd names/a b+c%20d&e=f#g?h.bin": b"odd",
    "odd names/ä ключ 鍵.bin": b"not ASCII",
    "zarr/0.0": b"chunk",
    "zarr/.zarray": b"{}",
    "zarr-b": b"sorts between zarr and zarr/",
}


@dataclass(frozen=True)
class Fixture:
    """A store with :data:`FILES`, and what changes it behind its back."""

    store: Store
    #: Replaces a file, or makes one.
    put: Callable[[str, bytes], None]
    remove: Callable[[str], None]
    #: A store of the same kind whose root does not exist.
    missing: Store


class StorePromises:
    """The promises, whatever the store is."""

    def file_of(self, made: Fixture, path: str) -> StoredFile:
        return next(file for file in made.store.list_files() if file.path == path)

    def test_the_list_is_sorted_and_exact(self, made: Fixture) -> None:
        listed = made.store.list_files()
        assert [file.path for file in listed] == sorted(FILES)
        assert {file.path: file.size for file in listed} == {path: len(FILES[path]) for path in FILES}
        assert all(file.identity for file in listed)
        assert made.store.list_files() == listed

    def test_children_are_the_files_of_the_root_itself(self, made: Fixture) -> None:
        listed = made.store.list_files()
        children = [file for file in listed if "/" not in file.path and file.size]
        assert [file for file in made.store.list_children() if file.size] == children != []
        file = self.file_of(made, "config.json")
        assert read_range(made.store, file, 0, file.size) == FILES["config.json"]

    def test_every_file_reads_as_it_was_written(self, made: Fixture) -> None:
        for file in made.store.list_files():
            assert read_range(made.store, file, 0, file.size) == FILES[file.path], file.path

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 1), (0, 0), (300_001, 0), (300_000, 1), (1, 300_000), (65_535, 2), (123_456, 100_000)],
    )
    def test_a_range_is_exact_at_its_edges(self, made: Fixture, offset: int, length: int) -> None:
        path = "model-00001-of-00002.safetensors"
        data = read_range(made.store, self.file_of(made, path), offset, length)
        assert bytes(data) == FILES[path][offset : offset + length]
        assert len(memoryview(data)) == length

    @pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 300_002), (300_001, 1)])
    def test_a_range_outside_of_the_file_is_refused(self, made: Fixture, offset: int, length: int) -> None:
        file = self.file_of(made, "model-00001-of-00002.safetensors")
        with pytest.raises(ValueError, match="bytes"):
            read_range(made.store, file, offset, length)

    @pytest.mark.parametrize("size", [300_001, 300_000, 10, 0, 400_000], ids="{} bytes".format)
    def test_a_replaced_file_is_refused(self, made: Fixture, size: int) -> None:
        path = "model-00001-of-00002.safetensors"
        file = self.file_of(made, path)
        assert read_range(made.store, file, 0, 10) == FILES[path][:10]
        made.put(path, random.Random(size).randbytes(size))
        with pytest.raises(FastshardError) as caught:
            read_range(made.store, file, 100_000, 100)
        assert caught.value.code == codes.SOURCE_CHANGED
        assert path in str(caught.value)

    def test_a_removed_file_is_refused(self, made: Fixture) -> None:
        file = self.file_of(made, "zarr/0.0")
        made.remove("zarr/0.0")
        with pytest.raises(FastshardError) as caught:
            read_range(made.store, file, 0, 1)
        assert caught.value.code == codes.SOURCE_CHANGED

    def test_several_threads_read_at_once(self, made: Fixture) -> None:
        path = "model-00001-of-00002.safetensors"
        file = self.file_of(made, path)
        content = FILES[path]
        ranges = [(at, min(4_321, len(content) - at)) for at in range(0, len(content), 4_321)]
        with ThreadPoolExecutor(8) as pool:
            read = pool.map(lambda part: read_range(made.store, file, *part), ranges)
            assert b"".join(read) == content

    def test_a_missing_root_is_refused(self, made: Fixture) -> None:
        with pytest.raises(FastshardError) as caught:
            made.missing.list_files()
        assert caught.value.code == codes.NO_SUCH_PATH
        assert made.missing.address in str(caught.value)
