"""Which layer a tensor belongs to, and which part it plays there, by its name alone.

A rule for people who look at a checkpoint, over all frameworks: nothing that is written hangs on it.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["layer_of", "role_of"]

#: The number of a layer: after a word for layers, joined by a dot, a slash or an underscore.
_LAYER = re.compile(r"(?:^|[./_])(?:layers?|blocks?|h)[._/](\d{1,9})(?=[./]|$)")
#: Else a part of the name that is a number by itself, with more behind it: the place in a pipeline.
_NUMBER = re.compile(r"(?:^|[./])(\d{1,9})(?=[./])")
#: Numbers that count something else.
_COUNTED = re.compile(r"(?:experts?|state|heads?|chunks?|params|param_groups|groups)[._/]$")
#: Paxml's word for a stack: the number behind it counts the layers of one step of a loop.
_STACKED = re.compile(r"(?:^|[./])repeat[./]")
#: Words that say where a model begins, or that layers do; they tell no role.
_WRAPPERS = frozenset(
    ("model", "module", "transformer", "language_model", "gpt_neox", "params", "lm", "decoder", "layers", "layer", "blocks",
     "block", "h", "x_layers", "repeat", "sub", "_fsdp_wrapped_module", "_orig_mod")
)  # fmt: skip


def _place(name: str) -> tuple[int, int, int] | None:
    """The number of the layer in a name, and where it stands."""
    found = _LAYER.search(name)
    if found is None:
        for number in _NUMBER.finditer(name):
            if not _COUNTED.search(name, 0, number.start(1)):
                found = number
                break
    return None if found is None else (int(found[1]), found.start(1), found.end(1))


def layer_of(name: str) -> int | None:
    """The layer that a tensor's name counts it to; None for one outside all layers, and for stacks of layers.

    Numbers are the framework's own: in GPT-NeoX's pipelines the embedding is 0 and the first layer 2.

    >>> layer_of("model.layers.3.mlp.experts.7.up_proj.weight"), layer_of("lm_head.weight")
    (3, None)
    """
    place = _place(name)
    return None if place is None or _STACKED.search(name, 0, place[1]) else place[0]


@lru_cache(maxsize=1 << 17)
def role_of(name: str) -> str:
    """What a tensor is in its layer: its name without wrappers and layer, other numbers as ``*``. Layers that are built
    alike have the same roles.

    >>> role_of("model.layers.3.mlp.experts.7.up_proj.weight")
    'mlp.experts.*.up_proj.weight'
    """
    place = _place(name)
    head, tail = (name, "") if place is None else (name[: place[1]], name[place[2] :])
    parts = [part for part in re.split(r"[./]", head) if part.rstrip("_")]
    kept = [part for part in parts if part.rstrip("_") not in _WRAPPERS]
    kept += [part for part in re.split(r"[./]", tail) if part]
    return ".".join("*" if part.isdecimal() else part for part in kept or parts) or name
