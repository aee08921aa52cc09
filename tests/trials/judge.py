"""The invariants of publishing, and what each of them says of a run that has ended.

===========
=====================================================================================================
a-mixed      OUT is neither the old result nor the new one, entire
a-lost       the old result is gone, and nothing is in its place
a-replaced   the old result was replaced although the run was not told to
a-changed    a run that published nothing changed OUT
b-lost       a file (or directory) that fastshard did not write is nowhere any more
b-unnamed    it survives only where no message says
b-replaced   OUT held something foreign when the run began, and was replaced nevertheless
c-exit0      exit 0, and the new result is not at OUT
c-nothing    "this run wrote nothing to OUT", and it was
c-published  "published", and it was not
c-silent     the run failed after it had published, and no word says that it had
c-signal     the exit code is neither 128 + the signal's number nor that of another outcome
c-json       ``--json``, and standard output is not one object that says the exit code
c-list       a refusal that does not say what would be lost
c-resume     stopped by a signal with something to resume, and no word of --resume
old-code     stopped by a signal, with exit code 2 or killed by SIGTERM, as earlier versions were
d-refused    nothing was foreign, and ``--resume`` of an interrupted run is refused
x-refused    nothing was foreign, and ``--overwrite`` of a good result is refused
e-litter     a successful run left something beside OUT that it did not name
f-code       an exit code that is not documented, or death by a signal of its own making
f-traceback  a traceback or a panic
f-path       an error that names no path
f-hang       no end within a minute
g-source     a source was changed
===========
=====================================================================================================
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path

import trees
from runner import Ended, Run
from scenarios import staging
from trees import Foreign, State, Tree

DOCUMENTED = (0, 1, 2, 3, 130, 143)
_NOTHING = re.compile(r"\b(?:published|wrote)\s+nothing\b", re.I)
#: Words that speak of publishing without saying that it was done.
_NOT_DONE = re.compile(
    r"\b(?:not(?: yet)?|never|half|un|(?:before|until|unless|when|once) (?:\w+ ){0,3}(?:is|was|been)|to "
    r"be|can only be|be) ?-?published"
    r"|\bpublished (?:nothing|last|file|result'?s?)\b|\"written\": (?:false|null)",
    re.I,
)
_DONE = re.compile(r"\bpublished\b|\"written\": true|\bFS519\b|\bthe result at \S+ is complete\b")
#: A finding with a path, relative to a source or not, in text and in JSON.
_PATH = re.compile(r"^error FS\d+: \S*[\w-][./]\w\S*: |^error FS\d+: latest: |\"file\": \"", re.M)
TRACE = re.compile(r"Exception ignored in|Traceback \(most recent call last\)|panicked at|Fatal Python error")


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold, and how that shows."""

    kind: str
    detail: str


@dataclass
class Trial:
    """One destination through one or several runs."""

    area: Path
    known: dict[str, Tree]
    overwrite: bool
    #: The destination is a mount point: the result comes file by file.
    inside: bool = False
    foreign: list[Foreign] = field(default_factory=list)
    #: Everything that the runs have printed so far.
    said: str = ""
    found: list[Violation] = field(default_factory=list)

    @property
    def out(self) -> Path:
        """The destination."""
        return self.area / "out"

    def send(self, run: Run, number: int, before: Before) -> None:
        """Sends a signal to a run that lives, once, and notes how far the run had come."""
        if before.sent is None and run.alive():
            before.holding = run.holds(self.area)
            before.begun = before.holding or run.catches(signal.SIGTERM) or staging(self.area) != before.left
            before.sent = number
            run.send(number)

    def look(self) -> State:
        """What is at the destination now."""
        own = ".fastshard-" if self.inside else None
        return trees.state(self.out, self.known, self.foreign, own)

    def violated(self, kind: str, detail: str) -> None:
        """Notes a violation; one of a kind is enough for a trial."""
        if not any(v.kind == kind for v in self.found):
            self.found.append(Violation(kind, detail))


@dataclass
class Before:
    """What stood when a run began, and what was done to it."""

    state: State
    #: How many of the trial's foreign things were there already.
    foreign: int
    resume: bool = False
    #: Staging folders that were there when it began.
    left: list[Path] = field(default_factory=list)
    #: Signal that was sent while the process lived.
    sent: int | None = None
    #: True if by then the run had shown that it had begun: a file of the destination's, or a handler of its
    #: own.
    begun: bool = False
    #: True if by then it had a file of the destination's open.
    holding: bool = False
    #: True if something was done to the run (a fault, a delay).
    disturbed: bool = False
    #: True if a fault lasted, so that what was done could not be undone.
    stuck: bool = False
    #: True if nothing could be printed.
    mute: bool = False


