"""Leftovers of ended runs at a destination."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import _core
from ..common.addresses import check_settings, find_scheme
from ..common.errors import from_core
from ..common.options import StrPath
from .distributed import rendezvous
from .leftovers import Leftover, StoredResult

__all__ = ["Leftover", "StoredResult", "clean"]


def clean(
    out: StrPath,
    *,
    abandon: str | None = None,
    timeout: float | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> list[Leftover]:
    """Removes the leftovers of interrupted runs at a destination, unless a run can resume them.

    Args:
        out: the destination: a directory or an address.
        abandon: a resumable run to remove: its id, or at least 8 digits of its folder's name.
        timeout: seconds within which a working process must show a sign of life; default 30.
        dry_run: report what would be removed, and remove nothing.
        storage_options: settings of the store that an address names, as for :func:`fastshard.open`.

    Returns:
        The leftovers, and the fate of each.

    Raises:
        FastshardError: ``FS501`` if the run to remove does not exist; other codes for system errors.

    Examples:
        >>> run = fastshard.split("run", "out", parts=2)  # no process writes the parts
        >>> [leftover.fate for leftover in fastshard.clean("out")]
        ['resumable']
        >>> [leftover.fate for leftover in fastshard.clean("out", abandon=run.id)]
        ['removed']
    """
    patience = 30.0 if timeout is None else rendezvous.seconds(timeout)
    if (scheme := find_scheme(out)) is not None:
        from . import prefix_leftovers

        settings = check_settings(storage_options)
        return prefix_leftovers.collect(scheme, os.fspath(out), settings, abandon, patience, dry_run)
    try:
        found = _core.collect(os.fspath(out), abandon, patience, dry_run)
    except _core.CoreError as error:
        raise from_core(error) from None
    return [
        Leftover(path, run, fate, size, _stored(os.fspath(out), results))
        for path, run, fate, size, results in found
    ]


def _stored(out: str, results: Sequence[tuple[str, str, bool]]) -> tuple[StoredResult, ...]:
    """Return results, the newer one first, each with a command that moves it to a free path."""
    taken: set[str] = set()
    stored = []
    for path, version, complete in sorted(results, key=lambda result: result[1]):
        target = out.rstrip("/") or out
        for number in range(1, 1000):
            if target not in taken and not os.path.lexists(target):
                break
            target = f"{out.rstrip('/')}-{version}" + (f"-{number}" if number > 1 else "")
        # Within a destination that cannot be replaced there is no place beside it.
        apart = not Path(path).is_relative_to(Path(out).resolve())
        command = f"mv {shlex.quote(path)} {shlex.quote(target)}" if complete and apart else None
        taken.add(target)
        stored.append(StoredResult(path, version, complete, command))
    return tuple(stored)
