"""Lets single system calls of a run fail, signals it there, pauses it, or changes OUT there.

    python tests/trials/faults.py --count 1000 --seed 0 --program PATH

A run without faults tells which calls a command makes on its sources, its staging folder and OUT. Each point
is one of them (the k-th of its kind) and one thing that happens there: an error, once or from there on;
SIGKILL, SIGINT or SIGTERM; a pause; a change of OUT by the user. Points are taken by turns from every kind of
call and of event, so that rare calls are visited wholly and frequent ones evenly. What ended without success
is resumed without faults. The invariants are in ``judge.py``.
"""

from __future__ import annotations

import errno
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import foreign
from intercept import Call, Fail, unavailable
from judge import Before, Trial, judge, shown
from run_cases import CASES, Case, Cases, add_cases
from runner import Ended, Run, Zygote
from scenarios import staging
from series import Report, Trials, drive, options

_READING = ("EIO", "EACCES")
#: Errors that a call may give, by its name; a ``+`` means from there on.
ERRORS = {
    **dict.fromkeys(
        ("open", "openat", "openat2"), ("EIO", "EACCES", "ENOSPC", "EDQUOT", "EINTR", "EMFILE", "EIO+")
    ),
    **dict.fromkeys(("read", "readv", "pread64", "preadv"), ("EIO", "EINTR", "EIO+")),
    **dict.fromkeys(
        ("write", "writev", "pwrite64", "pwritev"), ("EIO", "ENOSPC", "EDQUOT", "EINTR", "ENOSPC+")
    ),
    **dict.fromkeys(
        ("fsync", "fdatasync", "syncfs", "msync"), ("EIO", "ENOSPC", "EDQUOT", "EINVAL", "EINTR", "EIO+")
    ),
    **dict.fromkeys(("ftruncate", "truncate"), ("EIO", "EINTR", "EINVAL")),
    "fallocate": ("EIO", "ENOSPC", "EDQUOT", "EINTR", "EINVAL", "EOPNOTSUPP+"),
    **dict.fromkeys(
        ("rename", "renameat", "renameat2"),
        ("EIO", "ENOSPC", "EACCES", "EINVAL", "EDQUOT", "EXDEV", "EINVAL+", "EACCES+"),
    ),
    **dict.fromkeys(("mkdir", "mkdirat"), ("EIO", "ENOSPC", "EACCES", "EDQUOT")),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), ("EIO", "EACCES", "EACCES+")),
    **dict.fromkeys(("stat", "lstat", "fstat", "newfstatat", "statx"), (*_READING, "EIO+")),
    **dict.fromkeys(("access", "faccessat", "faccessat2", "readlink", "readlinkat"), _READING),
    "getdents64": ("EIO", "EIO+"),
    "close": ("EIO", "EINTR", "ENOSPC", "EDQUOT"),
    **dict.fromkeys(("copy_file_range", "sendfile"), ("EIO", "EINVAL", "ENOSPC", "EINTR", "EXDEV")),
    **dict.fromkeys(("fadvise64", "sync_file_range"), ("EIO", "EINVAL")),
    "flock": ("EIO", "EINTR", "ENOLCK", "EWOULDBLOCK", "EOPNOTSUPP"),
    "mmap": ("ENOMEM", "EACCES", "ENODEV"),
    **dict.fromkeys(
        ("link", "linkat", "chmod", "fchmod", "fchmodat", "utimensat"), ("EIO", "EACCES", "EPERM")
    ),
    **dict.fromkeys(("statfs", "fstatfs"), ("EIO", "ENOSYS")),
}
#: Calls that change something: where users' changes and pauses come between two of them.
_CHANGING = {
    "open",
    "openat",
    "write",
    "pwrite64",
    "fsync",
    "fdatasync",
    "ftruncate",
    "fallocate",
    "rename",
    "renameat",
    "renameat2",
    "mkdir",
    "mkdirat",
    "unlink",
    "unlinkat",
    "rmdir",
    "flock",
    "chmod",
    "fchmod",
    "fchmodat",
    "copy_file_range",
    "getdents64",
}
_PAUSE = 0.05
_CHANGES = ("added", "below", "edited", "replaced", "folder")


