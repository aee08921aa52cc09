"""Whether a store holds every chunk of every array, from keys alone.

Old versions of Orbax leave out chunks of zeros, which looks just like a shard that was written elsewhere. What
tells the two apart is whether the directories of all processes that took part are there.
source: orbax/checkpoint/_src/serialization; measured with 0.6.3 and 0.12.8
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from ...errors import Finding
from .tree import Sharding, processes_of
from .zarr import Array

COMPLETE, INCOMPLETE, AMBIGUOUS = "COMPLETE", "INCOMPLETE", "AMBIGUOUS"
#: Arrays and chunks named in findings at most.
_NAMED = 20
_KEYS = 8


@dataclass(frozen=True)
class Evidence:
    """What else is known of a store."""

    #: True if chunks equal to the fill value are stored too.
    stores_fill: bool | None
    shardings: Mapping[str, Sharding]
    #: Numbers of the processes whose stores (``ocdbt.process_N``) are there and hold something of these arrays; texts
    #: where the run gave them other ids.
    present: Set[int | str]
    #: True if the format keeps a directory per process; plain files of all processes lie together.
    per_process: bool = True
    #: True if a save was committed: what its processes had to write was written by then.
    committed: bool = True
    #: Processes that took part, as the caller says.
    expected: int | None = None
    #: Keys that an index names and whose values are not there, with the reason: they were written, and are lost.
    lost: Mapping[str, str] = field(default_factory=dict)
    #: Where messages say that it is.
    where: str = ""

    def processes(self) -> dict[int, int] | None:
        """Process of each device, where device ids tell."""
        return processes_of({i for s in self.shardings.values() for i in s.ids})

    def implied(self) -> int | None:
        """Number of processes that took part, where anything states it."""
        processes = self.processes()
        told = None if processes is None else 1 + max(processes.values())
        if self.expected is None:
            return told
        # Fewer than the files tell of: the number given is wrong.
        numbers = [n for n in self.present if isinstance(n, int)]
        return max(self.expected, told or 0, 1 + max(numbers, default=-1), len(self.present))

    def numbered(self) -> bool:
        """True if the directories of processes bear their numbers, not ids that the run gave them."""
        return all(isinstance(n, int) for n in self.present)

    def absent(self) -> list[int]:
        """Processes that took part and whose directories are not there, where they are known by number."""
        if not self.per_process or not self.numbered():
            return []
        return sorted(set(range(self.implied() or 0)) - set(self.present))

    def lacking(self) -> bool:
        """True if the directory of a process that took part is not there."""
        return bool(self.absent()) or (self.per_process and len(self.present) < (self.implied() or 0))


@dataclass
class Verdict:
    """The outcome for a store."""

    verdict: str
    expected: int = 0
    #: Indices of absent chunks by array; for COMPLETE those that hold nothing but the fill value.
    missing: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    lost: int = 0
    elements: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For the manifest and for people."""
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
    """Compares the chunks that must exist with the keys that do.

    Args:
        arrays: by name.
        keys: all keys of the store, ``<array>/<chunk>``.
        evidence: what else is known.
        accept_elided: take absent chunks for fill values where the evidence decides nothing.
    """
    verdict = Verdict(COMPLETE)
    certain = False
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
            # No value is stated for chunks that are absent, or the writer leaves none out.
            certain = certain or array.fill is None or evidence.stores_fill is True
            certain = certain or any(f"{name}/{array.key(i)}" in evidence.lost for i in absent)
    if not verdict.missing:
        return verdict
    implied = evidence.implied()
    if certain or evidence.lacking():
        verdict.verdict = INCOMPLETE
    elif implied is None or not evidence.per_process or not evidence.committed:
        verdict.verdict = AMBIGUOUS
    verdict.findings = _findings(arrays, verdict, evidence, accept_elided)
    return verdict


