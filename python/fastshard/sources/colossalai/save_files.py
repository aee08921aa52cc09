"""The files of a ColossalAI save, from their names and indexes."""

from __future__ import annotations

from collections.abc import Mapping

from ...common.errors import Finding
from ...common.listing import File
from ...common.records import dataclass


@dataclass(frozen=True)
class OptimFiles:
    """The optimizer's files. In the list of files, they follow the model's."""

    #: Their folder, relative to the root directory.
    folder: str
    #: Numbers of the existing shards.
    shards: range
    #: The file of the parameter groups.
    groups: int | None
    #: Findings derived from names and index; they matter only if the optimizer is requested.
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class ColossalFiles:
    """The files of the model and of the optimizer."""

    #: Names of shards, with the file in each directory that contains it.
    shards: tuple[tuple[str, tuple[int, ...]], ...]
    #: The shard in which the indexes place each tensor.
    weight_map: Mapping[str, str]
    #: The tensors in the model's order, if an index states it.
    order: tuple[str, ...]
    #: Shards that no index names and that are used because of their names.
    whole: frozenset[str]
    #: Pipeline stages in the names, counted from 1.
    stages: frozenset[int]
    #: Number of expert-parallel ranks in the names; 0 without any.
    experts: int
    #: Prefix of shard names.
    stem: str
    #: ``safetensors`` or ``bin``.
    kind: str
    #: The index, if there is exactly one.
    index: File | None
    #: Shards that the index does not name.
    unnamed: tuple[File, ...]
    #: The optimizer's files; None if no optimizer was saved near the model.
    optim: OptimFiles | None
