"""Kills and stops processes of runs of several workers, and has several conclude one run.

    python tests/trials/ranks.py --count 500 --seed 0 --what kill --program PATH

``kill``: one or two ranks get SIGKILL; the others must end by themselves, and another number of processes
    must finish
the run with ``resume``. ``stop``: a rank gets SIGSTOP and is silent; the others give up, the run is finished
without it, and then it is woken: not a byte, inode or time of what was published may change. In some trials
it is woken while the others finish. ``commit``: parts are made by processes of their own, some by two at
once, and two or three conclude the run at once, one of which may be stopped and woken when another one has
published.

An instant is right before a call of the victim's on the run's files (where seccomp can be used), or some time
after something appears in the run's folders. In most trials of ``stop`` and half of ``commit`` nobody can
lock a file, as where hosts know nothing of each other's locks: there the protocol is all that there is.

Ranks wait for each other by a clock that stands still until one of them is disturbed, and then moves no
faster than those that live show it (:mod:`clock`): a run of which nobody is disturbed must end well, on
however slow a machine. This needs a build with steps.

===========
=====================================================================================================
mixed        OUT is neither what it was nor the new result, but for the manifest's times and ``provenance``
changed      a process that was woken changed what others had published
exit0        success, and the new result is not at OUT
words        "this run wrote nothing to OUT", and it was
codes        an error that is none of those that this can come to
hang         no end within five minutes
resume       a run whose processes are gone was not finished by ``resume``
none         of several that concluded a run none published, though there are locks and nobody was stopped
litter       hidden folders are left after a run that ended well
recreated    a process that was woken left a hidden folder with content
foreign      something else appeared beside OUT
traceback    a traceback, a panic, or death by a signal of its own making
===========
=====================================================================================================
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sources
import trees
from clock import Clock, Rank
from fastshard import _core
from intercept import Call, unavailable
from judge import TRACE, Violation, line
from runner import Ended, Run, Zygote
from series import Report, Trials, chance, drive, fixtures_of, fresh, options
from trees import Tree

_SCRIPT = Path(__file__).with_name("rank_run.py")
#: What is made of the source: options of ``convert``.
TARGETS: dict[str, dict[str, Any]] = {
    "hf": {"to": "hf", "max_shard_size": "9MB"},
    "dcp": {"to": "dcp", "tp": 2},
    "torch_dist": {"to": "megatron:torch_dist", "tp": 2},
}
#: Calls that change something, or open what may be changed.
_KINDS = (
    "openat",
    "mkdirat",
    "pwrite64",
    "renameat",
    "renameat2",
    "unlinkat",
    "ftruncate",
    "fallocate",
    "fdatasync",
    "fsync",
    "flock",
)
#: What errors of such runs say: held by another, not there any more, taken or changed meanwhile, gone,
#: interrupted.
_CODES = {
    "FS501",
    "FS504",
    "FS505",
    "FS507",
    "FS508",
    "FS509",
    "FS510",
    "FS517",
    "FS518",
    "FS519",
    "FS522",
    "FS523",
    "FS524",
}
#: Seconds after which a process hangs.
_HANG = 300.0
#: What appears in the folders of a run, and seconds after it in which something happens.
_SIGHTS = {
    "rank-00000.json": 0.45,
    "claim-1": 0.03,
    "round-1.json": 0.2,
    "member-": 0.05,
    "evidence-": 0.15,
    "claim-2": 0.02,
    "sealed": 0.003,
    "gone": 0.05,
}


@dataclass
class Case:
    """A target, and what is known of it."""

    name: str
    options: dict[str, Any]
    new: Tree
    #: Calls on the run's folder of rank 0 and of another one.
    calls: dict[bool, int] = field(default_factory=dict)


@dataclass
class Told:
    """What a process came to."""

    ended: Ended
    #: What it printed.
    said: dict[str, Any]

    @property
    def good(self) -> bool:
        """True if it ended well."""
        return self.ended.code == 0


class Disturbed:
    """A moment at which a process is to be signalled."""

    def __init__(self, rng: random.Random, number: int, calls: int | None) -> None:
        self.number = number
        #: The clock that moves once it has come.
        self.clock: Clock | None = None
        #: The call before which it comes; None for a sight.
        self.at = rng.randrange(calls) if calls else None
        self.sight, span = rng.choice(list(_SIGHTS.items()))
        self.delay = rng.uniform(0, span)
        self.seen = 0
        self.sent = False
        #: What it was, for people.
        self.where = f"{self.sight}+{self.delay * 1000:.0f}ms"

    def hook(self, run: Run, call: Call) -> None:
        """Decides on a call."""
        if not is_of_run(call) or self.sent:
            return
        if self.seen == self.at:
            self.where = f"{call.kind} {'/'.join(Path(call.path).parts[-2:])}"
            self.send(run)
        self.seen += 1

    def send(self, run: Run) -> None:
        """Sends the signal."""
        if not self.sent and run.alive():
            self.sent = True
            run.send(self.number)
            if self.clock is not None:
                self.clock.signalled(run, self.number == signal.SIGSTOP)
                self.clock.go()


def is_of_run(call: Call) -> bool:
    """True for a call on the run's own files, not on the cards of ranks."""
    return call.kind in _KINDS and ".fastshard-" in call.path and ".fastshard-ranks" not in call.path


