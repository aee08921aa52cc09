"""Search for the missing files of a checkpoint in other folders: other nodes' disks, backups."""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint import manifest_files
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.inspection import inspect
from ..checkpoint.manifests import expected_by, find_manifest, read, run_options
from ..checkpoint.open_checkpoint import CheckpointSource, as_checkpoint
from ..common import codes, memory_budget, safe_files
from ..common.addresses import (
    check_settings,
    is_address,
    make_download_command,
    make_upload_command,
)
from ..common.errors import FastshardError, Finding, from_core
from ..common.formatting import counted, natural, printable, some, without_numbers
from ..common.listing import READABLE_ALONE, is_utf8
from ..common.options import OpenOptions, StrPath
from ..common.records import asdict, dataclass
from ..common.regex import compile_when_used
from ..common.stored_places import is_stored, show_text
from ..common.thread_counts import thread_count
from ..models import tensor_words
from ..sources.step_names import is_step
from .file_pieces import read_pieces

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FileSearch", "MissingFile", "find"]

#: Maximum number of rejected candidates, and of files without a copy, in messages.
_MOST_NAMED = 4
#: The layer number in the name of a file with a single layer.
_LAYER = compile_when_used(r"(?<=layer_)\d+")
#: Evidence that a candidate is the missing file.
_BY_HASH = "its hash matches the manifest"
_BY_SIZE = "name, directory and size match"
_BY_NAME = "name and directory match"


@dataclass(frozen=True)
class MissingFile:
    """A missing file of a checkpoint, and the place where it was found.

    Examples:
        >>> file = fastshard.find("lossy", ["run"]).files[0]
        >>> file.name, file.evidence
        ('global_step0/layer_03-model_01-model_states.pt', 'name and directory match')
    """

    #: Name relative to the checkpoint's directory.
    name: str
    #: Path at which the checkpoint needs it.
    path: str
    #: Path of the file that was found; None if it was not.
    found: str | None = None
    #: Evidence that the file that was found is the missing one.
    evidence: str | None = None
    #: A shell command that copies the file to its place; None if it was not found.
    command: str | None = None
    #: Files with this name but different contents, any of which may be the missing one.
    candidates: tuple[str, ...] = ()
    #: Why there is no command.
    reason: str | None = None


@dataclass(frozen=True)
class FileSearch:
    """The missing files of a checkpoint, and the place where each was found.

    Examples:
        >>> search = fastshard.find("lossy", ["run"])
        >>> [file.name for file in search.files]
        ['global_step0/layer_03-model_01-model_states.pt']
    """

    files: tuple[MissingFile, ...]
    #: Errors for missing files that were not found, and warnings about unreadable folders.
    findings: tuple[Finding, ...]

    @property
    def commands(self) -> list[str]:
        """Shell commands that copy the found files to their destinations."""
        return [file.command for file in self.files if file.command is not None]

    @property
    def complete(self) -> bool:
        """True if all missing files were found."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, without findings (``fastshard find --json``)."""
        return {"files": [asdict(file) for file in self.files], "commands": self.commands}


@memory_budget.kept
def find(
    source: CheckpointSource,
    within: Iterable[StrPath],
    *,
    expect: StrPath | Mapping[str, Any] | None = None,
    memory: str | int | None = None,
    **opening: Unpack[OpenOptions],
) -> FileSearch:
    """Searches for a checkpoint's missing files in other folders, and gives commands that copy them.

    The function copies nothing. It searches for the files that are missing according to the headers, as
    :func:`fastshard.inspect` lists them. A file is accepted if its hash matches a manifest. Without a hash,
    its name, the folders below the step folder and the step's name must match, because files of other ranks
    and steps often have the same name. If several files with different contents match, none is chosen.

    Args:
        source: an opened checkpoint, a path, or several node-local paths; a file goes to the first path.
        within: folders to search, with all folders below them, or their addresses in stores. Links to folders
            are not followed.
        expect: a manifest with the sizes and hashes of the files; default the one next to the checkpoint.
        memory: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Raises:
        FastshardError: if there is no checkpoint at the path, or no folder at one of ``within``.

    Examples:
        >>> search = fastshard.find("lossy", ["run"])
        >>> search.complete, search.commands
        (True, ['cp -p .../layer_03-model_01-model_states.pt ...'])
    """
    settings = check_settings(opening.get("storage_options"))
    folders = [_find_folder(folder, settings) for folder in within]
    expected = expected_by(expect, settings)
    roots, findings = _read_findings(source, expected.opening(dict(opening)), expected.manifest)
    manifest = expected.manifest or find_manifest(roots)
    entries = {} if manifest is None else {file["name"]: file for file in read(manifest)["files"]}
    names, others = _list_missing(findings, roots)
    wanted = {PurePosixPath(name).name for name in names}
    unreadable: list[Finding] = []
    candidates = _list_candidates(folders, wanted, unreadable) if wanted else {}
    run = _Candidates(memory, opening.get("threads"))
    files = tuple(
        _locate(name, roots, entries.get(name, {}), candidates.get(PurePosixPath(name).name, []), run)
        for name in names
    )
    lost = [_not_found(file) for file in files if file.command is None]
    return FileSearch(files, (*lost, *others, *unreadable))


