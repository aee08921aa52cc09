"""Without a stated budget no checkpoint in a store is refused for what its ranges take."""

from __future__ import annotations

from pathlib import Path

import fastshard
import numpy as np
from bucket_store import buckets_served


def test_what_the_first_pass_keeps_does_not_refuse_the_second(tmp_path: Path) -> None:
    # Large enough that ranges fill the room of a store.
    with fastshard.Writer(tmp_path / "hf", fsync=False) as writer:
        for layer in range(8):
            writer[f"model.layers.{layer}.weight"] = np.full((5 << 20,), layer, np.float32)
    with buckets_served():
        # The source is compared with its manifest, and read again.
        assert fastshard.merge(f"bucket://{tmp_path}/hf", tmp_path / "out", fsync=False)
