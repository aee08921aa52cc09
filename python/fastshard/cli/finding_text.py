"""Formatting of a finding for the terminal: the message, then the place, the values found, the effect, and
the advice.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ..common.codes import CODES
from ..common.errors import Finding
from ..common.finding_facts import effect_of, files_of
from ..common.formatting import counted, printable
from ..common.gate import accepted
from ..common.regex import compile_when_used
from .styles import Paint, plain

__all__ = ["help_of", "lines"]

#: Width of the labels in columns.
_INDENT = 12
#: Maximum number of names to list without -v.
_NAMED = 3
#: Sizes and hashes in findings.
_SIZE = compile_when_used(r"\b(\d{4,18}) bytes\b")
_HASH = compile_when_used(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
_STYLES = {"error": "bad", "warning": "warn", "note": "note"}


def lines(
    alike: Sequence[Finding],
    *,
    verbose: int = 0,
    helps: bool = True,
    width: int = 80,
    wraps: bool = False,
    paint: Paint = plain,
) -> list[str]:
    """Format one finding as lines, or several with the same message about different tensors.

    Args:
        alike: the findings, of one code, severity and message.
        verbose: above 0, lines name each file and tensor.
        helps: False to omit the advice.
        width: columns of the terminal.
        wraps: True to keep the first line within them, too.
        paint: applies a style to a text.
    """
    finding = alike[0]
    # What is no error by itself says why it is one.
    by = f" (by {_flag(finding.decided)})" if finding.decided and not accepted(finding) else ""
    severity = paint(finding.severity, _STYLES[finding.severity])
    if len(alike) == 1:
        message, files, facts = finding.headline, finding.files, _facts(finding, verbose)
    else:
        message = f"{counted(len(alike), 'tensor')}: {printable(finding.message)}"
        files = tuple(dict.fromkeys(file for f in alike for file in f.files))
        evidence = list(dict.fromkeys(f.evidence for f in alike if f.evidence))
        # What is said of each tensor is not said of all.
        facts = [("tensors", _tensors(alike, verbose)), ("evidence", evidence if len(evidence) == 1 else [])]
    # A log has a line for each finding; in a terminal it ends between two words.
    first, *rest = textwrap.wrap(
        f"{finding.severity} {finding.code}{by}: {message}",
        max(width, 2 * _INDENT) if wraps else len(message) + 80,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    out = [f"{severity} {paint(first.removeprefix(finding.severity).lstrip(), 'bold')}"]
    out += [paint(line, "bold") for line in rest]
    if len(files) > (len(alike) == 1):
        out += _labelled("where", files if verbose else [files_of(files)], width, paint)
    for label, texts in facts:
        out += _labelled(label, texts, width, paint)
    help_ = help_of(finding)
    if help_ and helps:
        out += _labelled("help", [f"{help_}:" if finding.run else help_], width, paint)
        # Not wrapped: a command is copied as it stands.
        out += [f"{' ' * _INDENT}  {printable(command)}" for command in finding.run]
    return out


def help_of(finding: Finding) -> str | None:
    """Return the advice of a finding: its own, or else that of its code."""
    if finding.help or finding.severity == "note" or accepted(finding):
        return finding.help
    text = CODES[finding.code].help
    return f"{text[0].lower()}{text[1:].rstrip('.')}" if text else None


def _facts(finding: Finding, verbose: int) -> list[tuple[str, Sequence[str]]]:
    """Return a finding's facts besides its message and place."""
    return [
        *(
            (label, [_readable(text, verbose)] if text else ())
            for label, text in (
                ("found", finding.got),
                ("expected", finding.expected),
                ("evidence", finding.evidence),
            )
        ),
        (
            "effect",
            [] if verbose and any(part.tensor for part in finding.parts) else _effects(finding, verbose),
        ),
        ("parts", [_part(part) for part in finding.parts] if verbose else ()),
    ]


def _readable(text: str, verbose: int) -> str:
    """Add separators to sizes in a text, and shorten hashes to their first digits."""
    text = _SIZE.sub(lambda found: f"{int(found[1]):,} bytes", text)
    return text if verbose else _HASH.sub(lambda found: f"{found[1]}...", text)


def _part(part: Finding) -> str:
    """Describe a part of a finding: a tensor, a file or a layer."""
    return f"{part.tensor}: {part.message}" if part.tensor else str(part)


def _tensors(alike: Sequence[Finding], verbose: int) -> list[str]:
    """Return a line for each tensor: its name, and the found and expected values."""
    shown = alike if verbose else alike[:_NAMED]
    rows = []
    for finding in shown:
        got = [finding.got] if finding.got else []
        expected = [f"expected {finding.expected}"] if finding.expected else []
        details = f": {', '.join(got + expected)}" if got or expected else ""
        rows.append(f"{finding.tensor}{f' ({finding.rank})' if finding.rank else ''}{details}")
    more = len(alike) - len(shown)
    return [*rows, f"and {more:,} more (-v lists them)"] if more else rows


def _labelled(label: str, texts: Sequence[str], width: int, paint: Paint) -> list[str]:
    """Put texts on separate lines, the first after a label."""
    lines = [
        line
        for number, text in enumerate(texts)
        for line in _wrapped("" if number else label, printable(text), width)
    ]
    # The label is dim, its text is not.
    return [
        paint(line[:_INDENT], "dim") + line[_INDENT:] if not number else line
        for number, line in enumerate(lines)
    ]


def _flag(decided: str) -> str:
    return f"--{decided.replace('_', '-')}"


def _wrapped(label: str, text: str, width: int) -> list[str]:
    """Wrap a text after its label; names and paths are not broken."""
    return textwrap.wrap(
        text,
        max(width, 2 * _INDENT),
        initial_indent=f"  {label}".ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _effects(finding: Finding, verbose: int) -> list[str]:
    effect = effect_of(finding)
    if effect is None or finding.effect is None:
        return []
    more = finding.effect.count - len(finding.effect.tensors)
    names = [*finding.effect.tensors, *([f"and {more:,} more"] if more else [])]
    return [effect, *(names if verbose else ())]
