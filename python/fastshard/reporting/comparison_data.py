"""Data for a report on a conversion: the checkpoint before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.plan import Plan
from ..checkpoint.planning import make_plan
from ..common.errors import FastshardError, Finding
from ..common.progress import Progress
from ..common.records import dataclass, field
from ..targets.request import Request
from ..verification.stats import TensorStats
from .became import Became, became
from .grid import Grid
from .grid_sources import sources_grid
from .manifest_data import manifest_of, recorded_numbers
from .tensor_numbers import figures_of, read_through

if TYPE_CHECKING:
    from .._core import RunOptions


@dataclass(frozen=True)
class Change:
    """A tensor in which the two checkpoints differ."""

    name: str
    what: str
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """The comparison of this checkpoint with another."""

    other: str
    #: Description of what was compared and what was not.
    extent: str
    changes: tuple[Change, ...] = ()
    #: Number of tensors that both have; None if they could not be compared.
    common: int | None = None
    #: Number of these tensors that have equal hashes.
    equal: int | None = None
    #: Statistics of both sides, by common names: the other's, and this one's.
    before: Mapping[str, TensorStats] = field(default_factory=dict)
    after: Mapping[str, TensorStats] = field(default_factory=dict)
    #: The reasons why they could not be compared.
    refused: tuple[Finding, ...] = ()
    #: Kinds of tensors before the conversion, and their results.
    became: tuple[Became, ...] = ()
    #: For a conversion, the ranks of both checkpoints by the layers of the result: the other's, and this
    #: one's.
    grids: tuple[Grid, Grid] | None = None

    @property
    def all_equal(self) -> bool:
        """True if all tensors of both checkpoints are known to have the same bytes."""
        return not self.changes and not self.refused and bool(self.common) and self.equal == self.common


class Side:
    """One of two compared checkpoints."""

    def __init__(
        self,
        path: str,
        opened: Checkpoint | FastshardError,
        document: dict[str, Any] | None = None,
        numbers: Mapping[str, TensorStats] | None = None,
        hashes: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.opened = opened
        self.document = document
        self.numbers = numbers or {}
        self.hashes = hashes or {}

    def recorded(self, plan: Plan) -> Mapping[str, str]:
        """Return the hashes that the manifest states for tensors with the plan's names."""
        entries = {t["name"]: t for t in (self.document or {}).get("tensors", ())}
        return {
            name: entries[name]["blake3"]
            for name, dtype, shape, _, _ in plan.outputs
            if name in entries and (entries[name].get("dtype"), entries[name].get("shape")) == (dtype, shape)
        }


def compared(own: Side, other: Side, stats: bool, run: RunOptions, bar: Progress) -> Comparison:
    """Compare two sides of a conversion by hashes, and by values if they were read."""
    if isinstance(other.opened, FastshardError):
        return Comparison(other.path, "nothing: it cannot be opened", refused=tuple(other.opened.findings))
    assert isinstance(own.opened, Checkpoint)
    other.document, _ = manifest_of(other.opened)
    plans = [own.opened._plan, other.opened._plan]
    named = "their own names"
    if not plans[0].index.keys() & plans[1].index.keys():
        named = "the names that they have in their Hugging Face layout"
        try:
            plans = [make_plan(side.opened.opened, Request("hf")) for side in (own, other)]  # type: ignore[union-attr]
        except FastshardError as error:
            return Comparison(
                other.path, "nothing: they have no names in common", refused=tuple(error.findings)
            )
        refused = tuple(f for plan in plans for f in plan.findings if f.severity == "error")
        if refused:
            return Comparison(other.path, "nothing: they cannot be brought to common names", refused=refused)
    after, before = plans
    sides = [(own, after), (other, before)]
    hashes, numbers = [], []
    for side, plan in sides:
        same = isinstance(side.opened, Checkpoint) and plan is side.opened._plan
        if stats and not (same and side.hashes):
            tensors, hashed, found = read_through(
                plan, run, bar, f"reading {side.path or 'again, under common names'}"
            )
            if any(f.severity == "error" for f in found):
                return Comparison(other.path, "nothing: not all of it can be read", refused=tuple(found))
            side.numbers, side.hashes = tensors, hashed
        elif not stats:
            side.hashes = side.recorded(plan)
            side.numbers = recorded_numbers(side.document, plan) if side.document is not None else {}
        hashes.append(side.hashes)
        numbers.append(side.numbers)
    mine, theirs = (
        {name: (dtype, tuple(shape)) for name, dtype, shape, _, _ in plan.outputs} for plan in plans
    )
    common = mine.keys() & theirs.keys()
    changes, equal, unknown = _changes((mine, theirs), hashes, numbers)
    if stats:
        extent = "names, dtypes, shapes, and the hash of every tensor: all data of both was read"
    elif unknown == len(common):
        extent = "names, dtypes and shapes, by headers; values were not compared (--stats reads them)"
    else:
        extent = (
            "names, dtypes and shapes, by headers; values by the hashes in their manifests, as they were "
            "when these were "
            "made" + (f"; of {unknown:,} tensors no hash is known" if unknown else "")
        )
    made = became(before)
    moved = made or after is not own.opened._plan
    whole = not any(f.severity == "error" for plan in plans for f in plan.findings)
    return Comparison(
        other.path,
        f"{extent}; under {named}",
        changes,
        len(common),
        equal,
        {n: numbers[1][n] for n in common if n in numbers[1]},
        {n: numbers[0][n] for n in common if n in numbers[0]},
        became=made,
        grids=(sources_grid(other.opened, before), sources_grid(own.opened, after))
        if moved and whole
        else None,
    )


#: Dtype and shape of each tensor.
_Forms = dict[str, tuple[str, tuple[int, ...]]]


def _changes(
    forms: tuple[_Forms, _Forms],
    hashes: Sequence[Mapping[str, str]],
    numbers: Sequence[Mapping[str, TensorStats]],
) -> tuple[tuple[Change, ...], int, int]:
    """Return differences by name, and the numbers of tensors with equal and with unknown bytes."""
    mine, theirs = forms
    changes = [
        Change(n, "only in the other", _form(theirs[n]), "absent") for n in theirs.keys() - mine.keys()
    ]
    changes += [Change(n, "only here", "absent", _form(mine[n])) for n in mine.keys() - theirs.keys()]
    equal, unknown = 0, 0
    for name in mine.keys() & theirs.keys():
        if mine[name] != theirs[name]:
            what = "shape" if mine[name][1] != theirs[name][1] else "dtype"
            changes.append(Change(name, what, _form(theirs[name]), _form(mine[name])))
        elif name not in hashes[0] or name not in hashes[1]:
            unknown += 1
        elif hashes[0][name] == hashes[1][name]:
            equal += 1
        else:
            changes.append(
                Change(name, "values", figures_of(numbers[1].get(name)), figures_of(numbers[0].get(name)))
            )
    return tuple(sorted(changes, key=lambda c: c.name)), equal, unknown


def _form(form: tuple[str, tuple[int, ...]]) -> str:
    return f"{form[0]} {list(form[1])}"
