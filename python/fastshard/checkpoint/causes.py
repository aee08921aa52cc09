"""Which findings only follow from others: a file that is missing or cannot be read makes every tensor in it missing.

The cause is said and what follows from it is not. Nothing else is hidden: a tensor that another file should hold is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from ..common import codes
from ..common.errors import Finding
from ..common.formatting import without_numbers
from ..common.records import dataclass, field
from ..common.regex import compile_when_used
from ..layouts.declaration import Source, Unit
from ..models.tensor_roles import place_of

__all__ = ["Causes", "LostFile", "causes_of"]

#: A rank, or ranks from one to another.
_RANK = compile_when_used(r"\b([a-z]+) (\d+)(?: to (\d+))?")
_DIGITS = compile_when_used(r"\d+")

#: Layer and role of a tensor.
Place = tuple[int | None, str]


@dataclass(frozen=True)
class LostFile:
    """A file that is missing or cannot be read, and what is known of what it held."""

    #: What tells of it.
    cause: Finding
    #: First and last rank by dimension; a dimension that is not named may be any.
    ranks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: What the files of other ranks hold that are its like; None where there is no such file.
    places: frozenset[Place] | None = None

    def is_of(self, ranks: Mapping[str, tuple[int, int]]) -> bool:
        """True if no dimension speaks against it."""
        return all(
            self.ranks[d][0] <= last and first <= self.ranks[d][1]
            for d, (first, last) in ranks.items()
            if d in self.ranks
        )


@dataclass(frozen=True)
class Causes:
    """What is wrong with a checkpoint that makes tensors missing."""

    #: Errors about all of it, by which nothing is judged.
    of_all: Sequence[Finding] = ()
    #: Errors about single tensors, by these.
    tensors: Mapping[str, Finding] = field(default_factory=dict)
    files: Sequence[LostFile] = ()
    #: Where an index names the tensors of each file: those of files that are lost, and the file.
    named: Mapping[str, str] | None = None
    #: What tells that two names are spellings of one tensor; None for a name that tells of none.
    spelling: Callable[[str], Place | None] = lambda name: None
    #: What files at hand hold, by the ranks that these are of; None where files are not divided by ranks or layers.
    held: Sequence[tuple[Mapping[str, int], frozenset[Place]]] | None = None
    #: True if there is any error, so that a checkpoint of which nothing is left needs no words of its own.
    broken: bool = False

    @cached_property
    def _spelled(self) -> frozenset[Place | None]:
        return frozenset(map(self.spelling, self.named or ()))

    def of(self, finding: Finding) -> Finding | None:
        """The finding that accounts for one, if one does."""
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
        """The findings that nothing accounts for."""
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
        if self.held is None:
            return first
        ranks = ranks_of(finding.rank)
        for file in self.files:
            if file.is_of(ranks) and self._may_hold(file, finding, ranks):
                return file.cause
        return None

    def _of_file(self, path: str) -> Finding:
        """What is wrong with a file; with another one, if nothing is said of this one."""
        return next((file.cause for file in self.files if path in file.cause.files), self.files[0].cause)

    def _may_hold(self, file: LostFile, finding: Finding, ranks: Mapping[str, tuple[int, int]]) -> bool:
        if not finding.tensor and not is_of_layers(finding):
            # An expert is on the ranks that have its number; what their other files hold says nothing of it.
            return "ep" in file.ranks or file.places is None
        if not finding.tensor:
            # Of a layer of which nothing is there no rank has a file; what else has no name follows from what has one.
            return file.places is None or not finding.layers
        assert self.held is not None
        place = place_of(finding.tensor)
        if file.places is not None and place in file.places:
            return True
        if any(place in held for _, held in self.held):
            return False
        layer = place[0]
        if file.places is not None:
            return any(layer == other for other, _ in file.places)
        return layer is None or not any(
            layer == other
            for coords, held in self.held
            if all(first <= coords.get(d, first) <= last for d, (first, last) in ranks.items())
            for other, _ in held
        )


#: What is said where an error is of neither kind.
_ANY = Finding(codes.MISSING_TENSOR, "error", "the checkpoint has errors")


def is_of_layers(finding: Finding) -> bool:
    """False for a finding whose positions are those of experts or the like."""
    return finding.axis in (None, "L")


def ranks_of(text: str | None) -> dict[str, tuple[int, int]]:
    """First and last rank by dimension, of what a finding says of ranks.

    >>> ranks_of("tp 3 to 5, pp 1"), ranks_of(None)
    ({'tp': (3, 5), 'pp': (1, 1)}, {})
    """
    return {m[1]: (int(m[2]), int(m[3] or m[2])) for m in _RANK.finditer(text or "")}


def causes_of(
    findings: Sequence[Finding], source: Source, paths: Sequence[str], names: Callable[[int], Iterable[str]]
) -> Causes:
    """The causes among what was found of a checkpoint.

    Args:
        findings: what was found on opening it.
        source: its declaration.
        paths: of its files, by their numbers.
        names: of the tensors in a file that can be read.
    """
    errors = [f for f in findings if f.severity == "error"]
    # Whatever the reason, what cannot be read holds nothing.
    unread = {path for i, path in enumerate(paths) if errors and not any(True for _ in names(i))}
    # Nor is anything taken of a file that is refused where tensors are put together from several.
    refused = not source.units
    lost = [
        f
        for f in errors
        if f.file and (f.file in unread or (not f.tensor and (refused or f.is_a("lost_file"))))
    ]

    def is_closed(finding: Finding) -> bool:
        """True for a directory that may not be looked into: nobody knows what it holds."""
        return finding.code == codes.PERMISSION and finding.file not in paths

    held = None
    files = [LostFile(f) for f in lost]
    if lost and not source.listed and any(unit.coords or unit.prefix for unit in source.units):
        gone = {f.file for f in lost}
        # Where parameters are stored besides, files of optimizer state hold none.
        of_state = source.optimizer.files if source.optimizer.params_stored else set()
        units = [(unit, paths[unit.file]) for unit in source.units]
        there = [(u, path, _held(u, names(u.file))) for u, path in units if path not in gone]
        held = [(unit.coords, places) for unit, _, places in there]
        coords = {path: unit.coords for unit, path in units}
        files = [_lost(f, coords.get(f.file or ""), there) for f in lost if f.file not in of_state]
    return Causes(
        of_all=[f for f in errors if not f.tensor and (f.is_a("whole_checkpoint") or is_closed(f))],
        tensors={f.tensor: f for f in reversed(errors) if f.tensor},
        files=files,
        named=dict(_all_names(source)) if source.listed else None,
        spelling=_spelling(source),
        held=held,
        broken=bool(errors),
    )


def _all_names(source: Source) -> Iterable[tuple[str, str]]:
    """Names of what is lost, as stored and as the table has them, each with its file."""
    for name, file in source.lost.items():
        yield name, file
        yield source.names.get(name, name), file
        yield name.removeprefix(source.weights_prefix), file


def _spelling(source: Source) -> Callable[[str], Place | None]:
    """Layer and rule of the table for a name: alternatives within a name are one rule."""
    table = source.usual_table if source.table is None else source.table

    def spelling(name: str) -> Place | None:
        rule = None if table is None else table.rule_of(name)
        return None if rule is None else (place_of(name)[0], rule.name)

    return spelling


def _held(unit: Unit, names: Iterable[str]) -> frozenset[Place]:
    """Places of the tensors of a file, by their names in the whole."""
    under, base = "".join(f"{key}." for key in unit.under), unit.bases.get("L", 0)
    places = set()
    for name in names:
        if name.startswith(under):
            layer, role = place_of(unit.prefix + name[len(under) :].removeprefix(unit.strip))
            places.add((layer if layer is None else layer + base, role))
    return frozenset(places)


def _lost(
    cause: Finding, coords: Mapping[str, int] | None, there: Sequence[tuple[Unit, str, frozenset[Place]]]
) -> LostFile:
    """What a lost file held: what files hold whose names differ from its own in one number, that of a rank."""
    ranks = ranks_of(cause.rank) if coords is None else {d: (n, n) for d, n in coords.items()}
    if cause.code == codes.MISSING_LAYER:
        return LostFile(cause, ranks)
    path = cause.file or ""
    form, numbers = without_numbers(path), _DIGITS.findall(path)
    alike = [
        (unit, _DIGITS.findall(other), places)
        for unit, other, places in there
        if without_numbers(other) == form
    ]
    ranks = ranks or _by_name(numbers, [(unit.coords, of) for unit, of, _ in alike])
    like: set[Place] = set()
    for unit, of, places in alike:
        differ = sum(a != b for a, b in zip(numbers, of, strict=True))
        apart = [d for d, n in unit.coords.items() if d in ranks and not ranks[d][0] <= n <= ranks[d][1]]
        if differ == 1 and len(apart) == 1 and apart != ["pp"]:
            like |= places
    return LostFile(cause, ranks, frozenset(like) or None)


def _by_name(
    numbers: Sequence[str], alike: Sequence[tuple[Mapping[str, int], Sequence[str]]]
) -> dict[str, tuple[int, int]]:
    """The rank of a file by the numbers in its name, where those in the names of others are their ranks."""
    found = {}
    for d in set().union(*(coords for coords, _ in alike)):
        at = {
            int(numbers[i])
            for i in range(len(numbers))
            if all(coords.get(d) == int(of[i]) for coords, of in alike)
        }
        if len(at) == 1:
            (rank,) = at
            found[d] = (rank, rank)
    return found
