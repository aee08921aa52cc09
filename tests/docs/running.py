"""Runs the blocks of a page, in their order, in a folder that is empty before the first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import blocks
import checking
from blocks import ROOT, Block
from holding import HANG

#: Between the outputs of commands; nothing prints it.
_BETWEEN = "\x1e"
_DONE = re.compile(f"{_BETWEEN}(\\d+){_BETWEEN}\n")


#: As the installed program, which has no modules of the folder that it is started in.
_FASTSHARD = "import sys; sys.path.pop(0); from fastshard.cli import main; sys.exit(main())"


_STAND_INS = Path(__file__).with_name("stand_ins.py")

#: Addresses for which servers of this host stand in.
_IN_STORE = re.compile(r"\b(s3|hf)://")


class Untrue(Exception):
    """A block that is not what happens."""


class Page:
    """The folder and the processes that a page's blocks run in."""

    def __init__(self, folder: Path, in_clone: bool = False) -> None:
        self.folder = folder / "page"
        self.folder.mkdir()
        if in_clone:
            for name in ("tests", "scripts", "docs", "benches", "python", "examples"):
                (self.folder / name).symlink_to(ROOT / name)
        programs = folder / "bin"
        programs.mkdir()
        for name, command in {"fastshard": f"-c '{_FASTSHARD}'", "python": "", "python3": ""}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
            (programs / name).chmod(0o755)
        self.environment = {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "LC_ALL": "C.UTF-8",
            "TERM": "dumb",
            "NO_COLOR": "1",
            # What pages call the clone of the repository that they are read in.
            "REPO": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if "PYTHONPATH" in os.environ:
            # The blocks run the package that the tests run.
            self.environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        # For blocks that say so.
        self.launchers = folder / "launchers"
        self.launchers.mkdir()
        for name in ("srun", "mpirun", "sbatch", "kubectl", "aws"):
            (self.launchers / name).write_text(f'#!/bin/sh\nexec {sys.executable} {_STAND_INS} {name} "$@"\n')
            (self.launchers / name).chmod(0o755)
        self._worker: subprocess.Popen[str] | None = None
        self._stores: subprocess.Popen[str] | None = None
        self.done: Counter[str] = Counter()
        self._files: set[str] = set()
        self._read: list[str] = []

    def run(self, block: Block) -> None:
        """Does with a block what is to be done with it.

        Raises:
            Untrue: with the block's place and what went wrong.
        """
        held = block.held
        if held in ("checked only", "stood in"):
            checking.check(block, self.folder)
        if held == "validated":
            if block.title is not None:
                file = self.folder / block.title
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.text, encoding="utf-8")
                self._files.add(block.title)
            checking.validate(block)
        elif held in ("run", "compared", "stood in"):
            self._read.append(block.text)
            if held == "stood in" and self._stores is None and _IN_STORE.search(block.text):
                self._serve_stores()
            if block.language == "sh":
                self._script(block)
            elif block.language == "console":
                self._console(block)
            else:
                self._python(block)
        elif held == "by another test":
            checking.other_test(block)
        self.done[held] += 1

    def kill(self) -> None:
        """Ends the page's processes."""
        for process in (self._worker, self._stores):
            if process is not None:
                process.kill()
                process.communicate()

    def close(self) -> None:
        """Ends the page.

        Raises:
            Untrue: if a file that the page writes is read by nothing on it.
        """
        self.kill()
        for name in self._files:
            last = name.rpartition("/")[2]
            stem = last.rpartition(".")[0]
            used = any(last in text or re.search(rf"\b{re.escape(stem)}\b", text) for text in self._read)
            if not used and not name.startswith(".github/"):
                raise Untrue(f"{name}: no command of the page uses this file")

    def _serve_stores(self) -> None:
        """Starts servers in the place of S3 and of the hub, for this block and those after it."""
        self._stores = subprocess.Popen(
            [sys.executable, str(_STAND_INS), "serve"],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._stores.stdout is not None
        self.environment |= json.loads(self._stores.stdout.readline())

    def _bash(self, block: Block, script: str) -> tuple[int, str]:
        """Exit code of a script, and what it prints on both streams; nothing that it started goes on after
        it."""
        environment = dict(self.environment)
        if block.held == "stood in":
            environment["PATH"] = f"{self.launchers}:{environment['PATH']}"
        with subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=environment,
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=HANG)
            except subprocess.TimeoutExpired:
                raise Untrue(f"{block.where}: it does not end") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, printed

    def _script(self, block: Block) -> None:
        code, printed = self._bash(block, "set -euo pipefail\n" + block.text)
        if code:
            raise Untrue(f"{block.where}: exit code {code}\n{printed}")

    def _console(self, block: Block) -> None:
        listed = blocks.commands(block)
        script = "".join(
            f"{command.text}\n__code=$?; printf '{_BETWEEN}%d{_BETWEEN}\\n' $__code; (exit $__code)\n"
            for command in listed
        )
        parts = _DONE.split(self._bash(block, script)[1])
        # Text and exit codes by turns, and what follows the last.
        for at, (printed, code) in enumerate(zip(parts[:-1:2], parts[1::2], strict=True)):
            self.compare(block, at, printed, int(code))
        if len(parts) != 2 * len(listed) + 1:
            raise Untrue(f"{block.where}: a command ended the shell\n{''.join(parts)}")

    def compare(self, block: Block, at: int, printed: str, code: int) -> None:
        """What a command has printed with what is shown; one that fails must say so, or be asked for its exit
        code."""
        listed = blocks.commands(block)
        command = listed[at]
        asked = command.text == "echo $?" or (at + 1 < len(listed) and listed[at + 1].text == "echo $?")
        tells = re.search(
            r"^(error|fastshard:|usage:|ls:|diff:|cmp:)|\(exit [1-9]\d*\)$", command.shown, re.MULTILINE
        )
        if not blocks.is_shown(command.shown, printed):
            raise Untrue(
                f"{block.where}: $ {command.text}\n--- shown\n{command.shown}--- printed\n{printed}---"
            )
        if code and not (asked or tells):
            raise Untrue(
                f"{block.where}: $ {command.text}\nexit code {code}, and nothing shown says so\n{printed}"
            )

    def _python(self, block: Block) -> None:
        if self._worker is None:
            self._worker = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("worker.py"))],
                cwd=self.folder,
                env=self.environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        told = self._ask(
            {
                "code": block.text,
                "where": block.page,
                "line": block.line,
                "doctest": block.language == "pycon",
                "module": blocks.module(block.page),
            }
        )
        if told:
            raise Untrue(f"{block.where}\n{told}")

    def _ask(self, request: dict[str, Any]) -> str:
        worker = self._worker
        assert worker is not None and worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        if not answer:
            raise Untrue(f"{request['where']}:{request['line']}: the block ended Python")
        told: str = json.loads(answer)
        return told
