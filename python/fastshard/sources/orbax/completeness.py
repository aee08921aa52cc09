"""The check that a store contains all chunks of all arrays, using keys alone.

Old versions of Orbax omit chunks of zeros, which looks exactly like a shard that was written elsewhere. Two
facts distinguish the cases: whether the directories of all participating processes exist, and whether other
chunks of the same writer exist (:mod:`.chunk_writers`).
source: orbax/checkpoint/_src/serialization; measured with 0.6.3, 0.6.4 and 0.12.8
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ...common import codes
from ...common.errors import Finding
from ...common.formatting import natural
from ...common.records import dataclass, field
from .chunk_writers import Writers, named
from .metadata import Sharding, processes_of
from .zarr_metadata import Array

#: Indices of chunks, by array.
Chunks = dict[str, list[tuple[int, ...]]]

COMPLETE, INCOMPLETE, AMBIGUOUS = "COMPLETE", "INCOMPLETE", "AMBIGUOUS"
#: Maximum number of arrays and chunks named in findings.
_NAMED = 20
_KEYS = 8


@dataclass(frozen=True)
class Evidence:
    """Other evidence about a store."""

    #: True if chunks equal to the fill value are stored too.
    stores_fill: bool | None
    shardings: Mapping[str, Sharding]
    #: Numbers of the processes whose stores (``ocdbt.process_N``) exist and contain data of these arrays;
    #: strings if the run assigned other ids.
    present: Set[int | str]
    #: True if the format has one directory per process; otherwise the plain files of all processes are
    #: together.
    per_process: bool = True
    #: True if a save was committed, so that all processes had finished writing.
    committed: bool = True
    #: Number of participating processes, as stated by the caller.
    expected: int | None = None
    #: Keys that an index names and whose values are missing, each with the reason. These values were written
    #: and are lost.
    lost: Mapping[str, str] = field(default_factory=dict)
    #: Arrays that one process wrote together with their metadata.
    by_primary: Set[str] = frozenset()
    #: Arrays next to the model in a store that all processes write into, such as Levanter's. Moments are zero
    #: until the first gradient, possibly for some rows only; weights are not.
    beside: Set[str] = frozenset()
    #: The place to name in messages.
    where: str = ""

    @functools.cached_property
    def processes(self) -> dict[int, int] | None:
        """The process of each device, if device ids show it."""
        return processes_of({i for s in self.shardings.values() for i in s.ids})

    @functools.cached_property
    def implied(self) -> int | None:
        """Number of participating processes, if it is stated."""
        count = None if self.processes is None else 1 + max(self.processes.values())
        if count is None and self.stores_fill is None and any(s.alone for s in self.shardings.values()):
            count = 1
        if self.expected is None:
            return count
        # Fewer than the files tell of: the number given is wrong.
        numbers = [n for n in self.present if isinstance(n, int)]
        return max(self.expected, count or 0, 1 + max(numbers, default=-1), len(self.present))

    @functools.cached_property
    def numbered(self) -> bool:
        """True if directories of processes are named by number, not by ids that the run assigned."""
        return all(isinstance(n, int) for n in self.present)

    @functools.cached_property
    def absent(self) -> list[int]:
        """Numbers of the participating processes whose directories are missing; empty if directories have no
        numbers."""
        if not self.per_process or not self.numbered:
            return []
        return sorted(set(range(self.implied or 0)) - set(self.present))

    @functools.cached_property
    def lacking(self) -> bool:
        """True if the directory of a participating process is missing."""
        return bool(self.absent) or (self.per_process and len(self.present) < (self.implied or 0))


def at_hand(
    arrays: Mapping[str, Array], of_process: Mapping[int | str, Set[str]], evidence: Evidence
) -> Set[int | str]:
    """Return those processes with stores whose chunks exist.

    A folder's name is not sufficient, because another process's store may have been copied over it. A process
    counts if any store contains a chunk that the process's devices own, or if its own store contains no chunk
    at all. If the owner of a store's chunks is unknown, the folder's name counts.

    Args:
        arrays: arrays by name.
        of_process: keys of each process's store.
        evidence: evidence that includes the arrays' shardings.
    """
    if evidence.processes is None or not evidence.numbered:
        return evidence.present
    keys: Set[str] = set().union(*of_process.values())
    writers = Writers(arrays, keys, evidence.shardings, evidence.by_primary)
    owners: dict[str, int | None] = {}
    for array in arrays.values():
        if array.name not in evidence.by_primary and 0 not in array.shape:
            for index in array.chunks():
                if (key := f"{array.name}/{array.key(index)}") in keys:
                    device = writers.first(array, index)
                    owners[key] = None if device is None else evidence.processes.get(device)
    own = {owner for owner in owners.values() if owner is not None}
    unknown = {
        process
        for process, stored in of_process.items()
        if all(owners[key] is None for key in owners.keys() & stored)
    }
    return {process for process in evidence.present if process in own or process in unknown}


@dataclass
class Verdict:
    """The verdict about a store."""

    verdict: str
    expected: int = 0
    #: Absent chunks.
    missing: Chunks = field(default_factory=dict)
    #: Absent chunks that were omitted because they contain only the fill value, and absent chunks that were
    #: lost; the others are undecided.
    elided: Chunks = field(default_factory=dict)
    gone: Chunks = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    lost: int = 0
    elements: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a dict, for the manifest and for display."""
        absent = sum(map(len, self.missing.values()))
        return {
            "verdict": self.verdict,
            "chunks": self.expected,
            "absent_chunks": absent,
            "arrays_with_absent_chunks": len(self.missing),
            "absent_elements": self.lost,
            "elements": self.elements,
        }


