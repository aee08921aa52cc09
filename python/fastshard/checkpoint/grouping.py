"""One cause is one finding: files that a rank lacks, layers of which nothing is there, files of which the same is said."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import PurePosixPath

from ..common import codes
from ..common.errors import Finding
from ..common.finding_facts import runs_of
from ..common.formatting import natural, runs, without_numbers
from ..common.records import dataclass, replace
from ..common.regex import compile_when_used
from .causes import ranks_of
from .effects import effect_on, united

__all__ = ["HeldFile", "grouped"]

#: Dimensions of a mesh as people call them, in the order in which a missing rank is looked for.
_RANKS = {
    "pp": "pipeline stage", "tp": "tensor-parallel rank", "ep": "expert-parallel rank", "dp": "data-parallel rank",
    "mp": "model-parallel rank", "rank": "rank", "process": "process",
}  # fmt: skip
_DIGITS = compile_when_used(r"\d+")
#: Fields that another finding about the same file may add.
_ADDED = ("rank", "host", "expected", "got", "evidence", "effect", "help")
#: Names that a command of a help has at most.
_MOST_ARGUMENTS = 16

Coords = Mapping[str, int]


@dataclass(frozen=True)
class HeldFile:
    """A file at hand, and the rank that wrote it."""

    path: str
    coords: Coords

    @cached_property
    def form(self) -> str:
        """Its path without the numbers, which files of other ranks and layers share."""
        return without_numbers(self.path)


def grouped(findings: Iterable[Finding], held: Sequence[HeldFile]) -> list[Finding]:
    """The findings, where those of one cause are one: missing files of one rank, or of all ranks of a stage.

    Args:
        findings: what was found.
        held: the files that are at hand.
    """
    alike: dict[object, list[Finding]] = {}
    for finding in _lifted_across(_once(findings), held):
        alike.setdefault(_cause(finding), []).append(finding)
    return [one for group in alike.values() for one in (_one(group, held) if len(group) > 1 else group)]


def _once(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, where a file of which two checks say the same has one."""
    told: dict[object, Finding] = {}
    for finding in findings:
        is_once = finding.is_a("once_per_file") and len(finding.files) == 1 and not finding.tensor
        key = (finding.code, finding.severity, finding.decided, finding.file) if is_once else len(told)
        if is_once and (first := told.get(key)) is not None:
            if not (finding.count or first.count):
                added = {name: getattr(finding, name) for name in _ADDED if getattr(first, name) is None}
                told[key] = first.replace(
                    **{name: value for name, value in added.items() if value is not None}
                )
                continue
            key = len(told)
        told[key] = finding
    return list(told.values())


def _cause(finding: Finding) -> object:
    """What findings have in common that are one for people; the finding itself where it stands alone."""
    judged = (finding.code, finding.severity, finding.decided)
    if (
        finding.code == codes.MISSING_LAYER
        and finding.layers
        and finding.count
        and not finding.tensor
        and not finding.files
    ):
        return (
            *judged,
            finding.axis,
            finding.advice,
            finding.evidence,
            finding.expected,
            finding.got,
            finding.rank,
        )
    if len(finding.files) != 1:
        return finding
    if finding.code == codes.MISSING_FILE and not finding.tensor and not finding.count:
        return (
            *judged,
            finding.message,
            finding.evidence,
            finding.host,
            without_numbers(finding.file or ""),
            finding.got,
        )
    if finding.code == codes.MISSING_CHUNKS and finding.severity == "error":
        # Of one store.
        return (*judged, finding.file)
    if finding.code == codes.RENAMED and finding.expected and finding.got:
        return (*judged, frozenset((finding.expected, finding.got)))
    if finding.is_a("per_file") and finding.severity == "error" and not finding.tensor and not finding.count:
        return (
            *judged,
            finding.message,
            finding.evidence,
            finding.host,
            finding.help,
            _without_name(finding),
        )
    return finding


def _one(group: list[Finding], held: Sequence[HeldFile]) -> list[Finding]:
    """Findings that have one cause."""
    code = group[0].code
    if code == codes.MISSING_LAYER:
        return [_of_layers(group)]
    if group[0].is_a("per_file") and code != codes.RENAMED:
        return [_of_files(group)]
    return (
        _by_rank(group, held)
        if code == codes.MISSING_FILE
        else _of_store(group)
        if code == codes.MISSING_CHUNKS
        else _swapped(group)
    )


def _of_store(group: list[Finding]) -> list[Finding]:
    """Arrays of one store that lack chunks: what is said of all of them, where it is, stands for each."""
    of_all = [f for f in group if not f.tensor and f.rank]
    arrays = [f for f in group if f.tensor]
    if len(of_all) != 1 or not arrays:
        return group
    effect = of_all[0].effect or effect_on(sorted({f.tensor for f in arrays if f.tensor}), None)
    evidence = next((f.evidence for f in arrays if f.evidence), None)
    return [
        of_all[0].replace(
            effect=effect,
            evidence=evidence,
            help=arrays[0].help,
            run=arrays[0].run,
            parts=[f.replace(help=None, effect=None) for f in arrays],
        )
    ]


