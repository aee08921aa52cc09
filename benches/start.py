"""How long it takes to start: bare Python, `import fastshard`, `fastshard --version`, and `inspect` of a small checkpoint.

    python benches/start.py [--rounds 20]

Rounds are interleaved; printed are medians, and what each takes above bare Python. Bar P9: 45 ms above it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAR_MS = 45


def sides(ckpt: Path) -> dict[str, list[str]]:
    python = [sys.executable]
    return {
        "bare Python": [*python, "-c", "pass"],
        "import fastshard": [*python, "-c", "import fastshard"],
        "fastshard --version": [*python, "-m", "fastshard", "--version"],
        "fastshard inspect (no bar)": [*python, "-m", "fastshard", "inspect", str(ckpt)],
    }


def measured(rounds: int) -> dict[str, float]:
    """Median seconds of each."""
    import fastshard

    with tempfile.TemporaryDirectory() as folder:
        with fastshard.Writer(Path(folder) / "ckpt") as writer:
            writer["weight"] = [[1.0, 2.0]]
        commands = sides(Path(folder) / "ckpt")
        times: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(rounds + 1):
            for name, command in commands.items():
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                # The first round fills caches.
                if turn:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    figures = measured(parser.parse_args().rounds)
    bare = figures.pop("bare Python")
    print(f"bare Python: {bare * 1e3:.1f} ms")
    for name, taken in figures.items():
        above = (taken - bare) * 1e3
        verdict = "" if "no bar" in name else " reached" if above <= BAR_MS else " missed"
        print(f"{name}: {taken * 1e3:.1f} ms, {above:.1f} above{verdict}")


if __name__ == "__main__":
    main()
