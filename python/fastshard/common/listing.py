"""The files of a checkpoint: names and sizes, without content."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from . import codes, file_digests, safe_files
from .addresses import find_scheme, refuse_address
from .errors import FastshardError, Finding, error_for
from .options import StrPath
from .records import dataclass, field
from .regex import compile_when_used
from .stored_places import show_text

#: Suffixes of tensor files that can be read independently of other files.
READABLE_ALONE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
#: Suffixes of all tensor files. Chunks of an array store have no suffix.
_WEIGHTS = (*READABLE_ALONE, ".distcp")
#: Names of links that matter. A dangling link with another name is not a shard and does not affect the
#: checkpoint. A trainer's ``last.ckpt`` may link to a file that the trainer has since deleted.
_RELEVANT = (
    *(ending for ending in _WEIGHTS if ending != ".ckpt"),
    ".json",
    ".yml",
    ".yaml",
    ".metadata",
    "latest",
)
#: Other names that a checkpoint's readers open. Anything except a regular file with one of these names counts
#: as missing.
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
#: Names that must be files: a folder with one of them is an error.
_TEXTS = {
    "config.json",
    "layout.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    ".metadata",
}

#: Names that identify the folder of an array in a store.
_ARRAY = (".zarray", "zarr.json")

#: Names that identify the folder of all arrays of a store.
_STORE = ("_METADATA", "manifest.ocdbt")

#: Names and suffixes of files that describe tensors but contain none.
_NO_TENSORS = ("latest", "latest_universal", ".metadata", "_METADATA", "_sharding", ".zarray")
_NO_TENSORS_ENDS = (".json", ".md", ".txt", ".yml", ".yaml", ".toml", ".jinja", ".ocdbt")


#: Maximum number of files below one root, which must be a checkpoint directory and not an entire disk.
MAX_FILES = 2_000_000

#: Prefixes of names of files with other trainer state.
# source: transformers trainer.py, accelerate utils/constants.py, torchtitan and LLaMA-Factory checkpoints
_SIDE_STATE = (
    "rng_state",
    "random_states",
    "training_args",
    "optimizer",
    "optim",
    "scheduler",
    "scaler",
    "sampler",
    "dataloader",
    "extra_state",
    "trainer_state",
    "common",
    "dl_state",
)

#: `ORG/MODEL`.
# source: huggingface_hub utils/_validators.py
#: A path on another host, in the form of ssh and rsync.
_REMOTE = compile_when_used(r"(?P<host>(?:[\w.-]+@)?[A-Za-z0-9][\w.-]*):(?P<path>/?[^:]*[^:/]+/?)")
_HUB_ID = compile_when_used(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
#: The address of a store after conversion to a path, which drops a slash.
_ONE_SLASH = compile_when_used(r"(s3|gs|hf|https?):/[^/]")


def holds_weights(name: str) -> bool:
    """Return True if a file's name indicates that it contains weights and not other trainer state."""
    return name.endswith(_WEIGHTS) and not name.startswith(_SIDE_STATE)


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
    """All files below the roots of one checkpoint; a listing does not change."""

    roots: list[Path]
    files: list[File]
    findings: list[Finding] = field(default_factory=list)
    #: True if the caller named exactly one file. Several files are parts of one checkpoint, like several
    #: folders.
    single: bool = False
    #: The file or folder that the caller named, for each root.
    named: list[Path] = field(default_factory=list)
    #: Folders to which links may lead: the roots, and the blobs of a Hugging Face cache.
    links_within: tuple[Path, ...] = ()
    #: Digests of the small files that were read from it, by absolute path.
    digests: dict[str, str] = field(default_factory=file_digests.current, repr=False, compare=False)

    def given(self) -> list[str]:
        """List the paths that the caller named: folders and files."""
        return [str(path) for path in self.named or self.roots]

    def by_itself(self, root: int) -> Path | None:
        """Return the file that the caller named; None for a root that the caller named as a folder."""
        path = self.named[root] if self.named else self.roots[root]
        return None if path is self.roots[root] else path

    @cached_property
    def closed(self) -> list[Finding]:
        """Findings about directories without read permission."""
        return [finding for finding in self.findings if finding.code == codes.PERMISSION]

    def without_hidden(self, findings: Iterable[Finding]) -> list[Finding]:
        """Drop findings that are only consequences of an unreadable directory.

        Files in such a directory are not missing, and a save with unreadable parts is not unfinished.
        """
        closed = [finding.file for finding in self.closed if finding.file]

        def is_hidden(file: str) -> bool:
            return any((root / file).is_relative_to(folder) for root in self.roots for folder in closed)

        def follows(finding: Finding) -> bool:
            if finding.code == codes.MISSING_FILE:
                return any(finding.files) and all(map(is_hidden, finding.files))
            return finding.is_a("nothing_found") and bool(closed)

        return [finding for finding in findings if finding.severity != "error" or not follows(finding)]

    @cached_property
    def _by_folder(self) -> dict[str, list[File]]:
        found: dict[str, list[File]] = {}
        for file in self.files:
            found.setdefault(file.folder, []).append(file)
        return found

    @cached_property
    def _places(self) -> set[tuple[int, str]]:
        return {(file.root, file.path) for file in self.files}

    @cached_property
    def folders_named(self) -> dict[Path, list[int]]:
        """Maps paths of roots that the caller named as folders to their numbers."""
        found: dict[Path, list[int]] = {}
        for index, root in enumerate(self.roots):
            if self.by_itself(index) is None:
                found.setdefault(root, []).append(index)
        return found

    @cached_property
    def _by_path(self) -> dict[str, File]:
        return {file.path: file for file in reversed(self.files)}

    def folders(self) -> list[str]:
        """List folders that contain files, shortest paths first."""
        return sorted(self._by_folder, key=lambda p: (p.count("/"), p))

    def within(self, folder: str) -> list[File]:
        """List the files directly in a folder, in all roots, by name."""
        return sorted(self._by_folder.get(folder, []), key=lambda f: (f.name, f.root))

    def find(self, path: str) -> File | None:
        """Return the file at a relative path, in the first root that has it."""
        return self._by_path.get(path)

    def has(self, root: int, path: str) -> bool:
        """Return True if a root has a file at a relative path."""
        return (root, path) in self._places

    def read_text(self, file: File, limit: int = safe_files.MAX_TEXT) -> str:
        """Read the content of a text file of at most ``limit`` bytes.

        Raises:
            FastshardError: if it cannot be read, is too large (``FS601``), or is not UTF-8 (``FS211``).
        """
        return safe_files.read_text(self.roots[file.root] / file.path, limit, label=file.path)


