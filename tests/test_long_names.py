"""Names that take more memory than their tensors: the default budget grows with the plan, a stated one holds."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import fastshard
import pytest


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 MB of names."""
    names = [f"{i:05d}" + "x" * 4995 for i in range(6000)]
    entries = {
        n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)
    }
    header = json.dumps(entries).encode()
    folder = tmp_path_factory.mktemp("names")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(struct.pack("<6000f", *range(6000)))
    return folder


def test_default_budget_grows_with_what_the_plan_takes(source: Path, tmp_path: Path) -> None:
    merged = fastshard.merge(source, tmp_path / "out", fsync=False)
    assert len(merged.document["tensors"]) == 6000


def test_budget_that_the_names_alone_exceed_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(fastshard.FastshardError, match="FS512") as raised:
        fastshard.merge(source, tmp_path / "out", memory="64MiB", fsync=False)
    # What is in use: what planning has freed is given back first.
    assert "at least" in str(raised.value.expected)
    assert not (tmp_path / "out").exists()
