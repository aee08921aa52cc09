"""What files a checkpoint consists of: names and sizes, no content."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .errors import FastshardError, Finding

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

#: Most files looked at below one root: a checkpoint directory, not a whole disk.
MAX_FILES = 2_000_000

StrPath = str | os.PathLike[str]


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
    """All files below the roots of one checkpoint."""

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

    def folders(self) -> list[str]:
        """Folders that hold files, shortest first."""
        return sorted({f.folder for f in self.files}, key=lambda p: (p.count("/"), p))

    def within(self, folder: str) -> list[File]:
        """Files directly in a folder, over all roots, by name."""
        return sorted((f for f in self.files if f.folder == folder), key=lambda f: (f.name, f.root))

    def find(self, path: str) -> File | None:
        """The file at a relative path, in the first root that has it."""
        return next((f for f in self.files if f.path == path), None)

    def read_text(self, file: File, limit: int = 64 << 20) -> str:
        """Content of a small text file.

        Raises:
            FastshardError: if it cannot be read, is too large, or is not UTF-8.
        """
        full = self.roots[file.root] / file.path
        if file.size > limit:
            raise FastshardError.of("FS601", f"a text file of {file.size} bytes", file=file.path)
        try:
            return full.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FastshardError.of("FS507", f"cannot read: {error}", file=file.path) from None


def list_roots(paths: Iterable[StrPath]) -> Listing:
    """Lists the files below each path. A path may name one file.

    Symbolic links are followed where their target lies in one of the roots, or in the ``blobs``
    folder of a Hugging Face cache.

    Raises:
        FastshardError: ``FS501`` if a path does not exist, ``FS502`` if it may not be read.
    """
    roots: list[Path] = []
    files: list[File] = []
    findings: list[Finding] = []
    given = [Path(p) for p in paths]
    single = False
    for path in given:
        try:
            is_file = path.is_file()
            if not is_file:
                os.scandir(path).close()
        except FileNotFoundError:
            raise FastshardError.of("FS501", "no such file or directory", file=str(path)) from None
        except PermissionError:
            raise FastshardError.of("FS502", "may not be read", file=str(path)) from None
        except OSError as error:
            raise FastshardError.of("FS507", f"cannot open: {error.strerror}", file=str(path)) from None
        root = path.parent if is_file else path
        index = len(roots)
        roots.append(root)
        if is_file:
            single = True
            files.append(File(index, path.name, path.stat().st_size))
    allowed = [r.resolve() for r in roots]
    allowed += [r.resolve().parent.parent / "blobs" for r in roots if r.resolve().parent.name == "snapshots"]
    for index, path in enumerate(given):
        if not path.is_file():
            _walk(index, roots[index], allowed, files, findings)
    return Listing(roots=roots, files=files, findings=findings, single=single)


def _walk(index: int, root: Path, allowed: list[Path], files: list[File], findings: list[Finding]) -> None:
    def unreadable(error: OSError) -> None:
        findings.append(Finding.of("FS502", "may not be read", file=str(error.filename)))

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        # Staging folders of interrupted runs are nobody's checkpoint.
        subfolders[:] = sorted(d for d in subfolders if ".fastshard-" not in d)
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
                size = full.stat().st_size
            except OSError as error:
                if full.is_symlink() and not name.endswith(_RELEVANT):
                    continue
                findings.append(Finding.of("FS101", f"cannot be read: {error.strerror}", file=relative))
                continue
            files.append(File(index, relative, size))
            if len(files) > MAX_FILES:
                raise FastshardError.of(
                    "FS515", f"more than {MAX_FILES} files below {root}: is this a checkpoint?"
                )
