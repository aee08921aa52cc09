"""A store of the tests that results are written to: a folder of this host, with the conditions of S3.

Several processes use it at once; each change is atomic. A hook sees each operation before and after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fastshard.common import codes
from fastshard.common.errors import FastshardError
from fastshard.stores import registry
from fastshard.stores.store import NEW, ConditionFailed, Mark, StoredFile

SCHEME = "bucket"
#: Called with (operation, path, whether it is done already); what it raises is what the store raises.
Hook = Callable[[str, str, bool], None]


class BucketStore:
    """A prefix of the bucket, by addresses like ``bucket:///tmp/bucket/prefix``."""

    revision: str | None = None
    hook: Hook = staticmethod(lambda operation, path, is_done: None)
    #: False for a store that puts objects whatever the condition.
    has_conditions = True

    def __init__(self, address: str, options: Mapping[str, str]) -> None:
        self.address = address.rstrip("/")
        self.root = Path(address.partition("://")[2])
        self._lock = self.root.parent / f".{self.root.name}.lock"

    # --- reading

    def list_objects(self) -> list[StoredFile]:
        with self._seen("list", ""):
            files = [path for path in self.root.rglob("*") if path.is_file() and path.suffix != ".part"]
            return sorted((self._describe(path) for path in files), key=lambda file: file.path)

    def list_files(self) -> list[StoredFile]:
        found = self.list_objects()
        if not found:
            raise FastshardError.of(codes.NO_SUCH_PATH, "has no files", file=self.address)
        return found

    def list_children(self) -> list[StoredFile]:
        return [file for file in self.list_objects() if "/" not in file.path]

    def read_into(self, file: StoredFile, offset: int, buffer: memoryview) -> None:
        found = self.find(file.path)
        if found is None or found.identity != file.identity:
            raise FastshardError.of(codes.SOURCE_CHANGED, "the file was replaced", file=file.path)
        with (self.root / file.path).open("rb") as opened:
            opened.seek(offset)
            assert opened.readinto(buffer) == len(buffer)

    def fetch(self, path: str) -> tuple[bytes, Mark] | None:
        with self._seen("fetch", path), self._alone():
            found = self._find(path)
            return None if found is None else ((self.root / path).read_bytes(), found.identity)

    def find(self, path: str) -> StoredFile | None:
        with self._seen("find", path):
            return self._find(path)

    # --- writing

    def put(self, path: str, content: bytes, condition: Mark | None = None) -> Mark:
        with self._seen("put", path), self._alone():
            found = self._find(path)
            if self.has_conditions and condition is not None:
                expected = None if condition is NEW else condition
                if (found.identity if found else None) != expected:
                    raise ConditionFailed(path)
            return self._place(path, content)

    def upload(self, path: str, parts: Iterator[bytes], size: int, part_size: int, at_once: int) -> None:
        content = bytearray()
        with self._seen("upload", path):
            for part in parts:
                assert len(part) == min(part_size, size - len(content))
                content += part
            assert len(content) == size
            with self._alone():
                self._place(path, bytes(content))

    def remove(self, path: str) -> None:
        with self._seen("remove", path), self._alone(), contextlib.suppress(FileNotFoundError):
            (self.root / path).unlink()

    # --- files

    def _place(self, path: str, content: bytes) -> str:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        part.write_bytes(content)
        part.replace(target)
        return self._describe(target).identity

    def _find(self, path: str) -> StoredFile | None:
        try:
            return self._describe(self.root / path)
        except FileNotFoundError:
            return None

    def _describe(self, path: Path) -> StoredFile:
        status = path.stat()
        identity = f"{status.st_ino}-{status.st_mtime_ns}"
        return StoredFile(
            path.relative_to(self.root).as_posix(), status.st_size, identity, status.st_mtime_ns
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _seen(self, operation: str, path: str) -> Iterator[None]:
        type(self).hook(operation, path, False)
        yield
        type(self).hook(operation, path, True)


def serve_buckets() -> None:
    """Let addresses of the scheme ``bucket`` be read and written."""
    registry.OPENERS[SCHEME] = registry.WRITERS[SCHEME] = BucketStore


@contextlib.contextmanager
def buckets_served() -> Iterator[type[BucketStore]]:
    """Let addresses of the scheme ``bucket`` be read and written within a block."""
    serve_buckets()
    hook, has_conditions = BucketStore.hook, BucketStore.has_conditions
    try:
        yield BucketStore
    finally:
        BucketStore.hook, BucketStore.has_conditions = staticmethod(hook), has_conditions
        del registry.OPENERS[SCHEME], registry.WRITERS[SCHEME]
