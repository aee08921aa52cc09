"""Two layout tables, made from a list, that write a model with names in memory as ``save_pretrained`` does.

transformers 5 uses other names in memory than on disk, and fuses experts. Its list states the parts of
tensors in memory that make up each tensor on disk (:class:`~fastshard.expected.expected_list.Part`). This
module derives two tables from them, one for the tensors in memory and one for those on disk. Both map to the
same canonical tensors; the layout engine does the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from .._core import Table
from ..common import codes
from ..common.errors import FastshardError
from ..common.records import dataclass, replace
from ..common.regex import compile_when_used
from .expected_list import ExpectedTensors, Part, patterns

__all__ = ["are_in_memory", "tables_of"]

#: Characters with a special meaning in a name pattern.
_SPECIAL = compile_when_used(r"[(){}|]")
_NUMBER = compile_when_used(r"(?<=\.)\d+(?=\.)")

Shapes = Mapping[str, tuple[int, ...]]


class _Digit(NamedTuple):
    """A factor of a dimension: its axis, its extent, and its step along the dimension."""

    axis: str
    extent: int
    step: int


class _Range(NamedTuple):
    """The range that a part covers in a dimension: the first index, and its digits, outermost first."""

    first: int
    digits: tuple[_Digit, ...]

    @property
    def extent(self) -> int:
        return math.prod(digit.extent for digit in self.digits)

    @property
    def text(self) -> str:
        """The text of the dimension in a rule."""
        return "*".join(digit.axis for digit in self.digits) or "1"

    def steps(self) -> int:
        """Return the step of a range with equally spaced indices; 0 for another range."""
        step = self.digits[-1].step if self.digits else 1
        found = step
        for digit in reversed(self.digits):
            if digit.step != found:
                return 0
            found *= digit.extent
        return step


class _End(NamedTuple):
    """The place of a box in one tensor."""

    name: str
    ranges: tuple[_Range, ...]


class _Move(NamedTuple):
    """A box of elements, with its place in memory and on disk."""

    memory: _End
    disk: _End


@dataclass(frozen=True)
class _Rule:
    """A rule of a table, with the axes that it adds."""

    name: str
    dims: Sequence[str]
    canonical: str
    optional: bool = False

    def __str__(self) -> str:
        fields = {"name": self.name, "shape": f"[{', '.join(self.dims)}]", "as": self.canonical}
        lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
        return "\n".join(["[[tensor]]", *lines, *(["optional = true"] if self.optional else [])])


class _Formless(Exception):
    """Raised if no rule of a table can express the parts of a tensor."""


def are_in_memory(listed: ExpectedTensors, names: Collection[str]) -> bool:
    """Return True if names are a model's names in memory, and these differ from the names on disk."""
    memory = {t.name for t in listed.in_memory}
    only_on_disk = {t.name for t in listed.tensors} - memory
    return not listed.only_in_memory.isdisjoint(names) and only_on_disk.isdisjoint(names)


def tables_of(listed: ExpectedTensors, stored: Collection[str]) -> tuple[Table, Table]:
    """Make the tables for a model's tensors in memory and on disk; both have the fact ``tied``.

    Args:
        listed: the tensors that the model's config promises.
        stored: names in memory of the tensors that exist.

    Raises:
        FastshardError: ``FS514`` if a tensor on disk is computed, or if a table cannot express its parts.
    """
    memory: Shapes = {t.name: t.shape for t in listed.in_memory}
    disk: Shapes = {t.name: t.shape for t in listed.tensors}
    canonical: dict[str, str] = {}
    rules: tuple[list[_Rule], list[_Rule]] = ([], [])
    axes: dict[str, int] = {}
    optional = patterns(listed.may_be_missing)
    at = ""
    try:
        if at := next((name for name in (*memory, *disk) if _SPECIAL.search(name)), ""):
            raise _Formless("its name has brackets")
        moves = []
        for at, shape in disk.items():
            moves += [_move(at, shape, part, memory) for part in _parts(listed, at, memory)]
        for number, group in enumerate(_connected(moves)):
            at, tag = group[0].disk.name, f"t{number}"
            first, second = _rules(tag, group, memory, disk, axes)
            may_be = [any(p.search(name) for p in optional) for name in {m.memory.name for m in group}]
            rules[0].extend(_optional(rule, all(may_be)) for rule in first)
            rules[1].extend(second)
            canonical |= {move.memory.name: tag for move in group}
        _as_stored(listed, canonical, rules[0], stored)
        ties, tied = _tied(listed, canonical, rules[0], stored)
        if at := next((name for name in memory if name not in canonical and name not in tied), ""):
            raise _Formless("it has no part on disk")
    except _Formless as why:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"{at} of {listed.model_class} cannot be written under its name on disk: {why}",
            tensor=at,
            help="merge it without --like, which keeps the names in memory; transformers 5 can load them",
            run=["fastshard merge CKPT OUT"],
        ) from None
    extents = "\n".join(f"{axis} = {extent}" for axis, extent in axes.items())
    family = json.dumps(f"transformers.{listed.model_class}")
    found = []
    for where, texts in zip(("memory", "disk"), rules, strict=True):
        head = f'layout = "transformers.{where}"\nfamily = {family}\n\n[axes]\n{extents}\n\n{ties}\n'
        found.append(Table(head + "\n".join(map(str, texts))))
    return found[0], found[1]


