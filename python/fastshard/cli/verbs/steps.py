"""``fastshard steps``: every step of a run, and a verdict on each."""

from __future__ import annotations

import argparse
from functools import partial
from time import sleep as wait
from typing import Any

from ...common import codes
from ...common.errors import FastshardError
from ...common.formatting import counted
from ...common.json_text import compact
from ...common.options import Against, Source, Vocabulary, table
from ...common.records import asdict
from ...verification.follow_run import REST, RunFollower, run_command
from ...verification.run_steps import (
    RunStep,
    RunSteps,
    describe,
    list_newest_findings,
    refresh_trackers,
)
from ...verification.run_steps import steps as list_steps
from ...verification.tracker_repair import TrackerChange, fix_trackers
from ..render import human, printable
from ..render import table as format_table
from ..shared_arguments import add_common, add_exit_zero, add_gate, add_options, opening
from ..std_streams import Streams
from ..verb import Outcome, Result, Verb

#: Minimum and maximum seconds between two checks of a run.
_SHORTEST_WAIT, _LONGEST_WAIT = 0.5, 30.0


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ckpt", metavar="RUN", help="run directory that holds the steps")
    parser.add_argument("--verify", action="store_true", help="read all data of each step")
    parser.add_argument(
        "--state",
        metavar="DIR",
        help="with --verify: keep manifests of verified steps here, and read only steps whose files changed",
    )
    parser.add_argument(
        "--fix-tracker",
        action="store_true",
        help="point tracker files (latest, latest_checkpointed_iteration.txt) at the newest complete step",
    )
    following = parser.add_argument_group("following a run")
    following.add_argument(
        "--follow",
        action="store_true",
        help="wait for new steps, check each when its save is complete, and print a line for each; stop "
        "with Ctrl-C",
    )
    following.add_argument(
        "--rest",
        type=float,
        metavar="SECONDS",
        help="treat a step that no tracker file names as saved when its files have not changed for this long "
        "(default: 60)",
    )
    following.add_argument(
        "--exec",
        dest="command_on_error",
        metavar="CMD",
        help="run a shell command for each step with errors; FASTSHARD_STEP, FASTSHARD_CODE, "
        "FASTSHARD_MESSAGE and FASTSHARD_FILE describe the first error",
    )
    group = parser.add_argument_group("source")
    add_options(group, Source, Vocabulary, Against, only=_OF_STEPS)
    # Every step is judged.
    parser.set_defaults(step=None)
    add_gate(parser)
    add_common(parser, run=False)
    add_exit_zero(parser)


#: Options of :func:`fastshard.open` that apply to every step.
_OF_STEPS = (table(Source).keys() - {"step"}) | table(Vocabulary).keys() | table(Against).keys()


def _run(a: argparse.Namespace) -> Outcome:
    options = {"verify": a.verify, "state": a.state, "memory": a.memory, **opening(a)}
    if a.follow:
        return _follow(a, options)
    if a.rest is not None or a.command_on_error is not None:
        raise FastshardError.of(codes.USAGE, "--rest and --exec need --follow", help="pass --follow too")
    steps = list_steps(a.ckpt, **options)
    changes: list[TrackerChange] = []
    if a.fix_tracker:
        changes = fix_trackers(steps)
        steps = refresh_trackers(steps)
    document = steps.to_dict()
    if changes:
        document["tracker_changes"] = [asdict(change) for change in changes]
    text = "\n".join([_format(steps), *map(_describe_change, changes)])
    return Result(text, document, reason=describe(steps)), list_newest_findings(steps)


def _follow(a: argparse.Namespace, options: dict[str, Any]) -> Outcome:
    """Print a line for each new step until a signal arrives, or the reader of the output ends."""
    if a.fix_tracker:
        raise FastshardError.of(
            codes.USAGE,
            "--follow cannot be combined with --fix-tracker",
            help="leave out one of these options",
        )
    is_json, streams, judged = a.output_format == "json", Streams(), 0
    rest = REST if a.rest is None else a.rest
    try:
        follower = RunFollower(a.ckpt, rest=rest, **options)
        while True:
            for followed in follower.follow_once():
                judged += 1
                line = compact(followed.to_dict()) if is_json else printable(followed.describe())
                if not streams.write(partial(print, line)):
                    return Result(), []
                if a.command_on_error is not None and followed.finding is not None:
                    code = run_command(a.command_on_error, followed)
                    if code:
                        streams.say(f"the --exec command ended with exit code {code}")
            wait(min(max(rest / 4, _SHORTEST_WAIT), _LONGEST_WAIT))
    except KeyboardInterrupt:
        # A signal is how it ends. Each line of JSON is a document, and no other follows.
        if is_json:
            a.output_format, a.quiet = "text", 1
        return Result(reason=f"{counted(judged, 'step')} judged", word="ENDED"), []


def _describe_change(change: TrackerChange) -> str:
    if not change.changed:
        return f"{change.file} names {change.before} already"
    return f"{change.file} names {change.after} now; it was {change.before}"


def _format(steps: RunSteps) -> str:
    rows = [("STEP", "VERDICT", "SIZE", "SAVED (UTC)", "")]
    rows += [(s.name, s.verdict, human(s.bytes), _date(s), _note(s, steps)) for s in steps.steps]
    return format_table(rows, indent="", right=("SIZE",))


def _date(step: RunStep) -> str:
    return "-" if step.saved is None else step.saved[:16].replace("T", " ")


def _note(step: RunStep, steps: RunSteps) -> str:
    """Describe what is special about a step: the newest complete one, a tracker's, or its first error."""
    notes = ["newest complete"] if step is steps.newest_complete else []
    notes += [f"in {file}" for file in step.trackers]
    if step.finding is not None:
        notes.append(f"{step.finding.code}: {step.finding.headline}")
    return ", ".join(notes)


STEPS = Verb(
    name="steps",
    help="list the steps of a run and check each",
    description="""\
        Lists the steps of a run, oldest first, and judges each by its headers: complete, incomplete (files
        or tensors are missing), broken, unfinished (the save did not finish) or unreadable. --verify reads
        all data. Nothing in RUN is written, except tracker files with --fix-tracker. The exit code is 0 if
        the newest step is complete, else that of its findings.""",
    arguments=_arguments,
    run=_run,
    finds=True,
    often=("--verify", "--state", "--fix-tracker", "--follow", "--json"),
    examples=("fastshard steps run",),
)
