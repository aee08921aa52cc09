"""Records of downloads from the Hugging Face Hub. The cache and ``--local-dir`` keep digests, so that files
can be checked offline.

source: huggingface_hub file_download.py (blobs named by their etag), _local_folder.py (metadata of
    ``local_dir``)
"""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .. import _core
from . import codes, safe_files
from .errors import FastshardError, Finding
from .listing import Listing
from .records import dataclass
from .regex import compile_when_used
from .thread_pools import stoppable_pool

__all__ = ["Record", "compared", "explain_missing", "records", "unfinished"]

#: SHA-256 of a file in LFS, or SHA-1 of the git blob of another file. Other etags are not digests.
_DIGEST = compile_when_used(r"[0-9a-f]{64}|[0-9a-f]{40}")
#: The folder in which ``--local-dir`` keeps its records.
_LOCAL = Path(".cache", "huggingface", "download")
_FINISH = "finish the download"
_UNFINISHED = ".incomplete"
_PIECE = 1 << 20


@dataclass(frozen=True)
class Record:
    """A file's digest from the Hub, as recorded at the download."""

    #: The file's name in messages, and its path.
    name: str
    path: Path
    #: SHA-256, or SHA-1 of the git blob, by its length.
    digest: str
    #: The command that downloads it again.
    again: str
    #: The record that users must remove if they changed the file on purpose.
    kept_in: Path | None = None
    #: True if the file was modified after its record.
    written_since: bool = False

    @property
    def kind(self) -> str:
        """Kind of the digest."""
        return "sha256" if len(self.digest) == 64 else "git blob sha1"


def records(listing: Listing, files: Iterable[tuple[int, str]]) -> list[Record]:
    """Return the download records of the given files (root and path) that have one."""
    bases = [_local_bases(root) for root in listing.roots]
    found = []
    for root, name in files:
        if root >= len(listing.roots):
            # An adapter's, which was named apart.
            continue
        path = listing.roots[root] / name
        if _core.is_remote(listing.roots[root]):
            continue
        record = _in_cache(path, name) or _in_local(path, name, bases[root])
        if record is not None:
            found.append(record)
    return found


def compared(
    found: Iterable[Record],
    weights: Iterable[Path],
    threads: int,
    report: Callable[[int, int], object] | None = None,
) -> list[Finding]:
    """Compare downloaded files with their records and return findings.

    The result has ``FS308`` for files with a different content, and a warning for text files that were edited
    after the download.

    Args:
        found: records of the files to read.
        weights: paths of files that contain tensors, which nobody edits.
        threads: number of files to read at a time.
        report: called with the number of bytes read so far, and the total.

    Raises:
        FastshardError: if a file cannot be read, ``FS506`` if it changes meanwhile.
    """
    found, tensors = list(found), set(weights)
    if not found:
        return []
    # Of what is opened little is a download.
    import hashlib

    total = sum(record.path.stat().st_size for record in found)
    done = 0

    def read(record: Record) -> str:
        nonlocal done
        with safe_files.opened(record.path, label=record.name) as descriptor:
            before = os.fstat(descriptor)
            if len(record.digest) == 64:
                hasher = hashlib.sha256()
            else:
                hasher = hashlib.sha1(b"blob %d\0" % before.st_size, usedforsecurity=False)
            try:
                while not is_stopped.is_set() and (piece := os.read(descriptor, _PIECE)):
                    hasher.update(piece)
                    done += len(piece)
            except OSError as error:
                raise FastshardError.of(
                    codes.IO, f"cannot read: {error.strerror}", file=record.name
                ) from None
            after = os.fstat(descriptor)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise FastshardError.of(
                codes.SOURCE_CHANGED, "the file changed while it was read", file=record.name
            )
        return hasher.hexdigest()

    findings = []
    with stoppable_pool(threads) as (pool, is_stopped):
        running = [pool.submit(read, record) for record in found]
        for record, one in zip(found, running, strict=True):
            got = one.result()
            if report is not None:
                report(done, total)
            if got != record.digest:
                findings.append(_differs(record, got, record.path in tensors))
    return findings


def _differs(record: Record, got: str, holds_tensors: bool) -> Finding:
    edited = record.written_since and not holds_tensors
    help = "download it again"
    if record.kept_in is not None:
        help = (
            f"move its record away ({record.kept_in}) if the file was changed on purpose; else download it "
            "again"
        )
    return Finding.of(
        codes.HASH,
        "the file was changed after the download"
        if record.written_since
        else "the file differs from the one on the Hub",
        severity="warning" if edited else "error",
        file=record.name,
        expected=f"{record.kind} {record.digest}",
        got=f"{record.kind} {got}",
        help=help,
        run=[record.again],
    )


def _in_cache(path: Path, name: str) -> Record | None:
    """Return the record of a file in the Hub's cache, which links to a blob named by its hash."""
    blob = Path(os.path.realpath(path))
    if blob.parent.name != "blobs" or not _DIGEST.fullmatch(blob.name):
        return None
    if not (blob.parent.parent / "snapshots").is_dir():
        return None
    return Record(name, path, blob.name, _again(path))


