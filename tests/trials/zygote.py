"""Forks runs of a program out of a process that has imported it, so that a trial costs milliseconds.

Started by :class:`runner.Zygote` under the program's own interpreter, as ``zygote.py FD SCRIPT``. A request
is one JSON message on the socket ``FD``; the child runs the program's entry script as ``__main__`` at the top
of the stack, so that signals, exit codes and the interpreter's own clean-up are what they are in a fresh
process.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
import warnings
from typing import Any

import intercept


def load() -> None:
    """Imports what runs need; a module that is absent is the run's business."""
    for name in (
        "fastshard.cli",
        "fastshard.zarr.array_writer",
        "fastshard.zarr.array_reader",
        "tensorstore",
    ):
        try:
            __import__(name)
        except ImportError:
            continue


def serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Answers requests; returns a child's request in the child, and None when the harness is gone."""
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 20, 1)
        if not message:
            return None
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            channel.send(json.dumps({"status": status}).encode())
            continue
        with warnings.catch_warnings():
            # Python warns of threads of libraries, none of which a run uses before the fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            return request, fds
        for fd in fds:
            os.close(fd)
        channel.send(json.dumps({"pid": pid}).encode())


def become(request: dict[str, Any], fds: list[int], channel: socket.socket) -> str:
    """Turns the child into the run: its streams, folder, mounts and filter. Returns the script to run."""
    channel.close()
    for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
        fd = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, number)
        os.close(fd)
    if request["mount"]:
        intercept.bind_onto_itself(request["mount"])
    sys.argv = [request["script"], *request["argv"]]
    sys.path.pop(0)
    if fds:
        intercept.install(socket.socket(fileno=fds[0]))
    return str(request["script"])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    load()
    # What was imported is not looked at, and so not copied, by a child's collections.
    gc.collect()
    gc.freeze()
    _channel = socket.socket(fileno=int(sys.argv[1]))
    _channel.send(b'{"ready": true}')
    if (_task := serve(_channel)) is not None:
        runpy.run_path(become(*_task, _channel), run_name="__main__")