def _findings(
    arrays: Mapping[str, Array], verdict: Verdict, evidence: Evidence, accept_elided: bool
) -> list[Finding]:
    count = sum(map(len, verdict.missing.values()))
    summary = (
        f"{count} of {verdict.expected} chunks are absent, in {len(verdict.missing)} of {len(arrays)} arrays: "
        f"{100 * verdict.lost / max(1, verdict.elements):.3g} % of all elements"
    )
    if verdict.verdict == COMPLETE:
        return [
            Finding.of(
                "FS111",
                f"{summary}; the writer leaves out chunks of zeros, and the directories of all "
                f"{evidence.implied()} processes are here",
                severity="note",
                file=evidence.where,
            )
        ]
    if verdict.verdict == AMBIGUOUS:
        return [
            Finding.of(
                "FS106",
                f"{summary}: this writer leaves out chunks of zeros, and nothing tells whether these are such or were lost",
                severity="warning" if accept_elided else None,
                file=evidence.where,
                tensor=next(iter(verdict.missing)),
                expected="the number of processes that wrote it",
                help=(
                    "say how many processes wrote it with --expect-processes N, or "
                    if evidence.per_process
                    else ""
                )
                + "take absent chunks for zeros with --accept elided-zeros if the values are known to hold zeros",
            )
        ]
    absent = evidence.absent()
    lacking = set(absent)
    findings = []
    for name, chunks in list(verdict.missing.items())[:_NAMED]:
        array = arrays[name]
        owners = sorted(_owners(array, chunks, evidence) or absent)
        lacking.update(owners)
        lost = sum(math.prod(array.extent(i)[1]) for i in chunks)
        keys = ", ".join(array.key(i) for i in chunks[:_KEYS])
        more = f" and {len(chunks) - _KEYS} more" if len(chunks) > _KEYS else ""
        damaged = next(filter(None, (evidence.lost.get(f"{name}/{array.key(i)}") for i in chunks)), None)
        if damaged:
            more += f" (the index names them: {damaged})"
        findings.append(
            Finding.of(
                "FS111",
                f"{len(chunks)} of {math.prod(array.grid)} chunks are not here: {keys}{more}",
                file=evidence.where,
                tensor=name,
                rank=", ".join(f"process {p}" for p in owners) or None,
                expected=f"{math.prod(array.shape)} elements",
                got=f"{100 * lost / max(1, math.prod(array.shape)):.3g} % of them lost: they would read as zeros",
                help="name the directory of "
                + (", ".join(f"process {p}" for p in owners) or "each other process")
                + " (on that host's own disk, perhaps still a temporary one) as a further CKPT",
            )
        )
    if len(verdict.missing) > _NAMED:
        findings.append(
            Finding.of("FS111", f"and {len(verdict.missing) - _NAMED} more arrays", file=evidence.where)
        )
    rank = ", ".join(f"process {p}" for p in sorted(lacking)) or None
    findings.append(
        Finding.of(
            "FS111",
            summary,
            file=evidence.where,
            rank=rank,
            got=f"directories of processes {sorted(evidence.present, key=str)}" if evidence.present else None,
        )
    )
    return findings


def _owners(array: Array, chunks: list[tuple[int, ...]], evidence: Evidence) -> set[int] | None:
    """Processes that wrote these chunks, where sharding and chunk grid agree; else None."""
    sharding, processes = evidence.shardings.get(array.name), evidence.processes()
    if sharding is None or processes is None:
        return None
    extents = dict(zip(sharding.axes, sharding.mesh, strict=False))
    spec = (*sharding.spec, *((),) * (len(array.shape) - len(sharding.spec)))
    parts = [math.prod(extents.get(a, 1) for a in axes) for axes in spec]
    # The partition need not be the grid of what was written: then it says nothing of who wrote it.
    if tuple(parts) != array.grid or math.prod(sharding.mesh) != len(sharding.ids):
        return None
    owners = set()
    for index in chunks:
        place = dict.fromkeys(sharding.axes, 0)
        for at, axes in zip(index, spec, strict=True):
            for axis in reversed(axes):
                place[axis] = at % extents.get(axis, 1)
                at //= extents.get(axis, 1)
        flat = 0
        for axis, n in zip(sharding.axes, sharding.mesh, strict=True):
            flat = flat * n + place[axis]
        owner = processes.get(sharding.ids[flat])
        if owner is None:
            return None
        owners.add(owner)
    return owners
