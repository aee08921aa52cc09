"""The parts of a declared source: files of ranks, tensors assembled from pieces, blocks of stores, optimizer
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
    #: The only keys wanted below `under`; all if None.
    only: list[str] | None = None


@dataclass(frozen=True)
class Superseded:
    """Tensors that occur in two files of an index, of which the index names one."""

    names: tuple[str, ...]
    #: Number of the file that the index names, and of the other one.
    file: int
    other: int


@dataclass
class Assembled:
    """Tensors of one rank that are stored in ranges of other tensors (partitions of flat vectors)."""

    #: File that messages name.
    file: int
    coords: dict[str, int]
    rank: str | None
    #: What of a parameter they are, e.g. ``exp_avg``; None for its values.
    slot: str | None
    #: (name, shape, pieces). Pieces are ranges, one after another: (elements, file, tensor in it, first
    #: element there); or boxes: (first index, extent, file, tensor in it), with the first element there of a
    #: flat tensor.
    tensors: list[tuple[str, list[int], list[Any]]]
    #: True for parameters that are not trained and have no copy.
    frozen: bool = False
    #: True for further names, wanted only where the masters are taken.
    masters_only: bool = False
    #: The first layer (or expert) that the names count from, as the unit has it that holds the parameters.
    bases: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """The part of a product that forms a tensor: one expert of a stack, or some of its outputs."""

    experts: int
    expert: int
    #: Outputs of an expert in the stack, and the first of those that the tensor has.
    outs: int
    out: int


@dataclass(frozen=True)
class LowRank:
    """A product of two factors, given by their stored names, that is added to a tensor."""

    a: str
    b: str
    #: Columns of ``b``, of one expert.
    rank: int
    #: Factor of the product.
    scale: float
    #: How the tensor has outputs and inputs: ``rows``, ``columns``, ``experts`` or ``experts_by_columns``.
    form: str
    window: Window | None = None
    #: Norms of the outputs' rows (DoRA).
    magnitude: str | None = None


@dataclass(frozen=True)
class Vector:
    """A vector that is added to a tensor after multiplication with a factor."""

    of: str
    scale: float


@dataclass(frozen=True)
class Rows:
    """Rows that replace rows of a tensor."""

    of: str
    at: list[int]


Change: TypeAlias = LowRank | Vector | Rows


@dataclass(frozen=True)
class Adapted:
    """The changes that an adapter makes to a tensor, one after another."""

    name: str
    changes: list[Change]


@dataclass(frozen=True)
class StoredAdapter:
    """A stored adapter, alone or with its base."""

    #: Content of its config, and the file that messages name.
    config: Mapping[str, Any]
    path: str
    #: The file of its tensors, as messages name it, and their shapes by the names stored.
    file: str
    shapes: Mapping[str, list[int]]
    #: True where the names are those of a saved adapter, False for those of a model in memory.
    is_saved: bool = True
    #: Content of the base's config; None where there is none.
    base: Mapping[str, Any] | None = None


@dataclass
class StateFile:
    """A file with master weights and optimizer state, by the tensors in it."""

    file: int
    masters: list[int]
    #: Moments and steps.
    state: list[int]
    #: Keys that lead to steps that are no tensors, and not zero: numbers in the pickle, or what is refused.
    numbers: list[list[str]] = field(default_factory=list)


#: Blocks as the core takes them.
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

    #: (key, dtype, shape, bytes) of each block that is present; dtype as safetensors names it (BF16, F32,
    #: I64, BOOL ...), shape of what is handed on (blocks at the edge are clipped to the array), bytes that
    #: decoding takes (they are whole there).
    tensors: list[tuple[str, str, list[int], int]]
    #: Fills the writable buffer with the little-endian C-ordered elements of the block `key`.
    #: Called from several threads.
    read: Callable[[str, memoryview], None]
    #: Text that identifies what is stored (names, sizes and times of the files behind it): part of the plan's
    #: digest.
    identity: str

    #: The files that hold the blocks.
    files: list[File]
    #: Looks whether these are as they were when they were opened; with True, whether their status alone was
    #: changed too.
    look: Callable[[bool], None]
    #: The root of each block, and what sends for blocks (keys), where some lie on other hosts' disks.
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
    """Names that Orbax gives an item and its entries, kept for writing it again."""

    item: str
    #: key_metadata by array.
    keys: dict[str, list[dict[str, Any]]]
    #: Entries that are no arrays: (key_metadata, value_metadata).
    leaves: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]
    #: What the writer said of the checkpoint.
    custom: dict[str, Any]
    #: value_type by array.
    types: dict[str, str] = field(default_factory=dict)
    #: Texts among the leaves, as stored.
    strings: str | None = None


@dataclass(frozen=True)
class Group:
    """A group of parameters with the same settings of an optimizer."""

    #: Hyperparameters (``lr``, ``betas``, ``weight_decay`` ...), by torch's names.
    values: dict[str, Any]
    #: Its parameters, by the names stored; None where only :attr:`decays` tells them.
    names: frozenset[str] | None = None
    #: True for weights (matrices), False for biases and vectors, by the framework's rule; None where names
    #: tell.
    decays: bool | None = None


@dataclass(frozen=True)
class Moments:
    """Moments that are stored as tensors next to the weights."""

    #: (parameter, slot) by the names stored; a parameter by its own name.
    slots: dict[str, tuple[str, str]]
    #: Reads the groups (None where nothing tells of them) and the steps of the parameters.
    read: Callable[[], tuple[list[Group] | None, list[float]]]
    #: Why these cannot be slots, if they cannot.
    refused: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer in the files: master weights and state, which of them are converted, and findings."""

    #: True if the files hold fp32 master weights (or should).
    masters: bool = False
    #: True if the files hold optimizer state (or should), but no masters.
    moments_only: bool = False
    #: True if there are moments beside the weights, under names of their own.
    moments_named: bool = False
    #: Table for a conversion that takes the step (or not) and the state (or not), where both have such names.
    rules: Callable[[bool, bool], Table] | None = None
    #: True if the files say that there are no moments: it never took a step.
    unstepped: bool = False
    #: Which copy of the weights is taken unless one is asked for: ``params`` or ``masters``.
    weights: str = "params"
    #: True if the files hold parameters besides the masters.
    params_stored: bool = True
    #: What is wrong with its files; no error where only the parameters are asked for.
    findings: list[Finding] = field(default_factory=list)
    #: What of the state cannot be taken; it matters only where that is asked for.
    unread: list[Finding] = field(default_factory=list)
    #: Names of parameters that have no moments: they were not trained, or are further names of one that was.
    untrained: set[str] = field(default_factory=set)
    #: Of these, the parameters that the files say were not to be trained.
    frozen: set[str] = field(default_factory=set)
    #: Files that hold masters.
    state_files: list[StateFile] = field(default_factory=list)
    #: Its groups of parameters; None where the files do not tell which parameters each has.
    groups: list[Group] | None = None
    #: Moments under names of their own, which a conversion takes as the parameters' slots.
    beside: Moments | None = None
    #: Paths of the files that hold nothing but optimizer state.
    files: set[str] = field(default_factory=set)
    #: Steps by file.
    steps: dict[int, list[float]] = field(default_factory=dict)
