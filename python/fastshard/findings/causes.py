"""Causes and consequences among findings: a missing or unreadable file makes every tensor in it missing.

The cause is reported, but its consequences are not. Nothing else is hidden: a missing tensor of another file
is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from ..common import codes
from ..common.errors import Finding
from ..common.formatting import without_numbers
from ..common.ranks import Rank, RankRanges, do_meet, is_among
from ..common.records import dataclass, field
from ..layouts.declaration import Source, Unit
from ..models.tensor_roles import place_of

__all__ = ["Causes", "LostFile", "causes_of"]

#: Dimensions along which files hold different layers.
_STAGES = frozenset({"pp", "layer"})

#: Layer and role of a tensor.
Place = tuple[int | None, str]


@dataclass(frozen=True)
class LostFile:
    """A file that is missing or unreadable, and what is known about its contents."""

    #: The finding that reports the file.
    cause: Finding
    #: Its ranks, by dimension; a missing dimension matches any rank.
    coords: RankRanges = field(default_factory=dict)
    #: Layers and roles in the similar files of other ranks; None if there is no such file.
    places: frozenset[Place] | None = None

    def may_be_of(self, coords: RankRanges) -> bool:
        """Return False if a dimension rules out that one of these ranks wrote the file."""
        return all(do_meet(self.coords[d], numbers) for d, numbers in coords.items() if d in self.coords)


@dataclass(frozen=True)
class Causes:
    """The errors of a checkpoint that make tensors missing."""

    #: Errors about the complete checkpoint.
    of_all: Sequence[Finding] = ()
    #: Errors about single tensors, by the names of the tensors.
    tensors: Mapping[str, Finding] = field(default_factory=dict)
    files: Sequence[LostFile] = ()
    #: If an index names the tensors of each file: the names of tensors in lost files, with their files.
    named: Mapping[str, str] | None = None
    #: Returns the same place for all spellings of a tensor; None for a name that no rule covers.
    spelling: Callable[[str], Place | None] = lambda name: None
    #: Ranks of the existing files, with the layers and roles in each; None if files are not divided by ranks
    #: or layers.
    present: Sequence[tuple[Mapping[str, int], frozenset[Place]]] | None = None
    #: True if there is any error; then an empty checkpoint needs no separate finding.
    broken: bool = False

    @cached_property
    def _spelled(self) -> frozenset[Place | None]:
        return frozenset(map(self.spelling, self.named or ()))

    def of(self, finding: Finding) -> Finding | None:
        """Return the finding that explains another one, if there is one."""
        if not finding.is_a("consequence"):
            return None
        if finding.code == codes.USAGE:
            return self._first() if self.broken else None
        if self.of_all:
            return self.of_all[0]
        if finding.tensor:
            if finding.tensor in self.tensors:
                return self.tensors[finding.tensor]
        elif finding.layers and finding.count and is_of_layers(finding):
            named = [name for name in self.tensors if place_of(name)[0] in finding.layers]
            if len(named) >= finding.count:
                return self.tensors[named[0]]
        if finding.code == codes.UNKNOWN_TENSOR and finding.file and finding.tensor:
            # It is there.
            return None
        return self._by_file(finding) if self.files else None

    def left(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings that no cause explains."""
        return [f for f in findings if self.of(f) is None]

    def _first(self) -> Finding | None:
        return next(iter([*self.of_all, *(file.cause for file in self.files), *self.tensors.values()]), _ANY)

    def _by_file(self, finding: Finding) -> Finding | None:
        first = self.files[0].cause
        if self.named is not None:
            if finding.tensor:
                if finding.tensor in self.named:
                    return self._of_file(self.named[finding.tensor])
                # No spelling of it is here, and one is lost: which of them was meant nothing tells.
                one = self.spelling(finding.tensor)
                return first if one is not None and one in self._spelled else None
            if finding.layers and is_of_layers(finding):
                return first if any(place_of(name)[0] in finding.layers for name in self.named) else None
            return first
        if self.present is None:
            return first
        for file in self.files:
            if file.may_be_of(finding.coords) and self._may_hold(file, finding):
                return file.cause
        return None

    def _of_file(self, path: str) -> Finding:
        """Return the finding about a file, or, if there is none, about another lost file."""
        return next((file.cause for file in self.files if path in file.cause.files), self.files[0].cause)

    def _may_hold(self, file: LostFile, finding: Finding) -> bool:
        if not finding.tensor and not is_of_layers(finding):
            # An expert is on the ranks that have its number; what their other files hold says nothing of it.
            return "ep" in file.coords or file.places is None
        if not finding.tensor:
            # Of a layer of which nothing is there no rank has a file; what else has no name follows from what
            # has one.
            return file.places is None or not finding.layers
        assert self.present is not None
        place = place_of(finding.tensor)
        if file.places is not None and place in file.places:
            return True
        if any(place in present for _, present in self.present):
            return False
        layer = place[0]
        if file.places is not None:
            return any(layer == other for other, _ in file.places)
        return layer is None or not any(
            layer == other
            for coords, present in self.present
            if is_among(coords, finding.coords)
            for other, _ in present
        )


#: The cause for an error of neither kind.
_ANY = Finding(codes.MISSING_TENSOR, "error", "the checkpoint has errors")


def is_of_layers(finding: Finding) -> bool:
    """Return False for a finding whose positions denote experts or similar, and not layers."""
    return finding.axis in (None, "L")


