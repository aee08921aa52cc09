"""The rank of this process and the number of ranks, from the launcher's environment variables.

The launchers document these variables: torchrun (``torch.distributed.run``: RANK, WORLD_SIZE,
TORCHELASTIC_RUN_ID), Slurm's ``srun`` (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_ID), Open MPI's
``mpirun`` (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE), MPICH's and Intel's process managers (PMI_RANK,
PMI_SIZE), Kubernetes Indexed Jobs (JOB_COMPLETION_INDEX, which come without a number of processes).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.records import dataclass

__all__ = ["Rank", "detect", "is_alone"]

#: Maximum number of hosts in an expanded list.
_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class Rank:
    """One of several processes."""

    rank: int
    world: int
    #: Where the rank comes from, for messages.
    origin: str
    #: Hosts by rank, as far as the launcher states them.
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Launcher:
    name: str
    rank: str
    #: Name of the variable with the number of processes; None if the launcher has none.
    world: str | None
    #: A variable that only the launcher sets for each process, and that users never set.
    mark: str | None = None
    #: A variable that must be set too; otherwise the others do not belong to this process.
    needs: str | None = None


#: Launchers, innermost first: the one that started this process comes first.
_LAUNCHERS = (
    _Launcher("fastshard's own variables", "FASTSHARD_RANK", "FASTSHARD_WORLD", mark="FASTSHARD_RANK"),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", mark="TORCHELASTIC_RUN_ID"),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", mark="OMPI_COMM_WORLD_LOCAL_RANK"),
    _Launcher("PMI", "PMI_RANK", "PMI_SIZE"),
    # In a batch script SLURM_PROCID is 0 though SLURM_NTASKS processes were asked for: one process runs
    # there.
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", needs="SLURM_STEP_NUM_TASKS"),
    _Launcher("Kubernetes", "JOB_COMPLETION_INDEX", None),
)


def detect(world: int | None = None, environ: Mapping[str, str] | None = None) -> Rank:
    """Read the rank that a launcher gave this process.

    Args:
        world: number of processes from the caller; required if the launcher states none.
        environ: the environment; default the process's.

    Raises:
        FastshardError: ``FS515`` if there is no launcher, if two launchers disagree, or if the number of
            processes is unknown or differs from ``world``.
    """
    environ = os.environ if environ is None else environ
    found = [reading for launcher in _LAUNCHERS if (reading := _read_launcher(launcher, environ)) is not None]
    if not found:
        raise _none(environ)
    launcher, rank, size = found[0]
    for other, other_rank, other_size in found[1:]:
        same = rank == other_rank and (size == other_size or other_size is None)
        # Started by the other one, as it marks: the other numbers the processes that start ours.
        if not same and not (launcher.mark and launcher.mark in environ):
            raise FastshardError.of(
                codes.USAGE,
                "two launchers state different ranks",
                expected=_shown(launcher, environ),
                got=_shown(other, environ),
                help="pass --rank and --world, or unset the variables of the other launcher",
            )
    if size is None:
        # A source of less right may know it: FASTSHARD_WORLD beside a Kubernetes index.
        size = next((s for _, _, s in found[1:] if s is not None), None)
        size = size if size is not None else _number("FASTSHARD_WORLD", environ)
    if size is not None and world is not None and size != world:
        raise FastshardError.of(
            codes.USAGE,
            "the number of processes is given twice",
            expected=f"--world {world}",
            got=_shown(launcher, environ),
            help="leave out --world if the launcher states it",
        )
    size = size if size is not None else world
    if size is None:
        raise FastshardError.of(
            codes.USAGE,
            f"{launcher.name} does not state the number of processes",
            expected="--world N",
            got=_shown(launcher, environ),
            help="pass the Job's `completions` value with --world",
        )
    return Rank(rank, size, f"{launcher.name}: {_shown(launcher, environ)}", _hosts(environ, size))


def is_alone(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if no launcher for several processes started this one."""
    environ = os.environ if environ is None else environ
    scheduled = "SLURM_JOB_ID" in environ or "SLURM_ARRAY_TASK_ID" in environ
    return not scheduled and all(_read_launcher(launcher, environ) is None for launcher in _LAUNCHERS)


def _read_launcher(
    launcher: _Launcher, environ: Mapping[str, str]
) -> tuple[_Launcher, int, int | None] | None:
    if launcher.rank not in environ or (launcher.needs and launcher.needs not in environ):
        return None
    rank = _number(launcher.rank, environ)
    size = _number(launcher.world, environ) if launcher.world else None
    if rank is None:
        return None
    if launcher.world and size is None and launcher.name != "fastshard's own variables":
        # Half of what a launcher sets is not its work.
        return None
    return launcher, rank, size


def _number(name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise FastshardError.of(
            codes.USAGE,
            name,
            expected="an integer",
            got=repr(text),
            help="unset it, or pass --rank and --world",
        )
    return int(text)


def _shown(launcher: _Launcher, environ: Mapping[str, str]) -> str:
    names = [name for name in (launcher.rank, launcher.world) if name and name in environ]
    return ", ".join(f"{name}={environ[name]}" for name in names)


def _none(environ: Mapping[str, str]) -> FastshardError:
    batch = "SLURM_JOB_ID" in environ and "SLURM_STEP_NUM_TASKS" not in environ
    array = "SLURM_ARRAY_TASK_ID" in environ
    why = None
    if array:
        why = "tasks of a Slurm array do not have to run at the same time"
        what = "use `fastshard split --parts N --emit slurm`"
    elif batch:
        why = "a batch script runs as one process, no matter how many tasks it requests"
        what = "start it with srun"
    else:
        what = "start it with torchrun, srun or mpirun, or pass --rank and --world"
    return FastshardError(
        [
            Finding.of(
                codes.USAGE,
                "no launcher states which rank this process is",
                got=why,
                expected=None,
                help=what,
            ),
        ]
    )


def _hosts(environ: Mapping[str, str], world: int) -> tuple[str, ...]:
    """Return the hosts of a Slurm step by rank, if its tasks are in blocks, which is the default."""
    nodes = environ.get("SLURM_STEP_NODELIST")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not nodes or not tasks or environ.get("SLURM_DISTRIBUTION", "block").partition(":")[0] != "block":
        return ()
    names = node_names(nodes)
    each: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            return ()
        each += [int(match[1])] * min(int(match[2] or 1), _MOST_HOSTS)
    hosts = [name for name, n in zip(names, each, strict=False) for _ in range(n)]
    return tuple(hosts) if len(hosts) == world and len(names) == len(each) else ()


def node_names(text: str) -> list[str]:
    """Expand a list of host names in Slurm's notation: ``gpu[01-03,7],login``.

    The result is empty for too many names and for an invalid list.
    """
    names: list[str] = []
    for item in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", text):
        pieces = re.split(r"\[([^\]]*)\]", item)
        found = [pieces[0]]
        for ranges, rest in zip(pieces[1::2], pieces[2::2], strict=True):
            values: list[str] = []
            for part in ranges.split(","):
                first, _, last = part.partition("-")
                last = last or first
                if not (first.isdigit() and last.isdigit()) or int(last) - int(first) > _MOST_HOSTS:
                    return []
                values += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
            if len(found) * len(values) > _MOST_HOSTS:
                return []
            found = [f"{name}{value}{rest}" for name in found for value in values]
        names += found
    return names