def judge(trial: Trial, ended: Ended, before: Before) -> State:
    """Adds what a run violated to the trial, and returns what is at the destination now."""
    after = trial.look()
    trial.said += ended.said
    published = after.kind == "new" and before.state.kind != "new"
    _destination(trial, ended, before, after, published)
    _survival(trial, ended, before, published)
    _words(trial, ended, before, after, published)
    _refusals(trial, ended, before, after)
    _manners(trial, ended, before)
    return after


def _destination(trial: Trial, ended: Ended, before: Before, after: State, published: bool) -> None:
    allowed = {before.state.kind, "new"}
    if before.state.kind in ("absent", "empty"):
        # The user may have made the folder, or a file in it.
        allowed |= {"empty"} if len(trial.foreign) > before.foreign or before.state.kind == "empty" else set()
        allowed |= {"partial"} if trial.inside else set()
    if after.kind not in allowed:
        kind = "a-lost" if after.kind in ("absent", "empty") else "a-mixed"
        trial.violated(
            kind, f"OUT was {before.state.kind} and is {after.kind} (exit {ended.code}): {after.detail}"
        )
    elif published and before.state.kind == "old" and not trial.overwrite:
        trial.violated("a-replaced", f"the old result was replaced (exit {ended.code})")
    elif ended.code in (1, 2, 3) and not published and not (after.kind == "partial" and before.stuck):
        rest, hidden = trees.without(after.raw or {}, trial.foreign)
        was, _ = trees.without(before.state.raw or {}, trial.foreign)
        changed = sorted(n for n in rest.keys() | was.keys() if rest.get(n) != was.get(n) and n not in hidden)
        # A run that stages inside may keep its folder, to be resumed.
        changed = [n for n in changed if not (trial.inside and n.startswith(".fastshard-"))]
        if changed:
            trial.violated("a-changed", f"exit {ended.code}, and OUT changed: {', '.join(changed[:4])}")


def _survival(trial: Trial, ended: Ended, before: Before, published: bool) -> None:
    held = [str(f) for f in trial.foreign[: before.foreign] if f.counts]
    if published and before.state.kind == "old" and held:
        trial.violated("b-replaced", f"OUT held {', '.join(held)} and was replaced (exit {ended.code})")
        trial.foreign = trial.foreign[before.foreign :]
        before.foreign = 0
    for thing in (f for f in trial.foreign if f.counts):
        # With a run that was killed, the folder that holds it is named by the one that resumes.
        where = _find(trial.area, trial.out, thing)
        if not where:
            trial.violated("b-lost", f"{thing} is gone (exit {ended.code})")
        elif trial.out / thing.path not in where and ended.code >= 0 and not _named(where, trial):
            trial.violated(
                "b-unnamed", f"{thing} is in {where[0]}, which no message names (exit {ended.code})"
            )


def _find(area: Path, out: Path, thing: Foreign) -> list[Path]:
    """Where a foreign thing is: at its place in OUT, or below any folder of the trial."""
    parts = Path(thing.path)
    if thing.content is None:
        found = [p for p in area.rglob(parts.name) if p.is_dir() and str(p).endswith(f"/{thing.path}")]
    else:
        size = len(thing.content)
        files = (
            p for p in area.rglob("*") if p.is_file() and not p.is_symlink() and p.stat().st_size == size
        )
        found = [p for p in files if p.read_bytes() == thing.content]
    return sorted(found, key=lambda p: p != out / thing.path)


def _named(where: list[Path], trial: Trial) -> bool:
    folders = {
        str(p) for path in where for p in (path, *path.parents) if p != trial.out and trial.area in p.parents
    }
    return any(folder in trial.said for folder in folders)


def _words(trial: Trial, ended: Ended, before: Before, after: State, published: bool) -> None:
    said, code = ended.said, ended.code
    done = bool(_DONE.search(_NOT_DONE.sub("", said)))
    words = shown(ended)
    if code == 0 and after.kind != "new":
        trial.violated("c-exit0", f"exit 0, and OUT is {after.kind}: {after.detail or words}")
    if published and _NOTHING.search(said):
        trial.violated("c-nothing", f"exit {code}, the new result is at OUT: {words}")
    if done and after.kind != "new":
        trial.violated("c-published", f"exit {code}, OUT is {after.kind}: {words}")
    if published and code > 0 and not done:
        trial.violated("c-silent", f"exit {code}, the new result is at OUT: {words}")
    if before.sent in (signal.SIGINT, signal.SIGTERM) and code != 0:
        _signalled(trial, ended, before, after, before.sent)


