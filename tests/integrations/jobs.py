"""Starts the ranks of a training job on this host, as torchrun does."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastshard
import pytest
from holding import HANG

HERE = Path(__file__).parent
#: Mounts a separate folder at the path that all ranks use.
_SEPARATE = 'mount --bind "$1" "$2"; shift 2; exec "$@"'


def _namespace() -> list[str]:
    own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *own, "--mount", "sh", "-euc"]


@functools.cache
def cannot_mount() -> str | None:
    """Return the reason why no folder can be mounted here; None if one can."""
    if shutil.which("unshare") is None:
        return "no unshare"
    tried = subprocess.run([*_namespace(), "mount -t tmpfs own /mnt"], capture_output=True, text=True)
    return None if tried.returncode == 0 else tried.stderr.strip() or "unshare fails"


needs_mounts = pytest.mark.skipif(cannot_mount() is not None, reason=f"no mounts: {cannot_mount()}")


def run_job(script: str, out: Path, *argv: object, ranks: int = 2, separate: Path | None = None) -> list[Any]:
    """Run a script as a job of some ranks, and return what each prints last, as JSON.

    With ``separate`` the last rank has that folder in the place of ``out``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    paths = os.pathsep.join([str(Path(fastshard.__file__).parents[1]), str(HERE.parent)])
    shared = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes = []
    for rank in range(ranks):
        own = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        command = [sys.executable, str(HERE / script), str(out), *map(str, argv)]
        if separate is not None:
            own["TIMEOUT"] = "2"
            if rank == ranks - 1:
                command = [*_namespace(), _SEPARATE, "sh", str(separate), str(out), *command]
        processes.append(
            subprocess.Popen(
                command, env=shared | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        printed = [process.communicate(timeout=HANG) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in printed]