@dataclass(frozen=True)
class Folder:
    """A folder to search for files that accompany a model, and the folders to which its links may lead.

    The user is responsible for a folder that the user named, and for folders inside it: a link that leaves it
    is an error, as for weights. Any other folder, above or next to the named path, may belong to someone
    else. A file there is used only if nobody except the user, the administrator and the owner of the named
    path can have put it there; otherwise it is skipped.
    """

    path: Path
    #: Folders to which links may lead.
    within: tuple[Path, ...]
    #: For a folder that the user did not name: the named path that it is above or next to.
    beside: Path | None = None
    #: True if placeholder files in it have already been reported.
    sifted: bool = False

    @classmethod
    def named(cls, path: Path) -> Folder:
        """Make a folder from a path that the caller named."""
        return cls(path, linked(path))

    def file(self, name: str) -> Path | None:
        """Return the file with this name; None if it does not exist, or is skipped.

        Raises:
            FastshardError: ``FS601`` if the name is not that of a file, ``FS603`` for a link that leaves the
                folder, ``FS316`` for a pointer file, e.g. of Git LFS.
        """
        path = self.path / name
        if is_array(path) or (self.beside is not None and self._why_not(path) is not None):
            return None
        if not safe_files.is_file(path):
            return None
        if self.beside is None and not _is_within(real := _real(path), self.within):
            help = "copy the file there if you want to use it, or pass it explicitly (--tokenizer, --config)"
            raise error_for([_leaves(os.fspath(path), real).replace(help=help)])
        if (other := safe_files.stand_in(path)) is not None:
            if self.sifted:
                return None
            raise error_for([other])
        return path

    def has(self, path: StrPath) -> bool:
        """Return True if a path is in this folder or below it."""
        return Path(path).is_relative_to(self.path)

    def check_opened(self, path: StrPath, descriptor: int) -> None:
        """Check that an open file satisfies the folder's rule for links, even if its path has changed
        meanwhile.

        Raises:
            FastshardError: ``FS603`` for a link that leaves the folder, ``FS506`` if the path leads to a
                different file than the open one.
        """
        real = _real(Path(path))
        reason = self._why_not(Path(path)) if self.beside is not None else None
        if reason is not None or (self.beside is None and not _is_within(real, self.within)):
            raise error_for([_leaves(os.fspath(path), real)])
        try:
            is_same = os.path.samestat(real.stat(), os.fstat(descriptor))
        except OSError:
            is_same = False
        if not is_same:
            raise FastshardError.of(
                codes.SOURCE_CHANGED,
                "the file was replaced while it was opened",
                file=os.fspath(path),
                help="run the command again once nothing writes to the checkpoint",
            )

    def names(self) -> list[str]:
        """List the names in the folder, in order; an empty list if the folder cannot be read."""
        try:
            return sorted(os.listdir(self.path))  # noqa: PTH208 - names, not paths
        except OSError:
            return []

    def why_not(self, name: str) -> str | None:
        """Return the reason why the file with this name is skipped; None if it is not, or does not exist."""
        path = self.path / name
        return self._why_not(path) if self.beside is not None and path.is_file() else None

    def _why_not(self, path: Path) -> str | None:
        assert self.beside is not None, "a path from the command line is the user's choice"
        real, top = _real(path), _real(self.beside.absolute().parent)
        if not _is_within(real, (*self.within, top)):
            return "a link to it leaves its directory"
        try:
            owners = {0, os.geteuid(), self.beside.stat().st_uid}
            between = [folder for folder in real.parents if folder.is_relative_to(top)]
            for folder in {top, *between}:
                status = folder.stat()
                if status.st_mode & stat.S_IWOTH:
                    return f"every user may write to {folder}"
                if status.st_uid not in owners:
                    return f"{folder} is owned by another user"
        except OSError as error:
            return f"its directory cannot be read: {error.strerror}"
        return None


