"""Layout tables of JAX train states, derived from the rules of the weights: layers stacked by a scan, and the
optimizer's moments beside them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..errors import FastshardError

#: How a table treats what is no weight: rules for it, none, or rules that leave it out.
State = Literal["kept", "absent", "left out"]

#: Moment -> power of the factor that its weight is stored with. A gradient scales inversely.
MOMENTS = {"mu": -1.0, "nu": -2.0}
_FIELD = re.compile(r'^(\w+) = "(.*)"$', re.MULTILINE)
#: Names that go into a table as they are; others are left to be refused.
_PLAIN = re.compile(r"^[\w.#\-]+$")
#: Fields that are no text.
_BARE = ("optional", "keep_dtype")
_POWER = re.compile(r"^(\w+)\^(-?[\d.]+)$")
#: Why the optimizer's state is not in a result.
LEFT_OUT = "optimizer state: --optimizer takes it along, towards a layout that holds it"
NO_STEP = "the step of a train state: the target has no place for it"

Rule = dict[str, str]


@dataclass(frozen=True)
class Names:
    """How a train state spells the names of what its table declares."""

    #: Where the weights' names begin; the table says `declared` there.
    root: str
    declared: str
    #: Name of a moment, by ``mu`` or ``nu`` and the rest of its weight's name.
    moment: Callable[[str, str], str]
    #: Counter of the optimizer.
    count: str
    #: Kinds of moments that there are; others have no rules.
    slots: tuple[str, ...] = tuple(MOMENTS)
    #: State besides, which is kept as it is: names of scalars.
    scalars: tuple[str, ...] = ()
    #: All of the optimizer's state, by name; what no rule names is left out by name too.
    state: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Rules:
    """The table of one train state, for what a result takes of it."""

    text: str
    names: Names
    #: Axis of the layers, where they are stacked.
    scan: int | None = None
    #: Why nothing that needs to know the layers' axis can be made of it.
    unclear: FastshardError | None = None

    def __call__(self, step: bool, optimizer: bool) -> str:
        """The table; what is not taken is left out.

        Raises:
            FastshardError: if the tensors allow several readings.
        """
        if self.unclear is not None:
            raise self.unclear
        states: tuple[State, State] = ("left out", "kept")
        return table(self.text, self.names, scan=self.scan, step=states[step], optimizer=states[optimizer])

    def whole(self, moments: bool) -> str:
        """The table for a merge, which keeps every name; ``moments`` says whether there are any."""
        return table(self.text, self.names, scan=self.scan, optimizer="kept" if moments else "absent")


def rules_of(text: str) -> tuple[str, list[Rule]]:
    """What a table says before its rules, and its rules."""
    head, *entries = text.split("\n[[tensor]]\n")
    return head, [dict(_FIELD.findall(entry)) | _optional(entry) for entry in entries]


def _optional(entry: str) -> Rule:
    return {"optional": "true"} if re.search(r"^optional = true$", entry, re.MULTILINE) else {}


def scanned(rule: Rule, axis: int) -> Rule:
    """The rule of the tensor that a scan over layers stacks along an axis.

    A negative one counts from the end, the axis of layers included. One beyond the last (flax refuses it
    for vectors) is the last. source: flax core/axes_scan.py
    """
    if "layers_{L}" not in rule["name"]:
        return rule
    dims = dimensions(rule["shape"])
    dims.insert(place(len(dims), axis), "L")
    return rule | {"name": rule["name"].replace("layers_{L}", "layers"), "shape": f"[{', '.join(dims)}]"}


def place(rank: int, axis: int) -> int:
    """Dimension of the layers in a stack of tensors of a rank."""
    return min(axis, rank) if axis >= 0 else max(rank + 1 + axis, 0)


def dimensions(shape: str) -> list[str]:
    """The dimensions of a shape expression."""
    inner = shape.strip()[1:-1].strip()
    return [dim.strip() for dim in inner.split(",")] if inner else []


def table(
    text: str, names: Names, *, scan: int | None = None, step: State = "kept", optimizer: State = "kept"
) -> str:
    """A table with the names of one train state.

    Args:
        text: the table of the weights, layers apart.
        names: how the train state spells them.
        scan: axis of the layers, where they are stacked.
        step: what becomes of the step.
        optimizer: what becomes of the optimizer's state.
    """
    head, rules = rules_of(text)
    out: list[Rule] = []
    covered: list[re.Pattern[str]] = []
    for rule in rules:
        if rule["name"] == "step":
            out += _stated(rule, step, NO_STEP)
            continue
        weight = rule if scan is None else scanned(rule, scan)
        inner = weight["name"].removeprefix(names.declared)
        out.append(weight | {"name": names.root + inner})
        for slot in names.slots:
            # As the optimizers of other frameworks: --dtype is about weights.
            moment = weight | {
                "name": names.moment(slot, inner),
                "as": f"{slot}.{weight['as']}",
                "keep_dtype": "true",
            }
            if factor := _POWER.match(weight.get("scale", "")):
                moment["scale"] = f"{factor[1]}^{float(factor[2]) * MOMENTS[slot]:g}"
            out += _stated(moment, optimizer, LEFT_OUT)
            covered.append(pattern(moment["name"]))
    counters = [name for name in (names.count, *names.scalars) if _PLAIN.fullmatch(name)]
    for i, name in enumerate(counters):
        counter = {"name": name, "shape": "[]", "as": name if i else "count", "optional": "true"}
        out += _stated(counter, optimizer, LEFT_OUT)
    if optimizer == "left out":
        for name in names.state:
            if (
                name not in counters
                and _PLAIN.fullmatch(name)
                and not any(p.fullmatch(name) for p in covered)
            ):
                out.append({"name": name, "ignore": LEFT_OUT})
    return "\n".join([head, *(_entry(rule) for rule in out)])


def _stated(rule: Rule, state: State, reason: str) -> list[Rule]:
    if state == "left out":
        kept = {key: rule[key] for key in ("name", "when") if key in rule}
        return [kept | {"ignore": reason}]
    return [rule] if state == "kept" else []


def _entry(rule: Rule) -> str:
    lines = [f"{key} = {value if key in _BARE else _quoted(value)}" for key, value in rule.items()]
    return "\n".join(["[[tensor]]", *lines, ""])


def _quoted(value: str) -> str:
    return f'"{value}"'


def pattern(name: str) -> re.Pattern[str]:
    """A regular expression for the names that a rule without alternative spellings stands for."""
    return re.compile("".join(r"\d+" if part.startswith("{") else re.escape(part) for part in _parts(name)))


def _parts(name: str) -> Iterable[str]:
    return filter(None, re.split(r"(\{[^}]*\})", name))
