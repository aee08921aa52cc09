"""Layout tables of JAX train states, derived from the rules of the weights: layers stacked by a scan, and the
optimizer's moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from .._core import Rule, Table
from ..common.errors import FastshardError
from ..common.records import dataclass, field, replace
from ..common.regex import compile_when_used

#: How a table treats state that is not a weight: it has rules for it, has none, or has rules that omit it.
State = Literal["kept", "absent", "left out"]

#: Moment -> power of the factor with which its weight is stored. A gradient scales inversely.
MOMENTS = {"mu": -1.0, "nu": -2.0}
#: The placeholder of a layer in a name, if layers are stored separately.
_LAYERS = "layers_{L}"
#: The placeholder of a layer among those of a set with its own numbers and its own stack.
_OF_SET = compile_when_used(r"_\{L of (\w+)\}")
#: The placeholder of a layer's number in a name, with the set of layers that have the tensor, if not all
#: layers do.
_OF_CYCLE = compile_when_used(r"layers_\{L(?: in (\w+))?\}")
#: Why a result omits the optimizer's state.
LEFT_OUT = "optimizer state: --optimizer includes it, if the target can hold it"
#: Why a result omits keys of random numbers.
RANDOM = "the state of random numbers: it is not a weight"
NO_STEP = "the step of a train state: the target cannot store it"


@dataclass(frozen=True)
class Cycle:
    """A cycle of different layers that one scan runs together. Each place in the cycle has its own stack.

    The layers of place N form the table's set ``cycle_N``.
    """

    #: Number of layers in the cycle.
    length: int
    #: Name of a place's stack below ``layers.``, with the place number in braces; None if the table names
    #: the tensors of each place.
    stack: str | None
    #: Places of the layers of a set, by the set's name. Other sets have all places.
    places: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: Name of a layer after the last full cycle, with its number after it in braces; None if there are none.
    remainder: str | None = None
    #: False if there is no full cycle.
    is_full: bool = True

    def of_layers(self, count: int) -> Cycle:
        """Return the cycle for a number of layers, which may be too few for a stack."""
        return replace(self, is_full=self.remainder is None or count >= self.length)

    def list_places(self, of: str | None) -> Sequence[int]:
        """List the places of the layers of a set; all places for None."""
        return self.places.get(of or "", range(self.length))

    def list_sets(self, count: int) -> dict[str, tuple[str, list[int]]]:
        """Return the sets of layers, by name: one for each place, and one for each set of several places.

        Args:
            count: the number of all layers.
        """
        sets = {} if self.stack is None else {f"cycle_{place}": [place] for place in range(self.length)}
        sets |= {name: list(places) for name, places in self.places.items()}
        end = count if self.remainder is None else count - count % self.length
        found = {
            name: ("L", [n for n in range(end) if n % self.length in places]) for name, places in sets.items()
        }
        return found if self.remainder is None else found | {"remainder": ("L", list(range(end, count)))}


@dataclass(frozen=True)
class Names:
    """A train state's spelling of the names that its table declares."""

    #: Where the weights' names begin; the table has `declared` in its place.
    root: str
    declared: str
    #: Returns the name of a moment, from ``mu`` or ``nu`` and the rest of its weight's name.
    moment: Callable[[str, str], str]
    #: Name of the optimizer's step counter.
    count: str
    #: The existing kinds of moments; others have no rules.
    slots: tuple[str, ...] = tuple(MOMENTS)
    #: Names of other scalars of the state, which are kept unchanged.
    scalars: tuple[str, ...] = ()
    #: Names of all optimizer state. State that no rule names is omitted by name.
    state: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Rules:
    """The rules of one train state, from which a result's table is made."""

    weights: Table
    names: Names
    #: Axis of the layers, if they are stacked.
    scan: int | None = None
    #: The cycle of different layers, if there is one.
    cycle: Cycle | None = None
    #: Why only a merge is possible.
    unclear: FastshardError | None = None
    #: Returns the stored name, or pattern of names, for one in `names`; None if they are the same.
    spell: Callable[[str], str] | None = None
    #: Stored names of the random-number state.
    random: tuple[str, ...] = ()

    def __call__(self, step: bool, optimizer: bool) -> Table:
        """Return the table without the state that the caller leaves out.

        Raises:
            FastshardError: if the tensors are ambiguous.
        """
        if self.unclear is not None:
            raise self.unclear
        states: tuple[State, State] = ("left out", "kept")
        whole = table(
            self.weights,
            self.names,
            scan=self.scan,
            cycle=self.cycle,
            step=states[step],
            optimizer=states[optimizer],
        )
        return self._spell_rules(whole, [Rule.ignoring(name, RANDOM) for name in self.random])

    def whole(self, moments: bool) -> Table:
        """Return the table for a merge, which keeps every name; ``moments`` is True if there are moments."""
        whole = table(
            self.weights,
            self.names,
            scan=self.scan,
            cycle=self.cycle,
            optimizer="kept" if moments else "absent",
        )
        return self._spell_rules(whole, [])

    def _spell_rules(self, whole: Table, more: list[Rule]) -> Table:
        """Return a table with the stored names and additional rules."""
        spell = self.spell
        if spell is None:
            return whole.with_rules([*whole.rules, *more]) if more else whole
        return whole.with_rules([*(rule.renamed(spell(rule.name)) for rule in whole.rules), *more])


