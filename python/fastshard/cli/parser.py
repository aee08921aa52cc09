"""The parser of the command line, made of its verbs."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, NoReturn

from .. import _core
from ..options import meant
from .verb import Verb
from .verbs import VERBS

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

EPILOG = """\
exit codes:
  0  done (warnings are listed)
  1  problems found: damage, mismatch or inconsistency; nothing published; diff: they differ
  2  could not run: usage, permission, no such path, not a checkpoint, unsupported
  3  incomplete only: pieces are missing that may still arrive
  130, 143  stopped by Ctrl-C or SIGTERM; what is left and how to resume is said
  A result that was published before what went wrong is named; what cannot be printed is a 2.

`fastshard explain CODE` says what a finding means and what to do.
"""


class UsageError(Exception):
    """The arguments cannot be parsed."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raised, not printed: it may have to be JSON."""
        # argparse lists the choices and leaves the near one to be found.
        wrong = re.match(r"argument [^:]*: invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            message += meant(wrong[1], [choice.strip(" '") for choice in wrong[2].split(",")])
        raise UsageError(self, message)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse's own is silent about what it cannot write.
        (file or sys.stderr).write(message)


def flags(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """The flags of a command."""
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [flag for action in commands.choices[command]._actions for flag in action.option_strings]


def build(verbs: Iterable[Verb] = VERBS, words: Container[str] | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; given the words of a command line, with arguments of the verbs among them alone."""
    parser = _Parser(
        prog="fastshard",
        description="Turns the shards that large-model training leaves behind into a checkpoint that is provably whole.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fastshard {_core.__version__}")
    # A verb may do without the flag; what went wrong is told by it all the same.
    parser.set_defaults(json=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for verb in verbs:
        own = commands.add_parser(
            verb.name,
            help=verb.help,
            description=textwrap.dedent(verb.description or verb.help),
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # Most of what building takes: a run needs those of one verb.
        if words is None or verb.name in words:
            verb.arguments(own)
    return parser
