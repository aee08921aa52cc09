"""Safe access to regular files. Only this module opens files of a checkpoint or files that a user names.

Opening a FIFO could block, reading a device could never end, and a file may have been replaced since it was
listed. So this module opens files without blocking, checks them through the descriptor, and reads at most a
given number of bytes, regardless of the reported size.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .. import _core
from . import codes, file_digests, json_text, memory_budget
from .addresses import check_local
from .errors import FastshardError, Finding, error_for, from_core
from .near_words import nearest
from .options import StrPath

#: Maximum size in bytes of a text that describes a checkpoint, such as a config or a tokenizer.
MAX_TEXT = 64 << 20
#: Maximum size in bytes of an index, which names every tensor; results never have a larger one.
MAX_INDEX = 512 << 20
#: Maximum size in bytes of a config or a layout that a user names.
MAX_CONFIG = 16 << 20

#: Suffixes of text files that are never empty.
_NEVER_EMPTY = (".json", ".model", ".tiktoken")
#: Number of bytes that identify a file's kind. No Git LFS pointer is longer.
_HEAD = 1024
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_PIECE = 1 << 20
_ALL = (1 << 64) - 1
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def special(mode: int) -> str | None:
    """Return the kind of a file that is not regular, by its mode: ``a FIFO``, ``a directory`` ..."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")


def unfit(path: StrPath, kind: str, code: str = codes.UNSAFE_HEADER) -> Finding:
    """Make the finding for a path that should be a regular file but is of another ``kind``."""
    folder = kind == _KINDS[stat.S_IFDIR]
    return Finding.of(
        code,
        "a directory, not a file" if folder else "not a regular file",
        file=os.fspath(path),
        expected="a file" if folder else "a regular file",
        got=kind,
        help="name a file; if a checkpoint should hold one, put a regular file there"
        if folder
        else "put a copy of the file there; fastshard reads no pipes, devices or sockets",
    )


def is_file(path: StrPath, code: str = codes.UNSAFE_HEADER) -> bool:
    """Return True for a regular file or a link to one; False if the name does not exist.

    Raises:
        FastshardError: ``code`` if the name is not that of a regular file, ``FS502`` or ``FS507`` if the
            system refuses access, which does not mean that the file is missing.
    """
    try:
        kind = special(os.stat(path).st_mode)  # noqa: PTH116 - takes any path
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise _cannot(error, os.fspath(path)) from None
    if kind is not None:
        raise error_for([unfit(path, kind, code)])
    return True


