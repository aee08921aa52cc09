"""Rank files made once for all tests of a run."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Once for all: a module of this folder that was looked for in vain is not found later either.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A case's folder, by name and number of ranks; not to be changed."""
    import fsdp_maker
    from families_maker import CHOSEN, FAMILIES, WHOLE, WHOLE_CHOSEN

    # What is made at once, and with how many ranks.
    launches = [
        (2, ["fsdp2", *CHOSEN, *WHOLE_CHOSEN]),
        (3, ["fsdp2", "tied"]),
        (4, list(fsdp_maker.CASES)),
        (2, [name for name in FAMILIES if name not in CHOSEN]),
        (2, [name for name in WHOLE if name not in WHOLE_CHOSEN]),
    ]
    base = tmp_path_factory.getbasetemp()
    # Workers of one run share what they make.
    shared = (base.parent if "popen-gw" in base.name else base) / "fsdp"

    def made(case: str, world: int = 4) -> Path:
        shared.mkdir(exist_ok=True)
        n, cases = next((n, of) for n, (ranks, of) in enumerate(launches) if ranks == world and case in of)
        out = shared / str(n)
        with (shared / f"lock{n}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (out / "done").exists():
                fsdp_maker.make(out, world, cases)
                (out / "done").touch()
        return out / case

    return made
