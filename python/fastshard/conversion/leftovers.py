"""Leftovers of ended runs."""

from __future__ import annotations

from ..common.records import dataclass

__all__ = ["Leftover", "StoredResult"]


@dataclass(frozen=True)
class StoredResult:
    """A result in the folder of an interrupted run."""

    path: str
    #: ``older`` (what was at the destination before the run) or ``newer`` (what the run has made).
    version: str
    #: True if all of it is there.
    complete: bool
    #: A command that gets it back; None where ``--resume`` alone can.
    command: str | None


@dataclass(frozen=True)
class Leftover:
    """What an earlier run left at a destination."""

    path: str
    #: Id of the run; None if nothing says it.
    run: str | None
    #: ``removed``, ``resumable`` (kept: ``--resume`` continues it), ``at_work``, ``complete`` (kept: it has
    #: only to be published, or cleaned up; ``results`` are in it) or ``foreign``.
    fate: str
    #: Bytes of storage that it takes, or took.
    bytes: int
    #: The newer result, the older one that it replaces, or both.
    results: tuple[StoredResult, ...] = ()
