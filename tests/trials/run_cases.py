"""Commands with the state that they find: what faults happen to, and what a power cut comes upon."""

from __future__ import annotations

import argparse
import copy
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trees
from intercept import Call
from judge import Trial
from runner import Run, Zygote
from scenarios import Library, Scenario, staging
from series import fixtures_of, fresh

_WRITER = Path(__file__).with_name("writer_run.py")
_PARTS = Path(__file__).with_name("parts_run.py")
#: Scripts by the name of what they do, each with its arguments; ``@hf`` is a source.
_SCRIPTS = {"writer": (_WRITER, ("OUT",)), "parts": (_PARTS, ("@hf", "OUT"))}


@dataclass
class Case:
    """A command with the state that it finds."""

    name: str
    #: Of the commands of ``scenarios.py``, or the script.
    command: str
    #: OUT before: ``absent``, ``empty`` or ``old``.
    there: str = "absent"
    #: A run is killed before: half way (``begun``), or just after its result appeared (``sealed``).
    interrupted: str = ""
    #: OUT is a mount point.
    mount: bool = False
    #: The script to run instead of the program.
    script: Path | None = None
    shared: tuple[str, ...] = ()
    scenario: Scenario = field(init=False)
    calls: list[Call] = field(default_factory=list)
    #: Of the calls, those that close a directory.
    ending: set[Call] = field(default_factory=set)


_REPLACING = ("--overwrite",)
CASES = {
    case.name: case
    for case in (
        Case("fresh", "merge-hf"),
        Case("overwrite", "merge-hf", "old", shared=_REPLACING),
        Case("resume", "merge-hf", "old", "begun", shared=_REPLACING),
        Case("sealed", "merge-hf", "old", "sealed", shared=_REPLACING),
        Case("no-fsync", "merge-hf", "empty", shared=("--fsync", "none")),
        Case("inside", "merge-hf", "empty", mount=True),
        Case("gather", "tp"),
        Case("dcp", "dcp"),
        Case("repair", "repair", "old", shared=_REPLACING),
        Case("orbax", "orbax", "old", shared=_REPLACING),
        Case("writer", "writer", "old", script=_WRITER, shared=_REPLACING),
        Case("parts", "parts", "old", script=_PARTS, shared=_REPLACING),
    )
}


class Cases:
    """The cases of one worker."""

    def __init__(self, zygote: Zygote, folder: Path, arguments: Any) -> None:
        self._zygote = zygote
        self._area = folder / "t"
        self.library = Library(folder, zygote, fixtures_of(arguments))
        self.cases = {case.name: case for case in self._choose(arguments.cases)}

    def _choose(self, names: list[str]) -> list[Case]:
        """The cases of these names that can be had here."""
        # Each worker fills in copies of its own.
        wanted = {name: copy.deepcopy(CASES[name]) for name in names}
        found = self.library.chosen(*{case.command for case in wanted.values()})
        scenarios = {s.name: self.library.measure(s, calls=True) for s in found}
        scenarios |= {name: self._scripted(name) for name in _SCRIPTS if name in wanted}
        chosen = []
        for name, case in wanted.items():
            if case.command not in scenarios:
                print(f"no case {name}: it needs TensorStore", file=sys.stderr)
                continue
            case.scenario = scenarios[case.command]
            # Without the right to mount, the run fails before it has begun.
            if case.mount and self.start(case, self.set_up(case), ()).finish(self._zygote).code:
                print(f"no case {name}: mounting is not allowed here", file=sys.stderr)
                continue
            chosen.append(case)
        return chosen

    def _scripted(self, name: str) -> Scenario:
        script, words = _SCRIPTS[name]
        source = str(self.library.sources / "hf")
        scenario = Scenario(name, tuple(source if word == "@hf" else word for word in words))
        out = fresh(self._area) / "out"
        ended = self._zygote.run(*scenario.command(out), script=script)
        if ended.code:
            raise SystemExit(f"the script failed: {ended.said}")
        scenario.new = trees.meaning(out, trees.raw(out) or {})
        return scenario

    def set_up(self, case: Case) -> Trial:
        """The destination, and the interrupted run, of a case."""
        trial = Trial(
            fresh(self._area), self.library.known(case.scenario), "--overwrite" in case.shared, case.mount
        )
        if case.there == "old":
            shutil.copytree(self.library.old, trial.out, symlinks=True)
        elif case.there == "empty":
            # Not the mode that a new directory gets, so that it has to be kept.
            trial.out.mkdir()
            trial.out.chmod(0o750)
        if case.interrupted:
            self._interrupt(case, trial)
        return trial

    def _interrupt(self, case: Case, trial: Trial) -> None:
        """Kills a run before a call: when it has done part of its work, or the first after its result
        appeared."""
        left = [call for call in case.scenario.calls if ".fastshard-" in call.path]
        enough = left[len(left) * 6 // 10].index if left else 0
        was = trial.out.stat().st_ino if trial.out.exists() else None

        def hook(run: Run, call: Call) -> None:
            appeared = trial.out.exists() and trial.out.stat().st_ino != was
            if appeared if case.interrupted == "sealed" else call.index >= enough:
                run.send(signal.SIGKILL)

        command = case.scenario.command(trial.out, *case.shared, "--threads", "1")
        ended = self._zygote.run(*command, watch=[self.library.sources, trial.area], hook=hook)
        if ended.code != -signal.SIGKILL or not staging(trial.area):
            raise SystemExit(f"{case.name}: the run was not interrupted: {ended}")

    def start(self, case: Case, trial: Trial, extra: tuple[str, ...], **more: Any) -> Run:
        own = () if case.script else ("--threads", "1", *extra, *(("--resume",) if case.interrupted else ()))
        command = case.scenario.command(trial.out, *case.shared, *own)
        return self._zygote.start(
            *command, script=case.script, mount=trial.out if case.mount else None, **more
        )


def add_cases(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Adds the option by which some of the cases are chosen."""
    names = list(names)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=names,
        default=names,
        metavar="CASE",
        help=f"of {', '.join(names)} (default: all)",
    )
