"""``fastshard diff``: two checkpoints, tensor by tensor."""

from __future__ import annotations

import argparse

from ...common.formatting import counted
from ...common.gate import Gate
from ...verification.diff import diff as diff_checkpoints
from ..shared_arguments import add_choosing, add_common, add_exit_zero, add_opening, opening, progress
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    add_opening(parser)
    add_choosing(parser)
    add_common(parser)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    differences = diff_checkpoints(
        a.a, a.b, include=a.include, exclude=a.exclude, memory=a.memory, progress=progress(a), **opening(a)
    )
    document = {"equal": not differences, "differences": [d.to_dict() for d in differences]}
    decided = [f for f in differences.findings if f.decided is not None]
    gate = Gate.of(a.fail_on, a.error, a.ignore)
    word, reason = "EQUAL", "every tensor has the same bytes"
    if differences:
        word, reason = (
            "DIFFERENT",
            f"{counted(len(differences), 'tensor')} {'differ' if len(differences) > 1 else 'differs'}",
        )
    result = Result("", document, reason=reason, word=word)
    return result, gate.judged([*(d.to_finding() for d in differences), *decided])


DIFF = Verb(
    name="diff",
    help="compare two checkpoints, across formats and shardings",
    arguments=_arguments,
    run=_run,
    silent=True,
    finds=True,
    often=("--include", "--exclude", "--json"),
    examples=("fastshard diff run merged",),
)
