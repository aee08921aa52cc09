"""The places of records in a save of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...common.records import dataclass
from .metadata import Metadata
from .optim import Objects


@dataclass(frozen=True)
class DcpFiles:
    """The contents of ``.metadata``, and those of its records that exist."""

    #: What ``.metadata`` says, or those of all ranks together.
    metadata: Metadata
    #: (name, first index of the chunk) -> (file, name of the record in it), several where ranks hold copies.
    places: Mapping[tuple[str, tuple[int, ...]], Sequence[tuple[int, str]]]
    #: Records that are no tensors, and can be read.
    objects: Objects
    #: Names of which a record is in a file that is missing.
    lacking: Mapping[str, str]
