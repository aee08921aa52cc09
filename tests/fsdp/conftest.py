"""Rank files made once for all tests of a run."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Once for all: a module of tests/ that was looked for in vain is not found later either.
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

#: What is made with how many ranks.
WORLDS = {2: ["fsdp2"], 3: ["fsdp2", "tied"], 4: []}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A case's folder, by name and number of ranks; not to be changed."""
    import fsdp_maker

    base = tmp_path_factory.getbasetemp()
    # Workers of one run share what they make.
    shared = (base.parent if "popen-gw" in base.name else base) / "fsdp"

    def made(case: str, world: int = 4) -> Path:
        shared.mkdir(exist_ok=True)
        out = shared / str(world)
        with (shared / f"lock{world}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (out / "done").exists():
                fsdp_maker.make(out, world, WORLDS[world] or list(fsdp_maker.CASES))
                (out / "done").touch()
        return out / case

    return made
