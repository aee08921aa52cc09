"""Names in MaxText's checkpoints: those of a train state, and that of the file that describes the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ..common.records import replace
from ..common.regex import compile_when_used
from .jax_train_states import MOMENTS, Names

#: dtype and shape by name.
Arrays = Mapping[str, tuple[str, Sequence[int]]]

#: Name of the yml that describes the model.
FILE = "maxtext_model.yml"
DECLARED = "params.params."
#: Optax numbers the states of its chain; MaxText's own adam_pax has no number. source: MaxText
#: optimizers/optimizers.py
MOMENT = compile_when_used(r"^(opt_state\.(?:\d+\.)*)(mu|nu)\.((?:params\.)*)(?:decoder|token_embedder)\.")


def names_of(root: str, arrays: Arrays) -> Names:
    """Derive the spelling of names from arrays, for sources and for targets that keep the names."""
    moments = {m[2]: m for name in sorted(arrays) if (m := MOMENT.match(name))}
    chain = next((m[1] for m in moments.values()), "opt_state.")
    below = next((m[3] for m in moments.values()), "params.")
    state = tuple(name for name in arrays if name.startswith("opt_state."))
    count = f"{chain}count"
    scalars = tuple(name for name in state if name != count and not arrays[name][1])
    return Names(root, DECLARED, partial(_moment, chain, below), count, tuple(moments), scalars, state)


def _moment(chain: str, below: str, slot: str, inner: str) -> str:
    return f"{chain}{slot}.{below}{inner}"


def default_names() -> Names:
    """Return the names in a train state for weights from another format."""
    return replace(names_of(DECLARED, {}), slots=tuple(MOMENTS))
