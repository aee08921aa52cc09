"""The result is the same whether it is written by way of the page cache or around it (``--io``)."""

from __future__ import annotations

from pathlib import Path

import fastshard
import numpy as np
import pytest
from fastshard import FastshardError
from helpers import cli
from safetensors.numpy import load_file, save_file

WAYS = ("auto", "buffered", "direct")
#: Rows of float32: a tensor in the midst of a page, one of whole pages, one that is written by way of the
#: cache in any case.
SHAPES = {"odd": (300, 999), "small": (7, 3), "pages": (1024, 1024), "large": (3001, 1001)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    numbers = np.random.default_rng(1)
    save_file(
        {name: numbers.standard_normal(shape).astype("f4") for name, shape in SHAPES.items()},
        folder / "model.safetensors",
    )
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of the files that hold tensors, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("model*"))}


@pytest.mark.parametrize(
    "options", [(), ("--fsync", "none"), ("--sparse",)], ids=["synced", "cached", "sparse"]
)
def test_each_way_writes_the_same_files(source: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    results = {}
    for way in WAYS:
        out = tmp_path / way
        assert cli("merge", source, out, "--io", way, "--max-shard-size", "5MB", *options).code == 0
        results[way] = read_files(out)
    assert len(results["auto"]) > 2
    assert results["buffered"] == results["auto"] == results["direct"]
    merged = {}
    for path in (tmp_path / "direct").glob("*.safetensors"):
        merged |= load_file(path)
    want = load_file(source / "model.safetensors")
    assert merged.keys() == want.keys()
    assert all(np.array_equal(merged[name], want[name]) for name in want)


@pytest.mark.parametrize("first", WAYS)
def test_a_run_goes_on_in_another_way(source: Path, tmp_path: Path, first: str) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fastshard.merge(source, tmp_path / "out", threads=1, io=first, progress=stop)
    for way in WAYS:
        if way != first:
            fastshard.merge(source, tmp_path / "out", resume=True, overwrite=True, io=way)
    fastshard.merge(source, tmp_path / "whole")
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")


def test_parts_are_written_each_way(source: Path, tmp_path: Path) -> None:
    from fastshard.conversion.distributed import split_runs

    fastshard.merge(source, tmp_path / "whole")
    for way in WAYS:
        run = split_runs.split(source, tmp_path / way, None, parts=3, io=way)
        for part in range(3):
            split_runs.make_part(run.out, part, run.id)
        split_runs.commit(run.out, run.id)
        assert read_files(tmp_path / way) == read_files(tmp_path / "whole")


def test_another_word_is_refused_before_anything_is_read(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as caught:
        fastshard.merge(source, tmp_path / "out", io="fast")  # type: ignore[arg-type]
    assert caught.value.code == "FS515"
    assert not list(tmp_path.iterdir())
    assert cli("merge", source, tmp_path / "out", "--io", "fast").code == 2