def causes_of(
    findings: Sequence[Finding],
    source: Source,
    paths: Sequence[str],
    names: Callable[[int], Iterable[str]],
    labels: Sequence[str] | None = None,
) -> Causes:
    """Find the causes among the findings about a checkpoint.

    Args:
        findings: the findings of opening the checkpoint.
        source: the declaration of the checkpoint.
        paths: the paths of its files, by number.
        names: returns the names of the tensors in a readable file, by its number.
        labels: the names of the files in findings, which may include their roots.
    """
    labels = paths if labels is None else labels
    errors = [f for f in findings if f.severity == "error"]
    # Whatever the reason, what cannot be read holds nothing.
    empty = [i for i in range(len(paths)) if errors and not any(True for _ in names(i))]
    unread = {path for i in empty for path in (paths[i], labels[i])}
    # Nor is anything taken of a file that is refused where tensors are put together from several.
    refused = not source.files.units
    lost = [
        f
        for f in errors
        if f.file and (f.file in unread or (not f.tensor and (refused or f.is_a("lost_file"))))
    ]

    def is_closed(finding: Finding) -> bool:
        """Return True for a directory that cannot be read, so that its contents are unknown."""
        return finding.code == codes.PERMISSION and finding.file not in (*paths, *labels)

    present, files = None, []
    if source.index.is_listed or not any(unit.coords or unit.prefix for unit in source.files.units):
        files = [LostFile(cause) for cause in lost]
    elif lost:
        gone = {f.file for f in lost}
        # Where parameters are stored besides, files of optimizer state hold none.
        of_state = source.optimizer.files if source.optimizer.params_stored else set()
        there = [
            (unit, paths[unit.file], _list_places(unit, names(unit.file)))
            for unit in source.files.units
            if gone.isdisjoint((paths[unit.file], labels[unit.file]))
        ]
        present = [(unit.coords, of_unit) for unit, _, of_unit in there]
        ranks, path_of = locate_files(source, paths), dict(zip(labels, paths, strict=True))
        coords = {paths[unit.file]: unit.coords for unit in source.files.units}
        for cause in lost:
            path = path_of.get(cause.file or "", cause.file or "")
            if path not in of_state:
                files.append(_lost(cause, path, ranks, coords.get(path, {}), there))
    return Causes(
        of_all=[f for f in errors if not f.tensor and (f.is_a("whole_checkpoint") or is_closed(f))],
        tensors={f.tensor: f for f in reversed(errors) if f.tensor},
        files=files,
        named=dict(_all_names(source)) if source.index.is_listed else None,
        spelling=_spelling(source),
        present=present,
        broken=bool(errors),
    )


def _all_names(source: Source) -> Iterable[tuple[str, str]]:
    """Yield the names of lost tensors, both the stored ones and the table's, each with its file."""
    for name, file in source.index.lost.items():
        yield name, file
        yield source.names.own.get(name, name), file
        yield name.removeprefix(source.names.prefix), file


def _spelling(source: Source) -> Callable[[str], Place | None]:
    """Return a function from a name to its layer and its rule in the table.

    Alternatives within a name belong to the same rule.
    """
    table = source.binding.usual_table if source.binding.table is None else source.binding.table

    def spelling(name: str) -> Place | None:
        rule = None if table is None else table.rule_of(name)
        return None if rule is None else (place_of(name)[0], rule.name)

    return spelling


def _list_places(unit: Unit, names: Iterable[str]) -> frozenset[Place]:
    """Return layer and role of the tensors in a file, by their names in the full model."""
    under, base = "".join(f"{key}." for key in unit.under), unit.bases.get("L", 0)
    places = set()
    for name in names:
        if name.startswith(under):
            layer, role = place_of(unit.prefix + name[len(under) :].removeprefix(unit.strip))
            places.add((layer if layer is None else layer + base, role))
    return frozenset(places)


def locate_files(source: Source, paths: Sequence[str]) -> dict[str, Rank]:
    """Return the rank that wrote each file, by its path; empty for a file that belongs to no rank."""
    units = {unit.file: unit.coords for unit in source.files.units}
    return {path: source.files.ranks.get(file) or units.get(file, {}) for file, path in enumerate(paths)}


def _lost(
    cause: Finding,
    path: str,
    ranks: Mapping[str, Rank],
    coords: Rank,
    there: Sequence[tuple[Unit, str, frozenset[Place]]],
) -> LostFile:
    """Derive the contents of a lost file from files of the same kind whose ranks differ in one dimension.

    Args:
        cause: the finding that reports the file.
        path: the path of the file.
        ranks: the rank of each file, by its path.
        coords: the place of the file among the ranks that divide tensors; empty if it is not known.
        there: the readable files, each with its path and the places of its tensors.
    """
    own = _as_ranges(ranks.get(path, {})) or cause.coords
    lost = {**own, **_as_ranges(coords)}
    if cause.code == codes.MISSING_LAYER:
        return LostFile(cause, lost)
    kind = without_numbers(path)
    like: set[Place] = set()
    for _, other, places in there:
        if without_numbers(other) == kind:
            theirs = _as_ranges(ranks[other])
            apart = [d for d in theirs if d in own and not do_meet(own[d], theirs[d])]
            if len(apart) == 1 and apart[0] not in _STAGES:
                like |= places
    return LostFile(cause, lost, frozenset(like) or None)


def _as_ranges(rank: Rank) -> RankRanges:
    return {dimension: (range(n, n + 1),) for dimension, n in rank.items()}
