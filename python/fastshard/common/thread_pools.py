"""Pools of threads that stop early when an exception or a signal ends the work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

__all__ = ["stoppable_pool"]


@contextmanager
def stoppable_pool(threads: int) -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """Open a pool of threads, and an event that is set when the block ends with an exception.

    The pool waits for its threads, so each must check the event between steps of its work. The pool cancels
    work that has not started.
    """
    # Few runs need it, and importing it takes its time.
    from concurrent.futures import ThreadPoolExecutor

    is_stopped = threading.Event()
    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            yield pool, is_stopped
        except BaseException:
            is_stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
