"""Starts the ranks of `training.py`, or of another script beside it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from forks import Forks

HERE = Path(__file__).parent
WORLD = 2


@cache
def _deepspeed() -> Forks:
    return Forks(
        "torch",
        "deepspeed",
        "transformers",
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )


def launch(what: str, folder: Path, script: str = "training.py") -> None:
    """Runs a script on two ranks, with imports from this folder only."""
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)} for rank in range(WORLD)]
    logs = [folder / f"{what}_{rank}.log" for rank in range(WORLD)]
    _deepspeed().launch(HERE / script, [what, folder], logs, ranks)
