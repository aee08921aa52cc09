"""SHA-256 of files in a store, computed from the ranges that are read and compared with the store's value."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..common import codes
from ..common.errors import Finding
from ..common.log import log
from .store import StoredFile

__all__ = ["ContentHash"]

#: Seconds for which a range waits for preceding ranges, longer than a request with all its retries.
_PATIENCE = 600.0


class ContentHash:
    """The SHA-256 of a file whose ranges are read in any order, by several threads.

    Ranges before the next byte to hash are ignored. Later ranges are kept while there is room; after that
    they wait for pending ranges before them. A file that is not read completely, or is read too far out of
    order, is not compared.
    """

    def __init__(self, file: StoredFile, name: str, room: int) -> None:
        """Start without any ranges.

        Args:
            file: a file with a SHA-256 from the store.
            name: name of the file in messages.
            room: maximum number of bytes of ranges to keep.
        """
        self._file, self._name, self._room = file, name, room
        self._hash = hashlib.sha256()
        self._next = 0
        self._kept: dict[int, bytes] = {}
        self._changed = threading.Condition()
        #: First bytes of the pending ranges.
        self._pending: list[int] = []
        self._process = os.getpid()
        self._has_given_up = False
        #: True once the content was compared.
        self.is_compared = False
        self._findings: list[Finding] | None = None

    @contextmanager
    def expect(self, offset: int) -> Iterator[None]:
        """Announce a range that the block reads, so that later ranges wait for it."""
        with self._changed:
            if self._process != os.getpid():
                # What is under way in its parent never arrives in a forked process.
                self._process, self._pending = os.getpid(), []
            self._pending.append(offset)
        try:
            yield
        finally:
            with self._changed:
                self._pending.remove(offset)
                self._changed.notify_all()

    def add(self, offset: int, content: memoryview) -> list[Finding] | None:
        """Add a range that was read; return findings if the file is complete and its hash differs.

        They are returned for each later range too, because the caller of the last range may have stopped
        waiting.
        """
        with self._changed:
            while not self._has_room(offset, len(content)) and any(first < offset for first in self._pending):
                if not self._changed.wait(_PATIENCE):
                    self._give_up()
            if self._has_given_up or self.is_compared or offset + len(content) <= self._next:
                return self._findings
            if offset > self._next:
                self._keep(offset, content)
                return None
            self._update(offset, content)
            while self._kept and (first := min(self._kept)) <= self._next:
                self._update(first, self._kept.pop(first))
            if self._next < self._file.size:
                return None
            self.is_compared = True
            if self._hash.hexdigest() != self._file.sha256:
                self._findings = [self._describe_difference()]
                return self._findings
        log("stores", "%s: the content has the SHA-256 that the store states", self._name)
        return None

    def _describe_difference(self) -> Finding:
        return Finding.of(
            codes.HASH,
            "the SHA-256 of the content differs from the one that the store states",
            file=self._name,
            expected=f"sha256 {self._file.sha256}",
            got=f"sha256 {self._hash.hexdigest()}",
            help="run the command again (in Python, in a new process); if it differs again, upload the file "
            "again",
        )

    def _update(self, offset: int, content: bytes | memoryview) -> None:
        skipped = self._next - offset
        if skipped < len(content):
            self._hash.update(memoryview(content)[skipped:])
            self._next = offset + len(content)

    def _give_up(self) -> None:
        self._has_given_up = True
        self._kept.clear()

    def _has_room(self, offset: int, length: int) -> bool:
        """Return False if a range must be kept but there is no room for it."""
        if offset <= self._next or self._has_given_up or self.is_compared:
            return True
        return sum(map(len, self._kept.values())) + length <= self._room

    def _keep(self, offset: int, content: memoryview) -> None:
        if not self._has_room(offset, len(content)):
            self._give_up()
        elif len(content) > len(self._kept.get(offset, b"")):
            self._kept[offset] = bytes(content)
