"""What files a checkpoint consists of: names and sizes, no content."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from . import regular
from .errors import FastshardError, Finding, error_for
from .options import StrPath

#: Links of other names are nobody's shard: one that leads nowhere says nothing about the checkpoint.
_RELEVANT = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".distcp",
    ".json",
    ".yml",
    ".yaml",
    ".metadata",
    "latest",
)
#: Names that a checkpoint's readers open, besides: what is no regular file under one of them is missing.
_READ = (
    *_RELEVANT,
    "latest_universal",
    "latest_checkpointed_iteration.txt",
    "_METADATA",
    "_sharding",
    ".zarray",
    ".ocdbt",
    ".model",
    "merges.txt",
)
#: Files that a folder cannot stand in for.
_TEXTS = {
    "config.json",
    "layout.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    ".metadata",
}

#: Files that say something about tensors and hold none: by their names, and by how these end.
_NO_TENSORS = ("latest", "latest_universal", ".metadata", "_METADATA", "_sharding", ".zarray")
_NO_TENSORS_ENDS = (".json", ".md", ".txt", ".yml", ".yaml", ".toml", ".jinja", ".ocdbt")

#: Most files looked at below one root: a checkpoint directory, not a whole disk.
MAX_FILES = 2_000_000

#: `s3://bucket/folder` and the like.
_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://")


@dataclass(frozen=True)
class File:
    """A file of a checkpoint, by its path relative to one of the roots."""

    root: int
    path: str
    size: int

    @property
    def name(self) -> str:
        """Last component of the path."""
        # Called for every file by every adapter: pathlib would take most of the time of opening.
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """Folder relative to the root; empty for the root itself."""
        return self.path.rpartition("/")[0]


@dataclass
class Listing:
    """All files below the roots of one checkpoint; it does not change once it is made."""

    roots: list[Path]
    files: list[File]
    findings: list[Finding] = field(default_factory=list)
    #: Set if CKPT named one file.
    single: bool = False

    def given(self) -> list[str]:
        """The paths of the files, where files were named, else the roots."""
        return (
            [str(self.roots[f.root] / f.path) for f in self.files]
            if self.single
            else [str(r) for r in self.roots]
        )

    @cached_property
    def _by_folder(self) -> dict[str, list[File]]:
        found: dict[str, list[File]] = {}
        for file in self.files:
            found.setdefault(file.folder, []).append(file)
        return found

    @cached_property
    def _by_path(self) -> dict[str, File]:
        return {file.path: file for file in reversed(self.files)}

    def folders(self) -> list[str]:
        """Folders that hold files, shortest first."""
        return sorted(self._by_folder, key=lambda p: (p.count("/"), p))

    def within(self, folder: str) -> list[File]:
        """Files directly in a folder, over all roots, by name."""
        return sorted(self._by_folder.get(folder, []), key=lambda f: (f.name, f.root))

    def find(self, path: str) -> File | None:
        """The file at a relative path, in the first root that has it."""
        return self._by_path.get(path)

    def read_text(self, file: File, limit: int = regular.MAX_TEXT) -> str:
        """Content of a text file of at most ``limit`` bytes.

        Raises:
            FastshardError: if it cannot be read, is too large (``FS601``), or is not UTF-8 (``FS211``).
        """
        return regular.read_text(self.roots[file.root] / file.path, limit, label=file.path)


def is_utf8(name: str) -> bool:
    """False for a name of a file whose bytes are no text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_unprintable(name: str, path: StrPath | None = None) -> None:
    """Names go into plans, manifests and results, all of which are UTF-8; folders above the checkpoint's may have any.

    Args:
        name: the part that goes there.
        path: what the message names; default that.

    Raises:
        FastshardError: ``FS514`` for a name that is not UTF-8.
    """
    if not name.isascii() and not is_utf8(name):
        shown = os.fsencode(name if path is None else path).decode(errors="backslashreplace")
        raise FastshardError.of("FS514", "a name that is not UTF-8", file=shown, help="rename it")


