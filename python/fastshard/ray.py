"""A run in parts (:mod:`fastshard.parts`) whose parts are tasks of Ray: begun and committed here, made on the cluster's nodes.

Ray itself is imported when it is needed, and not before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _core, budget, regular
from .arguments import checked, refused
from .checkpoint import Checkpoint
from .errors import FastshardError, Finding, carry, error_for
from .manifests import Manifest
from .options import StrPath
from .parts import Run, begin, commit, run_part
from .planning import default_threads
from .progress import Callback, Progress, Report

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import Spread, Writing

__all__ = ["convert", "merge"]

Source = StrPath | Iterable[StrPath]

#: Seconds in which a cluster's address answers.
_REACH = 5.0
#: Seconds that a node's worker is given to start: its environment may have to be installed first.
_START = 600.0
#: Seconds that the other nodes are given to answer, once one has said that it does not see the destination.
_OTHERS = 2.0
#: Seconds between two looks at whether a task has ended.
_PAUSE = 0.05
#: Seconds between two words of a task about how far it is, and two looks at them.
_LOOK = 0.5
#: Seconds between two looks at which nodes there are.
_NODES = 5.0
#: Seconds without any node that a run waits for new ones.
_NOBODY = 60.0
#: Seconds that tasks are given to stop at their next tile; who does not is ended.
_STOP = 10.0
#: Seconds that a task waits for another process that makes its part: one that Ray holds for dead, and that is not.
_TAKEN = 120.0
#: Bytes of the object store of a Ray that is started here: nothing is put there. Ray takes no less than 75 MiB.
_STORE = 80 << 20


@dataclass(frozen=True)
class _Node:
    """A node of the cluster that tasks can run on."""

    id: str
    host: str
    cpus: float

    def __str__(self) -> str:
        return _called(self.host, self.id)


def _called(host: str, node: str) -> str:
    return f"{host} (Ray node {node[:8]})"


@budget.kept
def convert(
    source: Source,
    out: StrPath,
    to: str | None = "hf",
    *,
    address: str | None = "local",
    parts: int | None = None,
    cpus: int | None = None,
    retries: int = 3,
    expect: StrPath | Mapping[str, Any] | None = None,
    tokenizer: StrPath | None = None,
    memory: str | int | None = None,
    threads: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    fsync: bool = True,
    sparse: bool = False,
    stats: bool = False,
    progress: Report = False,
    **options: Unpack[Writing],
) -> Manifest:
    """Converts a checkpoint on the nodes of a Ray cluster, and publishes the result at ``out``, whole or not at all.

    This process begins the run and commits it; a task on each node makes a part. A part whose worker or node dies is
    made on another one.

    Args:
        source: a path, or several node-local ones; seen under the same name by all nodes.
        out: destination directory, on storage that all nodes and this process see.
        to: target layout; None merges under the source's own names.
        address: ``"local"`` starts a Ray on this host for the time of the call; ``"auto"`` or ``HOST:PORT`` is that of a
            cluster; None as ``ray.init`` chooses. A process that is connected already stays so.
        parts: how many parts of equal size there are; default one for each node that has CPUs.
        cpus: CPUs that each task reserves; default all of its node, so that a node makes one part at a time, and no more
            than the second largest node has, which takes over for the largest.
        retries: how often a part is made again whose worker or node has died.
        memory: of this process, and of each worker, as for :func:`fastshard.convert`.
        threads: of each task; default ``cpus``, or as many as its node has.
        progress: as for :func:`fastshard.convert`, over all parts; falls back where a part is made again.
        resume: continue what an earlier run of the same plan has left, with any number of nodes.
        options: as for :func:`fastshard.convert`, like the other arguments.

    Returns:
        The manifest of the result.

    Raises:
        FastshardError: as :func:`fastshard.convert`, with the host; ``FS522`` for nodes that do not see the destination;
            ``FS523`` for parts that were not made; ``FS514`` if Ray is not installed.
        BaseException: as :func:`fastshard.convert`; the run can be continued with ``resume``.
    """
    _refuse(source, address, parts, cpus, retries, fsync)
    out = Path(out).absolute()
    with _connected(address, cpus) as ray:
        nodes = _nodes(ray, cpus)
        nodes = _sharing(ray, nodes, out)
        tasks = _Tasks(ray, nodes, cpus, retries, memory, threads)
        run = begin(
            source, out, to, parts=parts or len(nodes), expect=expect, tokenizer=tokenizer, memory=memory,
            threads=tasks.most_threads, resume=resume, overwrite=overwrite, sparse=sparse, stats=stats, **options,
        )  # fmt: skip
        with Progress(progress) as bar:
            tasks.make(run, bar.phase("writing"))
        manifest = commit(out, run.id, memory=memory, threads=threads, progress=progress)
    told = [finding for finding in run.findings if finding not in manifest.findings]
    return Manifest(manifest.document, [*told, *manifest.findings])


@checked
def merge(source: Source, out: StrPath, **options: Unpack[Spread]) -> Manifest:
    """Merges a checkpoint into whole tensors under the source's own names, on the nodes of a Ray cluster.

    Takes the arguments of :func:`convert` but ``to``.
    """
    return convert(source, out, None, **options)


def _refuse(
    source: Source, address: str | None, parts: int | None, cpus: int | None, retries: int, fsync: bool
) -> None:
    if isinstance(source, Checkpoint):
        raise FastshardError.of(
            "FS515",
            "source",
            expected="paths, which each node opens",
            got="an opened checkpoint",
            help="give what it was opened with",
        )
    if address is not None and (not isinstance(address, str) or not address):
        raise refused("address", "'local', 'auto' or HOST:PORT", address)
    if isinstance(address, str) and address.startswith("ray://"):
        raise FastshardError.of(
            "FS515",
            "address",
            expected="'local', 'auto' or HOST:PORT, on a host of the cluster",
            got=repr(address),
            help="submit it as a job: ray job submit -- fastshard ... --ray auto",
        )
    for name, number, least in (("parts", parts, 1), ("cpus", cpus, 1), ("retries", retries, 0)):
        if number is None and name != "retries":
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise refused(name, f"a whole number, {least} or more", number)
    if not fsync:
        raise FastshardError.of(
            "FS515", "what several processes write is brought to disk", expected="fsync=True", got="False"
        )


# --- the cluster


def library() -> Any:
    """Ray.

    Raises:
        FastshardError: ``FS514`` if it is not installed.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise FastshardError.of(
            "FS514", f"tasks on a cluster are run by Ray: {error}", help="pip install 'fastshard[ray]'"
        ) from None
    return ray


