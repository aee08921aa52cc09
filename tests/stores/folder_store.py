"""A store of the tests: it serves a folder of this host, and counts what is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fastshard import FastshardError
from fastshard.common import codes
from fastshard.stores import registry
from fastshard.stores.store import StoredFile

SCHEME = "folder"


class FolderStore:
    """The files below a folder, or one file, by addresses like ``folder:///tmp/run``."""

    revision: str | None = None
    #: Bytes that all stores of this kind have read.
    bytes_read = 0

    def __init__(self, address: str, options: Mapping[str, str]) -> None:
        self.address = address
        path = Path(address.partition("://")[2])
        self.files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        self.base = path.parent if path.is_file() else path

    def list_files(self) -> list[StoredFile]:
        if not self.files:
            raise FastshardError.of(codes.NO_SUCH_PATH, "no such folder in the store", file=self.address)
        return sorted(map(self._describe, self.files), key=lambda file: file.path)

    def list_children(self) -> list[StoredFile]:
        return [file for file in map(self._describe, self.files) if "/" not in file.path]

    def read_into(self, file: StoredFile, offset: int, buffer: memoryview) -> None:
        if self._describe(self.base / file.path).identity != file.identity:
            raise FastshardError.of(codes.SOURCE_CHANGED, "the file was replaced", file=file.path)
        type(self).bytes_read += len(buffer)
        with (self.base / file.path).open("rb") as opened:
            opened.seek(offset)
            assert opened.readinto(buffer) == len(buffer)

    def _describe(self, path: Path) -> StoredFile:
        status = path.stat()
        identity = f"{status.st_ino}-{status.st_mtime_ns}"
        return StoredFile(
            path.relative_to(self.base).as_posix(), status.st_size, identity, status.st_mtime_ns
        )


@contextmanager
def folders_served() -> Iterator[None]:
    """Let addresses of the scheme ``folder`` be read."""
    registry.OPENERS[SCHEME] = FolderStore
    FolderStore.bytes_read = 0
    try:
        yield
    finally:
        del registry.OPENERS[SCHEME]


def find_address(path: Path) -> str:
    """Return the address of a folder or of a file."""
    return f"{SCHEME}://{path.absolute()}"
