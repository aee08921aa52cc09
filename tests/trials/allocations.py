"""Lets one allocation of a run fail: the n-th of at least some size.

    python tests/trials/allocations.py --count 200 --seed 0 --program PATH

The process may abort, or say that it lacks memory, or do without. OUT is what it was or the new result, and
``--resume`` comes to the new one. The invariants are in ``judge.py``. This needs a build with steps: its
allocator counts what the core allocates, over all threads (``FASTSHARD_FAIL_ALLOCATION=N:SIZE``).

===========
=====================================================================================================
m-code       neither death by SIGABRT, nor success, nor one of the errors that a lack of memory can come to
m-abort      death by SIGABRT where an allocation of 64 KiB or more fails: that is `FS512`
m-resume     ``--resume`` does not come to the new result
m-verify     ``verify`` refuses a good checkpoint once it has memory
===========
=====================================================================================================
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from fastshard import _core
from judge import Before, Trial, judge, shown
from run_cases import CASES, Case, Cases, add_cases
from runner import Ended, Zygote
from scenarios import staging
from series import Report, Trials, chance, drive, options

#: Smallest sizes that count, in bytes, each with about as many allocations as the cases make of it.
_SIZES = {1: 100_000, 256: 5_000, 4096: 500, 65536: 60}
#: Bytes from which on no allocation that fails may abort the process.
_LARGE = 65536
#: What a lack of memory may be called: too low a limit, an internal error.
_CODES = ("FS512", "FS520")
#: Cases that run the program, one of each kind.
_NAMES = [n for n in ("fresh", "overwrite", "resume", "gather", "dcp", "repair") if n in CASES]


class Allocations:
    """The trials of one worker."""

    def __init__(self, zygote: Zygote, folder: Path, arguments: Any) -> None:
        self._zygote, self._arguments = zygote, arguments
        self._prepared = Cases(zygote, folder, arguments)

    def __call__(self, index: int, report: Report) -> None:
        """One allocation that fails."""
        rng = chance(self._arguments, index)
        cases = list(self._prepared.cases.values())
        case = cases[index // self._arguments.jobs % len(cases)]
        size = rng.choice([size for size in _SIZES if size >= self._arguments.least])
        # As many among the first as among the last: where little is allocated, too.
        place = int(_SIZES[size] ** rng.random())
        trial = self._prepared.set_up(case)
        counts: Counter[str] = Counter()
        if trial.look().kind == "old" and rng.random() < 0.2:
            self._verify(trial, place, size, counts)
        else:
            self._write(trial, case, place, size, counts)
        report.add(
            f"--only {index}", case.name, f"[{case.name}: allocation {place}:{size}]", trial.found, **counts
        )

    def _write(self, trial: Trial, case: Case, place: int, size: int, counts: Counter[str]) -> None:
        before = Before(trial.look(), 0, bool(case.interrupted), staging(trial.area), disturbed=True)
        own = ("--threads", "2", *(("--resume",) if case.interrupted else ()))
        command = case.scenario.command(trial.out, *case.shared, *own)
        ended = self._fail(trial, place, size, *command)
        # The process ends itself, as if it had got that signal.
        before.sent, before.begun = signal.SIGABRT, True
        after = judge(trial, ended, before)
        self._code(trial, ended, size, counts)
        if ended.code == 0:
            return
        before = Before(trial.look(), 0, True, staging(trial.area))
        if after.kind == "new" and not trial.overwrite and not before.left:
            return
        command = case.scenario.command(trial.out, *case.shared, "--threads", "2", "--resume")
        ended = self._zygote.run(*command)
        self._show(ended)
        after = judge(trial, ended, before)
        counts["resumed"] += 1
        if ended.code or after.kind != "new":
            trial.violated("m-resume", f"exit {ended.code}, OUT is {after.kind}: {shown(ended)}")

    def _verify(self, trial: Trial, place: int, size: int, counts: Counter[str]) -> None:
        counts["verified"] += 1
        self._code(trial, self._fail(trial, place, size, "verify", trial.out), size, counts)
        ended = self._zygote.run("verify", trial.out)
        if ended.code:
            trial.violated("m-verify", f"exit {ended.code}: {shown(ended)}")

    def _fail(self, trial: Trial, place: int, size: int, *command: object) -> Ended:
        environment = {"FASTSHARD_FAIL_ALLOCATION": f"{place}:{size}"}
        run, reap = self._zygote.execute(*command, environment=environment)
        ended = run.finish(reap)
        self._show(ended)
        return ended

    def _code(self, trial: Trial, ended: Ended, size: int, counts: Counter[str]) -> None:
        counts["aborted" if ended.code == -signal.SIGABRT else f"exit {ended.code}"] += 1
        if ended.code == -signal.SIGABRT and size >= _LARGE:
            trial.violated("m-abort", f"an allocation of {size} bytes or more aborts: {shown(ended)}")
        is_named = ended.code == 2 and any(code in ended.said for code in _CODES)
        if ended.code not in (0, -signal.SIGABRT) and not is_named:
            trial.violated("m-code", f"exit {ended.code}: {shown(ended)}")

    def _show(self, ended: Ended) -> None:
        if self._arguments.only is not None:
            print(f"--- {' '.join(ended.argv)}\n    exit {ended.code}\n{ended.said.strip()}")


def main() -> int:
    """The command line."""
    parser = options(__doc__ or "", 200)
    add_cases(parser, _NAMES)
    parser.add_argument(
        "--least",
        type=int,
        choices=list(_SIZES),
        default=1,
        metavar="BYTES",
        help="only allocations of so many bytes or more fail, of 1, 256, 4096 and 65536 (default: 1)",
    )
    arguments = parser.parse_args()
    if not _core.STEPS:
        print("nothing can be tried: this build has no steps", file=sys.stderr)
        return 2

    def prepare(zygote: Zygote, folder: Path) -> Trials:
        return Allocations(zygote, folder, arguments)

    return drive(arguments, arguments.count, prepare)


if __name__ == "__main__":
    sys.exit(main())
