"""``fastshard COMMAND ...``: parses, runs, prints, and turns findings into exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from .. import budget
from ..convert import told
from ..errors import FastshardError, Finding, error_for, exit_code, published
from ..options import meant
from . import render
from .parser import UsageError, build, flags
from .stopping import Stopping
from .streams import Streams, prepare
from .verb import Result, Verb
from .verbs import VERBS

_WHAT = {1: "problems found", 2: "could not run", 3: "incomplete"}


def main(argv: Sequence[str] | None = None, verbs: Iterable[Verb] = VERBS) -> int:
    """Runs the command line and returns its exit code; without ``argv`` the process ends with it."""
    prepare()
    with Stopping(last=argv is None) as stopping:
        run = _Run(sys.argv[1:] if argv is None else argv, stopping, verbs)
        try:
            code = run.command()
        except KeyboardInterrupt as stopped:
            code = run.stopped(stopped)
    return code


def parse(argv: Sequence[str], verbs: Iterable[Verb]) -> argparse.Namespace:
    """Parses the command line; paths may stand before, between and after the flags.

    Raises:
        UsageError: if it cannot be parsed.
    """
    parser = build(verbs, argv)
    arguments, rest = parser.parse_known_args(argv)
    if rest and hasattr(arguments, "ckpt") and not any(word.startswith("-") for word in rest):
        # argparse gives the first run of paths to CKPT and OUT; the last path of all is OUT.
        paths = [*arguments.ckpt, *([arguments.out] if hasattr(arguments, "out") else []), *rest]
        if hasattr(arguments, "out"):
            arguments.out = paths.pop()
        arguments.ckpt = paths
    elif rest:
        suggestion = _suggestion(arguments.command, rest, verbs)
        parser.error(f"unrecognized arguments: {' '.join(rest)}{suggestion}")
    return arguments


def _suggestion(command: str, rest: list[str], verbs: Iterable[Verb]) -> str:
    """What an unknown flag may have been meant for."""
    flag = next((word.partition("=")[0] for word in rest if word.startswith("--")), None)
    if flag is None:
        return ""
    parser = build(verbs)
    takers = [verb.name for verb in verbs if flag in flags(parser, verb.name)]
    # It is no slip of the pen: the nearest of this command's would be something else.
    return f"; it is of {', '.join(takers)}" if takers else meant(flag, flags(parser, command))


class _Run:
    """One run of a command: what is known of it, and how it is told."""

    def __init__(self, argv: Sequence[str], stopping: Stopping, verbs: Iterable[Verb]) -> None:
        self._argv = argv
        self._stopping = stopping
        self._verbs = {verb.name: verb for verb in verbs}
        self._streams = Streams()
        self._arguments = argparse.Namespace(command=None, json="--json" in argv)

    def command(self) -> int:
        """Parses and carries out.

        Raises:
            KeyboardInterrupt: for Ctrl-C and SIGTERM.
        """
        try:
            if not self._streams.write(self._parse):
                return self._ended(0)
            a = self._arguments
            verb = self._verbs[a.command]
            with budget.of(getattr(a, "memory", None)):
                result, findings = verb.run(a)
        except SystemExit as ended:
            # --help and --version.
            return self._ended(ended.code if isinstance(ended.code, int) else 0)
        except UsageError as error:
            return self._usage(error)
        except FastshardError as error:
            return self._tell(None, error.findings, error.exit_code)
        except Exception as error:
            return self._failed(error)
        return self._tell(result, findings, exit_code(findings) if verb.judges else 0)

    def stopped(self, error: KeyboardInterrupt) -> int:
        """Says what is left of a run that a signal stopped; its exit code."""
        code = 128 + getattr(error, "number", signal.SIGINT)
        # Between the end of a write and its use no exception carries what it came to.
        findings: list[Finding] = getattr(error, "findings", []) or (
            told() if self._destination is not None else []
        )
        if not findings:
            findings = [Finding.of("FS510", "stopped by the user", help=self._nothing_begun())]
        return self._tell(None, findings, code)

    def _parse(self) -> None:
        try:
            self._arguments = parse(self._argv, self._verbs.values())
        except SystemExit:
            # What was printed fails only now, if it does.
            sys.stdout.flush()
            raise

    def _nothing_begun(self) -> str | None:
        if self._destination is None:
            return None
        return "nothing was published, and nothing is left of it: run it again"

    @property
    def _verb(self) -> Verb | None:
        return self._verbs.get(self._arguments.command)

    @property
    def _destination(self) -> str | None:
        """Where the result is published; None for commands that publish none."""
        return self._verb.publishes(self._arguments) if self._verb else None

    def _usage(self, error: UsageError) -> int:
        if self._arguments.json:
            verb = next((word for word in self._argv if not word.startswith("-")), None)
            self._arguments.command = verb if verb in self._verbs else None
            return self._tell(None, [Finding.of("FS515", str(error))], 2)
        self._streams.write(lambda: error.parser.print_usage(sys.stderr), "stderr")
        self._streams.say(f"{error.parser.prog}: error: {render.printable(str(error))}")
        return 2

    def _failed(self, error: Exception) -> int:
        """Something that no part of the program expected: still a finding and not a traceback."""
        if isinstance(error, OSError):
            finding = Finding.of("FS507", error.strerror or str(error), file=_text(error.filename))
        elif isinstance(error, MemoryError):
            finding = Finding.of("FS512", "the system has no memory left", help="lower --memory or --threads")
        else:
            # Of all runs only these need it.
            import traceback

            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(at.filename)}:{at.lineno}"  # noqa: PTH119 - a name, not a path
            told = " ".join(str(error).split())
            finding = Finding.of(
                "FS520",
                f"{type(error).__name__}: {told} ({where})",
                help="a defect of fastshard: please report it; -v prints where it was raised",
            )
            if getattr(self._arguments, "verbose", 0):
                self._streams.say(render.printable("".join(traceback.format_exception(error)), keep="\n"))
        found = error_for([finding, *getattr(error, "findings", [])])
        return self._tell(None, found.findings, found.exit_code)

    def _tell(self, result: Result | None, findings: list[Finding], code: int) -> int:
        """Prints the result on stdout and findings on stderr; the exit code, with what could not be printed."""
        # All is done: a signal while it is told would cut it in half, or tell it twice.
        self._stopping.done()
        a, verb, to = self._arguments, self._verb, self._destination
        out = to if result and to is not None else published(findings)
        not_proven = (
            verb.not_proven(findings) if result and result.proof and verb and verb.not_proven else None
        )
        if a.json:
            document: dict[str, Any] = {"command": a.command, "exit_code": code}
            if to is not None:
                document["published"] = out is not None
            document |= result.document if result else {}
            if not_proven is not None:
                document["not_proven"] = not_proven
            document["findings"] = [f.to_dict() for f in findings]
            self._streams.write(lambda: render.print_json(document))
        elif result and result.text and not (getattr(a, "quiet", 0) and verb and verb.silent):
            # Which of several steps it is comes before all that is said of it.
            lines = [render.printable(f.message) for f in findings if f.code == "FS112"]
            lines.append(render.printable(result.text, keep="\n"))
            if not_proven is not None:
                lines.append(f"not proven: {not_proven}")
            self._streams.write(lambda: print("\n".join(lines)))
        if not a.json:
            verbose, quiet = getattr(a, "verbose", 0), getattr(a, "quiet", 0)
            self._streams.write(
                lambda: render.print_findings(findings, verbose=verbose, quiet=quiet), "stderr"
            )
            if code:
                what = _WHAT.get(code, "stopped by the user")
                self._streams.say(f"fastshard: {what}{self._outcome(out, findings)}")
        return self._ended(code, out)

    def _outcome(self, out: str | None, findings: list[Finding]) -> str:
        if out is not None:
            return f"; the result is published at {render.printable(out)}"
        # After a defect nobody knows; its finding says where to look.
        if self._destination is None or any(f.code == "FS520" for f in findings):
            return ""
        return "; nothing was published"

    def _ended(self, code: int, out: str | None = None) -> int:
        """The exit code; 2 if something could not be printed, which is said."""
        if self._streams.lost is None:
            return code
        done = f"; the result is published at {render.printable(out)}" if out is not None else ""
        self._streams.say(f"fastshard: {self._streams.lost}{done}")
        return code if code > 128 else 2


def _text(name: object) -> str | None:
    return os.fsdecode(name) if isinstance(name, (str, bytes)) else None
