"""A split run (:mod:`fastshard.conversion.distributed.split_runs`) whose parts are Ray tasks. This process
starts and commits the run; the cluster's nodes write the parts.

Ray is imported only when it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....checkpoint.checkpoint import Checkpoint
from ....checkpoint.manifests import Manifest
from ....common import codes, memory_budget
from ....common.errors import FastshardError
from ....common.option_checks import checked, refused
from ....common.options import StrPath, split_request
from ....common.progress import Progress, Report
from ...destinations import find_destination_scheme
from ..split_runs import commit, split
from .cluster import connected, nodes_for
from .node_local import on_own_disks
from .storage_check import sharing
from .tasks import Tasks

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ....common.options import Spread, WriteOptions

__all__ = ["convert", "merge"]

Source = StrPath | Iterable[StrPath]


@memory_budget.kept
def convert(
    source: Source,
    out: StrPath,
    to: str | None = "hf",
    *,
    address: str | None = "local",
    parts: int | None = None,
    cpus: int | None = None,
    retries: int = 3,
    node_local: bool = False,
    expect: StrPath | Mapping[str, Any] | None = None,
    tokenizer: StrPath | None = None,
    memory: str | int | None = None,
    threads: int | None = None,
    progress: Report = False,
    **options: Unpack[WriteOptions],
) -> Manifest:
    """Convert a checkpoint on the nodes of a Ray cluster and publish the result at ``out``.

    The call publishes a complete result or none. This process starts and commits the run; a task on each node
    writes a part. If a worker or node dies, another one writes its part.

    Args:
        source: a path, or several node-local ones; all nodes must see them at the same paths.
        out: destination directory, on storage that all nodes and this process can access.
        to: target layout; None merges under the source's own names.
        address: ``"local"`` starts Ray on this host for the duration of the call; ``"auto"`` or ``HOST:PORT``
            is the address of a cluster; None lets ``ray.init`` choose. A process that is already connected
            keeps its connection.
        parts: number of parts, of equal size; default one for each node that has CPUs.
        cpus: CPUs that each task reserves. By default a task reserves all CPUs of its node, so that a node
            writes one part at a time, but no more than the second largest node has: that node replaces the
            largest if it dies.
        retries: number of retries of a part whose worker or node has died.
        node_local: ``source`` is, on each node, the part of the checkpoint on that node's own disk. A rank
            runs on each node that has CPUs, as with ``fastshard.convert(..., node_local=True)``. If a node
            dies, the run loses its files.
        memory: of this process, and of each worker, as for :func:`fastshard.convert`.
        threads: of each task; default ``cpus``, or as many as its node has.
        progress: as for :func:`fastshard.convert`, over all parts; it decreases if a part is retried.
        options: as for :func:`fastshard.convert`, like the other arguments; with ``resume``, any number of
            nodes can continue a run.

    Returns:
        The manifest of the result.

    Raises:
        FastshardError: as :func:`fastshard.convert`, with the host; ``FS522`` for nodes that cannot access
            the destination; ``FS523`` for parts that are missing; ``FS514`` if Ray is not installed.
        BaseException: as :func:`fastshard.convert`; the run can be continued with ``resume``.

    Examples:
        >>> fastshard.ray.convert("run", "out", to="hf", vocab_size=500, parts=2)
        <fastshard.Manifest hf: 40 tensors in 3 files>
    """
    request, _ = split_request(options)
    find_destination_scheme(out, request, True, {})
    _refuse(source, address, parts, cpus, retries, request.fsync)
    out = Path(out).absolute()
    if node_local and parts is not None:
        raise FastshardError.of(
            codes.USAGE,
            "--parts cannot be used with sources on the nodes' local disks",
            help="leave out --parts; each node makes the part on its disk",
        )
    with connected(address, cpus) as ray:
        nodes = nodes_for(ray, cpus)
        nodes = sharing(ray, nodes, out)
        if node_local:
            paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
            arguments: dict[str, Any] = {
                "source": [os.fspath(path) for path in paths],
                "out": os.fspath(out),
                "to": to,
                "expect": expect,
                "tokenizer": tokenizer,
                "memory": memory,
                **options,
            }
            with Progress(progress) as bar:
                return on_own_disks(ray, nodes, arguments, cpus, threads, retries, bar.phase("writing"))
        tasks = Tasks(ray, nodes, cpus, retries, memory, threads)
        run = split(
            source,
            out,
            to,
            parts=parts or len(nodes),
            expect=expect,
            tokenizer=tokenizer,
            memory=memory,
            threads=tasks.most_threads,
            **options,
        )
        with Progress(progress) as bar:
            tasks.make(run, bar.phase("writing"))
        manifest = commit(out, run.id, memory=memory, threads=threads, progress=progress)
    run_findings = [finding for finding in run.findings if finding not in manifest.findings]
    return Manifest(manifest.document, [*run_findings, *manifest.findings])


@checked
def merge(source: Source, out: StrPath, **options: Unpack[Spread]) -> Manifest:
    """Merge a checkpoint into full tensors under the source's own names, on the nodes of a Ray cluster.

    The function takes the arguments of :func:`convert` except ``to``.

    Examples:
        >>> fastshard.ray.merge("run", "merged", parts=2)
        <fastshard.Manifest merge: 40 tensors in 1 files>
    """
    return convert(source, out, None, **options)


def _refuse(
    source: Source, address: str | None, parts: int | None, cpus: int | None, retries: int, fsync: bool
) -> None:
    if isinstance(source, Checkpoint):
        raise FastshardError.of(
            codes.USAGE,
            "source",
            expected="paths that each node can open",
            got="an opened checkpoint",
            help="pass the path and the options of the checkpoint",
        )
    if address is not None and (not isinstance(address, str) or not address):
        raise refused("address", "'local', 'auto' or HOST:PORT", address)
    if isinstance(address, str) and address.startswith("ray://"):
        raise FastshardError.of(
            codes.USAGE,
            "address",
            expected="'local', 'auto' or HOST:PORT, on a host of the cluster",
            got=repr(address),
            help="submit the command as a job: ray job submit -- fastshard ... --ray auto",
        )
    for name, number, least in (("parts", parts, 1), ("cpus", cpus, 1), ("retries", retries, 0)):
        if number is None and name != "retries":
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise refused(name, f"an integer, {least} or more", number)
    if not fsync:
        raise FastshardError.of(
            codes.USAGE,
            "several processes always flush their output to disk",
            expected="fsync=True",
            got="False",
        )
