"""``fastshard check-storage``: a check that all ranks see the same storage at a destination."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby

from ...common.options import Ranked
from ...common.records import asdict
from ...conversion.distributed.rendezvous import SeenRank, check_storage, rank_of
from ..render import table
from ..shared_arguments import add_common, add_ranks, given
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="DEST", help="the destination of the planned run")
    add_ranks(parser)
    parser.set_defaults(rank="auto")
    add_common(parser, run=False, reads=False)


def _run(a: argparse.Namespace) -> Outcome:
    ranks = check_storage(a.out, **given(a, Ranked))
    document = {"out": str(a.out), "ranks": [asdict(r) for r in ranks]}
    if len(ranks) == 1:
        text = f"{a.out}: can be written, 1 rank ({ranks[0].storage}); start it on every host to compare them"
    elif (this := rank_of(a.rank, a.world)) is None or this.rank == 0:
        same = "all ranks see the same storage"
        text = "\n".join([f"{a.out}: {same}", table([_row(alike) for alike in _by_storage(ranks)])])
    else:
        # The first rank tells of all.
        text = ""
    return Result(text, document), []


def _by_storage(ranks: Sequence[SeenRank]) -> list[list[SeenRank]]:
    """Group consecutive ranks that see the same storage."""
    return [list(alike) for _, alike in groupby(ranks, key=lambda rank: rank.storage)]


def _row(alike: Sequence[SeenRank]) -> tuple[str, ...]:
    first, last = alike[0], alike[-1]
    hosts = dict.fromkeys(rank.host for rank in alike)
    shown = next(iter(hosts)) if len(hosts) == 1 else f"{first.host} to {last.host}"
    return (f"rank {first.rank}" if first is last else f"rank {first.rank}-{last.rank}", shown, first.storage)


CHECK_STORAGE = Verb(
    name="check-storage",
    help="check that all ranks see the same output directory",
    arguments=_arguments,
    run=_run,
    silent=True,
    often=("--rank", "--world", "--timeout"),
    examples=("fastshard check-storage out",),
)
