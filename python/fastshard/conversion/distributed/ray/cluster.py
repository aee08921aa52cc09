"""The connection to Ray, and the nodes of its cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from ....common import codes
from ....common.errors import FastshardError
from ....common.optional_imports import imported
from ....common.records import dataclass
from ....common.thread_counts import default_threads

__all__ = [
    "Node",
    "called",
    "connected",
    "describe_error",
    "end",
    "library",
    "line_of",
    "living",
    "nodes_for",
    "on",
    "wait",
]

#: Seconds to wait for an answer from a cluster's address.
_REACH = 5.0
#: Seconds between two checks whether a task has ended.
_PAUSE = 0.05
#: Seconds in which tasks may stop at their next tile; the others are killed.
_STOP = 10.0
#: Size in bytes of the object store if Ray is started here. It stays unused, but Ray requires at least 75
#: MiB.
_STORE = 80 << 20


@dataclass(frozen=True)
class Node:
    """A node of the cluster on which tasks can run."""

    id: str
    host: str
    cpus: float

    def __str__(self) -> str:
        return called(self.host, self.id)


def called(host: str, node: str) -> str:
    """Describe a node for messages."""
    return f"{host} (Ray node {node[:8]})"


def library() -> Any:
    """Import Ray.

    Raises:
        FastshardError: ``FS514`` if Ray is not installed.
    """
    return imported(
        "ray",
        "ray.exceptions",
        "ray.util.scheduling_strategies",
        purpose="running tasks on a cluster",
        extra="ray",
    )


@contextlib.contextmanager
def connected(address: str | None, cpus: int | None) -> Iterator[Any]:
    """Connect to Ray and yield it; an earlier connection stays open."""
    ray = library()
    if ray.is_initialized():
        yield ray
        return
    how: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        how |= {"num_cpus": max(default_threads(), cpus or 1), "include_dashboard": False}
        how["object_store_memory"] = _STORE
    try:
        try:
            _reach(address)
            with _as_it_was(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                ray.init(**how)
        except Exception as error:
            # Of a slow start it is no class of its own.
            raise FastshardError.of(
                codes.USAGE,
                f"Ray cannot be reached: {line_of(error)}",
                got=repr(address),
                help="pass the address of a cluster that this host is part of: 'auto' on one of its nodes, "
                "or 'local'",
            ) from None
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str | None) -> None:
    """Check that a server listens at an address, as Ray itself retries for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Restore the signal handlers after Ray has started, and disable its usage statistics.

    Ray replaces the handler of SIGTERM, which stops a run, and sends usage statistics by default.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers} if main else {}
    quiet = "RAY_USAGE_STATS_ENABLED"
    silent = quiet not in os.environ
    if silent:
        os.environ[quiet] = "0"
    try:
        yield
    finally:
        if silent:
            os.environ.pop(quiet, None)
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def line_of(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def living(ray: Any) -> list[Node]:
    """List nodes that are alive and have CPUs, the largest first."""
    nodes = [
        Node(n["NodeID"], n["NodeManagerHostname"], float(n["Resources"].get("CPU", 0)))
        for n in ray.nodes()
        if n["Alive"]
    ]
    return sorted((n for n in nodes if n.cpus > 0), key=lambda n: (-n.cpus, n.id))


def nodes_for(ray: Any, cpus: int | None) -> list[Node]:
    """List the nodes on which parts can run.

    Raises:
        FastshardError: ``FS515`` if there is no such node.
    """
    nodes = living(ray)
    fitting = [node for node in nodes if cpus is None or node.cpus >= cpus]
    if not fitting:
        largest = f"the largest node has {nodes[0].cpus:g}" if nodes else "no node has any"
        raise FastshardError.of(
            codes.USAGE, "cpus", expected=f"a node with at least {cpus or 1} CPUs", got=largest
        )
    return fitting


def on(ray: Any, node: str, *, soft: bool) -> Any:
    """Return the scheduling strategy of a node: only that node, or preferably that node (`soft`)."""
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=soft)


def wait(ray: Any, refs: list[Any], seconds: float, *, every: bool = False) -> tuple[list[Any], list[Any]]:
    """Wait until one task or all tasks have ended, or the time is up; return ended and other tasks.

    The function sleeps itself instead of waiting in Ray, which replaces the exception of a signal handler by
    a KeyboardInterrupt.
    """
    until = time.monotonic() + seconds
    while True:
        ended, left = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        if not left or (ended and not every) or time.monotonic() >= until:
            return ended, left
        time.sleep(_PAUSE)


def end(ray: Any, refs: list[Any]) -> None:
    """Stop tasks: first ask them to stop, then kill them."""
    for force, seconds in ((False, _STOP), (True, _STOP / 2)):
        for ref in refs:
            ray.cancel(ref, force=force)
        _, refs = wait(ray, refs, seconds, every=True)


def describe_error(error: BaseException) -> str:
    """Describe an error of Ray; if a task raised it, describe its cause."""
    cause = getattr(error, "cause", None)
    return f"{type(cause).__name__}: {line_of(cause)}" if cause is not None else line_of(error)
