"""The number of threads."""

from __future__ import annotations

import os

from . import codes
from .errors import FastshardError

#: Maximum number of threads; no machine has as many cores.
MAX_THREADS = 1 << 14


def default_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(threads: int | None) -> int:
    """Check the number of worker threads; default all cores.

    Raises:
        FastshardError: ``FS515`` if it is not a valid number of threads.
    """
    if threads is None:
        return default_threads()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise FastshardError.of(
            codes.USAGE, "threads", expected=f"an integer from 1 to {MAX_THREADS}", got=repr(threads)
        )
    return threads
