"""A picture of a distribution must look like it: densities against the true ones, and against numpy's."""

from __future__ import annotations

import math
from pathlib import Path

import fastshard
import numpy as np
import pytest
import torch
from fastshard.reporting.densities import density, joined
from fastshard.verification.stats import HISTOGRAM_EDGES, TensorStats
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

MEMORY = "2GiB"


def stats_of(tmp_path: Path, values: torch.Tensor) -> TensorStats:
    save_file({"a": values}, tmp_path / "model.safetensors")
    return fastshard.stats(tmp_path, memory=MEMORY)["a"]


@pytest.mark.parametrize("mean, std", [(0.0, 0.02), (0.0, 1.0), (0.0, 3e-4), (1.0, 0.01), (-0.3, 0.1)])
def test_a_normal_distribution_has_one_hump(mean: float, std: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    s = stats_of(tmp_path, torch.randn(400, 500) * std + mean)
    drawn = density(s.histogram, s.min, s.max)
    assert drawn is not None
    peak = drawn.heights.index(max(drawn.heights))
    rising, falling = drawn.heights[: peak + 1], drawn.heights[peak:]
    assert list(rising) == sorted(rising) and list(falling) == sorted(falling, reverse=True)
    # The true density, averaged over each step, by the error function.
    cdf = [0.5 * (1 + math.erf((x - mean) / std / math.sqrt(2))) for x in drawn.edges]
    for a, b, p, q, height in zip(drawn.edges, drawn.edges[1:], cdf, cdf[1:], drawn.heights, strict=False):
        share = q - p
        if share > 0.01:
            assert height == pytest.approx(share / (b - a), rel=0.06), (a, b)
    # The bins as they are have two.
    if mean == 0:
        heights = np.array(s.histogram)
        assert heights[31] + heights[32] < heights[:32].max() / 4
    middle = [(a + b) / 2 for a, b in zip(drawn.edges, drawn.edges[1:], strict=False)]
    assert abs(middle[peak] - mean) < 3 * std


@given(
    st.lists(st.floats(-100, 100, width=32).filter(lambda x: abs(x) > 1e-6), min_size=2, max_size=200),
    st.sampled_from([0.0, 0.0005, 0.05]),
)
def test_areas_are_shares(values: list[float], tail: float) -> None:
    """Against numpy: the area over the drawn part and what is told to be cut make one, and each is right."""
    array = np.array(values)
    # A power of two belongs to the bin that is farther from zero: numpy's right edges do so for positive
    # numbers alone.
    places = [np.searchsorted(HISTOGRAM_EDGES, v, side="right" if v > 0 else "left") for v in array]
    histogram = np.bincount(places, minlength=64)
    drawn = density([int(n) for n in histogram], float(array.min()), float(array.max()), tail=tail)
    if array.min() == array.max():
        assert drawn is None
        return
    assert drawn is not None
    areas = [h * (b - a) for a, b, h in zip(drawn.edges, drawn.edges[1:], drawn.heights, strict=False)]
    assert sum(areas) + drawn.below + drawn.above == pytest.approx(1)
    assert max(drawn.below, drawn.above) <= tail
    assert list(drawn.edges) == sorted(set(drawn.edges))
    inside = ((array > drawn.edges[0]) & (array < drawn.edges[-1])).mean()
    assert inside <= sum(areas) + 1e-9
    width = drawn.edges[-1] - drawn.edges[0]
    assert (
        len(areas) == 1
        or min(b - a for a, b in zip(drawn.edges, drawn.edges[1:], strict=False)) >= width / 24 * 0.999
    )


def test_tails_are_cut_and_told(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = torch.randn(100_000) * 0.02
    values[:20] = 50.0
    s = stats_of(tmp_path, values)
    drawn = density(s.histogram, s.min, s.max)
    assert drawn is not None and drawn.edges[-1] < 1 and drawn.above == pytest.approx(20 / 100_000, rel=0.5)
    whole = density(s.histogram, s.min, s.max, tail=0)
    assert whole is not None and whole.edges[-1] == 50 and whole.above == 0


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(64),
        torch.zeros(64),
        torch.full((4,), math.nan),
        torch.tensor([0.0, 1.0, 1.0]),
        torch.tensor([True, False]),
    ],
)
def test_there_is_nothing_to_draw_of_one_value(values: torch.Tensor, tmp_path: Path) -> None:
    s = stats_of(tmp_path, values)
    assert density(s.histogram, s.min, s.max) is None


@pytest.mark.parametrize("one, other", [(1.0, 0.3), (-1.0, -0.3), (0.5, 3.0)])
def test_nearly_all_of_one_value_at_the_edge_of_a_bin(one: float, other: float, tmp_path: Path) -> None:
    values = torch.full((10_000,), one)
    values[0] = other
    s = stats_of(tmp_path, values)
    drawn = density(s.histogram, s.min, s.max)
    assert drawn is not None and drawn.edges[0] < drawn.edges[-1]
    areas = [h * (b - a) for a, b, h in zip(drawn.edges, drawn.edges[1:], drawn.heights, strict=False)]
    assert sum(areas) + drawn.below + drawn.above == pytest.approx(1)


def test_joined_is_what_one_tensor_would_be(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(100), torch.randn(300) * 5 + 2, torch.zeros(10)]
    save_file({str(i): p for i, p in enumerate(parts)}, tmp_path / "model.safetensors")
    several = joined(list(fastshard.stats(tmp_path, memory=MEMORY).values()))
    (tmp_path / "one").mkdir()
    one = stats_of(tmp_path / "one", torch.cat(parts))
    assert several.histogram == one.histogram and (several.min, several.max) == (one.min, one.max)
    assert (several.count, several.zeros) == (one.count, one.zeros)
    assert several.mean == pytest.approx(one.mean) and several.std == pytest.approx(one.std)
