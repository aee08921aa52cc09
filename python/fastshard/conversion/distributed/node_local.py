"""Sources on the disks of several hosts: each rank has its own part of the checkpoint, and serves the data
that other ranks request.

Empty files with the same names and sizes represent other ranks' files here; the core and
:mod:`fastshard.common.safe_files` read the contents of the originals.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import _core
from ...common import codes, json_text
from ...common.errors import FastshardError, Finding, from_core, raise_errors
from ...common.listing import File, Listing, is_utf8, list_roots, refuse_unprintable
from ...common.options import StrPath
from ...common.records import dataclass
from .rendezvous import Meeting

__all__ = ["SHARED_BYTES", "SharedSource", "own_files", "share_files"]

#: Code of the finding that states how many bytes were transferred between hosts.
SHARED_BYTES = codes.LENT


@dataclass(frozen=True)
class SharedSource:
    """The complete checkpoint, as one rank sees it."""

    #: The paths of all checkpoint parts, in the order of the ranks.
    sources: list[Path]
    #: The rank of each of these paths.
    near: list[int]
    #: Local folders that represent folders of other hosts: (path here, host, path there).
    _names: list[tuple[str, str, str]]
    _meeting: Meeting

    def named(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings with files named as on their hosts."""
        return [self._named(finding) for finding in findings]

    def _named(self, finding: Finding) -> Finding:
        changed = {}
        for field in ("file", "message", "expected", "got", "help"):
            text = getattr(finding, field)
            for here, host, there in self._names if isinstance(text, str) else ():
                text = text.replace(here, f"{host}:{there}")
            changed[field] = text
        return finding.replace(**changed)

    def digest_requests(self, words: Mapping[str, Any]) -> list[str]:
        """Return the :func:`digest_request` of each rank."""
        of_rank: dict[int, list[Path]] = {}
        for path, rank in zip(self.sources, self.near, strict=True):
            of_rank.setdefault(rank, []).append(path)
        return [digest_request(words, list_roots(of_rank[rank])) for rank in sorted(of_rank)]

    def about(self, words: Mapping[str, Any], behind: Sequence[File]) -> dict[str, Any]:
        """Return data that later identifies a run: the requests of all ranks, and stamps of the files."""
        places = [(rank, self.near[:root].count(rank)) for root, rank in enumerate(self.near)]
        stamp = self._meeting.core.stamp([(*places[file.root], file.path) for file in behind])
        return {"asked": self.digest_requests(words), "stamps": stamp}

    def report_bytes(self) -> Finding:
        """Report how many bytes each rank sent through the destination; only rank 0 reports it."""
        bytes_by_rank = self._meeting.core.lent()
        each = ", ".join(f"rank {rank}: {bytes_by_rank[rank]}" for rank in sorted(bytes_by_rank))
        return Finding.of(
            SHARED_BYTES,
            "source data was sent from host to host through the destination",
            got=f"{sum(bytes_by_rank.values())} bytes ({each})",
        )


def own_files(source: Any) -> Listing:
    """List the files of the checkpoint that this rank has.

    Raises:
        FastshardError: for files that cannot be listed, and for a checkpoint that is already open.
    """
    listing = list_roots(_paths(source))
    raise_errors(listing.findings)
    return listing


def _paths(source: Any) -> list[Path]:
    paths = [source] if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(paths, (list, tuple)):
        raise FastshardError.of(
            codes.USAGE,
            "node_local needs paths",
            help="pass the paths of the checkpoint files on this host",
        )
    return [Path(path).absolute() for path in paths]


def digest_request(words: Mapping[str, Any], listing: Listing) -> str:
    """Compute the digest of a rank's request and of its files."""
    what = {key: value for key, value in words.items() if key not in ("resume", "overwrite")}
    files = [
        (f.root, f.path, f.size, (listing.roots[f.root] / f.path).stat().st_mtime_ns)
        for f in listing.files
        if is_utf8(f.path)
    ]
    import hashlib

    text = json_text.canonical([_core.__version__, what, sorted(files)])
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def share_files(
    meeting: Meeting | None, source: Sequence[StrPath] | Any, node_local: bool
) -> Iterator[SharedSource | None]:
    """Share this rank's part of the checkpoint, and yield the complete checkpoint; yield None if every rank
    sees all files.

    Raises:
        FastshardError: ``FS515`` without ranks; for files that cannot be listed; the findings for which
            another rank stopped.
    """
    if not node_local:
        yield None
        return
    if meeting is None:
        raise FastshardError.of(
            codes.USAGE,
            "node_local with one process: the source is on the disks of several hosts",
            help="pass --rank I --world N on each host; if one process sees all parts, name each of them as "
            "a CKPT",
        )
    listing = own_files(source)
    roots = [
        {"folder": os.fspath(root), "file": path.name if path.is_file() else None}
        for root, path in zip(listing.roots, _paths(source), strict=True)
    ]
    for root in roots:
        refuse_unprintable(root["folder"] or "")
    # Most runs borrow nothing.
    import shutil
    import tempfile

    from ...zarr.remote_ranges import forget

    folder = tempfile.mkdtemp(prefix="fastshard-")
    try:
        try:
            # Names that no plan can hold are refused where one is needed, on its own host.
            files = [(file.root, file.path) for file in listing.files if is_utf8(file.path)]
            found = meeting.core.lend(roots, files, folder)
        except _core.CoreError as error:
            raise from_core(error) from None
        yield from _shown(meeting, found)
    finally:
        forget(Path(folder).resolve())
        shutil.rmtree(folder, ignore_errors=True)


def _shown(meeting: Meeting, found: list[_core.LentRoot]) -> Iterator[SharedSource]:
    own = meeting.rank.rank
    # Longer paths first: one may begin another.
    names = sorted(
        ((root["here"], root["host"], root["there"]) for root in found if root["rank"] != own),
        key=lambda name: -len(name[0]),
    )
    sources = [Path(root["here"]) / root["file"] if root["file"] else Path(root["here"]) for root in found]
    shown = SharedSource(sources, [root["rank"] for root in found], names, meeting)
    try:
        yield shown
    except FastshardError as error:
        error.findings = shown.named(error.findings)
        raise
