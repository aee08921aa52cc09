"""``fastshard COMMAND ...``: parses, runs, prints, and turns findings into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import FastshardError, Finding, exit_code
from . import commands, render
from .parser import build


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    arguments = build().parse_args(argv)
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
            document["findings"] = [f.to_dict() for f in findings]
            render.print_json(document)
        elif result and result.text:
            print(result.text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not as_json:
        render.print_findings(
            findings, verbose=getattr(arguments, "verbose", 0), quiet=getattr(arguments, "quiet", 0)
        )
        if code:
            what = {1: "problems found", 2: "could not run", 3: "incomplete"}[code]
            published = "; nothing was published" if arguments.command in ("merge", "convert") else ""
            print(f"fastshard: {what}{published}", file=sys.stderr)
    return code


def _interrupted(arguments: argparse.Namespace, as_json: bool) -> int:
    finding = Finding.of(
        "FS510",
        "stopped by the user",
        help="nothing was published; the same command with --resume continues"
        if arguments.command in ("merge", "convert")
        else None,
    )
    return _finish(arguments, None, [finding], 2, as_json)
