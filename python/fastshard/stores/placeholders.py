"""Local placeholders for the files of a checkpoint in a store.

Each is a sparse file with the same name and size, so that adapters list and compare names as on any disk. The
core's readers and :mod:`fastshard.common.safe_files` know the folders of placeholders, and read the file in
the store instead.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

from .. import _core
from ..common import codes, memory_budget
from ..common.addresses import find_scheme, normalise_address
from ..common.errors import FastshardError, Finding
from ..common.log import log
from ..common.options import StrPath
from ..common.records import dataclass, field, replace
from ..common.stored_places import record_place
from . import registry
from .claims import CLAIM, MOST_BYTES, OWN_FOLDER, Claim, find_claim, is_own
from .content_hashes import ContentHash
from .store import Store, StoredFile, read_range

__all__ = [
    "StoredRoot",
    "count_requests",
    "describe_roots",
    "find_local_paths",
    "note_unseen",
    "open_root",
    "read_pieces",
]

#: Maximum number of bytes of one file that wait to be hashed, and the divisor of a memory limit for them.
_HASH_ROOM = 32 << 20
_HASH_PART = 32
#: Maximum number of bytes of one request for a file that is read from begin to end.
_PIECE = 8 << 20
#: Schemes of stores whose folders cannot be listed.
_WITHOUT_FOLDERS = ("https", "http")
#: Number of an address's last names that placeholder folders repeat, and maximum length of a name on Linux.
_DEPTH = 6
_LONGEST_NAME = 255
#: Nanoseconds.
_SECOND = 1_000_000_000


@dataclass(frozen=True)
class StoredRoot:
    """A checkpoint's root in a store, and its placeholders."""

    store: Store
    files: tuple[StoredFile, ...]
    #: The folder of the placeholders, or the placeholder of the only file that the address names.
    path: Path
    folder: _core.StoreFolder
    #: The file that the address names, if the store does not list the files next to it.
    unseen: str | None = None
    #: An error for each result in it that a run has not published yet, by its prefix: ``""``, ``step-500/``.
    unfinished: Mapping[str, FastshardError] = field(default_factory=dict)


#: Roots that this process opened, by address and state.
_roots: dict[str, StoredRoot] = {}
_lock = threading.Lock()
_opened: list[StoredRoot] = []
_folders: list[str] = []
#: Roots of the process from which this one was forked.
_left: list[StoredRoot] = []


def find_local_paths(
    paths: Iterable[StrPath], options: Mapping[str, str] | None = None
) -> tuple[list[StrPath], list[StoredRoot]]:
    """Replace the address of each store by the path of its placeholders, and keep other paths.

    A store is listed on each call. Its placeholders are reused if no file has changed.

    Args:
        paths: local paths, and addresses such as ``s3://bucket/run/step-500``.
        options: settings of the stores, under the names in their libraries.

    Returns:
        The paths, and the roots in stores among them.

    Raises:
        FastshardError: as the methods of :class:`fastshard.stores.store.Store`; ``FS514`` for an address that
            no store supports.
    """
    local: list[StrPath] = []
    roots: list[StoredRoot] = []
    for path in paths:
        if find_scheme(path) is None:
            local.append(path)
            continue
        root = open_root(path, options)
        for error in root.unfinished.values():
            raise error
        local.append(root.path)
        roots.append(root)
    return local, roots


def open_root(address: StrPath, options: Mapping[str, str] | None = None) -> StoredRoot:
    """Make the placeholders of an address, which may hold results that are not published yet.

    Args:
        address: a folder or a file of a store.
        options: settings of the store, under the names in its library.

    Raises:
        FastshardError: as :func:`find_local_paths`; ``FS508`` only if ``address`` is in an incomplete result.
    """
    scheme = find_scheme(address)
    assert scheme is not None, "a local path"
    return _open_root(scheme, normalise_address(address), options or {})


def read_pieces(path: Path) -> Iterator[bytes]:
    """Read a file of a store from its begin to its end, and keep nothing of it.

    Args:
        path: the file's placeholder.

    Raises:
        FastshardError: as :meth:`fastshard.stores.store.Store.read_into`; ``FS506`` if the file has changed.
    """
    with _lock:
        roots = [(root, root.path.parent if root.path.is_file() else root.path) for root in _opened]
    root, folder = next((root, folder) for root, folder in roots if path.is_relative_to(folder))
    name = path.relative_to(folder).as_posix()
    file = next(file for file in root.files if file.path == name)
    for offset in range(0, file.size, _PIECE):
        yield read_range(root.store, file, offset, min(_PIECE, file.size - offset))


def note_unseen(roots: Iterable[StoredRoot]) -> list[Finding]:
    """Return a note for each file whose siblings the store does not list, because it may be one rank's
    part."""
    return [
        Finding.of(
            codes.NOT_PROVABLE,
            "the store does not list the files next to this one, which would show whether it is a part of a "
            "model",
            severity="note",
            file=root.unseen,
            unnoticed="a file that is one rank's part of a model",
        )
        for root in roots
        if root.unseen is not None
    ]


