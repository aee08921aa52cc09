"""A run of several processes against one of one: time, bytes read, and how evenly 175B divides.

python benches/parts.py two --size 2GiB --rounds 5      # two ranks of one thread each against one of one thread
python benches/parts.py divided --parts 64              # GPT-3 175B of holes: each share's bytes, seconds, memory
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sparse_gpt3
import synthetic
from fastshard.common.byte_sizes import parse_size

MIB = 1 << 20

#: Runs a command of fastshard and prints what it took.
_MEASURED = """
import json, resource, sys, time
from fastshard.cli import main
start = time.perf_counter()
code = main(sys.argv[1:])
io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
status = open("/proc/self/status").read()
anonymous = int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) << 10
use = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"code": code, "wall": time.perf_counter() - start, "read": int(io["rchar"]),
                  "cpu": use.ru_utime + use.ru_stime, "rss": use.ru_maxrss << 10, "anonymous": anonymous}), file=sys.stderr)
"""


def started(arguments: Sequence[object]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _MEASURED, *(str(a) for a in arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    told = process.communicate()[1]
    record: dict[str, Any] = json.loads(told.splitlines()[-1])
    if record["code"] != 0:
        raise SystemExit(told)
    return record


def timed(commands: Sequence[Sequence[object]]) -> tuple[float, list[dict[str, Any]]]:
    """Wall seconds of commands that run at the same time, starts included, and what each took."""
    start = time.perf_counter()
    processes = [started(command) for command in commands]
    return time.perf_counter() - start, [ended(process) for process in processes]


def remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def two(folder: Path, size: int, rounds: int) -> None:
    """Two ranks with a thread each against one process with one, in turns.

    What is read is told without what the same commands read of a source of 1 MiB: Python's modules, mostly.
    """
    tiny, source = folder / "tiny", folder / "in"
    least = synthetic.tp_safetensors(tiny, synthetic.model(MIB, "mixed", 0), 4)
    payload = synthetic.tp_safetensors(source, synthetic.model(size, "mixed", 0), 4)

    def run(side: str, path: Path) -> tuple[float, list[dict[str, Any]]]:
        out = folder / side
        command = ["merge", path, out, "--threads", 1, "--memory", "256MiB", "-q"]
        ranks = [[*command, "--rank", r, "--world", 2] for r in range(2)] if side == "two" else [command]
        start = time.perf_counter()
        _, records = timed(ranks)
        took = time.perf_counter() - start
        remove(out)
        return took, records

    def read(records: list[dict[str, Any]]) -> int:
        return sum(record["read"] for record in records)

    ratios, cpus = [], []
    extra: dict[str, list[float]] = {"one": [], "two": []}
    started_with = {side: read(run(side, tiny)[1]) for side in extra}
    for i in range(rounds):
        results = {side: run(side, source) for side in (("one", "two") if i % 2 else ("two", "one"))}
        ratios.append(results["two"][0] / results["one"][0])
        cpus.append(sum(r["cpu"] for r in results["two"][1]) / results["one"][1][0]["cpu"])
        for side, (_, records) in results.items():
            extra[side].append((read(records) - started_with[side]) / (payload - least))
        print(
            f"two: round {i + 1}: {results['two'][0]:.2f} s against {results['one'][0]:.2f} s, ratio {ratios[-1]:.3f}; "
            f"read {extra['two'][-1]:.4f} of the payload (one process: {extra['one'][-1]:.4f})"
        )
    print(
        f"two: {payload / MIB:.0f} MiB, {rounds} rounds: median ratio {statistics.median(ratios):.3f} (wall), "
        f"{statistics.median(cpus):.3f} (CPU); read {statistics.median(extra['two']):.4f} of the payload"
    )
    remove(tiny, source)


def divided(folder: Path, parts: int, at_once: int) -> None:
    """GPT-3 175B of holes, divided: what each share is and takes."""
    source, out = folder / "neox", folder / "out"
    size, files = sparse_gpt3.neox(source)
    start = time.perf_counter()
    begun = subprocess.run(
        [sys.executable, "-m", "fastshard", "plan", source, "--to", "hf", "--parts", str(parts), "--out", out, "--sparse", "--accept", "holes", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    document = json.loads(begun.stdout)
    shares = document["parts"]
    print(
        f"divided: {size:,} bytes in {files:,} files over {parts} parts: begun in {seconds:.2f} s; shares of "
        f"{min(shares):,} to {max(shares):,} bytes, largest over smallest {max(shares) / min(shares):.5f}"
    )
    records = []
    common = ["--run", document["run"], "--threads", 1, "-q"]
    for first in range(0, parts, at_once):
        commands = [["run-part", i, out, *common] for i in range(first, min(first + at_once, parts))]
        records += timed(commands)[1]
    walls = [r["wall"] for r in records]
    reads = sum(r["read"] for r in records)
    print(
        f"divided: each share {min(walls):.1f} to {max(walls):.1f} s with {at_once} at a time, "
        f"RSS {max(r['rss'] for r in records) / MIB:.0f} MiB at most, read {reads / sum(shares):.4f} of the payload"
    )
    start = time.perf_counter()
    (record,) = timed([["commit", out, *common]])[1]
    print(
        f"divided: committed in {time.perf_counter() - start:.1f} s, RSS {record['rss'] / MIB:.0f} MiB, "
        f"read {record['read'] / sum(shares):.4f} of the payload"
    )
    remove(source, out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=("two", "divided"))
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        if args.case == "two":
            two(Path(folder), parse_size(args.size, "size"), args.rounds)
        else:
            divided(Path(folder), args.parts, args.at_once)


if __name__ == "__main__":
    main()