def _parts(listed: ExpectedTensors, name: str, memory: Shapes) -> Sequence[Part]:
    """Return the parts of a tensor on disk."""
    if name in listed.made:
        if (parts := listed.made[name]) is None:
            raise _Formless("its values are computed when it is saved")
        return parts
    if name not in memory:
        raise _Formless("nothing states what it is made from")
    shape, steps = memory[name], _strides(memory[name])
    dims = tuple(((n, step),) if n > 1 else () for n, step in zip(shape, steps, strict=True))
    return (Part(name, 0, (0,) * len(shape), dims),)


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the distance in elements between adjacent indices of each dimension."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _move(name: str, shape: Sequence[int], part: Part, memory: Shapes) -> _Move:
    """Express a part by the ranges that it covers on both sides.

    An axis has the name of its dimension on disk.
    """
    if part.name not in memory or len(part.dims) != len(shape):
        raise _Formless("its parts are not from the model's tensors")
    extents = memory[part.name]
    if not 0 <= part.offset < max(1, math.prod(extents)):
        raise _Formless("a part begins outside its tensor")
    strides = _strides(extents)
    on_disk: list[_Range] = []
    found: list[tuple[int, str, int]] = []
    for d, (first, digits) in enumerate(zip(part.start, part.dims, strict=True)):
        inner: list[_Digit] = []
        step = 1
        for extent, stride in reversed([one for digit in digits for one in _divided(*digit, strides)]):
            axis = f"d{d}x{extent}" + "_" * sum(one.extent == extent for one in inner)
            inner.insert(0, _Digit(axis, extent, step))
            found.append((stride, axis, extent))
            step *= extent
        on_disk.append(_Range(first, tuple(inner)))
    in_memory = []
    for n, stride in zip(extents, strides, strict=True):
        taken = sorted((one for one in found if stride <= one[0] < stride * n), reverse=True)
        if any(one[0] % stride for one in taken):
            raise _Formless("its blocks cross the dimensions in memory")
        ordered = tuple(_Digit(axis, extent, at // stride) for at, axis, extent in taken)
        in_memory.append(_Range(part.offset // stride % n if n else 0, ordered))
    return _Move(_End(part.name, tuple(in_memory)), _End(name, tuple(on_disk)))


def _divided(extent: int, stride: int, strides: Iterable[int]) -> list[tuple[int, int]]:
    """Split a digit so that there is one for each dimension in memory that it crosses."""
    inside = sorted((s for s in set(strides) if stride < s < stride * extent), reverse=True)
    found = []
    for step in inside:
        if step % stride or extent % (step // stride):
            raise _Formless("its blocks cross the dimensions in memory")
        found.append((extent // (step // stride), step))
        extent = step // stride
    return [*found, (extent, stride)]


def _connected(moves: Iterable[_Move]) -> list[list[_Move]]:
    """Group moves so that no two groups share a tensor."""
    group_of: dict[tuple[str, str], list[_Move]] = {}
    for move in moves:
        ends = (("memory", move.memory.name), ("disk", move.disk.name))
        groups = list({id(group_of[end]): group_of[end] for end in ends if end in group_of}.values())
        group = groups[0] if groups else []
        for other in groups[1:]:
            group += other
            for one in other:
                group_of["memory", one.memory.name] = group_of["disk", one.disk.name] = group
        group.append(move)
        group_of |= dict.fromkeys(ends, group)
    return list({id(group): group for group in group_of.values()}.values())


def _rules(
    tag: str, group: Sequence[_Move], memory: Shapes, disk: Shapes, axes: dict[str, int]
) -> tuple[list[_Rule], list[_Rule]]:
    """Return the rules of a group in memory and on disk, and add their axes to ``axes``."""
    if len({move.memory.name for move in group}) == 1:
        one, several = _fused(tag, [(m.memory, m.disk) for m in group], memory, disk, axes)
        return [one], several
    if len({move.disk.name for move in group}) == 1:
        one, several = _fused(tag, [(m.disk, m.memory) for m in group], disk, memory, axes)
        return several, [one]
    raise _Formless("several tensors in memory and several on disk share elements")


def _fused(
    tag: str, ends: Sequence[tuple[_End, _End]], of_one: Shapes, of_several: Shapes, axes: dict[str, int]
) -> tuple[_Rule, list[_Rule]]:
    """Return the rule of one tensor, and the rules of the tensors that contain its parts on the other side.

    Parts differ in the index of one dimension, which is a number in the other tensors' names, and in their
    start index in another dimension.
    """
    name = ends[0][0].name
    shape = of_one[name]
    numbered: int | None = None
    cut: int | None = None
    dims: list[str] = []
    kinds: list[_Range] = [_Range(0, ())]
    for d, n in enumerate(shape):
        ranges = sorted({end.ranges[d] for end, _ in ends})
        if len(ranges) == 1:
            dims.append(_full(ranges[0], n))
        elif not any(one.digits for one in ranges) and numbered is None:
            if [one.first for one in ranges] != list(range(n)):
                raise _Formless(f"parts of {name} are left out")
            numbered = d
            dims.append(f"e{n}")
            axes[f"e{n}"] = n
        elif cut is None:
            cut, kinds = d, ranges
            dims.append(_alternatives(ranges, n, name))
        else:
            raise _Formless(f"{name} is cut along several dimensions")
    by_kind: dict[_Range, dict[int, _End]] = {}
    for end, other in ends:
        kind = kinds[0] if cut is None else end.ranges[cut]
        at = 0 if numbered is None else end.ranges[numbered].first
        if by_kind.setdefault(kind, {}).setdefault(at, other) is not other:
            raise _Formless(f"parts of {name} overlap")
        axes |= {digit.axis: digit.extent for r in end.ranges for digit in r.digits}
    several = []
    for number, kind in enumerate(kinds):
        others = by_kind[kind]
        if len(others) != (1 if numbered is None else shape[numbered]):
            raise _Formless(f"parts of {name} are left out")
        canonical = tag if cut is None else f"{tag}.p{number}"
        several.append(_other(others, None if numbered is None else dims[numbered], canonical, of_several))
    return _Rule(name, dims, tag if cut is None else f"{tag}.{{}}"), several


def _full(taken: _Range, n: int) -> str:
    """Return the text of a fully covered dimension."""
    if taken.first or taken.extent != n or taken.steps() != 1:
        raise _Formless("a part of it is left out")
    return taken.text


def _alternatives(ranges: Sequence[_Range], n: int, name: str) -> str:
    """Return the text of a dimension that parts divide into runs or by every n-th index."""
    at = 0
    for one in ranges:
        if one.first != at or one.steps() != 1:
            break
        at += one.extent
    else:
        if at == n:
            return f"({'|'.join(f'p{i}:{one.text}' for i, one in enumerate(ranges))})"
    same = {one.digits for one in ranges}
    steps = [one.first for one in ranges] == list(range(len(ranges)))
    if len(same) == 1 and steps and ranges[0].steps() == len(ranges) == n // ranges[0].extent:
        return f"{ranges[0].text}*({'|'.join(f'p{i}:1' for i in range(len(ranges)))})"
    raise _Formless(f"the parts of {name} do not tile it")


def _other(others: Mapping[int, _End], axis: str | None, canonical: str, shapes: Shapes) -> _Rule:
    """Return the rule of the tensors that are parts of another one, by their index in it."""
    ends = [others[i] for i in sorted(others)]
    shape = shapes[ends[0].name]
    if len({end.ranges for end in ends}) > 1 or any(shapes[end.name] != shape for end in ends):
        raise _Formless("its parts are laid out differently")
    dims = [_full(taken, n) for taken, n in zip(ends[0].ranges, shape, strict=True)]
    name = ends[0].name
    if axis is None:
        return _Rule(name, dims, canonical)
    for place in _NUMBER.finditer(name):
        before, after = name[: place.start()], name[place.end() :]
        if [end.name for end in ends] == [f"{before}{i}{after}" for i in range(len(ends))]:
            return _Rule(f"{before}{{{axis}}}{after}", dims, canonical)
    raise _Formless("the names of its parts have no number")


def _optional(rule: _Rule, may_be_missing: bool) -> _Rule:
    return _Rule(rule.name, rule.dims, rule.canonical, may_be_missing)


def _as_stored(
    listed: ExpectedTensors, canonical: dict[str, str], rules: list[_Rule], stored: Collection[str]
) -> None:
    """Replace the name in a rule by the name of a tied tensor, if only the latter is stored."""
    for group in listed.ties:
        kept = next((name for name in group if name in canonical), None)
        other = next((name for name in group if name in stored and name not in canonical), None)
        at = next((i for i, rule in enumerate(rules) if rule.name == kept), None)
        if kept is not None and kept not in stored and other is not None and at is not None:
            rules[at] = replace(rules[at], name=other)
            canonical[other] = canonical.pop(kept)


def _tied(
    listed: ExpectedTensors, canonical: Mapping[str, str], rules: list[_Rule], stored: Collection[str]
) -> tuple[str, set[str]]:
    """Return table entries for tied tensors that are stored more than once.

    The second result has the names of tied tensors that are not written.

    The function adds their rules to the rules of the tensors in memory.
    """
    entries: list[str] = []
    names: set[str] = set()
    by_name = {rule.name: rule for rule in rules}
    for group in listed.ties:
        kept = next((name for name in group if name in canonical), None)
        if kept is None:
            continue
        for name in group:
            if name in canonical or name in names:
                continue
            names.add(name)
            if name not in stored:
                continue
            if kept not in by_name or "{" in by_name[kept].canonical:
                raise _Formless(f"it is tied to {kept}, which is cut into parts")
            tag = f"{canonical[kept]}.tied{len(names)}"
            rules.append(_Rule(name, by_name[kept].dims, tag))
            entries.append(f'[[tied]]\ntensor = "{tag}"\nto = "{canonical[kept]}"\nwhen = "tied"\n')
    return "\n".join(entries), names
