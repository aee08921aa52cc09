"""``fastshard expected``: the tensors that a config promises."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...common import codes, json_text, safe_files
from ...common.errors import FastshardError, error_for
from ...common.formatting import printable
from ...expected.expected_list import from_document
from ...expected.from_transformers import TIMEOUT, expected_tensors
from ..shared_arguments import add_common
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a config.json, or a directory that has one")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the list as JSON, for --like")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=TIMEOUT,
        help="CPU time limit for building the model; the wall-clock limit is ten times as long (default: 60)",
    )
    parser.add_argument("--no-cache", action="store_true", help="rebuild the list and do not cache it")
    add_common(parser, run=False, reads=False)


def _run(a: argparse.Namespace) -> Outcome:
    listed = expected_tensors(a.config, timeout=a.timeout, cache=not a.no_cache)
    document = listed.to_document()
    summary = (
        f"{listed.model_class} of transformers {listed.transformers}: {len(listed):,} tensors, "
        f"{listed.parameters:,} parameters"
    )
    if a.output is not None:
        _refuse_other(Path(a.output))
        try:
            Path(a.output).write_text(json_text.indented(document), "utf-8")
        except OSError as error:
            raise error_for([safe_files.system_finding(error, a.output, "cannot write")]) from None
        return Result(f"{a.output}: {summary}", document), []
    rows = [(t.name, t.dtype, " x ".join(map(str, t.shape)) or "()") for t in listed]
    width = max((len(name) for name, *_ in rows), default=0)
    lines = [f"{printable(name):{width}}  {dtype:8}  {shape}" for name, dtype, shape in rows]
    return Result("\n".join([*lines, "", summary]), document, product=True, paged=True), []


def _refuse_other(at: Path) -> None:
    """Refuse to overwrite a file that is not a list.

    Raises:
        FastshardError: ``FS504`` if such a file exists.
    """
    if at.exists() or at.is_symlink():
        try:
            from_document(safe_files.read_object(at, safe_files.MAX_INDEX), str(at))
        except FastshardError:
            raise FastshardError.of(
                codes.OUT_EXISTS,
                "the file exists and is not a list of expected tensors",
                file=str(at),
                help="choose another FILE",
            ) from None


EXPECTED = Verb(
    name="expected",
    help="list the tensors that a config requires",
    description="""\
        Lists the tensors that a config.json requires, according to the installed transformers: names,
        shapes and dtypes as save_pretrained writes them. A separate process builds the class that the
        config names, without weights. That process has no network, no tokens and none of the checkpoint's
        code. --like accepts the list or the config itself. Lists are cached for each user.""",
    arguments=_arguments,
    run=_run,
    often=("--output",),
    examples=("fastshard expected model", "fastshard expected model -o expected.json"),
)
