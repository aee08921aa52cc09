"""The parser of the command line, generated from its verbs."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence

from .. import _core
from .help_text import SUMMARY, Overview, Short, examples, overview, usage
from .likely_meaning import find_verb, is_path, with_out_last, with_verb
from .styles import WHEN, headed, painter, plain
from .verbs import VERBS, Verbs

TYPE_CHECKING = False  # typing itself takes longer than the rest
if TYPE_CHECKING:
    from typing import NoReturn

    from _typeshed import SupportsWrite

    from .verb import Verb


_VERSION = ("-V", "--version")


class UsageError(Exception):
    """Raised if the arguments cannot be parsed."""

    def __init__(self, parser: argparse.ArgumentParser, message: str, run: str | None = None) -> None:
        super().__init__(message)
        self.parser = parser
        #: The command that the user probably meant.
        self.run = run

    @property
    def lists(self) -> str:
        """The help command that lists commands or options, for messages."""
        return "all commands" if self.parser.prog == "fastshard" else "all options"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that wraps paragraphs to the terminal's width, and keeps those with indented lines, such as
    examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        filled = (
            text if "\n " in text else textwrap.fill(text, width, break_on_hyphens=False)
            for text in paragraphs
        )
        return textwrap.indent("\n\n".join(filled), indent)


class _Parser(argparse.ArgumentParser):
    #: Width for argparse's own formatting when it checks added arguments; None for the width of the terminal.
    columns: int | None = 80

    def _get_formatter(self) -> argparse.HelpFormatter:
        formatter: Callable[..., argparse.HelpFormatter] = self.formatter_class
        return formatter(prog=self.prog, width=self.columns)

    def error(self, message: str) -> NoReturn:
        """Raise the error instead of printing it, because the output may have to be JSON."""
        # argparse lists the choices and leaves the near one to be found.
        wrong = re.match(r"argument [^:]*: invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            from ..common.near_words import meant

            message += meant(wrong[1], [choice.strip(" '") for choice in wrong[2].split(",")])
        raise UsageError(self, message)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse's own is silent about what it cannot write.
        stream = file or sys.stderr
        # argparse may pass what has no terminal.
        paint = painter(stream) if hasattr(stream, "isatty") else plain  # type: ignore[arg-type]
        stream.write(headed(message, paint, is_help=True))


def parse(argv: Sequence[str], verbs: Verbs = VERBS) -> argparse.Namespace:
    """Parse a command line; paths may be before, between and after the flags.

    Raises:
        UsageError: if it cannot be parsed.
        SystemExit: for ``--help`` and ``--version``, after printing.
    """
    if not argv:
        # Printed as what goes wrong is: a script that lost its arguments must not go on.
        sys.stderr.write(headed(overview(verbs), painter(sys.stderr), is_help=True))
        raise SystemExit(2)
    if argv[0] == "help":
        argv = [*argv[1:2], "--help"]
    first = argv[0]
    if first not in verbs and not first.startswith("-"):
        raise _explain_no_command(first, argv, verbs)
    # Loading and building a verb is most of what this takes: one that is named needs no other.
    needed = (verbs[first],) if first in verbs else () if first in _VERSION else verbs
    parser = build(verbs, needed)
    try:
        arguments, rest = parser.parse_known_args(argv)
    except UsageError as error:
        if "OUT" in str(error) and (run := with_out_last(argv)) is not None:
            raise _explain_out(error.parser, run) from None
        raise
    if (
        rest
        and isinstance(getattr(arguments, "ckpt", None), list)
        and not any(word.startswith("-") for word in rest)
    ):
        # argparse gives the first run of paths to CKPT and OUT; the last path of all is OUT.
        own = subparsers(parser)[arguments.command]
        others = [a.dest for a in own._actions if not a.option_strings and a.dest != "ckpt"]
        paths = [*arguments.ckpt, *(getattr(arguments, name) for name in others), *rest]
        for name in others[::-1]:
            setattr(arguments, name, paths.pop())
        arguments.ckpt = paths
    elif rest:
        own = subparsers(parser)[arguments.command]
        if hasattr(arguments, "out") and (run := with_out_last(argv)) is not None:
            raise _explain_out(own, run)
        suggestion = _suggestion(arguments.command, rest, build(verbs))
        own.error(f"unrecognized arguments: {' '.join(rest)}{suggestion}")
    return arguments


def _explain_no_command(word: str, argv: Sequence[str], verbs: Verbs) -> UsageError:
    """Make the error for an unknown command, with a suggestion."""
    from ..common.near_words import nearest

    names = [verb for group in verbs.groups.values() for verb in group]
    run = None
    if (verb := find_verb(word, names)) is not None:
        message, run = f"there is no command {word}; {verb} does that", with_verb(verb, argv, replaces=True)
    elif word == "version":
        message, run = f"there is no command {word}; --version prints it", "fastshard --version"
    elif is_path(word):
        message = f"expected a command, found {word}: the command comes first, then paths and options"
        run = with_verb("inspect", argv, replaces=False)
    elif word in WHEN:
        message = f"there is no command {word}; the command comes first, then paths and options"
    elif (near := nearest(word, names)) is not None:
        message = f"there is no command {word}; did you mean {near}?"
        run = with_verb(near, argv, replaces=True)
    else:
        message = f"there is no command {word}"
    return UsageError(build(verbs, ()), message, run)


def _explain_out(own: argparse.ArgumentParser, run: str) -> UsageError:
    return UsageError(own, "OUT is the last path and has no flag", run)


def takes(verb: Verb, option: str, verbs: Verbs = VERBS) -> bool:
    """Return True if a verb has an option."""
    return option in flags(subparsers(build(verbs, (verb,)))[verb.name])


def _suggestion(command: str, rest: list[str], parser: argparse.ArgumentParser) -> str:
    """Suggest a replacement for an unknown flag."""
    from ..common.near_words import meant

    flag = next((word.partition("=")[0] for word in rest if word.startswith("--")), None)
    if flag is None:
        return ""
    takers = [name for name, own in subparsers(parser).items() if flag in flags(own)]
    # It is no slip of the pen: the nearest of this command's would be something else.
    return (
        f"; it is an option of {', '.join(takers)}"
        if takers
        else meant(flag, flags(subparsers(parser)[command]))
    )


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands, by name."""
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


