"""What the series share: options, workers that run trials side by side, and the report."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import sources
from judge import Violation
from runner import Zygote, default_program


def options(description: str, count: int) -> argparse.ArgumentParser:
    """Options that all series have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=count, metavar="N", help=f"trials (default: {count})")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="what chance starts from (default: 0)"
    )
    parser.add_argument(
        "--at-calls",
        action="store_true",
        help="instants at system calls alone: the same ones whatever the speed of the machine",
    )
    parser.add_argument(
        "--only", type=int, metavar="I", help="trial I of this count and seed alone, with what it printed"
    )
    parser.add_argument(
        "--program",
        type=Path,
        default=default_program(),
        metavar="PATH",
        help="the fastshard to try (default: $FASTSHARD, else the one beside this Python)",
    )
    parser.add_argument(
        "--fixtures-dir",
        type=Path,
        metavar="DIR",
        help="fixtures of this folder, all of them, instead of the project's own",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        action="append",
        metavar="DIR",
        help="where to work; several are used by turns (default: /dev/shm and the system's temporary folder)",
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="trials at a time (default: 2)")
    return parser


@contextmanager
def workplaces(given: list[Path] | None, jobs: int) -> Iterator[list[Path]]:
    """Empty folders for the workers, by turns in the places given, removed afterwards."""
    default = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    places = given or [p for p in default if p.is_dir()]
    with ExitStack() as stack:
        made = []
        for job in range(jobs):
            place = places[job % len(places)]
            place.mkdir(parents=True, exist_ok=True)
            made.append(
                Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix="trials-"))).resolve()
            )
        yield made


@dataclass
class Report:
    """Violations as they come, and the table at the end."""

    repeat: str
    #: Figures by row and column of the table.
    figures: dict[str, Counter[str]] = field(default_factory=dict)
    violations: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _started: float = field(default_factory=time.monotonic)

    def add(self, again: str, row: str, what: str, found: list[Violation], **counts: int) -> None:
        """Takes a trial's outcome, and prints a line for each violation; ``again`` are the options that
        repeat it."""
        with self._lock:
            figures = self.figures.setdefault(row, Counter())
            figures.update(trials=1, violations=len(found), **{k: int(n) for k, n in counts.items()})
            for violation in found:
                self.violations[violation.kind] += 1
                print(
                    f"{violation.kind}: {what}: {violation.detail}; repeat: {self.repeat} {again}",
                    flush=True,
                )

    def end(self) -> int:
        """Prints the tables; the exit code."""
        columns = [
            "trials",
            *sorted({k for f in self.figures.values() for k in f} - {"trials", "violations"}),
            "violations",
        ]
        rows = [(row, *(str(figures[c]) for c in columns)) for row, figures in sorted(self.figures.items())]
        total = Counter[str]()
        for figures in self.figures.values():
            total.update(figures)
        table = [("", *columns), *rows, ("all", *(str(total[c]) for c in columns))]
        widths = [max(len(row[i]) for row in table) for i in range(len(columns) + 1)]
        print()
        for row in table:
            print(
                "  ".join(
                    cell.ljust(w) if i == 0 else cell.rjust(w)
                    for i, (cell, w) in enumerate(zip(row, widths, strict=True))
                )
            )
        print()
        for kind, count in sorted(self.violations.items()):
            print(f"{count:6} {kind}")
        seconds = time.monotonic() - self._started
        print(f"{sum(self.violations.values())} violations in {total['trials']} trials, {seconds:.0f} s")
        return 1 if self.violations else 0


#: A trial: its number, and where it says what came of it.
Trials = Callable[[int, Report], None]


def drive(arguments: argparse.Namespace, count: int, prepare: Callable[[Zygote, Path], Trials]) -> int:
    """Runs trials 0 to ``count`` with several workers, each with a folder and a zygote of its own.

    Args:
        arguments: of :func:`options`.
        count: number of trials.
        prepare: makes what a worker needs in its folder, and returns its trials.
    """
    name = Path(sys.argv[0]).name
    words = [w for i, w in enumerate(sys.argv[1:]) if "--only" not in (w, sys.argv[i])]
    report = Report(f"python tests/trials/{name} {' '.join(words)}".rstrip())
    jobs, only = arguments.jobs, arguments.only
    failures: list[BaseException] = []

    def work(job: int, folder: Path) -> None:
        # A trial always has the same worker, and so the same filesystem.
        todo = iter([only] if only is not None else range(job, count, jobs))
        if only is not None and only % jobs != job:
            return
        zygote = Zygote(arguments.program, folder / "io")
        try:
            trial = prepare(zygote, folder)
            for index in todo:
                if failures:
                    return
                trial(index, report)
        except BaseException as error:
            failures.append(error)
        finally:
            zygote.close()

    with workplaces(arguments.folder, jobs) as folders:
        threads = [threading.Thread(target=work, args=task) for task in enumerate(folders)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt as stopped:
            # The trials that are under way end before their folders go.
            failures.append(stopped)
            for thread in threads:
                thread.join()
    if failures:
        raise failures[0]
    return report.end()


def chance(arguments: argparse.Namespace, index: int) -> random.Random:
    """What is chosen in a trial: the same for the same seed and number."""
    return random.Random(f"{arguments.seed}:{index}")


def fixtures_of(arguments: argparse.Namespace) -> Path:
    """Where fixtures are."""
    return Path(arguments.fixtures_dir or sources.FIXTURES).resolve()


def fresh(area: Path) -> Path:
    """Empties a trial's folder."""
    shutil.rmtree(area, ignore_errors=True)
    area.mkdir(parents=True)
    return area
