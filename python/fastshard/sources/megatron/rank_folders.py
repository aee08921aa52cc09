"""The files in the folders of model-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping

from ...common.records import dataclass

#: The file of the distributed optimizer, beside a rank file.
DISTRIBUTED_OPTIMIZER = "distrib_optim.pt"


@dataclass(frozen=True)
class MegatronFiles:
    """The numbers in folder names, rank file by rank file; the rank files are the first of all files."""

    #: Numbers at the end of each folder's name: the tensor-parallel rank, and up to two more.
    suffixes: tuple[tuple[int, ...], ...]
    #: The distributed optimizer's file beside a rank file, by the numbers of both.
    beside: Mapping[int, int]
