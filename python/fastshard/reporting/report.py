"""A report page about a checkpoint: its description, missing parts, and value distributions. It is
self-contained and safe to open."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.manifests import run_options
from ..checkpoint.open_checkpoint import CheckpointSource, as_checkpoint
from ..common import memory_budget
from ..common.errors import FastshardError
from ..common.options import Opening, StrPath
from ..common.progress import Progress
from ..common.progress import Report as Told
from ..common.records import replace

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .report_data import Report

__all__ = ["report"]


@memory_budget.kept
def report(
    source: CheckpointSource,
    *,
    against: CheckpointSource | None = None,
    stats: bool = False,
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Told = False,
    **opening: Unpack[Opening],
) -> str:
    """Makes an HTML page about a checkpoint from its headers and its manifest.

    A checkpoint that is broken or cannot be opened gets a page too.

    Args:
        source: an opened checkpoint, a path, or several node-local paths.
        against: another checkpoint for comparison, e.g. the one before a conversion. It is opened with the
            same options.
        stats: read all data for distributions and hashes; otherwise the page shows those in a manifest, if
            any.
        memory: as for :func:`fastshard.convert`.
        threads: worker threads.
        progress: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Raises:
        FastshardError: ``FS514`` without Jinja2 and vl-convert (the extra ``report``); ``FS501``, ``FS502``
            and ``FS515`` for invalid paths and options.

    Examples:
        >>> with open("report.html", "w", encoding="utf-8") as file:
        ...     _ = file.write(fastshard.report("lossy"))
    """
    from . import page

    told = about(
        source, against=against, stats=stats, memory=memory, threads=threads, progress=progress, **opening
    )
    return page.rendered(told)


def about(
    source: CheckpointSource,
    *,
    against: CheckpointSource | None = None,
    stats: bool = False,
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Told = False,
    **opening: Unpack[Opening],
) -> Report:
    """Gather the content of :func:`report` as plain data.

    Raises:
        FastshardError: as :func:`report`.
    """
    from . import charts, page, report_data

    # Before all is read for nothing.
    page.needed()
    undrawn = charts.undrawn()
    if stats and undrawn is None:
        charts.needed()
    try:
        checkpoint = as_checkpoint(source, threads=threads, **opening)
        checkpoint.findings  # noqa: B018 - planning is part of opening
    except FastshardError as error:
        return report_data.unopened(_paths(source), _about_checkpoint(error))
    other: Checkpoint | FastshardError | None = None
    if against is not None:
        try:
            other = as_checkpoint(against, threads=threads, **opening)
            other.findings  # noqa: B018
        except FastshardError as error:
            other = _about_checkpoint(error)
    catalogs = [c.opened.catalog for c in (checkpoint, other) if isinstance(c, Checkpoint)]
    with Progress(progress) as bar:
        run = run_options(memory, threads, *catalogs)
        name = ", ".join(map(str, _paths(against))) if against is not None else ""
        told = report_data.gathered(checkpoint, other, name, stats=stats, run=run, bar=bar)
    return replace(told, undrawn=undrawn) if told.has_distributions else told


def _about_checkpoint(error: FastshardError) -> FastshardError:
    """Return an error that concerns the checkpoint.

    Raises:
        FastshardError: the error itself, if it concerns the call.
    """
    if error.code.startswith("FS5") and not error.findings[0].is_a("reportable"):
        raise error
    return error


def _paths(source: CheckpointSource) -> list[StrPath]:
    if isinstance(source, Checkpoint):
        return list(source.listing.given())
    if isinstance(source, (str, Path)) or not isinstance(source, Iterable):
        return [source]
    return list(source)
