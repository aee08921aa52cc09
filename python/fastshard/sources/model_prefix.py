"""The prefix of a model's own names, under which trainers save the model next to their own values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..common import codes
from ..common.errors import FastshardError
from ..layouts import naming_schemes
from ..layouts import tables as layouts
from ..layouts.declaration import Source, is_state
from ..layouts.wrapper_names import bare
from ..models import config_json
from ..models.tensor_words import WORDS
from . import pipeline_stages

#: Common prefixes of a model's own names. FSDP examples and torchtitan save ``{"model": ..., "optim": ...}``.
_PREFIXES = ("", "model.", "module.", "state_dict.", "app.model.")
_DDP = "module."
_TELLING = ("model.embed_tokens.weight", "gpt_neox.embed_in.weight")
#: Maximum number of names in a message.
_MOST_NAMED = 8
#: Models whose parts have no common prefix. source: base_model_prefix and names in transformers models/t5
_WITHOUT_BASE = ("t5", "mt5", "umt5", "longt5", "switch_transformers")


def recognise(
    source: Source,
    names: Iterable[str],
    config: dict[str, Any] | None,
    chosen: str | None = None,
    paths: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Declare the prefix of the model's own names, and the prefixes of other copies.

    Args:
        source: the declaration.
        names: names of all tensors.
        config: the model's config, if there is one.
        chosen: the prefix chosen by the caller, without the last dot.
        paths: keys of the nested dicts that lead to each tensor, if the files contain them. They then
            determine the prefix, instead of the list of common prefixes.

    Raises:
        FastshardError: ``FS515`` if there is no tensor below the prefix.
    """
    stored = list(dict.fromkeys(names))
    source.names.own = bare(stored)
    apart = pipeline_stages.join(source, stored, paths, chosen) if paths else []
    own = [source.names.own.get(name, name) for name in stored]
    if chosen is None:
        if config is not None:
            containers = _containers(source, stored, paths) if paths else None
            found = _fitting(own, config) if containers is None else _of_containers(containers, config)
            source.names.prefix, *source.names.other_prefixes = found
            for models in apart:
                # Of the models in a list none is the model.
                if any(prefix.startswith(tuple(models)) for prefix in found):
                    more = [outer for outer in models if not any(one.startswith(outer) for one in found)]
                    source.names.other_prefixes += more
        return
    outer = f"{chosen}."
    inside = [name.removeprefix(outer) for name in own if name.startswith(outer)]
    if not inside:
        tops = sorted({name.partition(".")[0] for name in own if "." in name})
        raise FastshardError.of(
            codes.USAGE,
            f"prefix: no name begins with {chosen!r}",
            expected=f"one of {', '.join(tops[:_MOST_NAMED])}",
            got=chosen,
            help="pass the prefix before the model's own names",
        )
    inner = [""] if config is None else _fitting(inside, config)
    source.names.is_chosen, source.names.prefix = True, outer + inner[0]
    source.names.other_prefixes = [outer + prefix for prefix in inner[1:]]


def find_foreign_prefix(names: Iterable[str], config: dict[str, Any] | None) -> str | None:
    """Return the prefix of all names of a model with a table, if its transformers class does not have this
    prefix.

    Trainers and wrappers put such a prefix (``policy.``) before all names. None if the names are the model's
    own, or if this cannot be decided.

    Args:
        names: names of all tensors.
        config: the model's config.json, if there is one.
    """
    if config is None or "auto_map" in config or config_json.layout_of(config) is None:
        return None
    weights = (name for name in names if not is_state(name))
    return min(_prefixes_before(_telling(config), weights), default="") or None


