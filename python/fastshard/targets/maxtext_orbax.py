"""A MaxText train state in Orbax's form: MaxText's names and shapes in Orbax's files."""

from __future__ import annotations

from typing import Any

from ..common.records import dataclass, replace
from ..common.target_options import FUSED_QKV, MULTIPLE, ROPE_TYPE, SCAN_AXIS, ZARR2
from ..layouts.declaration import Source
from .base import Bound, Completed, Target
from .form import Form
from .maxtext import NAMES, MaxTextTarget
from .orbax import DICT_KEY, OrbaxTarget
from .request import Request

#: The item in which MaxText stores its state. source: MaxText common/checkpointing.py
_ITEM = "items"


@dataclass
class MaxTextStore(Target):
    """The tensors of :class:`.MaxTextTarget`, stored like those of :class:`.OrbaxTarget`."""

    state: MaxTextTarget
    store: OrbaxTarget
    name: str
    names = NAMES
    options = (MULTIPLE, SCAN_AXIS, FUSED_QKV, ROPE_TYPE, ZARR2)
    is_whole = holds_optimizer = keeps_step = writes_arrays = True

    @classmethod
    def of(cls, source: Source, request: Request) -> MaxTextStore:
        """Make the target for a source: see :meth:`.MaxTextTarget.of`."""
        state = MaxTextTarget.of(source, request)
        return cls(state, OrbaxTarget.of(source, request), state.name)

    def form(self) -> Form:
        """Return the form of the result."""
        return self.state.form()

    def complete(self, bound: Bound) -> Completed:
        """Return the store, the yml that describes the model, and the assumptions."""
        state = self.state.complete(bound)
        empty = {".".join(path): _empty(path) for path in self.state.empty}
        # The tree is MaxText's own: what the source's looked like says nothing here.
        store = replace(
            self.store,
            item=_ITEM,
            keys={},
            types={},
            strings=None,
            leaves=empty,
            custom=self.state.metadata(),
            counters=self.state.constants(bound.tensors),
        )
        stored = store.complete(bound)
        # Counters that MaxText holds in another integer type; the engine refuses a number that does not fit.
        counters = self.state.counters((name, tensor.dtype) for name, tensor in bound.tensors.items())
        return replace(
            stored,
            texts=state.texts | stored.texts,
            findings=state.findings + stored.findings,
            dtypes={name: to for name, (_, to) in counters.items()},
        )


def _empty(path: tuple[str, ...]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return an empty entry of the tree, as MaxText's converter writes it.

    source: orbax metadata/tree.py
    """
    keys = [{"key": key, "key_type": DICT_KEY} for key in path]
    return keys, {"value_type": "Dict", "skip_deserialize": True}
