"""Kills runs at random instants, changes OUT meanwhile, and resumes until they end.

    python tests/trials/kills.py --count 500 --seed 0 --program PATH

Each trial takes a command (merge of several sources, convert to every target, repair of masters), a
destination (absent, empty, an older result to be replaced), and sends SIGKILL, SIGINT or SIGTERM at an
instant: right after the start, any time, while it writes, around the publishing, or before a system call of
its work. A user may change OUT before and meanwhile. Then ``--resume`` runs, some of them killed too, until
one ends. The invariants are in ``judge.py``; they are checked after every run.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
from intercept import Call, unavailable
from judge import Before, Trial, judge
from runner import Ended, Run, Zygote
from scenarios import Library, Scenario, staging
from series import Report, Trials, chance, drive, fixtures_of, fresh, options

#: Runs of a trial that are disturbed, at most.
_ROUNDS = 3
_SIGNALS = (signal.SIGKILL,) * 3 + (signal.SIGINT, signal.SIGTERM)


class Kills:
    """The trials of one worker."""

    def __init__(self, zygote: Zygote, folder: Path, arguments: Any, by_calls: bool) -> None:
        self._zygote, self._arguments, self._by_calls = zygote, arguments, by_calls
        self._area = folder / "t"
        fixtures = fixtures_of(arguments)
        self._library = Library(folder, zygote, fixtures)
        self._scenarios = self._library.chosen(fixtures=arguments.fixtures_dir is not None)
        self._measured: set[str] = set()

    def __call__(self, index: int, report: Report) -> None:
        """One trial."""
        rng = chance(self._arguments, index)
        scenario = rng.choice(self._scenarios)
        if scenario.name not in self._measured:
            self._library.measure(scenario, calls=self._by_calls)
            self._measured.add(scenario.name)
        trial, story = self._set_up(rng, scenario)
        shared = ["--overwrite"] if trial.overwrite else []
        shared += ["--fsync", "none"] if rng.random() < 0.5 else []
        counts: Counter[str] = Counter()
        for number in range(_ROUNDS + 1):
            resume = number > 0 and not (number == 1 and rng.random() < 0.1)
            last = number == _ROUNDS or (number > 0 and rng.random() < 0.6)
            own = ["--threads", str(rng.choice((1, 2))), *(["--json"] if rng.random() < 0.3 else [])]
            own += ["--resume"] if resume else []
            before = Before(trial.look(), len(trial.foreign), resume, staging(trial.area))
            command = scenario.command(trial.out, *shared, *own)
            told = len(trial.foreign)
            if last:
                ended = self._zygote.run(*command)
            else:
                ended = self._disturbed(rng, scenario, trial, before, command, counts)
            after = judge(trial, ended, before)
            hit = signal.Signals(before.sent).name if before.sent else "not hit" if not last else "left alone"
            things = "".join(f" +{f}" for f in trial.foreign[told:])
            story.append(f"{hit}{things} -> {ended.code} {after.kind}")
            counts[f"exit {ended.code}" if last else "disturbed"] += 1
            if self._arguments.only is not None:
                print(
                    f"--- {' '.join(map(str, command))}\n    {story[-1]} {after.detail}\n{ended.said.strip()}"
                )
            if last or (ended.code == 0 and before.sent is None):
                break
        if self._library.fingerprint() != self._library.before:
            trial.violated("g-source", "a file of the sources has another size or time")
            self._library.before = self._library.fingerprint()
        report.add(
            f"--only {index}",
            scenario.name,
            f"[{scenario.name} {' '.join(shared)}; {'; '.join(story)}]",
            trial.found,
            **counts,
        )

    def _set_up(self, rng: random.Random, scenario: Scenario) -> tuple[Trial, list[str]]:
        """The destination as it is before the first run."""
        area = fresh(self._area)
        there = rng.choices(("old", "absent", "empty"), (65, 25, 10))[0]
        trial = Trial(area, self._library.known(scenario), overwrite=there == "old" and rng.random() < 0.95)
        story = [there]
        if there == "empty":
            trial.out.mkdir()
        elif there == "old":
            shutil.copytree(self._library.old, trial.out, symlinks=True)
            if rng.random() < 0.1:
                trial.foreign += foreign.leave(trial.out)
                story.append("+leavings")
            elif rng.random() < 0.15:
                foreign.disturb(trial.out, trial.foreign, rng.choice(foreign.KINDS), rng)
                story.append(f"+{trial.foreign[-1]}")
        return trial, story

    def _disturbed(
        self,
        rng: random.Random,
        scenario: Scenario,
        trial: Trial,
        before: Before,
        command: list[str],
        counts: Counter[str],
    ) -> Ended:
        """A run during which things happen."""
        number = rng.choice(_SIGNALS)
        changes = rng.choices((0, 1, 2), (60, 30, 10))[0]

        def change() -> None:
            foreign.disturb(trial.out, trial.foreign, rng.choice(foreign.KINDS), rng)
            counts["changes"] += 1

        def kill(run: Run) -> None:
            trial.send(run, number, before)
            counts[number.name] += before.sent is not None

        if self._by_calls and (rng.random() < 0.5 or self._arguments.at_calls):
            return self._at_calls(rng, scenario, trial, command, changes, change, kill)
        if rng.random() < 0.08:
            run, reap = self._zygote.execute(*command)
            self._wait(run, rng.uniform(0, scenario.seconds + 0.4))
            kill(run)
            return run.finish(reap)
        run = self._zygote.start(*command)
        for _ in range(changes):
            self._wait_for(rng, run, scenario, trial, rng.choice(("any", "writing", "writing")))
            if run.alive():
                change()
        self._wait_for(
            rng, run, scenario, trial, rng.choice(("start", "any", "writing", "writing", "published"))
        )
        kill(run)
        return run.finish(self._zygote)

    def _at_calls(
        self,
        rng: random.Random,
        scenario: Scenario,
        trial: Trial,
        command: list[str],
        changes: int,
        change: Callable[[], None],
        kill: Callable[[Run], None],
    ) -> Ended:
        """Changes and the signal each come just before a call of the run."""
        first = next((c.index for c in scenario.calls if ".fastshard-" in c.path), 0)
        last = len(scenario.calls) + 20
        at = sorted(rng.randrange(first if rng.random() < 0.8 else 0, last) for _ in range(changes + 1))

        def hook(run: Run, call: Call) -> None:
            while at and call.index >= at[0]:
                at.pop(0)
                if at:
                    change()
                else:
                    kill(run)

        return self._zygote.run(*command, watch=[self._library.sources, trial.area], hook=hook)

    def _wait_for(self, rng: random.Random, run: Run, scenario: Scenario, trial: Trial, what: str) -> None:
        """Waits for an instant of a run, or for its end."""
        if what in ("start", "any"):
            self._wait(run, rng.uniform(0, 0.01 if what == "start" else scenario.seconds))
            return
        was = _identity(trial.out)
        while run.alive() and not staging(trial.area):
            time.sleep(0.0001)
        if what == "published":
            while run.alive() and _identity(trial.out) == was:
                time.sleep(0.0001)
        self._wait(run, run.age() + rng.uniform(0, scenario.staged_for if what == "writing" else 0.002))

    def _wait(self, run: Run, until: float) -> None:
        while run.age() < until and run.alive():
            time.sleep(min(0.0002, max(0.0, until - run.age())))


def _identity(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def main() -> int:
    """The command line."""
    arguments = options(__doc__ or "", 500).parse_args()
    missing = unavailable()
    if missing and arguments.at_calls:
        print(f"nothing can be tried: {missing}", file=sys.stderr)
        return 2
    if missing:
        print(f"no instants at system calls: {missing}", file=sys.stderr)

    def prepare(zygote: Zygote, folder: Path) -> Trials:
        return Kills(zygote, folder, arguments, by_calls=missing is None)

    return drive(arguments, arguments.count, prepare)


if __name__ == "__main__":
    sys.exit(main())
