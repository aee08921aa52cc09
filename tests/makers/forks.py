"""A process that imports a framework once and forks the ranks of each launch: importing takes longer than
what they do.

``python forks.py FD MODULE...`` reads launches as lines of JSON from its input, and writes the exit codes of
their ranks to the descriptor; :class:`Forks` is the other end.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Forks:
    """Launches scripts of ranks, all of which find the modules imported."""

    def __init__(self, *modules: str, **environment: str) -> None:
        """Begins to import the modules, with these variables beside those of this process."""
        self._answers, answers = os.pipe()
        command = [sys.executable, __file__, str(answers), *modules]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[answers],
            env={**os.environ, **environment},
            text=True,
            start_new_session=True,
        )
        os.close(answers)
        atexit.register(self.kill)

    def kill(self) -> None:
        """Ends the process and all ranks."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def launch(
        self,
        script: Path,
        argv: Sequence[object],
        logs: Sequence[Path],
        ranks: Sequence[Mapping[str, str]] = ({},),
    ) -> None:
        """Runs a script once for each of the ranks, which differ by the variables given, and waits for all.

        Raises:
            AssertionError: one of them failed, with the ends of what they printed into ``logs``.
        """
        # Not at the top: the ranks' process must not import the package.
        from holding import HANG

        asked = {
            "script": str(script),
            "argv": [*map(str, argv)],
            "ranks": [*map(dict, ranks)],
            "logs": [*map(str, logs)],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        codes = b""
        while not codes.endswith(b"\n"):
            if not select.select([self._answers], [], [], HANG)[0]:
                self.kill()
                codes = b'"hang"\n'
            else:
                read = os.read(self._answers, 4096)
                codes += read or b'"the process that forks ended"\n'
        tails = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs if log.exists())
        assert json.loads(codes) == [0] * len(ranks), f"{codes!r}\n{tails}"


def _rank(asked: Mapping[str, Any], rank: int) -> int:
    """What a rank does: the script, as if it were started alone."""
    log = os.open(asked["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(asked["ranks"][rank])
    sys.argv = [asked["script"], *asked["argv"]]
    sys.path[0] = str(Path(asked["script"]).parent)
    try:
        runpy.run_path(asked["script"], run_name="__main__")
        return 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main(answers: int, modules: Sequence[str]) -> None:
    """Imports the modules, then carries out one launch after another."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        ranks = []
        for rank in range(len(asked["ranks"])):
            pid = os.fork()
            if pid == 0:
                os._exit(_rank(asked, rank))
            ranks.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        os.write(answers, (json.dumps(codes) + "\n").encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
