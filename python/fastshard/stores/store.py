"""A checkpoint's root in a store, and a result's prefix in one, whatever the store is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ..common.records import dataclass

__all__ = ["NEW", "ConditionFailed", "Mark", "Store", "StoredFile", "WritableStore", "read_range"]

#: The store's own mark of an object's content, for a condition.
Mark = Any
#: The condition that nothing has the name yet.
NEW = "new"


@dataclass(frozen=True)
class StoredFile:
    """A file of a store, in the state in which it was listed."""

    #: Path below the root, with slashes.
    path: str
    #: Size in bytes.
    size: int
    #: The store's own mark of this content: an ETag, a generation, or a commit with a blob.
    identity: str
    #: Time of the last change in nanoseconds since 1970; 0 if the store does not state it.
    modified_ns: int = 0
    #: SHA-256 of the content in hexadecimal, if the store states it; it is not verified yet.
    sha256: str | None = None


class Store(Protocol):
    """A root of a checkpoint in a store. Several threads read from it at once.

    Errors never hold a credential, a token or a signed address.
    """

    @property
    def address(self) -> str:
        """The address for users, without credentials."""

    @property
    def revision(self) -> str | None:
        """The commit that the address was resolved to; None for a store without commits."""

    def list_files(self) -> list[StoredFile]:
        """List all files below the root, sorted by path.

        Raises:
            FastshardError: ``FS501`` if the root does not exist or has no files, ``FS502`` without the right
                to read, ``FS507`` if the store does not answer as it should, ``FS514`` for more files than
                are read, or for a path that no file here can have.
        """

    def list_children(self) -> list[StoredFile]:
        """List the files in the root itself, not those in folders below it, sorted by path.

        Names that no file here can have are left out; the list may be empty.

        Raises:
            FastshardError: as :meth:`list_files`.
        """

    def read_into(self, file: StoredFile, offset: int, buffer: memoryview) -> None:
        """Fill all of a buffer with the bytes from ``offset`` of a file, or raise; keep no reference to it.

        Raises:
            FastshardError: ``FS506`` if the file is no longer the one that was listed; otherwise as
                :meth:`list_files`. Errors that pass are retried first, within a deadline.
            ValueError: the range is not inside the file as it was listed; no bytes of any file are inside.
        """


def read_range(store: Store, file: StoredFile, offset: int, length: int) -> bytes:
    """Read exactly ``length`` bytes from ``offset`` of a file; see :meth:`Store.read_into`."""
    content = bytearray(length)
    store.read_into(file, offset, memoryview(content))
    return bytes(content)


class ConditionFailed(Exception):
    """A store that refuses to put an object, because the condition does not hold."""


class WritableStore(Protocol):
    """A prefix of a store that a result is written to. Several threads use it at once.

    Paths are relative to the prefix. Errors never hold a credential, a token or a signed address. Each method
    raises FastshardError: ``FS501`` if the bucket does not exist, ``FS502`` without the right, ``FS507`` if
    the store does not answer as it should. Errors that pass are retried first, within a deadline.
    """

    @property
    def address(self) -> str:
        """The address for users, without credentials."""

    def list_objects(self) -> list[StoredFile]:
        """List all objects below the prefix, sorted by path; none if nothing is there."""

    def fetch(self, path: str) -> tuple[bytes, Mark] | None:
        """Read a small object whole; return its content and its mark, or None if it does not exist."""

    def find(self, path: str) -> StoredFile | None:
        """Return the record of an object; None if it does not exist."""

    def put(self, path: str, content: bytes, condition: Mark | None = None) -> Mark:
        """Put a small object, whole or not at all, and return its mark.

        Args:
            path: its path.
            content: its content.
            condition: :data:`NEW`, the mark of the content that it replaces, or None to replace any.

        Raises:
            ConditionFailed: the condition does not hold; or the answer to an earlier try was lost.
        """

    def upload(self, path: str, parts: Iterator[bytes], size: int, part_size: int, at_once: int) -> None:
        """Put a large object, whole or not at all, replacing one that is there.

        Args:
            path: its path.
            parts: its content in parts of ``part_size`` bytes; the last one may be smaller.
            size: its size in bytes.
            part_size: bytes of a part.
            at_once: parts that are sent at a time.
        """

    def remove(self, path: str) -> None:
        """Remove an object; one that does not exist is no error."""
