"""Cuts the power at an instant of a run: of what was written and not synced, a part is there that chance
chooses.

    python tests/trials/torn.py --count 1000 --seed 0 --program PATH

A run is recorded, call by call with its contents, and the folder is made anew as the disk would have it when
the power went after some call (:mod:`writes`). OUT must be the older result or the new one, bit for bit, and
the new one if the run had ended well; it must stand ``verify`` and ``clean``; ``--resume`` must come to the
new one, and what is there then must be replaced without a word by a run with ``--overwrite``. The rest of the
invariants is in ``judge.py``.

===========
=====================================================================================================
t-half       OUT is neither what it was nor the new result
t-durable    the run had ended with exit code 0, and the new result is not at OUT
t-verify     ``verify`` refuses a complete result
t-clean      ``clean`` fails, or changes OUT
t-resume     ``--resume`` does not come to the new result
t-replace    a result is refused as an older one that may be replaced
===========
=====================================================================================================
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intercept import unavailable
from judge import Before, Trial, judge, shown
from run_cases import CASES, Case, Cases, add_cases
from runner import Ended, Zygote
from scenarios import staging
from series import Report, Trials, chance, drive, fresh, options
from trees import State
from writes import Cut, Record, Write

#: Power cuts of a trial, of which the last is gone on from.
_LOOKS = 8
#: Events from a rename on that lie around it.
_AROUND = 12
#: Cases; without syncs nothing is promised.
_NAMES = [name for name, case in CASES.items() if "none" not in case.shared]


@dataclass
class Recorded:
    """A case with the record of its run."""

    case: Case
    record: Record
    #: What was at OUT before.
    before: State


class Torn:
    """The trials of one worker."""

    def __init__(self, zygote: Zygote, folder: Path, arguments: Any) -> None:
        self._zygote, self._arguments = zygote, arguments
        self._prepared = Cases(zygote, folder, arguments)
        self._recorded = [self._record(case) for case in self._prepared.cases.values()]

    def _record(self, case: Case) -> Recorded:
        trial = self._prepared.set_up(case)
        before = trial.look()
        record = Record(trial.area)
        ended = self._prepared.start(case, trial, (), watch=[trial.area], hook=record).finish(self._zygote)
        if ended.code or trial.look().kind != "new":
            raise SystemExit(f"{case.name}: a run that nobody disturbs failed: {ended.said}")
        record.check()
        if self._arguments.without:
            print(f"{case.name}: {record.forget(self._arguments.without)} syncs are left out")
        return Recorded(case, record, before)

    def __call__(self, index: int, report: Report) -> None:
        """One power cut."""
        rng = chance(self._arguments, index)
        recorded = self._recorded[index // self._arguments.jobs % len(self._recorded)]
        case, record = recorded.case, recorded.record
        counts: Counter[str] = Counter()
        for _ in range(_LOOKS):
            cut = choose_cut(record, rng)
            known = self._prepared.library.known(case.scenario)
            trial = Trial(fresh(record.area), known, "--overwrite" in case.shared, case.mount)
            cut.make()
            state = trial.look()
            counts[state.kind] += 1
            self._look(trial, recorded, cut.instant, state)
            if trial.found:
                break
        else:
            self._go_on(trial, case, state, rng, counts)
        last = record.calls[cut.instant - 1] if cut.instant else "nothing"
        story = f"{case.name}: event {cut.instant} of {len(record.events)}, after {last}"
        report.add(f"--only {index}", case.name, f"[{story}]", trial.found, **counts)

    def _look(self, trial: Trial, recorded: Recorded, instant: int, state: State) -> None:
        """What is at OUT when the machine starts again."""
        before = recorded.before
        allowed = {before.kind, "new", *(("partial",) if trial.inside else ())}
        if state.kind not in allowed or (state.kind == before.kind == "old" and state.raw != before.raw):
            trial.violated("t-half", f"OUT was {before.kind} and is {state.kind}: {state.detail}")
        elif instant == len(recorded.record.events) and state.kind != "new":
            trial.violated("t-durable", f"OUT is {state.kind}")

    def _go_on(
        self, trial: Trial, case: Case, state: State, rng: random.Random, counts: Counter[str]
    ) -> None:
        """What a user does then."""
        if state.kind in ("old", "new") and rng.random() < 0.3:
            counts["verified"] += 1
            self._expect(trial, "t-verify", self._run(trial, "verify", trial.out))
        if rng.random() < 0.3:
            counts["cleaned"] += 1
            self._expect(trial, "t-clean", self._run(trial, "clean", trial.out))
            if (now := trial.look()).raw != state.raw and not trial.inside:
                trial.violated("t-clean", f"OUT was {state.kind} and is {now.kind}: {now.detail}")
        if case.script:
            return
        # Without --overwrite a complete result is refused, if nothing of its run is left.
        if state.kind != "new" or trial.overwrite or staging(trial.area):
            before = Before(state, 0, True, staging(trial.area))
            command = case.scenario.command(trial.out, *case.shared, "--threads", "2", "--resume")
            ended = self._run(trial, *command)
            after = judge(trial, ended, before)
            counts["resumed"] += 1
            if ended.code or after.kind != "new":
                trial.violated("t-resume", f"exit {ended.code}, OUT is {after.kind}: {shown(ended)}")
        if rng.random() < 0.5 and not trial.inside:
            shared = (*case.shared, *(() if trial.overwrite else ("--overwrite",)))
            ended = self._run(trial, *case.scenario.command(trial.out, *shared, "--threads", "2"))
            self._expect(trial, "t-replace", ended)
            counts["replaced"] += 1

    def _run(self, trial: Trial, *argv: object) -> Ended:
        ended = self._zygote.run(*argv, mount=trial.out if trial.inside else None)
        if self._arguments.only is not None:
            state = trial.look()
            print(
                f"--- {' '.join(map(str, argv))}\n    exit {ended.code}, OUT "
                f"{state.kind}\n{ended.said.strip()}"
            )
        return ended

    def _expect(self, trial: Trial, kind: str, ended: Ended) -> None:
        if ended.code:
            trial.violated(kind, f"exit {ended.code}: {shown(ended)}")


def choose_cut(record: Record, rng: random.Random) -> Cut:
    """A power cut: its instant, and how much is there of what was not synced."""
    instant, ordered = _instant(record, rng), rng.random() < 0.5
    return Cut(
        record, instant, rng, True, ordered, names=rng.choice((0, 0.5, 1)), blocks=rng.choice((0, 0, 0.5, 1))
    )


def _instant(record: Record, rng: random.Random) -> int:
    """How many events are done: often all, or as many as lie around a rename or another one that is no
    write."""
    events = record.events
    # A run that only cleans up renames nothing.
    renames = [i for i, call in enumerate(record.calls) if call.startswith("rename")]
    chosen = rng.random()
    if chosen < 0.2:
        return len(events)
    if chosen < 0.5 and renames:
        return min(rng.choice(renames) + rng.randrange(_AROUND), len(events))
    if chosen < 0.8:
        rare = [i for i, event in enumerate(events) if not isinstance(event, Write)]
        return rng.choice(rare) + rng.randrange(2)
    return rng.randint(0, len(events))


def main() -> int:
    """The command line."""
    parser = options(__doc__ or "", 1000)
    add_cases(parser, _NAMES)
    parser.add_argument(
        "--without",
        type=re.compile,
        metavar="REGEX",
        help="leave out syncs whose call, as a trial shows it, matches: are they needed, and does a trial "
        "see it?",
    )
    arguments = parser.parse_args()
    if missing := unavailable():
        print(f"nothing can be tried: {missing}", file=sys.stderr)
        return 2

    def prepare(zygote: Zygote, folder: Path) -> Trials:
        return Torn(zygote, folder, arguments)

    return drive(arguments, arguments.count, prepare)


if __name__ == "__main__":
    sys.exit(main())
