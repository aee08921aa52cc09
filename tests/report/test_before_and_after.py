"""The grid of a conversion: which rank or file holds a piece of which layer, before and after."""

from __future__ import annotations

import pickle
from pathlib import Path

import fastshard
import pytest
import torch
from fastshard.reporting import page
from fastshard.reporting.grid import Grid
from fastshard.reporting.report import about
from helpers import FIXTURES, copy, edit_safetensors

MEMORY = "2GiB"
LEGACY = FIXTURES / "sharded/megatron_legacy_tp2_pp2"
TORCH_DIST = FIXTURES / "sharded/megatron_torch_dist_tp2_pp2"


def grids(before: Path, after: Path) -> tuple[Grid, Grid]:
    told = about(after, against=before)
    assert told.comparison and told.comparison.grids
    return told.comparison.grids


def layers_of(grid: Grid) -> dict[str, set[str]]:
    """The layers of which each row holds something."""
    found: dict[str, set[str]] = {}
    for band in grid.bands:
        pairs = zip(grid.columns, band.cells, strict=True)
        layers = {c.group.removeprefix("layer ") for c, cell in pairs if cell and c.group}
        found |= dict.fromkeys(band.names, layers)
    return found


def test_ranks_hold_what_their_files_hold(tmp_path: Path) -> None:
    fastshard.convert(LEGACY, tmp_path / "out", to="hf", memory=MEMORY)
    before, after = grids(LEGACY, tmp_path / "out")
    # Each stage counts its layers from 0, and has two of the four.
    assert layers_of(before) == {
        f"tp {tp}, pp {pp}": {str(2 * pp), str(2 * pp + 1)} for tp in range(2) for pp in range(2)
    }
    assert layers_of(after) == {"model.safetensors": {"0", "1", "2", "3"}}
    assert (before.word, after.word) == ("piece", "tensor")


def test_files_of_stacked_layers_hold_the_layers_that_torch_has_in_them(tmp_path: Path) -> None:
    root = next(TORCH_DIST.glob("iter_*"))
    want: dict[str, set[str]] = {}
    with (root / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for index, storage in metadata.storage_data.items():
        held = want.setdefault(f"{root.name}/{storage.relative_path}", set())
        if ".layers." in index.fqn and index.offset is not None and "extra_state" not in index.fqn:
            chunks = metadata.state_dict_metadata[index.fqn].chunks
            (chunk,) = (c for c in chunks if tuple(c.offsets) == tuple(index.offset))
            held |= {str(layer) for layer in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])}
    fastshard.convert(TORCH_DIST, tmp_path / "out", to="hf", memory=MEMORY)
    before, _ = grids(TORCH_DIST, tmp_path / "out")
    have = layers_of(before)
    assert any(have.values())
    assert have == {file: want[file] for file in have}
    assert not any(layers for file, layers in want.items() if file not in have)


def test_a_result_in_ranks_shows_its_pieces(tmp_path: Path) -> None:
    fastshard.convert(FIXTURES / "sharded/hf_sharded", tmp_path / "out", to="gpt_neox", tp=2, memory=MEMORY)
    before, after = grids(FIXTURES / "sharded/hf_sharded", tmp_path / "out")
    assert before.word == "tensor" and after.word == "piece"
    assert layers_of(after) == {f"tp {tp}": {"0", "1", "2", "3"} for tp in range(2)}
    assert sum(band.rows for band in after.bands) == after.ranks == 2


@pytest.mark.parametrize("stats", [False, True])
def test_a_conversion_of_what_lacks_a_rank_shows_one_grid(stats: bool, tmp_path: Path) -> None:
    fastshard.convert(LEGACY, tmp_path / "out", to="hf", memory=MEMORY)
    broken = copy(LEGACY, tmp_path / "broken")
    next(broken.rglob("mp_rank_01_001/*.pt")).unlink()
    told = about(tmp_path / "out", against=broken, stats=stats, memory=MEMORY)
    assert told.comparison and told.comparison.grids is None


def test_a_result_of_which_something_is_doubtful_is_shown_alone(tmp_path: Path) -> None:
    """Its own framework counts the layers in another way."""
    before = copy(FIXTURES / "sharded/hf_sharded", tmp_path / "before")
    edit_safetensors(
        before / "model-00002-of-00004.safetensors",
        lambda t: t["model.layers.1.mlp.down_proj.weight"].fill_(torch.nan),
    )
    opened = fastshard.open(before, accept=["non-finite"])
    fastshard.convert(opened, tmp_path / "out", to="gpt_neox", tp=2, memory=MEMORY)
    told = about(tmp_path / "out", against=before, stats=True, memory=MEMORY, accept=["non-finite"])
    assert told.grid is not None and told.grid.problems
    html = page.rendered(told)
    assert "Ranks by layers" in html and "Before and after, by layers" not in html


def test_a_store_is_called_by_its_folder(tmp_path: Path) -> None:
    source = FIXTURES / "maxtext_twins/a_mt_bf16_unscan_noocdbt_zarr2"
    fastshard.convert(source, tmp_path / "out", to="hf", memory=MEMORY)
    told = about(tmp_path / "out", against=source)
    assert told.comparison and told.comparison.grids
    assert [band.label for band in told.comparison.grids[0].bands] == ["0/items"]
    assert "1 array store before, 1 file after" in page.rendered(told)
