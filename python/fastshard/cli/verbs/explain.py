"""``fastshard explain``: what a finding means and what to do."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable

from ...common import codes
from ...common.codes import CODES, Code
from ...common.errors import FastshardError
from ...findings.explain import Explanation, explain, find_codes
from ..render import table
from ..shared_arguments import add_format
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "code",
        nargs="?",
        metavar="CODE",
        help="a code, e.g. FS101, or a word of a title, e.g. nan (default: all codes)",
    )
    add_format(parser, ("text", "json"))


def _run(a: argparse.Namespace) -> Outcome:
    if a.code is None:
        return _list_codes(CODES.values())
    try:
        explanation = explain(a.code)
    except FastshardError:
        if not (found := find_codes(a.code)):
            raise
        return _list_codes(found)
    text = _format(explanation)
    if explanation.code == codes.NOT_A_CHECKPOINT:
        from ...sources.registry import list_formats

        text += f"\n\nfastshard reads: {', '.join(list_formats())}."
    return Result(text, explanation.to_dict()), []


def _list_codes(rows: Iterable[Code]) -> Outcome:
    rows = sorted(rows, key=lambda row: row.code)
    text = table([(row.code, row.severity, row.title) for row in rows], indent="")
    return Result(text, {"codes": [row._asdict() for row in rows]}), []


def _format(of: Explanation) -> str:
    """Format an explanation: meaning, causes, confirmation and fix."""
    exits = {1: "1 (problem)", 2: "2 (could not run)", 3: "3 (incomplete)"}
    when = "" if of.severity == "error" else "as an error, "
    title = f"{of.code} {of.title} ({of.severity}; {when}exit code {exits[of.exit]})"
    sections = {
        "What it means": of.meaning,
        "Why it happens": of.causes,
        "How to confirm": of.confirmation,
        "How to fix": of.help,
    }
    lines = [
        textwrap.fill(
            text, 80, initial_indent=f"{label:<16}", subsequent_indent=" " * 16, break_on_hyphens=False
        )
        for label, text in sections.items()
        if text
    ]
    return "\n".join([title, "", *lines])


EXPLAIN = Verb(
    name="explain",
    help="explain what a finding such as FS303 means and what to do",
    arguments=_arguments,
    run=_run,
    examples=("fastshard explain FS303", "fastshard explain"),
)
