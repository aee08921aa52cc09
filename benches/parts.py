"""A run of several processes against one of one (P14 of all_bars.py), and how evenly 175B divides.

python benches/parts.py divided --parts 64      # GPT-3 175B of holes: each share's bytes, seconds, memory
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sparse_gpt3
import synthetic
from compare import build_command
from measure import MIB, RANKS, Place, Result, Side, Target, compare, digests, expect_same, remove, run

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
                  "cpu": use.ru_utime + use.ru_stime, "rss": use.ru_maxrss << 10,
                  "anonymous": anonymous}), file=sys.stderr)
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


def measure_p14(place: Place) -> Iterator[Result]:
    """Two ranks with a thread each against one process with one.

    What is read is without what the same commands read of a source of 1 MiB: Python's modules, mostly.
    """
    source, out = place.memory / "parts", place.memory / "out"

    def build_sides() -> list[Side]:
        merge = shlex.join(build_command("merge", source, out, "--threads", 1, "--memory", "256MiB", "-q"))
        both = f"{merge} --rank 0 --world 2 & a=$!; {merge} --rank 1 --world 2 & wait $! && wait $a"
        commands = {"one process": merge, "two processes": both}
        return [Side(label, "command", {"command": ["bash", "-c", text]}) for label, text in commands.items()]

    specs = synthetic.model(MIB, "mixed")
    least = synthetic.tp_safetensors(source, specs, RANKS)
    before: dict[str, float] = {}
    for side in build_sides():
        before[side.label] = run(side)["read_bytes"]
        remove(out)
    remove(source)
    specs = synthetic.model(place.size, "mixed")
    nbytes = synthetic.tp_safetensors(source, specs, RANKS)
    check = expect_same(digests, {spec.name: synthetic.whole_digest(spec, RANKS) for spec in specs})
    targets = (
        Target("wall_ratio", 0.60, least_bytes=2 << 30),
        Target("read_share", 1.01, least_bytes=2 << 30),
    )
    result = Result("two processes of one thread", "two processes", "one process", targets, nbytes)
    compare(result, build_sides(), place.rounds, source=source, out=out, check=check)
    read = result.median("two processes", "read_bytes") - before["two processes"]
    result.more["read_share"] = read / (nbytes - least)
    yield result
    remove(source)


def divided(folder: Path, parts: int, at_once: int) -> None:
    """GPT-3 175B of holes, divided: what each share is and takes."""
    source, out = folder / "neox", folder / "out"
    size, files = sparse_gpt3.neox(source)
    start = time.perf_counter()
    begun = subprocess.run(
        [
            sys.executable,
            "-m",
            "fastshard",
            "plan",
            source,
            "--to",
            "hf",
            "--parts",
            str(parts),
            "--out",
            out,
            "--sparse",
            "--accept",
            "holes",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
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
        commands = [["make-part", i, out, *common] for i in range(first, min(first + at_once, parts))]
        records += timed(commands)[1]
    walls = [r["wall"] for r in records]
    reads = sum(r["read"] for r in records)
    print(
        f"divided: each share {min(walls):.1f} to {max(walls):.1f} s with {at_once} at a time, "
        f"RSS {max(r['rss'] for r in records) / MIB:.0f} MiB at most, read {reads / sum(shares):.4f} of the "
        "payload"
    )
    start = time.perf_counter()
    (record,) = timed([["commit", out, *common]])[1]
    print(
        f"divided: committed in {time.perf_counter() - start:.1f} s, RSS {record['rss'] / MIB:.0f} MiB, "
        f"read {record['read'] / sum(shares):.4f} of the payload"
    )
    remove(source)
    remove(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=("divided",))
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        divided(Path(folder), args.parts, args.at_once)


if __name__ == "__main__":
    main()
