"""A store in memory: the smallest that keeps the promises of `store_suite`."""

from __future__ import annotations

import hashlib
import threading

from fastshard.common import codes
from fastshard.common.errors import FastshardError
from fastshard.stores.store import StoredFile


class MemoryStore:
    """Files by their paths. Tests change them with :meth:`put`."""

    def __init__(self, files: dict[str, bytes] | None = None, address: str = "memory://root") -> None:
        self._files = dict(files or {})
        self._lock = threading.Lock()
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    @property
    def revision(self) -> str | None:
        return None

    def put(self, path: str, content: bytes) -> None:
        with self._lock:
            self._files[path] = content

    def remove(self, path: str) -> None:
        with self._lock:
            del self._files[path]

    def list_files(self) -> list[StoredFile]:
        with self._lock:
            found = sorted(self._files.items())
        if not found:
            raise FastshardError.of(codes.NO_SUCH_PATH, "has no files", file=self.address)
        return [StoredFile(path, len(content), _identify(content)) for path, content in found]

    def list_children(self) -> list[StoredFile]:
        return [file for file in self.list_files() if "/" not in file.path]

    def read_into(self, file: StoredFile, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > file.size:
            raise ValueError(f"bytes {offset} to {offset + len(buffer)} of a file of {file.size} bytes")
        if not len(buffer):
            return
        with self._lock:
            content = self._files.get(file.path)
        if content is None or _identify(content) != file.identity:
            raise FastshardError.of(
                codes.SOURCE_CHANGED,
                "is no longer the file that was listed",
                file=f"{self.address}/{file.path}",
            )
        buffer[:] = content[offset : offset + len(buffer)]


def _identify(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
