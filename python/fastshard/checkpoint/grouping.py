"""One cause is one finding: the files that a rank lacks become one, which says what tensors cannot be used because of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from .._core import Effect
from ..common.errors import Finding
from ..common.formatting import runs
from ..models.tensor_roles import layer_of
from .causes import Causes, ranks_of

__all__ = ["HeldFile", "grouped", "with_effects"]

#: Dimensions of a mesh as people call them, in the order in which a missing rank is looked for.
_RANKS = {
    "pp": "pipeline stage", "tp": "tensor-parallel rank", "ep": "expert-parallel rank", "dp": "data-parallel rank",
    "mp": "model-parallel rank", "rank": "rank", "process": "process",
}  # fmt: skip
_DIGITS = re.compile(r"\d+")
#: Names of tensors that an effect lists: a config may promise any number of layers.
_MOST_NAMES = 256
#: Tensors whose causes are looked for: no model has as many, but a config may promise them.
_MOST_LOST = 1 << 17
#: Layers of a finding that are looked at; no model has more.
_MOST_LAYERS = 1 << 16

Coords = Mapping[str, int]


@dataclass(frozen=True)
class HeldFile:
    """A file at hand, and the rank that wrote it."""

    path: str
    coords: Coords

    @cached_property
    def form(self) -> str:
        """Its path without the numbers, which files of other ranks and layers share."""
        return _form(self.path)


def with_effects(
    findings: Iterable[Finding],
    causes: Causes,
    lost: Collection[str],
    whole: Collection[str] | None,
    echoes: Iterable[Finding],
) -> list[Finding]:
    """The findings, each error with the tensors that cannot be used because of it.

    Args:
        findings: what was found.
        causes: which of them accounts for what.
        lost: names of all tensors that are missing, incomplete or unreadable.
        whole: names of the tensors that can be used; None where these names are a target's.
        echoes: what the plan says of single tensors, with their ranks.
    """
    findings = list(findings)
    lost = set(lost).difference(whole or ())
    if not 0 < len(lost) <= _MOST_LOST:
        return findings
    of = None if whole is None else len(lost) + len(whole)
    about = {f.tensor: f for f in echoes if f.tensor}
    own = {f.tensor for f in findings if f.severity == "error" and f.tensor}
    # A config may promise any number of layers: those that a finding is about need no search.
    layers: dict[int | None, Finding] = {
        layer: f
        for f in findings
        if f.code == "FS103" and f.severity == "error" and f.axis in (None, "L")
        for layer in (f.layers or ())[:_MOST_LAYERS]
    }
    of_files = {file.cause for file in causes.files}
    effects: dict[Finding, list[str]] = {}
    for name in sorted(lost):
        if name not in own:
            cause = layers.get(layer_of(name)) or causes.of(
                about.get(name) or Finding.of("FS102", "missing tensor", tensor=name)
            )
            if cause is not None and (not cause.tensor or cause in of_files):
                effects.setdefault(cause, []).append(name)
    return [f.replace(effect=effect_on(effects[f], of)) if f in effects else f for f in findings]


def grouped(findings: Iterable[Finding], held: Sequence[HeldFile]) -> list[Finding]:
    """The findings, where those of one cause are one: missing files of one rank, or of all ranks of a stage.

    Args:
        findings: what was found.
        held: the files that are at hand.
    """
    alike: dict[object, list[Finding]] = {}
    for finding in findings:
        alike.setdefault(_cause(finding), []).append(finding)
    return [one for group in alike.values() for one in (_one(group, held) if len(group) > 1 else group)]


def _cause(finding: Finding) -> object:
    """What findings have in common that are one for people; the finding itself where it stands alone."""
    judged = (finding.code, finding.severity, finding.decided)
    if len(finding.files) != 1:
        return finding
    if finding.code == "FS101" and not finding.tensor and not finding.count:
        return (
            *judged,
            finding.message,
            finding.evidence,
            finding.host,
            _form(finding.file or ""),
            finding.got,
        )
    if finding.code == "FS111" and finding.severity == "error":
        # Of one store.
        return (*judged, finding.file)
    if finding.code == "FS115" and finding.count and not finding.tensor:
        return judged
    if finding.code == "FS113" and finding.expected and finding.got:
        return (*judged, frozenset((finding.expected, finding.got)))
    return finding


def _one(group: list[Finding], held: Sequence[HeldFile]) -> list[Finding]:
    """Findings that have one cause."""
    code = group[0].code
    if code == "FS115":
        return [_of_index(group)]
    return (
        _by_rank(group, held) if code == "FS101" else _of_store(group) if code == "FS111" else _swapped(group)
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
            parts=[f.replace(help=None, effect=None) for f in arrays],
        )
    ]


def _of_index(group: list[Finding]) -> Finding:
    """Files that hold tensors which the index sends elsewhere: the index is one."""
    count = sum(f.count or 0 for f in group)
    message = f"{count:,} tensors lie in {len(group)} files although the index names others"
    files = [f.file for f in group]
    return group[0].replace(
        message=message, files=files, count=count, effect=_united([f.effect for f in group if f.effect])
    )


def _swapped(group: list[Finding]) -> list[Finding]:
    """Two files of which each bears the other's name or rank."""
    if len(group) != 2 or (group[0].expected, group[0].got) != (group[1].got, group[1].expected):
        return group
    a, b = group
    named = "--accept renamed" in (a.help or "")
    back = f"rename the two files back, or copy both again{'; if the names are right, pass --accept renamed' if named else ''}"
    return [
        a.replace(
            message=f"{' and '.join(_apart(a.file or '', b.file or ''))} are swapped",
            files=[a.file, b.file],
            rank=a.rank if a.rank == b.rank else None,
            expected=None,
            got=None,
            evidence=f"inside they say {a.got} and {b.got}",
            help=a.help if a.decided else back,
        )
    ]


