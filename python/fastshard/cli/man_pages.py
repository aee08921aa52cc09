"""Manual pages, generated from the parser."""

from __future__ import annotations

import argparse

from .. import _core
from ..common import codes
from ..common.errors import FastshardError
from ..common.near_words import meant
from .help_text import EXIT_CODES, EXIT_NOTE, SEE_ALSO, meaning
from .parser import build, subparsers
from .verbs import VERBS


def page(command: str | None = None) -> str:
    """Return the man page of a command, or a short one of all commands.

    Raises:
        FastshardError: ``FS515`` for an unknown command.
    """
    parser = build()
    known = subparsers(parser)
    if command is not None and command not in known:
        raise FastshardError.of(codes.USAGE, f"no command is called {command}{meant(command, known)}")
    name = "fastshard" if command is None else f"fastshard-{command}"
    own = parser if command is None else known[command]
    lines = [f'.TH "{name.upper()}" 1 "" "fastshard {_core.__version__}" "User Commands"', ".SH NAME"]
    lines.append(f"{_text(name)} \\- {_text(_summary(parser, command))}")
    lines += [".SH SYNOPSIS", _text(" ".join(own.format_usage().removeprefix("usage: ").split()))]
    lines += [".SH DESCRIPTION", *_paragraphs(own.description or "")]
    if command is None:
        lines.append(".SH COMMANDS")
        for verb in known:
            lines += _item(verb, _summary(parser, verb))
        lines.append(r"fastshard COMMAND \-\-help lists the arguments of each.")
    for group in own._action_groups:
        actions = [
            action
            for action in group._group_actions
            if not isinstance(action, argparse._SubParsersAction) and action.help is not argparse.SUPPRESS
        ]
        if actions:
            lines.append(f'.SH "{_text(group.title or "options").upper()}"')
            for action in actions:
                lines += _item(_invocation(action), meaning(action))
    if command is not None and VERBS[command].examples:
        lines += [".SH EXAMPLES", ".nf", *map(_text, VERBS[command].examples), ".fi"]
    lines.append('.SH "EXIT STATUS"')
    for code, meant_by in EXIT_CODES:
        lines += _item(code, meant_by)
    lines += [".PP", _text(EXIT_NOTE)]
    lines += [".SH SEE ALSO", _text(SEE_ALSO)]
    return "\n".join(lines) + "\n"


def _summary(parser: argparse.ArgumentParser, command: str | None) -> str:
    if command is None:
        return (parser.description or "").rstrip(".")
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return next(a.help or "" for a in commands._choices_actions if a.dest == command)


def _invocation(action: argparse.Action) -> str:
    """Format an argument as users write it, e.g. ``--threads N``."""
    value = action.metavar if isinstance(action.metavar, str) else None
    if value is None and action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return f"{value or action.dest}{' ...' if action.nargs == '+' else ''}"
    takes = action.nargs != 0
    return ", ".join(
        f"{flag} {value or action.dest.upper()}" if takes else flag for flag in action.option_strings
    )


def _item(term: str, meaning: str) -> list[str]:
    return [".TP", f"\\fB{_text(term)}\\fR", _text(meaning) or r"\&"]


def _paragraphs(text: str) -> list[str]:
    """Format paragraphs for roff; indented paragraphs keep their line breaks."""
    lines: list[str] = []
    for paragraph in text.strip("\n").split("\n\n"):
        rows = paragraph.splitlines()
        shown = all(row.startswith("  ") for row in rows)
        lines += [".PP"] if lines else []
        lines += [*([".nf"] if shown else []), *map(_text, rows), *([".fi"] if shown else [])]
    return lines


def _text(text: str) -> str:
    """Escape text so that roff finds no request or escape in it."""
    text = (
        text.replace("\\", "\\e")
        .replace("-", "\\-")
        .replace("~", "\\(ti")
        .replace("^", "\\(ha")
        .replace("`", "\\(ga")
    )
    return f"\\&{text}" if text[:1] in (".", "'") else text
