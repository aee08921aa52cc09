"""The common parts of the ZeRO modules: a model-parallel rank, flat vectors, and small readers of inert
values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Any

from ...common.errors import Finding
from ...common.ranks import format_rank, rank_range
from ...common.records import dataclass, field
from ...layouts.declaration import Assembled
from ..base import PARAMETERS_ALONE, Contents, Found, missing
from .experts import Experts
from .zero_files import ZeroFiles

#: Maps a name in ``param_shapes`` to the layout's name.
Naming = Callable[[str], str]

#: (elements, file, tensor, first element): see :class:`..base.Assembled`.
Range = tuple[int, int, int, int]

#: A parameter: name, shape, and the ranges that make it up.
Parts = tuple[str, list[int], list[Range]]

#: A parameter of a module: name, shape, and index of its tensor in the model file.
Parameter = tuple[str, list[int], int]

#: Parameters in the master weights, and in each optimizer slot.
Named = tuple[list[Parts], dict[str, list[Parts]]]

#: Maximum size of a scalar, such as a step.
SCALAR_BYTES = 8


@dataclass
class Flat:
    """One rank's flat vector: its place and its number of elements."""

    file: int
    tensor: int
    numel: int


@dataclass
class Rank:
    """The contents of one optimizer file, group by group."""

    dp: int
    file: int
    path: str
    state: dict[str, Any]
    masters: list[Flat] = field(default_factory=list)
    #: slot -> one flat vector per group
    slots: dict[str, list[Flat | None]] = field(default_factory=dict)
    #: Optimizer steps, in the order of the groups.
    steps: list[tuple[Flat | None, float | None]] = field(default_factory=list)


@dataclass
class Model:
    """A model-parallel rank: its model file, and its place in the topology."""

    found: Found[ZeroFiles]
    contents: Contents
    state: dict[str, Any]
    file: int
    mp: int
    coords: dict[str, int]
    #: The rank as numbered in file names.
    place: dict[str, int]
    name_of: Naming
    #: True to declare tensors under their names in `param_shapes` too.
    own_names: bool = False
    #: Layer files of a pipeline: (pipeline layer, file).
    layers: list[tuple[int, int]] = field(default_factory=list)
    #: Number of pipeline stages.
    stages: int = 1
    #: Experts that are stored in separate files, for an MoE model.
    experts: Experts | None = None

    @property
    def label(self) -> str:
        """The rank as named in messages."""
        return format_rank(self.place)

    @property
    def path(self) -> str:
        """Path of the model file."""
        return self.found.files[self.file].path

    def missing(self, dp: int, world: int, bf16: bool, last: int | None = None) -> Finding:
        """Build the finding for a missing optimizer file, or for the files of all ranks up to ``last``."""
        ranks = (dp, dp if last is None else last)
        start = "bf16_" if bf16 else ""
        name, end = (f"{start}zero_pp_rank_{n}_mp_rank_{self.mp:02d}_optim_states.pt" for n in ranks)
        folder = self.found.folder
        return missing(
            f"{folder}/{name}" if folder else name,
            {"dp": rank_range(*ranks), **self.place},
            f"one of {world} partitions, by partition_count and dp_world_size",
            f"copy {name} from the node that ran data-parallel rank {dp}, or take the parameters alone",
            upto=end if end != name else None,
            run=PARAMETERS_ALONE,
        )

    def shapes(self) -> list[dict[str, list[int]]] | None:
        """Return names and shapes by parameter group, in the order of the flat vector."""
        groups = self.state.get("param_shapes")
        if isinstance(groups, dict):
            groups = [groups]
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            return None
        for group in groups:
            if not all(is_shape(shape) for shape in group.values()):
                return None
        return groups or None

    def assembled(self, slot: str | None, tensors: list[Parts], file: int) -> Assembled:
        """Return tensors of this rank under the layout's names."""
        named = [(self.name_of(name), shape, ranges) for name, shape, ranges in tensors]
        return Assembled(file=file, coords=self.coords, rank=self.label, slot=slot, tensors=named)

    def aliases(self) -> dict[str, str]:
        """Return aliases of parameters, {alias: owner}, from the model file or from the tensors' places."""
        shared = self.state.get("shared_params")
        if isinstance(shared, dict):
            return {str(k): str(v) for k, v in shared.items()}
        # Before DeepSpeed 0.8. Parameters of ZeRO-3 are empty in the module: their place says nothing.
        parameters, aliases = self.stored()
        filled = {name for name, shape, _ in parameters if math.prod(shape)}
        return {alias: owner for alias, owner in aliases.items() if owner in filled}

    def names(self) -> set[str]:
        """Return all names in the model file, including those of buffers."""
        module = self.state.get("module")
        own = self.experts.tensors if self.experts else ()
        return {*(map(str, module) if isinstance(module, dict) else ()), *self.aliases(), *own}

    def stored(self) -> tuple[list[Parameter], dict[str, str]]:
        """Return the module's parameters in order, and their aliases: {alias: owner}."""
        module = self.state.get("module")
        modules = [(self.file, "", module)]
        if not isinstance(module, dict):
            modules = [(file, f"{layer}.", self.contents(file)) for layer, file in self.layers]
        buffers = set(name_list(self.state.get("buffer_names")))
        parameters: list[Parameter] = []
        aliases: dict[str, str] = {}
        for file, prefix, values in modules:
            tensors = self.contents.tensors(file) if isinstance(values, dict) else []
            owners: dict[tuple[int, int, tuple[int, ...]], str] = {}
            for key, value in values.items() if isinstance(values, dict) else ():
                name, index = f"{prefix}{key}", tensor_index(value)
                if index is None or name in buffers:
                    continue
                tensor = tensors[index]
                place = (tensor["storage"], tensor["offset"], tuple(tensor["shape"]))
                if place in owners:
                    aliases[name] = owners[place]
                else:
                    owners[place] = name
                    parameters.append((name, tensor["shape"], index))
        return parameters, aliases