@contextlib.contextmanager
def opened(
    path: StrPath, *, label: str | None = None, code: str = codes.UNSAFE_HEADER, most: int = _ALL
) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor.

    Args:
        path: the file.
        label: how messages name it; default the path.
        code: code of the finding if the path is not a regular file.
        most: number of bytes to read, for a file on another host.

    Raises:
        FastshardError: ``code``; ``FS501`` if the file does not exist, ``FS502`` without read permission,
            ``FS507`` for other system errors.
    """
    name = label or os.fspath(path)
    try:
        _core.bring(path, 0, most)
    except ValueError as error:
        raise FastshardError.of(codes.NO_SUCH_PATH, f"not a file name: {error}", file=name) from None
    except _core.CoreError as error:
        raise from_core(error) from None
    try:
        # Looked at before it is opened too: to open a device may already do something.
        kind = special(os.stat(path).st_mode)  # noqa: PTH116 - takes any path
        descriptor = -1 if kind else os.open(path, _FLAGS)
    except OSError as error:
        raise _cannot(error, name) from None
    except ValueError as error:
        raise FastshardError.of(codes.NO_SUCH_PATH, f"not a file name: {error}", file=name) from None
    try:
        if kind is None:
            try:
                kind = special(os.fstat(descriptor).st_mode)
            except OSError as error:
                raise _cannot(error, name) from None
        if kind is not None:
            raise error_for([unfit(name, kind, code)])
        yield descriptor
    finally:
        if descriptor >= 0:
            # It was only read: that it cannot be closed changes nothing.
            with contextlib.suppress(OSError):
                os.close(descriptor)


def read_bytes(
    path: StrPath,
    limit: int,
    *,
    label: str | None = None,
    code: str = codes.UNSAFE_HEADER,
    whole: bool = True,
    may_change: bool = False,
) -> bytes:
    """Read the content of a regular file; with ``whole`` false, its first ``limit`` bytes.

    Args:
        path: the file.
        limit: maximum number of bytes.
        label: how messages name it; default the path.
        code: code of the finding if the file is too large or is not regular.
        whole: True to read the complete file.
        may_change: True for a file that other processes write while the call waits for them.

    Raises:
        FastshardError: as :func:`opened`; ``code`` if it has more than ``limit`` bytes, ``FS506`` if the
            content has changed since this call first read it.
    """
    parts: list[bytes] = []
    left = limit + whole
    with opened(path, label=label, code=code, most=left) as descriptor:
        try:
            size = os.fstat(descriptor).st_size
        except OSError as error:
            raise _cannot(error, label or os.fspath(path)) from None
        if whole and size > limit:
            # Known before it is read; what grows meanwhile is bounded below.
            raise _too_large(label or os.fspath(path), code, limit, f"{size} bytes")
        memory_budget.ask(min(left, size), label or os.fspath(path))
        while left > 0:
            try:
                part = os.read(descriptor, min(left, _PIECE))
            except OSError as error:
                raise _cannot(error, label or os.fspath(path)) from None
            if not part:
                break
            parts.append(part)
            left -= len(part)
    if whole and left == 0:
        raise _too_large(label or os.fspath(path), code, limit, "more")
    content = b"".join(parts)
    if whole and not may_change:
        hasher = _core.Hasher()
        hasher.update(content)
        file_digests.compare(path, hasher.hexdigest())
    return content


def digest(path: StrPath, check: Callable[[int], object] | None = None) -> str:
    """Compute the BLAKE3 digest (hexadecimal) of a regular file's bytes, through one descriptor.

    Args:
        path: the file.
        check: called with the open descriptor before reading; an exception stops it.

    Raises:
        FastshardError: as :func:`opened`; ``FS506`` if the content has changed since this call first read it.
    """
    hasher = _core.Hasher()
    with opened(path) as descriptor:
        if check is not None:
            check(descriptor)
        try:
            for piece in _pieces(descriptor):
                hasher.update(piece)
        except OSError as error:
            raise _cannot(error, os.fspath(path)) from None
    file_digests.compare(path, hasher.hexdigest())
    return hasher.hexdigest()


def _too_large(name: str, code: str, limit: int, got: str) -> FastshardError:
    return FastshardError.of(
        code,
        "the file is too large to be read at once",
        file=name,
        expected=f"at most {limit} bytes",
        got=got,
    )


def read_text(path: StrPath, limit: int, *, label: str | None = None, code: str = codes.UNSAFE_HEADER) -> str:
    """Read the content of a regular file that is UTF-8 text.

    Raises:
        FastshardError: as :func:`read_bytes`; ``FS211`` if it is not UTF-8, ``FS316`` if it is a pointer file
            or similar.
    """
    content = read_bytes(path, limit, label=label, code=code)
    # Of an empty one whoever reads it says what it lacks.
    found = _stand_in(label or os.fspath(path), content[:_HEAD], len(content)) if content else None
    if found is not None:
        raise error_for([found])
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FastshardError.of(
            codes.BAD_VALUE,
            f"not UTF-8 text: {error.reason} at byte {error.start}",
            file=label or os.fspath(path),
        ) from None


def read_object(path: StrPath, limit: int) -> dict[str, Any]:
    """Read the JSON object in a regular file.

    Raises:
        FastshardError: as :func:`read_text`; ``FS211`` if it is too large or holds no JSON object.
    """
    content = json_text.value(read_text(path, limit, code=codes.BAD_VALUE), os.fspath(path))
    if not isinstance(content, dict):
        raise FastshardError.of(codes.BAD_VALUE, "not a JSON object", file=os.fspath(path))
    return content


def stand_in(path: StrPath, label: str | None = None) -> Finding | None:
    """Return a finding if a text file is a placeholder instead of the file that its name indicates; else
    None.

    Examples are a Git LFS pointer, a web page, and an empty file.

    Args:
        path: an index, a config or a file of a tokenizer.
        label: how messages name it; default the path.

    Raises:
        FastshardError: as :func:`opened`.
    """
    head = read_bytes(path, _HEAD, label=label, whole=False)
    size = len(head) if len(head) < _HEAD else os.stat(path).st_size  # noqa: PTH116 - takes any path
    return _stand_in(label or os.fspath(path), head, size)


def _stand_in(name: str, head: bytes, size: int) -> Finding | None:
    if size == 0 and not name.endswith(_NEVER_EMPTY):
        return None
    return _core.stand_in(name, head, size)


def same(one: StrPath, other: StrPath) -> bool:
    """Return True if two regular files are the same file or have the same bytes.

    Raises:
        FastshardError: as :func:`opened`.
    """
    with opened(one) as first, opened(other) as second:
        if os.path.sameopenfile(first, second):
            return True
        if os.fstat(first).st_size != os.fstat(second).st_size:
            return False
        try:
            return all(a == b for a, b in zip_longest(_pieces(first), _pieces(second)))
        except OSError as error:
            raise _cannot(error, f"{os.fspath(one)}, {os.fspath(other)}") from None


def replaceable(path: StrPath) -> Path:
    """Resolve the path at which to write a file, an existing regular file or a free name; links are followed.

    Raises:
        FastshardError: ``FS515`` if the path is of another kind; ``FS501`` if its folder is missing.
    """
    if not os.fspath(path):
        raise FastshardError.of(codes.USAGE, "the path is empty", expected="a file to write")
    target = Path(os.path.realpath(path))
    try:
        kind = special(target.lstat().st_mode)
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise FastshardError.of(
                codes.NO_SUCH_PATH, "no such directory", file=str(target.parent)
            ) from None
        return target
    except OSError as error:
        raise _cannot(error, str(path)) from None
    if kind is not None:
        raise error_for([unfit(path, kind, codes.USAGE)])
    return target


def replace(path: Path, pieces: Iterable[str]) -> None:
    """Replace a text file atomically.

    The function writes the text to a temporary file in the same folder, syncs it to disk, and renames it.

    Raises:
        FastshardError: ``FS502``, ``FS503`` or ``FS507``; the old file does not change.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    # Nothing that is there already, no link either, is written to.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(beside, flags, 0o666)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except OSError as error:
        help_ = "choose another file with -o FILE"
        raise error_for([system_finding(error, str(path), "cannot write", help_)]) from None


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk.

    Raises:
        OSError: as the system raises it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: StrPath, text: str) -> None:
    """Append text to a user's file, and create the file if it is missing.

    Raises:
        OSError: as the system raises it.
    """
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(text)


