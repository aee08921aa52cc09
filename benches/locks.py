"""Waits for locks of the kernel while shards are merged: what keeps more threads from helping, also where
there are two cores.

    python benches/locks.py            # 1 and 8 files, 2 and 8 threads, in memory and on disk
    python benches/locks.py --size 4GiB --folders /dev/shm /data

Needs ``perf`` and the right to trace. Prints, for each way of merging, how often threads waited for one kind
of lock and how long in all: ``rwsem:W`` is the lock of a file that is written to. Times on a busy machine are
longer, counts are about the same.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from compare import build_command
from measure import find_file_system
from synthetic import Spec, parse_size, tp_safetensors

RANKS, TENSORS, COLUMNS = 8, 64, 1024
MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}
#: A line of ``perf lock contention``: how often, how long in all, and the kind of lock.
WAITS = re.compile(r"\s*(\d+)\s+([\d.]+) (ns|us|ms|s|m)\s+\S+ \S+\s+\S+ \S+\s+(\S+)")


def count_waits(command: list[str], record: Path) -> dict[str, tuple[int, float]]:
    """Runs a command; returns how often and how many milliseconds its threads waited, by the kind of lock."""
    subprocess.run(["perf", "lock", "record", "-o", record, "--", *command], check=True, capture_output=True)
    shown = subprocess.run(
        ["perf", "lock", "contention", "-E", "100000", "-i", record],
        check=True,
        capture_output=True,
        text=True,
    )
    waits: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for line in (shown.stdout + shown.stderr).splitlines():
        if match := WAITS.match(line):
            count, time, unit, kind = match.groups()
            before = waits[kind]
            waits[kind] = before[0] + int(count), before[1] + float(time) * MILLISECONDS[unit]
    return waits


def measure_locks(
    folder: Path, size: int, counts: Iterable[int], threads: Iterable[int]
) -> Iterator[dict[str, Any]]:
    """Merges by the number of files and threads, synced or not: how often and how many milliseconds threads
    waited."""
    rows = size // (TENSORS * COLUMNS * 4)
    specs = [Spec(f"w{i:02d}", (rows, COLUMNS), 0, "F32") for i in range(TENSORS)]
    with tempfile.TemporaryDirectory(dir=folder, prefix="locks-") as below:
        source, out = Path(below, "in"), Path(below, "out")
        tp_safetensors(source, specs, RANKS)
        for files, count, fsync in itertools.product(counts, threads, ("none", "full")):
            shard = -(-size // files)
            command = build_command(
                "merge", source, out, "-q", "--threads", count, "--fsync", fsync, "--max-shard-size", shard
            )
            os.sync()
            waits = count_waits(command, Path(below, "record"))
            shutil.rmtree(out)
            number, time = waits.pop("rwsem:W", (0, 0.0))
            yield {
                "file_system": find_file_system(folder),
                "files": files,
                "threads": count,
                "fsync": fsync,
                "waits": number,
                "ms": round(time, 1),
                "other_waits": sum(n for n, _ in waits.values()),
                "other_ms": round(sum(t for _, t in waits.values()), 1),
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1GiB", type=parse_size, help="bytes of tensors")
    parser.add_argument("--folders", nargs="*", type=Path, default=[Path("/dev/shm"), Path.cwd()])
    parser.add_argument("--files", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--threads", nargs="*", type=int, default=[2, 8])
    options = parser.parse_args()
    if shutil.which("perf") is None:
        raise SystemExit("install perf, and allow tracing: sysctl kernel.perf_event_paranoid=-1")
    print("file system\tfiles\tthreads\tsynced\twaits for a file\tms\tother waits\tms")
    for folder in options.folders:
        for row in measure_locks(folder, options.size, options.files, options.threads):
            print(*row.values(), sep="\t", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