@dataclass(frozen=True)
class Point:
    """The k-th call of a kind in a case, and what happens there."""

    case: str
    kind: str
    nth: int
    event: str

    def __str__(self) -> str:
        return f"{self.case}:{self.kind}:{self.nth}:{self.event}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """A point as it is printed."""
        case, kind, nth, event = text.split(":")
        return cls(case, kind, int(nth), event)

    @property
    def group(self) -> tuple[str, str, str]:
        """Points that are visited by turns."""
        return self.kind, self.case, "signal" if self.event.startswith("SIG") else self.event.split()[0]


class Faults:
    """The trials of one worker."""

    def __init__(self, zygote: Zygote, folder: Path, arguments: Any) -> None:
        self._zygote, self._arguments, self._folder = zygote, arguments, folder
        self._prepared = Cases(zygote, folder, arguments)
        self._library = self._prepared.library
        self._cases = self._prepared.cases
        for case in self._cases.values():
            case.calls = self._record(case)
        self.points = [arguments.point] if arguments.point else self._chosen()

    def _record(self, case: Case) -> list[Call]:
        """The calls of a run without faults."""
        trial, seen = self._prepared.set_up(case), []

        def note(run: Run, call: Call) -> None:
            seen.append(call)
            if _closes_folder(call):
                case.ending.add(call)

        ended = self._prepared.start(
            case, trial, (), watch=[self._library.sources, trial.area], hook=note
        ).finish(self._zygote)
        judge(trial, ended, Before(trial.look(), 0))
        if ended.code:
            raise SystemExit(f"{case.name}: a run without faults failed: {ended.said}")
        return seen

    def _chosen(self) -> list[Point]:
        """As many points as are asked for, by turns from every group."""
        rng = random.Random(self._arguments.seed)
        groups: dict[tuple[str, str, str], list[Point]] = {}
        for case in self._cases.values():
            for call in case.calls:
                errors = () if call in case.ending else ERRORS.get(call.kind, ())
                events = [*errors, "SIGKILL", *(() if case.script else ("SIGINT", "SIGTERM"))]
                if call.kind in _CHANGING:
                    events += ["pause", f"change {_CHANGES[call.index % len(_CHANGES)]}"]
                for event in events:
                    point = Point(case.name, call.kind, call.nth, event)
                    groups.setdefault(point.group, []).append(point)
            if not case.script:
                full = Point(case.name, "stdout", 0, "full")
                groups[full.group] = [full]
        queues = [groups[key] for key in sorted(groups)]
        rng.shuffle(queues)
        for queue in queues:
            rng.shuffle(queue)
        self._total = sum(map(len, queues))
        chosen: list[Point] = []
        while queues and len(chosen) < self._arguments.count:
            chosen += [queue.pop() for queue in queues]
            queues = [queue for queue in queues if queue]
        return chosen[: self._arguments.count]

    def __call__(self, index: int, report: Report) -> None:
        """One point."""
        if index >= len(self.points):
            return
        if index == 0 and not self._arguments.point:
            kinds = {p.kind for p in self.points}
            print(
                f"{len(self.points)} of {self._total} points, of {len(kinds)} kinds of call: "
                f"{', '.join(sorted(kinds))}"
            )
        point = self.points[index]
        rng = random.Random(f"{self._arguments.seed}:{point}")
        case = self._cases[point.case]
        trial = self._prepared.set_up(case)
        before = Before(trial.look(), 0, bool(case.interrupted), staging(trial.area), disturbed=True)
        happen = self._event(point, trial, before, rng)
        hit: list[Call] = []

        def hook(run: Run, call: Call) -> Fail | None:
            if call.kind == point.kind and (
                call.nth == point.nth or (call.nth > point.nth and point.event.endswith("+"))
            ):
                if point.event in ERRORS.get(point.kind, ()) and _closes_folder(call):
                    return None
                hit.append(call)
                return happen(run)
            return None

        extra = ("--json",) if rng.random() < 0.3 and not case.script else ()
        watch = [self._library.sources, trial.area]
        stdout = Path("/dev/full") if point.kind == "stdout" else None
        before.mute, before.stuck = stdout is not None, point.event.endswith("+")
        ended = self._prepared.start(case, trial, extra, watch=watch, hook=hook, stdout=stdout).finish(
            self._zygote
        )
        self._show(ended, trial)
        after = judge(trial, ended, before)
        story = (
            f"{point.event} at {_where(hit[0], self._folder) if hit else point.kind} -> {ended.code} "
            f"{after.kind}"
        )
        if stdout and ended.code != 2:
            trial.violated("f-stdout", f"nothing could be printed: exit {ended.code}: {shown(ended)}")
        counts = Counter({f"exit {ended.code}": 1, "missed": not hit and not stdout})
        if ended.code != 0 and not case.script:
            story += self._resume(case, trial, after.kind, counts)
        if self._library.fingerprint() != self._library.before:
            trial.violated("g-source", "a file of the sources has another size or time")
            self._library.before = self._library.fingerprint()
        report.add(
            f"--folder {self._folder.parent} --point '{point}'",
            case.name,
            f"[{case.name}: {story}]",
            trial.found,
            **counts,
        )

    def _event(
        self, point: Point, trial: Trial, before: Before, rng: random.Random
    ) -> Callable[[Run], Fail | None]:
        """What happens at a point."""

        def pause(run: Run) -> None:
            time.sleep(_PAUSE)

        def change(run: Run, kind: str) -> None:
            foreign.disturb(trial.out, trial.foreign, kind, rng)

        if point.event.startswith("SIG"):
            return partial(trial.send, number=signal.Signals[point.event], before=before)
        if point.event == "pause":
            before.disturbed = False
            return pause
        if point.event.startswith("change"):
            before.disturbed = False
            return partial(change, kind=point.event.split()[1])
        code = getattr(errno, point.event.rstrip("+"), 0)
        return lambda run: Fail(code)

    def _resume(self, case: Case, trial: Trial, kind: str, counts: Counter[str]) -> str:
        """Runs again without faults, as the user would."""
        left = staging(trial.area)
        counts["staging kept"] += bool(left)
        before = Before(trial.look(), len(trial.foreign), True, left)
        command = case.scenario.command(trial.out, *case.shared, "--threads", "2", "--resume")
        ended = self._zygote.run(*command, mount=trial.out if case.mount else None)
        self._show(ended, trial)
        after = judge(trial, ended, before)
        counts[f"resumed {ended.code}"] += 1
        return f"; resumed -> {ended.code} {after.kind}"

    def _show(self, ended: Ended, trial: Trial) -> None:
        if self._arguments.only is not None:
            print(
                f"--- {' '.join(ended.argv)}\n    exit {ended.code}, OUT "
                f"{trial.look().kind}\n{ended.said.strip()}"
            )


def _closes_folder(call: Call) -> bool:
    """True for a call that no filesystem fails; Rust's library panics if one does."""
    return call.kind == "close" and Path(call.path).is_dir()


def _where(call: Call, folder: Path) -> str:
    return f"{call.kind} #{call.nth} {call.path.removeprefix(f'{folder}/')}"


def main() -> int:
    """The command line."""
    parser = options(__doc__ or "", 1000)
    add_cases(parser, CASES)
    parser.add_argument(
        "--point", type=Point.parse, metavar="POINT", help="this point alone, with what was printed"
    )
    arguments = parser.parse_args()
    if arguments.point:
        arguments.cases, arguments.only = [arguments.point.case], 0
    if missing := unavailable():
        print(f"nothing can be tried: {missing}", file=sys.stderr)
        return 2

    def prepare(zygote: Zygote, folder: Path) -> Trials:
        return Faults(zygote, folder, arguments)

    return drive(arguments, arguments.count, prepare)


if __name__ == "__main__":
    sys.exit(main())