@contextlib.contextmanager
def _connected(address: str | None, cpus: int | None) -> Iterator[Any]:
    """Ray, connected; what was connected before stays so."""
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
                "FS515",
                f"Ray cannot be reached: {_line(error)}",
                got=repr(address),
                help="give the address of a cluster that this host is part of, 'auto' on one of its nodes, or 'local'",
            ) from None
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str | None) -> None:
    """Asks whether anybody listens at an address: Ray itself tries for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Ray takes SIGTERM over, which stops a run here, and tells its makers of what it starts unless it is told not to."""
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


def _line(error: BaseException) -> str:
    """The first line of what an error says."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _alive(ray: Any) -> list[_Node]:
    """Nodes that are alive and have CPUs, the largest first."""
    nodes = [
        _Node(n["NodeID"], n["NodeManagerHostname"], float(n["Resources"].get("CPU", 0)))
        for n in ray.nodes()
        if n["Alive"]
    ]
    return sorted((n for n in nodes if n.cpus > 0), key=lambda n: (-n.cpus, n.id))


def _nodes(ray: Any, cpus: int | None) -> list[_Node]:
    """Nodes that parts are made on.

    Raises:
        FastshardError: ``FS515`` if there are none.
    """
    nodes = _alive(ray)
    fitting = [node for node in nodes if cpus is None or node.cpus >= cpus]
    if not fitting:
        largest = f"the largest node has {nodes[0].cpus:g}" if nodes else "no node has any"
        raise FastshardError.of(
            "FS515", "cpus", expected=f"a node with {cpus or 1} CPUs or more", got=largest
        )
    return fitting


def _on(ray: Any, node: str, *, soft: bool) -> Any:
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=soft)


def _wait(ray: Any, refs: list[Any], seconds: float, *, every: bool = False) -> tuple[list[Any], list[Any]]:
    """Those of some tasks that have ended, and the others: once one has, or all of them, or after so many seconds.

    It sleeps here and not in Ray, which makes a KeyboardInterrupt of its own of what a signal handler raises.
    """
    until = time.monotonic() + seconds
    while True:
        ended, left = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        if not left or (ended and not every) or time.monotonic() >= until:
            return ended, left
        time.sleep(_PAUSE)


# --- whether all nodes see the destination


def look(path: str, said: str, answer: str) -> dict[str, Any]:
    """On a node: whether a file holds what was said to be in it, answered in another file beside it.

    Returns:
        ``host``, ``storage`` and ``version`` of this process; ``error``, why it does not see the file, or None.
    """
    about = {"host": socket.gethostname(), "storage": _core.storage_of(path), "version": _core.__version__}
    try:
        if regular.read_bytes(Path(path), 64, code="FS522") != said.encode():
            return {**about, "error": "another file is there"}
        (Path(path).parent / answer).write_text(answer)
    except (OSError, FastshardError) as error:
        return {**about, "error": getattr(error, "strerror", None) or _line(error)}
    return {**about, "error": None}


@contextlib.contextmanager
def _beacon(out: Path) -> Iterator[tuple[Path, str] | None]:
    """A file beside a destination, and what it holds; None where none can be made: beginning the run says why."""
    real = Path(os.path.realpath(out))
    inside = real.is_dir() and (os.path.ismount(real) or not os.access(real.parent, os.W_OK))
    # The folder in which ranks meet, and a name of their files: `fastshard gc` knows what a dead process leaves there.
    called = os.fsdecode(os.fsencode(real.name)[:200])
    folder = real / ".fastshard-ranks" if inside else real.parent / f".{called}.fastshard-ranks"
    said = uuid.uuid4().hex
    file = folder / f"{said}.new"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        file.write_text(said)
    except OSError:
        yield None
        return
    try:
        yield file, said
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
        # Others may be meeting there.
        with contextlib.suppress(OSError):
            folder.rmdir()


def _sharing(ray: Any, nodes: list[_Node], out: Path) -> list[_Node]:
    """The nodes that are there, all of which see what this process writes at a destination, as it sees what they write.

    Raises:
        FastshardError: ``FS522`` with the nodes that do not; ``FS524`` for those with another version.
    """
    with _beacon(out) as beacon:
        if beacon is None:
            return nodes
        file, said = beacon
        answers = {node: f"{uuid.uuid4().hex}.new" for node in nodes}
        try:
            told = _answers(ray, {
                node: ray.remote(look)
                .options(num_cpus=0, max_retries=1, scheduling_strategy=_on(ray, node.id, soft=False))
                .remote(str(file), said, answer)
                for node, answer in answers.items()
            })  # fmt: skip
            findings = [f for node, about in told.items() for f in _unlike(node, about, file, answers[node])]
        finally:
            for answer in answers.values():
                with contextlib.suppress(OSError):
                    (file.parent / answer).unlink()
    if findings:
        raise error_for(findings)
    return [node for node in nodes if node in told]


def _answers(ray: Any, asked: dict[_Node, Any]) -> dict[_Node, Any]:
    """What nodes answer, by node: a document, or an error of Ray. Those that have gone meanwhile are left out."""
    nodes = {ref: node for node, ref in asked.items()}
    told: dict[_Node, Any] = {}
    waiting, until = list(nodes), time.monotonic() + _START
    while waiting and (left := until - time.monotonic()) > 0:
        done, waiting = _wait(ray, waiting, min(left, _LOOK))
        for ref in done:
            try:
                told[nodes[ref]] = ray.get(ref)
            except ray.exceptions.RayError as error:
                told[nodes[ref]] = error
            if not _sees(told[nodes[ref]]):
                # Others of its kind are named too, if they answer at once.
                until = min(until, time.monotonic() + _OTHERS)
    alive = {node.id for node in _alive(ray)}
    for ref in waiting:
        ray.cancel(ref, force=True)
        if all(_sees(about) for about in told.values()):
            told[nodes[ref]] = TimeoutError(f"it did not answer within {_START:g} s")
    gone = [node for node, about in told.items() if isinstance(about, Exception) and node.id not in alive]
    return {node: about for node, about in told.items() if node not in gone}


def _sees(about: Any) -> bool:
    return isinstance(about, dict) and about["error"] is None


def _unlike(node: _Node, about: Any, file: Path, answer: str) -> list[Finding]:
    """What is wrong with a node, by what it answered."""
    if isinstance(about, Exception):
        return [
            Finding.of(
                "FS522",
                f"this node could not be asked whether it sees the destination: {_told(about)}",
                file=str(file.parent),
                host=str(node),
                help="fastshard must be there, in the version that is here: see what Ray's logs say of that node",
            )
        ]
    host = _called(about["host"], node.id)
    found = []
    if about["version"] != _core.__version__:
        help_ = "install one version on all nodes"
        found.append(
            Finding.of("FS524", "this node has another version of fastshard", host=host,
                       expected=_core.__version__, got=about["version"], help=help_)
        )  # fmt: skip
    what = f"this node does not see what is written beside the destination ({about['error']})"
    if about["error"] is None:
        try:
            if regular.read_bytes(file.parent / answer, 64, code="FS522") == answer.encode():
                return found
            what = "what this node writes beside the destination is something else here"
        except (OSError, FastshardError):
            what = "what this node writes beside the destination is not seen here"
    here = f"the storage of {socket.gethostname()} ({_core.storage_of(str(file))})"
    found.append(
        Finding.of(
            "FS522",
            what,
            file=str(file.parent),
            host=host,
            expected=here,
            got=about["storage"],
            help="this host may have a disk of its own at this path: mount the shared storage there, or choose a "
            "destination on it; nothing of the run was made",
        )
    )
    return found


def _told(error: BaseException) -> str:
    """What an error of Ray says; of one that a task raised, what that was."""
    cause = getattr(error, "cause", None)
    return f"{type(cause).__name__}: {_line(cause)}" if cause is not None else _line(error)


# --- parts


class Board:
    """How far the parts are: an actor that tasks tell, and whoever has begun the run asks."""

    def __init__(self, sizes: list[int]) -> None:
        self._parts = {part: (0, size) for part, size in enumerate(sizes)}

    def tell(self, part: int, done: int, total: int) -> None:
        """A task says how far it is."""
        self._parts[part] = (done, total)

    def seen(self) -> tuple[int, int]:
        """Bytes done, and in all."""
        return sum(done for done, _ in self._parts.values()), sum(total for _, total in self._parts.values())


def make_part(
    out: str, run: str, part: int, memory: str | int | None, threads: int, board: Any
) -> dict[str, Any]:
    """On a node: makes a part of a run.

    Returns:
        ``findings`` why it could not be made, none if it is; ``host`` and ``node`` of this process. So Ray, which makes
        again what ended with an error of its own, sees none of ours, and nothing is wrapped.
    """
    ray = library()
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _LOOK or done == total:
            last = now
            # Who draws the bar may have gone: that is no reason to stop.
            with contextlib.suppress(Exception):
                board.tell.remote(part, done, total)

    here = {"host": socket.gethostname(), "node": ray.get_runtime_context().get_node_id()}
    begun = time.monotonic()
    while True:
        try:
            run_part(out, part, run, memory=memory, threads=threads, progress=report if board else False)
        except FastshardError as error:
            # A worker that Ray has lost may go on for a while: it is waited for as long as it shows signs of life.
            is_taken = error.code == "FS509" and error.rank is not None
            if is_taken and time.monotonic() - begun < _TAKEN:
                time.sleep(2.0)
                continue
            return {**here, "findings": [finding.to_dict() for finding in error.findings]}
        return {**here, "findings": []}


@dataclass(frozen=True)
class _Task:
    """A part that is being made."""

    part: int
    node: _Node
    #: CPUs that it reserves.
    cpus: float


class _Tasks:
    """Makes the parts of a run as tasks."""

    def __init__(
        self,
        ray: Any,
        nodes: list[_Node],
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
        self._asked: Any = None
        self._nobody: float | None = None
        self._looked = time.monotonic()

    def _threads_on(self, node: _Node) -> int:
        return self._threads or max(1, int(node.cpus))

    @property
    def most_threads(self) -> int:
        """Threads of the node that has most: the work is divided for so many."""
        return max(self._threads_on(node) for node in self._nodes)

    def make(self, run: Run, told: Callback | None) -> None:
        """Makes all parts.

        Raises:
            FastshardError: with all that kept parts from being made.
            BaseException: what ``told`` or a signal handler raised, with ``FS510`` as its ``findings``.
        """
        way = f"nothing was published; the same command with --resume continues, or remove {run.folder}"
        if told is not None:
            here = self._ray.get_runtime_context().get_node_id()
            board = self._ray.remote(Board).options(
                num_cpus=0, scheduling_strategy=_on(self._ray, here, soft=True)
            )
            self._board = board.remote(run.bytes)
        pending: dict[Any, _Task] = {}
        try:
            for part in range(len(run.bytes)):
                node = self._nodes[part % len(self._nodes)]
                self._start(run, _Task(part, node, self._cpus[node]), pending)
            self._watch(run, pending, told)
        except FastshardError as error:
            findings = [*error.findings, *self._stop(pending)]
            raise error_for([_with_way(f, way) for f in dict.fromkeys(findings)]) from None
        except BaseException as error:
            self._stop(pending)
            carry(error, [Finding.of("FS510", "stopped by the user", help=way)])
            raise
        finally:
            if self._board is not None:
                self._ray.kill(self._board)
                self._board = None

    def _start(self, run: Run, task: _Task, pending: dict[Any, _Task]) -> None:
        remote = self._ray.remote(make_part).options(
            num_cpus=task.cpus,
            max_retries=self._retries,
            scheduling_strategy=_on(self._ray, task.node.id, soft=True),
            name=f"fastshard part {task.part}",
        )
        threads = self._threads_on(task.node)
        ref = remote.remote(run.out, run.id, task.part, self._memory, threads, self._board)
        pending[ref] = task

    def _watch(self, run: Run, pending: dict[Any, _Task], told: Callback | None) -> None:
        while pending:
            done, _ = _wait(self._ray, list(pending), _LOOK)
            for ref in done:
                if findings := self._came_to(ref, pending.pop(ref)):
                    raise error_for(findings)
            if told is not None and (seen := self._seen()):
                told(*seen)
            if time.monotonic() - self._looked > _NODES:
                self._looked = time.monotonic()
                self._fit(run, pending)
        if told is not None:
            told(sum(run.bytes), sum(run.bytes))

    def _seen(self) -> tuple[int, int] | None:
        """Bytes done and in all, as the tasks have told; None where nothing is known yet. Never waited for."""
        if self._asked is None:
            self._asked = self._board.seen.remote()
        if not _wait(self._ray, [self._asked], 0)[0]:
            return None
        asked, self._asked = self._asked, None
        with contextlib.suppress(self._ray.exceptions.RayError):
            done, total = self._ray.get(asked)
            return done, total
        return None

    def _fit(self, run: Run, pending: dict[Any, _Task]) -> None:
        """Tasks that wait for a node as large as one that has died reserve what there is now."""
        alive = _alive(self._ray)
        if not alive:
            self._nobody = self._nobody or self._looked
            if self._looked - self._nobody > _NOBODY:
                raise error_for([self._missing(task, "no node is left") for task in pending.values()])
            return
        self._nobody = None
        for ref, task in [(r, t) for r, t in pending.items() if t.cpus > alive[0].cpus]:
            self._ray.cancel(ref)
            del pending[ref]
            self._start(run, replace(task, node=alive[0], cpus=alive[0].cpus), pending)

    def _came_to(self, ref: Any, task: _Task) -> list[Finding]:
        """Why a task has not made its part; nothing if it has."""
        exceptions = self._ray.exceptions
        try:
            outcome = self._ray.get(ref)
        except exceptions.TaskCancelledError:
            return [self._missing(task, "its task was cancelled")]
        except exceptions.RayTaskError as error:
            what = f"part {task.part}: {_told(error)}"
            return [Finding.of("FS520", what, host=str(task.node))]
        except exceptions.RayError as error:
            return [self._missing(task, _line(error))]
        host = _called(outcome["host"], outcome["node"])
        findings = [Finding.from_dict(finding) for finding in outcome["findings"]]
        return [finding if finding.host else replace(finding, host=host) for finding in findings]

    def _missing(self, task: _Task, why: str) -> Finding:
        return Finding.of(
            "FS523", f"this part of the run was not made to its end: {why}", rank=f"part {task.part}"
        )

    def _stop(self, pending: dict[Any, _Task]) -> list[Finding]:
        """Stops the tasks that are left; what those came to that had ended by themselves."""
        ray, findings = self._ray, list[Finding]()
        ended, _ = _wait(ray, list(pending), 0)
        for ref in ended:
            findings += self._came_to(ref, pending.pop(ref))
        left = list(pending)
        for force, seconds in ((False, _STOP), (True, _STOP / 2)):
            for ref in left:
                ray.cancel(ref, force=force)
            _, left = _wait(ray, left, seconds, every=True)
        return findings


def _with_way(finding: Finding, way: str) -> Finding:
    if finding.severity != "error":
        return finding
    return replace(finding, help=f"{finding.help}; {way}" if finding.help else way)
