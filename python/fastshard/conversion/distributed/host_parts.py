"""One host's part of a checkpoint as a separate result, for hosts without shared storage: it is copied and
hashed here, and combined and compared elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import _core
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.manifests import MANIFEST_NAME, Manifest, is_piece, read, run_options
from ...checkpoint.open_checkpoint import open as open_checkpoint
from ...common import codes, memory_budget, safe_files
from ...common.errors import FastshardError, Finding, IncompleteError, from_core
from ...common.gate import Gate
from ...common.listing import File, list_roots
from ...common.options import StrPath, WriteRequest
from ...common.progress import Progress, Report
from ...common.stored_places import is_stored, show_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..._core import RunOptions, WriteSettings
    from ...common.options import Opening

__all__ = ["compared", "copy_local", "settled"]


@memory_budget.kept
def copy_local(
    source: StrPath,
    out: StrPath,
    *,
    memory: str | int | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    fsync: bool = True,
    progress: Report = False,
    **opening: Unpack[Opening],
) -> Manifest:
    """Copies and hashes this host's part of a checkpoint, for hosts without shared storage.

    ``fastshard.merge`` (or ``convert``, ``verify``) of all pieces compares every byte with the bytes that its
    host read, and verifies that the pieces form one checkpoint.

    Args:
        source: directory of the checkpoint, or of the part of it that this host has.
        out: destination directory; must not exist, or be empty, unless ``overwrite``.
        memory: as for :func:`fastshard.convert`.
        threads: threads for reading headers.
        overwrite: replace ``out`` if it exists.
        fsync: sync everything to disk before the result is published.
        progress: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`; if there are several steps, one is chosen.

    Returns:
        The manifest of the piece: its files and their hashes.

    Raises:
        FastshardError: if the directory contains no part of a checkpoint, or cannot be copied; then no result
            is published.

    Examples:
        >>> fastshard.copy_local("run", "part")  # each host copies its own part
        <fastshard.Manifest piece: 0 tensors in 16 files>
        >>> fastshard.verify(["part"]).ok  # the parts of all hosts
        True
    """
    if not isinstance(source, (str, os.PathLike)):
        raise FastshardError.of(
            codes.USAGE,
            "a host part is made from one directory",
            got=repr(source),
            help="make one host part of each directory",
        )
    gate = Gate.of(opening.get("fail_on"), opening.get("error", ()), opening.get("ignore", ()))
    try:
        checkpoint = open_checkpoint(source, threads=threads, **opening)
        listing, taken = checkpoint.listing, _of_it(checkpoint)
    except FastshardError as error:
        # What is not here may be on other hosts: files, what commits them, and what tells several readings
        # apart.
        if not (isinstance(error, IncompleteError) or error.code == codes.AMBIGUOUS):
            raise
        listing = list_roots([source])
        taken = [file for file in listing.files if file.path != MANIFEST_NAME]
    findings = gate.passed(listing.findings)
    root = listing.roots[0]
    files = [(file.path, os.fspath(root / file.path)) for file in taken]
    run = run_options(memory, threads)
    settings: WriteSettings = {
        "threads": run["threads"],
        "memory": run["memory"],
        "publish": WriteRequest.of(overwrite=overwrite, fsync=fsync).to_dict(),
        "gate": gate.to_dict(findings),
    }
    with Progress(progress) as bar:
        try:
            document, found = _core.write_piece(
                files, [os.fspath(root)], os.fspath(out), settings, bar.phase("copying"), bar.tell
            )
        except _core.CoreError as error:
            raise from_core(error) from None
    return Manifest.written(document, found)


def _of_it(checkpoint: Checkpoint) -> list[File]:
    """List the files of the chosen step: all files in and below its folders, and files above them.

    The latter include a tracker file.
    """
    folders = {file.folder for file in checkpoint.opened.files}
    above = {str(parent) for folder in folders for parent in Path(folder).parents} - {"."}
    taken = [
        file
        for file in checkpoint.listing.files
        if "" in folders
        or any(file.folder == folder or file.folder.startswith(folder + "/") for folder in folders)
        or (file.folder == "" or file.folder in above)
    ]
    return [file for file in taken if file.path != MANIFEST_NAME]


def _list_parts(checkpoint: Checkpoint) -> Iterator[tuple[int, Path]]:
    """Yield roots that are pieces, with their manifests."""
    for index, root in enumerate(checkpoint.listing.roots):
        path = root / MANIFEST_NAME
        if safe_files.is_file(path) and is_piece(path):
            yield index, path


def settled(checkpoint: Checkpoint) -> bool:
    """Return True if a checkpoint consists only of pieces, with files at the paths of their hosts."""
    return len(list(_list_parts(checkpoint))) == len(checkpoint.listing.roots)


def compared(checkpoint: Checkpoint, part: tuple[int, int], run: RunOptions, bar: Progress) -> list[Finding]:
    """Report differences between the pieces and the data that their hosts read.

    If several processes see all pieces, the function reads part n of t of them; otherwise it reads the pieces
    on this host.

    Args:
        checkpoint: the checkpoint that consists of the pieces.
        part: n and t: the part of the pieces to read.
        run: options of an engine run.
        bar: shows the progress of reading.

    Raises:
        FastshardError: ``FS518`` for a manifest that cannot be read.
    """
    manifests = dict(_list_parts(checkpoint))
    several = len(checkpoint.listing.roots) > 1
    elsewhere = {
        index
        for index, root in enumerate(checkpoint.listing.roots)
        if _core.is_remote(root) and not is_stored(root)
    }
    phase = bar.phase("comparing the parts") if manifests else None
    findings = [
        Finding.of(
            codes.BAD_MANIFEST,
            "this host part has no manifest, but others have one: nothing states what its host read",
            file=str(root),
            help="copy the manifest from the host that made the part, or make the part again (`fastshard "
            "copy-local`)",
        )
        for index, root in enumerate(checkpoint.listing.roots)
        if manifests and index not in manifests
    ]
    for number, (index, path) in enumerate(manifests.items()):
        others = index in elsewhere if elsewhere else number % part[1] != part[0] - 1
        if others:
            continue
        root = checkpoint.listing.roots[index]
        document: dict[str, Any] = read(path)
        try:
            own = _core.manifest_files(os.fspath(path), [os.fspath(root)], run, phase)
        except _core.CoreError as error:
            raise from_core(error) from None
        named = {file["name"] for file in document["files"]}
        own += [
            Finding.of(
                codes.UNEXPECTED_FILE,
                "the manifest of this host part does not name this file",
                severity="error",
                file=file.path,
                help="make the part again on its host, or remove the file",
            )
            for file in checkpoint.listing.files
            if file.root == index and file.path not in named and file.path != MANIFEST_NAME
        ]
        findings += [
            f.replace(file=show_text(os.fspath(root / f.file))) if several and f.file else f for f in own
        ]
    return findings