def _containers(
    source: Source, stored: Sequence[str], paths: Mapping[str, Sequence[str]]
) -> dict[str, list[str]] | None:
    """Return the dicts with a model's weights: the prefix of their names, and the module's own names in them.

    None if a tensor has no path.
    """
    groups: dict[str, list[str]] = {}
    for name in stored:
        keys = paths.get(name)
        own = source.names.own.get(name, name)
        outer = "".join(f"{key}." for key in keys[:-1]) if keys else ""
        if keys and not own.startswith(outer) and own.startswith(above := pipeline_stages.name_parent(keys)):
            # It is a stage: the names of the model begin above it.
            outer = above
        if not keys or not own.startswith(outer):
            return None
        if not is_state(own):
            groups.setdefault(outer, []).append(own.removeprefix(outer))
    # Loose values of a trainer (a counter, a generator's state) have names without dots, as slots of an
    # optimizer do.
    holding = {
        outer: names for outer, names in groups.items() if any("." in name for name in names)
    } or groups
    every = {outer: set(names) for outer, names in holding.items()}
    return {
        outer: names
        for outer, names in holding.items()
        if not any(_is_state_of(name, every[other]) for other in holding if other != outer for name in names)
    }


def _is_state_of(name: str, weights: set[str]) -> bool:
    """Return True for a torch optimizer's state of one of these tensors: ``state.NAME.exp_avg``."""
    begin, _, rest = name.partition(".")
    return begin == "state" and rest.rpartition(".")[0] in weights


def _of_containers(containers: Mapping[str, Sequence[str]], config: dict[str, Any]) -> list[str]:
    """Return the possible prefixes of a model's own names, one per model in the dicts with tensors."""
    found = [outer + inner for outer, names in containers.items() for inner in _within(names, config)]
    if found:
        return list(dict.fromkeys(found))
    return [outer + _unwrapped(names) for outer, names in containers.items()] or [""]


def _within(names: Sequence[str], config: dict[str, Any]) -> list[str]:
    """Return the prefixes of a model's own names within an enclosing module, found by the embedding."""
    telling = _telling(config)
    fitting = _prefixes_before(telling, names)
    if telling is not _TELLING:
        return fitting
    # Where no table knows the model, the embedding may be that of one of its parts.
    return [prefix for prefix in fitting if all(name.startswith(prefix) for name in names)]


def _prefixes_before(telling: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the prefixes before the names that identify a model, in the order of the given names."""
    found = (name.removesuffix(own) for name in names for own in telling if name.endswith(own))
    return [prefix for prefix in dict.fromkeys(found) if not prefix or prefix.endswith(".")]


def _unwrapped(names: Sequence[str]) -> str:
    """Return the attribute that DistributedDataParallel inserts. source: torch/nn/parallel/distributed.py"""
    return _DDP if all(name.startswith(_DDP) for name in names) else ""


def _telling(config: dict[str, Any]) -> tuple[str, ...]:
    """Return names that identify a model at any place: that of its embedding in its tables."""
    layout = config_json.layout_of(config)
    if layout is None:
        return _TELLING
    tables = [layouts.table(name) for name in (layout, *naming_schemes.tables(layout).values())]
    rules = [rule.name for table in tables for rule in table.rules]
    return tuple(name for name in rules if "embed" in name and not set("{(") & set(name)) or _TELLING


def _fitting(listed: list[str], config: dict[str, Any]) -> list[str]:
    """Return the possible prefixes of a model's own names, each with one model; the first one is used."""
    names = set(listed)
    telling = _telling(config)
    if fitting := _prefixes_before(telling, (name for name in listed if not is_state(name))):
        return fitting
    weights = {name for name in names if not is_state(name)}
    # torch names the optimizer's state by the names that the model itself gives its parameters.
    for state in (name.removeprefix("optim.").removeprefix("state.") for name in names - weights):
        own = state.rpartition(".")[0]
        if fitting := [p for p in _PREFIXES if p + own in weights]:
            return fitting[:1]
    inner = [p for p in _PREFIXES if p and weights and all(name.startswith(p) for name in weights)]
    if not inner:
        return [""]
    begins = {name.removeprefix(inner[0]).partition(".")[0] for name in weights}
    # Many models call what is without a head "model" themselves.
    nested = inner[0] != "model." or weights != names or not begins.isdisjoint(WORDS["tops"])
    return [inner[0] if nested or config.get("model_type") in _WITHOUT_BASE else ""]
