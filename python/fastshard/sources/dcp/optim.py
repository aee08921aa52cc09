"""Moments in a DCP checkpoint (``optim.state.PARAMETER.SLOT``), and parameter groups among its non-tensor
records.

torch stores them as ``{"state": ..., "param_groups": [...]}`` (nested), or with one name per parameter and
hyperparameter (flattened). In both cases the names are joined with dots.
source: torch/distributed/checkpoint/state_dict.py (_get_optim_state_dict, _flatten_optim_state_dict)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import _core
from ...common import codes, json_text
from ...common.errors import Finding, from_core
from ...common.records import dataclass, replace
from ...common.regex import compile_when_used
from ...layouts.declaration import Group, Moments, Source
from ..base import Contents
from ..zero.flat_state import scalar

#: ``optim.state.model.norm.weight.exp_avg``. Slots of torch's optimizers contain no dots; parameter names
#: may.
_MOMENT = compile_when_used(r"^(?P<top>(?:.*\.)?optim[a-z_]*\.)?state\.(?P<name>.+)\.(?P<slot>[a-z_]+)$")
_STEP = "step"

#: Records that are not tensors: file, offset and size in bytes, by name.
Objects = Mapping[str, tuple[Path, int, int]]


def attach(
    source: Source,
    contents: Contents,
    tensors: list[tuple[str, list[int], list[Any]]],
    objects: Objects,
) -> None:
    """Add an optimizer to a declaration, by the names of its tensors.

    Args:
        source: the declaration, with the prefix of the model's names.
        contents: contents of all files.
        tensors: name, shape and pieces of every tensor.
        objects: the records that are not tensors.
    """
    own = {name: source.names.own.get(name, name) for name, *_ in tensors}
    shapes = {own[name]: shape for name, shape, _ in tensors}
    state = _state_of(source, tensors, own, shapes)
    if not (state.slots or state.refused):
        return
    trained = {parameter for parameter, _ in state.slots.values()}
    weights = shapes.keys() - state.slots.keys()
    source.optimizer = replace(
        source.optimizer,
        moments_named=True,
        untrained={
            name
            for name in weights - trained
            if name.startswith(source.names.prefix) and not _MOMENT.match(name)
        },
        beside=Moments(
            state.slots,
            lambda: (
                _groups(
                    _values(contents, objects, state.scalars, next(iter(state.tops), "")),
                    source.names.prefix,
                    set(shapes),
                ),
                [_number(contents, file, number) for file, number in state.steps],
            ),
            [*state.refused, *_not_of_one(source, list(state.tops), state.bare, shapes)],
        ),
    )


@dataclass(frozen=True)
class _State:
    """The optimizer state that the tensor names show."""

    #: The parameter and the slot of each moment.
    slots: dict[str, tuple[str, str]]
    #: Prefixes of the moments' names.
    tops: dict[str, None]
    #: The first parameter with moments, by its name in the moments.
    bare: str | None
    #: Steps and other scalars, by name: file, and number in it.
    steps: list[tuple[int, int]]
    scalars: dict[str, tuple[int, int]]
    #: Findings about state that cannot be converted.
    refused: list[Finding]


def _state_of(
    source: Source,
    tensors: list[tuple[str, list[int], list[Any]]],
    own: Mapping[str, str],
    shapes: Mapping[str, list[int]],
) -> _State:
    """Find moments, steps and settings among the own names of all tensors."""
    slots: dict[str, tuple[str, str]] = {}
    tops: dict[str, None] = {}
    bare: str | None = None
    steps: list[tuple[int, int]] = []
    scalars: dict[str, tuple[int, int]] = {}
    refused: list[Finding] = []
    for name, shape, pieces in tensors:
        scalar = (pieces[0][2], pieces[0][3]) if not shape and len(pieces) == 1 else None
        match = _MOMENT.match(own[name])
        if match is None or (
            match["top"] is None and own[name] in shapes and shapes.get(match["name"]) is None
        ):
            if scalar is not None and "param_groups." in own[name]:
                # A learning rate that is a tensor, as compiled optimizers have it.
                scalars[own[name]] = scalar
            continue
        parameter = next(
            (p for p in (source.names.prefix + match["name"], match["name"]) if p in shapes), None
        )
        if parameter is None:
            continue
        if match["slot"] == _STEP:
            steps += [] if scalar is None else [scalar]
        elif shape == shapes[parameter]:
            slots[name] = (parameter, match["slot"])
            tops[match["top"] or ""] = None
            bare = bare or match["name"]
        elif shape:
            refused.append(
                Finding.of(
                    codes.UNSUPPORTED,
                    f"the optimizer's {match['slot']} has another shape than its parameter (factored or "
                    "quantised)",
                    tensor=own[name],
                    expected=str(shapes[parameter]),
                    got=str(shape),
                    help="leave out --optimizer, or merge the checkpoint, which keeps the state unchanged",
                    run=["fastshard merge CKPT OUT --optimizer"],
                )
            )
    return _State(slots, tops, bare, steps, scalars, refused)


def _not_of_one(
    source: Source, tops: list[str], bare: str | None, shapes: dict[str, list[int]]
) -> list[Finding]:
    """Report several optimizers, or several models to which a single optimizer may belong."""
    if len(tops) > 1:
        return [
            Finding.of(
                codes.UNSUPPORTED,
                "the checkpoint holds the state of several optimizers",
                got=", ".join(f"{top}*" for top in sorted(tops)),
                help="merge the checkpoint, which keeps them under their own names",
                run=["fastshard merge CKPT OUT --optimizer"],
            )
        ]
    ends = f".{bare}"
    copies = sorted(name.removesuffix(bare or "") for name in shapes if name == bare or name.endswith(ends))
    copies = [prefix for prefix in copies if not _MOMENT.match(f"{prefix}{bare}")]
    if len(copies) > 1 and source.names.prefix != "model.":
        return [
            Finding.of(
                codes.UNSUPPORTED,
                "no file states which copy of the model the optimizer belongs to",
                expected="model.*, which a trainer's optimizer steps",
                got=f"{source.names.prefix}*, next to "
                f"{', '.join(f'{prefix}*' for prefix in copies if prefix != source.names.prefix)}",
                help="leave out --optimizer; averaged weights have no moments",
            )
        ]
    return []


def read_object(place: tuple[Path, int, int]) -> Any:
    """Read the value of a non-tensor record, given its file, offset and size in bytes.

    Raises:
        FastshardError: if it cannot be read.
    """
    try:
        return _core.dcp_object(*place)
    except _core.CoreError as error:
        raise from_core(error) from None


def _number(contents: Contents, file: int, number: int) -> float:
    """Return the value of a scalar."""
    value = scalar(contents, file, number, contents.tensors(file)[number]["dtype"])
    return float("nan") if value is None else value


def _values(
    contents: Contents, objects: Objects, scalars: dict[str, tuple[int, int]], top: str
) -> dict[str, dict[str, Any]]:
    """Read the records below ``param_groups.``: first by group or parameter, then by key."""
    begin = f"{top}param_groups."
    found: dict[str, dict[str, Any]] = {}
    for name in (*objects, *scalars):
        which, _, key = name.removeprefix(begin).rpartition(".")
        if name.startswith(begin) and which:
            value = read_object(objects[name]) if name in objects else _number(contents, *scalars[name])
            found.setdefault(which, {})[key] = value
    return found


def _groups(found: dict[str, dict[str, Any]], prefix: str, names: set[str]) -> list[Group] | None:
    """Build parameter groups from records ``param_groups.N.KEY`` or ``param_groups.PARAMETER.KEY``."""

    def called(parameter: Any) -> str | None:
        return next((p for p in (f"{prefix}{parameter}", str(parameter)) if p in names), None)

    if found and all(which.isdigit() for which in found):
        groups = []
        for which in sorted(found, key=int):
            values = found[which]
            listed = values.pop("params", None)
            members = [called(p) for p in listed] if isinstance(listed, list) else [None]
            if None in members:
                return None
            groups.append(Group(values, frozenset(m for m in members if m is not None)))
        return groups
    alike: dict[str, tuple[dict[str, Any], set[str]]] = {}
    for which, values in found.items():
        parameter = called(which)
        if parameter is None:
            return None
        alike.setdefault(json_text.canonical(values), (values, set()))[1].add(parameter)
    return [Group(values, frozenset(members)) for values, members in alike.values()] or None
