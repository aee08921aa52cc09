"""Buffers of blocks belong to Python: what a reader keeps of them stays what it is, and changes nothing."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastshard import _core

#: Bytes of blocks in memory of the allocator, and in a mapping of their own.
SIZES = (512 << 10, 4 << 20)
BLOCKS = 12

KEEP: dict[str, Callable[[memoryview], Any]] = {
    "nothing": lambda view: None,
    "frombuffer": lambda view: np.frombuffer(view, np.uint8),
    "asarray": np.asarray,
    "slice": lambda view: view[1:],
    "memoryview": memoryview,
    "the view itself": lambda view: view,
    "the object behind it": lambda view: view.obj,
}


def hashes(folder: Path, size: int, keep: Callable[[memoryview], Any], kept: list[Any]) -> list[str]:
    """Hashes of blocks that a reader fills, each with a number of its own, and keeps something of."""
    (folder / "anchor").write_text("x")

    def read(key: str, view: memoryview) -> None:
        view[:] = bytes([int(key)]) * size
        # What was kept of the blocks before is changed while the engine may be reading them.
        for old in kept:
            if old is not None:
                old[5] = 255
        kept.append(keep(view))

    blocks = ([(str(i), "U8", [size], size) for i in range(BLOCKS)], "identity", read, None, None)
    catalog = _core.Catalog([str(folder)], [(0, "anchor")], 1, None, {0: blocks})
    # Room for few blocks at a time, so that buffers are used again.
    manifest, _ = catalog.inventory(
        {"threads": 1, "memory": _core.anonymous_memory() + (24 << 20) + 18 * size}
    )
    tensors = json.loads(manifest)["tensors"]
    return [t["blake3"] for t in sorted(tensors, key=lambda t: int(t["name"]))]


def check(folder: Path) -> None:
    """All kinds, in one process."""
    for size, (what, keep) in itertools.product(SIZES, KEEP.items()):
        want = hashes(folder, size, KEEP["nothing"], [])
        assert len(set(want)) == BLOCKS
        kept: list[Any] = []
        assert hashes(folder, size, keep, kept) == want, what
        for number, left in enumerate(kept):
            if left is not None:
                found = np.frombuffer(left, np.uint8)
                # The last one is not written to again; a slice begins one later.
                changed = {number, 255} if number < BLOCKS - 1 else {number}
                assert set(np.unique(found).tolist()) == changed, f"{what}: another block's bytes"


def test_what_a_reader_keeps_of_a_buffer_is_neither_freed_nor_used_again(tmp_path: Path) -> None:
    # In a process of its own: what is freed too early ends the process.
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import test_block_memory as t, pathlib; t.check(pathlib.Path({str(tmp_path)!r}))",
        ],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("length", [1 << 62, (1 << 63) - 1])
def test_block_that_no_machine_holds_is_refused(length: int, tmp_path: Path) -> None:
    (tmp_path / "anchor").write_text("x")
    blocks = ([("0", "U8", [length], length)], "identity", lambda key, view: None, None, None)
    catalog = _core.Catalog([str(tmp_path)], [(0, "anchor")], 1, None, {0: blocks})
    with pytest.raises(_core.CoreError, match="FS512"):
        catalog.tensor_bytes(0, 0, length)
