"""Ranks as Ray tasks, each bound to one node that has a part of the checkpoint on its own disk."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Mapping
from typing import Any

from ....checkpoint.manifests import Manifest
from ....common import codes
from ....common.errors import UNPUBLISHED, FastshardError, Finding, carry, error_for
from ....common.progress import Callback
from ...convert import convert
from .cluster import Node, called, describe_error, end, library, line_of, living, on, wait
from .tasks import LOOK, Board, telling

__all__ = ["on_own_disks", "take_part"]

#: Seconds in which ranks must end after one rank has stopped all.
_FAREWELL = 20.0


def take_part(
    arguments: Mapping[str, Any], rank: int, world: int, threads: int, board: Any
) -> dict[str, Any]:
    """Take part in a run as one of its ranks, on a node.

    Returns:
        ``findings`` with the reason for a failure, or the findings of the result; ``manifest`` of the result;
        ``host`` and ``node`` of this process.
    """
    ray = library()
    here = {"host": socket.gethostname(), "node": ray.get_runtime_context().get_node_id(), "manifest": None}
    try:
        manifest = convert(
            **arguments,
            rank=rank,
            world=world,
            threads=threads,
            node_local=True,
            progress=telling(board, rank),
        )
    except FastshardError as error:
        return {**here, "findings": error.findings}
    return {**here, "manifest": manifest.document, "findings": manifest.findings}


def on_own_disks(
    ray: Any,
    nodes: list[Node],
    arguments: dict[str, Any],
    cpus: int | None,
    threads: int | None,
    retries: int,
    on_progress: Callback | None,
) -> Manifest:
    """Run a rank on each node, and resume the run if a worker has died.

    Args:
        ray: Ray, connected.
        nodes: the nodes that have a part of the checkpoint.
        arguments: arguments of :func:`fastshard.convert`.
        cpus: CPUs that each rank reserves; default all of its node.
        threads: threads of each rank; default ``cpus``, or as many as its node has.
        retries: number of retries of all ranks.
        on_progress: called with bytes done and total bytes.

    Raises:
        FastshardError: as :func:`fastshard.convert`; ``FS523`` for a node that has died, because no other
            node has its files.
        BaseException: the exception from ``on_progress`` or a signal handler, with ``FS510`` as its
            ``findings``.
    """
    # The same order in a later run: which rank has which files is part of what is made.
    nodes = sorted(nodes, key=lambda node: (node.host, node.id))
    board = None
    if on_progress is not None:
        here = ray.get_runtime_context().get_node_id()
        options = {"num_cpus": 0, "scheduling_strategy": on(ray, here, soft=True)}
        board = ray.remote(Board).options(**options).remote([0] * len(nodes))
    try:
        for left in range(retries, -1, -1):
            outcome = _once(ray, nodes, arguments, cpus, threads, board, on_progress)
            if isinstance(outcome, Manifest):
                return outcome
            # A worker comes back, a node does not: Ray gives it another name.
            if left == 0 or not {node.id for node in nodes} <= {node.id for node in living(ray)}:
                raise error_for(outcome)
            arguments = {**arguments, "resume": True}
    finally:
        if board is not None:
            ray.kill(board)
    raise AssertionError("a run ends with a result or with an error")


def _once(
    ray: Any,
    nodes: list[Node],
    arguments: dict[str, Any],
    cpus: int | None,
    threads: int | None,
    board: Any,
    on_progress: Callback | None,
) -> Manifest | list[Finding]:
    """Run all ranks once; return the result, or findings about ranks that have died.

    Raises:
        FastshardError: with the findings for which the ranks stopped.
    """
    pending: dict[Any, int] = {}
    for rank, node in enumerate(nodes):
        task = ray.remote(take_part).options(
            num_cpus=cpus or node.cpus,
            max_retries=0,
            scheduling_strategy=on(ray, node.id, soft=False),
            name=f"fastshard rank {rank}",
        )
        given = threads or cpus or max(1, int(node.cpus))
        pending[task.remote(arguments, rank, len(nodes), given, board)] = rank
    manifests: dict[int, Manifest] = {}
    stopped: list[Finding] = []
    died: list[Finding] = []
    try:
        until = math.inf
        while pending and not died and time.monotonic() < until:
            done, _ = wait(ray, list(pending), LOOK)
            if stopped:
                # One whose node has no room for it has not begun, and is not waited for.
                until = min(until, time.monotonic() + _FAREWELL)
            for ref in done:
                rank = pending.pop(ref)
                node = nodes[rank]
                try:
                    outcome = ray.get(ref)
                except ray.exceptions.RayTaskError as error:
                    stopped.append(
                        Finding.of(
                            codes.INTERNAL,
                            f"rank {rank}: {describe_error(error)}",
                            host=str(node),
                            rank=f"rank {rank}",
                        )
                    )
                    continue
                except ray.exceptions.RayError as error:
                    died.append(_dead(rank, node, line_of(error)))
                    continue
                findings = outcome["findings"]
                if outcome["manifest"] is None:
                    host = called(outcome["host"], outcome["node"])
                    stopped += [f if f.host or f.rank else f.replace(host=host) for f in findings]
                else:
                    manifests[rank] = Manifest(outcome["manifest"], findings)
            if on_progress is not None and board is not None:
                with contextlib.suppress(ray.exceptions.RayError):
                    on_progress(*ray.get(board.seen.remote()))
    except BaseException as error:
        end(ray, list(pending))
        way = f"continue the run; {UNPUBLISHED}"
        carry(error, [Finding.of(codes.INTERRUPTED, "stopped by the user", help=way, run=["--resume"])])
        raise
    end(ray, list(pending))
    if died and 0 not in manifests:
        return died
    if 0 not in manifests:
        # All ranks tell what one has stopped for.
        raise error_for(list(dict.fromkeys(stopped)))
    return manifests[0]


def _dead(rank: int, node: Node, why: str) -> Finding:
    return Finding.of(
        codes.PART_MISSING,
        f"a rank died: {why}",
        rank=f"rank {rank}",
        host=str(node),
        help="continue the run once this node is back, or copy the files of its disk elsewhere (`fastshard "
        f"verify` of the other parts names them); {UNPUBLISHED}",
        run=["--resume"],
    )
