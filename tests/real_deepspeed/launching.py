"""Starts the ranks of `training.py`, or of another script beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from holding import HANG

HERE = Path(__file__).parent
WORLD = 2


def launch(what: str, folder: Path, script: str = "training.py") -> None:
    """Runs a script on two ranks, with imports from this folder only."""
    common = {
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(WORLD),
    }  # fmt: skip
    logs = [folder / f"{what}_{rank}.log" for rank in range(WORLD)]
    ranks = []
    for rank, log in enumerate(logs):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(HERE / script), what, str(folder)]
        with log.open("wb") as out:
            ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(timeout=HANG) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    tails = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
    assert codes == [0] * WORLD, tails
