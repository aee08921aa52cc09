"""A checkpoint's root in a store, whatever the store is."""

from __future__ import annotations

from typing import Protocol

from ..common.records import dataclass

__all__ = ["Store", "StoredFile"]

Buffer = bytes | bytearray | memoryview


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

    def read(self, file: StoredFile, offset: int, length: int) -> Buffer:
        """Read exactly ``length`` bytes from ``offset`` of a file.

        Raises:
            FastshardError: ``FS506`` if the file is no longer the one that was listed; otherwise as
                :meth:`list_files`. Errors that pass are retried first, within a deadline.
            ValueError: the range is not inside the file as it was listed; no bytes of any file are inside.
        """
