"""Checkpoints of ZeRO that were once read wrongly, each the smallest that shows it."""

from __future__ import annotations

import gc
from pathlib import Path

from helpers import FIXTURES, cli


def test_opening_a_checkpoint_leaves_no_file_open() -> None:
    def opened() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    root = FIXTURES / "deepspeed/zero1_bf16_dp2"
    assert cli("verify", root).code == 0
    before = opened()
    for _ in range(3):
        assert cli("verify", root).code == 0
    assert opened() <= before
