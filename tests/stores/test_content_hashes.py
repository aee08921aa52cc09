"""What a store states as the SHA-256 of a file is compared with the ranges that are read."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fastshard
import numpy as np
import pytest
from fastshard import FastshardError
from fastshard.common import codes
from fastshard.common.records import replace
from fastshard.stores import registry
from fastshard.stores.content_hashes import ContentHash
from fastshard.stores.store import StoredFile
from folder_store import FolderStore
from holding import HANG
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

CONTENT = random.Random(5).randbytes(1000)


def make_file(sha256: str | None = None) -> StoredFile:
    return StoredFile("f", len(CONTENT), "1", sha256=sha256 or hashlib.sha256(CONTENT).hexdigest())


@given(cuts=st.sets(st.integers(1, 999), max_size=12), seed=st.integers(0, 99), again=st.booleans())
def test_ranges_in_any_order_are_compared(cuts: set[int], seed: int, again: bool) -> None:
    ends = [0, *sorted(cuts), len(CONTENT)]
    ranges = list(itertools.pairwise(ends))
    if again:
        ranges += [(max(start - 3, 0), end) for start, end in ranges]
    random.Random(seed).shuffle(ranges)
    for sha256, is_right in ((None, True), ("0" * 64, False)):
        content_hash = ContentHash(make_file(sha256), "f", 4 * len(CONTENT))
        found = [content_hash.add(start, CONTENT[start:end]) for start, end in ranges]
        assert content_hash.is_compared
        # Whoever reads on hears of it too.
        has_failed = [bool(findings) for findings in found]
        assert has_failed == sorted(has_failed) and has_failed[-1] != is_right


def test_ranges_under_way_are_waited_for_where_there_is_no_room() -> None:
    for sha256, is_right in ((None, True), ("0" * 64, False)):
        content_hash = ContentHash(make_file(sha256), "f", 100)
        begun = threading.Barrier(10)

        def read(
            start: int, content_hash: ContentHash = content_hash, begun: threading.Barrier = begun
        ) -> bool:
            with content_hash.expect(start):
                begun.wait(HANG)
                # The last ranges come first.
                time.sleep((1000 - start) / 20_000)
                return bool(content_hash.add(start, memoryview(CONTENT)[start : start + 100]))

        with ThreadPoolExecutor(10) as pool:
            has_failed = list(pool.map(read, range(0, 1000, 100)))
        assert content_hash.is_compared
        assert any(has_failed) != is_right


def test_a_file_that_is_read_in_part_or_far_out_of_order_is_not_compared() -> None:
    part = ContentHash(make_file("0" * 64), "f", 1000)
    assert part.add(0, CONTENT[:999]) is None
    backwards = ContentHash(make_file("0" * 64), "f", 100)
    for start in range(900, -1, -100):
        assert backwards.add(start, CONTENT[start : start + 100]) is None
    assert not part.is_compared
    assert not backwards.is_compared


class HashedStore(FolderStore):
    """A store that states a SHA-256 of each file."""

    wrong = ""

    def list_files(self) -> list[StoredFile]:
        return [self._with_hash(file) for file in super().list_files()]

    def list_children(self) -> list[StoredFile]:
        return [self._with_hash(file) for file in super().list_children()]

    def _with_hash(self, file: StoredFile) -> StoredFile:
        digest = hashlib.sha256((self.base / file.path).read_bytes()).hexdigest()
        return replace(file, sha256="0" * 64 if file.path == self.wrong else digest)


@pytest.mark.parametrize("verb", ["verify", "merge"])
def test_a_content_that_differs_is_found_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setitem(registry.OPENERS, "hashed", HashedStore)
    folder = tmp_path / "model"
    folder.mkdir()
    for number in (1, 2):
        tensors = {f"layers.{number}.weight": np.full((700_000,), number, np.float32)}
        save_file(tensors, folder / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})
    address = f"hashed://{folder}"

    def run() -> bool:
        if verb == "verify":
            return fastshard.verify(address).ok
        return bool(fastshard.merge(address, tmp_path / "out").document)

    monkeypatch.setattr(HashedStore, "wrong", "model-00002-of-00002.safetensors")
    if verb == "verify":
        found = fastshard.verify(address).findings
    else:
        with pytest.raises(FastshardError) as caught:
            run()
        found = caught.value.findings
    (wrong,) = [finding for finding in found if finding.code == codes.HASH]
    assert wrong.file == f"{address}/model-00002-of-00002.safetensors"
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(HashedStore, "wrong", "")
    assert run()
