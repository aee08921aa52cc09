"""A MaxText train state in Orbax's form: names and shapes of the one, files of the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .._core import Table
from .base import Bound, Completed
from .maxtext import MaxTextTarget
from .orbax import DICT_KEY, OrbaxTarget

#: The item that MaxText keeps its state in. source: MaxText common/checkpointing.py
_ITEM = "items"


@dataclass
class MaxTextStore:
    """What :class:`.MaxTextTarget` makes of the tensors, stored as :class:`.OrbaxTarget` does it."""

    state: MaxTextTarget
    store: OrbaxTarget
    #: As ``--to`` names it.
    name: str
    #: A result of this kind is written by :mod:`fastshard.external.array_writer`.
    writes_arrays: bool = True
    #: A train state has a step.
    keeps_step: bool = True

    @property
    def layout(self) -> str:
        """Name of the layout table."""
        return self.state.layout

    def request(self, table: Table | None) -> dict[str, Any]:
        """The target's side of the core's request."""
        return self.state.request(table)

    def dtypes(self, bound: Bound) -> dict[str, str]:
        """Counters that MaxText holds in another integer type; the engine refuses a number that does not fit."""
        return {name: to for name, (_, to) in self.state.counters(bound.dtypes.items()).items()}

    def complete(self, bound: Bound) -> Completed:
        """The store, the yml that says what the model is, and what had to be assumed."""
        _, texts, findings = self.state.complete(bound)
        empty = {".".join(path): _empty(path) for path in self.state.empty}
        zeros = {name: dtype for name, (dtype, _) in self.state.constants(bound.shapes).items()}
        # The tree is MaxText's own: what the source's looked like says nothing here.
        store = replace(
            self.store,
            item=_ITEM,
            keys={},
            types={},
            strings=None,
            leaves=empty,
            custom=self.state.metadata(),
            zeros=zeros,
        )
        files, more, assumed = store.complete(bound)
        return files, texts | more, findings + assumed


def _empty(path: tuple[str, ...]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """An entry of the tree that holds nothing. source: orbax metadata/tree.py; as MaxText's converter writes it"""
    keys = [{"key": key, "key_type": DICT_KEY} for key in path]
    return keys, {"value_type": "Dict", "skip_deserialize": True}
