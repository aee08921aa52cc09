"""Help: the commands in groups, and for each command a short page (``-h``) and a long one (``--help``)."""

from __future__ import annotations

import argparse
import textwrap

from .. import _core

TYPE_CHECKING = False  # typing itself takes longer than the rest
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from .verb import Verb
    from .verbs import Verbs

#: Exit codes and their meanings.
EXIT_CODES = (
    ("0", "done (warnings are listed)"),
    (
        "1",
        "problems found: the checkpoint is damaged or inconsistent, checkpoints differ, or --fail-on or "
        "--error made a finding an error",
    ),
    ("2", "could not run: invalid usage, no permission, path not found, no checkpoint, or not supported"),
    ("3", "incomplete but otherwise sound: files are missing that may still arrive"),
    ("130, 143", "stopped by Ctrl-C or SIGTERM; the message says how to resume"),
    ("134", "aborted: the system had no memory for a small allocation; --resume continues the run"),
)
EXIT_NOTE = (
    "If the output cannot be printed, the exit code is 2, unless its reader closed the pipe. If the result "
    "was complete before the problem, the message names its path."
)
SEE_ALSO = "`fastshard explain CODE` says what a finding means and what to do."
SUMMARY = "merge, convert and verify the shards of large-model checkpoints"
#: Examples for new users.
_EXAMPLES = ("fastshard verify run", "fastshard convert run model --to hf")
#: Widths in columns of names and flags, and of a page.
_NAMES, _WIDTH = 18, 80


def overview(verbs: Verbs) -> str:
    """List all commands under their headings, one per line."""
    lines = [f"fastshard {_core.__version__}: {SUMMARY}", "", "Usage: fastshard COMMAND [OPTIONS]", ""]
    for title, names in verbs.groups.items():
        lines += [title, *(f"  {name:<14}  {verbs[name].help}" for name in names), ""]
    lines += ["Examples", *(f"  {example}" for example in _EXAMPLES), "", "Exit codes"]
    for code, meaning in EXIT_CODES:
        lines += _row(code, meaning, 10)
    lines += _wrapped(EXIT_NOTE, "  ")
    lines += ["", *_wrapped(SEE_ALSO), "`fastshard COMMAND -h` is short; `--help` lists every option."]
    return "\n".join(lines) + "\n"


def usage(parser: argparse.ArgumentParser, prog: str) -> str:
    """Return the usage in one line: positional arguments and required options."""
    words = [prog]
    for action in _shown(parser._actions):
        if not action.option_strings:
            words.append(f"[{_value(action)}]" if action.nargs == "?" else _value(action))
    words += [
        f"{action.option_strings[-1]} {_value(action)}" for action in parser._actions if _is_required(action)
    ]
    return " ".join([*words, "[OPTIONS]"])


def short(parser: argparse.ArgumentParser, verb: Verb) -> str:
    """Return the short help of a command, with the most common options."""
    lines = [*_wrapped(_first_sentence(parser)), "", f"Usage: {parser.usage}", ""]
    shown = [
        action for action in _shown(parser._actions) if not action.option_strings or _is_required(action)
    ]
    chosen = [parser._option_string_actions[flag] for flag in verb.often]
    shown += [action for action in chosen if action not in shown]
    for action in shown:
        lines += _row(_called(action), meaning(action), _NAMES)
    lines += ["", *examples(verb)]
    more = len([action for action in _shown(parser._actions) if action not in shown])
    if more:
        lines.append(f"{more} more options: {parser.prog} --help")
    return "\n".join(lines).rstrip("\n") + "\n"


def examples(verb: Verb) -> list[str]:
    """Return the examples of a command, under their heading."""
    return ["Examples", *(f"  {example}" for example in verb.examples), ""] if verb.examples else []


def meaning(action: argparse.Action) -> str:
    """Return the help of an argument."""
    return (action.help or "") % {**vars(action), "prog": "fastshard"}


class Short(argparse.Action):
    """``-h``: prints the short help and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, verb: Verb, **more: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **more)
        self._verb = verb

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the short help."""
        parser._print_message(short(parser, self._verb), _stdout())
        parser.exit()


class Overview(argparse.Action):
    """``fastshard --help``: prints all commands and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, verbs: Verbs, **more: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **more)
        self._verbs = verbs

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the overview."""
        parser._print_message(overview(self._verbs), _stdout())
        parser.exit()


def _stdout() -> Any:
    import sys

    return sys.stdout


def _shown(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    """List the arguments that the help shows."""
    return [
        a for a in actions if a.help is not argparse.SUPPRESS and a.dest not in ("help", argparse.SUPPRESS)
    ]


def _is_required(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.required


def _value(action: argparse.Action) -> str:
    named = action.metavar if isinstance(action.metavar, str) else None
    if named is None:
        named = "|".join(map(str, action.choices)) if action.choices else action.dest.upper()
    return f"{named}..." if action.nargs == "+" else named


def _called(action: argparse.Action) -> str:
    if not action.option_strings:
        return _value(action)
    flag = action.option_strings[-1]
    return flag if action.nargs == 0 or "--no-" in flag else f"{flag} {_value(action)}"


def _first_sentence(parser: argparse.ArgumentParser) -> str:
    text = " ".join((parser.description or "").split())
    sentence, dot, _ = text.partition(". ")
    return sentence + dot.rstrip()


def _row(name: str, text: str, width: int) -> list[str]:
    """Return a name and its meaning; below each other if the name is too long."""
    indent = " " * (width + 4)
    lines = _wrapped(text, indent, indent)
    if len(name) > width or not lines:
        return [f"  {name}", *lines]
    return [f"  {name:<{width}}  {lines[0].lstrip()}", *lines[1:]]


def _wrapped(text: str, first: str = "", rest: str = "  ") -> list[str]:
    # It takes long to import, and --version needs none of this.
    import shutil

    width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH) - 1
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest if first else "", break_on_hyphens=False
    )
