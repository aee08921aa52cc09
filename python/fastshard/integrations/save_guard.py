"""Checks of a training run's saves as they are made, on rank 0 and without waiting until the data is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import IO, Literal

from ..checkpoint.open_checkpoint import open as open_checkpoint
from ..common import codes
from ..common.errors import FastshardError, Finding, error_for, exit_code
from ..common.formatting import counted
from ..common.log import log
from ..common.option_checks import refused
from ..common.options import StrPath
from ..common.records import dataclass
from ..conversion.distributed.launcher_env import Rank, detect, is_alone
from ..conversion.distributed.rendezvous import SeenRank, check_storage, rank_of

__all__ = ["SaveGuard", "StepVerdict", "after_save", "before_training"]

#: The name in the folder of saves that ranks use for their rendezvous. It is never created.
_MEETING_NAME = "save-guard"
#: The lowest priority, for a process that runs alongside training.
_NICE = 19


@dataclass(frozen=True)
class StepVerdict:
    """The result of checking one save.

    Examples:
        >>> from fastshard.integrations import SaveGuard
        >>> verdict = SaveGuard(rank=0, world=1).after_save("model", verify=False)
        >>> verdict.ok, verdict.is_full
        (True, False)
    """

    #: The checkpoint.
    path: Path
    #: All findings, from its headers or from all of its data.
    findings: tuple[Finding, ...]
    #: True if all data was read; False if only headers were.
    is_full: bool

    @property
    def ok(self) -> bool:
        """True if no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)


@dataclass(frozen=True)
class _Run:
    """A background process that verifies a checkpoint."""

    path: Path
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def stop(self) -> None:
        """End the process, and forget its output."""
        self.process.kill()
        self.process.wait()
        self.output.close()
        self.errors.close()


