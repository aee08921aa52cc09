"""What a report of 74,240 shard entries weighs and takes, whole and broken, beside `inspect` of the same
checkpoint.

    python benches/report.py [--rounds 3] [--dir DIR]

Exits with 1 if a page is larger than 2 MB or does not say what is wrong. Times are printed, of whole
processes: they decide nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import synthetic
from measure import workplace

LIMIT = 2_000_000


def timed(*command: object) -> tuple[float, dict[str, Any]]:
    """Seconds of a process, and its JSON."""
    start = time.perf_counter()
    argv = [sys.executable, "-m", "fastshard", *map(str, command), "--accept", "holes", "--json"]
    ran = subprocess.run(argv, check=False, capture_output=True, text=True)
    return time.perf_counter() - start, json.loads(ran.stdout)


def told(name: str, source: Path, rounds: int, errors: int) -> bool:
    """One report, the fastest of some rounds."""
    page = source.parent / "report.html"
    runs = [(timed("inspect", source), timed("report", source, "-o", page)) for _ in range(rounds)]
    inspect, report = (min(run[i][0] for run in runs) for i in (0, 1))
    document = runs[-1][1][1]
    size = page.stat().st_size
    fine = size <= LIMIT and document["bytes"] == size and document["errors"] == errors
    print(
        f"report: {name}: {size:,} bytes, {report:.2f} s (inspect: {inspect:.2f} s), {document['errors']} "
        "errors" + ("" if fine else " NOT AS EXPECTED")
    )
    return fine


def experts(folder: Path, layers: int = 61, count: int = 384) -> int:
    """A mixture of experts with a tensor for each projection of each expert, a file for each layer."""
    folder.mkdir()
    names = ("gate_proj", "up_proj", "down_proj")
    for layer in range(layers):
        header, end = {}, 0
        for expert in range(count):
            for name in names:
                where = {"dtype": "BF16", "shape": [4, 8], "data_offsets": [end, end + 64]}
                header[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = where
                end += 64
        text = json.dumps(header).encode()
        with (folder / f"model-{layer + 1:05d}-of-{layers:05d}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    return layers * count * len(names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=workplace, default=None)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fastshard-report-", dir=args.dir))
    try:
        source = folder / "ckpt"
        entries = synthetic.sparse(source, 512)
        fine = told(f"{entries:,} entries, whole", source, args.rounds, 0)
        files = sorted(source.glob("*.safetensors"))
        rng = random.Random(0)
        lost = rng.sample(files, 60)
        for file in lost[:50]:
            file.unlink()
        for file in lost[50:]:
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size - 1)
        fine &= told("50 files missing, 10 cut short", source, args.rounds, 2)
        single = folder / "experts"
        fine &= told(f"{experts(single):,} tensors of one model", single, args.rounds, 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
