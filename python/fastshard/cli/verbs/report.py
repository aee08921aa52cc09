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

#: Bytes of a file that is there in which a page of ours says what it is.
_BEGINNING = 4096


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="compare with this one, the one before; opened with the same options",
    )
    parser.add_argument("--stats", action="store_true", help="read all data, for distributions and hashes")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="report.html", help="default: report.html; - for stdout"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace FILE even if it is no report of fastshard"
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
                f"--output-format {a.output_format} and -o -",
                help="pass a file with -o; both want stdout",
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
            help="choose another place with -o FILE, or pass --overwrite",
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
    help="write one HTML page of all this, to look at or to send",
    description="""\
        One self-contained HTML page: what the checkpoint is, which ranks hold what of which tensors and what
        is missing, damaged or copied, findings with what to do, sizes, distributions, provenance. From
        headers alone, and from the manifest that lies beside the checkpoint; --stats reads all data. Opening
        the page loads nothing and runs nothing but its own script. A broken checkpoint gives a page too: the
        exit code is 0 once the page is written, unless --fail-on or --error is given; `fastshard verify`
        judges. Needs the packages jinja2 and vl-convert-python.""",
    arguments=_arguments,
    run=_run,
    silent=True,
    # A page is what was asked for; it is a gate where one is set up.
    judges=lambda a: bool(a.fail_on or a.error),
    often=("--output", "--against", "--stats"),
    examples=("fastshard report run -o run.html", "fastshard report model --stats -o model.html"),
)