def _of_layers(group: list[Finding]) -> Finding:
    """Layers of which nothing is there."""
    numbers = runs(n for f in group for n in f.layers or ())
    count = sum(f.count or 0 for f in group)
    what = "experts" if group[0].axis == "E" else "layers"
    return group[0].replace(
        message=f"{what} {runs_of(numbers)} are missing: no file has any of their {count:,} tensors",
        layers=numbers[0] if len(numbers) == 1 else None,
        count=count,
        effect=united([f.effect for f in group if f.effect]),
        help=_each(group[0].help, what),
        parts=[] if len(numbers) == 1 else [f.replace(help=None, effect=None) for f in group],
    )


def _of_files(group: list[Finding]) -> Finding:
    """Files of which the same is said."""
    group = sorted(group, key=lambda f: natural(f.file or ""))
    differ = {
        name: None
        for name in ("rank", "expected", "got")
        if len({getattr(finding, name) for finding in group}) > 1
    }
    return group[0].replace(
        message=f"{len(group)} files: {group[0].message}",
        files=[f.file for f in group],
        evidence=_evidence(group),
        effect=united([f.effect for f in group if f.effect]),
        help=_each(group[0].help, "files") if not group[0].run else group[0].help,
        run=_for_all(group),
        parts=[f.replace(help=None, effect=None) for f in group] if differ else [],
        **differ,
    )


def _evidence(found: Sequence[Finding]) -> str | None:
    """Who says what must be, of several files."""
    return "; ".join(dict.fromkeys(f.evidence for f in found if f.evidence)) or None


def _without_name(finding: Finding) -> tuple[str, ...]:
    """Its commands, without the name of the file that the last of them ends with."""
    *others, last = finding.run or ("",)
    name = PurePosixPath(finding.file or "").name
    return (*others, last.removesuffix(f" {shlex.quote(name)}"))


def _each(help_: str | None, what: str) -> str | None:
    """Help about one of several."""
    return None if help_ is None else f"{help_} (each of these {what})"


def _for_all(found: Sequence[Finding]) -> list[str]:
    """The commands that do for several files what is to be done: the last takes all of their names, if it takes one."""
    *others, last = _without_name(found[0])
    if not found[0].run or last == found[0].run[-1]:
        return list(found[0].run)
    names = list(dict.fromkeys(PurePosixPath(f.file or "").name for f in found))
    if not last.endswith("--include"):
        given = " ".join(map(shlex.quote, names)) if len(names) <= _MOST_ARGUMENTS else ""
    elif len(names) <= _MOST_ARGUMENTS and not any("," in name for name in names):
        given = shlex.quote(",".join(names))
    else:
        given = shlex.quote(f"*{PurePosixPath(names[0]).suffix}")
    return [*others, f"{last} {given}".rstrip()]


def _swapped(group: list[Finding]) -> list[Finding]:
    """Two files of which each bears the other's name or rank."""
    if len(group) != 2 or (group[0].expected, group[0].got) != (group[1].got, group[1].expected):
        return group
    a, b = group
    back = f"rename the two files back, or copy both again{'; if the names are right, accept them' if a.run else ''}"
    return [
        a.replace(
            message=f"{' and '.join(_apart(a.file or '', b.file or ''))} are swapped",
            files=[a.file, b.file],
            rank=a.rank if a.rank == b.rank else None,
            expected=None,
            got=None,
            evidence=f"inside they say {a.got} and {b.got}",
            help=a.help if a.decided else back,
            run=a.run,
        )
    ]


def _apart(one: str, other: str) -> tuple[str, str]:
    """The parts of two paths in which they differ first."""
    pairs = zip(one.split("/"), other.split("/"), strict=False)
    return next(((a, b) for a, b in pairs if a != b), (one, other))


def _by_rank(group: list[Finding], held: Sequence[HeldFile]) -> list[Finding]:
    """Missing files of one kind: one finding for each rank, or for each stage of which every rank is missing."""
    there = _held_like(group, held)
    lifted = _lifted(group, there)
    if lifted is not None:
        return lifted
    by_rank: dict[str | None, list[Finding]] = {}
    for finding in group:
        by_rank.setdefault(finding.rank, []).append(finding)
    return [_of_rank(rank, found, there) for rank, found in by_rank.items()]


