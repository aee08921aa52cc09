"""The changes that an adapter makes to its base, as declarations from which the core computes them.

source: peft tuners/lora/layer.py (get_delta_weight, merge), tuners/lora/dora.py,
    tuners/trainable_tokens/layer.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import count, product
from math import prod
from typing import Any

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.records import dataclass, replace
from ...layouts.declaration import Source
from ...layouts.declared_parts import Adapted, Change, LowRank, Rows, Vector, Window
from ...models.tensor_words import WORDS
from .adapter_config import Config
from .tensor_names import AdapterNames, Module

#: Models whose stacked experts have the input dimension first, used if shapes are ambiguous. source:
#: transformers (is_transposed experts)
_INPUTS_FIRST = ("gpt_oss", "llama4", "llama4_text")


def attach(source: Source, adapter: AdapterNames, config: Config, shapes: Mapping[str, list[int]]) -> None:
    """Add an adapter's changes to a declaration.

    Args:
        source: declaration of the base, with the adapter's tensors among its units or assembled tensors.
        adapter: its tensors by its own names.
        config: its config.
        shapes: shapes of all stored tensors, by the model's own names and by the stored names.

    Raises:
        FastshardError: ``FS106`` for several adapters, ``FS209`` if it is unknown how a tensor is multiplied,
            ``FS514`` for values that are computed in an unsupported way.
    """
    if len(adapter.adapters) > 1:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "the checkpoint holds several adapters",
            got=", ".join(sorted(adapter.adapters)),
            help="save one of them separately",
        )
    changes: dict[str, list[Change]] = {}
    hidden = set(adapter.unused)
    for module in adapter.modules.values():
        hidden |= set(module.factors.values())
        for name, change in _changes(module, config, shapes, source.model.config or {}):
            changes.setdefault(name, []).append(change)
    head = _find_untied_head(source, adapter, config, shapes, changes)
    for own, stored in adapter.whole.items():
        # What was trained as a whole takes the place of the base's.
        replaced = {name for name, bare in _names(source, shapes) if bare == own and name != stored}
        if head is not None and own == head[0]:
            # The head was this tensor too, and keeps its values.
            source.names.own.update(dict.fromkeys(replaced, head[1]))
        else:
            hidden |= replaced
            if not replaced and head is None and not _is_head(own):
                source.findings.append(_warn_of_addition(own, source, config))
        if own != stored:
            source.names.own[stored] = own
    source.names.own.update({stored: own for own, stored in adapter.base.items() if own != stored})
    source.files.adapted += [Adapted(name, of) for name, of in sorted(changes.items())]
    source.names.hidden |= hidden
    _untie(source, adapter, changes, head)
    source.findings.append(
        Finding.of(
            codes.IGNORED,
            f"the adapter changes {len(changes)} tensors and replaces {len(adapter.whole)}; it is merged "
            "into the result, not stored next to it",
            severity="note",
            file=config.path,
        )
    )


def _warn_of_addition(name: str, source: Source, config: Config) -> Finding:
    """Build the finding for a module in the adapter that the base lacks, such as a head of another class."""
    classes = (source.model.config or {}).get("architectures")
    return Finding.of(
        codes.NOT_LOADED,
        "the base lacks this tensor, which the adapter adds",
        severity="warning",
        file=config.path,
        tensor=name,
        expected=f"a base of the class that was trained ({config.stored.get('task_type')})",
        got=f"a base of {', '.join(classes)}" if isinstance(classes, list) and classes else "another base",
        help="load the base as the class that was trained, save it, and merge the adapter into the result",
    )


def _names(source: Source, shapes: Mapping[str, list[int]]) -> list[tuple[str, str]]:
    """Return the stored names, each with the model's own name."""
    return [(name, source.names.own.get(name, name)) for name in shapes]


def _changes(
    module: Module, config: Config, shapes: Mapping[str, list[int]], model: Mapping[str, Any]
) -> list[tuple[str, Change]]:
    """Return the changes that a module's factors describe, each with the changed tensor."""
    found: list[tuple[str, Change]] = []
    factors, weight = module.factors, f"{module.at}.weight"
    if "tokens" in factors:
        rows = config.rows(module.name)
        if rows is None:
            raise FastshardError.of(
                codes.FACT_UNKNOWN,
                "it is unclear which rows the adapter has trained",
                tensor=factors["tokens"],
                file=config.path,
                expected="trainable_token_indices",
                got="none",
                help="pass the adapter's own adapter_config.json",
            )
        found.append((weight, Rows(factors["tokens"], rows)))
    pairs = [
        (a, b)
        for a, b in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
        if {a, b} & factors.keys()
    ]
    for a, b in pairs:
        name = _target(module, factors[a], factors[b], config, shapes)
        stacked = None if name in shapes else _stacked(name, shapes)
        shape = shapes.get(name, []) if stacked is None else stacked.shape
        change = _product(
            shape, factors[a], factors[b], config, module, shapes, model, embedding=a != "lora_A"
        )
        if (magnitude := factors.get("lora_magnitude_vector")) is not None:
            change = replace(change, magnitude=magnitude)
        if stacked is None:
            found.append((name, change))
        else:
            found += [(part, replace(change, form="rows", window=w)) for part, w in stacked.windows()]
        if (bias := factors.get(f"{b}.bias")) is not None:
            found.append((f"{module.at}.bias", Vector(bias, config.scale(module.name))))
    return found


