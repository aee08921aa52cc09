"""``fastshard explain``: what a finding means and what to do."""

from __future__ import annotations

import argparse
import textwrap

from ...common import codes
from ...common.codes import CODES, Code
from ...common.errors import FastshardError
from ..code_pages import PAGES
from ..render import table
from ..shared_arguments import add_format
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", metavar="CODE", help="e.g. FS101; without it, all codes")
    add_format(parser, ("text", "json"))


def _run(a: argparse.Namespace) -> Outcome:
    if a.code is None:
        rows = [(code, row.severity, row.title) for code, row in sorted(CODES.items())]
        return Result(table(rows, indent=""), {"codes": [row._asdict() for row in CODES.values()]}), []
    code = a.code.upper()
    row = CODES.get(code if code.startswith("FS") else f"FS{code}")
    if row is None:
        raise FastshardError.of(
            codes.USAGE, f"no finding has the code {a.code}", help="run `fastshard explain` to list all codes"
        )
    text = _page(row)
    if row.code == codes.NOT_A_CHECKPOINT:
        from ...sources.registry import load_adapters

        text += f"\n\nfastshard reads: {', '.join(adapter.name for adapter in load_adapters())}."
    return Result(text, row._asdict()), []


def _page(row: Code) -> str:
    """Format the page of a code: meaning, causes, confirmation and fix.

    Every code has a meaning and a fix.
    """
    exits = {1: "1 (problem)", 2: "2 (could not run)", 3: "3 (incomplete)"}
    when = "" if row.severity == "error" else "as an error, "
    title = f"{row.code} {row.title} ({row.severity}; {when}exit code {exits[row.exit]})"
    sections = {"What it means": row.meaning}
    if page := PAGES.get(row.code):
        sections |= {"Why it happens": page.why, "How to confirm": page.confirm}
    sections["How to fix"] = row.help
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
    help="what a finding such as FS303 means, and what to do",
    arguments=_arguments,
    run=_run,
    not_proven=None,
    examples=("fastshard explain FS303", "fastshard explain"),
)