def stack_layers(rule: Rule, axis: int, cycle: Cycle | None = None) -> list[Rule]:
    """Return the rules of tensors that a scan over layers stacks along an axis.

    A cycle of different layers gets one rule for each place; other layers get one rule. A negative axis
    counts from the end, including the axis of layers. An axis beyond the last, which flax refuses for
    vectors, means the last.
    source: flax core/axes_scan.py
    """
    at = place(len(rule.dimensions or ()), axis)
    if (of := _OF_SET.search(rule.name)) is not None:
        return [rule.stacked(f"L in {of[1]}", at).renamed(rule.name.replace(of[0], ""))]
    if cycle is not None and cycle.stack is not None and (of := _OF_CYCLE.search(rule.name)) is not None:
        stacks = [
            rule.stacked(f"L in cycle_{n}", at).renamed(
                rule.name.replace(of[0], f"layers.{cycle.stack.format(n)}")
            )
            for n in cycle.list_places(of[1])
            if cycle.is_full
        ]
        if cycle.remainder is None:
            return stacks
        return [*stacks, rule.renamed(rule.name.replace(of[0], cycle.remainder.format("{L of remainder}")))]
    if _LAYERS not in rule.name:
        return [rule]
    return [rule.stacked("L", at).renamed(rule.name.replace(_LAYERS, "layers"))]


def place(rank: int, axis: int) -> int:
    """Return the dimension of the layers in a stack of tensors with a given number of dimensions."""
    return min(axis, rank) if axis >= 0 else max(rank + 1 + axis, 0)


def table(
    weights: Table,
    names: Names,
    *,
    scan: int | None = None,
    cycle: Cycle | None = None,
    step: State = "kept",
    optimizer: State = "kept",
) -> Table:
    """Make a table with the names of one train state.

    Args:
        weights: the table of the weights, with separate layers.
        names: the train state's spelling of the names.
        scan: axis of the layers, if they are stacked.
        cycle: the cycle of different layers, if there is one.
        step: whether the table keeps the step.
        optimizer: whether the table keeps the optimizer state.
    """
    out: list[Rule] = []
    moments: list[Rule] = []
    for rule in weights.rules:
        if rule.name == "step":
            out += _list_rules(rule, step, NO_STEP)
            continue
        for weight in [rule] if scan is None else stack_layers(rule, scan, cycle):
            inner = weight.name.removeprefix(names.declared)
            out.append(weight.renamed(names.root + inner))
            for slot in names.slots:
                moment = weight.renamed(names.moment(slot, inner)).slot(slot, MOMENTS[slot])
                out += _list_rules(moment, optimizer, LEFT_OUT)
                moments.append(moment)
    counters = [names.count, *names.scalars]
    for i, name in enumerate(counters):
        counter = Rule.literal(name, "[]", name if i else "count", optional=True)
        out += _list_rules(counter, optimizer, LEFT_OUT)
    if optimizer == "left out":
        named = set(counters)
        others = (name for name in names.state if name not in named)
        out += [Rule.ignoring(name, LEFT_OUT) for name in others if not any(m.matches(name) for m in moments)]
    return weights.with_rules(out)


def _list_rules(rule: Rule, state: State, reason: str) -> list[Rule]:
    if state == "left out":
        return [rule.left_out(reason)]
    return [rule] if state == "kept" else []
