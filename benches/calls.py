"""System calls of a merge and of its peers, from the beginning of the work to its end: what decides where
results are small.

python benches/calls.py [--size 512MiB] [--dir DIR]      # needs strace
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compare import merge, peer
from measure import RANKS, SIDES, Side, find_file_system, remove, show_size, workplace
from sides import BEGIN, END
from synthetic import model, parse_size, tp_safetensors

#: Calls by what they are counted as.
KINDS = {
    "reads": ("read", "pread64", "readv", "preadv"),
    "writes": ("write", "pwrite64", "writev", "pwritev"),
    "copies": ("copy_file_range",),
    "opens": ("openat",),
    "syncs": ("fsync", "fdatasync"),
    "writebacks": ("sync_file_range",),
}
#: A line of a trace that begins a call.
CALL = re.compile(r"\d+ +(\w+)\(")


def count_calls(side: Side, log: Path) -> tuple[dict[str, int], int]:
    """Runs a side under strace; returns its calls, by kind, and the bytes that it wrote."""
    traced = ",".join(name for names in KINDS.values() for name in names)
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={traced}"]
    command += [sys.executable, str(SIDES), side.run, json.dumps(side.arguments)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    counts: Counter[str] = Counter()
    inside = False
    with log.open(errors="replace") as lines:
        for line in lines:
            if BEGIN in line:
                inside = True
            elif END in line:
                break
            elif inside and (match := CALL.match(line)):
                counts[match[1]] += 1
    written = int(json.loads(ran.stdout.splitlines()[-1])["written_bytes"])
    return {kind: sum(counts[name] for name in names) for kind, names in KINDS.items()}, written


def measure_calls(folder: Path, size: int) -> Iterator[dict[str, Any]]:
    """The calls of each side that writes so many bytes, in all and per GiB."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="calls-") as below:
        source, out = Path(below, "in"), Path(below, "out")
        nbytes = tp_safetensors(source, model(size, "row"), RANKS)
        for side in (
            merge(source, out, "merge, durable", fsync=True),
            peer("cp + fsync", "copy", source, out, fsync=True),
            merge(source, out, "merge, not synced"),
            peer("DCP consolidate", "consolidate", source, out),
        ):
            calls, written = count_calls(side, Path(below, "log"))
            remove(out)
            per_gib = {kind: round(count / nbytes * (1 << 30)) for kind, count in calls.items()}
            yield {
                "side": side.label,
                "file_system": find_file_system(folder),
                "bytes": nbytes,
                "written_bytes": written,
                "calls": calls,
                "per_gib": per_gib,
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="512MiB", type=parse_size)
    parser.add_argument("--dir", default=Path.cwd(), type=workplace)
    options = parser.parse_args()
    for row in measure_calls(options.dir, options.size):
        calls = ", ".join(f"{count} {kind}" for kind, count in row["calls"].items())
        print(f"{row['side']}: {show_size(row['bytes'])}: {calls}, {row['written_bytes']:,} bytes written")


if __name__ == "__main__":
    main()
