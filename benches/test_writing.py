"""Merging and converting a few dozen megabytes; every output is compared by hash."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import fastshard
import pytest
import synthetic
from measure import digests


def write(benchmark, out: Path, nbytes: int, source: Path, to: str | None = None, **options):
    """Times a conversion without fsync; the digests of its tensors."""

    def setup() -> None:
        shutil.rmtree(out, ignore_errors=True)

    def run() -> None:
        # The budget counts what is in memory already: torch, and the numpy arrays to compare with.
        fastshard.convert(source, out, to, fsync=False, memory="4GiB", **options)

    benchmark.pedantic(run, setup=setup, rounds=5, warmup_rounds=1)
    if benchmark.stats:
        benchmark.extra_info["GB/s"] = round(nbytes / benchmark.stats["median"] / 1e9, 2)
    return digests(out)


@pytest.mark.parametrize("kind", ["row", "column"])
def test_merge(benchmark, tmp_path, request, kind):
    source, specs = request.getfixturevalue(kind)
    got = write(benchmark, tmp_path / "out", sum(s.nbytes() for s in specs), source)
    assert got == {s.name: synthetic.whole_digest(s, 4) for s in specs}


def test_transpose_and_cast(benchmark, tmp_path):
    source = tmp_path / "source"
    specs = synthetic.llama(source, 48 << 20)
    layout, config = source / "transposed.toml", source / "config.json"
    nbytes = sum(s.nbytes() for s in specs)
    got = write(benchmark, tmp_path / "out", nbytes, source, "hf", dtype="bf16", layout=layout, config=config)
    assert got == {s.name: synthetic.transposed_bf16(s, 4) for s in specs}


def test_neox_to_hf(benchmark, tmp_path):
    neox = pytest.importorskip("neox", exc_type=ImportError)
    neox.write(tmp_path / "source")
    want = neox.expected()
    nbytes = sum(map(len, want.values()))
    got = write(benchmark, tmp_path / "out", nbytes, tmp_path / "source", "hf")
    assert got == {name: hashlib.sha256(data).hexdigest() for name, data in want.items()}
