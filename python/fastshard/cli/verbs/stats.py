"""``fastshard stats``: distributions per tensor."""

from __future__ import annotations

import argparse
import shutil
import sys

from ...verification.stats import HISTOGRAM_EDGES
from ...verification.stats import with_findings as stats_of
from .. import styles
from ..shared_arguments import add_choosing, add_common, add_exit_zero, add_source, opening, progress
from ..stats_table import stats_table
from ..verb import Outcome, Result, Verb

#: Minimum width of a terminal, in columns, for histograms.
_WIDE = 130


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, like=True)
    add_choosing(parser)
    add_common(parser)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    gathered, findings = stats_of(
        a.ckpt, include=a.include, exclude=a.exclude, memory=a.memory, progress=progress(a), **opening(a)
    )
    if a.output_format == "json":
        tensors = {name: tensor.to_dict() for name, tensor in gathered.items()}
        return Result(document={"tensors": tensors, "histogram_edges": list(HISTOGRAM_EDGES)}), findings
    columns = shutil.get_terminal_size().columns
    paint = styles.painter(sys.stdout, a.color)
    text = stats_table(gathered, wide=bool(a.verbose) or columns >= _WIDE, paint=paint)
    return Result(text), findings


STATS = Verb(
    name="stats",
    help="show min, max, mean, std, zeros and NaN of every tensor",
    description="""\
        Makes one streaming pass over the full tensors. The histogram has 64 fixed bins, so histograms of
        two checkpoints can be compared: 32 powers of two for each sign, from 2^-24 to 2^6, with smaller
        and larger numbers in the first and last bin. Zeros, NaN and infinities are counted separately.
        Zero slabs are indices of a dimension at which every value is zero: lost shards look like that.""",
    arguments=_arguments,
    run=_run,
    often=("--include", "--exclude", "--memory", "--json"),
    examples=("fastshard stats run", "fastshard stats model --include '*attention*'"),
)
