"""Hosts on one machine: each with its own name, network, processes and mounts, and where it is meant to, a
disk of its own under the path at which the others have their shared one. That is the set-up of
AI-Hypercomputer/maxtext#887.

Needs the right to make namespaces (root, or user namespaces that may mount).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holding import HANG, Clock, Steps

#: Names the host, gives it a disk of its own at $2 if that is not empty, and becomes the command.
_ENTER = """
hostname "$1" || exit 90
if [ -n "$2" ]; then mount -t tmpfs -o size="$3" own "$2" || exit 91; fi
shift 3
exec "$@"
"""


@functools.cache
def can_have_hosts() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if shutil.which("unshare") is None:
        return "no unshare"
    tried = subprocess.run(
        [*_namespaces(own_pids=True), "sh", "-c", "hostname other && mount -t tmpfs own /mnt"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return None if tried.returncode == 0 else tried.stderr.strip() or "unshare fails"


def _namespaces(own_pids: bool) -> list[str]:
    # With numbers of their own, whether a process of another host is dead cannot be seen: as on real hosts.
    pids = ["--pid", "--fork", "--kill-child", "--mount-proc"] if own_pids else []
    return ["unshare", "--mount", "--uts", "--net", *pids]


@dataclass
class Host:
    """One host, and what runs on it."""

    name: str
    #: A path at which it has a disk of its own.
    own_disk: Path | None = None
    #: Size of that disk.
    size: str = "64m"
    #: Whether processes have numbers of their own.
    own_pids: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    #: Holds what runs on it.
    steps: Steps | None = None
    #: The time there; the system's if none is given.
    clock: Clock | None = None
    running: subprocess.Popen[str] | None = None

    def start(self, argv: Sequence[object]) -> Host:
        """Starts a command."""
        disk = "" if self.own_disk is None else str(self.own_disk)
        command = [*_namespaces(self.own_pids), "sh", "-c", _ENTER, "sh", self.name, disk, self.size]
        steps = {} if self.steps is None else {"FASTSHARD_STEPS": self.steps.socket}
        clock = {} if self.clock is None else self.clock.environment
        self.running = subprocess.Popen(
            [*command, *(str(word) for word in argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.environ, **steps, **clock},
        )
        return self

    def fastshard(self, *argv: object) -> Host:
        """Starts fastshard."""
        return self.start([sys.executable, "-m", "fastshard", *argv])

    def kill(self) -> None:
        """The host loses its power: everything on it ends at once."""
        assert self.running is not None
        os.killpg(self.running.pid, signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        return self.running is not None and self.running.poll() is not None

    def end(self, timeout: float = HANG) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of the command, once it has ended."""
        assert self.running is not None
        try:
            out, err = self.running.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.running.communicate()
            raise AssertionError(f"{self.name} did not end within {timeout} s: {out}{err}") from None
        return self.running.returncode, out, err


def ended(hosts: Sequence[Host], timeout: float = HANG) -> list[tuple[int, str, str]]:
    """What the commands on all hosts came to."""
    try:
        return [host.end(timeout) for host in hosts]
    finally:
        for host in hosts:
            if not host.has_ended and host.running is not None:
                host.kill()


def card(out: Path, rank: int) -> Path:
    """What a rank says of itself to the others."""
    return out.with_name(f".{out.name}.fastshard-ranks") / f"rank-{rank:05}.json"


def phase(out: Path, rank: int) -> str | None:
    """How far a rank is, as it says; none if it says nothing."""
    try:
        said: str = json.loads(card(out, rank).read_bytes())["phase"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return said


def ended_by(clock: Clock, out: Path, hosts: Sequence[Host], zero: Steps) -> list[tuple[int, str, str]]:
    """What ranks on all hosts came to that wait for what an earlier run has left; `zero` is where rank 0 says
    that they have met. Until then time stands still, so that nobody is too late."""
    zero.wait("met", above=hosts[0].running)
    clock.until(lambda: all(host.has_ended for host in hosts), *(card(out, i) for i in range(len(hosts))))
    return ended(hosts)


def content(folder: Path) -> dict[str, bytes]:
    """All files of a result; the manifest without times and makers."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        if path.name == "fastshard.manifest.json":
            document = json.loads(data)
            document.pop("provenance", None)
            for file in document["files"]:
                file.pop("mtime_ns", None)
            data = json.dumps(document).encode()
        found[str(path.relative_to(folder))] = data
    return found


def hosts(n: int, **kwargs: Any) -> list[Host]:
    return [Host(f"node{i}", **kwargs) for i in range(n)]


def hidden(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))
