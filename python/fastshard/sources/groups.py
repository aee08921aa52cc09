"""Groups of parameters, as torch's optimizers list them: ``param_groups`` with numbers or names for parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..declared import Group
from .base import as_dict

#: What a group says besides hyperparameters.
_MEMBERS = ("params", "param_names")


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says of its parameters, but which they are."""
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def numbered(groups: Any, order: Sequence[Iterable[str]]) -> list[Group] | None:
    """Groups whose parameters are numbers.

    Args:
        groups: ``param_groups`` as stored.
        order: the names that each number stands for: one parameter, or all of a flat vector.

    Returns:
        The groups; None where a number stands for nothing, or some of `order` are in no group or in two.
    """
    found: list[Group] = []
    used: list[int] = []
    for group in groups if isinstance(groups, list) else ():
        numbers = as_dict(group).get("params")
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < len(order) for n in numbers):
            return None
        used += numbers
        names = frozenset(name for number in numbers for name in order[number])
        found.append(Group(hyperparameters(group), names))
    return found if found and sorted(used) == list(range(len(order))) else None
