"""The tensors that a checkpoint takes from another model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .. import _core
from ..common.records import dataclass

__all__ = ["TakenTensors"]


@dataclass(frozen=True)
class TakenTensors:
    """The tensors that a checkpoint takes from another model (``--fill-from``)."""

    #: The path of the model, as given.
    path: str
    #: Its folders.
    roots: Sequence[Path]
    catalog: _core.Catalog
    #: Names of the tensors in that model.
    names: frozenset[str]
