"""The files in the folders of model-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping

from ...common.records import dataclass

#: The distributed optimizer's file next to a rank file.
DISTRIBUTED_OPTIMIZER = "distrib_optim.pt"


@dataclass(frozen=True)
class MegatronFiles:
    """The numbers in folder names, by rank file; the rank files are first in the list of files."""

    #: Numbers at the end of each folder's name: the tensor-parallel rank, and up to two others.
    suffixes: tuple[tuple[int, ...], ...]
    #: The distributed optimizer's file for each rank file, by file number.
    beside: Mapping[int, int]
