"""Runs every performance bar against its peer, in turns on the same bytes, and writes the figures as JSON.

    python benches/all_bars.py --out benches/figures.json [--size 2GiB] [--rounds 5] [--only P1,P7] [--dir
    DIR]
    python benches/all_bars.py --quick                       # 4 MiB, one round: to see that everything runs
    python benches/make_figures.py benches/figures.json      # the page, and the figures of README.md

A bar is one or more cases: a function of a module beside this one that yields a `Result` for each. What a
case lacks is its reason for not being run; a bar that fails is recorded as failed, the others go on, and the
command ends with 1. A missed target is no failure. A case before whose runs other processes had more than 0.2
cores is `loaded`: it gives no figure to publish.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fastshard
from fastshard import _core
from make_figures import build_page
from measure import IDLE, MIB, Place, Result, find_lack, find_load, machine, touch, workplace
from synthetic import parse_size


@dataclass(frozen=True)
class Bar:
    """What is measured, by which functions (module and name), and what limits it where it is missed."""

    about: str
    parts: tuple[str, ...]
    limit: str = ""


_FAULTS = (
    "It hangs on the state of memory: `cp` pays for its cache where freed pages must be faulted in on the "
    "host again, and fastshard does not."
)
BARS = {
    "P0": Bar(
        "merge on many cores, against copies at once",
        ("many_cores.measure_p0",),
        "The kernel finds the pages of one file under one lock: 2.2 GB/s by 16 threads.",
    ),
    "P1": Bar(
        "durable row merge, against cp and fsync",
        ("compare.measure_p1", "many_cores.measure_durable"),
        f"{_FAULTS} A small result pays for its syncs and for the start.",
    ),
    "P2": Bar(
        "row merge, against cp",
        ("compare.measure_p2",),
        f"{_FAULTS} Copies of the page cache are 23 % of its CPU time, BLAKE3 24 %.",
    ),
    "P3": Bar(
        "row merge, against DCP's consolidation",
        ("compare.measure_p3",),
        "The kernel's copies out of and into the page cache are the floor.",
    ),
    "P4": Bar(
        "column merge, against DCP's consolidation and our row merge",
        ("compare.measure_p4",),
        "Short runs are read by way of a buffer of their span and scattered from there.",
    ),
    "P5": Bar("row merge, against load, concatenate and save", ("compare.measure_p5",), "The same copies."),
    "P6": Bar(
        "peak memory within a budget of 256 MiB",
        ("compare.measure_p6",),
        "Not analysed: what is in memory beside the blocks under way.",
    ),
    "P7": Bar(
        "verify, against b3sum and sha256sum",
        ("compare.measure_p7",),
        "BLAKE3 and the copy out of the page cache: 0.33 s of CPU per GB of 0.36.",
    ),
    "P8": Bar("hashes of merged tensors from manifests of shards", ()),
    "P9": Bar(
        "start, above bare Python",
        ("start.measure_p9",),
        "Imports: Python's own modules take 15 ms, those of fastshard 30.",
    ),
    "P10": Bar(
        "transpose of bf16 on one thread, against torch and numpy",
        ("compare.measure_p10",),
        "Tiles and stores that pass by the cache: 4.8 GB/s.",
    ),
    "P11": Bar(
        "f32 to bf16, against torch and a plain merge",
        ("compare.measure_p11",),
        "Integers of AVX2 make 6.5 GB/s, torch 8.4.",
    ),
    "P12": Bar(
        "ZeRO to safetensors, against zero_to_fp32",
        ("zero.measure_p12",),
        "zero_to_fp32 reads by mmap, copies once and writes: it wastes one copy of the model. Parameters are "
        "read too, and compared.",
    ),
    "P13": Bar(
        "models of 175 billion parameters and more on sparse files",
        ("scale.measure_p13",),
        "Names: 65 to 110 us and 5 KB each, when they were last counted.",
    ),
    "P14": Bar(
        "two processes of one thread, against one",
        ("parts.measure_p14",),
        "Each process starts, opens and plans by itself.",
    ),
    "P15": Bar("merge by reflinks", ()),
    "P16": Bar(
        "Paxml to MaxText, against tensorstore and numpy",
        ("orbax.measure_p16",),
        "TensorStore decodes and encodes, on both sides.",
    ),
    "P17": Bar(
        "DCP and rank files of FSDP, against torch's and verl's tools",
        ("dcp.measure_p17", "fsdp.measure_p17"),
        "The copies of the page cache, and a CRC32 of every record.",
    ),
    "P18": Bar(
        "very many names",
        ("start.measure_p18",),
        "8 us and 1.0 KB for a name of one number, 1.8 KB for each with layers and experts, when they were "
        "last counted: the records of catalog and plan, which share the names.",
    ),
    "P19": Bar(
        "object store to object store, against a download, a conversion and an upload",
        ("stores.measure_p19",),
        "The server shares the cores; reads of heads are strided.",
    ),
    "P20": Bar(
        "fp8 blocks to bf16, against compressed-tensors",
        ("dequantised.measure_p20",),
        "The kernel finds pages for the result: 60 % of the time.",
    ),
    "P21": Bar(
        "loss of a checkpoint from its shards, against accelerate's disk offload of a converted copy",
        ("evaluation.measure_p21",),
        "Reading the shards: the peer's copy is mapped, and its weights are never copied.",
    ),
}
PACKAGES = (
    "fastshard",
    "torch",
    "safetensors",
    "deepspeed",
    "compressed-tensors",
    "verl",
    "tensorstore",
    "transformers",
    "numpy",
)


def describe(result: Result, cores: int) -> dict[str, Any]:
    """A case as JSON: its figures, what its targets make of them, and the load before its runs."""
    figures, loads = result.figures(), result.loads()
    targets = [asdict(t) | {"verdict": t.judge(figures, result.nbytes, cores)} for t in result.targets]
    return {
        "case": result.case,
        "ours": result.ours,
        "peer": result.peer,
        "state": result.state,
        "bytes": result.nbytes,
        "figures": {name: float(f"{value:.5g}") for name, value in figures.items()},
        "targets": [] if result.reason else targets,
        "loads": loads,
        "loaded": any(load > IDLE for load in loads),
        "reason": f"not run: {result.reason}" if result.reason else "",
    }


def run_bar(name: str, bar: Bar, place: Place) -> dict[str, Any]:
    """Runs the cases of a bar; a failure ends the bar and is recorded."""
    cores, begun = len(os.sched_getaffinity(0)), time.monotonic()
    cases: list[dict[str, Any]] = []
    reason, failed = "" if bar.parts else "not built", False
    for part in bar.parts:
        module, _, function = part.partition(".")
        try:
            for result in getattr(importlib.import_module(module), function)(place):
                cases.append(describe(result, cores))
        except ModuleNotFoundError as error:
            reason = f"not run: needs {error.name}"
        except Exception as error:
            traceback.print_exc()
            reason, failed = f"failed: {type(error).__name__}: {str(error)[:300]}", True
    return {
        "bar": name,
        "about": bar.about,
        "limit": bar.limit,
        "reason": reason,
        "failed": failed,
        "seconds": round(time.monotonic() - begun, 1),
        "cases": cases,
    }


def run_section(rows: Iterator[dict[str, Any]], program: str) -> dict[str, Any]:
    """Figures beside the bars that a program of the system takes; or why they were not taken."""
    found: list[dict[str, Any]] = []
    if reason := find_lack(program=program):
        return {"reason": f"not run: {reason}", "rows": found}
    try:
        found.extend(rows)
    except (OSError, subprocess.CalledProcessError) as error:
        return {"reason": f"not run: {program}: {str(error)[:300]}", "rows": found}
    return {"reason": "", "rows": found}


def run_calls(place: Place) -> dict[str, Any]:
    """System calls of results of the size, and of a quarter of it."""
    from calls import measure_calls

    sizes = (place.size // 4, place.size) if place.full else (place.size,)
    rows = (row for size in sizes for row in measure_calls(place.disk, size))
    return run_section(rows, "strace")


def run_locks(place: Place) -> dict[str, Any]:
    """Waits for the kernel's locks: of one file and of many, in memory and on the disk."""
    from locks import measure_locks

    files, threads = ((1, 8), (2, 8)) if place.full else ((1,), (2,))
    size = max(place.size // 2, 1 << 20)
    rows = (
        row for folder in (place.memory, place.disk) for row in measure_locks(folder, size, files, threads)
    )
    return run_section(rows, "perf")


#: Figures beside the bars.
SECTIONS = {"CALLS": run_calls, "LOCKS": run_locks}


def find_revision() -> str:
    """The revision of the package that is measured, or of this file where it is installed; a plus stands for
    changes."""

    def run_git(folder: Path, *arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True
        ).stdout.strip()

    for folder in (Path(fastshard.__file__).parent, Path(__file__).parent):
        if revision := run_git(folder, "rev-parse", "--short=8", "HEAD"):
            return revision + ("+" if run_git(folder, "status", "--porcelain", "-uno") else "")
    return ""


def find_profile() -> str:
    """How the core was built, as far as it can be told."""
    if _core.STEPS:
        return "tests (assertions, less optimised)"
    checked = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", "import fastshard._core"], capture_output=True
    )
    return "debug" if checked.returncode else "optimised"