def list_roots(paths: Iterable[StrPath]) -> Listing:
    """Lists the files below each path. A path may name one file.

    Symbolic links are followed where their target lies in one of the roots, or in the ``blobs``
    folder of a Hugging Face cache.

    Raises:
        FastshardError: ``FS501`` if a path does not exist, ``FS502`` if it may not be read, ``FS513``
            for a FIFO, a device or a socket, and for files of which none can hold tensors, ``FS514`` for an address
            of another machine, ``FS515`` for an empty path.
    """
    roots: list[Path] = []
    files: list[File] = []
    findings: list[Finding] = []
    paths = list(paths)
    for path in paths:
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            # An empty one would be the current directory.
            raise FastshardError.of(
                "FS515", "no path of a checkpoint", expected="a folder or a file", got=repr(path)
            )
    if address := next((text for p in paths if _ADDRESS.match(text := os.fspath(p))), None):
        raise FastshardError.of(
            "FS514",
            "addresses are not read yet",
            file=address,
            expected="a path on this machine",
            help="copy the checkpoint here, or mount the store",
        )
    given = [Path(p) for p in paths]
    single = False
    for path in given:
        try:
            status = path.stat()
            is_file = stat.S_ISREG(status.st_mode)
            if stat.S_ISDIR(status.st_mode):
                os.scandir(path).close()
        except FileNotFoundError:
            raise FastshardError.of("FS501", "no such file or directory", file=str(path)) from None
        except PermissionError:
            raise FastshardError.of("FS502", "may not be read", file=str(path)) from None
        except OSError as error:
            raise FastshardError.of("FS507", f"cannot open: {error.strerror}", file=str(path)) from None
        except ValueError as error:
            raise FastshardError.of("FS501", f"no name of a file: {error}", file=str(path)) from None
        if not is_file and not stat.S_ISDIR(status.st_mode):
            raise error_for([regular.unfit(path, regular.special(status.st_mode) or "", "FS513")])
        root = path.parent if is_file else path
        index = len(roots)
        roots.append(root)
        if is_file:
            single = True
            files.append(File(index, path.name, status.st_size))
    if single and all(p.name in _NO_TENSORS or p.name.endswith(_NO_TENSORS_ENDS) for p in given):
        raise FastshardError.of(
            "FS513",
            "this file holds no tensors",
            file=str(given[0]),
            expected="a checkpoint's folder, or a file of its tensors",
            help=f"name the folder that holds it: {given[0].parent}",
        )
    allowed = [r.resolve() for r in roots]
    allowed += [r.resolve().parent.parent / "blobs" for r in roots if r.resolve().parent.name == "snapshots"]
    for index, path in enumerate(given):
        if roots[index] is path:
            _walk(index, path, allowed, files, findings)
    return Listing(roots=roots, files=files, findings=findings, single=single)


def _walk(index: int, root: Path, allowed: list[Path], files: list[File], findings: list[Finding]) -> None:
    def unreadable(error: OSError) -> None:
        findings.append(Finding.of("FS502", "may not be read", file=str(error.filename)))

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        # Staging folders of interrupted runs are nobody's checkpoint.
        subfolders[:] = sorted(d for d in subfolders if ".fastshard-" not in d)
        for name in subfolders:
            if name in _TEXTS:
                full = Path(folder) / name
                findings.append(regular.unfit(full.relative_to(root).as_posix(), "a directory"))
        for name in sorted(names):
            full = Path(folder) / name
            relative = full.relative_to(root).as_posix()
            try:
                if full.is_symlink():
                    target = full.resolve(strict=True)
                    if not any(target.is_relative_to(a) for a in allowed):
                        if not name.endswith(_RELEVANT):
                            continue
                        findings.append(
                            Finding.of(
                                "FS603",
                                "a link that leaves the checkpoint",
                                file=relative,
                                got=str(target),
                                help="name the target's directory as a further CKPT, or copy the file",
                            )
                        )
                        continue
                status = full.stat()
            except (OSError, RuntimeError) as error:
                # Links that lead in a circle are a RuntimeError of pathlib before Python 3.13.
                if full.is_symlink() and not name.endswith(_RELEVANT):
                    continue
                why = (error.strerror if isinstance(error, OSError) else None) or "its links lead in a circle"
                findings.append(Finding.of("FS101", f"cannot be read: {why}", file=relative))
                continue
            kind = regular.special(status.st_mode)
            if kind is not None:
                if name.endswith(_READ):
                    findings.append(regular.unfit(relative, kind))
                continue
            files.append(File(index, relative, status.st_size))
            if len(files) > MAX_FILES:
                raise FastshardError.of(
                    "FS515", f"more than {MAX_FILES} files below {root}: is this a checkpoint?"
                )
