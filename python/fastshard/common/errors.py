"""Findings, and the exception hierarchy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import _core
from .._core import Finding
from . import codes
from .stored_places import show_findings

__all__ = [
    "CannotRunError",
    "FastshardError",
    "Finding",
    "IncompleteError",
    "ProblemError",
    "from_core",
    "published",
]


#: Message for a run that ended before its result appeared. Another run may have published one meanwhile.
UNPUBLISHED = "this run wrote nothing to OUT"

#: Names of the exit codes, the same in the terminal and in Python.
VERDICTS = {0: "OK", 1: "BROKEN", 2: "COULD NOT RUN", 3: "INCOMPLETE"}


def exit_code(findings: list[Finding]) -> int:
    """Return the exit code of findings: 0 for success, 1 for problems, 2 for a failure to run, 3 if the
    checkpoint is only incomplete."""
    return _core.exit_code(findings)


class FastshardError(Exception):
    """Base of all errors: an operation was refused or failed.

    ``findings`` lists the reasons, the decisive one first.

    Examples:
        >>> try:
        ...     fastshard.convert("lossy", "out", to="hf")
        ... except fastshard.FastshardError as error:
        ...     print(error.code, error.path, error.exit_code)
        FS101 global_step0/layer_03-model_01-model_states.pt 3
    """

    def __init__(self, findings: list[Finding]) -> None:
        findings = show_findings(findings)
        super().__init__(findings)
        self.findings = findings

    @classmethod
    def of(cls, code: str, message: str, **where: Any) -> FastshardError:
        """Makes an error with one finding; its exit code determines the class."""
        return error_for([Finding.of(code, message, **where)])

    @property
    def exit_code(self) -> int:
        """Exit code of the command line for this error."""
        return exit_code(self.findings) or 2

    @property
    def _first(self) -> Finding:
        return self.findings[0]

    @property
    def code(self) -> str:
        """Code of the first finding."""
        return self._first.code

    @property
    def path(self) -> str | None:
        """File of the first finding."""
        return self._first.file

    @property
    def tensor(self) -> str | None:
        """Tensor of the first finding."""
        return self._first.tensor

    @property
    def rank(self) -> str | None:
        """Rank of the first finding."""
        return self._first.rank

    @property
    def host(self) -> str | None:
        """Host of the first finding."""
        return self._first.host

    @property
    def expected(self) -> str | None:
        """The expected value."""
        return self._first.expected

    @property
    def got(self) -> str | None:
        """The value found."""
        return self._first.got

    @property
    def evidence(self) -> str | None:
        """The source of the expected value."""
        return self._first.evidence

    @property
    def published(self) -> str | None:
        """Path of the result, if it was complete before the error; else None."""
        return published(self.findings)

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            if finding.severity == "error" or finding.code == codes.PUBLISHED:
                lines.append(f"{finding} [{finding.code}]")
                if finding.advice:
                    lines.append(f"  help: {finding.advice}")
        return "\n".join(lines)


class ProblemError(FastshardError):
    """The checkpoint is damaged or contradicts itself (exit code 1).

    Examples:
        >>> fastshard.verify("stale").raise_for_errors()
        Traceback (most recent call last):
            ...
        fastshard.ProblemError: ... [FS401] ...
    """


class CannotRunError(FastshardError):
    """The operation could not run: usage, permission, unsupported or uncheckable input (exit code 2).

    Examples:
        >>> fastshard.open("nowhere")
        Traceback (most recent call last):
            ...
        fastshard.CannotRunError: nowhere: no such file or directory [FS501] ...
    """


class IncompleteError(FastshardError):
    """The checkpoint is incomplete; the missing parts may still arrive (exit code 3).

    Examples:
        >>> fastshard.convert("lossy", "out", to="hf")
        Traceback (most recent call last):
            ...
        fastshard.IncompleteError: global_step0/layer_03-model_01-model_states.pt: the file is missing ...
    """


for _error in (FastshardError, ProblemError, CannotRunError, IncompleteError):
    # As users name them, in tracebacks too.
    _error.__module__ = "fastshard"


def error_for(findings: list[Finding]) -> FastshardError:
    """Return the exception for findings; their exit code determines its class."""
    order = {"error": 0, "warning": 1, "note": 2}
    findings = sorted(findings, key=lambda f: order.get(f.severity, 3))
    classes = {1: ProblemError, 3: IncompleteError}
    return classes.get(exit_code(findings), CannotRunError)(findings)


def from_core(error: _core.CoreError) -> FastshardError:
    """Convert an error of the core into an exception."""
    return error_for([_corrected(finding) for finding in error.args[0]])


def _corrected(finding: Finding) -> Finding:
    """Add help to a finding about a config value that the core refuses; return other findings unchanged."""
    if finding.code != codes.BAD_VALUE or finding.help or not finding.file:
        return finding
    return finding.replace(
        help=f"correct {finding.file}, or pass the config of this model", run=["--config FILE"]
    )


def published(findings: Iterable[Finding]) -> str | None:
    """Return the path of the published result, if a finding reports one (``FS519``)."""
    return next((f.file for f in findings if f.code == codes.PUBLISHED), None)


def carry(error: BaseException, findings: list[Finding]) -> None:
    """Attach findings to the exception that replaces a call's result, as ``findings``."""
    if isinstance(error, FastshardError):
        error.findings += findings
        return
    error.findings = findings  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):
        for finding in findings:
            error.add_note(f"{finding} [{finding.code}]" + (f"; {finding.advice}" if finding.advice else ""))


def raise_errors(findings: list[Finding]) -> None:
    """Raise an exception with all findings if one of them is an error."""
    if any(f.severity == "error" for f in findings):
        raise error_for(findings)
