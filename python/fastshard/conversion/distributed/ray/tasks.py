"""Parts of a run as Ray tasks, which are retried if a worker or a node dies."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from ....common import codes
from ....common.errors import UNPUBLISHED, FastshardError, Finding, carry, error_for
from ....common.progress import Callback, Report
from ....common.records import dataclass, replace
from .. import split_runs
from ..split_runs import SplitRun
from .cluster import Node, called, describe_error, end, library, line_of, living, on, wait

__all__ = ["Board", "Tasks", "make_part", "telling"]

#: Seconds between two progress reports of a task, and between two reads of them.
LOOK = 0.5
#: Seconds between two listings of the nodes.
_NODES = 5.0
#: Seconds for which a run without any node waits for a new one.
_NOBODY = 60.0
#: Seconds in which Ray must restart a dead node's part on another node. Ray itself waits minutes for a
#: process that is frozen but not gone.
_FROZEN = 15.0
#: Seconds for which a task waits for another process that writes its part, one that Ray wrongly considers
#: dead.
_TAKEN = 120.0


class Board:
    """An actor with the progress of all parts: tasks report to it, and the caller reads from it."""

    def __init__(self, sizes: list[int]) -> None:
        self._parts = {part: (0, size) for part, size in enumerate(sizes)}

    def tell(self, part: int, done: int, total: int) -> None:
        """Record the progress of a task."""
        self._parts[part] = (done, total)

    def seen(self) -> tuple[int, int]:
        """Return the bytes done, and the total."""
        return sum(done for done, _ in self._parts.values()), sum(total for _, total in self._parts.values())


def telling(board: Any, part: int) -> Report:
    """Return a callback that reports a part's progress to a board at intervals; False without one."""
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LOOK or done == total:
            last = now
            # Who draws the bar may have gone: that is no reason to stop.
            with contextlib.suppress(Exception):
                board.tell.remote(part, done, total)

    return report if board else False


def make_part(
    out: str, run: str, part: int, memory: str | int | None, threads: int, board: Any
) -> dict[str, Any]:
    """Write a part of a run, on a node.

    Returns:
        ``findings`` with the reason for a failure, empty on success; ``host`` and ``node`` of this process.
        Errors of fastshard are not raised, so that Ray neither retries the task nor wraps them.
    """
    ray = library()
    here = {"host": socket.gethostname(), "node": ray.get_runtime_context().get_node_id()}
    begun = time.monotonic()
    while True:
        try:
            split_runs.make_part(
                out, part, run, memory=memory, threads=threads, progress=telling(board, part)
            )
        except FastshardError as error:
            # A worker that Ray has lost may go on for a while: it is waited for as long as it shows signs of
            # life.
            is_taken = error.code == codes.LOCKED and error.rank is not None
            if is_taken and time.monotonic() - begun < _TAKEN:
                time.sleep(2.0)
                continue
            return {**here, "findings": error.findings}
        return {**here, "findings": []}


@dataclass(frozen=True)
class _Task:
    """A part of a run that a task writes."""

    part: int
    node: Node
    #: CPUs that it reserves.
    cpus: float


