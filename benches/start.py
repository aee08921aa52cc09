"""How long it takes to start: `import fastshard`, `fastshard --version`, and looking at small checkpoints, above bare Python.

    python benches/start.py [--rounds 20] [--names N]

Rounds are interleaved. Printed are medians of the time that passed and of the processor's time, which other work on the machine
changes less, each above bare Python's, and the bar. `--names` adds a checkpoint of so many tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Small checkpoints of the tests, by what they are.
CHECKPOINTS = {
    "Hugging Face": "sharded/hf_sharded",
    "Megatron-LM": "sharded/megatron_legacy_tp2_pp2",
    "DeepSpeed": "deepspeed/zero1_bf16_dp2",
    "GPT-NeoX": "gpt_neox/neox_pp_tp2",
    "DCP": "sharded/dcp_fsdp2",
}
#: Milliseconds above bare Python that a side may take.
BARS = {"import": 5, "--version": 10, "inspect": 60, "verify": 70}


def write_names(folder: Path, count: int) -> None:
    """Writes a checkpoint of many tensors of one number."""
    names = [f"t{number:07d}" for number in range(count)]
    entries = {
        n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)
    }
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * count))


def sides(names: Path | None) -> dict[str, list[str]]:
    """The arguments of Python by what is measured; the first is bare Python."""
    run = ["-m", "fastshard"]
    found = {
        "bare Python": ["-c", "pass"],
        "import fastshard": ["-c", "import fastshard"],
        "--version": [*run, "--version"],
    }
    for verb in ("inspect", "verify"):
        for name, path in CHECKPOINTS.items():
            found[f"{verb} {name}"] = [*run, verb, str(ROOT / "tests/fixtures" / path)]
    return found | ({} if names is None else {"many names": [*run, "inspect", str(names)]})


def run_once(arguments: Sequence[str], folder: str) -> tuple[float, float]:
    """Runs Python; returns the seconds that passed, and those of the processor."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=folder, env=environment)
    passed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return passed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int, names: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each side: passed, and the processor's."""
    with tempfile.TemporaryDirectory() as folder:
        many = None
        if names:
            many = Path(folder) / "names"
            many.mkdir()
            write_names(many, names)
        commands = sides(many)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for turn in range(rounds + 1):
            for name, arguments in commands.items():
                taken = run_once(arguments, folder)
                # The first round fills caches.
                if turn:
                    times[name].append(taken)
    return {
        name: (statistics.median(p for p, _ in taken), statistics.median(c for _, c in taken))
        for name, taken in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--names", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    figures = measure(arguments.rounds, arguments.names)
    bare = figures.pop("bare Python")
    print(f"bare Python: {bare[0] * 1e3:.1f} ms, {bare[1] * 1e3:.1f} of the processor\n")
    print(f"{'ms above it':<24}{'passed':>8}{'processor':>11}{'bar':>6}")
    for name, (passed, processor) in figures.items():
        bar = BARS.get(name.split()[0])
        verdict = "" if bar is None else "reached" if (passed - bare[0]) * 1e3 <= bar else "missed"
        shown = "" if bar is None else str(bar)
        above = f"{(passed - bare[0]) * 1e3:>8.1f}{(processor - bare[1]) * 1e3:>11.1f}"
        print(f"{name:<24}{above}{shown:>6}  {verdict}".rstrip())


if __name__ == "__main__":
    main()