def linked(root: Path) -> tuple[Path, ...]:
    """List the folders to which links in a folder may lead.

    These are the folder itself, and the blobs of the Hugging Face cache that contains it.
    """
    real = root.resolve()
    # snapshots/REVISION/... beside blobs/. source: huggingface_hub file_download.py
    snapshots = next(
        (folder.parent for folder in (real, *real.parents) if folder.parent.name == "snapshots"), None
    )
    return (real,) if snapshots is None else (real, snapshots.parent / "blobs")


def is_array(folder: Path) -> bool:
    """Return True if a folder contains an array of a store.

    An array's folder may have the name of a file of any format.
    """
    return any((folder / name).is_file() for name in _ARRAY)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_within(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _leaves(file: str, target: Path) -> Finding:
    return Finding.of(
        codes.UNSAFE_PATH,
        "the link leaves the checkpoint",
        file=file,
        expected="a link that stays inside the directories given, or in a Hugging Face cache",
        got=str(target),
        help="name the directory of the link's target as another CKPT, or copy the file",
    )


def is_utf8(name: str) -> bool:
    """Return True if a file's name is valid UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_unprintable(name: str, path: StrPath | None = None) -> None:
    """Refuse a name that is not UTF-8.

    Names go into plans, manifests and results, all of which are UTF-8. Folders above the checkpoint may have
    any name.

    Args:
        name: the part of the path that is written to them.
        path: path that the message names; default ``name``.

    Raises:
        FastshardError: ``FS514`` for a name that is not UTF-8.
    """
    if not name.isascii() and not is_utf8(name):
        shown = os.fsencode(name if path is None else path).decode(errors="backslashreplace")
        raise FastshardError.of(
            codes.UNSUPPORTED, "the name is not UTF-8", file=shown, help="rename the file"
        )


def list_roots(paths: Iterable[StrPath]) -> Listing:
    """List the files below each path; a path may be one file.

    Symbolic links are followed if their target is in one of the roots, or in the ``blobs`` folder of a
    Hugging Face cache.

    Raises:
        FastshardError: ``FS501`` if a path does not exist, ``FS502`` without read permission, ``FS513`` for a
            FIFO, a device or a socket, and if none of the files can contain tensors, ``FS514`` for an address
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
                codes.USAGE,
                "this is not the path of a checkpoint",
                expected="a directory or a file",
                got=repr(path),
            )
    if address := next((os.fspath(path) for path in paths if find_scheme(path)), None):
        raise refuse_address(address)
    given = [Path(p) for p in paths]
    files_named = 0
    for path in given:
        try:
            status = path.stat()
            is_file = stat.S_ISREG(status.st_mode)
            if stat.S_ISDIR(status.st_mode):
                os.scandir(path).close()
        except FileNotFoundError:
            raise _missing(path) from None
        except PermissionError:
            raise error_for([safe_files.closed(safe_files.closed_folder(path) or path)]) from None
        except OSError as error:
            raise FastshardError.of(codes.IO, f"cannot open: {error.strerror}", file=str(path)) from None
        except ValueError as error:
            raise FastshardError.of(codes.NO_SUCH_PATH, f"not a file name: {error}", file=str(path)) from None
        if not is_file and not stat.S_ISDIR(status.st_mode):
            raise error_for(
                [safe_files.unfit(path, safe_files.special(status.st_mode) or "", codes.NOT_A_CHECKPOINT)]
            )
        root = path.parent if is_file else path
        index = len(roots)
        roots.append(root)
        if is_file:
            files_named += 1
            files.append(File(index, path.name, status.st_size))
    if files_named == len(given) and all(
        p.name in _NO_TENSORS or p.name.endswith(_NO_TENSORS_ENDS) for p in given
    ):
        raise FastshardError.of(
            codes.NOT_A_CHECKPOINT,
            "this file holds no tensors",
            file=str(given[0]),
            expected="a checkpoint directory, or a file with its tensors",
            help=f"name the directory that holds it: {show_text(os.fspath(given[0].parent))}",
        )
    within = tuple(dict.fromkeys(folder for root in roots for folder in linked(root)))
    for index, path in enumerate(given):
        if roots[index] is path:
            _walk(index, path, within, files, findings)
    return Listing(roots, files, findings, files_named == len(given) == 1, given, within)


