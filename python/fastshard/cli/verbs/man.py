"""``fastshard man``: the manual page, in the language of man."""

from __future__ import annotations

import argparse

from ..man_pages import page
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "of",
        nargs="?",
        metavar="COMMAND",
        help="print the page of this command (default: an overview of all)",
    )


def _run(a: argparse.Namespace) -> Outcome:
    return Result(page(a.of).rstrip("\n")), []


MAN = Verb(
    name="man",
    help="print manual pages",
    description="""\
        Prints a manual page for man, of all commands or of one. To save them:

          fastshard man > ~/.local/share/man/man1/fastshard.1
          fastshard man convert > ~/.local/share/man/man1/fastshard-convert.1""",
    arguments=_arguments,
    run=_run,
    judges=lambda a: False,
    examples=("fastshard man convert > fastshard-convert.1",),
)