def judge(
    arrays: Mapping[str, Array], keys: Set[str], evidence: Evidence, accept_elided: bool = False
) -> Verdict:
    """Compare the required chunks with the existing keys.

    Args:
        arrays: arrays by name.
        keys: all keys of the store, ``<array>/<chunk>``.
        evidence: other evidence.
        accept_elided: treat missing chunks as fill values if the evidence is inconclusive.
    """
    verdict = Verdict(COMPLETE)
    for name, array in sorted(arrays.items()):
        volume = math.prod(array.shape)
        verdict.elements += volume
        if volume == 0:
            continue
        absent = []
        for index in array.chunks():
            verdict.expected += 1
            if f"{name}/{array.key(index)}" not in keys:
                absent.append(index)
                verdict.lost += math.prod(array.extent(index)[1])
        if absent:
            verdict.missing[name] = absent
    if not verdict.missing:
        return verdict
    writers = Writers(arrays, keys, evidence.shardings, evidence.by_primary)
    open_ones = 0
    widest = max((_count(a) for name, a in arrays.items() if name not in verdict.missing), default=0)
    for name, absent in verdict.missing.items():
        is_beside = _is_left_out_beside_model(arrays[name], absent, evidence, widest)
        for index in absent:
            match is_beside or _left_out(arrays[name], index, evidence, writers):
                case True:
                    verdict.elided.setdefault(name, []).append(index)
                case False:
                    verdict.gone.setdefault(name, []).append(index)
                case None:
                    open_ones += 1
    if verdict.gone:
        verdict.verdict = INCOMPLETE
        verdict.findings = _lost(arrays, verdict, evidence, writers)
    elif open_ones:
        verdict.verdict = AMBIGUOUS
        verdict.findings = [_ambiguous(arrays, verdict, evidence, writers, accept_elided)]
    else:
        verdict.findings = [_elided(arrays, verdict, evidence)]
    return verdict


def _count(array: Array) -> int:
    return math.prod(array.grid)


