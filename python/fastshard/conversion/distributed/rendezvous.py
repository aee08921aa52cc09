"""The rendezvous of a run's ranks at its destination. Each rank registers its arguments, and an error of one
rank stops all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ... import _core
from ...common import codes
from ...common.addresses import check_local
from ...common.errors import FastshardError, Finding, from_core
from ...common.option_checks import checked, refused
from ...common.options import StrPath
from ...common.records import dataclass
from .launcher_env import Rank, detect, is_alone

__all__ = ["Meeting", "check_storage"]

#: Seconds that ranks wait for one another. The last nodes of a cluster may take this long to start.
TIMEOUT = 600.0


def rank_of(rank: int | str | None, world: int | None) -> Rank | None:
    """Return the rank of this process: the given one, the launcher's for ``auto``, or None for a single
    process.

    Raises:
        FastshardError: ``FS515`` for invalid values, and as
            :func:`fastshard.conversion.distributed.launcher_env.detect`.
    """
    if rank is None:
        if world is not None:
            raise FastshardError.of(
                codes.USAGE, "world is passed without rank", help="pass --rank too, a number or auto"
            )
        return None
    if rank == "auto":
        return detect(world)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise refused("rank", "an integer, or 'auto'", rank)
    if world is None:
        raise FastshardError.of(
            codes.USAGE, "rank is passed without world", help="pass the number of ranks with --world"
        )
    if not 0 <= rank < world:
        raise FastshardError.of(
            codes.USAGE,
            "rank",
            expected=f"0 to {world - 1}, of {world} ranks",
            got=str(rank),
            help="count ranks from 0",
        )
    return Rank(rank, world, "as given")


def seconds(timeout: float | None) -> float:
    """Check and return the number of seconds that ranks wait for one another.

    Raises:
        FastshardError: ``FS515`` for an invalid time.
    """
    if timeout is None:
        return TIMEOUT
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise refused("timeout", "seconds, more than 0", timeout)
    return float(timeout)


def patience(timeout: float) -> float:
    """Return the seconds within which a working process must show a sign of life, for a timeout of ranks."""
    return min(max(timeout / 8, 2.0), 30.0)


class Meeting:
    """The ranks of a run that meet at its destination.

    It is a context: an exception inside also stops the other ranks.
    """

    def __init__(self, out: StrPath, rank: Rank, timeout: float, words: Mapping[str, Any]) -> None:
        """Wait until rank 0 has seen all ranks on one storage.

        Raises:
            FastshardError: ``FS522`` with the ranks that did not appear; ``FS524`` if ranks have different
                arguments; ``FS509`` if another process has this rank.
        """
        #: The number of this rank.
        self.rank = rank
        #: Seconds that it waits for other ranks.
        self.timeout = timeout
        about = {
            "rank": rank.rank,
            "world": rank.world,
            "timeout": timeout,
            "words": {"version": _core.__version__, **words},
            "hosts": list(rank.hosts),
        }
        try:
            self.core = _core.Meeting(os.fspath(out), about)
        except _core.CoreError as error:
            raise from_core(error) from None

    def ranks(self) -> list[_core.MetRank]:
        """Return all ranks on rank 0; on other ranks, rank 0 and this rank."""
        return self.core.ranks()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with contextlib.suppress(_core.CoreError):
            if error is None:
                self.core.done()
            else:
                findings = getattr(error, "findings", None) or [
                    Finding.of(codes.INTERRUPTED, f"stopped: {error}")
                ]
                if isinstance(error, FastshardError):
                    error.findings = findings = self._placed(findings)
                self.core.stop(findings)
        self.core.close()

    def _placed(self, findings: list[Finding]) -> list[Finding]:
        """Add this rank's number and host to its errors that name no rank, because all ranks report them."""
        own = next(r for r in self.ranks() if r["rank"] == self.rank.rank)
        return [
            f.replace(rank=f"rank {self.rank.rank}", host=f.host or own["host"])
            if f.severity == "error" and f.rank is None
            else f
            for f in findings
        ]


def words_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that affect a result, in the form that ranks compare: paths and objects are
    strings."""
    return {
        name: _plain(value) for name, value in sorted(options.items()) if value not in (None, (), [], False)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return json.loads(json.dumps(value, default=repr))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value)


@contextlib.contextmanager
def met(
    out: StrPath, rank: Rank | None, timeout: float, words: Mapping[str, Any]
) -> Iterator[Meeting | None]:
    """Open the rendezvous of a run's ranks, and yield it; yield None for a single process."""
    if rank is None:
        yield None
        return
    with Meeting(out, rank, timeout, words) as meeting:
        yield meeting


@dataclass(frozen=True)
class SeenRank:
    """A rank that reported at a destination.

    Examples:
        >>> fastshard.check_storage("out", rank=0, world=1)
        [SeenRank(rank=0, host='...', pid=..., storage='...')]
    """

    rank: int
    host: str
    pid: int
    #: Its filesystem and mount point.
    storage: str


@checked
def check_storage(
    out: StrPath, *, rank: int | str | None = "auto", world: int | None = None, timeout: float | None = None
) -> list[SeenRank]:
    """Checks that all ranks see the same storage at a destination; leaves no file behind.

    Args:
        out: the destination of a later run.
        rank: this process's rank from 0, or ``"auto"`` to read it from its launcher. A process without a
            launcher is the only rank.
        world: number of ranks, if no launcher states it.
        timeout: seconds to wait for the others; default 600.

    Returns:
        All ranks; for ranks other than 0 these are rank 0 and the rank itself.

    Raises:
        FastshardError: ``FS522`` with the ranks that did not appear, or for a rank with a separate disk.

    Examples:
        >>> seen = fastshard.check_storage("out", rank=0, world=1)  # each rank makes this call
        >>> [rank.rank for rank in seen]
        [0]
    """
    check_local(out)
    if rank == "auto" and world is None and is_alone():
        rank, world = 0, 1
    this = rank_of(rank, world)
    if this is None:
        raise FastshardError.of(
            codes.USAGE,
            "a single process has no other host to exchange files with",
            help="pass rank and world",
        )
    with Meeting(out, this, seconds(timeout), {"probe": True}) as meeting:
        return [SeenRank(r["rank"], r["host"], r["pid"], r["storage"]) for r in meeting.ranks()]