def _lifted_across(findings: list[Finding], held: Sequence[HeldFile]) -> list[Finding]:
    """The findings, where a rank that lacks its files of every kind is one."""
    kinds: dict[object, dict[str, list[Finding]]] = {}
    for finding in findings:
        is_whole = len(finding.files) == 1 and not (finding.tensor or finding.count or finding.host)
        if finding.code == codes.MISSING_FILE and finding.rank and is_whole:
            judged = (finding.severity, finding.decided, finding.message, finding.got)
            kinds.setdefault(judged, {}).setdefault(without_numbers(finding.file or ""), []).append(finding)
    for of_kind in kinds.values():
        there = {file.path: file for group in of_kind.values() for file in _held_like(group, held)}
        gone = [finding for group in of_kind.values() for finding in group]
        lifted = _lifted(gone, list(there.values())) if len(of_kind) > 1 else None
        if lifted is not None:
            at = findings.index(gone[0])
            findings = (
                [f for f in findings[:at] if f not in gone]
                + lifted
                + [f for f in findings[at:] if f not in gone]
            )
    return findings


def _held_like(group: Sequence[Finding], held: Sequence[HeldFile]) -> list[HeldFile]:
    """Files at hand of the kind of missing ones, each with its rank: it has its number where they have theirs."""
    form = without_numbers(group[0].file or "")
    like = [file for file in held if file.form == form]
    if all(file.coords for file in like):
        return like
    numbers = [list(map(int, _DIGITS.findall(f.file or ""))) for f in group]
    ranks = [{d: n for d, (n, _) in ranks_of(f.rank).items()} for f in group]
    of_like = [list(map(int, _DIGITS.findall(file.path))) for file in like]
    at: dict[str, int] = {}
    for d in set(ranks[0]).intersection(*ranks[1:]):
        places = [
            i
            for i in range(len(numbers[0]))
            if all(own[i] == rank[d] for own, rank in zip(numbers, ranks, strict=True))
        ]
        # The number of a step is that of all.
        vary = [i for i in places if len({own[i] for own in (*numbers, *of_like)}) > 1]
        if len(vary or places) == 1:
            (at[d],) = vary or places
    return [
        file if file.coords else replace(file, coords={d: own[i] for d, i in at.items()})
        for file, own in zip(like, of_like, strict=True)
    ]


def _lifted(group: list[Finding], there: Sequence[HeldFile]) -> list[Finding] | None:
    """One finding for each value of one dimension, where just the ranks with these values lack all their files."""
    ranks = [ranks_of(f.rank) for f in group]
    if not there or not all(file.coords for file in there):
        return None
    if any(not rank or any(a != b for a, b in rank.values()) for rank in ranks):
        return None
    missing = [{d: n for d, (n, _) in rank.items()} for rank in ranks]
    total = len(group) + len(there)
    for dimension in _RANKS:
        gone = {coords.get(dimension) for coords in missing}
        left = {file.coords.get(dimension) for file in there}
        if None in gone or None in left or gone & left:
            continue
        found = {
            number: [f for f, coords in zip(group, missing, strict=True) if coords[dimension] == number]
            for number in sorted(n for n in gone if n is not None)
        }
        return [
            _merged(
                of,
                f"{_RANKS[dimension]} {number} is missing: {len(of)} of {total} files",
                f"{dimension} {number}",
            )
            if len(of) > 1
            else of[0]
            for number, of in found.items()
        ]
    return None


def _of_rank(rank: str | None, found: list[Finding], there: Sequence[HeldFile]) -> Finding:
    """One finding for the missing files of a rank."""
    if len(found) == 1:
        return found[0]
    coords = {d: n for d, (n, m) in ranks_of(rank).items() if n == m}
    others = sum(all(file.coords.get(d) == n for d, n in coords.items()) for file in there) if coords else 0
    of = f" of {len(found) + others}" if others else ""
    whose = f" of {_called(coords)}" if coords else ""
    return _merged(found, f"{len(found)}{of} files{whose} are missing", rank)


def _merged(found: list[Finding], message: str, rank: str | None) -> Finding:
    return found[0].replace(
        message=message,
        files=[f.file for f in found],
        rank=rank,
        evidence=_evidence(found),
        effect=united([f.effect for f in found if f.effect is not None]),
        help=_help(found, rank),
    )


def _help(found: list[Finding], rank: str | None) -> str | None:
    """What to do about several files: as about each, without its name."""

    def unnamed(finding: Finding) -> str | None:
        help_, path = finding.help or "", PurePosixPath(finding.file or "")
        for name in (path.name, path.parent.name):
            if name and f" {name} " in help_:
                return help_.replace(f" {name} ", " these files ", 1)
        return help_.replace("copy it ", "copy them ", 1) or None

    said = {unnamed(f) for f in found}
    if len(said) == 1:
        return said.pop()
    coords = {d: n for d, (n, _) in ranks_of(rank).items()}
    who = f"ran {_called(coords)}" if coords else "wrote them"
    return f"copy these files from the nodes that {who}, or name those nodes' directories as more CKPTs"


def _called(coords: Coords) -> str:
    """A rank as people call it."""
    return ", ".join(f"{_RANKS.get(d, d)} {n}" for d, n in coords.items())
