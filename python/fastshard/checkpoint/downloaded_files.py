"""Comparison of a checkpoint's files with the download hashes in the Hub's cache or ``--local-dir``."""

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
from ..common.stored_places import show_text
from . import manifest_files

if TYPE_CHECKING:
    from ..common.hub_downloads import Record
    from ..common.progress import Progress
    from .checkpoint import Checkpoint

__all__ = ["Downloaded", "compare_download", "compare_files", "find_unchecked"]


@dataclass(frozen=True)
class Downloaded:
    """The files that were compared with the hashes of a download."""

    #: Number of files with a record, of tensor files with a record, and of all tensor files.
    files: int
    tensors: int
    of: int

    @property
    def is_whole(self) -> bool:
        """True if every tensor file has a record."""
        return self.tensors == self.of > 0

    def describe(self) -> str:
        """Describe which files were compared."""
        of = "" if self.is_whole else f", including {self.tensors} of {counted(self.of, 'file')} of tensors"
        return f"{counted(self.files, 'file')} against the hashes of the download{of}"


def compare_files(
    checkpoint: Checkpoint, part: tuple[int, int], threads: int, bar: Progress
) -> tuple[Downloaded, list[Finding]]:
    """Compare files with the hashes from their download from the Hugging Face Hub.

    Returns which files have records, and the findings for those that differ.

    Args:
        checkpoint: an opened checkpoint.
        part: n and t: compare every t-th file, starting with the n-th. If files are on several hosts, each
            process compares those of its host.
        threads: number of files to read at a time.
        bar: shows the progress.

    Raises:
        FastshardError: if a file cannot be read, or changes meanwhile.
    """
    records, weights = _records(checkpoint)
    roots = dict(enumerate(checkpoint.listing.roots))
    number, of = (1, 1) if any(map(_core.is_remote, roots.values())) else part
    # What could not be opened has been told of.
    readable = {roots[f["root"]] / f["path"] for f in checkpoint.files if f["root"] in roots}
    chosen = [r for r in records[number - 1 :: of] if r.path in readable or r.path not in weights]
    differing = hub_downloads.compared(chosen, weights, threads, bar.phase("comparing with the download"))
    compared = sum(record.path in weights for record in records)
    return Downloaded(len(records), compared, len(checkpoint.opened.behind)), differing


def compare_download(
    checkpoint: Checkpoint, part: tuple[int, int], threads: int, bar: Progress
) -> list[Finding]:
    """Compare files like :func:`compare_files`, and add a note if tensor files have no hash.

    Raises:
        FastshardError: as :func:`compare_files`.
    """
    downloaded, differing = compare_files(checkpoint, part, threads, bar)
    if (missing := downloaded.of - downloaded.tensors) > 0:
        message = f"the Hub's cache keeps no hash of {missing} of {counted(downloaded.of, 'file')} of tensors"
        differing.append(
            Finding.of(codes.NO_CHECKSUMS, message, help="compare a directory as `hf download` leaves it")
        )
    return differing


def find_unchecked(checkpoint: Checkpoint) -> list[Finding]:
    """Return a note if there are download hashes that are not compared."""
    records, _ = _records(checkpoint)
    if not records:
        return []
    command = f"fastshard verify {shlex.join(map(show_text, checkpoint.listing.given()))}"
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
    """Return the download records of a checkpoint's files, and the paths of tensor files."""
    listing = checkpoint.listing
    tensors = sorted({(file.root, file.path) for file in checkpoint.opened.behind})
    texts = [] if listing.single else manifest_files.loaded_beside(checkpoint)
    roots = dict(enumerate(listing.roots))
    weights = {roots[root] / path for root, path in tensors if root in roots}
    return hub_downloads.records(listing, [*tensors, *((f.root, f.path) for f in texts)]), weights
