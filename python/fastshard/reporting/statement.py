"""The statement at the top of a page: one word, the cause, the effect, and one command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from ..common.codes import CODES
from ..common.errors import VERDICTS, Finding, exit_code
from ..common.finding_facts import command_of
from ..common.formatting import counted, human
from ..common.records import dataclass
from .grid import state_of
from .grid_cells import COPIED, DAMAGED
from .report_data import Report

__all__ = ["Statement", "named", "rank_of", "sentence", "statement"]

#: Maximum number of damaged files in a command.
_NAMED = 3
#: Maximum length of a cause; a longer one is replaced by the title of its code.
_LONGEST = 160


@dataclass(frozen=True)
class Statement:
    """The first statement of the page."""

    #: Its colour: ``ok``, ``bad`` (incomplete), ``hurt`` (damaged) or ``unsure``.
    kind: str
    #: The verdict, with the same word as in the terminal.
    word: str
    why: str
    effect: str
    #: What the command does.
    advice: str
    command: str

    @property
    def line(self) -> str:
        """The verdict and its reason in one line, as in a terminal."""
        return f"{self.word}, {self.why[:1].lower()}{self.why[1:].rstrip('.')}"


def statement(report: Report) -> Statement:
    """Make the statement of a report."""
    errors = [f for f in report.all_findings if f.severity == "error"]
    if not errors:
        return _sound(report)
    code = exit_code(errors) or 2
    first = min(errors, key=rank_of(code))
    others = {(f.code, f.message) for f in errors} - {(first.code, first.message)}
    more = f", and {counted(len(others), 'more problem')}" if others else ""
    why = f"{_cause(first)}{more}."
    kind = "hurt" if code == 1 else "bad"
    return Statement(kind, VERDICTS[code], why, _effect(report), *_remedy(report, errors, first, code))


def rank_of(code: int) -> _Rank:
    """Return a key that sorts errors: those that decide the exit code first.

    Damage (1) comes before missing parts (3).
    """
    return _Rank(code)


class _Rank:
    def __init__(self, code: int) -> None:
        self.code = code

    def __call__(self, finding: Finding) -> bool:
        return finding.code not in CODES or CODES[finding.code].exit != self.code


def sentence(finding: Finding) -> str:
    """Describe a finding; the first letter is a capital if the text begins with the finding's message."""
    told = finding.headline
    return f"{told[:1].upper()}{told[1:]}" if told.startswith(finding.message) else told


def named(report: Report) -> str:
    """Return the checkpoint as an argument of a command."""
    return " ".join(shlex.quote(path) for path in report.paths[:_NAMED])


def _cause(finding: Finding) -> str:
    told = sentence(finding)
    if finding.file:
        told = told.replace(finding.file, PurePosixPath(finding.file).name or finding.file)
    return told if len(told) <= _LONGEST else finding.title


def _sound(report: Report) -> Statement:
    read = report.numbers is not None and report.numbers.read
    warned = f" {counted(report.warnings, 'warning')}: see the findings." if report.warnings else ""
    c = report.counts
    effect = (
        f"{counted(c.tensors, 'tensor')}, {counted(c.parameters, 'parameter')}, {human(c.nbytes)} in "
        f"{counted(c.files, 'file')}.{warned}"
        if c
        else warned.strip()
    )
    if report.verdict != "ok":
        why = "Nothing is wrong as far as it was checked."
        return Statement("unsure", VERDICTS[0], why, effect, *_check(report))
    if report.comparison and report.comparison.all_equal:
        equal = counted(report.comparison.common or 0, "tensor")
        return Statement(
            "ok",
            VERDICTS[0],
            f"All {equal} are equal, bit for bit, before and after.",
            effect,
            *_check(report),
        )
    why = "Complete, and all data was read." if read else "Complete, by its headers."
    if report.converts:
        command = f"fastshard convert {named(report)} OUT --to hf"
        return Statement(
            "ok", VERDICTS[0], why, effect, "To convert it to Hugging Face safetensors:", command
        )
    return Statement("ok", VERDICTS[0], why, effect, *_check(report))


def _check(report: Report) -> tuple[str, str]:
    return "To check all data:", f"fastshard verify {named(report)}"


def _effect(report: Report) -> str:
    c = report.counts
    if c is None:
        return "Nothing of it can be converted or loaded."
    warned = f" {counted(report.warnings, 'warning')} besides." if report.warnings else ""
    advice = "Do not convert this checkpoint or resume from it."
    if c.lost:
        return f"{c.tensors:,} of {c.expected:,} tensors can be read in full. {advice}{warned}"
    return f"{counted(report.errors, 'error')}. {advice}{warned}"


def _remedy(report: Report, errors: Sequence[Finding], first: Finding, code: int) -> tuple[str, str]:
    """Return the advice on what to do first, and its command."""
    if code == 3 and report.commands:
        whose = f"that ran {first.rank} (HOST)" if first.rank else "that has them (HOST)"
        return f"Copy the files from the node {whose}:", report.commands[0]
    bad = list(
        dict.fromkeys(f for e in errors if state_of(e) in (DAMAGED, COPIED) for f in e.files if f != ".")
    )
    if code == 1 and report.folder and 0 < len(bad) <= _NAMED:
        folder = shlex.quote(report.folder)
        sources = " ".join(f"HOST:{shlex.quote(f'{report.folder}/./{file}')}" for file in bad)
        what = "this file" if len(bad) == 1 else f"these {len(bad)} files"
        return (
            f"Copy {what} again from the node{' that wrote it' if len(bad) == 1 else 's that wrote them'} "
            "(HOST):",
            (f"rsync -acR {sources} {folder}/"),
        )
    help_ = first.help or ""
    told = f"{help_[:1].upper()}{help_[1:]}"
    if first.run:
        return f"{told}:", command_of(
            first.run[0], ["fastshard", "verify", *report.paths[:_NAMED]], report.paths[:_NAMED]
        )
    advice = f"{told}. To see what the code means:" if help_ else "To see what the code means:"
    return advice, f"fastshard explain {first.code}"