def _again(path: Path) -> str:
    """Return the command that downloads a file of the cache again."""
    # models--ORG--NAME/snapshots/REVISION/FILE
    absolute = path.absolute()
    for folder in absolute.parents:
        kind, *parts = folder.parent.parent.name.split("--")
        if folder.parent.name == "snapshots" and parts:
            file = absolute.relative_to(folder).as_posix()
            of = "" if kind == "models" else f" --repo-type {kind.removesuffix('s')}"
            return (
                f"hf download {shlex.quote('/'.join(parts))} {shlex.quote(file)} --revision "
                f"{folder.name}{of} --force-download"
            )
    return f"hf download REPO {shlex.quote(path.name)} --force-download"


def _local_bases(root: Path) -> list[Path]:
    """List the download folders (``hf download --local-dir``) that contain ``root`` or are ``root``."""
    absolute = root.absolute()
    return [base for base in (absolute, *absolute.parents) if (base / _LOCAL).is_dir()]


def _in_local(path: Path, name: str, bases: list[Path]) -> Record | None:
    """Return the record of a file that was downloaded into a folder."""
    for base in bases:
        inside = path.absolute().relative_to(base)
        kept = base / _LOCAL / inside.parent / f"{inside.name}.metadata"
        if not kept.is_file():
            continue
        # Commit, etag and time, a line each; what is none the hub's library passes over too.
        lines = safe_files.read_bytes(kept, 4096, whole=False).split(b"\n")
        with contextlib.suppress(ValueError, IndexError):
            digest, time = lines[1].decode("ascii").strip(), float(lines[2])
            if _DIGEST.fullmatch(digest):
                again = (
                    f"hf download REPO {shlex.quote(inside.as_posix())} --local-dir {shlex.quote(str(base))} "
                    "--force-download"
                )
                # It allows for a second, too.
                since = path.stat().st_mtime - 1 > time
                return Record(name, path, digest, again, kept, since)
    return None


def unfinished(listing: Listing) -> list[Finding]:
    """Return findings about unfinished downloads, for a folder with no other checkpoint."""
    return [
        Finding.of(
            codes.NOT_WEIGHTS,
            "an unfinished download, not weights",
            file=str(path),
            expected="the complete file",
            got=f"{_size(path)} bytes",
            help=_FINISH,
            run=[_finish(root, None)],
        )
        for root in listing.roots
        for path in (*_unfinished_in(root), *sorted(root.glob(f"*{_UNFINISHED}")))
    ]


def explain_missing(listing: Listing, findings: Sequence[Finding]) -> list[Finding]:
    """Explain missing files of an unfinished download, in their findings."""
    if not any(f.code == codes.MISSING_FILE and f.file for f in findings):
        return list(findings)
    return [
        _explain_one(listing, f) if f.code == codes.MISSING_FILE and f.file and f.evidence else f
        for f in findings
    ]


def _explain_one(listing: Listing, finding: Finding) -> Finding:
    name = finding.file or ""
    for root in listing.roots:
        path = root / name
        beside = path.with_name(path.name + _UNFINISHED)
        begun = [beside] if beside.is_file() else _begun(path, _local_bases(root))
        if begun:
            return finding.replace(
                code=codes.NOT_WEIGHTS,
                message="an unfinished download, not weights",
                evidence=None,
                expected="the complete file",
                got=f"{_size(begun[0])} bytes in {begun[0].name}",
                help=_FINISH,
                run=[_finish(root, path)],
            )
        blobs = _unfinished_blobs(root)
        if blobs:
            # Whose it is nothing tells.
            got = f"{blobs[0].name} of {_size(blobs[0])} bytes: an unfinished download"
            return finding.replace(got=got, help=_FINISH, run=[_finish(root, path)])
    return finding


def _begun(path: Path, bases: Iterable[Path]) -> list[Path]:
    """List the partial files of a file's download into a folder."""
    import hashlib

    for base in bases:
        inside = path.absolute().relative_to(base)
        folder = base / _LOCAL / inside.parent
        kept = f"{inside.name}.metadata".encode()
        short = base64.urlsafe_b64encode(hashlib.sha1(kept, usedforsecurity=False).digest()).decode()
        # Versions before 0.26 keep the file's own name.
        begins = (f"{short}.", f"{inside.name}.")
        begun = [p for p in _incomplete(folder) if p.name.startswith(begins)]
        if begun:
            return begun
    return []


def _unfinished_in(root: Path) -> list[Path]:
    blobs = _unfinished_blobs(root)
    folders = [root / _LOCAL, *(p for p in (root / _LOCAL).glob("**/") if p.is_dir())]
    return blobs or [path for folder in dict.fromkeys(folders) for path in _incomplete(folder)]


def _unfinished_blobs(root: Path) -> list[Path]:
    """List unfinished downloads in the hub cache that contains a root."""
    absolute = root.absolute()
    for folder in (absolute, *absolute.parents):
        if folder.parent.name == "snapshots":
            return _incomplete(folder.parent.parent / "blobs")
    return []


def _incomplete(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.name.endswith(_UNFINISHED) and p.is_file())
    except OSError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _finish(root: Path, path: Path | None) -> str:
    """Return the command that resumes an unfinished download."""
    command = _again(path or root / "FILE").removesuffix(" --force-download")
    if path is None:
        command = command.replace(" FILE", "", 1)
    bases = _local_bases(root)
    local = f" --local-dir {shlex.quote(str(root))}" if "REPO" in command and bases else ""
    return f"{command}{local}"
