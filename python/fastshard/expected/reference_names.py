"""The tensors of a checkpoint under the names that a reference has for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Set
from functools import cached_property

from .. import _core
from ..common import codes
from ..common.errors import FastshardError
from ..common.records import dataclass, field
from ..layouts.declaration import Source, is_state
from ..layouts.prefix_moves import Moved, moved

__all__ = ["Met", "Reading", "Side", "aligned", "gain", "moves", "unequal"]

#: Maximum number of parts of a prefix, e.g. ``model.language_model.``.
_DEEP = 3


@dataclass(frozen=True)
class Side:
    """A checkpoint's tensors under names that may match the reference."""

    draft: _core.Draft
    source: Source
    #: True for names with the source's prefix, as in a merge.
    below: bool
    #: Returns True if two tensors, by their stored names, have the same bytes; the last argument also allows
    #: constant ones.
    same: Callable[[str, str, bool], bool] = lambda one, other, constant: False
    #: Description of how the names were changed to the reference's.
    how: str = ""
    #: Returns True if a tensor, by its stored name, is zero from a row to its end.
    ends_in_zeros: Callable[[str, int], bool] = lambda name, first: False

    @property
    def outer(self) -> str:
        """Prefix of the model's names."""
        return self.source.names.prefix if self.below else ""

    def own(self, stored: str) -> str | None:
        """Return the model's own name of a tensor; None for optimizer state and for further copies of the
        model."""
        name = self.source.names.own.get(stored, stored)
        apart = self.source.names.other_prefixes if self.below else []
        if is_state(name) or not name.startswith(self.outer) or name.startswith(tuple(apart) or "\0"):
            return None
        return name.removeprefix(self.outer)

    @cached_property
    def tensors(self) -> dict[str, tuple[str, list[int]]]:
        """Dtype and full shape of each tensor, by its stored name."""
        return {name: (kind, whole) for name, (kind, _, _, whole, _) in self.draft.tensors()}

    @property
    def own_names(self) -> set[str]:
        """The model's own names of its tensors."""
        return {own for name in self.tensors if (own := self.own(name)) is not None}


@dataclass(frozen=True)
class Reading:
    """The rule that turns the model's own names into the roster's: add a prefix, or remove it."""

    prefix: str = ""
    adds: bool = False
    #: Names in the roster.
    listed: Set[str] = frozenset()

    def of(self, own: str) -> str:
        """Return the roster's name of a tensor: its own with the prefix added, or removed.

        A name in the roster stays, unless the name with the prefix is in the roster too.
        """
        if not self.prefix or (own in self.listed and not (self.adds and self.prefix + own in self.listed)):
            return own
        return self.prefix + own if self.adds else own.removeprefix(self.prefix)

    def back(self, name: str) -> str:
        """Return the model's own name of a missing tensor, as far as it can be derived."""
        return name.removeprefix(self.prefix) if self.adds else self.prefix + name

    def __str__(self) -> str:
        return f"with the prefix {self.prefix!r}" if self.adds else f"without the prefix {self.prefix!r}"


@dataclass(frozen=True)
class Met:
    """A side and a roster under common names."""

    side: Side
    found: _core.Compared
    reading: Reading = field(default_factory=Reading)

    def name(self, stored: str) -> str:
        """Return the roster's name of a stored tensor."""
        return self.reading.of(self.side.own(stored) or stored)

    @cached_property
    def further(self) -> list[str]:
        """Stored names of the model's own tensors that the roster lacks."""
        return [stored for stored in self.found["further"] if self.side.own(stored) is not None]

    @cached_property
    def matched(self) -> int:
        """Number of tensors that both sides have."""
        odd = {name for name, *_ in self.found["differing"]} | {name for name, *_ in self.found["dtypes"]}
        return self.found["same"] + len(odd)

    def fits(self, listed: int) -> bool:
        """Return True if most names of the smaller side also occur on the other side."""
        return 2 * self.matched > min(listed, self.matched + len(self.further))


