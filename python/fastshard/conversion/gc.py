"""What runs that are over have left at a destination."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .. import _core
from ..common.errors import from_core
from ..common.options import StrPath
from .distributed import rendezvous

__all__ = ["Leaving", "gc"]


@dataclass(frozen=True)
class Leaving:
    """What an earlier run left at a destination."""

    path: str
    #: Id of the run; None if nothing says it.
    run: str | None
    #: ``removed``, ``resumable`` (kept: ``--resume`` continues it), ``at_work``, ``complete`` (kept: it has only to be
    #: published, or cleaned up) or ``foreign``.
    fate: str
    #: Bytes of storage that it takes, or took.
    bytes: int


def gc(
    out: StrPath, *, abandon: str | None = None, timeout: float | None = None, dry_run: bool = False
) -> list[Leaving]:
    """Removes what interrupted runs left at a destination and no run can resume.

    Args:
        out: the destination.
        abandon: a run to be given up though it could be continued: its id, or the digits of its folder; 8 at least.
        timeout: seconds in which a process at work shows a sign of life; default 30.
        dry_run: say what would be removed, and remove nothing.

    Returns:
        What was found, and what became of it.

    Raises:
        FastshardError: ``FS501`` if the run to be given up is not there; what the system says.
    """
    patience = 30.0 if timeout is None else rendezvous.seconds(timeout)
    try:
        found = _core.collect(os.fspath(out), abandon, patience, dry_run)
    except _core.CoreError as error:
        raise from_core(error) from None
    return [Leaving(*leaving) for leaving in found]
