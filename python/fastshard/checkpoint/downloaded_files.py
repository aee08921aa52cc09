"""A checkpoint's files against the hashes that the Hub's cache, or ``--local-dir``, keeps of a download."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from .. import _core
from ..common import codes, hub_downloads
from ..common.errors import Finding
from ..common.formatting import counted
from ..common.records import dataclass
from . import manifest_files

if TYPE_CHECKING:
    from ..common.hub_downloads import Record
    from ..common.progress import Progress
    from .checkpoint import Checkpoint

__all__ = ["Downloaded", "compare_download", "compare_files", "find_unchecked"]


@dataclass(frozen=True)
class Downloaded:
    """Files that were compared with what was downloaded."""

    #: Files with a record, those that hold tensors among them, and all that hold tensors.
    files: int
    tensors: int
    of: int

    @property
    def is_whole(self) -> bool:
        """True if each file of tensors has its record."""
        return self.tensors == self.of > 0

    def describe(self) -> str:
        """Says it in words."""
        of = "" if self.is_whole else f", {self.tensors} of {counted(self.of, 'file')} of tensors among them"
        return f"{counted(self.files, 'file')} against the hashes of the download{of}"


def compare_files(
    checkpoint: Checkpoint, part: tuple[int, int], threads: int, bar: Progress
) -> tuple[Downloaded, list[Finding]]:
    """Compares files with what was downloaded from Hugging Face's hub, by the hashes that are kept of it.

    Returns which files there are records of, and the findings for those that differ.

    Args:
        checkpoint: an opened checkpoint.
        part: n and t: of the files every t-th from the n-th on. Of files that lie on several hosts each
            process compares its own.
        threads: files that are read at a time.
        bar: told how far it is.

    Raises:
        FastshardError: if one cannot be read, or changes meanwhile.
    """
    records, weights = _records(checkpoint)
    roots = dict(enumerate(checkpoint.listing.roots))
    number, of = (1, 1) if any(map(_core.is_elsewhere, roots.values())) else part
    # What could not be opened has been told of.
    readable = {roots[f["root"]] / f["path"] for f in checkpoint.files if f["root"] in roots}
    chosen = [r for r in records[number - 1 :: of] if r.path in readable or r.path not in weights]
    differing = hub_downloads.compared(chosen, weights, threads, bar.phase("comparing with the download"))
    compared = sum(record.path in weights for record in records)
    return Downloaded(len(records), compared, len(checkpoint.opened.behind)), differing


def compare_download(
    checkpoint: Checkpoint, part: tuple[int, int], threads: int, bar: Progress
) -> list[Finding]:
    """Compares the same where somebody asks for it, with a note for files of tensors that nothing is kept of.

    Raises:
        FastshardError: as :func:`compare_files`.
    """
    downloaded, differing = compare_files(checkpoint, part, threads, bar)
    if (missing := downloaded.of - downloaded.tensors) > 0:
        message = f"the Hub's cache keeps no hash of {missing} of {counted(downloaded.of, 'file')} of tensors"
        differing.append(
            Finding.of(codes.NO_CHECKSUMS, message, help="compare a folder as `hf download` leaves it")
        )
    return differing


def find_unchecked(checkpoint: Checkpoint) -> list[Finding]:
    """Finds that there are hashes of a download, which nobody compares: a note."""
    records, _ = _records(checkpoint)
    if not records:
        return []
    command = f"fastshard verify {shlex.join(map(str, checkpoint.listing.given()))}"
    return [
        Finding.of(
            codes.NO_CHECKSUMS,
            f"the Hub's hashes of {counted(len(records), 'file')} are not compared",
            unnoticed=f"the Hub's hashes (`{command}` compares them)",
            help="compare them first, or in the same run with --check-hub",
            run=[command, "--check-hub"],
        )
    ]


def _records(checkpoint: Checkpoint) -> tuple[list[Record], Collection[Path]]:
    """What is kept of the download of a checkpoint's files, and the paths of those that hold tensors."""
    listing = checkpoint.listing
    tensors = sorted({(file.root, file.path) for file in checkpoint.opened.behind})
    texts = [] if listing.single else manifest_files.loaded_beside(checkpoint)
    roots = dict(enumerate(listing.roots))
    weights = {roots[root] / path for root, path in tensors if root in roots}
    return hub_downloads.records(listing, [*tensors, *((f.root, f.path) for f in texts)]), weights
