"""One run of a command: its execution, its report in the requested format, and its exit code."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from ..common import codes, memory_budget, safe_files
from ..common.addresses import is_address
from ..common.errors import UNPUBLISHED, FastshardError, Finding, error_for, exit_code, published
from ..common.finding_facts import command_of
from ..common.formatting import counted, human
from ..common.log import log_to_stderr
from ..common.records import replace
from ..common.regex import compile_when_used
from ..findings.proof import list_unchecked
from . import output_formats, pager, render, settings, styles
from .parser import UsageError, takes
from .signals import Stopping
from .std_streams import Streams
from .verb import Result, Verb
from .verbs import Verbs
from .verdict import in_a_word, subject, verdict

#: Minimum number of bytes for a meaningful rate.
_WORTH_A_RATE = 100_000_000
#: Maximum number of lines about missing checks without -v.
_UNCHECKED = 2
#: Exit codes that describe a checkpoint.
_FOUND = (1, 3)
#: The address of a repository at a commit.
_AT_COMMIT = compile_when_used(r"^hf://[^@]+@[0-9a-f]{40}(/|$)")


def _named(run: str) -> str:
    """Return the attribute of parsed arguments that a help's option sets."""
    return run.partition(" ")[0].lstrip("-").replace("-", "_")


def _read_counts() -> tuple[int, int]:
    """Return the number of requests for ranges of files in stores, and their bytes, of this process."""
    # Imported only by an address.
    placeholders = sys.modules.get("fastshard.stores.placeholders")
    return (0, 0) if placeholders is None else placeholders.count_requests()


def _count_requests(before: tuple[int, int]) -> dict[str, int]:
    """Count the requests of a run, and their bytes; empty if no store was read."""
    count, nbytes = (now - earlier for now, earlier in zip(_read_counts(), before, strict=True))
    return {"count": count, "bytes": nbytes} if count else {}


