"""The files of a save that ColossalAI wrote, by their names and indexes."""

from __future__ import annotations

from collections.abc import Mapping

from ...common.errors import Finding
from ...common.listing import File
from ...common.records import dataclass


@dataclass(frozen=True)
class OptimFiles:
    """The optimizer's files, which follow the model's."""

    #: Folder that they lie in, below the root.
    folder: str
    #: Numbers of the shards that are there.
    shards: range
    #: The file of the parameter groups.
    groups: int | None
    #: What the names and the index say is wrong; it matters only where the optimizer is taken.
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class ColossalFiles:
    """The model's shards, and the optimizer's."""

    #: Names of shards, with the file of each directory that has it.
    shards: tuple[tuple[str, tuple[int, ...]], ...]
    #: The shard that the indexes name for each tensor.
    weight_map: Mapping[str, str]
    #: The tensors in the model's own order, where an index has it.
    order: tuple[str, ...]
    #: Shards that no index names, which are taken by their names.
    whole: frozenset[str]
    #: Pipeline stages by the names, counted from 1.
    stages: frozenset[int]
    #: Expert-parallel ranks by the names; 0 without such.
    experts: int
    #: How names of shards begin.
    stem: str
    #: ``safetensors`` or ``bin``.
    kind: str
    #: The index, if there is one only.
    index: File | None
    #: Shards that it does not name.
    unnamed: tuple[File, ...]
    #: None where no optimizer was saved near the model.
    optim: OptimFiles | None
