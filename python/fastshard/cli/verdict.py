"""The last line of a command: what it came to, and why."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import PurePosixPath

from ..common.errors import VERDICTS, Finding, exit_code
from ..common.formatting import counted, printable, some
from ..common.gate import ignored

__all__ = ["in_a_word", "subject", "verdict"]

#: Columns that a reason has at most; the title of its code stands for a longer one.
_LONGEST = 70
#: Paths that it names at most.
_NAMED = 3
_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


def verdict(
    about: str,
    code: int,
    findings: Sequence[Finding],
    *,
    word: str | None = None,
    reason: str = "",
    outcome: str = "",
) -> str:
    """``{about}: {VERDICT}, {reason} (exit {code})``.

    Args:
        about: what it is about.
        code: the exit code.
        findings: all that was found.
        word: the verdict, where it is not that of what was found: ``EQUAL``.
        reason: why all is well, where it is; or why the ``word`` is so.
        outcome: what became of the result of a command that writes.
    """
    if code >= 128:
        word, reason = f"STOPPED by {_SIGNALS.get(signal.Signals(code - 128), 'a signal')}", ""
    elif exit_code(list(findings)) or code:
        reason = reason if word else _why(findings) or reason
        word = in_a_word(code, findings, word)
    else:
        warnings = sum(f.severity == "warning" and not ignored(f) for f in findings)
        word = in_a_word(code, findings, word) + (f" with {counted(warnings, 'warning')}" if warnings else "")
    told = f"{word}, {reason}" if reason else word
    return f"{printable(about)}: {printable(told)}{outcome} (exit {code})"


def in_a_word(code: int, findings: Sequence[Finding], word: str | None = None) -> str:
    """The verdict without its reason; of what was found where ``--exit-zero`` made the code 0."""
    if code >= 128:
        return "STOPPED"
    return word or VERDICTS.get(exit_code(list(findings)) or code, VERDICTS[2])


def subject(arguments: argparse.Namespace) -> str:
    """What a command is about: its checkpoints, or the directory that it was given."""
    for names in (("ckpt",), ("a", "b"), ("out",)):
        given = [getattr(arguments, name) for name in names if getattr(arguments, name, None)]
        if given:
            paths = given[0] if isinstance(given[0], list) else given
            return some([str(path) for path in paths], _NAMED)
    return "fastshard"


def _why(findings: Sequence[Finding]) -> str:
    """The first error in short, and how many more there are that say something else."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return ""
    others = {(f.code, f.message) for f in errors} - {(errors[0].code, errors[0].message)}
    more = f", and {counted(len(others), 'more problem')}" if others else ""
    return f"{_short(errors[0])}{more}"


def _short(finding: Finding) -> str:
    told = finding.headline
    if finding.file:
        # Where it lies is said above.
        told = told.replace(finding.file, PurePosixPath(finding.file).name or finding.file)
    if len(told) <= _LONGEST:
        return told
    title = f"{finding.title[:1].lower()}{finding.title[1:]}"
    # Of what could not run the file is beside the point.
    is_about_it = finding.file and len(finding.files) < 2 and not finding.code.startswith("FS5")
    named = f"{title}: {PurePosixPath(finding.file or '').name}" if is_about_it else title
    return named if len(named) <= _LONGEST else title
