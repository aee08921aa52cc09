"""The places of records in a torch.distributed.checkpoint save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...common.records import dataclass
from .metadata import Metadata
from .optim import Objects


@dataclass(frozen=True)
class DcpFiles:
    """The contents of ``.metadata``, and of its existing records."""

    #: The contents of ``.metadata``, or the combined metadata of all ranks.
    metadata: Metadata
    #: (name, first index of the chunk) -> (file, name of the record in it); several if ranks have copies.
    places: Mapping[tuple[str, tuple[int, ...]], Sequence[tuple[int, str]]]
    #: Readable records that are not tensors.
    objects: Objects
    #: Names with a record in a missing file.
    lacking: Mapping[str, str]
