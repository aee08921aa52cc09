"""Values of quantised weights: fp8 blocks against compressed-tensors' dequantizer (P20 of all_bars.py), and
each form on one thread.

    python benches/dequantised.py forms [--size 4GiB] [--rounds 5] [--dir DIR]

Both sides of P20 read the same files and write the same tensors without fsync, which is checked by hash.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fastshard
import torch
from compare import merge, peer
from measure import (
    Place,
    Result,
    Target,
    compare,
    digests,
    expect_same,
    find_lack,
    machine,
    remove,
    workplace,
)
from safetensors.torch import save_file
from synthetic import parse_size

sys.path.append(str(Path(__file__).parents[1] / "tests/makers"))
from dequantised_oracle import ORACLES
from quantised_maker import FORMS

ROWS, COLUMNS = 4096, 4096
STATED = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write(folder: Path, size: int) -> Path:
    """fp8 blocks of about this many bytes, in files of 1 GiB."""
    source = folder / "in"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "pebble", "quantization_config": STATED}))
    count, each = max(1, size // (ROWS * COLUMNS)), 64
    files = -(-count // each)
    weight_map: dict[str, str] = {}
    for number in range(files):
        name, tensors = f"model-{number + 1:05}-of-{files:05}.safetensors", {}
        for n in range(number * each, min(count, (number + 1) * each)):
            # As weights are: few of their codes are denormals, of all codes a sixteenth.
            weights = (torch.randn(ROWS, COLUMNS) * 100).clamp(-448, 448)
            tensors[f"model.layers.{n}.mlp.up_proj.weight"] = weights.to(torch.float8_e4m3fn)
            tensors[f"model.layers.{n}.mlp.up_proj.weight_scale_inv"] = (
                torch.rand(ROWS // 128, COLUMNS // 128) + 0.1
            )
        save_file(tensors, source / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    return source


def measure_p20(place: Place) -> Iterator[Result]:
    """Both sides on one checkpoint; their results must be the same tensors."""
    # Bytes of values: those of the result.
    nbytes = 2 * max(1, place.size // 2 // (ROWS * COLUMNS)) * ROWS * COLUMNS
    targets = (
        Target("wall_ratio", 0.10, least_bytes=2 << 30),
        Target("memory_ratio", 1 / 64, least_bytes=2 << 30),
        Target("gb_per_second", 8, at_least=True, least_bytes=2 << 30, least_cores=16),
    )
    result = Result("fp8 blocks to bf16", "fastshard", "compressed-tensors", targets, nbytes)
    if reason := find_lack("compressed_tensors"):
        result.reason = reason
        yield result
        return
    source, out = write(place.memory, place.size // 2), place.memory / "out"
    ours = merge(source, out, dtype="bf16")
    theirs = peer(result.peer, "fp8_dequantizer", source, out)
    yield compare(result, [theirs, ours], place.rounds, source=source, out=out, check=expect_same(digests))
    remove(source)


def forms(folder: Path, size: int, rounds: int) -> Iterator[str]:
    """Bytes of values that each form makes in a second, on one thread."""
    for form in ORACLES:
        said, weight = FORMS[form]
        count = max(1, size // (2 * ROWS * COLUMNS))
        tensors = {}
        for n in range(count):
            tensors |= weight(f"model.layers.{n}.mlp.up_proj", ROWS, COLUMNS)
        source, out = folder / "form", folder / "out"
        source.mkdir()
        (source / "config.json").write_text(json.dumps({"model_type": "pebble", "quantization_config": said}))
        save_file(
            {name: t.contiguous() for name, t in tensors.items()},
            source / "model.safetensors",
            {"format": "pt"},
        )
        walls = []
        for _ in range(rounds):
            before = time.perf_counter()
            fastshard.merge(
                source, out, dtype="bf16", threads=1, fsync=False, overwrite=True, accept=("non-finite",)
            )
            walls.append(time.perf_counter() - before)
        shutil.rmtree(source)
        shutil.rmtree(out)
        yield f"| {form} | {2 * count * ROWS * COLUMNS / statistics.median(walls) / 1e9:.2f} GB/s |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("forms",))
    parser.add_argument("--size", default="4GiB", type=parse_size)
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--dir", default=None, type=workplace)
    a = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fastshard-dequantised-", dir=a.dir))
    try:
        print(machine(folder))
        for line in forms(folder, a.size, a.rounds):
            print(line, flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