def _pieces(descriptor: int) -> Iterator[bytes]:
    while piece := os.read(descriptor, _PIECE):
        yield piece


def _cannot(error: OSError, name: str) -> FastshardError:
    if error.errno in (errno.ENXIO, errno.ENODEV):
        return error_for([unfit(name, "a socket or device")])
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return FastshardError.of(
            codes.NO_SUCH_PATH, f"cannot read: {error.strerror}", file=name, help=path_help(name)
        )
    return error_for([system_finding(error, name)])


#: Codes for system errors about files.
_OF_SYSTEM = {
    errno.EACCES: codes.PERMISSION,
    errno.EPERM: codes.PERMISSION,
    errno.EROFS: codes.PERMISSION,
    errno.ENOSPC: codes.NO_SPACE,
    errno.EDQUOT: codes.NO_SPACE,
    errno.EMFILE: codes.TOO_MANY_FILES,
    errno.ENFILE: codes.TOO_MANY_FILES,
}


def system_finding(
    error: OSError, name: str | None, doing: str = "cannot read", help: str | None = None
) -> Finding:
    """Convert a system error about a file into a finding.

    If permission to enter a directory is missing, the finding names the directory.

    Args:
        error: the system's error.
        name: how messages name the file.
        doing: the action that failed, for the message.
        help: advice that replaces the advice of the code.
    """
    code = _OF_SYSTEM.get(error.errno or 0, codes.IO)
    path = error.filename if isinstance(error.filename, (str, os.PathLike)) else name
    if code == codes.PERMISSION and path is not None and (folder := closed_folder(path)) is not None:
        return closed(folder)
    return Finding.of(code, f"{doing}: {error.strerror or error}", file=name, help=help)


def closed_folder(path: StrPath) -> str | None:
    """Return the uppermost directory of a path that this user may not enter; None if there is none."""
    for folder in reversed(Path(os.path.abspath(path)).parents):  # noqa: PTH100 - links stay
        if folder.is_dir() and not os.access(
            folder, os.X_OK, effective_ids=os.access in os.supports_effective_ids
        ):
            return os.fspath(folder)
    return None


def check_folder(folder: StrPath) -> Path:
    """Return the path of a folder that must exist.

    Raises:
        FastshardError: ``FS501`` if it is missing, or is not a folder; ``FS514`` for an address of a store.
    """
    check_local(folder)
    path = Path(folder)
    if not os.fspath(folder) or not path.is_dir():
        raise FastshardError.of(
            codes.NO_SUCH_PATH,
            "no such directory",
            file=os.fspath(folder),
            help=path_help(os.fspath(folder)),
        )
    return path


def closed(folder: StrPath) -> Finding:
    """Make the finding for a directory without permission to list or enter it."""
    return Finding.of(
        codes.PERMISSION,
        "this user has no permission to read the directory",
        file=os.fspath(folder),
        expected="permission to list and enter it (r and x)",
        help="check the owner and mode of the directory and of its parents",
    )


def path_help(path: str) -> str:
    """Return advice about a path that does not exist.

    The advice suggests a path in the same folder with a similar name, if there is one.
    """
    folder, name = os.path.split(os.path.normpath(path))
    try:
        near = nearest(name, os.listdir(folder or "."))  # noqa: PTH208 - names, not paths
    except (OSError, ValueError):
        return "check the path"
    if near is None:
        return "check the path"
    return f"check the path; did you mean {os.path.join(folder, near)}?"  # noqa: PTH118