def _find_folder(folder: StrPath, settings: Mapping[str, str]) -> Path:
    """Return the local path of a folder; for an address, the path of its placeholders.

    Raises:
        FastshardError: if there is no such folder.
    """
    if not is_address(folder):
        return safe_files.check_folder(folder)
    from ..stores.placeholders import open_root

    # A file of an upload that has not finished is complete, and may be the missing one.
    return safe_files.check_folder(open_root(folder, settings).path)


def _read_findings(
    source: CheckpointSource, opening: dict[str, Any], manifest: Path | None
) -> tuple[list[Path], list[Finding]]:
    """Read the headers, and return the roots and the findings.

    A checkpoint that cannot be opened because files are missing has findings too.

    Raises:
        FastshardError: if it cannot be opened for a reason other than missing files.
    """
    try:
        checkpoint = as_checkpoint(source, **opening)
        findings = list(inspect(checkpoint).findings)
    except FastshardError as error:
        if isinstance(source, Checkpoint) or not any(f.is_a("missing_file") for f in error.findings):
            raise
        paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
        return [path if path.is_dir() else path.parent for path in map(Path, paths)], error.findings
    if manifest is not None:
        known = {file for finding in findings for file in finding.files}
        new = manifest_files.find_missing(manifest, read(manifest), checkpoint)
        findings += [finding for finding in new if finding.file not in known]
    return [Path(root) for root in checkpoint.roots], findings


def _list_missing(findings: Iterable[Finding], roots: Sequence[Path]) -> tuple[list[str], list[Finding]]:
    """List the names of missing files, and the errors about anything else that is missing."""
    names: dict[str, None] = {}
    others: list[Finding] = []
    for finding in findings:
        if finding.severity != "error":
            continue
        files = finding.files if finding.is_a("missing_file") else ()
        if finding.code == codes.MISSING_LAYER and finding.file:
            files = tuple(_list_layer_files(finding, roots))
        # A link that leads nowhere is there, and to be mended there.
        new = [name for name in files if not any(os.path.lexists(root / name) for root in roots)]
        names.update(dict.fromkeys(new))
        counts_more = finding.is_a("missing_file") and (finding.count or 0) > len(finding.files)
        if finding.is_a("missing_file", "missing_tensor", "incomplete") and (not new or counts_more):
            others.append(finding)
    return sorted(names, key=natural), others


def _list_layer_files(finding: Finding, roots: Sequence[Path]) -> Iterator[str]:
    """List the files of missing layers, by replacing the number in another layer's file names."""
    assert finding.file is not None
    yield finding.file
    folder, _, name = finding.file.rpartition("/")
    number = _LAYER.search(name)
    if number is None or finding.layers is None:
        return
    ranks: set[str] = set()
    for root in roots:
        if (root / folder).is_dir():
            entries = os.listdir(root / folder)  # noqa: PTH208 - names, not paths
            ranks |= {
                _LAYER.sub("{}", entry, count=1)
                for entry in entries
                if without_numbers(entry) == without_numbers(name)
            }
    for layer in finding.layers:
        for rank in ranks:
            file = rank.format(f"{layer:0{len(number[0])}d}")
            yield f"{folder}/{file}" if folder else file


