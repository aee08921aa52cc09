"""The grid of one side of a conversion: its ranks or files, and the layers of which each has a piece."""

from __future__ import annotations

from collections import Counter

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.plan import Plan
from ..common.listing import store_of
from ..common.records import replace
from ..findings.causes import locate_files
from ..models.tensor_roles import place_of
from .grid import Grid, banded
from .grid_cells import Key, Row

__all__ = ["sources_grid"]


def sources_grid(checkpoint: Checkpoint, plan: Plan) -> Grid:
    """Count the tensors of which each rank or file has a piece, by layer of the result.

    Args:
        checkpoint: one side of the conversion.
        plan: the plan of the result's tensors; it has no errors.
    """
    files = [file.path for file in checkpoint.opened.files]
    units = checkpoint.opened.source.files.units
    ranks = {files[unit.file]: unit.rank for unit in units if unit.rank}
    located = locate_files(checkpoint.opened.source, files)
    rows: dict[str, Row] = {}
    held: dict[str, Counter[Key]] = {}
    pieces = 0
    for position, (name, *_) in enumerate(plan.outputs):
        holders: dict[str, list[str]] = {}
        for file in plan.core.sources(position):
            holders.setdefault(ranks.get(file) or store_of(file) or file, []).append(file)
        pieces += len(holders)
        for label, read in holders.items():
            row = rows.setdefault(label, Row(rank=located.get(read[0], {})))
            row.files += [file for file in read if file not in row.files]
            held.setdefault(label, Counter())[place_of(name)] += 1
    for label, counts in held.items():
        rows[label].counts.append(counts)
    made = banded(rows, {*ranks.values()} & rows.keys())
    return replace(made, word="piece") if pieces > len(plan.outputs) else made
