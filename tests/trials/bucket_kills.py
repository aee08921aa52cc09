"""Kills runs that publish in a bucket before a system call that chance chooses, and continues them.

    python tests/trials/bucket_kills.py --count 200 --seed 0 --program PATH

Each trial takes a command (merge, convert, a result of one file, of several, in folders), kills it, often
kills what continues it too, and lets the last run end. The bucket is a folder whose objects appear whole.

==============  ====================================================================================
b-readable      a prefix that is not complete was taken for a result
b-resume        the last run does not end well
b-differs       the result is not bit for bit what a run on a disk writes
b-leavings      records or claims stay beside the result
b-hung          a run does not end
==============  ====================================================================================
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import sources
from intercept import Call, unavailable
from judge import Violation
from runner import Ended, Run, Zygote
from series import Report, Trials, chance, drive, fixtures_of, fresh, options

_SCRIPT = Path(__file__).with_name("bucket_run.py")
#: Runs of a trial that are killed, at most.
_KILLS = 3
_MANIFEST = "fastshard.manifest.json"
_CLAIM = ".fastshard/claim"
#: Commands by name: the verb, and its options.
_COMMANDS = {
    "several files": ("merge", "--max-shard-size", "600KB"),
    "one file": ("merge",),
    "megatron legacy": ("convert", "--to", "megatron:legacy", "--tp", "2"),
    "torch_dist": ("convert", "--to", "megatron:torch_dist", "--tp", "2"),
    "dcp": ("convert", "--to", "dcp"),
    "gpt_neox": ("convert", "--to", "gpt_neox", "--tp", "2"),
}


def _read_files(folder: Path) -> dict[str, bytes]:
    """The files of a result but its manifest, which holds times and names."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != _MANIFEST}


class BucketKills:
    """The trials of one worker."""

    def __init__(self, zygote: Zygote, folder: Path, arguments: Any) -> None:
        self._zygote, self._arguments, self._area = zygote, arguments, folder / "t"
        self._source = sources.small(folder / "hf", fixtures_of(arguments), 0)
        self._on_disk = folder / "disk"
        self._on_disk.mkdir()
        #: What each command writes to a disk, and the system calls of its run.
        self._expected: dict[str, dict[str, bytes]] = {}
        self._calls: dict[str, int] = {}

    def __call__(self, index: int, report: Report) -> None:
        """One trial."""
        rng = chance(self._arguments, index)
        name = rng.choice(list(_COMMANDS))
        self._measure(name)
        out, killed, story = fresh(self._area) / "out", 0, list[str]()
        violations: list[Violation] = []
        for number in range(rng.randint(1, _KILLS)):
            # Those that continue a run have less to do.
            at = rng.randrange(max(1, self._calls[name] >> number))
            ended = self._run(name, out, self._is_claimed(out), at)
            killed += ended.code == -signal.SIGKILL
            story.append(f"killed at call {at}: {ended.code}")
            violations += self._judge_state(ended, out, name)
        last = self._run(name, out, self._is_claimed(out), None) if not self._is_complete(out) else None
        violations += self._judge_end(last, out, name)
        if self._arguments.only is not None:
            print("\n".join([name, *story, last.said if last else "complete"]))
        report.add(f"--only {index}", name, f"{name}: {'; '.join(story)}", violations, killed=killed)

    def _measure(self, name: str) -> None:
        """Find out what a command writes to a disk, and how many system calls it makes in a bucket."""
        if name in self._expected:
            return
        on_disk, out = self._on_disk / name, fresh(self._area) / "out"
        verb, *more = _COMMANDS[name]
        ended = self._zygote.run(verb, self._source, on_disk, *more, "-q")
        if ended.code:
            raise SystemExit(f"{name}: {ended.said}")
        self._expected[name] = _read_files(on_disk)
        seen: list[Call] = []
        ended = self._start(name, out, False, lambda run, call: seen.append(call)).finish(self._zygote)
        if ended.code or _read_files(out) != self._expected[name]:
            raise SystemExit(f"{name} in a bucket: {ended.said}")
        self._calls[name] = len(seen)

    def _start(self, name: str, out: Path, resume: bool, hook: Any) -> Run:
        temporary = self._area / "tmp"
        temporary.mkdir(exist_ok=True)
        verb, *more = _COMMANDS[name]
        words = [verb, self._source, f"bucket://{out}", *more, *(["--resume"] if resume else []), "-q"]
        watch = [temporary, out, out.with_name(".out.lock"), self._source]
        return self._zygote.start(temporary, *words, script=_SCRIPT, watch=watch, hook=hook)

    def _run(self, name: str, out: Path, resume: bool, at: int | None) -> Ended:
        """Run a command, which is killed before the watched call number ``at``."""

        def kill(run: Run, call: Call) -> None:
            if call.index == at:
                run.send(signal.SIGKILL)

        return self._start(name, out, resume, kill).finish(self._zygote)

    def _is_claimed(self, out: Path) -> bool:
        return (out / _CLAIM).exists()

    def _is_complete(self, out: Path) -> bool:
        return not self._is_claimed(out) and (out / _MANIFEST).exists()

    def _judge_state(self, ended: Ended, out: Path, name: str) -> list[Violation]:
        """Judge what a killed run has left: no reader takes it for a result unless it is one."""
        if ended.hung:
            return [Violation("b-hung", ended.said)]
        if not out.exists() or self._is_complete(out):
            return []
        read = self._zygote.run(self._area / "tmp", "verify", f"bucket://{out}", "-q", script=_SCRIPT)
        files = {n: c for n, c in _read_files(out).items() if not n.startswith(".fastshard/")}
        if read.code == 0 and files != self._expected[name]:
            return [Violation("b-readable", f"{sorted(files)}: {read.said}")]
        return []

    def _judge_end(self, last: Ended | None, out: Path, name: str) -> list[Violation]:
        if last is not None and last.code:
            return [Violation("b-hung" if last.hung else "b-resume", f"{last.code}: {last.said}")]
        found = _read_files(out)
        if own := [path for path in found if path.startswith(".fastshard/")]:
            return [Violation("b-leavings", ", ".join(own))]
        if found != self._expected[name]:
            names = sorted(found.keys() ^ self._expected[name].keys())
            return [Violation("b-differs", f"names {names}" if names else "contents")]
        verified = self._zygote.run(self._area / "tmp", "verify", f"bucket://{out}", "-q", script=_SCRIPT)
        return [Violation("b-resume", verified.said)] if verified.code else []


def main() -> int:
    """Exit code 1 if an invariant was violated."""
    arguments = options(__doc__ or "", 200).parse_args()
    if missing := unavailable():
        print(f"no instants at system calls: {missing}", file=sys.stderr)
        return 0

    def prepare(zygote: Zygote, folder: Path) -> Trials:
        return BucketKills(zygote, folder, arguments)

    return drive(arguments, arguments.count, prepare)


if __name__ == "__main__":
    sys.exit(main())
