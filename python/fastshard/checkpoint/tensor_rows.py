"""The tensors of a checkpoint as rows: names, dtypes, shapes and sizes, from headers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..common import codes, memory_budget
from ..common.byte_sizes import parse_size
from ..common.dtypes import TORCH_NAMES
from ..common.errors import FastshardError
from ..common.near_words import meant, nearest
from ..common.records import dataclass
from ..models.tensor_roles import layer_of, role_of
from .dequantised import Logical
from .open_checkpoint import CheckpointSource, as_checkpoint
from .plan import Plan
from .planning import make_plan

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..common.options import OpenOptions

__all__ = ["TensorRow", "ls", "matching", "rows_of"]


@dataclass(frozen=True)
class TensorRow:
    """A full tensor, as a merge would write it.

    Examples:
        >>> fastshard.ls("run")[0]
        TensorRow(name='0.word_embeddings.weight', dtype='F32', shape=(512, 32), nbytes=65536, pieces=2, ...)
    """

    name: str
    #: Dtype by its safetensors name, e.g. ``BF16``.
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    #: Number of pieces in which its bytes are stored.
    pieces: int
    #: The weight whose codes the tensor holds, if any.
    weight: Logical | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Number of the layer, from the name."""
        return layer_of(self.name)

    @property
    def role(self) -> str:
        """Role in the layer or model, from the name."""
        return role_of(self.name)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data."""
        row = {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "bytes": self.nbytes,
            "pieces": self.pieces,
        }
        return row if self.weight is None else {**row, "weight": self.weight.to_dict()}


def rows_of(plan: Plan) -> list[TensorRow]:
    """Return a row for each output of a plan, in the order of the files."""
    return [
        TensorRow(name, dtype, tuple(shape), size, pieces, plan.weights.get(name))
        for name, dtype, shape, size, pieces in plan.outputs
    ]


def ls(
    source: CheckpointSource,
    *,
    glob: Iterable[str] = (),
    dtype: Iterable[str] = (),
    layer: Iterable[int] = (),
    larger_than: str | int | None = None,
    memory: str | int | None = None,
    **opening: Unpack[OpenOptions],
) -> list[TensorRow]:
    """Lists the full tensors of a checkpoint by its headers.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        glob: glob patterns of names; all tensors if empty.
        dtype: safetensors or torch names of dtypes; all if empty.
        layer: numbers of layers; all if empty.
        larger_than: lower limit on the size of a tensor, e.g. ``"1GiB"``.
        memory: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Raises:
        FastshardError: ``FS515`` if a filter is not understood or leaves nothing.

    Examples:
        >>> for row in fastshard.ls("run", glob=["*.attention.dense.weight"]):
        ...     print(row.name, row.dtype, row.shape)
        2.attention.dense.weight F32 (32, 32)
        3.attention.dense.weight F32 (32, 32)
        4.attention.dense.weight F32 (32, 32)
    """
    with memory_budget.of(memory):
        plan = make_plan(as_checkpoint(source, **opening).opened)
        return matching(rows_of(plan), list(glob), list(dtype), list(layer), larger_than)


def matching(
    rows: Sequence[TensorRow],
    globs: Sequence[str],
    dtypes: Sequence[str],
    layers: Sequence[int],
    larger_than: str | int | None,
) -> list[TensorRow]:
    """Return the rows that pass all filters.

    Raises:
        FastshardError: ``FS515`` if a filter is not understood or leaves nothing.
    """
    larger = -1 if larger_than is None else parse_size(larger_than, "--larger-than")
    kinds = {_dtype(word) for word in dtypes}
    found = [
        row
        for row in rows
        if (not globs or any(fnmatchcase(row.name, glob) for glob in globs))
        and (not kinds or row.dtype in kinds)
        and (not layers or row.layer in layers)
        and row.nbytes > larger
    ]
    if globs and not any(fnmatchcase(row.name, glob) for row in rows for glob in globs):
        raise _nothing_matches(globs, [row.name for row in rows])
    if not found and (globs or kinds or layers or larger_than is not None):
        raise FastshardError.of(
            codes.USAGE,
            "no tensor matches these filters",
            help="list the tensors",
            run=["fastshard ls CKPT --by layer"],
        )
    return found


def _dtype(word: str) -> str:
    """Return a dtype by its safetensors or torch name.

    Raises:
        FastshardError: ``FS515`` if no dtype has this name.
    """
    names = {torch: name for name, torch in TORCH_NAMES.items()} | {name: name for name in TORCH_NAMES}
    found = names.get(word.upper()) or names.get(word.lower().removeprefix("torch."))
    if found is None:
        raise FastshardError.of(codes.USAGE, f"--dtype: there is no dtype {word}{meant(word.lower(), names)}")
    return found


def _nothing_matches(globs: Sequence[str], names: list[str]) -> FastshardError:
    near = nearest(globs[-1], names)
    return FastshardError.of(
        codes.USAGE,
        f"no tensor matches {', '.join(globs)}, and no file has that name",
        help=f"did you mean {near}?" if near else "write shell patterns for full names, e.g. '*norm*'",
    )
