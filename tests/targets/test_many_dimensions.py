"""Tensors of as many dimensions as torch has (64), copied and cast."""

from __future__ import annotations

import math
from pathlib import Path

import fastshard
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

SHAPES = {
    17: (2,) * 17,
    20: (2, 1) * 10,
    33: (1,) * 30 + (3, 5, 7),
    64: (1, 2) * 16 + (1,) * 32,
}


@pytest.mark.parametrize("dtype", [None, "bf16", "f16"])
@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_tensors_of_many_dimensions(form: str, rank: int, dtype: str | None, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    # Small whole numbers: every dtype holds them.
    shape = SHAPES[rank]
    numbers = np.random.default_rng(rank).integers(-200, 200, math.prod(shape)).astype(np.float32)
    whole = torch.from_numpy(numbers).reshape(shape)
    if form == "torch":
        # A view with its dimensions the other way round.
        whole = whole.permute(*reversed(range(whole.dim())))
        torch.save({"w": whole}, source / "pytorch_model.bin")
    else:
        save_file({"w": whole}, source / "model.safetensors")
    fastshard.merge(source, tmp_path / "out", fsync=False, **({} if dtype is None else {"dtype": dtype}))
    merged = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert merged.shape == whole.shape
    assert merged.dtype == {None: torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    assert torch.equal(merged.float(), whole)
