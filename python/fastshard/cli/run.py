"""One run of a command: carried out, told in the format that is asked for, and its exit code."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from ..common import memory_budget
from ..common.errors import UNPUBLISHED, FastshardError, Finding, error_for, exit_code, published
from . import output_formats, pager, render
from .parser import UsageError
from .signals import Stopping
from .std_streams import Streams
from .verb import Result, Verb
from .verbs import Verbs

_WHAT = {1: "problems found", 2: "could not run", 3: "incomplete"}
#: Exit codes that say something of a checkpoint.
_FOUND = (1, 3)


class Run:
    """One run of a command: what is known of it, and how it is told."""

    def __init__(
        self,
        argv: Sequence[str],
        stopping: Stopping,
        verbs: Verbs,
        arguments: argparse.Namespace | None = None,
    ) -> None:
        """Without ``arguments`` the command line could not be parsed, or was not yet."""
        self._argv = argv
        self._stopping = stopping
        self._verbs = verbs
        self._streams = Streams()
        unparsed = argparse.Namespace(command=None, output_format=output_formats.asked_for(argv))
        self._arguments = arguments or unparsed

    def carried_out(self) -> int:
        """Carries the command out and tells what came of it; the exit code."""
        try:
            a = self._arguments
            verb = self._verbs[a.command]
            with memory_budget.of(getattr(a, "memory", None)):
                result, findings = verb.run(a)
        except KeyboardInterrupt as stopped:
            return self.stopped(stopped)
        except FastshardError as error:
            return self._tell(None, *self._refused(error))
        except Exception as error:
            return self._failed(error)
        return self._tell(result, findings, self._code(exit_code(findings)) if verb.judges(a) else 0)

    def _refused(self, error: FastshardError) -> tuple[list[Finding], int]:
        """Findings and exit code of what could not be done."""
        ignore = getattr(self._arguments, "ignore", ())
        if ignore and error.published is None:
            from ..common.gate import Gate

            try:
                Gate.of(ignore=ignore).judged(error.findings)
            except FastshardError as misused:
                return misused.findings, misused.exit_code
        return error.findings, self._code(error.exit_code)

    def _code(self, code: int) -> int:
        """The exit code for what was found, 0 where somebody only looks."""
        return 0 if code in _FOUND and getattr(self._arguments, "exit_zero", False) else code

    def stopped(self, error: KeyboardInterrupt) -> int:
        """Says what is left of a run that a signal stopped; its exit code."""
        code = 128 + getattr(error, "number", signal.SIGINT)
        findings: list[Finding] = getattr(error, "findings", [])
        if not findings and self._destination is not None:
            from ..conversion.convert import told

            # Between the end of a write and its use no exception carries what it came to.
            findings = told()
        if not findings:
            findings = [Finding.of("FS510", "stopped by the user", help=self._nothing_begun())]
        return self._tell(None, findings, code)

    def misused(self, error: UsageError) -> int:
        """Says what is wrong with a command line; its exit code."""
        if self._arguments.output_format != "text":
            verb = next((word for word in self._argv if not word.startswith("-")), None)
            self._arguments.command = verb if verb in self._verbs else None
            return self._tell(None, [Finding.of("FS515", str(error))], 2)
        self._streams.write(lambda: error.parser.print_usage(sys.stderr), "stderr")
        self._streams.say(f"{error.parser.prog}: error: {render.printable(str(error))}")
        return 2

    def _nothing_begun(self) -> str | None:
        if self._destination is None:
            return None
        return f"{UNPUBLISHED}, and nothing is left of it: run it again"

    @property
    def _verb(self) -> Verb | None:
        name = self._arguments.command
        return self._verbs[name] if name is not None else None

    @property
    def _destination(self) -> str | None:
        """Where the result is published; None for commands that publish none."""
        return self._verb.publishes(self._arguments) if self._verb else None

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
        prove = verb.not_proven if verb and result and result.proof else None
        verbose, quiet = getattr(a, "verbose", 0), getattr(a, "quiet", 0)
        told = output_formats.Told(
            command=a.command,
            arguments=list(self._argv),
            code=code,
            findings=findings,
            document=result.document if result else {},
            published=None if to is None else out is not None,
            not_proven=prove(findings) if prove else None,
            verbose=verbose,
            quiet=quiet,
        )
        github = a.output_format == "github"
        document = output_formats.DOCUMENTS.get(a.output_format)
        if document is not None:
            self._streams.write(lambda: sys.stdout.write(document(told)))
        elif result and result.text and (result.product or not (quiet and verb and verb.silent)):
            # Which of several steps it is comes before all that is said of it.
            lines = (
                [] if result.product else [render.printable(f.message) for f in findings if f.code == "FS112"]
            )
            lines.append(render.printable(result.text, keep="\n"))
            if told.not_proven is not None:
                lines.append(f"not proven: {told.not_proven}")
            text = "\n".join(lines)
            say = pager.show if result.paged and not github else print
            self._streams.write(lambda: say(output_formats.without_commands(text) if github else text))
        if github:
            self._streams.write(lambda: sys.stdout.write(output_formats.as_annotations(told)))
        elif a.output_format != "json":
            self._streams.write(
                lambda: render.print_findings(findings, verbose=verbose, quiet=quiet), "stderr"
            )
        if code and a.output_format != "json":
            what = _WHAT.get(code, "stopped by the user")
            self._streams.say(f"fastshard: {what}{self._outcome(out, findings)}")
        return self._streams.ended(
            code, f"; the result is published at {render.printable(out)}" if out is not None else ""
        )

    def _outcome(self, out: str | None, findings: list[Finding]) -> str:
        if out is not None:
            return f"; the result is published at {render.printable(out)}"
        # After a defect nobody knows; its finding says where to look.
        if self._destination is None or any(f.code == "FS520" for f in findings):
            return ""
        return f"; {UNPUBLISHED}"


def _text(name: object) -> str | None:
    return os.fsdecode(name) if isinstance(name, (str, bytes)) else None
