"""Seconds from SIGINT and SIGTERM to the end of a run, for every verb and at instants all over it.

    python tests/trials/stops.py            # three inputs, 12 instants of each signal: hours
    python tests/trials/stops.py --count 3 --scale 0.1 --only "100000 names"
    python tests/trials/stops.py --verbs merge --show    # where Python is in a run that does not end

Instants are parts of the time that the run takes undisturbed, counted from where its handlers are installed;
before that a signal is the interpreter's. A run must end with 130 or 143, or as if undisturbed if nothing is
left to stop; it must print no traceback and leave nothing but a staging directory. Prints the median and the
largest seconds for each verb and input; the exit code is 1 if a run violates this or takes longer than
--limit. On a busy machine look at the seconds of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import memory
import numpy as np
from memory import write_names
from safetensors.numpy import save_file
from verb_runs import Input, find_run_id, list_verbs, make_arguments

#: Runs that must be over before a verb has something to do.
BEFORE = {
    "attest": ["merge"],
    "make-part": ["split"],
    "commit": ["split", "make-part", "make-part 1"],
}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def write_ranks(folder: Path) -> Input:
    """2 GiB in eight ranks, divided along the columns."""
    folder.mkdir()
    (folder / "layout.json").write_text(json.dumps({"tp": 8, "tp_dim": {f"w{i}": 1 for i in range(16)}}))
    numbers = np.random.default_rng(1)
    for rank in range(8):
        shards = {
            f"w{i}": numbers.standard_normal((memory.scaled(4096), 1024), np.float32) for i in range(16)
        }
        save_file(shards, folder / f"tp_rank_{rank:02d}.safetensors")
    return Input(folder, "w0")


def write_equal_ranks(folder: Path) -> Input:
    """Sixteen ranks of 64 MiB with one content: replicas, all of which are compared."""
    folder.mkdir()
    (folder / "layout.json").write_text(json.dumps({"tp": 16, "tp_dim": {f"w{i}": None for i in range(16)}}))
    numbers = np.random.default_rng(2)
    values = {f"w{i}": numbers.standard_normal((memory.scaled(1024), 1024), np.float32) for i in range(16)}
    for rank in range(16):
        save_file(values, folder / f"tp_rank_{rank:02d}.safetensors")
    return Input(folder, "w0")


INPUTS: dict[str, Callable[[Path], Input]] = {
    "8 ranks": write_ranks,
    "16 equal ranks": write_equal_ranks,
    "100000 names": lambda folder: write_names(folder, 1, 100_000),
}


@dataclass
class Trial:
    """What came of one run."""

    code: int
    #: From where its handlers are installed.
    duration: float
    #: From the signal; 0 if there was none.
    delay: float
    #: Of the processor, from the signal.
    cpu: float
    output: str


def start(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A run whose handlers are installed."""
    with log.open("wb") as output:
        command = [sys.executable, "-X", "faulthandler", "-m", "fastshard", *argv]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    wanted = 1 << signal.SIGTERM - 1
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if int(status.partition("SigCgt:")[2].split(None, 1)[0], 16) & wanted:
            break
        time.sleep(0.002)
    return process


def count_cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(argv: list[str], log: Path, number: int = 0, after: float = 0, show: float = 0) -> Trial:
    """Runs a command; sends it a signal ``after`` some seconds. With ``show`` a run that takes longer than
    that to stop is aborted and prints where its threads are."""
    process = start(argv, log)
    begun = time.monotonic()
    stopped, used = begun, 0.0
    # The process stays to be asked what it used, which Popen's own waiting does not leave it to.
    ending = os.pidfd_open(process.pid) if process.returncode is None else None
    if ending is None:
        return Trial(process.returncode, 0.0, 0.0, 0.0, log.read_text(errors="replace"))

    def ends_within(seconds: float | None) -> bool:
        return bool(select.select([ending], [], [], seconds)[0])

    if number and not ends_within(after):
        stopped, used = time.monotonic(), count_cpu_seconds(process)
        os.kill(process.pid, number)
        if show and not ends_within(show):
            os.kill(process.pid, signal.SIGABRT)
    ends_within(None)
    ended = time.monotonic()
    delay, cpu = (0.0, 0.0) if stopped == begun else (ended - stopped, count_cpu_seconds(process) - used)
    os.close(ending)
    return Trial(process.wait(), ended - begun, delay, cpu, log.read_text(errors="replace"))


