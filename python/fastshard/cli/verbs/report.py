"""``fastshard report``: one page about a checkpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...common import codes, safe_files
from ...common.errors import FastshardError
from ..render import human
from ..shared_arguments import add_common, add_source, opening, progress
from ..verb import Outcome, Result, Verb

if TYPE_CHECKING:
    from pathlib import Path

#: Number of bytes at the start of an existing file that are searched for the marker of fastshard's pages.
_BEGINNING = 4096


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="compare with this earlier checkpoint, opened with the same options",
    )
    parser.add_argument("--stats", action="store_true", help="read all data, for distributions and hashes")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="report.html", help="default: report.html; - for stdout"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace FILE even if it is not a fastshard report"
    )
    add_common(parser)


def _place(a: argparse.Namespace) -> Path | None:
    """Return the path at which to write the page; None for stdout.

    Raises:
        FastshardError: ``FS504`` if another file has that path.
    """
    from ...reporting.page import MARK

    if a.output == "-":
        if a.output_format != "text":
            raise FastshardError.of(
                codes.USAGE,
                f"--output-format {a.output_format} cannot be combined with -o -",
                help="pass a file with -o: both would write to stdout",
            )
        return None
    path = safe_files.replaceable(a.output)
    if a.overwrite or not safe_files.is_file(path) or not path.stat().st_size:
        return path
    head = safe_files.read_bytes(path, _BEGINNING, code=codes.OUT_EXISTS, whole=False)
    if not head.startswith(b"<!DOCTYPE html>") or MARK not in head:
        raise FastshardError.of(
            codes.OUT_EXISTS,
            "exists and is not a report",
            file=str(path),
            help="choose another file with -o FILE, or pass --overwrite",
        )
    return path


def _run(a: argparse.Namespace) -> Outcome:
    from ...reporting import page
    from ...reporting.report import about
    from ...reporting.statement import statement

    path = _place(a)
    report = about(
        a.ckpt, against=a.against, stats=a.stats, memory=a.memory, progress=progress(a), **opening(a)
    )
    text = page.rendered(report)
    findings = report.all_findings
    if path is None:
        return Result(text, product=True), findings
    # What somebody has put there while all was read stays too.
    safe_files.replace(_place(a) or path, [text])
    size = len(text.encode())
    document = {
        "report": str(a.output),
        "bytes": size,
        "verdict": report.verdict,
        "errors": report.errors,
        "warnings": report.warnings,
    }
    return Result(f"{a.output}: {statement(report).line}; a page of {human(size)}", document), findings


REPORT = Verb(
    name="report",
    help="write one HTML page about a checkpoint, to look at or send",
    description="""\
        Writes one self-contained HTML page: what the checkpoint is, what each rank holds of each tensor,
        what is missing, damaged or copied, findings with their help, sizes, distributions and provenance.
        Reads only headers and the manifest next to the checkpoint; --stats reads all data. The page loads
        nothing and runs only its own script. A broken checkpoint gets a page too: the exit code is 0 once
        the page is written, unless --fail-on or --error is given. Use `fastshard verify` for a verdict.
        Needs the packages jinja2 and vl-convert-python.""",
    arguments=_arguments,
    run=_run,
    silent=True,
    # A page is what was asked for; it is a gate where one is set up.
    judges=lambda a: bool(a.fail_on or a.error),
    often=("--output", "--against", "--stats"),
    examples=("fastshard report run -o run.html", "fastshard report model --stats -o model.html"),
)
