"""Names of flax NNX in checkpoints of MaxText and Tunix, and the corresponding names of a train state.

An NNX state has no collections: its weights begin at the module, or below a wrapper. A variable is a node
with one leaf, ``value``. The items of a list are numbered.

source: flax nnx/variablelib.py (Variable), nnx/statelib.py (to_pure_dict); MaxText common/train_state_nnx.py,
    utils/model_creation_utils.py (from_pretrained), checkpoint_conversion/utils/utils.py; Tunix
    sft/checkpoint_manager.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ..common.records import dataclass, field
from ..common.regex import compile_when_used

#: Items that Tunix stores separately in a step. source: Tunix sft/checkpoint_manager.py
MODEL_ITEM, OPTIMIZER_ITEM = "model_params", "optimizer_state"
#: Prefix of the weights in a linen train state.
_LINEN = "params.params."
_VALUE = ".value"
#: `base` is Tunix's wrapper of the model, `model` is that of MaxText's TrainStateNNX, and `params` is a
#: collection.
_WEIGHT = compile_when_used(r"^((?:(?:base|model|params)\.)*)((?:decoder|token_embedder)\..+)$")
#: Modules that distinguish a MaxText language model from another tree with a decoder.
_TELLING = frozenset({"token_embedder", "decoder_norm", "self_attention", "logits_dense"})
_OPTIMIZER = "optimizer."
_STATE = compile_when_used(r"^(?:optimizer\.)?(step|opt_state)(?=\.|$)")
_MOMENT = compile_when_used(
    r"^(opt_state\.(?:\d+\.)*(?:mu|nu)\.)((?:(?:base|model|params)\.)*)((?:decoder|token_embedder)\..+)$"
)
_INDEX = compile_when_used(r"\.(\d{1,9})(?=\.|$)")
#: A tensor of a single layer, with the separator before the layer's number.
_LAYER = compile_when_used(r"(?:^|[._])layers([._])\d{1,9}\.")
#: MaxText's prefix for variables that are not parameters. source: MaxText common/train_state_nnx.py
_BESIDE = "nnx_aux."
#: Name parts below which random-number state is stored. source: MaxText common/train_state_nnx.py
_RANDOM = frozenset({"rngs", "dropout"})
_RANDOM_ENDING = "_rngs"
#: A factor of an adapter, identified by the end of a name part. source: qwix; MaxText
_FACTOR = compile_when_used(r"(?:^|[._])lora_[ab](?=\.|$)")


@dataclass(frozen=True)
class NnxNames:
    """The stored names of a tree, by their meaning."""

    #: Stored names of weights and optimizer state, by their names in a linen train state.
    stored: Mapping[str, str]
    #: Prefix of the weights in the tree, and in the names of a train state.
    container: str
    root: str
    #: State that is not a weight: random keys and their draw counters.
    random: tuple[str, ...] = ()
    #: Stored names of an adapter's factors.
    factors: tuple[str, ...] = ()
    #: Stored names that refer to the same tensor, by the tensor's name.
    repeated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Prefixes of other weights.
    other_containers: tuple[str, ...] = ()
    #: Prefix of the weights in the names of moments.
    moments_container: str = ""
    #: The suffix of the weights' stored names, and the separator before a layer's number in them.
    ending: str = ""
    separator: str = "_"

    def spell(self, name: str) -> str:
        """Return the stored name, or pattern of names, for a name in a linen train state."""
        if name in self.stored:
            return self.stored[name]
        moment = _MOMENT.match(name)
        if moment is not None:
            return self._spell_optimizer(moment[1]) + self.moments_container + self._spell_inner(moment[3])
        if _STATE.match(name):
            return self._spell_optimizer(name) + self.ending
        if name.startswith(self.root):
            return self.container + self._spell_inner(name.removeprefix(self.root))
        return name

    def _spell_inner(self, name: str) -> str:
        return name.replace("layers_{L", f"layers{self.separator}{{L") + self.ending

    def _spell_optimizer(self, name: str) -> str:
        wrapped = any(stored.startswith(_OPTIMIZER) for stored in self.stored.values())
        return _OPTIMIZER + name if wrapped else name


def is_random(name: str) -> bool:
    """Return True for random-number state."""
    return any(part in _RANDOM or part.endswith(_RANDOM_ENDING) for part in name.split("."))


def read(names: Iterable[str]) -> NnxNames | None:
    """Return the meanings of a tree's names; None for a tree without MaxText weights."""
    known = list(names)
    random = tuple(name for name in known if is_random(name))
    taken = set(random)
    rest = [name for name in known if name not in taken]
    found = {name: match for name in rest if (match := _WEIGHT.match(name))}
    containers = Counter(match[1] for match in found.values())
    if not containers:
        return None
    container = containers.most_common(1)[0][0]
    weights = [name for name in rest if name.startswith((container, _BESIDE)) and not _STATE.match(name)]
    valued = [name for name in weights if name.endswith(_VALUE)]
    is_linen = bool(container) and not container.replace("params.", "") and not valued
    factors = tuple(name for name in weights if _FACTOR.search(name))
    if not (is_linen or factors) and all(_TELLING.isdisjoint(name.split(".")) for name in weights):
        # A decoder of somebody else.
        return None
    root, excluded = container if is_linen else _LINEN, set(factors)
    own = {
        name: root + _fold_indices(name.removeprefix(container).removesuffix(_VALUE))
        for name in weights
        if name not in excluded
    }
    own |= {name: _name_in_optimizer(name, is_linen) for name in rest if _STATE.match(name)}
    ending = _VALUE if len(valued) * 2 > len(weights) else ""
    separators = Counter(match[1] for name in found if (match := _LAYER.search(name)))
    separator = separators.most_common(1)[0][0] if separators else "_"

    def is_odd(name: str) -> tuple[bool, bool]:
        """Return the ways in which a name differs from most others; as a sort key, this puts usual names
        first.
        """
        layer = _LAYER.search(name)
        return name.endswith(_VALUE) != bool(ending), layer is not None and layer[1] != separator

    by_name: dict[str, list[str]] = {}
    for name, meant in own.items():
        by_name.setdefault(meant, []).append(name)
    moments = (m[2] for name in rest if (m := _MOMENT.match(name.removeprefix(_OPTIMIZER))))
    return NnxNames(
        stored={meant: min(stored, key=is_odd) for meant, stored in by_name.items()},
        container=container,
        root=root,
        random=random,
        factors=factors,
        repeated={
            meant: tuple(sorted(stored, key=is_odd)) for meant, stored in by_name.items() if len(stored) > 1
        },
        other_containers=tuple(sorted(set(containers) - {container})),
        moments_container=next(moments, container),
        ending=ending,
        separator=separator,
    )


def _fold_indices(name: str) -> str:
    """Return a name in which list indices are part of the list's name: ``layers.0`` becomes ``layers_0``."""
    return _INDEX.sub(r"_\1", name)


def _name_in_optimizer(name: str, is_linen: bool) -> str:
    """Return the name that a part of the optimizer's state has in a linen train state."""
    bare = name.removeprefix(_OPTIMIZER)
    bare = bare if is_linen else bare.removesuffix(_VALUE)
    moment = _MOMENT.match(bare)
    if moment is None:
        return bare
    return moment[1] + (moment[2] if is_linen else "params.") + _fold_indices(moment[3])
