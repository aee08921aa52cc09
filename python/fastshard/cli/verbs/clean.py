"""``fastshard clean``: removal of leftovers of ended runs."""

from __future__ import annotations

import argparse
import os

from ...common.records import asdict
from ...conversion.clean import Leftover, clean
from ..render import human
from ..shared_arguments import add_common
from ..verb import Outcome, Result, Verb

_FATES = {
    "removed": "removed",
    "resumable": "kept: run the same command with --resume to continue it; --abandon RUN removes it",
    "at_work": "kept: a process is working on it",
    "complete": "kept: its result is in place; run the same command with --resume to finish the clean-up",
    "foreign": "kept: it holds files that fastshard did not write; check them",
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="DEST", help="destination of the runs")
    parser.add_argument(
        "--abandon", metavar="RUN", help="also remove this run, although it could be continued"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="treat a process that shows no sign of life for this long as dead (default: 30)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would be removed, and remove nothing"
    )
    add_common(parser, run=False, reads=False)


def _run(a: argparse.Namespace) -> Outcome:
    found = clean(a.out, abandon=a.abandon, timeout=a.timeout, dry_run=a.dry_run)
    fates = {**_FATES, "removed": "would be removed"} if a.dry_run else _FATES
    lines = []
    for left in found:
        words = _results(left, str(a.out)) if left.results else [fates[left.fate]]
        lines.append(f"{left.path} (run {left.run or '-'}): {words[0]}")
        lines += [f"  {line}" for line in words[1:]]
    removed = [left for left in found if left.fate == "removed"]
    if removed:
        freed = human(sum(left.bytes for left in removed))
        lines.append(f"{freed} would be freed" if a.dry_run else f"{freed} freed")
    return Result(
        "\n".join(lines) or f"{a.out}: nothing to clean up",
        {"out": str(a.out), "leftovers": [asdict(left) for left in found]},
    ), []


def _results(left: Leftover, out: str) -> list[str]:
    """Describe the results that a folder contains, and how to restore each."""
    by_version = {result.version: result for result in left.results}
    is_there = os.path.lexists(out)
    names = {
        (version, complete): f"the {version} result" if complete else f"a part of the {version} result"
        for version in ("older", "newer")
        for complete in (True, False)
    }
    holds = " and ".join(names[result.version, result.complete] for result in reversed(left.results))
    if "newer" not in by_version:
        where = f"{out} is the newer result"
    elif is_there:
        where = f"{out} is not replaced yet" if by_version["newer"].complete else f"{out} is incomplete"
    else:
        where = f"{out} does not exist"
    lines = [f"kept: it holds {holds}; {where}"]
    if "newer" in by_version:
        lines.append(
            "put the newer result in place: run the same command with --resume, or `fastshard commit`"
        )
    for result in left.results:
        if result.command is not None:
            lines.append(f"restore the {result.version} result: {result.command}")
    if "newer" not in by_version:
        lines.append("remove the older result: run the same command with --resume")
    return lines


CLEAN = Verb(
    name="clean",
    help="remove what interrupted runs left behind",
    arguments=_arguments,
    run=_run,
    silent=True,
    often=("--abandon", "--dry-run"),
    examples=("fastshard clean out --dry-run",),
)
