"""What every store that results are written to promises (`fastshard.stores.store.WritableStore`), as tests.

A new kind of store is tested by one class, with a fixture that gives a :class:`WritableFixture`:

.. code-block:: python

    class TestMine(WritablePromises):
        @pytest.fixture
        def made(self) -> WritableFixture: ...

A store without conditions is tested by a class of :class:`UnconditionalPromises`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import pytest
from fastshard.common import codes
from fastshard.common.errors import FastshardError
from fastshard.stores.store import NEW, ConditionFailed, WritableStore
from holding import HANG
from store_suite import FILES

#: Bytes of a part: no server takes smaller ones than 5 MiB, but as the last one.
PART = 8 << 20
_RANDOM = random.Random(20261130)
CONTENT = _RANDOM.randbytes(2 * PART + (1 << 20) + 3)
THREADS = 16


@dataclass(frozen=True)
class WritableFixture:
    """An empty prefix of a store, and what sees it and changes it by other means."""

    store: WritableStore
    #: Returns what the store has below the prefix.
    read: Callable[[], dict[str, bytes]]
    #: Puts an object behind its back.
    put: Callable[[str, bytes], None]
    #: Returns how many uploads in parts have begun there, and neither ended nor were aborted.
    count_uploads: Callable[[], int] = lambda: 0


def split(content: bytes) -> Iterator[bytes]:
    for at in range(0, len(content), PART):
        yield content[at : at + PART]


def upload(store: WritableStore, path: str, content: bytes) -> None:
    store.upload(path, split(content), len(content), PART, 4)


class _AnyWritable:
    """The promises of stores with conditions and without."""

    def test_nothing_is_listed_at_first(self, made: WritableFixture) -> None:
        assert made.store.list_objects() == []

    def test_odd_names_are_kept(self, made: WritableFixture) -> None:
        for path, content in FILES.items():
            made.store.put(path, content)
        listed = made.store.list_objects()
        # Empty objects may be markers of folders, which stores list or not.
        sizes = {path: len(content) for path, content in FILES.items()}
        assert {file.path: file.size for file in listed} == sizes
        assert [file.path for file in listed] == sorted(sizes)
        assert made.read() == FILES
        for file in listed:
            fetched = made.store.fetch(file.path)
            assert fetched is not None and fetched[0] == FILES[file.path], file.path
            found = made.store.find(file.path)
            assert found is not None and found == file.__class__(
                file.path, file.size, file.identity, found.modified_ns
            )
        for path in FILES:
            made.store.remove(path)
        assert made.store.list_objects() == [] and made.read() == {}

    def test_what_is_missing_is_none(self, made: WritableFixture) -> None:
        made.store.put("there/a", b"a")
        for path in ("missing", "there", "there/a/b", "there/missing"):
            assert made.store.fetch(path) is None and made.store.find(path) is None, path

    def test_what_is_missing_is_removed_without_an_error(self, made: WritableFixture) -> None:
        made.store.put("there/a", b"a")
        for path in ("missing", "there/missing", "a/b/c"):
            made.store.remove(path)
        assert made.read() == {"there/a": b"a"}

    def test_a_put_without_a_condition_replaces(self, made: WritableFixture) -> None:
        for content in (b"first", b"second", b""):
            made.store.put("a", content)
            fetched = made.store.fetch("a")
            assert fetched is not None and fetched[0] == content
            assert made.read() == {"a": content}

    def test_another_content_has_another_identity(self, made: WritableFixture) -> None:
        identities = []
        for content in (b"first", b"other"):
            made.store.put("a", content)
            found = made.store.find("a")
            assert found is not None
            identities.append(found.identity)
        assert identities[0] != identities[1]

    @pytest.mark.parametrize("size", [1, PART - 1, PART, PART + 1, 2 * PART, len(CONTENT)])
    def test_an_upload_is_whole(self, made: WritableFixture, size: int) -> None:
        upload(made.store, "deep/er/model.bin", CONTENT[:size])
        found = made.store.find("deep/er/model.bin")
        assert found is not None and found.size == size
        assert made.store.list_objects()[0].identity == found.identity
        assert made.read() == {"deep/er/model.bin": CONTENT[:size]}
        assert made.count_uploads() == 0

    @pytest.mark.parametrize("size", [10, len(CONTENT)])
    def test_an_upload_replaces(self, made: WritableFixture, size: int) -> None:
        made.put("a", b"older")
        upload(made.store, "a", CONTENT[-size:])
        assert made.read() == {"a": CONTENT[-size:]}

    @pytest.mark.parametrize("before", [0, 1, 2], ids="after {} parts".format)
    @pytest.mark.parametrize("older", [None, b"older"], ids=["new", "replaced"])
    def test_an_upload_that_fails_leaves_what_was_there(
        self, made: WritableFixture, before: int, older: bytes | None
    ) -> None:
        if older is not None:
            made.put("a", older)

        def fail() -> Iterator[bytes]:
            for number, part in enumerate(split(CONTENT)):
                if number == before:
                    raise FastshardError.of(codes.SOURCE_CHANGED, "the source has changed", file="x")
                yield part

        with pytest.raises(FastshardError) as caught:
            made.store.upload("a", fail(), len(CONTENT), PART, 4)
        assert caught.value.code == codes.SOURCE_CHANGED
        assert made.read() == ({} if older is None else {"a": older})
        assert made.count_uploads() == 0

    def test_several_objects_are_uploaded_at_once(self, made: WritableFixture) -> None:
        files = {f"{number}.bin": CONTENT[number : PART + 2 * number] for number in range(4)}
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda path: upload(made.store, path, files[path]), files))
        assert made.read() == files


class WritablePromises(_AnyWritable):
    """The promises, whatever the store is."""

    def test_a_new_object_is_put_once(self, made: WritableFixture) -> None:
        mark = made.store.put("a", b"first", NEW)
        for content in (b"second", b"first"):
            with pytest.raises(ConditionFailed):
                made.store.put("a", content, NEW)
        assert made.store.fetch("a") == (b"first", mark)
        assert made.read() == {"a": b"first"}

    def test_what_was_removed_is_new_again(self, made: WritableFixture) -> None:
        made.store.put("a", b"first", NEW)
        made.store.remove("a")
        made.store.put("a", b"second", NEW)
        assert made.read() == {"a": b"second"}

    def test_a_mark_replaces_its_own_content_alone(self, made: WritableFixture) -> None:
        first = made.store.put("a", b"first", NEW)
        second = made.store.put("a", b"second", first)
        with pytest.raises(ConditionFailed):
            made.store.put("a", b"third", first)
        assert made.store.fetch("a") == (b"second", second)
        made.put("a", b"of another")
        with pytest.raises(ConditionFailed):
            made.store.put("a", b"third", second)
        assert made.read() == {"a": b"of another"}
        fetched = made.store.fetch("a")
        assert fetched is not None
        made.store.put("a", b"third", fetched[1])
        assert made.read() == {"a": b"third"}

    def test_a_mark_does_not_bring_back_what_was_removed(self, made: WritableFixture) -> None:
        mark = made.store.put("a", b"first", NEW)
        made.store.remove("a")
        with pytest.raises(ConditionFailed):
            made.store.put("a", b"second", mark)
        assert made.read() == {}

    def test_one_of_many_wins(self, made: WritableFixture) -> None:
        start = Barrier(THREADS)

        def put(number: int) -> bool:
            start.wait(HANG)
            try:
                made.store.put("a", str(number).encode(), NEW)
            except ConditionFailed:
                return False
            return True

        with ThreadPoolExecutor(THREADS) as pool:
            won = list(pool.map(put, range(THREADS)))
        assert won.count(True) == 1
        assert made.read() == {"a": str(won.index(True)).encode()}

    def test_one_of_many_replaces(self, made: WritableFixture) -> None:
        start = Barrier(THREADS)
        mark = made.store.put("a", b"first", NEW)

        def put(number: int) -> bool:
            start.wait(HANG)
            try:
                made.store.put("a", str(number).encode(), mark)
            except ConditionFailed:
                return False
            return True

        with ThreadPoolExecutor(THREADS) as pool:
            won = list(pool.map(put, range(THREADS)))
        assert won.count(True) == 1
        assert made.read() == {"a": str(won.index(True)).encode()}


class UnconditionalPromises(_AnyWritable):
    """The promises of a store that takes no notice of conditions."""

    def test_a_new_object_overwrites(self, made: WritableFixture) -> None:
        made.store.put("a", b"first", NEW)
        made.store.put("a", b"second", NEW)
        assert made.read() == {"a": b"second"}
