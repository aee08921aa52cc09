"""What a training loop waits for at a save that `fastshard.integrations` checks: milliseconds of
`after_save`.

    python benches/guard.py [--rounds 9]

The verification of all data in the background is not started: its cost is that of `fastshard verify` (P5), on
other cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import fastshard
import numpy as np
from fastshard.integrations import SaveGuard

COUNTS = (100, 10_000)


def write_step(folder: Path, count: int) -> Path:
    """Write a checkpoint of so many small tensors."""
    with fastshard.Writer(folder, fsync=False) as writer:
        for number in range(count):
            writer[f"model.layers.{number // 10}.part.{number % 10}.weight"] = np.full(
                (4, 4), number, "float32"
            )
    return folder


def measure(folder: Path, count: int, rank: int, rounds: int) -> list[float]:
    """Measure milliseconds of a check, each against the save before."""
    steps = [write_step(folder / f"step-{number}", count) for number in (1, 2)]
    walls = []
    for number in range(rounds + 1):
        guard = SaveGuard(rank=rank, world=2, like=steps[0])
        guard._start_next = lambda: None  # type: ignore[method-assign]
        before = time.perf_counter()
        guard.after_save(steps[1])
        # The first imports what it needs.
        walls += [1e3 * (time.perf_counter() - before)] if number else []
    return walls


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print("| tensors | rank | ms, median | min | max |\n|---|---|---|---|---|")
    for count in COUNTS:
        for rank in (0, 1):
            with tempfile.TemporaryDirectory() as folder:
                walls = measure(Path(folder), count, rank, rounds)
            figures = (statistics.median(walls), min(walls), max(walls))
            print(f"| {count:,} | {rank} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")


if __name__ == "__main__":
    main()
