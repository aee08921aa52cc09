"""Check that all nodes of a cluster can access the destination."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .... import _core
from ....common import codes, safe_files
from ....common.errors import FastshardError, Finding, error_for
from .cluster import Node, called, describe_error, line_of, living, on, wait

__all__ = ["look", "sharing"]

#: Seconds in which a node's worker must start: its environment may have to be installed first.
_START = 600.0
#: Seconds in which the other nodes must answer after one has reported that it cannot see the destination.
_OTHERS = 2.0
#: Seconds between two checks for answers.
_LOOK = 0.5


def look(path: str, token: str, answer: str) -> dict[str, Any]:
    """Check on a node that a file has the expected content, and write the answer to a file next to it.

    Returns:
        ``host``, ``storage`` and ``version`` of this process; ``error``, the reason why it cannot read the
        file, or None.
    """
    about = {"host": socket.gethostname(), "storage": _core.storage_of(path), "version": _core.__version__}
    try:
        if safe_files.read_bytes(Path(path), 64, code=codes.NOT_SHARED, may_change=True) != token.encode():
            return {**about, "error": "it has another file"}
        (Path(path).parent / answer).write_text(answer)
    except (OSError, FastshardError) as error:
        return {**about, "error": getattr(error, "strerror", None) or line_of(error)}
    return {**about, "error": None}


@contextlib.contextmanager
def _beacon(out: Path) -> Iterator[tuple[Path, str] | None]:
    """Create a file next to a destination and yield its path and content.

    The function yields None if the file cannot be created; the start of the run reports why.
    """
    real = Path(os.path.realpath(out))
    inside = real.is_dir() and (os.path.ismount(real) or not os.access(real.parent, os.W_OK))
    # The folder in which ranks meet, and a name of their files: `fastshard clean` knows what a dead process
    # leaves there.
    called = os.fsdecode(os.fsencode(real.name)[:200])
    folder = real / ".fastshard-ranks" if inside else real.parent / f".{called}.fastshard-ranks"
    token = uuid.uuid4().hex
    file = folder / f"{token}.new"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        file.write_text(token)
    except OSError:
        yield None
        return
    try:
        yield file, token
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
        # Others may be meeting there.
        with contextlib.suppress(OSError):
            folder.rmdir()


def sharing(ray: Any, nodes: list[Node], out: Path) -> list[Node]:
    """Return the live nodes, after a check that they and this process share the storage of a destination.

    Raises:
        FastshardError: ``FS522`` for nodes without access; ``FS524`` for nodes with another version.
    """
    with _beacon(out) as beacon:
        if beacon is None:
            return nodes
        file, token = beacon
        answers = {node: f"{uuid.uuid4().hex}.new" for node in nodes}
        try:
            replies = _answers(
                ray,
                {
                    node: ray.remote(look)
                    .options(num_cpus=0, max_retries=1, scheduling_strategy=on(ray, node.id, soft=False))
                    .remote(str(file), token, answer)
                    for node, answer in answers.items()
                },
            )
            findings = [
                f for node, about in replies.items() for f in _unlike(node, about, file, answers[node])
            ]
        finally:
            for answer in answers.values():
                with contextlib.suppress(OSError):
                    (file.parent / answer).unlink()
    if findings:
        raise error_for(findings)
    return [node for node in nodes if node in replies]


def _answers(ray: Any, requests: dict[Node, Any]) -> dict[Node, Any]:
    """Return the answers of nodes: a document, or an error of Ray.

    The result omits nodes that have died meanwhile.
    """
    nodes = {ref: node for node, ref in requests.items()}
    replies: dict[Node, Any] = {}
    waiting, until = list(nodes), time.monotonic() + _START
    while waiting and (left := until - time.monotonic()) > 0:
        done, waiting = wait(ray, waiting, min(left, _LOOK))
        for ref in done:
            try:
                replies[nodes[ref]] = ray.get(ref)
            except ray.exceptions.RayError as error:
                replies[nodes[ref]] = error
            if not _sees(replies[nodes[ref]]):
                # Others of its kind are named too, if they answer at once.
                until = min(until, time.monotonic() + _OTHERS)
    alive = {node.id for node in living(ray)}
    for ref in waiting:
        ray.cancel(ref, force=True)
        if all(_sees(about) for about in replies.values()):
            replies[nodes[ref]] = TimeoutError(f"the node did not answer within {_START:g} s")
    gone = [node for node, about in replies.items() if isinstance(about, Exception) and node.id not in alive]
    return {node: about for node, about in replies.items() if node not in gone}


def _sees(about: Any) -> bool:
    return isinstance(about, dict) and about["error"] is None


def _unlike(node: Node, about: Any, file: Path, answer: str) -> list[Finding]:
    """Report what is wrong with a node, from its answer."""
    if isinstance(about, Exception):
        return [
            Finding.of(
                codes.NOT_SHARED,
                f"this node did not report whether it sees the destination: {describe_error(about)}",
                file=str(file.parent),
                host=str(node),
                help="install the fastshard version of this host there, and check Ray's logs of that node",
            )
        ]
    host = called(about["host"], node.id)
    found = []
    if about["version"] != _core.__version__:
        help_ = "install the same version on all nodes"
        found.append(
            Finding.of(
                codes.RANKS_DIFFER,
                "this node has another version of fastshard",
                host=host,
                expected=_core.__version__,
                got=about["version"],
                help=help_,
            )
        )
    what = f"this node does not see files written next to the destination ({about['error']})"
    if about["error"] is None:
        try:
            if (
                safe_files.read_bytes(file.parent / answer, 64, code=codes.NOT_SHARED, may_change=True)
                == answer.encode()
            ):
                return found
            what = "files that this node writes next to the destination have other contents here"
        except (OSError, FastshardError):
            what = "files that this node writes next to the destination are not visible here"
    here = f"the storage of {socket.gethostname()} ({_core.storage_of(str(file))})"
    found.append(
        Finding.of(
            codes.NOT_SHARED,
            what,
            file=str(file.parent),
            host=host,
            expected=here,
            got=about["storage"],
            help="mount the shared storage at this path, or choose a destination on it; this host may have "
            "a separate disk there. The run wrote nothing",
        )
    )
    return found
