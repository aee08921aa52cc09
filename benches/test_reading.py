"""Opening, planning, hashing and verifying; every hash is compared with one computed by numpy."""

from __future__ import annotations

import hashlib
import shutil

import fastshard
import pytest
import synthetic
from measure import tensors


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    synthetic.sparse(folder, 64)
    return folder


def test_open_and_plan(benchmark, index):
    """73,984 shard entries of GPT-3 175B's shapes."""

    def run():
        return fastshard.plan(fastshard.open(index, accept=["holes"]))

    plan = benchmark.pedantic(run, rounds=3)
    assert not [f for f in plan.findings if f.severity == "error"]
    want = {s.name: (s.dtype, list(s.shape)) for s in synthetic.gpt3(96)}
    assert {name: (dtype, list(shape)) for name, dtype, shape, *_ in plan.outputs} == want


def test_first_tensor(benchmark, row):
    """From the path to the first tensor's values."""
    source, specs = row
    norm = next(s for s in specs if s.dim is None)
    data = benchmark.pedantic(lambda: fastshard.open(source)[norm.name].numpy(), rounds=5)
    assert hashlib.sha256(data.tobytes()).hexdigest() == synthetic.whole_digest(norm, 4)


def test_hash(benchmark, row, tmp_path):
    """The manifest of sharded files: each shard's BLAKE3, over its bytes."""
    source, specs = row
    out = tmp_path / "manifest.json"
    made = benchmark.pedantic(lambda: fastshard.manifest(source, out, memory="4GiB"), rounds=5)
    if benchmark.stats:
        benchmark.extra_info["GB/s"] = round(
            sum(s.nbytes() for s in specs) / benchmark.stats["median"] / 1e9, 2
        )
    blake3 = pytest.importorskip("blake3").blake3
    want = {}
    for name, path, offset, nbytes in tensors(source):
        with path.open("rb") as file:
            file.seek(offset)
            want[path.name, name] = blake3(file.read(nbytes)).hexdigest()
    assert {(t["file"], t["name"]): t["blake3"] for t in made.document["tensors"]} == want


def test_verify(benchmark, row, tmp_path):
    """A result against its manifest; a flipped bit must show."""
    source, specs = row
    out = tmp_path / "out"
    fastshard.merge(source, out, fsync=False, memory="4GiB")
    found = benchmark.pedantic(lambda: fastshard.verify(out, memory="4GiB"), rounds=5)
    if benchmark.stats:
        benchmark.extra_info["GB/s"] = round(
            sum(s.nbytes() for s in specs) / benchmark.stats["median"] / 1e9, 2
        )
    assert not [f for f in found if f.severity == "error"]
    name, path, offset, nbytes = max(tensors(out), key=lambda t: t[3])
    with path.open("r+b") as file:
        file.seek(offset + nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    broken = [f for f in fastshard.verify(out, memory="4GiB") if f.severity == "error"]
    assert [f.tensor for f in broken] == [name]
    shutil.rmtree(out)
