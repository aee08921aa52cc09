"""The last line of a command: its verdict, and the reason."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import PurePosixPath

from ..common import codes
from ..common.errors import VERDICTS, Finding, exit_code
from ..common.finding_facts import files_of
from ..common.formatting import counted, printable, some
from ..common.gate import ignored
from ..common.regex import compile_when_used
from .render import alike

__all__ = ["in_a_word", "subject", "verdict"]

#: Maximum length of a message in columns; a longer one is replaced by the title of its code and its subject.
_LONGEST = 70
#: Maximum number of paths to name.
_NAMED = 3
#: Digits, which distinguish ranks and steps in names.
_NUMBERED = compile_when_used(r"\d")
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
    """Format the verdict: ``{about}: {VERDICT}, {reason} (exit {code})``.

    Args:
        about: the subject of the verdict.
        code: the exit code.
        findings: all findings.
        word: a verdict other than that of the findings: ``EQUAL``.
        reason: the reason for a good verdict, or for ``word``.
        outcome: the fate of the result of a command that writes.
    """
    if code >= 128:
        word, reason = f"STOPPED by {_SIGNALS.get(signal.Signals(code - 128), 'a signal')}", ""
    elif exit_code(list(findings)) or code:
        reason = reason if word else _why(findings) or reason
        word = in_a_word(code, findings, word)
    else:
        # As many as are printed.
        warnings = sum(f.severity == "warning" and not ignored(f) for f, *_ in alike(findings))
        word = in_a_word(code, findings, word) + (f" with {counted(warnings, 'warning')}" if warnings else "")
    text = f"{word}, {reason}" if reason else word
    return f"{printable(about)}: {printable(text)}{outcome} (exit {code})"


def in_a_word(code: int, findings: Sequence[Finding], word: str | None = None) -> str:
    """Return the verdict without its reason; that of the findings if ``--exit-zero`` made the code 0."""
    if code >= 128:
        return "STOPPED"
    return word or VERDICTS.get(exit_code(list(findings)) or code, VERDICTS[2])


def subject(arguments: argparse.Namespace) -> str:
    """Name the subject of a command: its checkpoints, or its input or output directory."""
    # What a repair made is what it is about.
    for names in (("repair",), ("ckpt",), ("a", "b"), ("out",)):
        given = [getattr(arguments, name) for name in names if getattr(arguments, name, None)]
        if given:
            paths = given[0] if isinstance(given[0], list) else given
            return some([str(path) for path in paths], _NAMED)
    return "fastshard"


def _why(findings: Sequence[Finding]) -> str:
    """Describe the first error briefly, and count the others that are printed."""
    groups = [group for group in alike(findings) if group[0].severity == "error"]
    if not groups:
        return ""
    more = f", and {counted(len(groups) - 1, 'more problem')}" if len(groups) > 1 else ""
    return f"{_short(groups[0])}{more}"


def _short(group: Sequence[Finding]) -> str:
    """Describe a group of findings in a few words that name its file or tensor."""
    finding = group[0]
    text = finding.headline
    if len(group) > 1:
        text = f"{counted(len(group), 'tensor')}: {finding.message}"
    elif finding.file:
        # Where it lies is said above.
        text = text.replace(finding.file, _name(finding.file))
    if len(text) <= _LONGEST:
        return text
    if finding.code == codes.FACT_UNKNOWN and len(finding.message) <= _LONGEST:
        # It is about a setting, and not about a file or a tensor that needs it.
        return finding.message
    title = _lowered(finding.title)
    # Of what could not run the file is beside the point, unless it is what is not read.
    about = "" if finding.code.startswith("FS5") and finding.code != codes.UNSUPPORTED else _about(group)
    return f"{title}: {about}" if about and len(about) <= _LONGEST else title


def _about(group: Sequence[Finding]) -> str:
    """Name the files or tensors of a group of findings, or the missing rank."""
    if group[0].code == codes.MISSING_CHUNKS and group[0].rank:
        return group[0].rank
    files = list(dict.fromkeys(file for finding in group for file in finding.files))
    if files and (len(group) == 1 or len(files) == 1):
        return files_of([_name(file) for file in files])
    more = f" and {len(group) - 1:,} more" if len(group) > 1 else ""
    return f"{group[0].tensor}{more}" if group[0].tensor else ""


def _name(path: str) -> str:
    """Shorten a path.

    Files of all ranks may have the same name; then the folder remains to distinguish them.
    """
    folder, name = PurePosixPath(path).parent.name, PurePosixPath(path).name
    is_of_folder = not path.startswith("/") and _NUMBERED.search(folder) and not _NUMBERED.search(name)
    return f"{folder}/{name}" if is_of_folder else name or path


def _lowered(title: str) -> str:
    """Format a title for use within a sentence: words like NaN keep their capitals."""
    first, _, rest = title.partition(" ")
    return f"{first.lower()} {rest}".rstrip() if first[1:].islower() else title