def _missing(path: Path) -> FastshardError:
    """Make the error for a path that does not exist, which may be the name of a repository on the Hub."""
    help_, run = safe_files.path_help(os.fspath(path)), []
    if (address := _ONE_SLASH.match(os.fspath(path))) is not None:
        # What pathlib makes of an address.
        help_ = f"pass the address as text, with two slashes: {address[1]}://..."
    elif (remote := _REMOTE.fullmatch(os.fspath(path))) is not None:
        name = remote["path"].rstrip("/").rpartition("/")[2] or "run"
        help_ = "copy the checkpoint from that host first, or run fastshard there"
        run = [shlex.join(["rsync", "-a", f"{remote['host']}:{remote['path'].rstrip('/')}/", f"{name}/"])]
    elif _HUB_ID.fullmatch(os.fspath(path)) and not path.parent.exists():
        help_ = "pass its address if it is a repository of the Hub"
        run = [f"fastshard inspect hf://{path}"]
    return FastshardError.of(
        codes.NO_SUCH_PATH, "no such file or directory", file=str(path), help=help_, run=run
    )


def _may_enter(folder: str) -> bool:
    return os.access(folder, os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def _walk(
    index: int, root: Path, within: tuple[Path, ...], files: list[File], findings: list[Finding]
) -> None:
    def unreadable(error: OSError) -> None:
        if isinstance(error, PermissionError):
            findings.append(safe_files.closed(error.filename))
        else:
            findings.append(safe_files.system_finding(error, str(error.filename), "cannot be listed"))

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        if (subfolders or names) and not _may_enter(folder):
            # Names can be listed there, and nothing else.
            findings.append(safe_files.closed(folder))
            subfolders.clear()
            continue
        # Staging folders of interrupted runs are nobody's checkpoint.
        subfolders[:] = sorted(d for d in subfolders if ".fastshard-" not in d)
        for name in subfolders:
            full = Path(folder) / name
            if name in _TEXTS and not is_array(full):
                findings.append(safe_files.unfit(full.relative_to(root).as_posix(), "a directory"))
        for name in sorted(names):
            full = Path(folder) / name
            relative = full.relative_to(root).as_posix()
            try:
                if full.is_symlink():
                    target = full.resolve(strict=True)
                    if not _is_within(target, within):
                        # What goes along under another name is looked at where it is taken.
                        if name.endswith(_RELEVANT):
                            findings.append(_leaves(relative, target))
                        continue
                status = full.stat()
            except (OSError, RuntimeError) as error:
                # Links that lead in a circle are a RuntimeError of pathlib before Python 3.13.
                if full.is_symlink() and not name.endswith(_RELEVANT):
                    continue
                why = (error.strerror if isinstance(error, OSError) else None) or "its links form a loop"
                findings.append(Finding.of(codes.MISSING_FILE, f"cannot be read: {why}", file=relative))
                continue
            kind = safe_files.special(status.st_mode)
            if kind is not None:
                if name.endswith(_READ):
                    findings.append(safe_files.unfit(relative, kind))
                continue
            files.append(File(index, relative, status.st_size))
            if len(files) > MAX_FILES:
                raise FastshardError.of(
                    codes.USAGE, f"more than {MAX_FILES} files below {root}: is this a checkpoint?"
                )


def store_of(path: str) -> str:
    """Return the folder of an array store for the file that identifies it; other files keep their path.

    >>> store_of("4000/items/manifest.ocdbt"), store_of("state/w/.zarray"), store_of("model.bin")
    ('4000/items', 'state', 'model.bin')
    """
    folder, _, name = path.rpartition("/")
    if name in _STORE:
        return folder
    return folder.rpartition("/")[0] if name in _ARRAY else path