def describe_roots(roots: Iterable[StoredRoot]) -> list[dict[str, str | None]]:
    """Describe roots for a manifest: the address of each, and the commit of those that have commits."""
    return [{"address": root.store.address, "revision": root.store.revision} for root in roots]


def count_requests() -> tuple[int, int]:
    """Return the number of range requests of this process, and their bytes."""
    counts = [root.folder.counts() for root in _opened]
    return sum(count for count, _ in counts), sum(nbytes for _, nbytes in counts)


def _open_root(scheme: str, address: str, options: Mapping[str, str]) -> StoredRoot:
    """Return the placeholders of a root, and create them if there are none for its current files."""
    _refuse_unfinished_above(scheme, address, options)
    store = registry.open_store(scheme, address, options)
    listed, single, shown = store.list_files(), None, store.address
    files, unfinished = _leave_out_records(listed), _find_unfinished(store, listed)
    folder, _, name = shown.rstrip("/").rpartition("/")
    if len(files) == 1 and files[0].path == unquote(name):
        beside = _list_beside(scheme, folder, options)
        if beside is None:
            single = files[0].path
        elif any(file.path == files[0].path for file in beside[1]):
            (store, files), single = beside, files[0].path
    with _lock:
        known = _roots.get(shown)
        if known is not None and known.files == files and known.store.revision == store.revision:
            return replace(known, unfinished=unfinished)
        root = replace(_make_root(store, files, shown, single), unfinished=unfinished)
        if known is not None:
            known.folder.forget()
        _roots[shown] = root
        _opened.append(root)
    log("stores", "%s: %d files, %d bytes", shown, len(files), sum(file.size for file in files))
    return root


def _leave_out_records(files: list[StoredFile]) -> tuple[StoredFile, ...]:
    """Omit the records of runs that published their results here."""
    return tuple(file for file in files if not is_own(file.path) and f"/{OWN_FOLDER}" not in file.path)


def _find_unfinished(store: Store, files: list[StoredFile]) -> dict[str, FastshardError]:
    """Return ``FS508`` for each prefix with a result that a run has not published yet."""
    paths, unfinished = {file.path for file in files}, {}
    for file in files:
        if file.path == CLAIM or file.path.endswith(f"/{CLAIM}"):
            prefix, about = file.path.removesuffix(CLAIM), f"{store.address}/{file.path}"
            content = b"" if file.size > MOST_BYTES else read_range(store, file, 0, file.size)
            try:
                claim = Claim.parse(content, about)
            except FastshardError as error:
                unfinished[prefix] = error
                continue
            if prefix + claim.last not in paths:
                unfinished[prefix] = _unfinished(f"{store.address}/{prefix}".rstrip("/"), claim)
    return unfinished


def _refuse_unfinished_above(scheme: str, address: str, options: Mapping[str, str]) -> None:
    """Refuse an address inside an incomplete result.

    Raises:
        FastshardError: ``FS508``.
    """
    if not registry.is_written_to(scheme):
        return
    bucket, *names = address.partition("://")[2].rstrip("/").split("/")
    above = [f"{scheme}://{'/'.join([bucket, *names[:count]])}" for count in range(len(names))]

    def find(prefix: str) -> FastshardError | None:
        try:
            store = registry.open_writable_store(scheme, prefix, options)
            found = find_claim(store)
            if found is None or store.find(found[0].last) is not None:
                return None
        except FastshardError:
            # What lies above may not be for this user to read, or no claim.
            return None
        inside = address.rstrip("/").removeprefix(f"{prefix}/")
        return _unfinished(prefix, found[0]) if found[0].touches(inside) else None

    with ThreadPoolExecutor(len(above) or 1) as pool:
        for refused in pool.map(find, above):
            if refused is not None:
                raise refused


def _unfinished(address: str, claim: Claim) -> FastshardError:
    return FastshardError.of(
        codes.LEFTOVER_RUN,
        "the result is not complete: a run is still writing it, or was interrupted",
        file=address,
        expected=claim.last,
        help="wait until the run has ended, or continue it with --resume",
    )


def _list_beside(
    scheme: str, folder: str, options: Mapping[str, str]
) -> tuple[Store, tuple[StoredFile, ...]] | None:
    """Return the folder of the file that an address names, and the files in it; None if it cannot be listed.

    The names of sibling files show whether it is one rank's part of a model.
    """
    if scheme in _WITHOUT_FOLDERS:
        return None
    try:
        store = registry.open_store(scheme, folder, options)
        return store, tuple(store.list_children())
    except FastshardError as error:
        if error.code != codes.PERMISSION:
            raise
        return None