class Tasks:
    """The parts of a run, written by tasks."""

    def __init__(
        self,
        ray: Any,
        nodes: list[Node],
        cpus: int | None,
        retries: int,
        memory: str | int | None,
        threads: int | None,
    ) -> None:
        self._ray, self._nodes = ray, nodes
        self._retries, self._memory = retries, memory
        self._threads = threads or cpus
        # Another node must be able to take a task over.
        second = nodes[min(1, len(nodes) - 1)].cpus
        self._cpus = {node: float(cpus or min(node.cpus, second)) for node in nodes}
        self._board: Any = None
        self._request: Any = None
        self._nobody: float | None = None
        #: When each task's node was first found dead.
        self._dead: dict[str, float] = {}
        self._looked = time.monotonic()

    def _threads_on(self, node: Node) -> int:
        return self._threads or max(1, int(node.cpus))

    @property
    def most_threads(self) -> int:
        """Number of threads of the node with the most threads; the work is divided for this number."""
        return max(self._threads_on(node) for node in self._nodes)

    def make(self, run: SplitRun, on_progress: Callback | None) -> None:
        """Write all parts.

        Raises:
            FastshardError: with all findings that prevented parts.
            BaseException: the exception from ``on_progress`` or a signal handler, with ``FS510`` as its
                ``findings``.
        """
        way = f"continue the run, or remove {run.folder}; {UNPUBLISHED}"
        if on_progress is not None:
            here = self._ray.get_runtime_context().get_node_id()
            board = self._ray.remote(Board).options(
                num_cpus=0, scheduling_strategy=on(self._ray, here, soft=True)
            )
            self._board = board.remote(run.bytes)
        pending: dict[Any, _Task] = {}
        try:
            for part in range(len(run.bytes)):
                node = self._nodes[part % len(self._nodes)]
                self._start(run, _Task(part, node, self._cpus[node]), pending)
            self._watch(run, pending, on_progress)
        except FastshardError as error:
            findings = [*error.findings, *self._stop(pending)]
            raise error_for([_with_way(f, way) for f in dict.fromkeys(findings)]) from None
        except BaseException as error:
            self._stop(pending)
            carry(error, [Finding.of(codes.INTERRUPTED, "stopped by the user", help=way, run=["--resume"])])
            raise
        finally:
            if self._board is not None:
                self._ray.kill(self._board)
                self._board = None

    def _start(self, run: SplitRun, task: _Task, pending: dict[Any, _Task]) -> None:
        remote = self._ray.remote(make_part).options(
            num_cpus=task.cpus,
            max_retries=self._retries,
            scheduling_strategy=on(self._ray, task.node.id, soft=True),
            name=f"fastshard part {task.part}",
        )
        threads = self._threads_on(task.node)
        ref = remote.remote(run.out, run.id, task.part, self._memory, threads, self._board)
        pending[ref] = task

    def _watch(self, run: SplitRun, pending: dict[Any, _Task], on_progress: Callback | None) -> None:
        while pending:
            done, _ = wait(self._ray, list(pending), LOOK)
            for ref in done:
                if findings := self._came_to(ref, pending.pop(ref)):
                    raise error_for(findings)
            if on_progress is not None and (seen := self._seen()):
                on_progress(*seen)
            if time.monotonic() - self._looked > _NODES:
                self._looked = time.monotonic()
                self._fit(run, pending)
        if on_progress is not None:
            on_progress(sum(run.bytes), sum(run.bytes))

    def _seen(self) -> tuple[int, int] | None:
        """Return the bytes done and the total, as the tasks have reported; None if unknown.

        The function does not wait.
        """
        if self._request is None:
            self._request = self._board.seen.remote()
        if not wait(self._ray, [self._request], 0)[0]:
            return None
        request, self._request = self._request, None
        with contextlib.suppress(self._ray.exceptions.RayError):
            done, total = self._ray.get(request)
            return done, total
        return None

    def _fit(self, run: SplitRun, pending: dict[Any, _Task]) -> None:
        """Adapt waiting tasks to the nodes that are alive.

        Tasks that wait for a node as large as a dead one reserve what is available now. Tasks of a dead node
        start elsewhere. The run waits for a worker that still writes such a part, and keeps its output.
        """
        alive = living(self._ray)
        if not alive:
            self._nobody = self._nobody or self._looked
            if self._looked - self._nobody > _NOBODY:
                raise error_for([self._missing(task, "no node is left") for task in pending.values()])
            return
        self._nobody = None
        nodes = {node.id for node in alive}
        self._dead = {
            task.node.id: self._dead.get(task.node.id, self._looked)
            for task in pending.values()
            if task.node.id not in nodes
        }
        for ref, task in list(pending.items()):
            frozen = self._looked - self._dead.get(task.node.id, self._looked) >= _FROZEN
            if frozen or task.cpus > alive[0].cpus:
                self._ray.cancel(ref)
                del pending[ref]
                cpus = min(task.cpus, alive[0].cpus)
                fitting = [node for node in alive if node.cpus >= cpus]
                node = fitting[task.part % len(fitting)]
                self._start(run, replace(task, node=node, cpus=cpus), pending)

    def _came_to(self, ref: Any, task: _Task) -> list[Finding]:
        """Return the findings that explain why a task failed; none if it did not fail."""
        exceptions = self._ray.exceptions
        try:
            outcome = self._ray.get(ref)
        except exceptions.TaskCancelledError:
            return [self._missing(task, "its task was cancelled")]
        except exceptions.RayTaskError as error:
            what = f"part {task.part}: {describe_error(error)}"
            return [Finding.of(codes.INTERNAL, what, host=str(task.node))]
        except exceptions.RayError as error:
            return [self._missing(task, line_of(error))]
        host = called(outcome["host"], outcome["node"])
        return [f if f.host else f.replace(host=host) for f in outcome["findings"]]

    def _missing(self, task: _Task, why: str) -> Finding:
        return Finding.of(
            codes.PART_MISSING, f"this part of the run did not finish: {why}", rank=f"part {task.part}"
        )

    def _stop(self, pending: dict[Any, _Task]) -> list[Finding]:
        """Stop the remaining tasks; return the findings of those that had already ended."""
        ray, findings = self._ray, list[Finding]()
        ended, _ = wait(ray, list(pending), 0)
        for ref in ended:
            findings += self._came_to(ref, pending.pop(ref))
        end(ray, list(pending))
        return findings


def _with_way(finding: Finding, way: str) -> Finding:
    if finding.severity != "error":
        return finding
    return finding.replace(
        help=f"{finding.help}; {way}" if finding.help else way,
        run=list(dict.fromkeys([*(finding.run or ()), "--resume"])),
    )
