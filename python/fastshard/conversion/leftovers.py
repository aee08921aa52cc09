"""Leftovers of ended runs."""

from __future__ import annotations

from ..common.records import dataclass

__all__ = ["Leftover", "StoredResult"]


@dataclass(frozen=True)
class StoredResult:
    """A result in the folder of an interrupted run."""

    path: str
    #: ``older`` (the result at the destination before the run) or ``newer`` (the run's own result).
    version: str
    #: True if the result is complete.
    complete: bool
    #: A command that restores it; None if only ``--resume`` can.
    command: str | None


@dataclass(frozen=True)
class Leftover:
    """The leftovers of an earlier run at a destination.

    Examples:
        >>> run = fastshard.split("run", "out", parts=2)  # no process writes the parts
        >>> leftover = fastshard.clean("out", dry_run=True)[0]
        >>> leftover.run == run.id, leftover.fate
        (True, 'resumable')
    """

    path: str
    #: Id of the run; None if it is unknown.
    run: str | None
    #: ``removed``, ``resumable`` (kept: ``--resume`` continues it), ``at_work``, ``complete`` (kept: only
    #: publishing or cleaning up remains; it contains ``results``) or ``foreign``.
    fate: str
    #: Bytes of storage that it takes, or took before its removal.
    bytes: int
    #: The newer result, the older one that it replaces, or both.
    results: tuple[StoredResult, ...] = ()
