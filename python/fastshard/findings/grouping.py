"""Merging of findings with one cause, such as a rank's missing files, missing layers, or files with the same
error."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import PurePosixPath

from ..common import codes
from ..common.errors import Finding
from ..common.finding_facts import runs_of
from ..common.formatting import natural, runs, without_numbers
from ..common.ranks import Rank, RankRanges, is_among
from ..common.records import dataclass
from ..sources.base import PARAMETERS_ALONE
from .effects import effect_on, unite_effects

__all__ = ["RankFile", "group_by_cause"]

#: Names of mesh dimensions for users, in the order in which a missing rank is searched for.
_DIMENSIONS = {
    "pp": "pipeline stage",
    "tp": "tensor-parallel rank",
    "ep": "expert-parallel rank",
    "dp": "data-parallel rank",
    "mp": "model-parallel rank",
    "rank": "rank",
}
#: Maximum number of ranks that a finding names individually.
_MOST_RANKS = 8
#: Fields that another finding about the same file may add.
_ADDED = ("rank", "host", "expected", "got", "evidence", "effect", "help")
#: Maximum number of names in a command of a help text.
_MOST_ARGUMENTS = 16


@dataclass(frozen=True)
class RankFile:
    """An existing file of the checkpoint, and the rank that wrote it."""

    path: str
    rank: Rank

    @cached_property
    def kind(self) -> str:
        """Path without numbers, which is the same for files of other ranks and layers."""
        return without_numbers(self.path)


def group_by_cause(findings: Iterable[Finding], present: Sequence[RankFile]) -> list[Finding]:
    """Merge findings of one cause.

    A cause is a kind of file that is missing for a rank, all files missing for ranks or stages, or layers
    without any tensor.

    Args:
        findings: the findings.
        present: the files that exist.
    """
    alike: dict[object, list[Finding]] = {}
    for finding in _merge_lost_ranks(_merge_duplicates(findings), present):
        alike.setdefault(_cause(finding), []).append(finding)
    return [one for group in alike.values() for one in (_one(group, present) if len(group) > 1 else group)]


def _merge_duplicates(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings of two checks that report the same problem with a file."""
    merged: dict[object, Finding] = {}
    for finding in findings:
        is_once = finding.is_a("once_per_file") and len(finding.files) == 1 and not finding.tensor
        key = (finding.code, finding.severity, finding.decided, finding.file) if is_once else len(merged)
        if is_once and (first := merged.get(key)) is not None:
            if not (finding.count or first.count):
                added = {name: getattr(finding, name) for name in _ADDED if getattr(first, name) is None}
                merged[key] = first.replace(
                    **{name: value for name, value in added.items() if value is not None}
                )
                continue
            key = len(merged)
        merged[key] = finding
    return list(merged.values())


def _cause(finding: Finding) -> object:
    """Return a key that findings with one cause share; the finding itself if it stands alone."""
    weight = (finding.code, finding.severity, finding.decided)
    if (
        finding.code == codes.MISSING_LAYER
        and finding.layers
        and finding.count
        and not finding.tensor
        and not finding.files
    ):
        return (
            *weight,
            finding.axis,
            finding.advice,
            finding.evidence,
            finding.expected,
            finding.got,
            finding.rank,
        )
    if len(finding.files) != 1:
        return finding
    if finding.code == codes.MISSING_FILE and not finding.tensor and _count_files(finding):
        return (
            *weight,
            _message_of_missing(finding),
            finding.evidence,
            finding.host,
            without_numbers(finding.file or ""),
            finding.got,
        )
    if finding.code == codes.MISSING_CHUNKS and finding.severity == "error":
        # Of one store.
        return (*weight, finding.file)
    if finding.code == codes.RENAMED and finding.expected and finding.got:
        return (*weight, frozenset((finding.expected, finding.got)))
    if finding.is_a("per_file") and finding.severity == "error" and not finding.tensor and not finding.count:
        return (
            *weight,
            finding.message,
            finding.evidence,
            finding.host,
            finding.help,
            _without_name(finding),
        )
    return finding


