"""Findings and the one tree of exceptions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from .. import _core

__all__ = [
    "CannotRunError",
    "FastshardError",
    "Finding",
    "IncompleteError",
    "ProblemError",
    "from_core",
    "published",
]


@dataclass(frozen=True)
class Finding:
    """One observation about a checkpoint: what, where, expected, got, what to do.

    ``code`` is stable (``fastshard explain CODE``); ``severity`` is ``error``, ``warning`` or ``note``. ``decided`` says by
    which option it is judged otherwise than by itself: ``accept WHAT``, ``ignore CODE``, ``error CODE``, ``fail_on warning``.
    """

    code: str
    severity: str
    message: str
    file: str | None = None
    rank: str | None = None
    host: str | None = None
    tensor: str | None = None
    expected: str | None = None
    got: str | None = None
    help: str | None = None
    decided: str | None = None

    def __post_init__(self) -> None:
        # Names of files are bytes; those that are no text come with lone surrogates, which no output takes.
        for key, value in vars(self).items():
            if isinstance(value, str) and not value.isascii():
                object.__setattr__(self, key, value.encode("utf-8", "backslashreplace").decode())

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        """A finding from its JSON form."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in data.items() if k in known})

    @classmethod
    def of(cls, code: str, message: str, **where: str | None) -> Finding:
        """A finding with the code's own severity."""
        severity = where.pop("severity", None) or CODES[code]["severity"]
        return cls(code=code, severity=severity, message=message, **where)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, without empty fields."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    def __str__(self) -> str:
        return _core.format_finding(json.dumps(self.to_dict()))


#: What is said of a run that ended before its result appeared. Another run may have published meanwhile.
UNPUBLISHED = "this run published nothing"

#: What nothing inside the files proves, and a manifest that was made where they were written does.
UNPROVEN = ("FS114", "FS314")
#: Row of every code: ``name``, ``severity``, ``exit``, ``explanation``.
CODES: dict[str, dict[str, Any]] = {row["code"]: row for row in json.loads(_core.codes_table())}


def exit_code(findings: list[Finding]) -> int:
    """0 done, 1 problems found, 2 could not run, 3 incomplete only."""
    return _core.exit_code(json.dumps([f.to_dict() for f in findings]))


class FastshardError(Exception):
    """An operation was refused or could not be done. ``findings`` says why, the deciding one first."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(findings)
        self.findings = findings

    @classmethod
    def of(cls, code: str, message: str, **where: str | None) -> FastshardError:
        """An error with one finding, of the class that fits its exit code."""
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
        """What was expected."""
        return self._first.expected

    @property
    def got(self) -> str | None:
        """What was found."""
        return self._first.got

    @property
    def published(self) -> str | None:
        """Path of the result, if it was published before what the error tells of; else None."""
        return published(self.findings)

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            if finding.severity == "error" or finding.code == "FS519":
                lines.append(f"{finding} [{finding.code}]")
                if finding.help:
                    lines.append(f"  help: {finding.help}")
        return "\n".join(lines)


class ProblemError(FastshardError):
    """Damage, mismatch or inconsistency (exit code 1)."""


class CannotRunError(FastshardError):
    """Usage, permission, unsupported, not checkable (exit code 2)."""


class IncompleteError(FastshardError):
    """Pieces are missing that may still arrive (exit code 3)."""


def error_for(findings: list[Finding]) -> FastshardError:
    """The exception of the class that fits the findings' exit code."""
    order = {"error": 0, "warning": 1, "note": 2}
    findings = sorted(findings, key=lambda f: order.get(f.severity, 3))
    classes = {1: ProblemError, 3: IncompleteError}
    return classes.get(exit_code(findings), CannotRunError)(findings)


def from_core(error: _core.CoreError) -> FastshardError:
    """The exception for an error of the core."""
    return error_for([Finding.from_dict(f) for f in json.loads(str(error))])


def published(findings: Iterable[Finding]) -> str | None:
    """Path of the result, if a finding says that it is published (``FS519``)."""
    return next((f.file for f in findings if f.code == "FS519"), None)


def carry(error: BaseException, findings: list[Finding]) -> None:
    """Puts what a call came to on the exception that takes the place of its result, as ``findings``."""
    if isinstance(error, FastshardError):
        error.findings += findings
        return
    error.findings = findings  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):
        for finding in findings:
            error.add_note(f"{finding} [{finding.code}]" + (f"; {finding.help}" if finding.help else ""))


def raise_errors(findings: list[Finding]) -> None:
    """Raises if a finding is an error; all findings go along."""
    if any(f.severity == "error" for f in findings):
        raise error_for(findings)