class Run:
    """One run of a command, and its report."""

    def __init__(
        self,
        argv: Sequence[str],
        stopping: Stopping,
        verbs: Verbs,
        arguments: argparse.Namespace | None = None,
    ) -> None:
        """Prepare a run; ``arguments`` is None if the command line has not been parsed, or cannot be."""
        self._argv = argv
        self._stopping = stopping
        self._verbs = verbs
        self._streams = Streams()
        self._begun = time.monotonic()
        self._requests_before = _read_counts()
        unparsed = argparse.Namespace(command=None, output_format=output_formats.find_requested_format(argv))
        self._arguments = arguments or unparsed

    def carried_out(self) -> int:
        """Run the command, report the outcome, and return the exit code."""
        try:
            a = self._arguments
            log_to_stderr("debug" if getattr(a, "verbose", 0) > 1 else None)
            verb = self._verbs[a.command]
            if (read := settings.apply(a)) is not None and not getattr(a, "quiet", 0):
                self._streams.say(f"settings: {render.printable(str(read))}")
            settings.apply_environment(a)
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
        """Return findings and exit code of a command that failed."""
        ignore = getattr(self._arguments, "ignore", ())
        if ignore and error.published is None:
            from ..common.gate import Gate

            try:
                Gate.of(ignore=ignore).evaluate(error.findings)
            except FastshardError as misused:
                return misused.findings, misused.exit_code
        return [self._not_out(f) for f in error.findings], self._code(error.exit_code)

    def _not_out(self, finding: Finding) -> Finding:
        """Change the help of a finding about the last path, if the user may have meant it as OUT.

        This concerns commands without OUT. Other findings stay unchanged.
        """
        given = getattr(self._arguments, "ckpt", None)
        verb = self._verb
        if (
            finding.code != codes.NO_SUCH_PATH
            or verb is None
            or not isinstance(given, list)
            or len(given) < 2
        ):
            return finding
        path = str(given[-1])
        if finding.file != path or getattr(self._arguments, "out", None) is not None:
            return finding
        if hasattr(self._arguments, "output"):
            import shlex

            words = shlex.join([str(word) for word in given[:-1]])
            run = f"fastshard {verb.name} {words} -o {shlex.quote(path)}"
            return finding.replace(help="pass the output file with -o", run=[run])
        return finding.replace(
            help=f"leave out {path} if you meant it as OUT: {verb.name} writes nothing and takes no OUT"
        )

    def _code(self, code: int) -> int:
        """Return the exit code for the findings; 0 with ``--exit-zero``."""
        return 0 if code in _FOUND and getattr(self._arguments, "exit_zero", False) else code

    def stopped(self, error: KeyboardInterrupt) -> int:
        """Report the leftovers of a run that a signal stopped, and return its exit code."""
        code = 128 + getattr(error, "number", signal.SIGINT)
        findings: list[Finding] = getattr(error, "findings", [])
        if not findings and self._destination is not None:
            from ..conversion.convert import get_last_outcome

            # Between the end of a write and its use no exception carries what it came to.
            findings = get_last_outcome()
        if not findings:
            findings = [Finding.of(codes.INTERRUPTED, "stopped by the user", help=self._nothing_begun())]
        return self._tell(None, findings, code)

    def misused(self, error: UsageError) -> int:
        """Report an error in the command line, and return its exit code."""
        if self._arguments.output_format != "text":
            word = next((word for word in self._argv if not word.startswith("-")), "")
            self._arguments.command = word if word in self._verbs else None
            run = [error.run] if error.run is not None else []
            help_ = "run this command" if run else None
            return self._tell(None, [Finding.of(codes.USAGE, str(error), help=help_, run=run)], 2)
        self._streams.say(f"{error.parser.prog}: error: {render.printable(str(error))}")
        help_ = (
            render.printable(error.run) if error.run else f"{error.parser.prog} --help lists {error.lists}"
        )
        self._streams.say(f"  help      {help_}")
        return 2

    def _nothing_begun(self) -> str | None:
        if self._destination is None:
            return None
        return "run the command again; this run left nothing behind"

    @property
    def _verb(self) -> Verb | None:
        name = self._arguments.command
        return self._verbs[name] if name is not None else None

    @property
    def _destination(self) -> str | None:
        """Path of the published result; None for commands that publish none."""
        return self._verb.publishes(self._arguments) if self._verb else None

    def _failed(self, error: Exception) -> int:
        """Report an unexpected error as a finding instead of a traceback."""
        if isinstance(error, OSError):
            finding = safe_files.system_finding(error, _text(error.filename), "a system call failed")
        elif isinstance(error, MemoryError):
            finding = Finding.of(
                codes.MEMORY_BUDGET, "the system is out of memory", help="lower --memory or --threads"
            )
        else:
            # Of all runs only these need it.
            import traceback

            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(at.filename)}:{at.lineno}"  # noqa: PTH119 - a name, not a path
            message = " ".join(str(error).split())
            finding = Finding.of(
                codes.INTERNAL,
                f"{type(error).__name__}: {message} ({where})",
                help="report this bug in fastshard; -v prints where the error was raised",
            )
            if getattr(self._arguments, "verbose", 0):
                self._streams.say(render.printable("".join(traceback.format_exception(error)), keep="\n"))
        found = error_for([finding, *getattr(error, "findings", [])])
        return self._tell(None, found.findings, found.exit_code)

    def _tell(self, result: Result | None, findings: list[Finding], code: int) -> int:
        """Print the result on stdout and findings on stderr.

        The function returns the exit code, which accounts for failed output.
        """
        # All is done: a signal while it is told would cut it in half, or tell it twice.
        self._stopping.done()
        a, to = self._arguments, self._destination
        findings = [self._runs_here(finding) for finding in findings]
        out = to if result and to is not None else published(findings)
        verbose, quiet = getattr(a, "verbose", 0), getattr(a, "quiet", 0)
        requests = _count_requests(self._requests_before)
        if requests and verbose:
            self._streams.say(f"stores: {counted(requests['count'], 'request')}, {human(requests['bytes'])}")
        report = output_formats.RunReport(
            command=a.command,
            arguments=list(self._argv),
            code=code,
            findings=findings,
            document=(result.document if result else {}) | ({"requests": requests} if requests else {}),
            written=None if to is None else out is not None,
            verdict=in_a_word(code, findings, result.word if result else None),
            not_checked=self._list_unchecked(result, findings) or (),
            # After an error nobody asks what else could be wrong.
            not_checked_with_advice=None
            if code
            else self._list_unchecked(result, findings, with_advice=True),
            seconds=time.monotonic() - self._begun,
            verbose=verbose,
            quiet=quiet,
        )
        ending = verdict(
            subject(a),
            code,
            findings,
            word=result.word if result else None,
            reason=result.reason if result else "",
            outcome=self._outcome(out, findings) if code else "",
        )
        if getattr(a, "summary", None) is not None:
            self._summarised(output_formats.as_markdown(report, ending), a.summary)
        document = output_formats.DOCUMENTS.get(a.output_format)
        if document is not None:
            self._streams.write(lambda: sys.stdout.write(document(report)))
            if a.output_format != "json":
                self._print_findings(report, "stderr")
        elif a.output_format == "github":
            text = self._text(result, report)
            if text is not None:
                self._streams.write(lambda: print(output_formats.without_commands(text)))
            self._streams.write(lambda: sys.stdout.write(output_formats.as_annotations(report)))
        else:
            self._as_text(result, report, ending)
            return self._ended(code, out)
        if code and a.output_format != "json":
            self._streams.say(ending)
        return self._ended(code, out)

    def _summarised(self, text: str, path: str) -> None:
        try:
            safe_files.append(path, text)
        except OSError as error:
            self._streams.lost = f"{render.printable(path)} cannot be written to: {error.strerror}"

    def _text(self, result: Result | None, report: output_formats.RunReport) -> str | None:
        """Return the result as text; None if there is none, or if it must not be printed."""
        verb = self._verb
        if not result or not result.text or (report.quiet and verb and verb.silent and not result.product):
            return None
        # Which of several steps it is comes before all that is said of it.
        steps = [] if result.product else [f.message for f in report.findings if f.code == codes.STEP_TAKEN]
        return "\n".join([*map(render.printable, steps), render.printable(result.text, keep="\n")])

    def _as_text(self, result: Result | None, report: output_formats.RunReport, ending: str) -> None:
        """Print the result, findings and the verdict; all on stdout if they are the verb's output."""
        verb, text = self._verb, self._text(result, report)
        if text is not None:
            say = pager.show if result and result.paged else print
            shown = styles.headed(text, styles.painter(sys.stdout, self._color))
            self._streams.write(lambda: say(shown))
        if text is not None and verb is not None and verb.silent and (self._is_watched or _size(result)):
            self._streams.say(self._figures(result))
        is_requested = verb is not None and verb.finds and (result is not None or report.code in _FOUND)
        name = "stdout" if is_requested else "stderr"
        tells = result.tells if result and text is not None and not report.verbose else frozenset()
        rest = [f for f in report.findings if f.code not in tells]
        self._print_findings(replace(report, findings=rest), name)
        below = render.printable(result.below, keep="\n") if result and not report.quiet else ""
        lines = [below] if below else []
        # What is broken needs no word about what was not looked at.
        unchecked = (
            report.not_checked
            if report.verbose
            else ()
            if report.quiet or report.code
            else report.not_checked[:_UNCHECKED]
        )
        stream = getattr(sys, name)
        label = styles.painter(stream, self._color)("not checked:", "warn")
        lines += [f"{label} {render.printable(line)}" for line in unchecked]
        if report.code or (is_requested and not report.quiet):
            wrong = report.code or any(finding.severity == "error" for finding in report.findings)
            style = "bad" if wrong else "warn" if " with " in ending else "good"
            lines.append(styles.painter(stream, self._color)(ending, style))
        if lines:
            self._streams.write(lambda: print("\n".join(lines), file=stream), name)

    def _runs_here(self, finding: Finding) -> Finding:
        """Return the finding with help that fits the command and names this checkpoint."""
        if not finding.run:
            return finding
        given = getattr(self._arguments, "ckpt", None)
        paths = [str(path) for path in given] if isinstance(given, list) else []
        # What was asked for already does not help, and an option helps only where a command takes it.
        useful = [run for run in finding.run if not self._is_given(run) and (paths or self._takes(run))]
        return finding.replace(run=[command_of(run, self._taking(run, paths), paths) for run in useful])

    def _taking(self, run: str, paths: list[str]) -> list[str]:
        """Return the words of a command that has the option in a help text.

        This is the user's command, or the first verb that has the option.
        """
        if self._takes(run):
            return ["fastshard", *self._argv]
        option = run.partition(" ")[0]
        verb = next((name for name in ("verify", "merge") if takes(self._verbs[name], option)), "convert")
        return ["fastshard", verb, *paths, *(["OUT"] if verb != "verify" else [])]

    def _takes(self, run: str) -> bool:
        """Return True if a help text is a full command, or an option of the current command."""
        return not run.startswith("-") or hasattr(self._arguments, _named(run))

    def _is_given(self, run: str) -> bool:
        """Return True if the command line already has the option in a help text."""
        given, value = getattr(self._arguments, _named(run), None), run.partition(" ")[2]
        if isinstance(given, (list, tuple, frozenset)):
            return value in map(str, given)
        # A run that was resumed is resumed again.
        return bool(value) and str(given) == value

    @property
    def _is_watched(self) -> bool:
        """True if the progress of the run is visible to a user."""
        return sys.stderr.isatty() and getattr(self._arguments, "progress", "none") != "none"

    def _figures(self, result: Result | None) -> str:
        """Format the seconds, rate and memory of the run."""
        import resource

        seconds = time.monotonic() - self._begun
        size = _size(result)
        rate = [f"{size / seconds / 1e9:.2f} GB/s"] if size else []
        # What the process held at most, mapped files included.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        return ", ".join([f"  {seconds:.1f} s", *rate, f"{peak:,} MiB memory"])

    def _list_unchecked(
        self, result: Result | None, findings: Sequence[Finding], *, with_advice: bool = False
    ) -> Sequence[str] | None:
        """List the checks that could not be made; None for a command that does not report them."""
        if result is None or self._verb is None or not self._verb.tells_unchecked:
            return None
        if with_advice and result.unchecked_with_advice is not None:
            return result.unchecked_with_advice
        if result.unchecked is not None:
            return result.unchecked
        return list_unchecked(findings, with_advice=with_advice)

    def _print_findings(self, report: output_formats.RunReport, name: str) -> None:
        stream = getattr(sys, name)
        paint = styles.painter(stream, self._color)
        self._streams.write(
            lambda: render.print_findings(
                report.findings, verbose=report.verbose, quiet=report.quiet, file=stream, paint=paint
            ),
            name,
        )

    @property
    def _color(self) -> str:
        return getattr(self._arguments, "color", "auto")

    def _ended(self, code: int, out: str | None) -> int:
        return self._streams.ended(
            code, f"; the result at {render.printable(out)} is complete" if out is not None else ""
        )

    def _outcome(self, out: str | None, findings: list[Finding]) -> str:
        if out is not None:
            return f"; the result at {render.printable(out)} is complete"
        # After a defect nobody knows; its finding says where to look.
        if self._destination is None or any(f.code == codes.INTERNAL for f in findings):
            return ""
        if any(f.severity == "error" and _AT_COMMIT.search(f.file or "") for f in findings):
            # A commit of the hub that is made, and is not what it should be.
            return ""
        if is_address(self._destination) and any(f.code == codes.LEFTOVER_RUN for f in findings):
            return f"; the run at {render.printable(self._destination)} is not finished"
        return f"; {UNPUBLISHED.replace('OUT', render.printable(self._destination))}"


def _size(result: Result | None) -> int:
    """Return the bytes of a result if a rate is meaningful; 0 for others."""
    size = result.document.get("bytes") if result else None
    return size if isinstance(size, int) and size > _WORTH_A_RATE else 0


def _text(name: object) -> str | None:
    return os.fsdecode(name) if isinstance(name, (str, bytes)) else None
