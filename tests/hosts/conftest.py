"""A place for hosts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

# Once for all: a module of tests/ that was looked for in vain is not found later either.
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "conformance")]

from holding import Clock, Steps  # noqa: E402


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that all hosts see, in memory where that is to be had."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    folder = memory / f"fastshard-hosts-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def held_at() -> Iterator[Callable[..., Steps]]:
    """Makes what holds one rank at places."""
    with ExitStack() as stack:
        yield lambda *places: stack.enter_context(Steps(*places))


@pytest.fixture
def clock(place: Path) -> Clock:
    """A time that stands still."""
    return Clock(place / "clock")
