"""Holds processes at named places (`rust/fastshard/src/steps.rs`), so that a test need not catch a run at
work.

.. code-block:: python

    with Steps("tile-3") as steps:
        process = spawn("merge", ckpt, out, env=steps.environment)
        held = steps.wait("tile-3")
        process.send_signal(signal.SIGINT)
        steps.wait("cancelled")
        held.release()

Processes that come to other places go on at once; all places are noted in the order in which they were come
to.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest
from fastshard import _core

#: How long a test waits, in seconds, for what comes at once unless something hangs.
HANG = 300.0

needs_steps = pytest.mark.skipif(
    not _core.STEPS and "FASTSHARD_NEED_STEPS" not in os.environ,
    reason="this build has no steps: maturin develop --profile tests -F pyo3/extension-module,steps",
)


class Clock:
    """The time by which processes wait for one another that have this :attr:`environment`: it moves when told
    to.

    Without that, nobody is silent or late, however slow the machine is.
    """

    #: Time between two signs of life of a rank, in seconds: no rank that is to live is told of more at once.
    STEP = 0.5

    def __init__(self, file: Path) -> None:
        """``file`` is made, for all who are to see it."""
        self._file = file
        self._nanoseconds = 0
        self.forward(0)

    @property
    def environment(self) -> dict[str, str]:
        return {"FASTSHARD_CLOCK": str(self._file)}

    def forward(self, seconds: float = STEP) -> None:
        """Moves time on."""
        self._nanoseconds += int(seconds * 1e9)
        if not self._file.exists():
            self._file.touch()
        # In one call, and in place: nobody reads a part of it.
        with self._file.open("r+b", buffering=0) as file:
            file.write(self._nanoseconds.to_bytes(8, "little"))

    def beat(self, *living: Path, unless: Callable[[], bool] = lambda: False) -> None:
        """Moves time on by a step, and waits until the cards of ranks that live show that they do, or say
        that these have stopped; or until there is nothing more to wait for."""
        end = time.monotonic() + HANG
        before = {card: _said(card) for card in living}
        self.forward()
        while not unless() and any(_said(card) == said for card, said in before.items() if said is not None):
            assert time.monotonic() < end, before
            time.sleep(0.002)

    def until(self, done: Callable[[], bool], *living: Path) -> None:
        """Moves time on, beat by beat, until something is so."""
        end = time.monotonic() + HANG
        while not done():
            self.beat(*living, unless=done)
            assert time.monotonic() < end, "what was waited for did not come, whatever the time"
            time.sleep(0.002)


def _said(card: Path) -> tuple[str, int] | None:
    """What a rank shows of its life on its card; none once it has ended, or has said how it ends."""
    try:
        said = json.loads(card.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if said["phase"] in ("published", "stopped") else (said["nonce"], said["beat"])


@dataclass(frozen=True)
class Held:
    """A thread of a process that has come to a place, and waits there."""

    process: int
    place: str
    _connection: socket.socket

    def release(self) -> None:
        """Lets it go on."""
        self._connection.close()


class Steps:
    """Places at which processes are held that have this :attr:`environment`."""

    def __init__(self, *held: str) -> None:
        """``held`` are the places at which every process waits; :meth:`hold` and :meth:`pass_by` change
        them."""
        self._held = set(held)
        self._changed = threading.Condition()
        self._reached: list[tuple[int, str]] = []
        self._waiting: list[Held] = []
        self._taken: list[Held] = []
        self._ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, with what makes a child come here."""
        return os.environ | {"FASTSHARD_STEPS": self.socket}

    def __enter__(self) -> Steps:
        # Not below the test's own folder, whose path is too long for a socket's name.
        self._folder = tempfile.mkdtemp(prefix="steps-")
        self.socket = os.path.join(self._folder, "socket")  # noqa: PTH118
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.socket)
        self._listener.listen(1024)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._ended = True
        # Wakes the thread.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for held in [*self._waiting, *self._taken]:
            held.release()
        shutil.rmtree(self._folder)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection.makefile("r") as file:
                process, _, place = file.readline().strip().partition(" ")
            if not place:
                # It was killed before it said where.
                connection.close()
                continue
            with self._changed:
                if self._ended:
                    return
                self._reached.append((int(process), place))
                if place in self._held:
                    self._waiting.append(Held(int(process), place, connection))
                else:
                    connection.close()
                self._changed.notify_all()

    def hold(self, *places: str) -> None:
        """Holds processes that come to these places from now on."""
        with self._changed:
            self._held |= {*places}

    def pass_by(self, *places: str) -> None:
        """Lets go all that wait at these places, and holds nobody there any more."""
        with self._changed:
            self._held -= {*places}
            for held in [held for held in self._waiting if held.place in places]:
                self._waiting.remove(held)
                held.release()

    def reached(self, process: int | None = None) -> list[str]:
        """Places that were come to so far, by one process or by all."""
        with self._changed:
            return [place for of, place in self._reached if process in (None, of)]

    def wait(
        self,
        place: str,
        process: subprocess.Popen[str] | None = None,
        *,
        above: subprocess.Popen[str] | None = None,
        number: int | None = None,
    ) -> Held:
        """Waits for a process, given by itself or by its number, to come to a place; for anybody where none
        is given.

        It is held there if the place is one of those. ``above`` has started whoever comes, whose number is
        not known: in a namespace it has one of its own.

        Raises:
            AssertionError: the process ended without, or nobody came.
        """
        of = number if process is None else process.pid
        held: list[Held] = []

        def came() -> bool:
            if place not in self._held:
                return place in [at for by, at in self._reached if of in (None, by)]
            found = next((h for h in self._waiting if h.place == place and of in (None, h.process)), None)
            if found is not None:
                self._waiting.remove(found)
                self._taken.append(found)
                held.append(found)
            return found is not None

        self._until(came, lambda: f"nobody came to {place}", process or above)
        return held[0] if held else Held(of or 0, place, socket.socket())

    def held(self) -> list[Held]:
        """All that wait now, in the order in which they came; each is given once."""
        with self._changed:
            given, self._waiting = self._waiting, []
            self._taken += given
        return given

    def _until(
        self, done: Callable[[], bool], otherwise: Callable[[], str], process: subprocess.Popen[str] | None
    ) -> None:
        end = time.monotonic() + HANG
        with self._changed:
            while not done():
                ended = process is not None and process.poll() is not None
                assert not ended and time.monotonic() < end, f"{otherwise()}; came to: {self._reached[-20:]}"
                # Woken when somebody comes; the time is for a process that ends without.
                self._changed.wait(0.1)


@contextmanager
def interrupted_hashing(monkeypatch: pytest.MonkeyPatch, limit: int = 20_000) -> Iterator[None]:
    """Sends SIGINT when the first bytes are hashed by ``hashlib``, and asserts that most bytes are not hashed
    any more.

    The reader's pieces are to be so small that the files have more than ``limit`` of them.
    """
    is_signalled, updates = threading.Event(), 0

    class Hasher:
        def __init__(self, *_data: bytes, **_options: bool) -> None:
            pass

        def update(self, _piece: bytes) -> None:
            nonlocal updates
            updates += 1
            if updates == 1:
                os.kill(os.getpid(), signal.SIGINT)
            is_signalled.wait()
            if updates < limit:
                time.sleep(0.001)

        def hexdigest(self) -> str:
            return ""

    def raise_interrupt(_number: int, _frame: object) -> None:
        is_signalled.set()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, raise_interrupt)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(hashlib, "sha256", Hasher)
            patch.setattr(hashlib, "sha1", Hasher)
            yield
    finally:
        signal.signal(signal.SIGINT, previous)
    assert 1 <= updates < limit
