"""The places of the largest values: compared with a sort of all of them."""

from __future__ import annotations

from pathlib import Path

import fastshard
import numpy as np
import pytest
import torch
from fastshard.reporting import largest_values
from safetensors.torch import save_file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_largest_are_those_of_a_sort(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(largest_values, "_CHUNK", 64)
    torch.manual_seed(3)
    tensors = {
        "any": torch.randn(7, 5, 3).to(dtype),
        "equal": torch.ones(100, dtype=dtype),
        "two": torch.tensor([-2.0, 1.0], dtype=dtype),
        "odd": torch.tensor([float("nan"), 1.0, -float("inf"), float("nan"), 3.0], dtype=dtype),
        "nothing": torch.tensor([float("nan")] * 3, dtype=dtype),
        "none": torch.zeros(0, 4, dtype=dtype),
        "one": torch.tensor(5.0, dtype=dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = largest_values.largest(fastshard.plan(tmp_path), tensors)
    for name, tensor in tensors.items():
        values = tensor.double().numpy()
        flat = values.ravel()
        order = sorted(
            np.flatnonzero(~np.isnan(flat)).tolist(), key=lambda at, flat=flat: (-abs(flat[at]), at)
        )
        want = [(tuple(map(int, np.unravel_index(at, values.shape))), flat[at]) for at in order[:3]]
        assert list(found[name]) == want, name


def test_codes_and_whole_numbers_have_none(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4)}, tmp_path / "model.safetensors")
    assert largest_values.largest(fastshard.plan(tmp_path), ["a"]) == {}
