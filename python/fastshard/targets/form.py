"""The form of a result, as the core drafts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .._core import Table
from ..common.records import dataclass, field

__all__ = ["Form"]


@dataclass(frozen=True)
class Form:
    """Names of a result's tensors, and how ranks divide them. The core reads the fields by their names."""

    #: For the plan and the manifest, e.g. ``hf``.
    name: str
    #: Names and shapes; those of the source stay where there is none.
    table: Table | None = None
    #: Parallel degrees.
    degrees: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, bool] = field(default_factory=dict)
    #: Facts that are others for the optimizer's state.
    state_facts: Mapping[str, bool] | None = None
    #: Axis and positions of sets that the source does not have, by name.
    sets: Mapping[str, tuple[str, Sequence[int]]] = field(default_factory=dict)
    #: The vocabulary is padded to a multiple of this.
    pad_multiple: int | None = None
    #: True if ranks hold chunks of whole tensors: boxes, each once.
    chunks: bool = False
    #: The ranks that hold it, by their ranks on each parallel dimension; None for every combination.
    ranks: Sequence[Mapping[str, int]] | None = None
