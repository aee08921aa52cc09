"""``fastshard probe``: whether all ranks see one storage at a destination."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ...conversion.distributed.rendezvous import probe
from ..render import table
from ..shared_arguments import add_common, add_ranks, ranked
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="DEST", help="the destination that a run would have")
    add_ranks(parser)
    parser.set_defaults(rank="auto")
    add_common(parser, run=False)


def _run(a: argparse.Namespace) -> Outcome:
    ranks = probe(a.out, **ranked(a))
    rows = [(f"rank {r.rank}", f"{r.host}, process {r.pid}: {r.storage}") for r in ranks]
    return Result(
        "\n".join([f"{a.out}: one storage for all ranks", table(rows)]),
        {"out": str(a.out), "ranks": [asdict(r) for r in ranks]},
    ), []


PROBE = Verb(
    name="probe",
    help="whether all ranks see one storage at a destination, before the work",
    arguments=_arguments,
    run=_run,
    silent=True,
    not_proven=None,
)
