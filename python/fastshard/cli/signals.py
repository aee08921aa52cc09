"""Ctrl-C and SIGTERM: both stop a run in the same way, and the process exits with 128 + signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType


class Stopped(KeyboardInterrupt):
    """Raised in the main thread by the first signal, so that the core stops at the next tile."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stopping:
    """A context that handles SIGINT and SIGTERM.

    The first signal raises :class:`Stopped`. The second is ignored, because programs that forward signals
    often deliver them twice. The third ends the process immediately; staged data is kept and can be resumed.
    At the end, the context restores the earlier handlers. If this is the ``last`` action of the process, it
    ignores signals instead, because a Python handler would end the process with a traceback.
    """

    def __init__(self, *, last: bool = False) -> None:
        self._last = last
        self._before: dict[int, object] = {}
        self._count = 0

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # What a parent made this process ignore (nohup, a background job) stays ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._last else before)  # type: ignore[arg-type]

    def done(self) -> None:
        """Mark the run as finished, so that signals have no further effect."""
        self._count = max(self._count, 1)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1:
            outside = _outside_imports(frame)
            if outside is None:
                raise Stopped(number)
            _raise_in(outside, Stopped(number))
        if self._count > 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _outside_imports(frame: FrameType | None) -> FrameType | None:
    """Return the code that started the import in progress at a frame; None if there is none."""
    outside = None
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            outside = frame.f_back
        frame = frame.f_back
    return outside


def _raise_in(frame: FrameType, error: BaseException) -> None:
    """Raise an error in a frame when it continues.

    An error within an import can leave a module locked, and the next import of that module then waits
    forever.
    """
    before = sys.gettrace()

    def raise_it(frame: FrameType, event: str, argument: object) -> None:
        frame.f_trace = None
        sys.settrace(before)
        raise error

    frame.f_trace = raise_it
    sys.settrace(lambda frame, event, argument: None)
