"""A model repository of the Hugging Face Hub as a store: read at one commit, in ranges."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping

from ..common import codes, safe_files
from ..common.errors import FastshardError
from .hub_address import HubAddress
from .hub_requests import SHA256, HubRequests
from .store import StoredFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .store import Store

__all__ = ["HubRepository", "open_repository"]

#: Maximum lengths in bytes of a name and of a path on Linux.
_NAME_MAX = 255
_PATH_MAX = 4095


class HubRepository:
    """A model repository on the Hub, or a folder or file in one, at the commit of its revision.

    The commit is resolved at construction; all later reads use it, even if the branch moves.
    """

    def __init__(
        self,
        address: str,
        *,
        endpoint: str | None = None,
        token: str | bool | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Resolve the revision to a commit.

        Args:
            address: ``hf://org/name[@revision][/folder]``.
            endpoint: address of the hub; default ``HF_ENDPOINT``.
            token: as for huggingface_hub: default the user's token, False for none.
            now: the clock for deadlines, in seconds.
            sleep: called with the seconds to wait before a retry.

        Raises:
            FastshardError: as :meth:`Store.list_files` raises it; ``FS515`` for a malformed address.
        """
        self._parts = HubAddress.parse(address)
        self._hub = HubRequests(self._parts, endpoint, token, now, sleep)
        self._commit = self._hub.resolve()
        #: Path of the only file below the root, with its listing.
        self._alone: dict[str, Any] | None = None
        #: Path of the root in the repository, with a trailing slash; empty for the repository's root.
        self._folder = ""
        if self._parts.path:
            self._find_root()

    def __repr__(self) -> str:
        return f"HubRepository({self.address!r}, revision={self.revision!r})"

    @property
    def address(self) -> str:
        """The address as the user gave it."""
        return self._parts.text

    @property
    def revision(self) -> str:
        """The commit to which the address was resolved, in 40 hexadecimal digits."""
        return self._commit

    def list_files(self) -> list[StoredFile]:
        """List all files below the root, sorted by path, with the SHA-256 of LFS files.

        Raises:
            FastshardError: as :meth:`Store.list_files` raises it.
        """
        entries = (
            [self._alone] if self._alone else self._hub.list_tree(self._commit, self._folder.rstrip("/"))
        )
        files = self._describe_all(entries)
        if not files:
            raise FastshardError.of(
                codes.NO_SUCH_PATH,
                f"the repository has no files at commit {self._commit}",
                file=self.address,
                help="check the directory and the revision",
            )
        return files

    def list_children(self) -> list[StoredFile]:
        """List the files in the root itself; see :meth:`Store.list_children`.

        Raises:
            FastshardError: as :meth:`Store.list_files` raises it.
        """
        entries = self._hub.list_tree(self._commit, self._folder.rstrip("/"), deep=False)
        return [file for file in self._describe_all(entries) if "/" not in file.path]

    def _describe_all(self, entries: Iterable[dict[str, Any]]) -> list[StoredFile]:
        """Make the records of the files in a listing, sorted by path."""
        files: dict[str, StoredFile] = {}
        for entry in entries:
            if entry.get("type") == "directory":
                continue
            file = self._describe(entry)
            if file.path in files:
                raise self._hub.strange(f"two entries of the listing have the path {file.path}")
            files[file.path] = file
        return [files[path] for path in sorted(files)]

    def read_into(self, file: StoredFile, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes of a file from ``offset``, from the Hub's cache if the file is there.

        Raises:
            FastshardError: as :meth:`Store.read_into` raises it.
            ValueError: if the range is not inside the file.
        """
        if offset < 0 or offset + len(buffer) > file.size:
            raise ValueError(
                f"{len(buffer)} bytes from {offset} are outside the {file.size} bytes of the file"
            )
        if file.identity.partition("/")[0] != self._commit:
            raise self._hub.changed(file, "was listed at another commit", file.identity.partition("/")[0])
        path = self._folder + file.path
        if len(buffer) and not self._read_cached(path, file, offset, buffer):
            self._hub.read_into(self._commit, path, file, offset, buffer)

    def _find_root(self) -> None:
        """Determine whether the address names a folder or a file."""
        entry = self._hub.look_up(self._commit, self._parts.path)
        if entry.get("type") == "directory":
            self._folder = f"{self._parts.path}/"
        else:
            self._alone = entry
            self._hub.is_one_file = True
            self._folder = self._parts.path[: self._parts.path.rfind("/") + 1]

    def _describe(self, entry: dict[str, Any]) -> StoredFile:
        path, blob, lfs = entry.get("path"), entry.get("oid"), entry.get("lfs") or {}
        if not isinstance(path, str) or not isinstance(blob, str) or not isinstance(lfs, dict):
            raise self._hub.strange("an entry of the listing has no path or no blob")
        if not path.startswith(self._folder):
            raise self._hub.strange("the listing of the directory has a file outside it")
        size, sha256 = lfs.get("size", entry.get("size")), lfs.get("oid")
        if type(size) is not int or size < 0:
            raise self._hub.strange(f"the listing states no size for {path!r}")
        if sha256 is not None and not (isinstance(sha256, str) and SHA256.fullmatch(sha256)):
            raise self._hub.strange(f"the listing states a malformed SHA-256 for {path!r}")
        path = path[len(self._folder) :]
        if not _is_possible(path):
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"the repository has a path that is not valid on this system: {path!r}",
                file=self.address,
                help="rename the file in the repository, or pass a directory without it",
            )
        return StoredFile(path, size, f"{self._commit}/{blob}", sha256=sha256)

    def _read_cached(self, path: str, file: StoredFile, offset: int, buffer: memoryview) -> bool:
        """Fill a buffer from the Hub's cache; return False unless it has the complete file at this commit."""
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(
                self._parts.repository, path, cache_dir=_cache_folder(), revision=self._commit
            )
            if not isinstance(found, str):
                return False
            with safe_files.opened(found) as descriptor:
                if os.fstat(descriptor).st_size != file.size:
                    return False
                done = 0
                while done < len(buffer):
                    count = os.preadv(descriptor, [buffer[done:]], offset + done)
                    if not count:
                        return False
                    done += count
                return True
        except (FastshardError, OSError, ValueError):
            # The hub has it too.
            return False


if TYPE_CHECKING:
    _store: type[Store] = HubRepository


def _cache_folder() -> str | None:
    """Return the folder of the Hub's cache from the current environment; None for the library's default."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return os.path.expandvars(os.path.expanduser(folder))  # noqa: PTH111
    if home := os.environ.get("HF_HOME"):
        return os.path.join(os.path.expandvars(os.path.expanduser(home)), "hub")  # noqa: PTH111, PTH118
    return None


def _is_possible(path: str) -> bool:
    """Return True for a relative path that a file below a root can have."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return False
    names = encoded.split(b"/")
    return (
        len(encoded) <= _PATH_MAX
        and not {b"", b".", b".."} & {*names}
        and b"\0" not in encoded
        and all(len(name) <= _NAME_MAX for name in names)
    )


def open_repository(address: str, options: Mapping[str, str]) -> HubRepository:
    """Return the repository for an address; ``options`` may have an ``endpoint`` and a ``token``.

    Raises:
        FastshardError: ``FS515`` for another option; otherwise as :class:`HubRepository`.
    """
    if unknown := sorted(options.keys() - {"endpoint", "token"}):
        raise FastshardError.of(
            codes.USAGE, "the hub has no such option", expected="endpoint, token", got=", ".join(unknown)
        )
    return HubRepository(address, endpoint=options.get("endpoint"), token=options.get("token"))
