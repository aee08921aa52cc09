"""Progress on stderr: a bar with rate and ETA on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from .errors import Finding

#: Called with (bytes done, total bytes).
Callback = Callable[[int, int], object]
#: How progress is shown; see :class:`Progress`.
Report = bool | str | Callback


class Progress:
    """Draws the progress of one or more phases.

    Args:
        mode: False or ``none`` draws nothing; True or ``auto`` draws a bar if stderr is a terminal; ``plain``
            prints a line every ten seconds, and ``figures`` does so without findings, which are printed
            elsewhere; a function is called with (bytes done, total bytes).
    """

    def __init__(self, mode: Report = False) -> None:
        self._call = mode if callable(mode) else None
        if mode is True:
            mode = "auto"
        if mode == "auto":
            mode = "bar" if sys.stderr.isatty() else "plain"
        self._mode = mode if isinstance(mode, str) else "none"
        self._bar: Any = None
        self._last = 0.0

    def __enter__(self) -> Progress:
        if self._mode == "bar":
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Task,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar
            from rich.text import Text

            class Speed(TransferSpeedColumn):
                def render(self, task: Task) -> Text:
                    # Of what is done, and of what has not begun, there is none.
                    return super().render(task) if task.finished_speed or task.speed else Text("")

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                Speed(),
                TimeRemainingColumn(),
                console=Console(stderr=True, no_color="NO_COLOR" in os.environ),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, finding: Finding) -> None:
        """Print a finding before the work to which it applies."""
        if self._bar is not None:
            self._bar.console.print(str(finding), markup=False, highlight=False)
        elif self._mode == "plain":
            with contextlib.suppress(OSError, ValueError):
                print(finding, file=sys.stderr, flush=True)

    def phase(self, title: str) -> Callback | None:
        """Return the progress callback of one phase, or None if nothing shows progress."""
        if self._call is not None:
            return self._call
        if self._bar is not None:
            task: list[Any] = []

            def drawn(done: int, total: int) -> None:
                # A phase that reads nothing has no bar.
                if total and not task:
                    task.append(self._bar.add_task(title, total=total))
                if task:
                    self._bar.update(task[0], completed=done, total=total)

            return drawn
        if self._mode in ("plain", "figures"):
            start = self._last = time.monotonic()

            def line(done: int, total: int) -> None:
                now = time.monotonic()
                if now - self._last >= 10 and total:
                    self._last = now
                    rate = done / max(now - start, 1e-9)
                    left = (total - done) / rate if rate else float("inf")
                    # A reader of messages who has gone is no reason to stop.
                    with contextlib.suppress(OSError, ValueError):
                        print(
                            f"{title}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, "
                            f"{rate / 1e9:.2f} GB/s, {left:.0f} s left",
                            file=sys.stderr,
                            flush=True,
                        )

            return line
        return None