def result(folder: Path) -> Tree | None:
    """What is at a destination, file by file; of the manifest what two right runs have in common."""
    tree = trees.raw(folder)
    if tree and trees.MANIFEST in tree:
        try:
            document = json.loads((folder / trees.MANIFEST).read_bytes())
        except ValueError as error:
            return tree | {trees.MANIFEST: f"unreadable: {error}"}
        document.pop("provenance", None)
        for file in document["files"]:
            file.pop("mtime_ns", None)
        tree[trees.MANIFEST] = trees.digest(json.dumps(document, sort_keys=True).encode())
    return tree


def marks(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """What tells that a file is still the one it was."""
    paths = [folder, *(folder.rglob("*") if folder.is_dir() else ())]
    stats = {str(path): path.stat() for path in paths if path.exists()}
    return {name: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_nlink) for name, s in stats.items()}


class Trial:
    """A destination, and the processes that work towards it."""

    def __init__(self, zygote: Zygote, area: Path, case: Case, rng: random.Random) -> None:
        self.zygote, self.area, self.case, self.rng = zygote, area, case, rng
        self.out = area / "out"
        self.locks = True
        self.old: Tree | None = None
        self.found: list[Violation] = []
        self.story: list[str] = []
        self.source = Path()
        self.verbose = False
        self.clock = Clock(area.parent / "clock", area / ".out.fastshard-ranks")

    def violated(self, kind: str, detail: str) -> None:
        """Notes a violation; one of a kind is enough."""
        if not any(v.kind == kind for v in self.found):
            self.found.append(Violation(kind, detail))

    def start(self, do: str, disturbed: Disturbed | None = None, **arguments: Any) -> Run:
        """Starts a process."""
        clock = str(self.clock.file) if "rank" in arguments else None
        request = json.dumps({"do": do, "with": arguments, "locks": self.locks, "clock": clock})
        if disturbed is None or disturbed.at is None:
            return self.zygote.start(request, script=_SCRIPT)
        return self.zygote.start(request, script=_SCRIPT, watch=[self.area], hook=disturbed.hook)

    def converting(self, **more: Any) -> dict[str, Any]:
        """Arguments of ``convert``."""
        own = {"source": str(self.source), "out": str(self.out), "overwrite": self.old is not None}
        return {**own, "threads": self.rng.choice((1, 2)), **self.case.options, **more}

    def ranks(
        self, world: int, timeout: float, disturbed: dict[int, Disturbed] | None = None, **more: Any
    ) -> list[Run]:
        """Starts the ranks of a run."""
        order = list(range(world))
        self.rng.shuffle(order)
        arguments = self.converting(world=world, timeout=timeout, **more)
        for moment in (disturbed or {}).values():
            moment.clock = self.clock
        runs = {}
        for rank in order:
            runs[rank] = self.start("convert", (disturbed or {}).get(rank), rank=rank, **arguments)
            self.clock.ranks.append(Rank(rank, runs[rank]))
        return [runs[rank] for rank in range(world)]

    def wake(self, run: Run) -> None:
        """Lets a process that was stopped go on."""
        self.clock.signalled(run, False)
        run.send(signal.SIGCONT)

    def hidden(self) -> list[Path]:
        """What lies beside OUT."""
        return sorted(p for p in self.area.iterdir() if p != self.out)

    def sees(self, sight: str, was: int) -> bool:
        """True once something has appeared."""
        if sight == "gone":
            return inode(self.out) != was
        for folder in self.hidden():
            try:
                names = [path.name for path in folder.iterdir()]
            except OSError:
                continue
            if any(name.startswith(sight) for name in names):
                return True
        return False

    def disturb(self, runs: list[Run], disturbed: dict[int, Disturbed]) -> None:
        """Waits for the moments that are chosen by sight, until all have come or all processes have ended."""
        was = inode(self.out)
        due: dict[int, float] = {}
        while any(not d.sent for d in disturbed.values()):
            if not any(
                run.alive()
                for rank, run in enumerate(runs)
                if rank not in disturbed or not disturbed[rank].sent
            ):
                return
            for rank, moment in disturbed.items():
                if moment.sent or not runs[rank].alive():
                    continue
                # What is chosen by a call may never come.
                if moment.at is None and rank not in due and self.sees(moment.sight, was):
                    due[rank] = time.monotonic() + moment.delay
                if rank in due and time.monotonic() >= due[rank]:
                    moment.send(runs[rank])
            if all(d.sent or not runs[rank].alive() for rank, d in disturbed.items()):
                return
            time.sleep(0.0005)

    def end(self, runs: list[Run], what: str = "") -> list[Told]:
        """Waits for processes."""
        deadline = time.monotonic() + _HANG
        told = []
        for i, run in enumerate(runs):
            if run.alive(max(0.1, deadline - time.monotonic())):
                self.violated("hang", f"{what}{i} of {len(runs)} had not ended {_HANG:.0f} s later")
            told.append(self.took(run.finish(self.zygote)))
        return told

    def took(self, ended: Ended) -> Told:
        """Looks at what a process printed."""
        said: dict[str, Any] = {}
        if ended.code >= 0:
            try:
                said = json.loads(ended.out.strip().splitlines()[-1])
            except (ValueError, IndexError):
                self.violated("traceback", f"exit {ended.code}: {line(ended.said)}")
        elif ended.code not in (-signal.SIGKILL,):
            self.violated("traceback", f"exit {ended.code}: {line(ended.said)}")
        if trace := TRACE.search(ended.said):
            self.violated("traceback", f"exit {ended.code}: {line(ended.said[trace.start() :])}")
        if ended.code > 0 and said and not _CODES.issuperset(said["codes"]):
            self.violated("codes", f"{said['codes']}: {line(said['words'])}")
        if self.verbose:
            print(f"--- exit {ended.code}, {ended.seconds:.2f} s: {line(ended.said)}", flush=True)
        return Told(ended, said)

    def look(self, told: list[Told], what: str) -> bool:
        """Compares OUT with what it may be; true if it is the new result."""
        now = result(self.out)
        new = now == self.case.new
        if not new and now != self.old:
            self.violated("mixed", f"{what}: {trees.difference(now or {}, self.case.new)}")
        if not new and any(one.good for one in told):
            self.violated(
                "exit0",
                f"{what}: a process ended well, and OUT is {'what it was' if now == self.old else 'mixed'}",
            )
        for one in told:
            words = one.said.get("words", "")
            # Without locks, one of several may have said so before another one published.
            spoke_last = self.locks or what != "commits"
            if (
                new
                and spoke_last
                and "this run wrote nothing to OUT" in words
                and "FS519" not in one.said["codes"]
            ):
                self.violated("words", f"{what}: {line(words)}")
        if strange := [p.name for p in self.hidden() if not p.name.startswith(".out.fastshard-")]:
            self.violated("foreign", f"{what}: {', '.join(strange)}")
        codes = [
            str(one.ended.code) if one.good else "/".join(one.said.get("codes", [])) or str(one.ended.code)
            for one in told
        ]
        self.story.append(f"{what} {' '.join(codes)} -> {'new' if new else 'not new'}")
        return new

    def undisturbed(self, told: list[Told], new: bool) -> None:
        """Judges a run of which nobody was stopped."""
        if not (new and all(one.good for one in told)):
            self.violated("exit0", f"nobody was disturbed, and the run failed: {self.story[-1]}")

    def staged(self) -> bool:
        """True if a run's folder is left."""
        return any(p.name != ".out.fastshard-ranks" for p in self.hidden())

    def finish(self, was_new: bool) -> None:
        """Has a run whose processes are gone finished by others, and looks at the end."""
        world = self.rng.choice((1, 1, 2, 3, 4))
        alone = world == 1 and self.rng.random() < 0.7
        if was_new and not self.staged() and self.old is None:
            alone, world = False, max(world, 2)
        if alone:
            told = self.end([self.start("convert", **self.converting(resume=True))])
        else:
            told = self.end(self.ranks(world, 20.0, resume=True))
        new = self.look(told, f"resume by {'one' if alone else world}:")
        if not new or not all(one.good for one in told):
            words = [line(one.said.get("words", one.ended.said)) for one in told if not one.good]
            self.violated("resume", f"by {world}{' alone' if alone else ''}: {'; '.join(words[:2])}")

    def tidy(self, counts: Counter[str], gone: bool = False) -> None:
        """Looks whether anything hidden is left; ``gone`` if the run was over when its last process was
        killed."""
        left = self.hidden()
        if gone and [p.name for p in left] == [".out.fastshard-ranks"]:
            # Rank 0 was killed when the others had left it and the result was complete: this is for
            # `fastshard clean`.
            counts["cards left"] += 1
        elif left:
            names = [f"{p.name}: {', '.join(sorted(q.name[:24] for q in p.iterdir()))}" for p in left]
            self.violated("litter", "; ".join(names))


