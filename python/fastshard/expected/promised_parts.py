"""Parts of a model that its config promises besides its layers: the keys that promise them, and the names of
their tensors.

One table serves all classes; a layout table, or the list of transformers, states which tensors of a part a
class builds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from ..common.records import dataclass
from ..common.regex import compile_when_used

__all__ = ["Kind", "Part", "lacking", "promised"]


def _component(
    *words: str, but: str = r"proj|newline|adapt|connect|bridge|embed_vision|embed_audio"
) -> re.Pattern[str]:
    """Compile a pattern for names with a component that contains one of these words.

    The pattern excludes components that connect the parts.
    """
    # Nothing is gone back to once it is found: a name may be of any length.
    return compile_when_used(rf"(?:^|\.)(?!\w*(?:{but}))(?=\w*(?:{'|'.join(words)}))\w+\.")


@dataclass(frozen=True)
class Kind:
    """A kind of part."""

    #: Its name in messages, and the plural if it is counted.
    word: str
    words: str
    #: The keys that promise it, if their value is neither empty nor zero.
    keys: tuple[str, ...]
    #: Pattern of its tensors' names.
    names: re.Pattern[str]
    #: True if the key states their number.
    counted: bool = False
    #: True if transformers ignores it when loading and saving.
    left_out: bool = False
    #: True if its tensors are inside the layers and not separate.
    within: bool = False
    #: Pattern of the tensors that must exist for the part to belong to the model.
    beside: re.Pattern[str] | None = None
    #: Pattern of tensors that may be the part under another name, if nothing lists the model's tensors.
    may_be: re.Pattern[str] | None = None
    #: Classes that may have the config of a larger model, so that the key promises nothing.
    but: re.Pattern[str] = compile_when_used(r"For\w*(Classification|QuestionAnswering|Retrieval)\b")


#: Classes that contain only the language model.
_TEXT = compile_when_used(r"ForCausalLM$|Text(Model|For)|For\w*(Classification|QuestionAnswering)$")
_ENCODER = compile_when_used(r"(?:^|\.)(?:encoder|backbone|perception|tower)\.")
_EXPERTS = compile_when_used(r"(?:^|\.)(?=experts\.|\w*moe)\w+\.")

#: source: transformers 5.24 models/*/configuration_*.py and conversion_mapping.py; vLLM
#: vllm/config/speculative.py (keys of MTP)
KINDS = (
    Kind(
        "MTP layer",
        "MTP layers",
        (
            "num_nextn_predict_layers",
            "num_mtp_layers",
            "mtp_num_hidden_layers",
            "num_mtp_modules",
            "mtp_num_layers",
        ),
        compile_when_used(
            r"(?:^|\.)(?:mtp|nextn)\w*\.|(?:^|\.)layers\.\d+\.(?:enorm|hnorm|eh_proj|shared_head)\."
        ),
        counted=True,
        left_out=True,
    ),
    Kind(
        "vision tower",
        "",
        ("vision_config", "vit_config", "vision_encoder_config", "vision_tower_config", "visual"),
        _component("vision", "visual", "vit(?![a-z])", "vpm", "image", "img", "siglip", "sam_model"),
        may_be=_ENCODER,
        but=_TEXT,
    ),
    Kind(
        "audio tower",
        "",
        ("audio_config", "audio_encoder_config", "speech_config", "sound_config"),
        _component("audio", "speech", "sound", "conformer", "apm(?![a-z])"),
        may_be=_ENCODER,
        but=_TEXT,
    ),
    Kind("talker", "", ("talker_config",), compile_when_used(r"(?:^|\.)talker\."), but=_TEXT),
    Kind(
        "indexer",
        "",
        ("index_n_heads", "index_head_dim"),
        compile_when_used(r"(?:^|\.)(?=\w*indexer|index_)\w+\."),
        within=True,
    ),
    Kind(
        "shared experts",
        "shared experts",
        (
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
        compile_when_used(r"(?:^|\.)(?:shared?_experts?|shared_mlp)\w*\."),
        within=True,
        beside=_EXPERTS,
    ),
)

#: Config keys for the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
#: Nested configs that do not describe parts of the model.
_OTHERS = (
    "quantization_config",
    "compression_config",
    "rope_scaling",
    "rope_parameters",
    "generation_config",
)
#: Maximum nesting of configs; no model has more.
_DEEPEST = 6
#: A counted layer, in a list that is not part of a tower.
_LAYER = compile_when_used(r"^((?:\w+\.)*?)(?:layers|h|blocks)\.(\d+)\.(.+)$")
#: An MTP layer with separate numbering.
_OWN_LAYER = compile_when_used(r"(?:^|\.)(?:mtp|nextn)\w*\.(?:layers\.)?(\d+)\.(.+)$")
#: Modules that join the embedding to the previous layer's state, in layers that have any of them.
_JOINS = ("enorm", "hnorm", "eh_proj")
#: Maximum number of layers in a finding.
_MOST_NAMED = 100
#: Maximum length of a class name; none is longer.
_LONGEST = 200


@dataclass(frozen=True)
class Part:
    """A part that a config promises."""

    kind: Kind
    #: The config key that promises it, with dots.
    key: str
    #: Their number, if the part is counted.
    number: int | None
    #: Number of the model's layers; the numbers of MTP layers continue from it.
    layers: int | None
    #: True if one stored layer represents several.
    repeated: bool = False

    def holds(self, name: str) -> bool:
        """Return True for the name of a tensor of this part."""
        return self.kind.names.search(name) is not None or self._beyond(name) is not None

    def __str__(self) -> str:
        """Describe the part for messages: ``1 MTP layer (num_nextn_predict_layers)``."""
        if self.number is not None:
            called = f"{self.number} {self.kind.words if self.is_many else self.kind.word}"
        else:
            called = (
                self.kind.word if self.is_many else f"a{'n' * (self.kind.word[0] in 'aeio')} {self.kind.word}"
            )
        return f"{called} ({self.key})"

    @property
    def is_many(self) -> bool:
        """True if the description of the part is plural."""
        return self.number > 1 if self.number is not None else bool(self.kind.words)

    def _beyond(self, name: str) -> tuple[int, str] | None:
        """Return layer number and rest of the name for a tensor in a layer after the counted ones; else
        None."""
        if not self.kind.counted or self.layers is None:
            return None
        match = _LAYER.match(name)
        if match is None or int(match[2]) < self.layers or _of_tower(match[1]):
            return None
        return int(match[2]), match[3]

    def blocks(self, names: Iterable[str]) -> dict[int, set[str]]:
        """Return the names in the part's layers, by their numbers from 0."""
        found: dict[int, set[str]] = defaultdict(set)
        for name in names:
            if (beyond := self._beyond(name)) is not None:
                found[beyond[0] - (self.layers or 0)].add(beyond[1])
            elif (own := _OWN_LAYER.search(name)) is not None:
                found[int(own[1])].add(own[2])
        return found