def moves(side: Side, roster: _core.Roster, path: str) -> Moved | None:
    """Find the reference's names for tensors whose names in memory differ; None if there are none.

    Args:
        side: the tensors under their names without the reference.
        roster: roster of the reference.
        path: path of the reference, for messages.

    Raises:
        FastshardError: ``FS106`` if the names can be read in several ways.
    """
    found = side.draft.compared(roster, side.source.names.own, side.outer)
    if not found["missing"] or not found["further"] or side.outer:
        return None
    shapes = {own: shape for name, (_, shape) in side.tensors.items() if (own := side.own(name)) is not None}
    listed = {name: shape for name, shape, _, _ in roster.entries()}

    def fits(name: str, other: str) -> bool:
        expected = listed[other]
        return expected is None or not unequal(shapes[name], expected)

    way = moved(shapes.keys(), listed.keys(), fits)
    known = len(shapes.keys() & listed.keys()) + len(way.names) + way.undecided
    if 2 * known <= min(len(shapes), len(listed)):
        # It is another model.
        return None
    if "" in way.prefixes:
        # The reference lies below a name, which may be a trainer's: the model's own names stay.
        return None
    if way.uncertain:
        help_ = "pass a reference with the checkpoint's names; --prefix chooses one of several models"
        raise _ambiguous(path, way.readings, help_)
    return way if way.names else None


def _ambiguous(path: str, readings: str, help_: str) -> FastshardError:
    """Make the error for names that can be read in several ways."""
    message = f"the names match the reference {path} in several ways"
    return FastshardError.of(codes.AMBIGUOUS, message, got=readings, help=help_)


def gain(side: Side, other: Side, roster: _core.Roster) -> int:
    """Return how many more names of a roster one side has than the other."""
    counts = [
        len(one.draft.compared(roster, one.source.names.own, one.outer)["missing"]) for one in (other, side)
    ]
    return counts[0] - counts[1]


def aligned(met: Met, roster: _core.Roster, path: str) -> Met | None:
    """Repeat a comparison with one prefix added to the names, or removed from them.

    The result is None if no prefix makes most names fit.

    Raises:
        FastshardError: ``FS106`` if several prefixes do.
    """
    side = met.side
    own = {name: stored for stored in side.tensors if (name := side.own(stored)) is not None}
    listed = {name for name, *_ in roster.entries()}
    least = min(len(own), len(listed))
    readings = [Reading(prefix, False, listed) for prefix in _prefixes(own, least)]
    readings += [Reading(prefix, True, listed) for prefix in _prefixes(listed, least)]
    fitting = []
    for reading in readings:
        names = {reading.of(name) for name in own}
        if len(names) == len(own) and 2 * len(names & listed) > least:
            fitting.append(reading)
    if len(fitting) > 1:
        text = "; ".join(map(str, fitting))
        raise _ambiguous(path, text, "choose the model with --prefix")
    if not fitting:
        return None
    # What is no part of the model has no name there.
    same = {stored: f"{side.outer}\0{stored}" for stored in side.tensors}
    same |= {stored: side.outer + fitting[0].of(name) for name, stored in own.items()}
    return Met(side, side.draft.compared(roster, same, side.outer), fitting[0])


def _prefixes(names: Iterable[str], least: int) -> list[str]:
    """List prefixes of a few parts, without layer numbers, that more than half of ``least`` names have."""
    counted = Counter(
        "".join(f"{part}." for part in parts[:depth])
        for parts in (name.split(".") for name in names)
        for depth in range(1, min(_DEEP, len(parts) - 1) + 1)
        if not parts[depth - 1].isdecimal()
    )
    return [prefix for prefix, n in counted.items() if 2 * n > least]


def unequal(got: list[int], expected: list[int | None]) -> list[int]:
    """List the dimensions in which two shapes differ; all dimensions if their numbers differ."""
    if len(got) != len(expected):
        return list(range(max(len(got), len(expected))))
    return [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if b is not None and a != b]
