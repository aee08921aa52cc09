"""A model in pipeline stages with separate state dicts: ``{"model": [stage_0, stage_1]}``.

torch's pipelining does not define how stages are saved. State dicts in a list are treated as stages if no two
of them have a name in common. State dicts under keys of a dict are treated as stages if, in addition, their
layers are consecutive. All others (generator and discriminator, actor and critic, a model and its average)
stay separate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from ..common import codes
from ..common.errors import Finding
from ..common.formatting import some
from ..common.regex import compile_when_used
from ..layouts.declaration import Source, is_state

__all__ = ["join", "name_parent"]

_NUMBER = compile_when_used(r"(?:^|\.)(\d{1,6})\.")
#: Maximum number of names in a finding.
_MOST_NAMED = 8


def name_parent(keys: Sequence[str]) -> str:
    """Return the prefix of names above the last state dict among a tensor's keys."""
    return "".join(f"{key}." for key in keys[:-2])


def join(
    source: Source, stored: Iterable[str], paths: Mapping[str, Sequence[str]], chosen: str | None = None
) -> list[list[str]]:
    """Give the tensors of stages the model's own names, without the stage.

    Return the prefixes of the models in each list whose items are not stages.

    Args:
        source: the declaration.
        stored: names of all tensors.
        paths: keys of the nested dicts and lists that lead to each tensor.
        chosen: the prefix chosen by the caller; a stage that it names stays separate.
    """
    parents: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    others: set[str] = set()
    apart: list[list[str]] = []
    for name in stored:
        keys = paths.get(name)
        own = source.names.own.get(name, name)
        outer = "".join(f"{key}." for key in keys[:-1]) if keys else ""
        if keys and len(keys) > 1 and own.startswith(outer):
            parents[name_parent(keys)][keys[-2]][own.removeprefix(outer)] = name
        else:
            others.add(own)
    for parent, dicts in parents.items():
        models = {key: names for key, names in dicts.items() if not all(map(is_state, names))}
        is_chosen = chosen is not None and any(f"{chosen}.".startswith(f"{parent}{key}.") for key in models)
        # The items of a nested module (`{"0": {"weight": ...}}`) are no state dicts.
        are_modules = all(any("." in own for own in names) for names in models.values())
        if len(models) < 2 or is_chosen or not are_modules:
            continue
        if not _are_stages(models):
            if _is_list(models):
                apart.append([f"{parent}{key}." for key in models])
            continue
        joined = {f"{parent}{own}": name for names in models.values() for own, name in names.items()}
        if others & joined.keys() or len(joined) < sum(map(len, models.values())):
            continue
        source.names.own |= {name: own for own, name in joined.items()}
        source.names.renames = True
        source.findings.append(
            Finding.of(
                codes.IGNORED,
                f"{len(models)} state dicts are stages of one model: their names are read without "
                f"{some([f'{parent}{key}.' for key in models], _MOST_NAMED)}",
                severity="note",
            )
        )
    return apart


def _is_list(dicts: Mapping[str, object]) -> bool:
    """Return True for the items of a list, and for dicts whose keys are consecutive indices."""
    return set(dicts) == {str(number) for number in range(len(dicts))}


def _are_stages(dicts: Mapping[str, Mapping[str, str]]) -> bool:
    """Return True for state dicts in a list without a common name, or in a dict if their layers are
    consecutive.
    """
    names = [name for own in dicts.values() for name in own]
    if len(set(names)) < len(names):
        return False
    if _is_list(dicts):
        return True
    layers = [{int(match[1]) for name in own if (match := _NUMBER.search(name))} for own in dicts.values()]
    if not all(layers):
        return False
    spans = sorted((min(numbers), max(numbers)) for numbers in layers)
    follow = all(before[1] + 1 == after[0] for before, after in pairwise(spans))
    return follow and spans[0][0] == 0