def prepare(verb: str, given: Input, out: Path, log: Path) -> str:
    """Empties ``out`` and runs what goes before a verb; returns the run that ``split`` began."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    run_id = ""
    for earlier, _, part in (words.partition(" ") for words in BEFORE.get(verb, [])):
        argv = make_arguments(earlier, given, out, run_id)
        trial = run([*argv[:1], part, *argv[2:]] if part else argv, log)
        if trial.code:
            raise SystemExit(f"{' '.join(argv)}: exit code {trial.code}\n{trial.output}")
        run_id = run_id or find_run_id(trial.output)
    return run_id


def list_visible(out: Path) -> set[str]:
    return {path.name for path in out.iterdir() if not path.name.startswith(".")}


def find_violations(
    trial: Trial, number: int, undisturbed: int, appeared: set[str], limit: float
) -> Iterator[str]:
    """What a stopped run did that it must not."""
    if trial.code not in (128 + number, undisturbed):
        yield f"exit code {trial.code}"
    if "Traceback" in trial.output or "panicked" in trial.output:
        yield "a traceback"
    if trial.code == 128 + number and appeared and "complete" not in trial.output:
        yield f"left {', '.join(sorted(appeared))}"
    if trial.delay > limit:
        yield f"{trial.delay:.2f} s"


def stop_verb(verb: str, given: Input, folder: Path, options: argparse.Namespace) -> tuple[list[Trial], int]:
    """The seconds of all stops of a verb, and how many runs violate something."""
    out, log = folder / "out", folder / "log"
    run_id = prepare(verb, given, out, log)
    whole = run(make_arguments(verb, given, out, run_id), log)
    stops, violations = [], 0
    for number in SIGNALS:
        for instant in range(options.count):
            after = whole.duration * (instant + 0.5) / options.count
            run_id = prepare(verb, given, out, log)
            before = list_visible(out)
            argv = make_arguments(verb, given, out, run_id)
            trial = run(argv, log, number, after, options.limit if options.show else 0)
            if trial.delay:
                stops.append(trial)
            appeared = list_visible(out) - before
            found = list(find_violations(trial, number, whole.code, appeared, options.limit))
            if found:
                violations += 1
                print(
                    f"VIOLATION {number.name} after {after:.2f} s of {whole.duration:.2f} s: "
                    f"{'; '.join(found)}:",
                    *argv,
                )
                print(
                    trial.output[-6000:] if options.show or trial.delay <= options.limit else "", flush=True
                )
    return stops, violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where inputs are made")
    parser.add_argument("--count", type=int, default=12, help="instants of each signal")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds that a stop may take")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all sizes")
    parser.add_argument("--only", help="inputs, by commas")
    parser.add_argument("--verbs", help="verbs, by commas")
    parser.add_argument("--show", action="store_true", help="abort what takes longer, and print its stacks")
    options = parser.parse_args()
    memory.SCALE = options.scale
    verbs = [verb for verb in list_verbs() if not options.verbs or verb in options.verbs.split(",")]
    total = 0
    print("input\tverb\tstops\tmedian s\tlargest s\tlargest of the processor", flush=True)
    for name in [name for name in INPUTS if not options.only or name in options.only.split(",")]:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="stops-") as folder:
            given = INPUTS[name](Path(folder, "in"))
            for verb in verbs:
                stops, violations = stop_verb(verb, given, Path(folder), options)
                delays, cpus = [t.delay for t in stops] or [0.0], [t.cpu for t in stops] or [0.0]
                figures = (statistics.median(delays), max(delays), max(cpus))
                print(name, verb, len(stops), *(f"{figure:.2f}" for figure in figures), sep="\t", flush=True)
                total += violations
    print(f"{total} violations")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
