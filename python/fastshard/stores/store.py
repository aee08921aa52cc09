"""Interfaces for a checkpoint's root and a result's prefix in a store of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ..common.records import dataclass

__all__ = ["NEW", "ConditionFailed", "Mark", "Store", "StoredFile", "WritableStore", "read_range"]

#: The store's own mark of an object's content, for a condition.
Mark = Any
#: The condition that the name is free.
NEW = "new"


@dataclass(frozen=True)
class StoredFile:
    """A file in a store, in the state in which it was listed."""

    #: Path below the root, with slashes.
    path: str
    #: Size in bytes.
    size: int
    #: The store's own mark of this content: an ETag, a generation, or a commit with a blob.
    identity: str
    #: Time of the last change in nanoseconds since 1970; 0 if the store does not state it.
    modified_ns: int = 0
    #: SHA-256 of the content in hexadecimal, if the store states it; not yet verified.
    sha256: str | None = None


class Store(Protocol):
    """A root of a checkpoint in a store, from which several threads read at once.

    Errors never hold a credential, a token or a signed address.
    """

    @property
    def address(self) -> str:
        """The address for users, without credentials."""

    @property
    def revision(self) -> str | None:
        """The commit to which the address was resolved; None for a store without commits."""

    def list_files(self) -> list[StoredFile]:
        """List all files below the root, sorted by path.

        Raises:
            FastshardError: ``FS501`` if the root does not exist or has no files, ``FS502`` without read
                permission, ``FS507`` if the store does not answer as expected, ``FS514`` for too many files,
                or for a path that is impossible for a local file.
        """

    def list_children(self) -> list[StoredFile]:
        """List the files directly in the root, without those in folders below it, sorted by path.

        Names that are impossible for local files are omitted; the list may be empty.

        Raises:
            FastshardError: as :meth:`list_files`.
        """

    def read_into(self, file: StoredFile, offset: int, buffer: memoryview) -> None:
        """Fill a buffer completely with the bytes of a file from ``offset``, or raise; keep no reference to
        it.

        Raises:
            FastshardError: ``FS506`` if the file has changed since it was listed; otherwise as
                :meth:`list_files`. Transient errors are retried first, within a deadline.
            ValueError: the range is not inside the listed size of the file; an empty range is always inside.
        """


def read_range(store: Store, file: StoredFile, offset: int, length: int) -> bytes:
    """Read exactly ``length`` bytes of a file from ``offset``; see :meth:`Store.read_into`."""
    content = bytearray(length)
    store.read_into(file, offset, memoryview(content))
    return bytes(content)


class ConditionFailed(Exception):
    """Raised if a store refuses to put an object because the condition is not met."""


class WritableStore(Protocol):
    """A prefix of a store to which a result is written. Several threads use it at once.

    Paths are relative to the prefix. Errors never hold a credential, a token or a signed address. Each method
    raises FastshardError: ``FS501`` if the bucket does not exist, ``FS502`` without permission, ``FS507`` if
    the store does not answer as expected. Transient errors are retried first, within a deadline.
    """

    @property
    def address(self) -> str:
        """The address for users, without credentials."""

    def list_objects(self) -> list[StoredFile]:
        """List all objects below the prefix, sorted by path; the list may be empty."""

    def fetch(self, path: str) -> tuple[bytes, Mark] | None:
        """Read a small object whole; return its content and its mark, or None if it does not exist."""

    def find(self, path: str) -> StoredFile | None:
        """Return the record of an object; None if it does not exist."""

    def put(self, path: str, content: bytes, condition: Mark | None = None) -> Mark:
        """Put a small object atomically, and return its mark.

        Args:
            path: its path.
            content: its content.
            condition: :data:`NEW`, the mark of the content that it replaces, or None to replace any.

        Raises:
            ConditionFailed: the condition is not met, or the answer to an earlier attempt was lost.
        """

    def upload(self, path: str, parts: Iterator[bytes], size: int, part_size: int, at_once: int) -> None:
        """Put a large object atomically, and replace an existing one.

        Args:
            path: its path.
            parts: its content in parts of ``part_size`` bytes; the last one may be smaller.
            size: size of the object in bytes.
            part_size: size of a part in bytes.
            at_once: number of parts that are sent at a time.
        """

    def remove(self, path: str) -> None:
        """Remove an object; a missing object is not an error."""
