"""Modules that have another place in memory than on disk: prefixes of names that correspond.

source: transformers conversion_mapping.py (LLaVA: ``model.language_model.`` in memory is
    ``language_model.model.`` on disk)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from ..common.records import dataclass, field

Parts = tuple[str, ...]
#: Maximum number of prefixes in a message.
_MOST_NAMED = 8


@dataclass
class Moved:
    """Prefixes that correspond, and the resulting names."""

    #: Pairs of corresponding prefixes; each ends with a dot or is empty.
    prefixes: dict[str, str] = field(default_factory=dict)
    #: The corresponding name of each name that has one.
    names: dict[str, str] = field(default_factory=dict)
    #: Pairs of prefixes that may correspond, although another pair fits too.
    uncertain: dict[tuple[str, str], None] = field(default_factory=dict)
    #: The number of names below these prefixes.
    undecided: int = 0

    def __str__(self) -> str:
        texts = [_as(own, other) for own, other in self.prefixes.items()]
        more = [f"{len(texts) - _MOST_NAMED} more"] if len(texts) > _MOST_NAMED else []
        return ", ".join(texts[:_MOST_NAMED] + more)

    def of(self, name: str) -> str:
        """Return the corresponding name of a tensor below a known prefix; return other names unchanged."""
        own = max((own for own in self.prefixes if name.startswith(own)), key=len, default="")
        return self.prefixes.get(own, own) + name.removeprefix(own)

    @property
    def readings(self) -> str:
        """The uncertain correspondences, as text."""
        return "; ".join(_as(own, other) for own, other in self.uncertain)


def moved(names: Collection[str], others: Collection[str], fits: Callable[[str, str], bool]) -> Moved:
    """Find the prefixes that map names to other names.

    A prefix corresponds to another if each name below it has a fitting counterpart there. Names that occur on
    both sides stay unchanged. Numbers and the last module stay; other parts may be moved, added or removed,
    but not replaced.

    Args:
        names: names to map; the function drops none of them.
        others: names to which they may correspond.
        fits: returns True if the tensors with two names may be the same.
    """
    both = set(names) & set(others)
    places: dict[tuple[str, Parts], list[Parts]] = defaultdict(list)
    for other in others:
        if other not in both:
            parts = _parts(other)
            places[parts[-1], _numbers(parts)].append(parts)
    found = Moved()
    takers: dict[str, list[str]] = defaultdict(list)

    def counterparts(depth: int, below: list[Parts]) -> list[Parts]:
        """List the prefixes to which the common prefix of some names may correspond."""
        first = below[0]
        own, rest = first[:depth], first[depth:]
        likely = []
        for other in places.get((first[-1], _numbers(first)), ()):
            at = len(other) - len(rest)
            if at >= 0 and other[at:] == rest and _keeps(own, other[:at]) and _ends_alike(first, other):
                likely.append(other[:at])
        return [to for to in likely if all(holds(name, to + name[depth:]) for name in below)]

    def holds(name: Parts, other: Parts) -> bool:
        joined = ".".join(other)
        return (
            other in places.get((name[-1], _numbers(name)), ())
            and _ends_alike(name, other)
            and fits(".".join(name), joined)
        )

    def visit(depth: int, below: list[Parts]) -> None:
        if not any(".".join(name) in both for name in below):
            fitting = counterparts(depth, below)
            if depth and len(fitting) > 1:
                # What a part is called tells it from another of the same shapes.
                last = below[0][depth - 1]
                fitting = [to for to in fitting if last in to] or fitting
            own = _joined(below[0][:depth])
            if len(fitting) == 1:
                to = _joined(fitting[0])
                found.prefixes[own] = to
                for name in below:
                    other = ".".join(fitting[0] + name[depth:])
                    found.names[".".join(name)] = other
                    takers[other].append(own)
                return
            if fitting:
                found.uncertain |= {reduce_prefixes(own, _joined(to)): None for to in fitting}
                found.undecided += len(below)
                return
        children: dict[str, list[Parts]] = defaultdict(list)
        for name in below:
            if len(name) > depth:
                children[name[depth]].append(name)
        for child in children.values():
            visit(depth + 1, child)

    if names:
        visit(0, [_parts(name) for name in names])
    for by in takers.values():
        if len(by) > 1:
            found.uncertain |= {reduce_prefixes(own, found.prefixes[own]): None for own in by}
    _neighbours(found, names, set(others) - both - set(found.names.values()))
    return found


def _neighbours(found: Moved, names: Iterable[str], free: set[str]) -> None:
    """Map names without a fitting counterpart in the same way as their neighbours.

    Findings about such tensors then have the right name.
    """
    ways: dict[str, set[str]] = defaultdict(set)
    for own, other in found.prefixes.items():
        own, other = reduce_prefixes(own, other)
        ways[own].add(other)
    certain = {own: to.pop() for own, to in ways.items() if len(to) == 1}
    for name in names:
        if name in found.names:
            continue
        near = (own for own in sorted(certain, key=len, reverse=True) if name.startswith(own))
        to = next((other for own in near if (other := certain[own] + name.removeprefix(own)) in free), None)
        if to is not None:
            free.discard(to)
            found.names[name] = to


def reduce_prefixes(own: str, other: str) -> tuple[str, str]:
    """Return two prefixes without their common ending."""
    a, b = own.split(".")[:-1], other.split(".")[:-1]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return _joined(a), _joined(b)


def _parts(name: str) -> Parts:
    return tuple(name.split(".")) if name else ()


def _joined(parts: Iterable[str]) -> str:
    return "".join(f"{part}." for part in parts)


def _numbers(parts: Parts) -> Parts:
    return tuple(part for part in parts if part.isdecimal())


def _keeps(own: Parts, other: Parts) -> bool:
    """Return True if one name contains all parts of the other one."""
    return set(own) <= set(other) or set(other) <= set(own)


def _ends_alike(name: Parts, other: Parts) -> bool:
    """Return True if both names have the same ending: the same tensor of a module with the same name."""
    return all(a == b for a, b in zip(name[:-3:-1], other[:-3:-1], strict=False))


def _as(own: str, other: str) -> str:
    """Describe the change of a prefix in a message."""
    if not own:
        return f"with {other!r} before them"
    return f"without {own!r}" if not other else f"{own}* as {other}*"
