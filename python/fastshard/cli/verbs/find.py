"""``fastshard find``: the missing files of a checkpoint, in other folders."""

from __future__ import annotations

import argparse

from ...verification.find_missing import FileSearch, describe
from ...verification.find_missing import find as find_files
from ..render import printable
from ..shared_arguments import add_common, add_exit_zero, add_source, opening
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, like=True)
    parser.add_argument(
        "--in",
        dest="within",
        nargs="+",
        action="extend",
        required=True,
        metavar="DIR",
        help="directories to search, with their subdirectories",
    )
    parser.add_argument(
        "--expect",
        metavar="FILE",
        help="a manifest with sizes and hashes of the files (default: the one next to the checkpoint), or a "
        "config",
    )
    add_common(parser, run=False)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    options = opening(a)
    if options["config"] is None:
        del options["config"]
    search = find_files(a.ckpt, a.within, expect=a.expect, memory=a.memory, **options)
    return Result(
        _describe(search),
        search.to_dict(),
        reason=describe(search),
        word="FOUND" if search.complete and search.files else None,
    ), list(search.findings)


def _describe(search: FileSearch) -> str:
    """Format what was found, and the commands that copy it."""
    lines = []
    for file in search.files:
        if file.found is not None:
            lines.append(f"{printable(file.name)}\n  {file.found} ({file.evidence})")
    if search.commands:
        lines += ["copy them, then run `fastshard verify`:", *(f"  {line}" for line in search.commands)]
    return "\n".join(lines)


FIND = Verb(
    name="find",
    help="find the missing files of a checkpoint in other directories",
    description="""\
        Finds the missing files of a checkpoint in other directories: disks of other nodes, backups. The
        headers show which files are missing. With a manifest, a file is found by its hash, wherever it is.
        Without one, the step, the file's name and its directories below the step must match. Prints a
        command that copies each file to its place, and copies nothing itself. The exit code is 3 if some
        files are not found.""",
    arguments=_arguments,
    run=_run,
    finds=True,
    often=("--in", "--expect", "--step", "--json"),
    examples=("fastshard find run --in model",),
)
