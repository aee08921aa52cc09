"""Parameter groups in torch's optimizers: ``param_groups`` with numbers or names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..layouts.declaration import Group
from .base import as_dict

#: Keys of a group that are not hyperparameters.
_MEMBERS = ("params", "param_names")
#: Megatron-LM's factor for a group's weight decay: 0 for biases and vectors.
_DECAY = "wd_mult"
#: Settings of runs that apply weight decay to some vectors, or not to all matrices. source:
#: megatron/core/optimizer, Megatron-Bridge
_OTHER_RULES = ("apply_wd_to_qk_layernorm", "embedding_init_method_std", "no_weight_decay_cond_type")
#: Reads the tensor of the given index, if it is a scalar.
Scalar = Callable[[int], float | None]


def hyperparameters(group: Mapping[str, Any], scalar: Scalar | None = None) -> dict[str, Any]:
    """Return the settings of a group, without its list of parameters.

    Compiled optimizers store the learning rate as a tensor.
    """

    def value_of(value: Any) -> Any:
        index = as_dict(value).get("__tensor__")
        number = scalar(index) if scalar is not None and type(index) is int else None
        return value if number is None else number

    return {key: value_of(value) for key, value in group.items() if key not in _MEMBERS}


def listed(
    groups: Any, members: Mapping[str, Iterable[str]], scalar: Scalar | None = None
) -> list[Group] | None:
    """List the groups with their parameters.

    Args:
        groups: ``param_groups`` as stored.
        members: the parameter names for each number (or name): one name, or all names of a flat vector.
        scalar: reads hyperparameters that are tensors.

    Returns:
        The groups; None if a group lists no parameters, or an unknown one.
    """
    found: list[Group] = []
    for group in groups if isinstance(groups, list) else ():
        keys = as_dict(group).get("params")
        if not isinstance(keys, list) or any(str(key) not in members for key in keys):
            return None
        names = frozenset(name for key in keys for name in members[str(key)])
        found.append(Group(hyperparameters(group, scalar), names))
    return found or None


def numbered(groups: Any, order: Sequence[Iterable[str]], scalar: Scalar | None = None) -> list[Group] | None:
    """List the groups as :func:`listed` does, for numbers that count the trained parameters in order."""
    return listed(groups, {str(number): names for number, names in enumerate(order)}, scalar)


def joined(each: Iterable[list[Group] | None]) -> list[Group] | None:
    """Combine the groups of several ranks, each of which has a part of every group's parameters.

    None if the ranks' groups differ.
    """
    ranks = list(each)
    first = next(iter(ranks), None)
    if first is None:
        return None
    found = list(first)
    for other in ranks[1:]:
        if other is None or [group.values for group in other] != [group.values for group in found]:
            return None
        found = [
            Group(group.values, (group.names or frozenset()) | (more.names or frozenset()))
            for group, more in zip(found, other, strict=True)
        ]
    return found


def by_decay(groups: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> list[Group] | None:
    """Describe Megatron-LM's groups, which do not list their parameters.

    Groups with weight decay contain matrices, groups without contain biases and vectors. Experts have
    separate groups with the same values.

    source: megatron/core/optimizer/__init__.py (_get_param_groups, get_standard_config_overrides)

    Args:
        groups: the groups as stored.
        args: the run's arguments.

    Returns:
        The groups; None if there are other groups, which a run can define by its own conditions.
    """
    kept: list[dict[str, Any]] = []
    for group in groups:
        values = {key: value for key, value in hyperparameters(group).items() if key != "is_expert_parallel"}
        if values not in kept:
            kept.append(values)
    if len(kept) == 1:
        # Old versions keep the groups that the rank's own stage has.
        return [Group(kept[0])] if args.get("pipeline_model_parallel_size") in (None, 1) else None
    decays = [values.get(_DECAY) for values in kept]
    if decays not in ([0, 1], [1, 0]) or any(
        args.get(key) is not None and args[key] is not False for key in _OTHER_RULES
    ):
        return None
    return [Group(values, decays=bool(values[_DECAY])) for values in kept]