def find_versions() -> dict[str, str]:
    """The versions of both sides."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for program in ("cp", "b3sum", "sha256sum"):
        if not find_lack(program=program):
            shown = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
            found[program] = shown.split("\n")[0].split()[-1]
    return found


def time_touch(nbytes: int) -> list[float]:
    """Seconds per GiB of touching fresh memory twice: the second is no faster where the host takes freed
    pages back."""
    seconds = []
    for _ in range(2):
        begun = time.monotonic()
        touch(nbytes)
        seconds.append(round((time.monotonic() - begun) / nbytes * (1 << 30), 3))
    return seconds


def run_bars(place: Place, names: list[str]) -> dict[str, Any]:
    """Everything measured, as JSON."""
    load = find_load(1)
    document: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "revision": find_revision(),
        "core": find_profile(),
        "versions": find_versions(),
        "machine": machine(place.disk),
        "memory_file_system": machine(place.memory)["filesystem"],
        "size": place.size,
        "rounds": place.rounds,
        "load": load,
        "touch_seconds_per_gib": time_touch(max(64 * MIB, min(place.size, 1 << 30))),
        "bars": [],
    }
    for name in names:
        if name in BARS:
            print(f"{name}: {BARS[name].about}", file=sys.stderr)
            document["bars"].append(run_bar(name, BARS[name], place))
    for section in names:
        if section in SECTIONS:
            print(section, file=sys.stderr)
            document[section.lower()] = SECTIONS[section](place)
    return document


def keep_others(document: dict[str, Any], before: dict[str, Any]) -> None:
    """Adds what was measured before and is not measured anew.

    Raises:
        ValueError: if it was measured otherwise.
    """
    for name in ("machine", "core", "size", "rounds"):
        if document[name] != before[name]:
            raise ValueError(f"{name} was {before[name]}, and is {document[name]}")
    bars = {bar["bar"]: bar for bar in (*before["bars"], *document["bars"])}
    document["bars"] = [bars[name] for name in BARS if name in bars]
    for section in map(str.lower, SECTIONS):
        if section in before:
            document.setdefault(section, before[section])


def add_left_out(document: dict[str, Any]) -> None:
    """Adds bars that were not asked for, so that the page names them."""
    measured = {bar["bar"]: bar for bar in document["bars"]}
    left_out = {"failed": False, "seconds": 0.0, "cases": []}
    document["bars"] = [
        measured.get(name)
        or {"bar": name, "about": bar.about, "limit": bar.limit, **left_out}
        | {"reason": "not run: left out" if bar.parts else "not built"}
        for name, bar in BARS.items()
    ]


def is_loaded(document: dict[str, Any]) -> bool:
    """True if other processes ran beside any of the cases."""
    cases = [case for bar in document["bars"] for case in bar["cases"]]
    return document["load"] > IDLE or any(case["loaded"] for case in cases)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--keep", action="store_true", help="keep what --out has of other bars")
    parser.add_argument("--size", default="2GiB", help="bytes of tensors of most cases (default: 2GiB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="4 MiB and one round")
    parser.add_argument(
        "--only", default=",".join([*BARS, *SECTIONS]), help="bars, calls and locks, separated by commas"
    )
    parser.add_argument("--dir", type=workplace, default=Path.cwd(), help="a folder on the disk to measure")
    parser.add_argument("--memory", type=workplace, default=Path("/dev/shm"), help="a folder in memory")
    options = parser.parse_args(arguments)
    names = [name.strip().upper() for name in options.only.split(",")]
    if unknown := [name for name in names if name not in {*BARS, *SECTIONS}]:
        parser.error(f"no bar is called {', '.join(unknown)}")
    size, rounds = (4 * MIB, 1) if options.quick else (parse_size(options.size), options.rounds)
    with (
        tempfile.TemporaryDirectory(prefix="fastshard-bench-", dir=options.dir) as disk,
        tempfile.TemporaryDirectory(prefix="fastshard-bench-", dir=options.memory) as memory,
    ):
        document = run_bars(Place(Path(disk), Path(memory), size, rounds), names)
    if options.keep:
        keep_others(document, json.loads(options.out.read_text()))
    add_left_out(document)
    document["loaded"] = is_loaded(document)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(build_page(document))
    failed = [bar["bar"] for bar in document["bars"] if bar["failed"]]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
