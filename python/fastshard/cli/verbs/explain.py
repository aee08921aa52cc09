"""``fastshard explain``: what a finding means and what to do."""

from __future__ import annotations

import argparse

from ...common.errors import CODES, FastshardError
from ...sources.registry import ADAPTERS
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
            "FS515", f"no finding has the code {a.code}", help="`fastshard explain` lists all codes"
        )
    exits = {1: "1 (problem)", 2: "2 (could not run)", 3: "3 (incomplete)"}
    text = f"{row.code} {row.title} ({row.severity}; as an error, exit code {exits[row.exit]})\n\n{row.explanation}"
    if row.code == "FS513":
        text += f"\n\nRead: {', '.join(adapter.name for adapter in ADAPTERS)}; the README says what of each."
    return Result(text, row._asdict()), []


EXPLAIN = Verb(
    name="explain",
    help="what a finding such as FS303 means, and what to do",
    arguments=_arguments,
    run=_run,
    not_proven=None,
    examples=("fastshard explain FS303", "fastshard explain"),
)