def _make_root(store: Store, files: tuple[StoredFile, ...], shown: str, single: str | None) -> StoredRoot:
    """Create the placeholders of a root, and register their store with the readers.

    Args:
        store: the store from which the files are read.
        files: the files below it.
        shown: the address that the caller gave.
        single: the file that it names; None for a folder.

    Raises:
        FastshardError: ``FS507`` if they cannot be created.
    """
    root = shown.rstrip("/").rpartition("/")[0] if single else shown.rstrip("/")
    names = _choose_names(root)
    try:
        parent = Path(tempfile.mkdtemp(prefix="fastshard-"))
        _folders.append(os.fspath(parent))
        folder = parent.joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            _make_placeholder(folder / file.path, file)
    except OSError as error:
        raise FastshardError.of(
            codes.IO,
            f"the placeholders for a store's files cannot be created: {error.strerror}",
            file=tempfile.gettempdir(),
            help="set TMPDIR to a directory that you may write to; placeholders take no space",
        ) from None
    limit = memory_budget.get_limit()
    room = memory_budget.STORE_ROOM
    if limit is not None:
        room = min(room, limit // memory_budget.PART_OF_STORES)
    listed = [(file.path, file.size, _mark_state(file)) for file in files]
    registered = _core.StoreFolder(
        folder, root, listed, room, _reader(store, files, lambda file: f"{root}/{file.path}")
    )
    path = folder / single if single else folder
    at, address = folder, root
    for _ in names:
        record_place(at, address)
        at, address = at.parent, address.rpartition("/")[0]
    if single:
        record_place(path, shown)
    unseen = single if store.address == shown else None
    return StoredRoot(store, files, path, registered, unseen)


def _choose_names(root: str) -> list[str]:
    """Return the last names of an address, which the folders of placeholders repeat.

    Names of folders describe their contents: ``mp_rank_00``, ``zero``, ``global_step500``.
    """
    names: list[str] = []
    for name in reversed(root.partition("://")[2].split("/")[-_DEPTH:]):
        if name in ("", ".", "..") or "\0" in name or len(os.fsencode(name)) > _LONGEST_NAME:
            break
        names.insert(0, name)
    return names or ["checkpoint"]


def _make_placeholder(path: Path, file: StoredFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as placeholder:
        placeholder.truncate(file.size)
    time = _mark_state(file)
    os.utime(path, ns=(time, time))


def _mark_state(file: StoredFile) -> int:
    """Return the modification time of a placeholder, which differs if the file's content differs.

    Plans and resumed runs identify the state of a source by its size and time. Stores state times in seconds,
    or not at all, so the remaining digits come from their mark of the content.
    """
    mark = hashlib.blake2b((file.sha256 or file.identity).encode("utf-8", "surrogatepass"), digest_size=8)
    number = int.from_bytes(mark.digest(), "big")
    if file.modified_ns:
        return file.modified_ns // _SECOND * _SECOND + number % _SECOND
    # Until 2006: all file systems know such times.
    return number >> 4


def _reader(
    store: Store, files: tuple[StoredFile, ...], name_of: Callable[[StoredFile], str]
) -> Callable[[int, int, memoryview], list[Finding] | None]:
    """Make the function with which the core reads a range of a file into a buffer.

    Args:
        store: the store.
        files: its files, by their numbers.
        name_of: returns a file's address.
    """

    limit = memory_budget.get_limit()
    room = _HASH_ROOM if limit is None else min(_HASH_ROOM, limit // _HASH_PART)
    hashes = {
        number: ContentHash(file, name_of(file), room)
        for number, file in enumerate(files)
        if file.sha256 is not None
    }

    def read(number: int, offset: int, buffer: memoryview) -> list[Finding] | None:
        file, content_hash = files[number], hashes.get(number)
        try:
            if content_hash is None:
                store.read_into(file, offset, buffer)
                return None
            with content_hash.expect(offset):
                store.read_into(file, offset, buffer)
                return content_hash.add(offset, buffer)
        except FastshardError as error:
            return error.findings
        except MemoryError:
            raise
        except Exception as error:
            # Its text may hold an address with a signature.
            log("stores", "%s: %s", file.path, type(error).__name__)
            return [
                Finding.of(
                    codes.IO,
                    f"the store's reader failed: {type(error).__name__}",
                    file=file.path,
                    help="run the command again; if it fails again, copy the checkpoint here",
                )
            ]

    return read


def _disown() -> None:
    """In a forked process, leave the placeholders to the process that created them."""
    global _lock
    _lock = threading.Lock()
    _roots.clear()
    _folders.clear()
    # Not closed: the threads that would be waited for are those of the other process.
    _left.extend(_opened)
    _opened.clear()


os.register_at_fork(after_in_child=_disown)


@atexit.register
def _remove_folders() -> None:
    """Remove the folders of all placeholders when the process ends."""
    # Threads that call Python must have ended before the interpreter does.
    for root in _opened:
        root.folder.close()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