def _apart(one: str, other: str) -> tuple[str, str]:
    """The parts of two paths in which they differ first."""
    pairs = zip(one.split("/"), other.split("/"), strict=False)
    return next(((a, b) for a, b in pairs if a != b), (one, other))


def _by_rank(group: list[Finding], held: Sequence[HeldFile]) -> list[Finding]:
    """Missing files of one kind: one finding for each rank, or for each stage of which every rank is missing."""
    form = _form(group[0].file or "")
    there = [file for file in held if file.form == form and file.coords]
    lifted = _lifted(group, there)
    if lifted is not None:
        return lifted
    by_rank: dict[str | None, list[Finding]] = {}
    for finding in group:
        by_rank.setdefault(finding.rank, []).append(finding)
    return [_of_rank(rank, found, there) for rank, found in by_rank.items()]


def _lifted(group: list[Finding], there: Sequence[HeldFile]) -> list[Finding] | None:
    """One finding for each value of one dimension, where just the ranks with these values lack all their files."""
    ranks = [ranks_of(f.rank) for f in group]
    if not there or any(not rank or any(a != b for a, b in rank.values()) for rank in ranks):
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
        effect=_united([f.effect for f in found if f.effect is not None]),
        help=_help(found, rank),
    )


def effect_on(names: Sequence[str], of: int | None) -> Effect:
    """The effect on these tensors, of as many as there would be."""
    layers = [layer_of(name) for name in names]
    outside = [name for name, layer in zip(names, layers, strict=True) if layer is None]
    inside = [name for name, layer in zip(names, layers, strict=True) if layer is not None]
    layered = runs(layer for layer in layers if layer is not None)
    return Effect(len(names), of, len(inside), layered, [*outside, *inside][:_MOST_NAMES])


def _united(effects: Sequence[Effect]) -> Effect | None:
    """What several findings make impossible; each tensor is counted for one of them."""
    if not effects:
        return None
    names = sorted((name for e in effects for name in e.tensors), key=lambda name: layer_of(name) is not None)
    layered = runs(layer for e in effects for run in e.layers for layer in run)
    count, inside = sum(e.count for e in effects), sum(e.in_layers for e in effects)
    return Effect(count, effects[0].of, inside, layered, names[:_MOST_NAMES])


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


def _form(path: str) -> str:
    return _DIGITS.sub("#", path)