def inode(path: Path) -> int:
    """Inode of a path, 0 if it is not there."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


class Workers:
    """The trials of one worker."""

    def __init__(self, zygote: Zygote, folder: Path, arguments: Any, by_calls: bool) -> None:
        self._zygote, self._arguments, self._by_calls = zygote, arguments, by_calls
        self._area = folder / "t"
        fixtures = fixtures_of(arguments)
        size = {"hidden": 512, "ffn": 1024, "layers": 8, "vocab": 8000}
        self._source = sources.llama(folder / "src", fixtures, 1, **size)
        other = sources.llama(folder / "other", fixtures, 2, **(size | {"layers": 2, "vocab": 2000}))
        self._old = folder / "old"
        self._alone(other, self._old, {"to": "hf", "max_shard_size": "3MB"})
        self._was = result(self._old)
        self._cases: dict[str, Case] = {}
        self._folder = folder

    def _alone(self, source: Path, out: Path, how: dict[str, Any]) -> None:
        request = {"do": "convert", "with": {"source": str(source), "out": str(out), **how}, "locks": True}
        ended = self._zygote.run(json.dumps(request), script=_SCRIPT)
        if ended.code:
            raise SystemExit(f"an undisturbed run failed\n{ended.said}")

    def _case(self, name: str) -> Case:
        """A target; its reference is made by one process."""
        if name not in self._cases:
            out = self._folder / "reference"
            self._alone(self._source, out, TARGETS[name])
            case = Case(name, TARGETS[name], result(out) or {})
            shutil.rmtree(out)
            if self._by_calls:
                self._count(case)
            self._cases[name] = case
        return self._cases[name]

    def _count(self, case: Case) -> None:
        """Counts the calls of an undisturbed run."""
        trial = Trial(self._zygote, fresh(self._area), case, random.Random(0))
        trial.source = self._source
        counted = {rank: Disturbed(random.Random(0), 0, 1) for rank in range(2)}
        for moment in counted.values():
            moment.at = -1
        trial.end(trial.ranks(2, 10.0, counted))
        case.calls = {rank == 0: moment.seen for rank, moment in counted.items()}

    def __call__(self, index: int, report: Report) -> None:
        """One trial."""
        rng = chance(self._arguments, index)
        what = self._arguments.what
        if what == "all":
            what = ("kill", "kill", "stop", "commit")[index % 4]
        case = self._case(rng.choice(list(TARGETS)))
        trial = Trial(self._zygote, fresh(self._area), case, rng)
        trial.source, trial.verbose = self._source, self._arguments.only is not None
        if rng.random() < 0.4:
            shutil.copytree(self._old, trial.out)
            trial.old = self._was
        counts: Counter[str] = Counter()
        try:
            {"kill": self._kill, "stop": self._stop, "commit": self._commit}[what](trial, rng, counts)
        finally:
            trial.clock.stand()
        told = (
            f"[{what} {case.name}{'' if trial.locks else ' without locks'}"
            f"{' over an older result' if trial.old else ''}; "
            f"{'; '.join(trial.story)}]"
        )
        if trial.verbose:
            print(told)
        report.add(f"--only {index}", f"{what} {case.name}", told, trial.found, **counts)

    def _moment(self, rng: random.Random, case: Case, leads: bool, number: int) -> Disturbed:
        calls = case.calls.get(leads) if rng.random() < 0.6 else None
        return Disturbed(rng, number, calls)

    def _kill(self, trial: Trial, rng: random.Random, counts: Counter[str]) -> None:
        trial.locks = rng.random() < 0.8 or not self._by_calls
        world, timeout = rng.choice((2, 2, 3, 4)), rng.choice((2.0, 3.0, 4.0))
        victims = rng.sample(range(world), rng.choice((1, 1, 2)))
        moments = {v: self._moment(rng, trial.case, v == 0, signal.SIGKILL) for v in victims}
        runs = trial.ranks(world, timeout, moments)
        trial.disturb(runs, moments)
        told = trial.end(runs)
        hit = sum(told[v].ended.code == -signal.SIGKILL for v in victims)
        counts["disturbed"] += hit > 0
        trial.story.append(
            ", ".join(f"{v} of {world} killed at {m.where}" for v, m in moments.items() if m.sent)
        )
        new = trial.look(told, "others")
        counts["published"] += new
        if not hit:
            trial.undisturbed(told, new)
        over = new and not trial.staged()
        trial.finish(new)
        trial.tidy(counts, over)

    def _stop(self, trial: Trial, rng: random.Random, counts: Counter[str]) -> None:
        trial.locks = rng.random() < 0.3 or not self._by_calls
        world, timeout = rng.choice((2, 2, 3, 4)), rng.choice((2.0, 3.0))
        victim = 0 if rng.random() < 0.5 else rng.randrange(world)
        moment = self._moment(rng, trial.case, victim == 0, signal.SIGSTOP)
        runs = trial.ranks(world, timeout, {victim: moment})
        trial.disturb(runs, {victim: moment})
        stopped = runs[victim]
        if not moment.sent:
            told = trial.end(runs)
            new = trial.look(told, "not stopped")
            trial.undisturbed(told, new)
            trial.tidy(counts)
            return
        counts["disturbed"] += 1
        trial.story.append(f"{victim} of {world} stopped at {moment.where}")
        others = [run for i, run in enumerate(runs) if i != victim]
        new = trial.look(trial.end(others), "others")
        begun = trial.staged()
        woken: Told | None = None
        if not new:
            woken = self._without(trial, rng, stopped, counts)
            new = True
        before, content = marks(trial.out), result(trial.out)
        hidden = {p.name for p in trial.hidden()}
        if woken is None:
            trial.wake(stopped)
            woken = trial.end([stopped], "the one that was woken, ")[0]
            counts["woken"] += 1
            if marks(trial.out) != before or result(trial.out) != content:
                now = marks(trial.out)
                differ = [n for n in sorted(before.keys() | now.keys()) if before.get(n) != now.get(n)]
                trial.violated(
                    "changed",
                    f"{', '.join(differ[:4])}; {trees.difference(result(trial.out) or {}, content or {})}",
                )
            trial.look([woken], "woken")
            fresh_ones = [p for p in trial.hidden() if p.name not in hidden and any(p.iterdir())]
            if fresh_ones:
                names = [
                    f"{p.name}: {', '.join(sorted(q.name[:24] for q in p.iterdir()))}" for p in fresh_ones
                ]
                trial.violated("recreated" if begun else "litter", "; ".join(names))
        trial.tidy(counts)

    def _without(self, trial: Trial, rng: random.Random, stopped: Run, counts: Counter[str]) -> Told | None:
        """Others finish the run; what the stopped one came to, if it had to be woken for that."""
        world, woken = rng.choice((1, 2, 3)), None
        early = rng.uniform(0, 4.0) if rng.random() < 0.25 else None
        runs = trial.ranks(world, 15.0, resume=True)
        if early is not None:
            begun = trial.clock.seconds
            while trial.clock.seconds - begun < early and any(run.alive() for run in runs):
                time.sleep(0.001)
            counts["woken early"] += 1
            trial.wake(stopped)
            woken = trial.end([stopped], "the one that was woken early, ")[0]
        told = trial.end(runs)
        # What one that was woken early says may have been so when it said it.
        new = trial.look(told, f"resume by {world}:")
        if woken is not None:
            trial.story.append(f"woken {'/'.join(woken.said.get('codes', []))}")
            if woken.good and not new:
                trial.violated(
                    "exit0", "the one that was woken early ended well, and OUT is not the new result"
                )
        if new and all(one.good for one in told):
            return woken
        if woken is None:
            # It holds the folder's lock.
            codes = {code for one in told for code in one.said.get("codes", [])}
            if not (trial.locks and "FS509" in codes):
                trial.violated(
                    "resume", f"by {world}: {line(' '.join(one.said.get('words', '') for one in told))}"
                )
            counts["locked"] += 1
            trial.wake(stopped)
            woken = trial.end([stopped], "the one that was woken, ")[0]
            new = trial.look([woken], "woken")
        trial.finish(new)
        return woken

    def _commit(self, trial: Trial, rng: random.Random, counts: Counter[str]) -> None:
        trial.locks = rng.random() < 0.5 or not self._by_calls
        number = rng.choice((1, 2, 3))
        [begun] = trial.end([trial.start("begin", parts=number, **trial.converting())])
        if not begun.good:
            trial.violated("resume", f"begin: {line(begun.ended.said)}")
            return
        run = begun.said["run"]
        makers = [p for p in range(number) for _ in range(2 if rng.random() < 0.3 else 1)]
        rng.shuffle(makers)
        told = trial.end([trial.start("part", out=str(trial.out), part=p, run=run) for p in makers])
        for part in range(number):
            if not any(one.good for p, one in zip(makers, told, strict=True) if p == part):
                trial.violated(
                    "none",
                    f"part {part} was made by none: {line(' '.join(t.said.get('words', '') for t in told))}",
                )
        counts["two of a part"] += len(makers) - number
        trial.look([], "parts")
        several = rng.choice((2, 2, 3))
        moments: dict[int, Disturbed] = {}
        if rng.random() < 0.5:
            moments = {0: self._moment(rng, trial.case, True, signal.SIGSTOP)}
            if moments[0].at is not None:
                # A commit makes fewer calls than rank 0.
                moments[0].at = rng.randrange(max(trial.case.calls[True] // 2, 1))
            else:
                moments[0].sight, moments[0].delay = rng.choice(
                    (("claim-", 0.0), ("member-", rng.uniform(0, 0.03)), ("sealed", 0.0))
                )
        committers = []
        for i in range(several):
            committers.append(trial.start("commit", moments.get(i), out=str(trial.out), run=run))
            time.sleep(rng.uniform(0, 0.05) if rng.random() < 0.5 else 0)
        trial.disturb(committers, moments)
        stopped = moments[0].sent if moments else False
        counts["disturbed"] += stopped
        if stopped:
            trial.story.append(f"1 of {several} stopped at {moments[0].where}")
        told = trial.end(committers[1:] if stopped else committers)
        new = trial.look(told, "commits")
        if new and (before := marks(trial.out)):
            if stopped:
                trial.wake(committers[0])
                woken = trial.end(committers[:1], "the one that was woken, ")
                counts["woken"] += 1
                trial.look(woken, "woken")
            if marks(trial.out) != before:
                trial.violated("changed", "what another one had published")
        elif stopped:
            trial.wake(committers[0])
            new = trial.look(trial.end(committers[:1], "the one that was woken, "), "woken")
        counts["published"] += new
        if not new:
            if trial.locks and not stopped:
                trial.violated(
                    "none",
                    f"none of {several} published: {line(' '.join(t.said.get('words', '') for t in told))}",
                )
            last = trial.end([trial.start("commit", out=str(trial.out), run=run)])
            if not trial.look(last, "the last commit"):
                trial.violated("resume", f"commit: {line(last[0].said.get('words', ''))}")
        good = sum(one.good for one in told)
        if good > 1 and trial.locks:
            counts["several ended well"] += 1
        trial.tidy(counts)


def main() -> int:
    """The command line."""
    parser = options(__doc__ or "", 200)
    parser.add_argument(
        "--what", choices=("kill", "stop", "commit", "all"), default="all", help="trials (default: all)"
    )
    arguments = parser.parse_args()
    if not _core.STEPS:
        parser.error(
            "this build has no steps: maturin develop --profile tests -F pyo3/extension-module,steps"
        )
    missing = unavailable()
    if missing:
        print(f"no instants at system calls, and nothing without locks: {missing}", file=sys.stderr)

    def prepare(zygote: Zygote, folder: Path) -> Trials:
        return Workers(zygote, folder, arguments, by_calls=missing is None)

    return drive(arguments, arguments.count, prepare)


if __name__ == "__main__":
    sys.exit(main())