@dataclass(frozen=True)
class _Stacked:
    """Experts that transformers stacks on loading: the tensors of each expert, concatenated along the
    outputs.
    """

    shape: list[int]
    #: By expert: (stored name, number of outputs) of each part.
    parts: list[list[tuple[str, int]]]

    def windows(self) -> Iterator[tuple[str, Window]]:
        """Yield each stored tensor with its window in the full one."""
        for expert, listed in enumerate(self.parts):
            out = 0
            for name, outputs in listed:
                yield name, Window(experts=self.shape[0], expert=expert, outs=self.shape[1], out=out)
                out += outputs


#: Parts of an expert, by the parameter into which they are stacked. source: transformers
#: conversion_mapping.py
_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
#: Modules on disk that contain experts.
_HOLDERS = ("mlp", "block_sparse_moe", "feed_forward")


def _stacked(parameter: str, shapes: Mapping[str, list[int]]) -> _Stacked | None:
    """Find the separately stored experts that a parameter stacks; None if they are not stored separately."""
    module, _, own = parameter.rpartition(".")
    layer, _, holder = module.removesuffix(".experts").rpartition(".")
    if not module.endswith(".experts") or holder not in _HOLDERS:
        return None
    for words, place in product(_PARTS.get(own, ()), _HOLDERS):
        parts: list[list[tuple[str, int]]] = []
        for expert in count():
            each = [f"{layer}.{place}.experts.{expert}.{word}.weight" for word in words]
            if not all(name in shapes for name in each):
                break
            parts.append([(name, shapes[name][0]) for name in each])
        if parts:
            inputs = shapes[parts[0][0][0]][1]
            return _Stacked([len(parts), sum(n for _, n in parts[0]), inputs], parts)
    return None


def _target(module: Module, a: str, b: str, config: Config, shapes: Mapping[str, list[int]]) -> str:
    """Return the tensor to which a product is added: the module's weight, or one of its parameters."""
    weight = f"{module.at}.weight"
    if weight in shapes:
        return weight

    def shape(name: str) -> list[int]:
        stacked = None if name in shapes else _stacked(name, shapes)
        return shapes.get(name, []) if stacked is None else stacked.shape

    own = [f"{module.at}.{parameter}" for parameter in config.parameters_of(module.name)]
    fitting = [name for name in own if _forms(shape(name), shapes[a], shapes[b])]
    if len(fitting) == 1:
        return fitting[0]
    if not own:
        # The core tells that the base has none.
        return weight
    raise FastshardError.of(
        codes.FACT_UNKNOWN,
        "it is unclear to which of the module's parameters the adapter belongs",
        tensor=a,
        file=config.path,
        expected=f"one of {', '.join(own)}",
        got="factors that fit " + (", ".join(fitting) or "none"),
        help="pass the base that it was trained on, or merge it with peft's merge_and_unload",
    )


def _forms(shape: list[int], a: list[int], b: list[int]) -> list[tuple[str, int]]:
    """Return the ways in which factors of these shapes can form a tensor: form and rank."""
    if not (a and b and shape) or prod(a[1:]) == 0:
        return []
    inputs, outputs = prod(a[1:]), b[0]
    rank = prod(b[1:])
    ways = []
    if len(shape) >= 2 and shape[0] == outputs and prod(shape[1:]) == inputs and a[0] == rank:
        ways.append(("rows", rank))
    if len(shape) == 2 and shape == [inputs, outputs] and a[0] == rank:
        ways.append(("columns", rank))
    if len(shape) == 3 and a[0] == rank and rank % shape[0] == 0:
        each = rank // shape[0]
        if shape[1:] == [outputs, inputs]:
            ways.append(("experts", each))
        if shape[1:] == [inputs, outputs]:
            ways.append(("experts_by_columns", each))
    return ways


