"""Names of chunks in torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterable


def chunk_name(name: str, at: Iterable[int]) -> str:
    """What messages and manifests call one of several chunks of a tensor, by its first index."""
    return f"{name}[{','.join(map(str, at))}]"
