"""Names in torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

from collections.abc import Iterable

#: The file that states where each chunk is stored; readers start from it.
METADATA = ".metadata"


def chunk_name(name: str, at: Iterable[int]) -> str:
    """Return the name of a tensor's chunk in messages and manifests, from the chunk's first index."""
    return f"{name}[{','.join(map(str, at))}]"
