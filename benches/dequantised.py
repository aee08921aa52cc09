"""Values of quantised weights: fp8 blocks against compressed-tensors' dequantizer (P20), and each form on one thread.

    python benches/dequantised.py [speed|forms] [--size 4GiB] [--rounds 5] [--dir DIR]

``speed`` needs compressed-tensors. Both sides read the same files and write the same tensors without fsync, which is checked by hash.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fastshard
import torch
from measure import Result, Side, compare, digests, machine, workplace
from safetensors.torch import save_file
from synthetic import parse_size

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from dequantised_oracle import ORACLES
from quantised_maker import FORMS

THREADS = len(os.sched_getaffinity(0))
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


def speed(folder: Path, size: int, rounds: int) -> Result:
    """Both sides on one checkpoint; their results must be the same tensors."""
    source, out = write(folder, size), folder / "out"
    common = {"src": str(source), "out": str(out), "threads": THREADS}
    ours = Side("fastshard", "fastshard", {**common, "dtype": "bf16", "fsync": False, "memory": "256MiB"})
    theirs = Side("compressed-tensors", "fp8_dequantizer", common)
    seen: dict[str, dict[str, str]] = {}

    def check(side: Side, written: Path | None) -> None:
        assert written is not None
        seen[side.label] = digests(written)
        assert len(seen) < 2 or seen[ours.label] == seen[theirs.label], "the two results differ"

    result = Result("P20 fp8 blocks to bf16", ours.label, theirs.label, "wall <= 0.10", size, {})
    return compare(result, [theirs, ours], rounds, source=source, out=out, check=check)


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
    parser.add_argument("what", nargs="?", choices=("speed", "forms"), default="speed")
    parser.add_argument("--size", default="4GiB", type=parse_size)
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--dir", default=None, type=workplace)
    a = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fastshard-dequantised-", dir=a.dir))
    try:
        print(machine(folder))
        if a.what == "forms":
            for line in forms(folder, a.size, a.rounds):
                print(line, flush=True)
            return
        result = speed(folder, a.size, a.rounds)
        for key in ("wall", "cpu", "rss", "anonymous"):
            ratios = result.ratios(key)
            print(f"{key}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        for label in (result.ours, result.peer):
            print(
                f"{label}: {result.median(label, 'wall'):.2f} s, {result.median(label, 'rss') / (1 << 20):.0f} MiB"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