class SaveGuard:
    """A guard for the saves of a run: it first checks that all ranks see the same storage, and later checks
    each save.

    Rank 0 reads the headers of a save immediately, and compares them with the previous step. A low-priority
    background process then reads the data. Other ranks do nothing, and no rank waits for another after a
    save.

    Examples:
        >>> from fastshard.integrations import SaveGuard
        >>> guard = SaveGuard(rank=0, world=1)
        >>> [seen.rank for seen in guard.before_training("saves")]
        [0]
        >>> guard.after_save("model").ok  # by its headers
        True
        >>> [verdict.is_full for verdict in guard.results(timeout=60)]  # by all of its data
        [True]
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        world: int | None = None,
        like: StrPath | None = None,
        on_failure: Literal["warn", "raise"] = "warn",
        threads: int | None = None,
    ) -> None:
        """Prepare a guard.

        Args:
            rank: this process's rank from 0; default: from torch.distributed if it is initialised, else from
                the launcher.
            world: number of ranks; needed with ``rank``, and for a launcher that does not state it.
            like: a good checkpoint of the same model, with which the first save is compared.
            on_failure: ``"warn"`` issues a warning and logs it; ``"raise"`` raises FastshardError on rank 0.
            threads: threads of the background process; default: one for each core.

        Raises:
            FastshardError: ``FS515`` for an invalid value.
        """
        if on_failure not in ("warn", "raise"):
            raise refused("on_failure", "'warn' or 'raise'", on_failure)
        self._rank = None if rank is None else rank_of(rank, world)
        self._world = world
        self._like = None if like is None else Path(like).absolute()
        self._on_failure = on_failure
        self._threads = threads
        #: The most thorough check of each save, in the order of the saves.
        self._verdicts: dict[Path, StepVerdict] = {}
        #: Results of background processes, in the order in which they ended.
        self._full: list[StepVerdict] = []
        self._running: _Run | None = None
        self._waiting: Path | None = None

    def before_training(self, folder: StrPath, *, timeout: float | None = None) -> list[SeenRank]:
        """Checks that all ranks see the same storage in the folder of saves. All ranks must call it.

        Args:
            folder: the folder in which checkpoints will be saved; created if it is missing.
            timeout: seconds to wait for other ranks; default 600.

        Returns:
            All ranks; for ranks other than 0 these are rank 0 and the rank itself.

        Raises:
            FastshardError: ``FS522`` on each rank if one rank has a separate disk or does not appear;
                ``FS502`` if this rank cannot create the folder.
        """
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FastshardError.of(
                codes.PERMISSION,
                f"the directory for saves cannot be created: {error.strerror}",
                file=os.fspath(folder),
                help="choose another directory, or give this user write permission",
            ) from None
        this = self._place()
        return check_storage(Path(folder) / _MEETING_NAME, rank=this.rank, world=this.world, timeout=timeout)

    def after_save(self, path: StrPath, *, verify: bool = True) -> StepVerdict | None:
        """Checks a complete save by its headers, and starts a background process that reads its data.

        Rank 0 calls it when all ranks have written. At most one process runs at a time: a later save waits
        for it, and replaces a save that is already waiting.

        Args:
            path: the checkpoint.
            verify: False for a check by headers alone, e.g. of a second copy of a step.

        Returns:
            The result by headers; None on other ranks.

        Raises:
            FastshardError: on a failure of this save or of an earlier one, with ``on_failure="raise"``.
        """
        if self._place().rank != 0:
            return None
        path = Path(path).absolute()
        if self._running is not None and self._running.path == path:
            # It has read a mixture of two saves.
            self._running.stop()
            self._running = None
        finished = self._collect()
        self._verdicts.pop(path, None)
        verdict = StepVerdict(path, tuple(_check_headers(path, self._reference(path))), is_full=False)
        self._verdicts[path] = verdict
        log("integrations", "%s: %d findings by headers", path, len(verdict.findings))
        if verdict.ok and verify:
            self._waiting = path
        self._start_next()
        self._report([*finished, verdict])
        return verdict

    def results(self, timeout: float = 0.0) -> list[StepVerdict]:
        """Collects the results of background processes that have ended.

        Args:
            timeout: seconds to wait for each save whose verification is still running.

        Returns:
            All results so far, oldest first. A save that was deleted before its verification ended has none.

        Raises:
            FastshardError: if a new result has an error, with ``on_failure="raise"``.
        """
        finished: list[StepVerdict] = []
        while self._running is not None:
            running = self._running
            finished += self._collect(timeout)
            self._start_next()
            if self._running is running:
                break
        self._report(finished)
        return list(self._full)

    @property
    def last_proven(self) -> Path | None:
        """The last save without an error: by all of its data, or by its headers if its verification is still
        running.

        Deleted saves do not count.
        """
        return next((v.path for v in reversed(self._verdicts.values()) if v.ok and v.path.exists()), None)

    @property
    def last_verified(self) -> Path | None:
        """The last save, not deleted since, whose full verification found no error."""
        full = (v.path for v in reversed(self._verdicts.values()) if v.ok and v.is_full)
        return next((path for path in full if path.exists()), None)

    @property
    def unfinished(self) -> list[Path]:
        """Saves whose verification is running or waiting. Do not delete them."""
        running = [] if self._running is None else [self._running.path]
        return [*running, *([] if self._waiting is None else [self._waiting])]

    def find_protected(self, overwritten: Collection[Path] = ()) -> set[Path]:
        """Find the saves that must not be deleted.

        These are the last save whose full verification found no error, or else the last one without an error
        by its headers; and all saves whose verification is running or waiting.

        Args:
            overwritten: saves that a later one overwrites in place, so that they protect nothing.
        """
        good = [
            verdict
            for verdict in self._verdicts.values()
            if verdict.ok and verdict.path not in overwritten and verdict.path.exists()
        ]
        last = [v for v in good if v.is_full][-1:] or good[-1:]
        return {*(v.path for v in last), *self.unfinished}

    def _place(self) -> Rank:
        """Return the rank of this process, which is detected on first use."""
        if self._rank is None:
            self._rank = _find_rank(self._world)
        return self._rank

    def _reference(self, path: Path) -> Path | None:
        """Return the save with which a new one is compared; None if it no longer exists."""
        reference = self.last_proven or self._like
        return reference if reference is not None and reference != path and reference.exists() else None

    def _start_next(self) -> None:
        """Start the waiting verification, unless another one is running."""
        if self._running is not None or self._waiting is None:
            return
        path, self._waiting = self._waiting, None
        try:
            self._running = _start(path, self._threads)
        except OSError as error:
            _warn(f"{path}: only its headers are checked, because no process can start: {error}")

    def _collect(self, timeout: float = 0.0) -> list[StepVerdict]:
        """Collect the result of the background process if it has ended."""
        run = self._running
        if run is None:
            return []
        try:
            run.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return []
        self._running = None
        findings = _read_findings(run)
        if not run.path.exists():
            log("integrations", "%s: deleted before its verification ended", run.path)
            return []
        verdict = StepVerdict(run.path, tuple(findings), is_full=True)
        if not _could_not_run(verdict):
            self._verdicts[run.path] = verdict
        self._full.append(verdict)
        log("integrations", "%s: %d findings by all data", run.path, len(findings))
        return [verdict]

    def _report(self, verdicts: list[StepVerdict]) -> None:
        """Warn of errors, or raise them.

        A background process that could not run does not mean that the save is damaged, so it only causes a
        warning.
        """
        errors = [verdict for verdict in verdicts if not verdict.ok]
        fatal: list[Finding] = []
        for verdict in errors:
            if self._on_failure == "raise" and not (verdict.is_full and _could_not_run(verdict)):
                fatal += [_of_step(finding, verdict.path) for finding in verdict.findings]
            else:
                _warn(_describe(verdict))
        if fatal:
            raise error_for(fatal)


def _find_rank(world: int | None) -> Rank:
    """Find the rank of this process from torch.distributed, or from its launcher.

    Raises:
        FastshardError: ``FS515`` if the launcher does not state enough.
    """
    # What a program has not imported, it has not initialised.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Rank(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")
    return Rank(0, 1, "alone") if world is None and is_alone() else detect(world)


def _check_headers(path: Path, reference: Path | None) -> list[Finding]:
    """Return the findings about a checkpoint by its headers, compared with a reference if it can be read."""
    if reference is not None:
        try:
            return open_checkpoint(path, like=reference).findings
        except Exception:
            # Either of the two cannot be opened. Whoever deletes old steps may be at work on the reference.
            log("integrations", "%s: cannot be compared with %s", path, reference)
    try:
        return open_checkpoint(path).findings
    except FastshardError as error:
        return error.findings
    except Exception as error:
        # A defect here must not end a training.
        return [Finding.of(codes.INTERNAL, f"{type(error).__name__}: {error}", file=os.fspath(path))]


def _start(path: Path, threads: int | None) -> _Run:
    """Start ``fastshard verify`` on a checkpoint with low priority."""
    options = [] if threads is None else ["--threads", str(threads)]
    # Files have no limit, as pipes have: nobody reads before the process ends.
    output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
    command = [sys.executable, "-m", "fastshard", "verify", os.fspath(path), "--json", *options]
    # Nothing in the folder of the training takes the place of a module; known to Python 3.11 and later.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment
    )
    if hasattr(os, "setpriority"):
        # Threads that it starts from now on inherit it.
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    log("integrations", "%s: process %d verifies it", path, process.pid)
    return _Run(path, process, output, errors)


def _read_findings(run: _Run) -> list[Finding]:
    """Return the findings of a background process that has ended."""
    with run.output, run.errors:
        run.output.seek(0)
        run.errors.seek(0)
        text, lines = run.output.read(), run.errors.read().decode(errors="replace").strip().splitlines()
    try:
        findings = [Finding.from_dict(entry) for entry in json.loads(text)["findings"]]
    except (ValueError, KeyError):
        findings = []
    status = run.process.returncode
    if status not in (0, 1, 3) and not any(finding.severity == "error" for finding in findings):
        message = f"the verification ended with exit code {status}"
        findings.append(Finding.of(codes.INTERRUPTED, message, got=lines[-1] if lines else None))
    return findings


def _could_not_run(verdict: StepVerdict) -> bool:
    """Return True if no finding reports that the checkpoint itself is broken or incomplete."""
    return exit_code(list(verdict.findings)) == 2


def _describe(verdict: StepVerdict) -> str:
    """Describe a save's first error, and count the others."""
    errors = error_for(list(verdict.findings)).findings
    first, others = errors[0], sum(finding.severity == "error" for finding in errors) - 1
    more = f", and {counted(others, 'more error')}" if others else ""
    advice = f"; {first.advice}" if first.advice else ""
    return f"{verdict.path}: {first} [{first.code}]{more}{advice}"