def _is_left_out_beside_model(
    array: Array, absent: Sequence[tuple[int, ...]], evidence: Evidence, widest: int
) -> bool:
    """Return True for an array next to the model for which processes omitted chunks from their shared store.

    If processes had written to their own disks, the store of the process that commits would contain a part of
    each array, and no divided array would be complete there. A moment is divided in the same way as its
    weight, and no chunk of a weight may be absent.

    Args:
        array: the array.
        absent: its missing chunks.
        evidence: other evidence.
        widest: the largest number of chunks in a complete array.
    """
    return (
        array.name in evidence.beside
        and evidence.committed
        and array.fill is not None
        and _count(array) <= widest
        and not any(f"{array.name}/{array.key(index)}" in evidence.lost for index in absent)
    )


def _left_out(array: Array, index: tuple[int, ...], evidence: Evidence, writers: Writers) -> bool | None:
    """Return True for a missing chunk that was omitted, False for one that was lost, None if undecided."""
    # No value is stated for chunks that are absent, or the writer leaves none out, or an index says that it
    # was there.
    if (
        array.fill is None
        or evidence.stores_fill is True
        or f"{array.name}/{array.key(index)}" in evidence.lost
    ):
        return False
    if not evidence.per_process:
        # A file that was lost leaves no trace; that of a store is in its index.
        return None
    first = writers.first(array, index)
    process = None if first is None else (evidence.processes or {}).get(first)
    own = array.name not in evidence.by_primary and evidence.numbered and process is not None
    if own and process not in evidence.present:
        return False
    if own or writers.here(array, index):
        # Before a save is committed more may be to come.
        return True if evidence.committed else None
    if evidence.lacking:
        return False
    return True if evidence.committed and evidence.implied is not None else None


def _summary(arrays: Mapping[str, Array], verdict: Verdict, chunks: Chunks) -> str:
    count = sum(map(len, chunks.values()))
    lost = sum(math.prod(arrays[n].extent(i)[1]) for n, of in chunks.items() for i in of)
    return (
        f"{count} of {verdict.expected} chunks are missing, in {len(chunks)} of {len(arrays)} arrays: "
        f"{100 * lost / max(1, verdict.elements):.3g} % of all elements"
    )


def _elided(arrays: Mapping[str, Array], verdict: Verdict, evidence: Evidence) -> Finding:
    known = evidence.implied is not None and not evidence.lacking
    return Finding.of(
        codes.MISSING_CHUNKS,
        f"{_summary(arrays, verdict, verdict.missing)}; the writer leaves out chunks of zeros, and "
        + (
            f"the directories of all {evidence.implied} processes are present"
            if known
            else "arrays with as many chunks are complete in the store that all processes share"
            if evidence.beside
            else "other chunks from all devices that held these are present, in stores that each process "
            "writes at once"
        ),
        severity="note",
        file=evidence.where,
    )


def _ambiguous(
    arrays: Mapping[str, Array], verdict: Verdict, evidence: Evidence, writers: Writers, accept_elided: bool
) -> Finding:
    """Report the evidence for zeros and for loss, and the places where lost chunks may be."""
    # Chunks of which others of the same writer are here; nothing of it is; nothing tells.
    counts = {True: 0, False: 0, None: 0}
    suspects: set[int] = set()
    owners: set[int] = set()
    first = None
    for name, chunks in verdict.missing.items():
        elided = set(verdict.elided.get(name, ()))
        for index in chunks:
            here = True if index in elided else writers.here(arrays[name], index)
            counts[here] += 1
            device = writers.first(arrays[name], index)
            if device is not None:
                owners.add(device)
            if here is False:
                suspects.update(writers.devices(arrays[name], index) if device is None else (device,))
                first = first or name
    reasons = []
    if counts[True]:
        reasons.append(
            f"{counts[True]} were probably zeros, because other chunks of the same writer are present"
        )
    if counts[False]:
        whose = named(suspects, evidence.processes)
        reasons.append(
            f"{counts[False]} were probably lost, because all chunks that {whose} wrote are missing"
        )
    if counts[None]:
        reasons.append(f"{counts[None]} have no known writer")
    helps = []
    if suspects:
        helps.append(
            f"look for the files that {named(suspects, evidence.processes)} wrote on the disks of the hosts "
            "that ran them, and pass them as another CKPT"
        )
    elif owners and not evidence.per_process:
        helps.append(
            f"compare the files with those on the hosts that ran {named(owners, evidence.processes)}: a "
            "copy may have lost some"
        )
    if evidence.per_process:
        helps.append("pass the number of processes that wrote it with --expect-processes N")
    helps.append(
        "if the values are known to be zeros, read absent chunks as zeros with --accept elided-zeros"
    )
    return Finding.of(
        codes.MISSING_CHUNKS,
        f"{_summary(arrays, verdict, verdict.missing)}: this writer leaves out chunks of zeros, and nothing "
        "shows whether these were zeros or lost",
        severity="warning" if accept_elided else None,
        decided="accept elided-zeros" if accept_elided else None,
        file=evidence.where,
        tensor=first or next(iter(verdict.missing)),
        expected="the number of processes that wrote it" if evidence.per_process else "a file for each chunk",
        got="; ".join(reasons),
        help="; or ".join(helps),
    )


