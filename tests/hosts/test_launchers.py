"""Which rank a process is, as launchers say it."""

from __future__ import annotations

import pytest
from fastshard import FastshardError
from fastshard.conversion.distributed.launcher_env import detect, node_names

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "7"}
SRUN = {
    "SLURM_JOB_ID": "5",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4"}
INDEX = {"JOB_COMPLETION_INDEX": "5"}

FOUND = {
    "torchrun": (TORCHRUN, None, (3, 8), "torchrun: RANK=3, WORLD_SIZE=8"),
    "srun": (SRUN, None, (2, 4), "Slurm: SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=4"),
    "mpirun": (MPI, None, (1, 2), "Open MPI: OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2"),
    "mpiexec": (PMI, None, (2, 4), "PMI: PMI_RANK=2, PMI_SIZE=4"),
    "kubernetes": (INDEX, 8, (5, 8), "Kubernetes: JOB_COMPLETION_INDEX=5"),
    "kubernetes, with a variable": (INDEX | {"FASTSHARD_WORLD": "6"}, None, (5, 6), "Kubernetes"),
    "by hand": (
        {"FASTSHARD_RANK": "0", "FASTSHARD_WORLD": "2"} | SRUN,
        None,
        (0, 2),
        "fastshard's own variables",
    ),
    "the same number given": (SRUN, 4, (2, 4), "Slurm"),
    # srun starts one torchrun for each node: SLURM_PROCID numbers these.
    "torchrun under srun": (
        TORCHRUN | SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        None,
        (3, 8),
        "torchrun",
    ),
    "mpirun in an allocation": (
        MPI | {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
        None,
        (1, 2),
        "Open MPI",
    ),
    "mpirun by way of srun": (
        MPI | SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        None,
        (1, 2),
        "Open MPI",
    ),
    "srun with PMI": (SRUN | PMI, None, (2, 4), "PMI"),
    "a script that exports torch's names": (
        SRUN | {"RANK": "2", "WORLD_SIZE": "4"},
        None,
        (2, 4),
        "torchrun",
    ),
    "half of torch's names, left over": (SRUN | {"RANK": "7"}, None, (2, 4), "Slurm"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_launcher_is_found(name: str) -> None:
    environ, world, wanted, told = FOUND[name]
    found = detect(world, environ)
    assert (found.rank, found.world) == wanted
    assert found.origin.startswith(told), found.origin


REFUSED = {
    "nobody": ({}, None, "no launcher"),
    # Of the tasks that were asked for one runs the script.
    "a batch script": ({"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, None, "srun"),
    "an array": (
        {"SLURM_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_PROCID": "0"},
        None,
        "fastshard split",
    ),
    "exported by hand, and srun": (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None, "state different ranks"),
    "PMI and srun": (SRUN | {"PMI_RANK": "0", "PMI_SIZE": "1"}, None, "state different ranks"),
    "kubernetes alone": (INDEX, None, "does not state the number of processes"),
    "another number given": (SRUN, 8, "given twice"),
    "no number": ({"RANK": "one", "WORLD_SIZE": "2"}, None, "RANK"),
    "a number without end": ({"RANK": "1" * 40, "WORLD_SIZE": "2"}, None, "RANK"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused(name: str) -> None:
    environ, world, told = REFUSED[name]
    with pytest.raises(FastshardError) as refused:
        detect(world, environ)
    first = refused.value.findings[0]
    assert first.code == "FS515"
    assert told in f"{first.message} {first.got} {first.help}"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("a", ["a"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
        ("x[0-99999999]", []),
        ("x[a-b]", []),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert node_names(text) == names


def test_hosts_of_ranks_are_told_where_slurm_tells_them() -> None:
    step = SRUN | {"SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert detect(None, step).hosts == ("gpu1", "gpu1", "gpu2", "gpu2")
    for other in (
        {"SLURM_STEP_TASKS_PER_NODE": "3,1,9"},
        {"SLURM_DISTRIBUTION": "cyclic"},
        {"SLURM_STEP_NODELIST": "a"},
    ):
        assert detect(None, step | other).hosts == ()
