"""Runs of the program under trial: started, signalled, waited for."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from intercept import Call, Fail, Supervisor

#: Seconds after which a run hangs.
TIMEOUT = 60.0


@dataclass(frozen=True)
class Ended:
    """What a run came to."""

    argv: tuple[str, ...]
    #: Exit code, or minus the signal that ended it.
    code: int
    out: str
    err: str
    seconds: float
    hung: bool = False

    @property
    def said(self) -> str:
        """All that was printed."""
        return f"{self.out}\n{self.err}"


class Run:
    """A run that is under way."""

    def __init__(self, argv: tuple[str, ...], pid: int, streams: tuple[Path, Path]) -> None:
        self.argv, self.pid, self._streams = argv, pid, streams
        #: What decides on its system calls, if anything does.
        self.supervisor: Supervisor | None = None
        self._pidfd = os.pidfd_open(pid)
        self._started = time.monotonic()
        #: When the process was seen to be gone.
        self._ended: float | None = None

    def alive(self, wait: float = 0.0) -> bool:
        """False once the process has ended, for which ``wait`` seconds are given."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if self._ended is None and poll.poll(wait * 1000):
            self._ended = time.monotonic()
        return self._ended is None

    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def send(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def catches(self, number: int) -> bool:
        """True if the process has a handler for a signal by now."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)

    def holds(self, folder: Path) -> bool:
        """True if the process has a file open below a folder."""
        prefix = f"{folder}/"
        try:
            files = [str(fd.readlink()) for fd in Path(f"/proc/{self.pid}/fd").iterdir()]
        except OSError:
            return False
        return any(file.startswith(prefix) for file in files)

    def finish(self, reap: Reaper, before: Callable[[], object] | None = None) -> Ended:
        """Waits for the end; a run that hangs is killed. ``before`` is called before the process is
        reaped."""
        hung = self.alive(TIMEOUT)
        if hung:
            self.send(signal.SIGKILL)
            self.alive(TIMEOUT)
        if before is not None:
            before()
        status = reap(self.pid)
        if self.supervisor is not None:
            self.supervisor.join()
        os.close(self._pidfd)
        seconds = (self._ended or time.monotonic()) - self._started
        out, err = (path.read_text(errors="replace") if path.is_file() else "" for path in self._streams)
        for path in self._streams:
            path.unlink(missing_ok=True)
        return Ended(self.argv, os.waitstatus_to_exitcode(status), out, err, seconds, hung)


#: Called before each watched call of a run; a :class:`Fail` is its outcome, else the kernel does it.
Hook = Callable[[Run, Call], Fail | None]


class Reaper:
    """Gives the wait status of a process that has ended."""

    def __call__(self, pid: int) -> int:
        return os.waitpid(pid, 0)[1]


class Zygote(Reaper):
    """A process that has imported the program and forks its runs."""

    def __init__(self, program: Path, streams: Path) -> None:
        self.program = program
        self._streams = streams
        self._count = 0
        streams.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = Path(__file__).with_name("zygote.py")
        # One thread only, so that the fork takes all of the process with it.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [interpreter(program), str(script), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._channel = ours
        if not ours.recv(1 << 16):
            raise RuntimeError(f"{program} cannot be imported")

    def close(self) -> None:
        """Ends the process."""
        self._channel.close()
        self._process.wait()

    def __call__(self, pid: int) -> int:
        self._channel.send(json.dumps({"wait": pid}).encode())
        return int(json.loads(self._channel.recv(1 << 16))["status"])

    def start(
        self,
        *argv: object,
        script: Path | None = None,
        mount: Path | None = None,
        watch: list[Path] | None = None,
        hook: Hook | None = None,
        stdout: Path | None = None,
    ) -> Run:
        """Forks a run.

        Args:
            argv: arguments.
            script: what to run instead of the program.
            mount: a folder that shall be a mount point for the run.
            watch: folders whose calls go through ``hook``.
            hook: what decides on them.
            stdout: where standard output goes; default a new file.
        """
        streams = self._new_streams()
        arguments = tuple(map(str, argv))
        request = {
            "argv": arguments,
            "script": str(script or self.program),
            "mount": str(mount) if mount else None,
            "stdout": str(stdout or streams[0]),
            "stderr": str(streams[1]),
        }
        message = json.dumps(request).encode()
        if hook is None:
            self._channel.send(message)
            return Run(arguments, self._forked(), streams)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(self._channel, [message], [theirs.fileno()])
        theirs.close()
        run = Run(arguments, self._forked(), streams)
        _, fds, _, _ = socket.recv_fds(ours, 64, 1)
        ours.close()
        if fds:
            run.supervisor = Supervisor(fds[0], watch or [], functools.partial(hook, run))
        return run

    def execute(self, *argv: object, environment: dict[str, str] | None = None) -> tuple[Run, Reaper]:
        """Starts a run in a fresh interpreter, as a user does, with more in its environment."""
        streams = self._new_streams()
        arguments = tuple(map(str, argv))
        with streams[0].open("wb") as out, streams[1].open("wb") as err:
            process = subprocess.Popen(
                [str(self.program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | (environment or {}),
            )
        # Waited for by the reaper, not by subprocess.
        process.returncode = 0
        return Run(arguments, process.pid, streams), Reaper()

    def run(self, *argv: object, **options: object) -> Ended:
        """A run from start to end."""
        return self.start(*argv, **options).finish(self)  # type: ignore[arg-type]

    def _forked(self) -> int:
        return int(json.loads(self._channel.recv(1 << 16))["pid"])

    def _new_streams(self) -> tuple[Path, Path]:
        # Several runs may be under way.
        self._count += 1
        return self._streams / f"out{self._count}", self._streams / f"err{self._count}"


def interpreter(program: Path) -> str:
    """The Python that a console script runs under: the one beside it, else the one that its first line
    names."""
    for name in ("python", "python3"):
        if (beside := program.with_name(name)).exists():
            return str(beside)
    line = program.read_text(errors="replace").splitlines()[0]
    if not line.startswith("#!"):
        raise SystemExit(f"{program}: not a console script")
    return line[2:].split()[0]


def default_program() -> Path:
    """``fastshard`` beside the interpreter, unless FASTSHARD names another."""
    return Path(os.environ.get("FASTSHARD") or Path(sys.executable).with_name("fastshard"))