def promised(config: Mapping[str, Any]) -> list[Part]:
    """List the parts that a config promises, each once.

    >>> config = {"num_nextn_predict_layers": 1, "n_shared_experts": 0, "vision_config": {"depth": 2}}
    >>> [str(p) for p in promised(config)]
    ['1 MTP layer (num_nextn_predict_layers)', 'a vision tower (vision_config)']
    """
    named = config.get("architectures")
    first = named[0][:_LONGEST] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    found: dict[str, Part] = {}
    for path, inner in _configs(config):
        for kind in KINDS:
            if kind.word in found or kind.but.search(first):
                continue
            key = next((key for key in kind.keys if _promises(inner.get(key))), None)
            if key is None:
                continue
            number = inner[key] if kind.counted else None
            if kind.counted and type(number) is not int:
                continue
            layers = next((inner[k] for k in LAYERS if type(inner.get(k)) is int), None)
            repeated = any(_says_repeated(k) and inner[k] for k in inner)
            found[kind.word] = Part(kind, f"{path}{key}", number, layers, repeated)
    return list(found.values())


def _says_repeated(key: str) -> bool:
    """Return True if a key states that one MTP layer represents several."""
    return ("mtp" in key or "nextn" in key) and ("repeat" in key or "shar" in key)


def _promises(value: object) -> bool:
    """Return True for a number above zero and for a non-empty config."""
    if isinstance(value, bool):
        return False
    return value > 0 if isinstance(value, (int, float)) else isinstance(value, Mapping) and bool(value)


def _configs(
    config: Mapping[str, Any], path: str = "", depth: int = 0
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, config
    if depth < _DEEPEST:
        for key, inner in config.items():
            if isinstance(key, str) and isinstance(inner, Mapping) and key not in _OTHERS:
                yield from _configs(inner, f"{path}{key}.", depth + 1)


def _of_tower(prefix: str) -> bool:
    return any(kind.names.search(prefix) for kind in KINDS if kind.but is _TEXT)


def lacking(part: Part, names: Iterable[str]) -> list[str]:
    """List modules and layers that a partly stored part lacks.

    A layer that predicts further tokens contains a layer of the model. It is certainly incomplete if the most
    similar model layer has many more modules, or if it has only some of the modules that join it to the
    previous layer. The part is also incomplete if it has fewer layers than the config promises.
    """
    names = list(names)
    blocks = part.blocks(names)
    if not part.kind.counted or not blocks or part.layers is None or part.repeated:
        return []
    layers: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in names:
        match = _LAYER.match(name)
        if match is not None and int(match[2]) < part.layers and not part.holds(name):
            layers[match[1], int(match[2])].add(_module(match[3]))
    found: list[str] = []
    for number, members in sorted(blocks.items()):
        modules = set(map(_module, members))
        joins = [join for join in _JOINS if join not in modules]
        gone = joins if len(joins) < len(_JOINS) else []
        likest = max(layers.values(), key=lambda one: (len(one & modules), -len(one)), default=set())
        absent = likest - modules
        if likest & modules and 4 * len(absent) >= len(likest):
            gone += sorted(absent)
        found += [f"{module} of MTP layer {number + 1}" for module in gone]
    if part.number is not None and len(blocks) < part.number:
        none = (n for n in range(part.number) if n not in blocks)
        found += [f"MTP layer {n + 1}" for n in islice(none, min(part.number - len(blocks), _MOST_NAMED))]
    return found


def _module(name: str) -> str:
    """Return the module of a layer's tensor; all experts count as one module."""
    before, experts, _ = name.partition("experts.")
    if experts and not before.endswith("shared_"):
        return f"{before}experts"
    return name.rpartition(".")[0] or name
