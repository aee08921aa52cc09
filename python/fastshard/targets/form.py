"""The form of a result, as the core drafts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .._core import Table
from ..common.records import dataclass, field

__all__ = ["Form"]


@dataclass(frozen=True)
class Form:
    """Names of a result's tensors, and how ranks divide them. The core reads the fields by name."""

    #: The target's name in the plan and the manifest, e.g. ``hf``.
    name: str
    #: Names and shapes; None to keep those of the source.
    table: Table | None = None
    #: Parallel degrees.
    degrees: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, bool] = field(default_factory=dict)
    #: Facts that differ for the optimizer's state.
    state_facts: Mapping[str, bool] | None = None
    #: Sets that the source does not have: axis and positions, by name.
    sets: Mapping[str, tuple[str, Sequence[int]]] = field(default_factory=dict)
    #: Multiple to which the vocabulary is padded.
    pad_multiple: int | None = None
    #: True if ranks store chunks of full tensors: boxes, each stored once.
    chunks: bool = False
    #: The ranks that store the result, by parallel dimension; None for all combinations.
    ranks: Sequence[Mapping[str, int]] | None = None
