"""Changes a source while a run reads it.

    python tests/trials/changes.py --count 200 --seed 0 --program PATH

The source is a Llama of large matrices, 160 to 200 MiB in one file, or in one file per tensor-parallel rank.
At an instant of a merge, a conversion that gathers columns, or a verification, one of its files is truncated,
appended to, replaced, overwritten, deleted, given another mode or a hard link. The run must end with a
finding that names the file, or with the right result: that of the source before the change, or after it. It
never dies of a signal.

=========
====================================================================================================
a-wrong    exit 0, and the result is that of the source neither before nor after the change
a-mixed    the run failed, and something is at OUT
c-exit     an exit code other than 0, 1, 2 and 3
c-finding  the run failed without a finding
f-file     the run failed, and no message names the file
f-signal   the run died of a signal
f-refused  a mode or a hard link alone made the run fail
f-...      as in ``judge.py``
e-litter   the run succeeded and left something beside OUT
=========
====================================================================================================
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import sources
import trees
from intercept import Call, unavailable
from judge import TRACE, Violation, line, shown
from runner import Ended, Run, Zygote
from scenarios import staging
from series import Report, Trials, chance, drive, fixtures_of, fresh, options

#: The first of these that suffices is a command's budget: tiles are as small as they get.
_MEMORY = ("64MiB", "96MiB", "128MiB", "192MiB", "256MiB", "512MiB")
#: Commands by name; ``@one`` is the source in one file, ``@ranks`` that of four ranks.
COMMANDS = {
    "merge": "merge @one OUT",
    "merge-tp": "merge @ranks OUT",
    "tp4": "convert @one OUT --to tp-safetensors --tp 4",
    "tp2": "convert @one OUT --to tp-safetensors --tp 2",
    "megatron": "convert @one OUT --to megatron --tp 4",
    "verify": "verify @one --expect MANIFEST",
}
#: How often what is tried, where it is not once: maps are used by the first, and hurt by the others.
_WEIGHTS = {"tp4": 2, "megatron": 2, "truncated to 0": 2, "truncated to half": 2}
#: Longest pause between a call and the change that follows it, in seconds: about the time of a tile.
_AFTER_CALL = 0.003


def _truncate(size: Callable[[int], int]) -> Callable[[Path, Random], None]:
    return lambda file, rng: os.truncate(file, size(file.stat().st_size))


def _append(file: Path, rng: Random) -> None:
    with file.open("ab") as handle:
        handle.write(rng.randbytes(4096))


def _overwrite(file: Path, rng: Random) -> None:
    """Writes near both ends, so that a run that has read but one of the two holds what never was."""
    size = file.stat().st_size
    length = min(size // 16, 1 << 20)
    with file.open("r+b") as handle:
        for place in (size // 16, size - 2 * length):
            handle.seek(place)
            handle.write(rng.randbytes(64) * (length // 64))


def _overwrite_unseen(file: Path, rng: Random) -> None:
    was = file.stat()
    _overwrite(file, rng)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


def _replace(file: Path, rng: Random) -> None:
    new = file.parent.parent / "new"
    shutil.copyfile(file, new)
    _overwrite(new, rng)
    new.rename(file)


def _link(file: Path, rng: Random) -> None:
    os.link(file, file.parent.parent / "link")


#: What happens to a file.
CHANGES: dict[str, Callable[[Path, Random], None]] = {
    "truncated to 0": _truncate(lambda size: 0),
    "truncated to half": _truncate(lambda size: size // 2),
    "truncated by one": _truncate(lambda size: size - 1),
    "appended to": _append,
    "overwritten": _overwrite,
    "overwritten, time put back": _overwrite_unseen,
    "replaced": _replace,
    "deleted": lambda file, rng: file.unlink(),
    "chmod": lambda file, rng: file.chmod(0o600),
    "linked": _link,
}
#: Changes that leave content and place as they are.
_HARMLESS = ("chmod", "linked")


def _shape(size: int) -> dict[str, int]:
    """A Llama of one layer with about ``size`` bytes, most of them in three matrices."""
    hidden = 2048 if size >= 100 << 20 else 512
    ffn = max(64, size // (6 * hidden) // 64 * 64)
    return {"hidden": hidden, "ffn": ffn, "layers": 1, "vocab": 1000, "shards": 1}


@dataclass
class Case:
    """A command, and what its undisturbed run comes to."""

    name: str
    argv: tuple[str, ...]
    files: list[Path]
    #: The least of the budgets that suffices, once the case is measured.
    memory: str = ""
    #: Meaning of the result; None for a verification.
    right: trees.Tree | None = None
    seconds: float = 0.0
    #: Calls on the source: all, and those by which the run looks whether it changed.
    calls: list[int] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)


class Changes:
    """The trials of one worker."""

    def __init__(self, zygote: Zygote, folder: Path, arguments: Any, by_calls: bool) -> None:
        self._zygote, self._arguments, self._folder, self._by_calls = zygote, arguments, folder, by_calls
        self._area, self._sources, self._pristine = folder / "t", folder / "src", folder / "pristine"
        one = sources.llama(self._pristine / "one", fixtures_of(arguments), 1, **_shape(arguments.size))
        ranks = sources.derived(
            zygote, one, self._pristine / "ranks", "--to", "tp-safetensors", "--tp", "4", "--fsync", "none"
        )
        for source in (one, ranks):
            shutil.copytree(source, self._sources / source.name)
        manifest = folder / "manifest.json"
        zygote.run("manifest", self._sources / "one", "-o", manifest, "-q")
        self._cases = []
        for name, command in COMMANDS.items():
            source = self._sources / ("ranks" if "@ranks" in command else "one")
            words = {"@one": source, "@ranks": source, "OUT": self._area / "out", "MANIFEST": manifest}
            argv = tuple(str(words.get(word, word)) for word in command.split())
            argv += () if name == "verify" else ("--fsync", "none")
            self._cases.append(Case(name, argv, sorted(source.glob("*.safetensors"))))

    def _command(self, case: Case, threads: int = 1) -> list[str]:
        return [*case.argv, "--memory", case.memory, "--threads", str(threads)]

    def _run(self, case: Case) -> Ended:
        """An undisturbed run, with OUT as it leaves it."""
        fresh(self._area)
        return self._zygote.run(*self._command(case))

    def _measure(self, case: Case) -> None:
        """Finds the least memory, the right result and the calls of a run."""
        for case.memory in _MEMORY:
            ended = self._run(case)
            if ended.code == 0:
                break
        else:
            raise SystemExit(f"{case.name}: the reference run failed\n{ended.said}")
        case.seconds = ended.seconds
        case.right = self._result()
        if self._by_calls:
            fresh(self._area)

            def count(run: Run, call: Call) -> None:
                case.calls.append(call.index)
                if call.kind in ("fstat", "statx", "newfstatat"):
                    case.looks.append(call.index)

            self._zygote.run(*self._command(case), watch=[self._sources], hook=count)

    def _result(self) -> trees.Tree | None:
        tree = trees.raw(self._area / "out")
        return None if tree is None else trees.meaning(self._area / "out", tree)

    def _restore(self, changed: Path) -> None:
        """The sources as they were, with the times that they had."""
        (self._folder / "src/link").unlink(missing_ok=True)
        for good in self._pristine.rglob("*.safetensors"):
            file = self._sources / good.relative_to(self._pristine)
            if file == changed:
                file.unlink(missing_ok=True)
                shutil.copy2(good, file)

    def __call__(self, index: int, report: Report) -> None:
        """One trial."""
        rng = chance(self._arguments, index)
        case = rng.choices(self._cases, [_WEIGHTS.get(case.name, 1) for case in self._cases])[0]
        what = rng.choices(list(CHANGES), [_WEIGHTS.get(change, 1) for change in CHANGES])[0]
        if not case.memory:
            self._measure(case)
        file = rng.choice(case.files)
        fresh(self._area)
        command = self._command(case, rng.choice((1, 1, 2)))
        when: list[float] = []

        def change(run: Run) -> None:
            if run.alive():
                when.append(run.age())
                CHANGES[what](file, rng)

        if self._by_calls and (rng.random() < 0.6 or self._arguments.at_calls):
            ended = self._after_call(rng, case, command, change)
        else:
            run = self._zygote.start(*command)
            until = rng.uniform(0, case.seconds)
            while run.age() < until and run.alive():
                time.sleep(min(0.0005, max(0.0, until - run.age())))
            change(run)
            ended = run.finish(self._zygote)
        self._show(ended)
        found, outcome = self._judge(case, what, file, ended, bool(when))
        if when:
            self._restore(file)
        place = (
            f"{file.relative_to(self._sources)} {what} after {when[0]:.3f} of {case.seconds:.3f} s"
            if when
            else "no change"
        )
        counts = {
            outcome: 1,
            "hit": bool(when),
            signal.Signals(-ended.code).name if ended.code < 0 else f"exit {ended.code}": 1,
        }
        report.add(
            f"--only {index}", what, f"[{case.name}: {place} -> {ended.code} {outcome}]", found, **counts
        )

    def _after_call(
        self, rng: Random, case: Case, command: list[str], change: Callable[[Run], None]
    ) -> Ended:
        """The change comes a little after a call on the source."""
        # What is used through a map is used after a look.
        at, pause = rng.choice(rng.choice((case.calls, case.looks))), rng.uniform(0, _AFTER_CALL)
        waiting: list[threading.Thread] = []

        def later(run: Run) -> None:
            time.sleep(pause)
            change(run)

        def hook(run: Run, call: Call) -> None:
            if call.index == at and self._arguments.at_calls:
                # The run waits in this call until then.
                change(run)
            elif call.index == at:
                waiting.append(threading.Thread(target=later, args=(run,)))
                waiting[0].start()

        run = self._zygote.start(*command, watch=[self._sources], hook=hook)

        def settled() -> None:
            for thread in waiting:
                thread.join()

        return run.finish(self._zygote, before=settled)

    def _judge(
        self, case: Case, what: str, file: Path, ended: Ended, hit: bool
    ) -> tuple[list[Violation], str]:
        """Violations, and the outcome in a word."""
        found, said, code = [], ended.said, ended.code
        if ended.hung:
            return [Violation("f-hang", f"no end after {ended.seconds:.0f} s")], "hung"
        if code < 0:
            return [Violation("f-signal", signal.Signals(-code).name)], "signal"
        if trace := TRACE.search(said):
            found.append(Violation("f-traceback", line(said[trace.start() :])))
        result = self._result()
        if code == 0:
            outcome = "right"
            if case.right is not None and result != case.right:
                again = self._run(case)
                outcome = "as changed" if again.code == 0 and result == self._result() else "wrong"
            if outcome == "wrong":
                found.append(Violation("a-wrong", trees.difference(result or {}, case.right or {})))
            if left := staging(self._area):
                found.append(Violation("e-litter", f"{left[0].name}: {shown(ended)}"))
            return found, outcome
        codes = re.findall(r"\bFS\d{3}\b", said)
        if code not in (1, 2, 3):
            found.append(Violation("c-exit", f"exit {code}: {shown(ended)}"))
        if result is not None:
            found.append(Violation("a-mixed", f"exit {code}, and something is at OUT: {shown(ended)}"))
        if not codes:
            found.append(Violation("c-finding", shown(ended)))
        elif file.name not in said and str(file.parent) not in said:
            found.append(Violation("f-file", shown(ended)))
        if what in _HARMLESS or not hit:
            found.append(Violation("f-refused", f"exit {code}: {shown(ended)}"))
        return found, "FS506" if "FS506" in codes else "other"

    def _show(self, ended: Ended) -> None:
        if self._arguments.only is not None:
            print(f"--- {' '.join(ended.argv)}\n    exit {ended.code}\n{ended.said.strip()}")


def main() -> int:
    """The command line."""
    parser = options(__doc__ or "", 200)
    parser.add_argument(
        "--size", type=int, default=160, metavar="MIB", help="size of the source (default: 160)"
    )
    arguments = parser.parse_args()
    arguments.size <<= 20
    if arguments.folder is None and Path("/dev/shm").is_dir():
        arguments.folder = [Path("/dev/shm")]
    missing = unavailable()
    if missing and arguments.at_calls:
        print(f"nothing can be tried: {missing}", file=sys.stderr)
        return 2
    if missing:
        print(f"no instants at system calls: {missing}", file=sys.stderr)

    def prepare(zygote: Zygote, folder: Path) -> Trials:
        return Changes(zygote, folder, arguments, by_calls=missing is None)

    return drive(arguments, arguments.count, prepare)


if __name__ == "__main__":
    sys.exit(main())