def _lost(
    arrays: Mapping[str, Array], verdict: Verdict, evidence: Evidence, writers: Writers
) -> list[Finding]:
    absent = evidence.absent
    lacking = set(absent)
    findings = []
    for name, chunks in list(verdict.gone.items())[:_NAMED]:
        array = arrays[name]
        owners = sorted(_owners(array, chunks, evidence, writers) or absent)
        lacking.update(owners)
        lost = sum(math.prod(array.extent(i)[1]) for i in chunks)
        keys = ", ".join(array.key(i) for i in chunks[:_KEYS])
        more = f" and {len(chunks) - _KEYS} more" if len(chunks) > _KEYS else ""
        damaged = next(filter(None, (evidence.lost.get(f"{name}/{array.key(i)}") for i in chunks)), None)
        findings.append(
            Finding.of(
                codes.MISSING_CHUNKS,
                f"{len(chunks)} of {math.prod(array.grid)} chunks are missing: {keys}{more}",
                file=evidence.where,
                evidence=f"the index names them: {damaged}" if damaged else None,
                tensor=name,
                rank=", ".join(f"process {p}" for p in owners) or None,
                expected=f"{math.prod(array.shape)} elements",
                got=f"{100 * lost / max(1, math.prod(array.shape)):.3g} % of them lost: they would be read "
                "as zeros",
                help="name the directory of "
                + (", ".join(f"process {p}" for p in owners) or "each other process")
                + " (from that host's disk; a temporary directory will do) as another CKPT",
            )
        )
    if len(verdict.gone) > _NAMED:
        findings.append(
            Finding.of(
                codes.MISSING_CHUNKS, f"and {len(verdict.gone) - _NAMED} more arrays", file=evidence.where
            )
        )
    rank = ", ".join(f"process {p}" for p in sorted(lacking)) or None
    elided, absent_ones = (sum(map(len, c.values())) for c in (verdict.elided, verdict.missing))
    unknown = absent_ones - elided - sum(map(len, verdict.gone.values()))
    findings.append(
        Finding.of(
            codes.MISSING_CHUNKS,
            _summary(arrays, verdict, verdict.gone)
            + (
                f"; {elided} more were left out by processes that are present: they are zeros"
                if elided
                else ""
            )
            + (f"; {unknown} more may have been left out or lost" if unknown else ""),
            file=evidence.where,
            rank=rank,
            got=_directories(sorted(map(str, evidence.present), key=natural)) if evidence.present else None,
        )
    )
    return findings


def _directories(processes: list[str]) -> str:
    """Format the directories of some processes."""
    if len(processes) == 1:
        return f"the directory of process {processes[0]}"
    return f"the directories of processes {', '.join(processes)}"


def _owners(
    array: Array, chunks: list[tuple[int, ...]], evidence: Evidence, writers: Writers
) -> set[int] | None:
    """Return the processes that wrote these chunks, if all of them are known; otherwise None."""
    owners = set()
    for index in chunks:
        device = writers.first(array, index)
        process = None if device is None else (evidence.processes or {}).get(device)
        if process is None:
            return None
        owners.add(process)
    return owners
