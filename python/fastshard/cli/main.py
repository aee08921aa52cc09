"""``fastshard COMMAND ...``: parses, runs, prints, and turns findings into exit codes."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import FastshardError, Finding, exit_code
from . import commands, render
from .parser import build


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names may hold characters that the terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    arguments = parse(argv)
    as_json = bool(getattr(arguments, "json", False))
    try:
        result, findings = commands.COMMANDS[arguments.command](arguments)
    except FastshardError as error:
        return _finish(arguments, None, error.findings, error.exit_code, as_json)
    except KeyboardInterrupt:
        return _interrupted(arguments, as_json)
    except BrokenPipeError:
        # The reader of stdout has gone (head, less): not our failure to report.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    code = exit_code(findings) if arguments.command not in ("inspect", "explain") else 0
    return _finish(arguments, result, findings, code, as_json)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; paths may stand before, between and after the flags."""
    parser = build()
    arguments, rest = parser.parse_known_args(argv)
    if rest and hasattr(arguments, "ckpt") and not any(word.startswith("-") for word in rest):
        # argparse gives the first run of paths to CKPT and OUT; the last path of all is OUT.
        paths = [*arguments.ckpt, *([arguments.out] if hasattr(arguments, "out") else []), *rest]
        if hasattr(arguments, "out"):
            arguments.out = paths.pop()
        arguments.ckpt = paths
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def _finish(
    arguments: argparse.Namespace,
    result: commands.Result | None,
    findings: list[Finding],
    code: int,
    as_json: bool,
) -> int:
    try:
        if as_json:
            document: dict[str, Any] = {"command": arguments.command, "exit_code": code}
            document |= result.document if result else {}
            if result and arguments.command != "explain":
                document["not_proven"] = not_proven(findings, arguments.command)
            document["findings"] = [f.to_dict() for f in findings]
            render.print_json(document)
        elif result and result.text:
            print(render.printable(result.text, keep="\n"))
            if arguments.command != "explain":
                print(f"not proven: {not_proven(findings, arguments.command)}")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not as_json:
        render.print_findings(
            findings, verbose=getattr(arguments, "verbose", 0), quiet=getattr(arguments, "quiet", 0)
        )
        if code:
            what = {1: "problems found", 2: "could not run", 3: "incomplete"}[code]
            published = (
                "; nothing was published"
                if arguments.command in ("merge", "convert") or getattr(arguments, "repair", None)
                else ""
            )
            print(f"fastshard: {what}{published}", file=sys.stderr)
    return code


def not_proven(findings: list[Finding], command: str) -> str:
    """The one line that every result ends with."""
    if command == "masters":
        return "that the parameters are right: where the two differ, the files do not say which side is stale"
    if command == "stats":
        return (
            "that the values are right: distributions show what is lost or broken, not what is slightly off"
        )
    unprovable = next((f for f in findings if f.code == "FS109" and f.file is None), None)
    if unprovable:
        return f"{unprovable.message}; {unprovable.help}"
    return "that the layout is right for the model: a hash cannot tell, logits can"


def _interrupted(arguments: argparse.Namespace, as_json: bool) -> int:
    finding = Finding.of(
        "FS510",
        "stopped by the user",
        help="nothing was published; the same command with --resume continues"
        if arguments.command in ("merge", "convert") or getattr(arguments, "repair", None)
        else None,
    )
    return _finish(arguments, None, [finding], 2, as_json)
