"""Names in torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

#: The file that says which chunk is where; readers start from it.
METADATA = ".metadata"


def chunk_name(name: str, at: Iterable[int]) -> str:
    """Return the name that messages and manifests give one chunk of a tensor, by its first index."""
    return f"{name}[{','.join(map(str, at))}]"
