"""The scaling curve of this machine: merges, verify and codes by the number of threads, beside as many copies
at once (P0).

    python benches/many_cores.py         # 8 GiB in memory and on the disk of the current folder
    python benches/many_cores.py --size 1GiB --threads 1 2 --seconds 60 --save curve.json

Each run is a process of its own, its start included, on inputs that are in the page cache. Cases come in the
order of their worth; what does not fit into ``--seconds`` is left out, and said. Every result's tensors have
the hashes of the first one's. CPU seconds are per GB, and bytes are those of the result; of ``verify`` those
read.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from compare import build_command, compute_hashes
from measure import (
    THREADS,
    Place,
    Result,
    Side,
    Target,
    compare,
    digests,
    expect_same,
    find_lack,
    find_load,
    machine,
    remove,
    warm,
    workplace,
)
from synthetic import model, parse_size, tp_safetensors

RANKS = 8
#: Files that are copied at a time, as a shell would with xargs.
COPIES = 8


@dataclass
class Row:
    """One run."""

    case: str
    threads: int
    seconds: float
    gb_per_second: float
    #: User and system, seconds per GB.
    user: float
    system: float
    #: Cores that other processes had just before.
    load: float


@dataclass
class Case:
    """A command by its number of threads."""

    name: str
    source: Path
    nbytes: int
    arguments: list[str]
    #: None for what writes nothing.
    out: Path | None

    def command(self, threads: int) -> list[str]:
        """The arguments of Python."""
        out = [] if self.out is None else [str(self.out)]
        verb, *options = self.arguments
        return ["-m", "fastshard", verb, str(self.source), *out, "-q", "--threads", str(threads), *options]


def measure(name: str, threads: int, command: list[str], nbytes: int) -> Row:
    """Runs a command; returns what it took."""
    load = find_load()
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    size = nbytes / 1e9
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return Row(
        name,
        threads,
        round(seconds, 3),
        round(size / seconds, 3),
        round(user / size, 3),
        round(system / size, 3),
        load,
    )


def list_cases(memory: Path, disk: Path, size: int, cores: int) -> Iterator[Case]:
    """The cases, the most telling ones first; inputs are made when they are first needed."""
    many = ["--max-shard-size", str(max(1 << 20, size // (2 * cores)))]
    for kind in ("row", "column"):
        specs = model(size, kind)
        tp_safetensors(memory / kind, specs, RANKS)
        nbytes = sum(spec.nbytes() for spec in specs)
        quick = ["merge", "--fsync", "none"]
        yield Case(f"{kind} merge, many files", memory / kind, nbytes, [*quick, *many], memory / "out")
        yield Case(f"{kind} merge, one file", memory / kind, nbytes, quick, memory / "out")
        if kind == "row":
            yield Case("verify", memory / kind, nbytes, ["verify"], None)
            shutil.copytree(memory / kind, disk / kind)
            yield Case("row merge, durable, many files", disk / kind, nbytes, ["merge", *many], disk / "out")
            yield Case("row merge, durable, one file", disk / kind, nbytes, ["merge"], disk / "out")
            remove(disk / kind)
            yield Case(
                "row merge, cast to f32, many files",
                memory / kind,
                2 * nbytes,
                [*quick, "--dtype", "f32", *many],
                memory / "out",
            )
        remove(memory / kind)
    try:
        from dequantised import write
    except ImportError as error:
        print(f"fp8 blocks: {error}", file=sys.stderr)
        return
    source = write(memory, size // 2)
    quick = ["merge", "--fsync", "none", "--dtype", "bf16", *many]
    yield Case("fp8 blocks to bf16, many files", source, size, quick, memory / "out")


def measure_p0(place: Place) -> Iterator[Result]:
    """Merges of many files and of one in memory, against copies at once and against one thread."""
    yield from measure_merges(place, place.memory, 4 * place.size, durable=False)


def measure_durable(place: Place) -> Iterator[Result]:
    """The durable merge of many files against copies at once: part of P1."""
    yield from measure_merges(place, place.disk, place.size, durable=True)


def measure_merges(place: Place, base: Path, size: int, *, durable: bool) -> Iterator[Result]:
    """Merges by whole processes, of as many shards as copies run at a time."""
    source, out = base / "shards", base / "out"
    specs = model(size, "row")
    nbytes = sum(spec.nbytes() for spec in specs)
    threads, large = THREADS, 2 << 30
    many = ("--max-shard-size", max(1 << 20, size // (2 * threads)))
    fsync = "full" if durable else "none"
    sync = f" && sync {out}/* {out}" if durable else ""
    script = (
        f"mkdir {out} && ls {source}/*.safetensors | xargs -P {COPIES} -I @ cp --reflink=never @ {out}/{sync}"
    )
    copies = Side(
        f"{COPIES} cp{' + sync' if durable else ''}", "command", {"command": ["bash", "-c", script]}
    )

    def merge(label: str, threads: int, *more: object) -> Side:
        command = build_command("merge", source, out, "-q", "--threads", threads, "--fsync", fsync, *more)
        return Side(label, "command", {"command": command})

    # Of the copies' speed on 16 cores.
    share = Target("wall_ratio", 1 / (0.95 if durable else 0.70), least_bytes=large, least_cores=16)
    cases: list[tuple[str, Side, Side, tuple[Target, ...]]] = [
        (f"{threads} threads, many files", merge("fastshard", threads, *many), copies, (share,))
    ]
    if not durable:
        fast = Target("gb_per_second", 3.0, at_least=True, least_bytes=large, least_cores=16)
        cases += [
            (f"{threads} threads, one file", merge("fastshard", threads), copies, (fast,)),
            (
                f"{threads} threads, many files",
                merge("fastshard", threads, *many),
                merge("one thread", 1, *many),
                (),
            ),
        ]
    kind = "row merge, durable" if durable else "row merge"
    reason = "" if durable else find_lack(memory=2 * nbytes + (1 << 30))
    if not reason:
        tp_safetensors(source, specs, RANKS)
    for about, ours, theirs, targets in cases:
        result = Result(f"{kind}, {about}", ours.label, theirs.label, targets, nbytes, reason=reason)
        if not reason:
            check = expect_same(digests, compute_hashes(size, "row", RANKS), skip=copies.label)
            compare(result, [theirs, ours], place.rounds, source=source, out=out, check=check)
        yield result
    remove(source)


def find_hashes(out: Path) -> dict[str, str]:
    """The hashes of the tensors, as the manifest has them."""
    tensors = json.loads((out / "fastshard.manifest.json").read_text())["tensors"]
    return {tensor["name"]: tensor["blake3"] for tensor in tensors}


def measure_copies(name: str, source: Path, out: Path, nbytes: int, sync: str) -> Row:
    """As many ``cp`` at once as :data:`COPIES`, of the shards that a merge reads."""
    remove(out)
    out.mkdir()
    script = f"ls {source}/*.safetensors | xargs -P {COPIES} -I @ cp --reflink=never @ {out}/{sync}"
    try:
        return measure(name, COPIES, ["bash", "-c", script], nbytes)
    finally:
        remove(out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--size", default="8GiB", help="bytes of tensors (default: 8GiB)")
    parser.add_argument("--threads", nargs="*", type=int, help="default: 1, 2, 4, ... up to the cores")
    parser.add_argument("--memory", type=workplace, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument("--disk", type=workplace, default=Path.cwd(), help="a folder on a disk")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no run after these")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--save", type=Path, help="write the rows as JSON too")
    options = parser.parse_args()
    threads = options.threads or sorted({*(2**i for i in range(12) if 2**i < cores), cores})
    size, end = parse_size(options.size), time.monotonic() + options.seconds
    rows, left_out, hashes = list[Row](), list[str](), dict[str, dict[str, str]]()

    def add(row: Row) -> None:
        rows.append(row)
        print(*asdict(row).values(), sep="\t", flush=True)

    print("case\tthreads\tseconds\tGB/s\tuser s/GB\tsystem s/GB\tload", flush=True)
    with (
        tempfile.TemporaryDirectory(dir=options.memory, prefix="many-cores-") as memory,
        tempfile.TemporaryDirectory(dir=options.disk, prefix="many-cores-") as disk,
    ):
        for case in list_cases(Path(memory), Path(disk), size, cores):
            if options.only not in case.name:
                continue
            warm(case.source)
            if (
                case.name in ("row merge, many files", "row merge, durable, many files")
                and time.monotonic() < end
            ):
                assert case.out is not None
                sync = f" && sync {case.out}/* {case.out}" if "durable" in case.name else ""
                add(
                    measure_copies(
                        f"{COPIES} cp{' + sync' if sync else ''}", case.source, case.out, case.nbytes, sync
                    )
                )
            for count in threads:
                if time.monotonic() > end:
                    left_out.append(f"{case.name}, {count} threads")
                    continue
                remove(case.out)
                os.sync()
                add(measure(case.name, count, [sys.executable, *case.command(count)], case.nbytes))
                if case.out is not None:
                    found = find_hashes(case.out)
                    kind = case.name.partition(" ")[0] + ("f32" if "f32" in case.name else "")
                    assert found == hashes.setdefault(kind, found), (
                        f"{case.name}: other tensors with {count} threads"
                    )
            remove(case.out)
        about = machine(Path(disk))
    print("; ".join(f"{key} {value}" for key, value in about.items()))
    if left_out:
        print("no time was left for:", "; ".join(left_out))
    if options.save:
        document = {
            "machine": about,
            "size": size,
            "rows": [asdict(row) for row in rows],
            "left_out": left_out,
        }
        options.save.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