def _product(
    shape: list[int],
    a: str,
    b: str,
    config: Config,
    module: Module,
    shapes: Mapping[str, list[int]],
    model: Mapping[str, Any],
    *,
    embedding: bool,
) -> LowRank:
    """Describe how a product is added to a tensor."""
    ways = _forms(shape, shapes[a], shapes[b])
    if embedding:
        ways = [way for way in ways if way[0] == "columns"]
    elif len({form for form, _ in ways} & {"rows", "columns"}) == 2:
        ways = [("columns" if config.fan_in_fan_out else "rows", ways[0][1])]
    elif len(ways) > 1:
        first = model.get("model_type") in _INPUTS_FIRST
        ways = [way for way in ways if way[0] == ("experts_by_columns" if first else "experts")]
    # What fits in no way is told by the core, with both shapes.
    form, rank = ways[0] if ways else ("columns" if embedding else "rows", shapes[a][0] if shapes[a] else 0)
    if ways and rank != config.rank(module.name):
        raise FastshardError.of(
            codes.CONFIG_DISAGREES,
            "the rank of an adapter, which sets its scale, differs from the config",
            tensor=a,
            file=config.path,
            expected=f"{config.rank(module.name)}, by {config.path}",
            got=str(rank),
            help="pass the adapter_config.json that was saved with it",
        )
    return LowRank(a, b, rank, config.scale(module.name), form)


#: Names of heads, by the name of the embedding to which transformers ties them. Others are refused.
_HEADS = {
    "model.embed_tokens.weight": "lm_head.weight",
    "model.language_model.embed_tokens.weight": "lm_head.weight",
    "language_model.model.embed_tokens.weight": "language_model.lm_head.weight",
    "transformer.wte.weight": "lm_head.weight",
    "gpt_neox.embed_in.weight": "embed_out.weight",
}


def _is_head(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in WORDS["head_modules"]


def _find_untied_head(
    source: Source,
    adapter: AdapterNames,
    config: Config,
    shapes: Mapping[str, list[int]],
    changes: Collection[str],
) -> tuple[str, str] | None:
    """Return an embedding that only the adapter replaces, and a new name for the head tied to it.

    None if no head was tied to it, or if the head has a separate tensor. PEFT wraps the embedding's module.
    The head therefore keeps the originally shared tensor, unless `ensure_weight_tying` ties it again.

    Raises:
        FastshardError: ``FS514`` if the head's name is unknown.
    """
    saved = [
        own
        for own in adapter.whole
        # One that has factors was saved beside them, as it is in the base.
        if own.endswith(".weight") and own.split(".")[-2] in WORDS["embedding_modules"] and own not in changes
    ]
    if not _is_tied(source) or not saved or config.stored.get("ensure_weight_tying"):
        return None
    if any(map(_is_head, adapter.whole)):
        return None
    if any(map(_is_head, shapes)):
        # Stored besides, with the values that it keeps.
        return "", ""
    if (head := _HEADS.get(saved[0])) is None:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "the adapter replaces the embedding of a model that ties its head to it, and the head's own "
            "name is unknown",
            tensor=saved[0],
            expected=f"one of {', '.join(_HEADS)}",
            got=saved[0],
            help="merge it with peft's merge_and_unload",
        )
    return saved[0], head


def _is_tied(source: Source) -> bool:
    """Return True if the base ties its head to its embedding.

    If the config lacks the key, the class's default decides.
    """
    return bool(source.binding.facts.get("tied") or (source.model.config or {}).get("tie_word_embeddings"))


def _untie(
    source: Source, adapter: AdapterNames, changes: Collection[str], head: tuple[str, str] | None
) -> None:
    """Mark the model as not tied if the adapter adds a separate head.

    A change to only one of two tied tensors is refused.

    Raises:
        FastshardError: ``FS514`` for such a change.
    """
    model = source.model
    if not _is_tied(source):
        return
    heads = [
        own for own in adapter.whole if own.rpartition(".")[0].rpartition(".")[2] in ("lm_head", "embed_out")
    ]
    changed = sorted(
        name for name in changes if "embed" in name.rpartition(".")[0].rpartition(".")[2] or "lm_head" in name
    )
    if heads or head is not None:
        source.binding.facts |= {"tied": False, "head": True}
        config = {**(model.config or {}), "tie_word_embeddings": False}
        source.model = replace(model, config=config)
        return
    if changed and not any("tokens" in module.factors for module in adapter.modules.values()):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "the adapter changes only one of two tied tensors",
            tensor=changed[0],
            file=source.model.config_file.name if source.model.config_file else None,
            expected="tie_word_embeddings false, or an adapter that changes neither",
            got="tie_word_embeddings true",
            help="untie the base first (save its head separately, with tie_word_embeddings false)",
        )