def is_shape(shape: Any) -> bool:
    """Return True for a list of extents whose product is a valid number of elements."""
    return (
        isinstance(shape, list)
        and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
        and math.prod(shape) < 1 << 60
    )


def tensor_index(value: Any) -> int | None:
    """Return the index in its file of a tensor among inert values."""
    index = value.get("__tensor__") if isinstance(value, dict) else None
    return index if type(index) is int and index >= 0 else None


def name_list(value: Any) -> list[str]:
    """Return the value as a list of names; empty if it is not a list."""
    return [str(name) for name in value] if isinstance(value, list) else []


def ints(value: Any) -> list[int] | None:
    """Return the value if it is a list of integers."""
    return value if isinstance(value, list) and all(isinstance(n, int) for n in value) else None


def state_of(contents: Contents, file: int) -> dict[str, Any] | None:
    """Return the optimizer state in an optimizer file; None if there is none or the file is unreadable."""
    content = contents(file)
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    return state if isinstance(state, dict) else None


def cut(at: int, count: int, starts: list[int], lengths: list[int]) -> Iterable[tuple[int, int, int]]:
    """Yield (elements, partition, first element in it) for elements ``at..at + count``.

    For zero elements, yield (0, 0, 0).
    """
    if count == 0:
        yield 0, 0, 0
    for r, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        lo, hi = max(at, start), min(at + count, start + length)
        if lo < hi:
            yield hi - lo, r, lo - start


def scalar(contents: Contents, file: int, tensor: int, dtype: str) -> float | None:
    """Return the value of a 0-d tensor."""
    formats = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}
    if dtype not in formats:
        return None
    return float(struct.unpack(formats[dtype], contents.bytes(file, tensor, SCALAR_BYTES))[0])


def scalars_of(contents: Contents, file: int) -> Callable[[int], float | None]:
    """Return a reader for scalars in a file, by the indices of their tensors."""

    def read(index: int) -> float | None:
        tensors = contents.tensors(file)
        fits = index < len(tensors) and math.prod(tensors[index]["shape"]) == 1
        return scalar(contents, file, index, tensors[index]["dtype"]) if fits else None

    return read


def tensors_below(value: Any) -> list[int]:
    """Return the indices of all tensors among inert values, each once, in order."""
    found: dict[int, None] = {}
    stack = [value]
    while stack:
        at = stack.pop()
        if (index := tensor_index(at)) is not None:
            found[index] = None
        elif isinstance(at, dict):
            stack.extend(reversed(list(at.values())))
        elif isinstance(at, list):
            stack.extend(reversed(at))
    return list(found)


def state_below(base: Any, under: list[str]) -> tuple[list[int], list[list[str]]]:
    """Return the state that a new optimizer sets to zero: tensors, and the keys of other steps.

    The tensors are moments and steps. Steps are stored per parameter or flat vector, and also per group in
    Apex and DeepSpeed's FusedAdam. The keys include every step that is neither a tensor nor zero, even if it
    is not a number: a value that cannot be set to zero must not be kept.

    Args:
        base: the optimizer's state in torch's form, or the list of states in an elastic checkpoint.
        under: keys that lead to it from the file's root.
    """
    tensors = dict.fromkeys(tensors_below(base.get("state") if isinstance(base, dict) else base))
    counted: list[list[str]] = []
    stack = [(under, base)]
    while stack:
        path, at = stack.pop()
        if tensor_index(at) is not None:
            continue
        entries = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        for key, value in entries:
            if key != "step":
                stack.append(([*path, str(key)], value))
            elif (index := tensor_index(value)) is not None:
                tensors[index] = None
            elif value is not None and not (isinstance(value, (int, float)) and value == 0):
                counted.append([*path, key])
    return list(tensors), counted
