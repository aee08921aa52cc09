"""Base of targets: tensors, files, and the form that a framework expects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from .. import _core
from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError, Finding
from ..common.options import MAX_DEGREE, Option
from ..common.records import dataclass, field
from ..common.topology import Topology
from ..layouts import tables
from ..layouts.declaration import Source
from ..models.model import Model
from ..models.tokenizer import Tokenizer
from .form import Form
from .optimizer_state import State
from .request import Request

if TYPE_CHECKING:
    from typing_extensions import Self

#: Maximum of a vocabulary's row multiple.
MAX_MULTIPLE = 1 << 31


@dataclass(frozen=True)
class Drafted:
    """A tensor of the target, as each rank stores it."""

    dtype: str
    #: Shape of a rank's shard.
    shape: list[int]
    bytes: int
    #: Shape of the full tensor.
    whole: list[int]
    #: (dimension, parallel dimension, parts) for each dimension that ranks divide: a rank stores its equal
    #: share of each part, one after another. None if ranks store anything else.
    cuts: list[tuple[int, str, list[int]]] | None
    #: Its layer, if it is in one.
    layer: int | None = None
    #: Its expert, if it is in one.
    expert: int | None = None

    def first(self, coords: Mapping[str, int]) -> list[int]:
        """Return the offsets, one for each dimension, at which a rank's shard begins in the full tensor."""
        at = [0] * len(self.shape)
        for dim, by, parts in self.cuts or ():
            assert len(parts) == 1, "several parts do not form a box"
            at[dim] = coords.get(by, 0) * self.shape[dim]
        return at


@dataclass(frozen=True)
class Bound:
    """Facts that are known after a draft has bound the axes of a target."""

    #: Extents by axis.
    axes: dict[str, int]
    #: The target's tensors by name.
    tensors: dict[str, Drafted]
    #: Names of the source's tensors.
    stored: Iterable[str]
    #: The weights' dtype, by torch's name.
    dtype: str | None
    #: The model's tokenizer, if one was given or found.
    tokenizer: Tokenizer | None = None
    #: The optimizer state, for targets that take moments as slots.
    state: State | None = None

    @property
    def weights(self) -> dict[str, Drafted]:
        """The tensors that are not moments."""
        if self.state is None:
            return self.tensors
        moments = {name for slots in self.state.slots.values() for name in slots.values()}
        return {name: tensor for name, tensor in self.tensors.items() if name not in moments}


@dataclass(frozen=True)
class Completed:
    """The parts of a result that a target derives from a draft."""

    #: Other small files, by path.
    texts: dict[str, str] = field(default_factory=dict)
    #: Findings about assumptions that the target made.
    findings: list[Finding] = field(default_factory=list)
    #: Files for the tensors, in the core's form; empty to fill safetensors files in order.
    files: list[_core.PlacedFile] = field(default_factory=list)
    #: Top-level names that appear after all others. Readers start from the last one. By default these are the
    #: index or the first file.
    pointers: tuple[str, ...] = ()
    #: Tensors that are written in another integer dtype than drafted.
    dtypes: dict[str, str] = field(default_factory=dict)
    #: Scalars that do not come from a tensor of the source: (dtype, integer) by name. One of the files must
    #: contain each name.
    constants: dict[str, tuple[str, int]] = field(default_factory=dict)


def positive(request: Request, *options: Option) -> None:
    """Check degrees and multiples from the caller.

    Raises:
        FastshardError: ``FS515`` for a value that is not a positive integer, or that is too large.
    """
    for option in options:
        value = request[option]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FastshardError.of(codes.USAGE, option.flag, expected="a positive integer", got=shown(value))
        largest = MAX_DEGREE if option.kind == "degree" else MAX_MULTIPLE
        if value > largest:
            raise FastshardError.of(codes.USAGE, option.flag, expected=f"at most {largest}", got=shown(value))


def padded_rows(axes: dict[str, int], multiple: int) -> int:
    """Return the number of rows of a vocabulary that is padded to a multiple."""
    return -(-axes["V"] // multiple) * multiple


class Target(ABC):
    """A form into which a conversion brings a source. The class states the supported sources and options."""

    #: Its names in ``--to``.
    names: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[Option, ...]] = ()
    #: True if each tensor is written in full.
    is_whole: ClassVar[bool] = False
    #: True if names and shapes of any source stay unchanged: a merge into another container.
    is_container: ClassVar[bool] = False
    #: True if the target supports models with any head.
    takes_any_head: ClassVar[bool] = False
    holds_optimizer: ClassVar[bool] = False
    #: True if the target always contains the optimizer, so that ``--optimizer`` is implied.
    needs_optimizer: ClassVar[bool] = False
    #: True if moments can be slots of its weights (:class:`~fastshard.targets.optimizer_state.State`),
    #: wherever they come from.
    takes_slots: ClassVar[bool] = False
    #: True if it stores the step of a train state.
    keeps_step: ClassVar[bool] = False
    #: True if :mod:`fastshard.zarr.array_writer` writes the result.
    writes_arrays: ClassVar[bool] = False
    #: The requested name.
    name: str

    @classmethod
    @abstractmethod
    def of(cls, source: Source, request: Request) -> Self:
        """Make the target for a source; ``request.to`` is one of the class's names.

        Raises:
            FastshardError: ``FS514`` for a model that the target does not support, ``FS209`` if a fact that
                decides values is unknown, ``FS515`` for impossible values of options.
        """

    @property
    def keeps_names(self) -> bool:
        """True if no table describes the model's names, so that they stay unchanged."""
        return False

    @abstractmethod
    def form(self) -> Form:
        """Return the form of the result."""

    @abstractmethod
    def complete(self, bound: Bound) -> Completed:
        """Complete the result after the draft has bound the axes."""


@dataclass
class TrainerTarget(Target):
    """A checkpoint from which a trainer continues training.

    It has files for tensor-parallel ranks and pipeline stages, and a vocabulary padded for these ranks.
    """

    source: Source
    name: str
    topology: Topology
    #: The vocabulary rows of each rank are a multiple of this number.
    multiple: int
    facts: dict[str, bool]
    #: The model; None for a source that contains the trainer's own values.
    model: Model | None
    #: Name of the layout table.
    layout: str

    def form(self) -> Form:
        """Return the form of the result."""
        return Form(
            self.name,
            tables.table(self.layout),
            degrees={"tp": self.topology.tp},
            facts=self.facts,
            pad_multiple=self.multiple * self.topology.tp,
        )

    def padded(self, axes: dict[str, int]) -> int:
        """Return the number of rows of the padded vocabulary."""
        return padded_rows(axes, self.multiple * self.topology.tp)

    def iteration(self) -> int:
        """Return the iteration from which to continue; 0 for models from another format."""
        value = self.source.files.values.get("iteration") if self.model is None else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