def flags(parser: argparse.ArgumentParser) -> list[str]:
    """List the flags of a parser."""
    return [flag for action in parser._actions for flag in action.option_strings]


def build(verbs: Verbs = VERBS, needed: Iterable[Verb] | None = None) -> argparse.ArgumentParser:
    """Build the parser of commands, or only of those in ``needed``."""
    parser = _Parser(
        prog="fastshard", description=f"{SUMMARY.capitalize()}.", add_help=False, allow_abbrev=False
    )
    parser.add_argument("-h", "--help", action=Overview, verbs=verbs, help="show this help and exit")
    parser.add_argument(*_VERSION, action="version", version=f"fastshard {_core.__version__}")
    # A verb may do without the flags; what went wrong is told by them all the same.
    parser.set_defaults(output_format="text")
    # Without `prog` argparse would format a usage for it.
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog=parser.prog)
    for verb in verbs if needed is None else needed:
        own = commands.add_parser(
            verb.name,
            help=verb.help,
            description=textwrap.dedent(verb.description or f"{verb.help[:1].upper()}{verb.help[1:]}."),
            epilog="\n".join(examples(verb)),
            formatter_class=_Formatter,
            add_help=False,
            allow_abbrev=False,
        )
        verb.arguments(own)
        group = own.add_argument_group("help")
        group.add_argument("-h", action=Short, verb=verb, help="show the most used options and exit")
        group.add_argument("--help", action="help", help="show all options and exit")
        own.usage = usage(own, own.prog)
        own.columns = None
    parser.columns = None
    return parser
