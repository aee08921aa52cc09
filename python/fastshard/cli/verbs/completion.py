"""``fastshard completion``: a script with which a shell completes commands, flags and values."""

from __future__ import annotations

import argparse
import os
from pathlib import PurePath

from ...common import codes
from ...common.codes import CODES
from ...common.errors import FastshardError
from ...targets.registry import TARGETS
from ..parser import build, subparsers
from ..shared_arguments import add_format
from ..verb import Outcome, Result, Verb

SHELLS = ("bash", "zsh", "fish")
#: Placeholders for paths in the help; the shell completes them.
_FOLDERS = ("CKPT", "OUT", "DEST", "DIR", "PART")
_FILES = ("FILE", "A", "B")
_INSTALL = {
    "bash": "fastshard completion bash > ~/.local/share/bash-completion/completions/fastshard",
    "zsh": "fastshard completion zsh > ~/.zfunc/_fastshard    # with fpath+=~/.zfunc before compinit in "
    ".zshrc",
    "fish": "fastshard completion fish > ~/.config/fish/completions/fastshard.fish",
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        nargs="?",
        choices=SHELLS,
        metavar="SHELL",
        help="bash, zsh or fish (default: that of $SHELL)",
    )
    add_format(parser, ("text", "json"))


def script(shell: str) -> str:
    """Generate the completion script for a shell from the parser."""
    import shtab

    parser = build()
    for own in (parser, *subparsers(parser).values()):
        for action in own._actions:
            name = action.metavar if isinstance(action.metavar, str) else ""
            if name in _FOLDERS or name in _FILES:
                # A checkpoint may be one file too.
                action.complete = shtab.DIRECTORY if name in _FOLDERS and name != "CKPT" else shtab.FILE  # type: ignore[attr-defined]
            elif name == "TARGET":
                action.choices = list(TARGETS)
            elif name == "CODE":
                action.choices = sorted(CODES)
    return shtab.complete(parser, shell=shell)


def _run(a: argparse.Namespace) -> Outcome:
    shell = a.shell or PurePath(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise FastshardError.of(
            codes.USAGE,
            "$SHELL names no shell that fastshard knows",
            expected=", ".join(SHELLS),
            got=shell or "nothing",
            help="name it",
            run=["fastshard completion bash"],
        )
    text = script(shell)
    return Result(text.rstrip("\n"), {"shell": shell, "script": text}), []


COMPLETION = Verb(
    name="completion",
    help="print a completion script for bash, zsh or fish",
    description="Prints a completion script for a shell. To install it:\n\n  "
    + "\n  ".join(_INSTALL.values()),
    arguments=_arguments,
    run=_run,
    judges=lambda a: False,
    examples=("fastshard completion bash > fastshard.bash",),
)