def _signalled(trial: Trial, ended: Ended, before: Before, after: State, sent: int) -> None:
    code, begun = ended.code, before.begun or staging(trial.area) != before.left
    if code == 128 + sent:
        # Of what an earlier run left, a run knows only from when it takes it over.
        left = [p for p in staging(trial.area) if before.holding or p not in before.left]
        # After publishing there is nothing to resume: what is left has to be named.
        left = [p for p in left if after.kind != "new" or str(p) not in ended.said]
        if left and "--resume" not in ended.said:
            trial.violated("c-resume", f"exit {code}: {shown(ended)}")
    elif code == -sent:
        # Before its own handler is there, a process can only die by the signal, which a shell shows as 128 +
        # it. After the last word it is Python that dies, while it cleans up.
        over = after.kind == "new" and bool(ended.out.strip())
        if begun and not over:
            trial.violated("old-code", f"killed by {signal.Signals(sent).name}, without a word")
    elif code == 2 and "FS510" in ended.said:
        trial.violated("old-code", f"{signal.Signals(sent).name}: exit 2")
    elif not (code in (1, 2, 3) and (trial.foreign or before.disturbed or before.state.kind != "absent")):
        trial.violated("c-signal", f"{signal.Signals(sent).name}: exit {code}: {shown(ended)}")


def _refusals(trial: Trial, ended: Ended, before: Before, after: State) -> None:
    if ended.code not in (1, 2, 3) or before.sent is not None or before.disturbed:
        return
    held = [f for f in trial.foreign[: before.foreign] if f.counts]
    mayrun = trial.overwrite or before.state.kind in ("absent", "empty")
    if not trial.foreign and mayrun and (before.resume or not before.left):
        kind = "d-refused" if before.resume else "x-refused"
        trial.violated(kind, f"exit {ended.code}, OUT is {after.kind}: {shown(ended)}")
    if held and trial.overwrite and "FS504" in ended.said and before.state.kind == "old":
        unnamed = [
            str(f)
            for f in held
            if Path(f.path).name not in ended.said and f.path.split("/")[0] not in ended.said
        ]
        if unnamed:
            trial.violated("c-list", f"{', '.join(unnamed)} would be lost: {shown(ended)}")


def _manners(trial: Trial, ended: Ended, before: Before) -> None:
    code, said = ended.code, ended.said
    if ended.hung:
        trial.violated("f-hang", f"no end after {ended.seconds:.0f} s")
        return
    killed = before.sent is not None and code == -before.sent
    if code not in DOCUMENTED and not killed:
        name = signal.Signals(-code).name if code < 0 else str(code)
        trial.violated("f-code", f"{name}: {shown(ended)}")
    # A signal that comes while the interpreter starts or ends is answered by Python, not by the program.
    pythons = before.sent == signal.SIGINT and (not before.begun or "Exception ignored in: <module" in said)
    # Until the command line takes signals over, the program ends without a word.
    early = before.sent is not None and code == 128 + before.sent and not said.strip() and not before.holding
    if (trace := TRACE.search(said)) and not pythons:
        trial.violated("f-traceback", f"exit {code}: {line(said[trace.start() :])}")
    elif code in (1, 2, 3) and "FS510" not in said and not (pythons or _names_path(trial, said)):
        trial.violated("f-path", f"exit {code}: {shown(ended)}")
    if "--json" in ended.argv and code in DOCUMENTED and not (pythons or early or before.mute):
        _object(trial, ended)
    if code == 0:
        mine = {trial.out, *(trial.out / f.path for f in trial.foreign)}
        left = [p for p in trial.area.iterdir() if p not in mine]
        left += [p for p in (trial.out.iterdir() if trial.out.is_dir() else ()) if ".fastshard-" in p.name]
        unnamed = [p.name for p in left if str(p) not in trial.said]
        if unnamed:
            trial.violated("e-litter", f"{', '.join(unnamed)}: {shown(ended)}")


def _names_path(trial: Trial, said: str) -> bool:
    """True if an error says which file or folder it is about."""
    return bool(_PATH.search(said)) or str(trial.area.parent) in said


def _object(trial: Trial, ended: Ended) -> None:
    """``--json`` prints one object, with the exit code."""
    try:
        document = json.loads(ended.out)
        told = document["exit_code"]
    except (ValueError, KeyError, TypeError) as error:
        trial.violated(
            "c-json", f"exit {ended.code}, standard output is no such object ({error}): {shown(ended)}"
        )
        return
    if told != ended.code:
        trial.violated("c-json", f"exit {ended.code}, and the object says {told}: {shown(ended)}")


def shown(ended: Ended) -> str:
    """What a run printed, in a line."""
    return line(ended.err.strip() or ended.out.strip())


def line(text: str) -> str:
    """A text in one line, its middle left out where it is long."""
    text = " | ".join(line.strip() for line in text.strip().splitlines())
    return repr(text if len(text) < 400 else f"{text[:200]} ... {text[-190:]}")
