"""Handling of stdout and stderr that are full, closed or without a reader: one message, and never a
traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

TYPE_CHECKING = False  # typing itself takes longer than the rest
if TYPE_CHECKING:
    from typing import TextIO


def prepare() -> None:
    """Open a file for each closed standard descriptor, and set an encoding on both streams that can print any
    name.

    If a shell has closed one (``>&-``), a file of the result would otherwise get its number, and receive all
    printed text.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken. Nothing can be written to it: what is lost shows.
            os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = _stream(1)
    if sys.stderr is None:
        sys.stderr = _stream(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names may hold characters that the terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")


def _stream(number: int) -> TextIO:
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", write_through=False)


class Streams:
    """Standard streams that record failed output."""

    def __init__(self) -> None:
        #: The reason why stdout or stderr could not be written; None without a failure.
        self.lost: str | None = None

    def write(self, printing: Callable[[], object], name: str = "stdout") -> bool:
        """Call a function that prints to ``sys.stdout`` or ``sys.stderr``; return False if that failed."""
        stream: TextIO = getattr(sys, name)
        try:
            printing()
            stream.flush()
        except BrokenPipeError:
            # Its reader has what it wanted: no failure, and nothing to say.
            _let_go(stream)
            return False
        except (OSError, ValueError) as error:
            self.lost = (
                self.lost or f"{name} cannot be written to: {getattr(error, 'strerror', None) or error}"
            )
            _let_go(stream)
            return False
        return True

    def say(self, text: str) -> None:
        """Print one line on stderr, if it is open."""
        self.write(lambda: print(text, file=sys.stderr), "stderr")

    def ended(self, code: int, done: str = "") -> int:
        """Return the exit code, or 2 if output failed; the function then reports the failure along with
        ``done``."""
        if self.lost is None:
            return code
        self.say(f"fastshard: {self.lost}{done}")
        return code if code > 128 else 2


def _let_go(stream: TextIO) -> None:
    """Discard the stream's buffer, so that Python does not fail on it at exit."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except OSError:
        # No descriptor is left. By now nobody else opens any, so its own is free for it.
        os.close(number)
        nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
    try:
        stream.flush()
    except (OSError, ValueError):
        return