def _of_step(finding: Finding, path: Path) -> Finding:
    """Add the step's path to the message of an error."""
    return finding.replace(message=f"{path}: {finding.message}") if finding.severity == "error" else finding


def _warn(text: str) -> None:
    """Issue a warning, and log it if the program has configured logging."""
    import logging

    warnings.warn(text, stacklevel=4)
    logger = logging.getLogger("fastshard.integrations")
    if logger.hasHandlers():
        logger.warning("%s", text)


#: The guard that :func:`before_training` created in this process.
_current: SaveGuard | None = None


def before_training(
    folder: StrPath,
    rank: int | None = None,
    world: int | None = None,
    *,
    timeout: float | None = None,
    like: StrPath | None = None,
    on_failure: Literal["warn", "raise"] = "warn",
    threads: int | None = None,
) -> SaveGuard:
    """Checks that all ranks see the same storage in the folder of saves. All ranks must call it before the
    first step.

    Args:
        folder: the folder in which checkpoints will be saved; created if it is missing.
        rank: this process's rank from 0; default: from torch.distributed if it is initialised, else from the
            launcher.
        world: number of ranks; needed with ``rank``, and for a launcher that does not state it.
        timeout: seconds to wait for other ranks; default 600.
        like: a good checkpoint of the same model, with which the first save is compared.
        on_failure: ``"warn"`` issues a warning and logs it; ``"raise"`` raises FastshardError on rank 0.
        threads: threads of the background process; default: one for each core.

    Returns:
        The guard, which :func:`after_save` in this process then uses.

    Raises:
        FastshardError: ``FS522`` on each rank if one rank has a separate disk or does not appear.

    Examples:
        >>> from fastshard.integrations import before_training
        >>> guard = before_training("saves", rank=0, world=1)  # each rank makes this call
        >>> guard.after_save("lossy").ok
        False
    """
    global _current
    guard = SaveGuard(rank=rank, world=world, like=like, on_failure=on_failure, threads=threads)
    guard.before_training(folder, timeout=timeout)
    _current = guard
    return guard


def after_save(path: StrPath) -> StepVerdict | None:
    """Checks a complete save: its headers immediately, all data in the background; see :class:`SaveGuard`.

    Args:
        path: the checkpoint, after all ranks have written it.

    Returns:
        The result by headers; None on ranks other than 0.

    Raises:
        FastshardError: on a failure of this save or of an earlier one, with ``on_failure="raise"``.

    Examples:
        >>> from fastshard.integrations import after_save, before_training
        >>> guard = before_training("saves", rank=0, world=1)
        >>> after_save("model").ok
        True
    """
    global _current
    if _current is None:
        _current = SaveGuard()
    return _current.after_save(path)
