"""Names of flax NNX in checkpoints of MaxText and Tunix, and the names of a train state that they stand for.

An NNX state has no collections: its weights begin at the module, or below what wraps it. A variable is a node
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

#: Items of a step that Tunix keeps apart. source: Tunix sft/checkpoint_manager.py
MODEL_ITEM, OPTIMIZER_ITEM = "model_params", "optimizer_state"
#: The weights in a train state of linen.
_LINEN = "params.params."
_VALUE = ".value"
#: `base` is Tunix's wrapper of the model, `model` that of MaxText's TrainStateNNX, `params` a collection.
_WEIGHT = compile_when_used(r"^((?:(?:base|model|params)\.)*)((?:decoder|token_embedder)\..+)$")
#: Modules that tell a language model of MaxText from another tree with a decoder.
_TELLING = frozenset({"token_embedder", "decoder_norm", "self_attention", "logits_dense"})
_OPTIMIZER = "optimizer."
_STATE = compile_when_used(r"^(?:optimizer\.)?(step|opt_state)(?=\.|$)")
_MOMENT = compile_when_used(
    r"^(opt_state\.(?:\d+\.)*(?:mu|nu)\.)((?:(?:base|model|params)\.)*)((?:decoder|token_embedder)\..+)$"
)
_INDEX = compile_when_used(r"\.(\d{1,9})(?=\.|$)")
#: A tensor of a single layer, and what lies before the layer's number.
_LAYER = compile_when_used(r"(?:^|[._])layers([._])\d{1,9}\.")
#: MaxText's place for variables that are no parameters. source: MaxText common/train_state_nnx.py
_BESIDE = "nnx_aux."
#: Parts of names that random numbers lie below. source: MaxText common/train_state_nnx.py
_RANDOM = frozenset({"rngs", "dropout"})
_RANDOM_ENDING = "_rngs"
#: A factor of an adapter, by the last words of a part. source: qwix; MaxText
_FACTOR = compile_when_used(r"(?:^|[._])lora_[ab](?=\.|$)")


@dataclass(frozen=True)
class NnxNames:
    """The names of a tree, by what they stand for."""

    #: Stored name by the name in a train state of linen, of weights and optimizer.
    stored: Mapping[str, str]
    #: Where the weights begin in the tree, and in the names of a train state.
    container: str
    root: str
    #: State that is no weight: random keys and the counts of their draws.
    random: tuple[str, ...] = ()
    #: Factors of an adapter, by their stored names.
    factors: tuple[str, ...] = ()
    #: Stored names that stand for one tensor, by its name.
    repeated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Where further weights begin.
    other_containers: tuple[str, ...] = ()
    #: Where the weights begin in the names of moments.
    moments_container: str = ""
    #: What the stored names of weights end with, and what lies before a layer's number in them.
    ending: str = ""
    separator: str = "_"

    def spell(self, name: str) -> str:
        """Return the stored name, or the pattern of such names, by the one in a train state of linen."""
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
    """Return True for the state of random numbers."""
    return any(part in _RANDOM or part.endswith(_RANDOM_ENDING) for part in name.split("."))


def read(names: Iterable[str]) -> NnxNames | None:
    """Return what the names of a tree stand for; None for a tree without weights of MaxText."""
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
        """Return in what a name differs from most others, so that these come first."""
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
    """Return a name with places in lists as parts of the lists' names: ``layers.0`` is ``layers_0``."""
    return _INDEX.sub(r"_\1", name)


def _name_in_optimizer(name: str, is_linen: bool) -> str:
    """Return the name of a part of the optimizer's state in a train state of linen."""
    bare = name.removeprefix(_OPTIMIZER)
    bare = bare if is_linen else bare.removesuffix(_VALUE)
    moment = _MOMENT.match(bare)
    if moment is None:
        return bare
    return moment[1] + (moment[2] if is_linen else "params.") + _fold_indices(moment[3])