def _list_candidates(
    folders: Iterable[Path], wanted: set[str], findings: list[Finding]
) -> dict[str, list[Path]]:
    """List regular files with the wanted names below the folders, by name."""

    def unreadable(error: OSError) -> None:
        finding = safe_files.closed(error.filename) if isinstance(error, PermissionError) else None
        finding = finding or safe_files.system_finding(error, str(error.filename), "cannot be listed")
        findings.append(finding.replace(severity="warning"))

    found: dict[str, list[Path]] = {}
    for top in folders:
        for folder, subfolders, names in os.walk(top.absolute(), onerror=unreadable):
            # Staging folders of interrupted runs hold nobody's files.
            subfolders[:] = sorted(name for name in subfolders if ".fastshard-" not in name)
            for name in sorted(wanted.intersection(names)):
                path = Path(folder, name)
                try:
                    status = path.stat()
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode) and status.st_size and path not in found.get(name, ()):
                    found.setdefault(name, []).append(path)
    return found


class _Candidates:
    """A reader of candidate files: their hashes, of the kinds that the manifest has, and their headers."""

    def __init__(self, memory: str | int | None, threads: int | None) -> None:
        self._memory, self._threads = memory, threads

    def has_hash(self, path: Path, entry: Mapping[str, Any]) -> bool | None:
        """Return True if a file has the hash of an entry; None if the entry has none that can be computed."""
        try:
            if isinstance(entry.get("blake3"), str):
                return _hash(path) == str(entry["blake3"])
            if not isinstance(entry.get("identity"), str) or not path.name.endswith(READABLE_ALONE):
                return None
            catalog = self._open(path)
            run = {**run_options(self._memory, self._threads, catalog), "stats": "nothing"}
            text, findings = catalog.inventory(run, None)  # type: ignore[arg-type]
        except _core.CoreError as error:
            raise from_core(error) from None
        hashes = [file.get("identity") for file in json.loads(text)["files"]]
        is_damaged = any(finding.severity == "error" for finding in findings)
        return hashes == [str(entry["identity"])] and not is_damaged

    def check_header(self, path: Path) -> None:
        """Read the header of a tensor file that can be read independently.

        Raises:
            FastshardError: if it cannot be read: the file is truncated, or is of another kind.
        """
        if not path.name.endswith(READABLE_ALONE):
            return
        try:
            findings = self._open(path).findings()
        except _core.CoreError as error:
            raise from_core(error) from None
        errors = [finding for finding in findings if finding.severity == "error"]
        if errors:
            raise FastshardError(errors)

    def _open(self, path: Path) -> _core.Catalog:
        return _core.Catalog(
            [os.fspath(path.parent)],
            [(0, path.name)],
            thread_count(self._threads),
            {},
            {},
            memory_budget.get_limit(),
            tensor_words.declared(),
        )


def _locate(
    name: str, roots: Sequence[Path], entry: Mapping[str, Any], candidates: Iterable[Path], run: _Candidates
) -> MissingFile:
    """Choose the candidate that matches a missing file, and make the command that copies it."""
    root = next((root for root in roots if (root / name).parent.is_dir()), roots[0])
    path = Path(os.path.abspath(root / name))  # noqa: PTH100 - links stay
    place = MissingFile(name, show_text(os.fspath(path)))
    if why := _refuse_place(name, path, root):
        return MissingFile(name, place.path, reason=why)
    fitting, rejected = [], []
    # Those in the right folder come first: of the others each is hashed.
    for candidate in sorted(candidates, key=lambda c: (_misfit(c, name, path) is not None, natural(str(c)))):
        try:
            why, has_hash = _check(candidate, name, path, entry, run)
        except FastshardError as error:
            why, has_hash = error.findings[0].message, False
        if why is None and has_hash:
            return _bring(place, path, candidate, _BY_HASH)
        if why is None:
            fitting.append(candidate)
        else:
            rejected.append(show_text(f"{candidate}: {why}"))
    if not fitting:
        reason = some(rejected, _MOST_NAMED) if rejected else "no file with this name is in the directories"
        return MissingFile(name, place.path, reason=reason)
    if differing := [other for other in fitting[1:] if not _is_same(fitting[0], other)]:
        several = tuple(show_text(os.fspath(one)) for one in (fitting[0], *differing))
        reason = f"{len(several)} files match, and their contents differ: {some(several, _MOST_NAMED)}"
        return MissingFile(name, place.path, candidates=several, reason=reason)
    return _bring(place, path, fitting[0], _BY_SIZE if "size" in entry else _BY_NAME)