def _one(group: list[Finding], present: Sequence[RankFile]) -> list[Finding]:
    """Merge findings that have one cause."""
    code = group[0].code
    if code == codes.MISSING_LAYER:
        return [_of_layers(group)]
    if group[0].is_a("per_file") and code != codes.RENAMED:
        return [_of_files(group)]
    if code == codes.MISSING_FILE:
        return [_merge_missing_files(group, present)]
    return _of_store(group) if code == codes.MISSING_CHUNKS else _swapped(group)


def _of_store(group: list[Finding]) -> list[Finding]:
    """Merge findings about arrays of a store that lack chunks into the finding about the store, if any."""
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
    """Merge findings about layers or experts without any tensors."""
    numbers = runs(n for f in group for n in f.layers or ())
    count = sum(f.count or 0 for f in group)
    what = "experts" if group[0].axis == "E" else "layers"
    return group[0].replace(
        message=f"{what} {runs_of(numbers)} are missing: no file has any of their {count:,} tensors",
        layers=numbers[0] if len(numbers) == 1 else None,
        count=count,
        effect=unite_effects([f.effect for f in group if f.effect]),
        help=_each(group[0].help, what),
        parts=[] if len(numbers) == 1 else [f.replace(help=None, effect=None) for f in group],
    )


def _of_files(group: list[Finding]) -> Finding:
    """Merge findings that report the same problem with several files."""
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
        effect=unite_effects([f.effect for f in group if f.effect]),
        help=_each(group[0].help, "files") if not group[0].run else group[0].help,
        run=_for_all(group),
        parts=[f.replace(help=None, effect=None) for f in group] if differ else [],
        **differ,
    )


def _evidence(found: Sequence[Finding]) -> str | None:
    """Join the evidence of several findings."""
    return "; ".join(dict.fromkeys(f.evidence for f in found if f.evidence)) or None


def _without_name(finding: Finding) -> tuple[str, ...]:
    """Return the commands of a finding, without the file name at the end of the last one."""
    *others, last = finding.run or ("",)
    name = PurePosixPath(finding.file or "").name
    return (*others, last.removesuffix(f" {shlex.quote(name)}"))


def _each(help_: str | None, what: str) -> str | None:
    """Extend the help for one file or layer to several."""
    return None if help_ is None else f"{help_} (each of these {what})"


def _for_all(found: Sequence[Finding]) -> list[str]:
    """Return the commands that repair several files.

    The last command takes the names of all files if it takes one.
    """
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
    """Merge the findings about two files that have each other's name or rank."""
    if len(group) != 2 or (group[0].expected, group[0].got) != (group[1].got, group[1].expected):
        return group
    a, b = group
    # Two parts of one tensor may each have a finding.
    if a.file == b.file:
        return group
    back = (
        "rename the two files back, or copy both "
        f"again{'; if the names are right, accept them' if a.run else ''}"
    )
    return [
        a.replace(
            message=f"{' and '.join(_apart(a.file or '', b.file or ''))} are swapped",
            files=[a.file, b.file],
            rank=a.rank if a.rank == b.rank else None,
            expected=None,
            got=None,
            evidence=f"inside they state {a.got} and {b.got}",
            help=a.help if a.decided else back,
            run=a.run,
        )
    ]


def _apart(one: str, other: str) -> tuple[str, str]:
    """Return the first components in which two paths differ."""
    pairs = zip(one.split("/"), other.split("/"), strict=False)
    return next(((a, b) for a, b in pairs if a != b), (one, other))


def _merge_lost_ranks(findings: list[Finding], present: Sequence[RankFile]) -> list[Finding]:
    """Merge the missing files of ranks without any files."""
    groups: dict[object, list[Finding]] = {}
    for finding in findings:
        is_of_rank = finding.coords and len(finding.files) == 1 and not (finding.tensor or finding.host)
        if finding.code == codes.MISSING_FILE and is_of_rank:
            key = (finding.severity, finding.decided, _message_of_missing(finding), finding.got)
            groups.setdefault(key, []).append(finding)
    for gone in groups.values():
        kinds = {without_numbers(finding.file or "") for finding in gone}
        if len(kinds) > 1 and (lost := _find_lost_ranks(gone, [f for f in present if f.kind in kinds])):
            merged, rest = _merge_files(gone, *lost), set(gone)
            findings = [merged if f == gone[0] else f for f in findings if f == gone[0] or f not in rest]
    return findings


