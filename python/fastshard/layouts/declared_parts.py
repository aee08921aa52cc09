"""The parts of a declared source: rank files, tensors assembled from pieces, blocks of stores, optimizer
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .._core import Table
from ..common.errors import FastshardError, Finding
from ..common.listing import File
from ..common.records import dataclass, field


@dataclass
class Unit:
    """The place of one file in the topology, and the rules that turn its keys into names."""

    file: int
    under: list[str] = field(default_factory=list)
    strip: str = ""
    prefix: str = ""
    coords: dict[str, int] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)
    rank: str | None = None
    #: The only keys to use below `under`; None for all.
    only: list[str] | None = None


@dataclass(frozen=True)
class Superseded:
    """Tensors that two files of an index contain, with the file that the index names."""

    names: tuple[str, ...]
    #: Number of the file that the index names, and number of the other file.
    file: int
    other: int


@dataclass
class Assembled:
    """Tensors of one rank that are stored in ranges of other tensors (partitions of flat vectors)."""

    #: The file to name in messages.
    file: int
    coords: dict[str, int]
    rank: str | None
    #: The optimizer slot, e.g. ``exp_avg``; None for the parameters' values.
    slot: str | None
    #: (name, shape, pieces). Pieces are consecutive ranges: (elements, file, tensor in it, first element
    #: there); or boxes: (first index, extent, file, tensor in it), with the first element there of a flat
    #: tensor.
    tensors: list[tuple[str, list[int], list[Any]]]
    #: True for parameters that are not trained and have no master copy.
    frozen: bool = False
    #: True for additional names that are used only if master weights are requested.
    masters_only: bool = False
    #: The first layer (or expert) from which the names count, as stated by the unit that contains the
    #: parameters.
    bases: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """The part of a product that forms a tensor: one expert of a stack, or some of its outputs."""

    experts: int
    expert: int
    #: Outputs of one expert in the stack, and the first output that the tensor contains.
    outs: int
    out: int


@dataclass(frozen=True)
class LowRank:
    """A product of two factors, given by their stored names, that is added to a tensor."""

    a: str
    b: str
    #: Number of columns of ``b``, for one expert.
    rank: int
    #: Factor by which the product is multiplied.
    scale: float
    #: Arrangement of outputs and inputs in the tensor: ``rows``, ``columns``, ``experts`` or
    #: ``experts_by_columns``.
    form: str
    window: Window | None = None
    #: Norms of the output rows (DoRA).
    magnitude: str | None = None


@dataclass(frozen=True)
class Vector:
    """A vector that is multiplied by a factor and added to a tensor."""

    of: str
    scale: float


@dataclass(frozen=True)
class Rows:
    """Rows that replace some rows of a tensor."""

    of: str
    at: list[int]


Change: TypeAlias = LowRank | Vector | Rows


@dataclass(frozen=True)
class Adapted:
    """The changes that an adapter makes to a tensor, in order."""

    name: str
    changes: list[Change]


@dataclass(frozen=True)
class StoredAdapter:
    """A stored adapter, with or without its base."""

    #: Content of its config, and the file to name in messages.
    config: Mapping[str, Any]
    path: str
    #: The file of its tensors, as named in messages, and the tensors' shapes by stored name.
    file: str
    shapes: Mapping[str, list[int]]
    #: True if the names are those of a saved adapter; False if they are those of a model in memory.
    is_saved: bool = True
    #: Content of the base's config; None without a base.
    base: Mapping[str, Any] | None = None


@dataclass
class StateFile:
    """A file with fp32 master weights and optimizer state, described by its tensors."""

    file: int
    masters: list[int]
    #: Moments and steps.
    state: list[int]
    #: Keys that lead to steps that are neither tensors nor zero: numbers in the pickle, or refused values.
    numbers: list[list[str]] = field(default_factory=list)


#: Blocks in the form that the core takes.
ListedBlocks: TypeAlias = tuple[
    list[tuple[str, str, list[int], int]],
    str,
    Callable[[str, memoryview], list[Finding] | None],
    tuple[list[int], Callable[[list[str]], list[Finding] | None]] | None,
    Callable[[bool], list[Finding] | None] | None,
]


@dataclass
class Blocks:
    """Arrays stored as encoded blocks (zarr chunks), which are decoded one by one on demand."""

    #: (key, dtype, shape, bytes) of each block that exists; dtype as safetensors names it (BF16, F32, I64,
    #: BOOL ...), shape as returned (blocks at the edge are clipped to the array), bytes needed for decoding
    #: (where blocks are not clipped).
    tensors: list[tuple[str, str, list[int], int]]
    #: Fills the writable buffer with the little-endian, C-ordered elements of the block `key`. Called from
    #: several threads.
    read: Callable[[str, memoryview], None]
    #: Text that identifies the stored data (names, sizes and times of the underlying files); part of the
    #: plan's digest.
    identity: str

    #: The files that contain the blocks.
    files: list[File]
    #: Checks whether these files are unchanged since they were opened. With True, a change of their status
    #: alone counts too.
    look: Callable[[bool], None]
    #: The root of each block, and a function that fetches blocks (by key), if some are on other hosts' disks.
    apart: tuple[list[int], Callable[[list[str]], None]] | None = None

    def listed(self) -> ListedBlocks:
        """Convert the blocks into the form that the core takes.

        The core gets the findings of a block as a list.
        """

        def collecting(work: Callable[..., None]) -> Callable[..., list[Finding] | None]:
            def collect_findings(*arguments: Any) -> list[Finding] | None:
                try:
                    work(*arguments)
                except FastshardError as error:
                    return error.findings
                return None

            return collect_findings

        apart = self.apart and (self.apart[0], collecting(self.apart[1]))
        return self.tensors, self.identity, collecting(self.read), apart, collecting(self.look)


@dataclass
class TreeInfo:
    """The names that Orbax gives to an item and its entries, kept in order to write it again."""

    item: str
    #: key_metadata of each array.
    keys: dict[str, list[dict[str, Any]]]
    #: Entries that are not arrays: (key_metadata, value_metadata).
    leaves: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]
    #: Custom metadata of the checkpoint's writer.
    custom: dict[str, Any]
    #: value_type of each array.
    types: dict[str, str] = field(default_factory=dict)
    #: Strings among the leaves, as stored.
    strings: str | None = None


@dataclass(frozen=True)
class Group:
    """A group of parameters with the same optimizer settings."""

    #: Hyperparameters (``lr``, ``betas``, ``weight_decay`` ...), by torch's names.
    values: dict[str, Any]
    #: Stored names of its parameters; None if only :attr:`decays` identifies them.
    names: frozenset[str] | None = None
    #: True for weights (matrices), False for biases and vectors, by the framework's rule; None if names
    #: identify the parameters.
    decays: bool | None = None


@dataclass(frozen=True)
class Moments:
    """Optimizer moments stored as tensors next to the weights."""

    #: (parameter, slot) by stored name; the parameter by its own name.
    slots: dict[str, tuple[str, str]]
    #: Reads the groups (None if nothing states them) and the parameters' steps.
    read: Callable[[], tuple[list[Group] | None, list[float]]]
    #: Why these moments cannot be slots, if they cannot.
    refused: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer in the files: master weights and state, which of them to convert, and findings."""

    #: True if the files contain fp32 master weights (or should).
    masters: bool = False
    #: True if the files contain optimizer state (or should), but no master weights.
    moments_only: bool = False
    #: True if moments are stored next to the weights, under their own names.
    moments_named: bool = False
    #: Returns the table for a conversion with or without the step, and with or without the state, if both
    #: have such names.
    rules: Callable[[bool, bool], Table] | None = None
    #: True if the files state that there are no moments: the optimizer never took a step.
    unstepped: bool = False
    #: The copy of the weights to use by default: ``params`` or ``masters``.
    weights: str = "params"
    #: True if the files contain parameters besides the master weights.
    params_stored: bool = True
    #: Problems with its files; not errors if only the parameters are requested.
    findings: list[Finding] = field(default_factory=list)
    #: Optimizer state that cannot be converted; it matters only if the state is requested.
    unread: list[Finding] = field(default_factory=list)
    #: Names of parameters without moments: they were not trained, or are aliases of one that was.
    untrained: set[str] = field(default_factory=set)
    #: The parameters among these that the files state to be frozen.
    frozen: set[str] = field(default_factory=set)
    #: Files that contain master weights.
    state_files: list[StateFile] = field(default_factory=list)
    #: Its groups of parameters; None if the files do not state which parameters each group has.
    groups: list[Group] | None = None
    #: Moments under their own names, which a conversion uses as the parameters' slots.
    beside: Moments | None = None
    #: Paths of the files that contain only optimizer state.
    files: set[str] = field(default_factory=set)
    #: Steps of each file.
    steps: dict[int, list[float]] = field(default_factory=dict)