def _is_same(one: Path, other: Path) -> bool:
    """Return True if two files have the same bytes, wherever they are."""
    if not is_stored(one) and not is_stored(other):
        return safe_files.same(one, other)
    return one.stat().st_size == other.stat().st_size and _hash(one) == _hash(other)


def _hash(path: Path) -> str:
    """Compute the BLAKE3 digest of a file, wherever it is."""
    if not is_stored(path):
        return safe_files.digest(path)
    hasher = _core.Hasher()
    for piece in read_pieces(path):
        hasher.update(piece)
    return hasher.hexdigest()


def _check(
    candidate: Path, name: str, path: Path, entry: Mapping[str, Any], run: _Candidates
) -> tuple[str | None, bool]:
    """Return the reason why a candidate is not the missing file, and whether its hash proves that it is."""
    size = candidate.stat().st_size
    if entry.get("size") not in (None, size):
        return f"{size} bytes instead of {entry['size']}", False
    if not is_utf8(os.fspath(candidate)) or not os.fspath(candidate).isprintable():
        return "its path cannot be written in a command", False
    has_hash = run.has_hash(candidate, entry)
    if has_hash is not None:
        return None if has_hash else "its hash differs from the manifest", has_hash
    if (why := _misfit(candidate, name, path)) is None:
        run.check_header(candidate)
    return why, False


def _misfit(candidate: Path, name: str, path: Path) -> str | None:
    """Return why a candidate's folders show that it is another file, or prove too little; None if they match.

    The step and the path below it must be the same. Without a step, the complete path must be the same.
    """
    step, below = _split_at_step(path)
    other, _ = _split_at_step(candidate)
    below = below if step is not None else PurePosixPath(name).parts
    # A folder that is a number may be a job's; it is a step only beside another one.
    if step is None and other is not None and other.isdecimal():
        other = None
    if other != step:
        return f"it is of step {other}" if other is not None else f"nothing shows that it is of step {step}"
    if candidate.parts[-len(below) :] != below:
        return f"nothing shows that it is {'/'.join(below)}"
    return None


def _split_at_step(path: Path) -> tuple[str | None, tuple[str, ...]]:
    """Return the last folder in a path with a step's name, and the parts below it."""
    parts = path.parts
    at = next((at for at in reversed(range(len(parts) - 1)) if is_step(parts[at])), None)
    return (None, parts) if at is None else (parts[at], parts[at + 1 :])


def _refuse_place(name: str, path: Path, root: Path) -> str | None:
    """Return why no command may write a missing file; None if its name and folders stay within the root."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.name:
        return "its name points outside the checkpoint"
    if not is_utf8(os.fspath(path)) or not os.fspath(path).isprintable():
        return "its name cannot be written in a command"
    real = Path(os.path.realpath(root))
    return (
        None
        if Path(os.path.realpath(path)).is_relative_to(real)
        else ("a link points outside the checkpoint")
    )


def _bring(place: MissingFile, path: Path, source: Path, evidence: str) -> MissingFile:
    """Make the command that copies a file to its destination, ``path``."""
    found, folder = show_text(os.fspath(source)), path.parent
    if is_stored(folder):
        command = make_upload_command(found, place.path)
    else:
        command = (
            make_download_command(found, place.path)
            if is_stored(source)
            else shlex.join(["cp", "-p", found, place.path])
        )
        if not folder.is_dir():
            command = f"{shlex.join(['mkdir', '-p', os.fspath(folder)])} && {command}"
    return MissingFile(place.name, place.path, found, evidence, command)


def _not_found(file: MissingFile) -> Finding:
    return Finding.of(
        codes.MISSING_FILE,
        "several files match this missing file"
        if file.candidates
        else "the file is missing, and no file that was found matches",
        file=file.name,
        got=printable(file.reason or ""),
        help="choose one of them, or pass a manifest with hashes (--expect)"
        if file.candidates
        else "name more directories to search (--in)",
    )


def describe(search: FileSearch) -> str:
    """Describe in a few words how much was found."""
    if not search.files:
        return "the headers show no missing file"
    found = sum(file.command is not None for file in search.files)
    return f"{found} of {counted(len(search.files), 'missing file')} found"