def _count_files(finding: Finding) -> int:
    """Count the missing files that a finding stands for; return 0 if it counts files without naming one."""
    if not finding.count:
        return 1
    return finding.count if finding.coords else 0


def _message_of_missing(finding: Finding) -> str:
    """Return the message about a missing file, in a form that is the same for a range of files."""
    return "the file is missing" if finding.count else finding.message


def _merge_missing_files(gone: list[Finding], present: Sequence[RankFile]) -> Finding:
    """Merge missing files of one kind into one finding."""
    kind = without_numbers(gone[0].file or "")
    alike = [file for file in present if file.kind == kind]
    if lost := _find_lost_ranks(gone, alike):
        return _merge_files(gone, *lost)
    ranks = list(dict.fromkeys(finding.rank for finding in gone))
    # Files of one rank may be of different layers: a dimension in which they differ is not theirs in common.
    first = gone[0].coords if len(ranks) == 1 else {}
    coords = {d: at for d, at in first.items() if all(finding.coords.get(d) == at for finding in gone)}
    others = (
        sum(is_among(file.rank, coords) for file in alike)
        if coords and all(file.rank for file in alike)
        else 0
    )
    missing = sum(map(_count_files, gone))
    of = f" of {missing + others}" if others else ""
    whose = f" of {_name_ranks(coords)}" if coords else ""
    text = "; ".join(rank for rank in ranks[:_MOST_RANKS] if rank) + (
        " and others" if len(ranks) > _MOST_RANKS else ""
    )
    return _merge_files(gone, f"{missing}{of} files{whose} are missing", coords, text or None)


def _find_lost_ranks(gone: Sequence[Finding], present: Sequence[RankFile]) -> tuple[str, RankRanges] | None:
    """Find the dimension on which some ranks lack all their files, and all other ranks have theirs.

    Return a message and these ranks; None if there is no such dimension.
    """
    if not present:
        return None
    missing = sum(map(_count_files, gone))
    total = missing + len(present)
    for dimension, name in _DIMENSIONS.items():
        lost = [finding.coords.get(dimension, ()) for finding in gone]
        there = {file.rank.get(dimension) for file in present}
        if None in there or not all(lost):
            continue
        numbers = runs(number for of in lost for run in of for number in run)
        if not any(n in run for n in there for run in numbers):
            be = "is" if len(numbers) == 1 == len(numbers[0]) else "are"
            ranks = f"{name}{'' if be == 'is' else 's'} {runs_of(numbers)}"
            return f"{ranks} {be} missing: {missing} of {total} files", {dimension: numbers}
    return None


def _merge_files(
    gone: Sequence[Finding], message: str, coords: RankRanges, rank: str | None = None
) -> Finding:
    """Merge missing files into one finding that names all of them."""
    named = {} if rank is None else {"rank": rank}
    helps, commands = {finding.help for finding in gone}, {finding.run for finding in gone}
    run = commands.pop() if len(commands) == 1 else ()
    if len(helps) == 1 and not coords:
        help = _each(gone[0].help, "files")
    else:
        who = f"ran {_name_ranks(coords)}" if coords else "wrote them"
        # A stage has a node for some of its ranks each.
        is_one = (
            coords and "pp" not in coords and all(sum(map(len, numbers)) == 1 for numbers in coords.values())
        )
        where = (
            "node that {}, or name its directory as another CKPT"
            if is_one
            else "nodes that {}, or name their directories as more CKPTs"
        )
        help = f"copy these files from the {where.format(who)}"
        help += ", or take the parameters alone" if run == PARAMETERS_ALONE else ""
    return gone[0].replace(
        message=message,
        files=[finding.file for finding in gone],
        count=None,
        coords=coords,
        evidence=_evidence(gone),
        effect=unite_effects([finding.effect for finding in gone if finding.effect is not None]),
        help=help,
        run=run,
        **named,
    )


def _name_ranks(coords: RankRanges) -> str:
    """Format ranks for users: ``pipeline stage 1, tensor-parallel ranks 0-3``."""
    return ", ".join(
        f"{_DIMENSIONS.get(d, d)}{'' if sum(map(len, numbers)) == 1 else 's'} {runs_of(numbers)}"
        for d, numbers in coords.items()
    )
