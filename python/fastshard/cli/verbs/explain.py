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

#: Letters of a word that is looked for.
_SHORTEST = 3


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "code", nargs="?", metavar="CODE", help="e.g. FS101, or a word of a title: nan; without it, all codes"
    )
    add_format(parser, ("text", "json"))


def _run(a: argparse.Namespace) -> Outcome:
    if a.code is None:
        rows = [(code, row.severity, row.title) for code, row in sorted(CODES.items())]
        return Result(table(rows, indent=""), {"codes": [row._asdict() for row in CODES.values()]}), []
    code = a.code.upper()
    row = CODES.get(code if code.startswith("FS") else f"FS{code}")
    if row is None and (found := _find_codes(a.code)):
        text = table([(one.code, one.severity, one.title) for one in found], indent="")
        return Result(text, {"codes": [one._asdict() for one in found]}), []
    if row is None:
        raise FastshardError.of(
            codes.USAGE,
            f"no finding has the code {a.code}, and none has this word in its title",
            help="list all codes",
            run=["fastshard explain"],
        )
    text = _page(row)
    if row.code == codes.NOT_A_CHECKPOINT:
        from ...sources.registry import load_adapters

        text += f"\n\nfastshard reads: {', '.join(adapter.name for adapter in load_adapters())}."
    return Result(text, row._asdict()), []


def _find_codes(word: str) -> list[Code]:
    """Find the codes with a word in their titles, else in what they mean."""
    word = word.strip().lower()
    if len(word) < _SHORTEST or word.startswith("fs"):
        return []
    of_titles = [row for _, row in sorted(CODES.items()) if word in row.title.lower()]
    return of_titles or [row for _, row in sorted(CODES.items()) if word in row.meaning.lower()]


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
