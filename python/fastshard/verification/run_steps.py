"""Steps of a run: their verdicts, the tracker files that name them, and the newest complete step."""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.inspection import inspect
from ..common import codes, memory_budget, safe_files
from ..common.addresses import check_settings, is_address
from ..common.config_text import shown
from ..common.errors import FastshardError, Finding, exit_code
from ..common.formatting import counted, some
from ..common.listing import refuse_unprintable
from ..common.options import OpenOptions, StrPath
from ..common.records import dataclass, replace
from ..common.stored_places import show_text
from ..sources.choose_step import SeveralModels
from ..sources.step_names import alike, is_step, matching, number, numbers_of, plain
from ..sources.step_trackers import folders_in
from .verified_steps import FileStates, VerifiedSteps, read_file_states
from .verify import verify as verify_checkpoint

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RunStep", "RunSteps", "judge_step", "steps"]

#: Tracker files by name. source: as in sources/step_trackers.py
TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal")
#: Megatron-LM's name for a step without a number. source: Megatron-LM megatron/training/checkpointing.py
_RELEASE = "release"
#: Maximum size of a tracker file in bytes.
_MAX_TRACKER = 4096
#: Verdicts by exit code, for saves that did finish as far as is known.
_WORDS = {1: "broken", 2: "unreadable", 3: "incomplete"}
#: Maximum number of folders in messages.
_MOST_NAMED = 4

#: Advice for a save that did not end.
_WAIT = "wait until the save ends; if its run is over, use an older step"


@dataclass(frozen=True)
class RunStep:
    """A step of a run, and the verdict on it.

    Examples:
        >>> step = fastshard.steps("steps").newest
        >>> step.name, step.verdict, step.complete, step.files
        ('iter_0001000', 'incomplete', False, 1)
    """

    #: Name of its folder.
    name: str
    path: str
    #: ``complete``, ``incomplete``, ``broken``, ``unfinished`` (the save did not finish) or ``unreadable``.
    verdict: str
    #: All findings; files are relative to the step.
    findings: tuple[Finding, ...]
    #: Number of its files, and their total size in bytes.
    files: int
    bytes: int
    #: Time of the last change to one of its files, in seconds since 1970; None without files.
    changed: float | None
    #: Tracker files that name it.
    trackers: tuple[str, ...] = ()
    #: True if all data was read, or was read before and has not changed since.
    verified: bool = False

    @property
    def complete(self) -> bool:
        """True if it is complete and has no errors."""
        return self.verdict == "complete"

    @property
    def finding(self) -> Finding | None:
        """The first error; None without errors."""
        return next((finding for finding in self.findings if finding.severity == "error"), None)

    @property
    def saved(self) -> str | None:
        """The time of its last change in UTC, as ISO 8601; None without files."""
        if self.changed is None:
            return None
        time = datetime.datetime.fromtimestamp(self.changed, datetime.timezone.utc)
        return f"{time:%Y-%m-%dT%H:%M:%SZ}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, as an element of ``steps`` in ``fastshard steps --json``."""
        return {
            "name": self.name,
            "path": self.path,
            "verdict": self.verdict,
            "verified": self.verified,
            "files": self.files,
            "bytes": self.bytes,
            "saved": self.saved,
            "trackers": list(self.trackers),
            "findings": [finding.to_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class RunSteps:
    """The steps of a run, oldest first.

    Examples:
        >>> steps = fastshard.steps("steps")
        >>> steps.trackers, steps.newest.name, steps.newest_complete.name
        ({'latest_checkpointed_iteration.txt': '1000'}, 'iter_0001000', 'iter_0000500')
    """

    #: Folder that holds the steps.
    folder: str
    steps: tuple[RunStep, ...]
    #: Steps that the tracker files name, by the files' names.
    trackers: dict[str, str]
    #: Warnings about tracker files.
    findings: tuple[Finding, ...] = ()

    @property
    def newest(self) -> RunStep:
        """The newest step, whatever its state."""
        return self.steps[-1]

    @property
    def newest_complete(self) -> RunStep | None:
        """The newest complete step; None if no step is complete."""
        return next((step for step in reversed(self.steps) if step.complete), None)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, without findings of trackers (``fastshard steps --json``)."""
        complete = self.newest_complete
        return {
            "folder": self.folder,
            "trackers": self.trackers,
            "newest": self.newest.name,
            "newest_complete": None if complete is None else complete.name,
            "steps": [step.to_dict() for step in self.steps],
        }


@memory_budget.kept
def steps(
    run: StrPath,
    *,
    verify: bool = False,
    state: StrPath | None = None,
    memory: str | int | None = None,
    **opening: Unpack[OpenOptions],
) -> RunSteps:
    """Lists the steps of a run, and checks each by its headers.

    Steps are folders with the name of a step (``checkpoint-500``, ``iter_0000500``, ``global_step500``,
    ``step-500``, ``500``): in ``run``, or in one of its folders. The function changes nothing.

    Args:
        run: folder of a run, or its address in a store, e.g. ``s3://bucket/run``.
        verify: read all data of each step, as :func:`fastshard.verify` does.
        state: with ``verify``, a folder outside of the run for manifests of verified steps. A step whose
            files have not changed since is not read again; otherwise it is compared with its manifest.
        memory: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Raises:
        FastshardError: if the folder has no steps.

    Examples:
        >>> steps = fastshard.steps("steps")
        >>> [(step.name, step.verdict) for step in steps.steps]
        [('iter_0000500', 'complete'), ('iter_0001000', 'incomplete')]
        >>> steps.newest_complete.name
        'iter_0000500'
    """
    local, unfinished = _find_local_path(run, opening)
    folder = find_steps_folder(local)
    trackers = read_trackers(folder)
    steps = [
        _judge(folder / name, unfinished, verify, state, memory, opening)
        for name in find_step_names(folder, trackers)
    ]
    steps = [step for step in steps if not is_other_folder(step)]
    if not steps:
        raise _no_steps(folder)
    return _match_steps(RunSteps(show_text(os.fspath(folder)), tuple(steps), trackers))


def judge_step(
    path: StrPath,
    *,
    verify: bool = False,
    state: StrPath | None = None,
    memory: str | int | None = None,
    **opening: Unpack[OpenOptions],
) -> RunStep:
    """Checks one step of a run by its headers.

    Args:
        path: folder of the step, or its address in a store.
        verify: read all data of the step, as :func:`fastshard.verify` does.
        state: as for :func:`fastshard.steps`.
        memory: as for :func:`fastshard.convert`.
        opening: as for :func:`fastshard.open`.

    Examples:
        >>> step = fastshard.judge_step("steps/iter_0001000")
        >>> step.verdict, step.finding.headline
        ('incomplete', 'mp_rank_01/model_optim_rng.pt: the file is missing (tp 1, pp 0)')
    """
    local, unfinished = _find_local_path(path, opening)
    return _judge(local, unfinished, verify, state, memory, opening)


def _find_local_path(path: StrPath, opening: OpenOptions) -> tuple[Path, dict[Path, FastshardError]]:
    """Return the local path of a folder, and an error for each folder whose upload has not finished.

    An address is replaced by the path of its placeholders.
    """
    if not is_address(path):
        return Path(path), {}
    from ..stores.placeholders import open_root

    root = open_root(path, check_settings(opening.get("storage_options")))
    return root.path, {root.path / prefix: error for prefix, error in root.unfinished.items()}


def _judge(
    path: Path,
    unfinished: Mapping[Path, FastshardError],
    verify: bool,
    state: StrPath | None,
    memory: str | int | None,
    opening: OpenOptions,
) -> RunStep:
    """Check one step; ``unfinished`` has an error for each folder whose upload has not finished."""
    verified = _open_state(path.parent, verify, state)
    states = read_file_states(path)
    is_verified = False
    uploads = [error for folder, error in unfinished.items() if folder.is_relative_to(path)]
    if uploads:
        found = uploads[0].findings[0]
        findings = [
            Finding.of(
                codes.UNCOMMITTED, found.message, file=path.name, expected=found.expected, help=found.help
            )
        ]
    elif plain(path.name) != path.name:
        findings = [
            Finding.of(
                codes.UNCOMMITTED, "its name shows that the save is not finished", file=path.name, help=_WAIT
            )
        ]
    elif not states:
        findings = [Finding.of(codes.UNCOMMITTED, "the step directory is empty", file=path.name, help=_WAIT)]
    else:
        findings, is_verified = _read_findings(path, states, verify, verified, memory, opening)
    return RunStep(
        name=path.name,
        path=show_text(os.fspath(path)),
        verdict=_word(findings),
        findings=tuple(findings),
        files=len(states),
        bytes=sum(size for size, *_ in states.values()),
        changed=max(time for _, time, _ in states.values()) / 1e9 if states else None,
        verified=is_verified,
    )


def _open_state(folder: Path, verify: bool, state: StrPath | None) -> VerifiedSteps | None:
    """Open the folder for manifests of verified steps; return None if the option is not given.

    Raises:
        FastshardError: ``FS515`` for a folder within the run, or without ``verify``.
    """
    if state is None:
        return None
    if not verify:
        raise FastshardError.of(codes.USAGE, "--state needs --verify", help="pass --verify too")
    return VerifiedSteps(state, folder)


def _read_findings(
    path: Path,
    states: FileStates,
    verify: bool,
    verified: VerifiedSteps | None,
    memory: str | int | None,
    opening: OpenOptions,
) -> tuple[list[Finding], bool]:
    """Read a step; return the findings, and whether all data was verified, now or before an unchanged
    state."""
    try:
        was_read = verify and verified is not None and verified.is_unchanged(path, states)
        if was_read or not verify:
            findings = list(inspect(path, memory=memory, **opening).findings)
            return findings, was_read and not any(f.severity == "error" for f in findings)
        known = None if verified is None else verified.find_manifest(path)
        verdict = verify_checkpoint(path, expect=known, memory=memory, **opening)
        if verified is not None and verdict.ok:
            verified.keep(path, states, memory, opening)
        return verdict.findings, verdict.ok
    except SeveralModels as error:
        # Each of them is judged; no manifest of one stands for all.
        choices: list[tuple[Path, OpenOptions]] = [(path, {**opening, "step": name}) for name in error.steps]
        choices += [(path / file, opening) for file in error.files]
        verdicts = [_read_findings(at, states, verify, None, memory, options) for at, options in choices]
        findings = list(dict.fromkeys(finding for found, _ in verdicts for finding in found))
        return findings, all(is_verified for _, is_verified in verdicts)
    except FastshardError as error:
        # A wrong option is wrong for every step.
        if any(finding.code == codes.USAGE for finding in error.findings):
            raise
        return error.findings, False


def _word(findings: Iterable[Finding]) -> str:
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return "complete"
    code = exit_code(errors)
    if code != 1 and any(finding.code == codes.UNCOMMITTED for finding in errors):
        return "unfinished"
    return _WORDS[code]


def is_other_folder(step: RunStep) -> bool:
    """Return True for a folder whose name is a number and that contains no checkpoint, so is not a step."""
    return step.name.isdecimal() and any(f.code == codes.NOT_A_CHECKPOINT for f in step.findings)


def refresh_trackers(steps: RunSteps) -> RunSteps:
    """Read the tracker files again, and keep the verdicts on the steps."""
    return _match_steps(replace(steps, trackers=read_trackers(Path(steps.folder))))


def _match_steps(steps: RunSteps) -> RunSteps:
    """Add to each step the tracker files that name it, and warn of files that name no complete step."""
    trackers = steps.trackers
    named = match_trackers([step.name for step in steps.steps], trackers)
    refreshed = [
        replace(step, trackers=tuple(file for file, name in named.items() if name == step.name))
        for step in steps.steps
    ]
    can_fix = not is_address(steps.folder)
    warnings = tuple(_check_trackers(refreshed, trackers, named, can_fix))
    return RunSteps(steps.folder, tuple(refreshed), trackers, warnings)


def find_steps_folder(run: StrPath) -> Path:
    """Return the folder that holds the steps of a run: ``run``, or the one folder in it that has steps.

    Raises:
        FastshardError: ``FS501`` if there are no steps, ``FS106`` if several folders have some.
    """
    path = safe_files.check_folder(run)
    if not os.access(path, os.R_OK | os.X_OK):
        raise FastshardError([safe_files.closed(path)])
    if _has_steps(path):
        return path
    within = [path / name for name in folders_in(path) if _has_steps(path / name)]
    if len(within) > 1:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "several directories hold steps",
            got=some([folder.name for folder in within], _MOST_NAMED),
            help="pass one of these directories as RUN",
        )
    if not within:
        _refuse_streams(path)
        raise _no_steps(path)
    return within[0]


def _has_steps(folder: Path) -> bool:
    return any(is_step(name) for name in folders_in(folder))


def _refuse_streams(folder: Path) -> None:
    """Raise an error for a run of EasyLM, whose steps are files.

    Raises:
        FastshardError: ``FS514``.
    """
    # A run of another framework has no use for it.
    from ..sources.easylm.adapter import list_streams

    if not (streams := list_streams(folder)):
        return
    raise FastshardError.of(
        codes.UNSUPPORTED,
        "EasyLM's steps are files, and fastshard checks them one by one",
        file=os.fspath(folder),
        expected="a directory for each step",
        got=some([stream.name for stream in streams], _MOST_NAMED),
        help="pass each file to `fastshard verify`",
        run=[f"fastshard verify {shlex.quote(os.fspath(stream))}" for stream in streams[-_MOST_NAMED:]],
    )


def _no_steps(folder: Path) -> FastshardError:
    return FastshardError.of(
        codes.NO_SUCH_PATH,
        "the directory holds no steps of a run",
        file=os.fspath(folder),
        expected="directories like checkpoint-500, iter_0000500, global_step500 or step-500",
        help="pass the directory that holds the steps; `fastshard inspect` reads a single step",
    )


def find_step_names(folder: Path, trackers: dict[str, str] | None = None) -> list[str]:
    """List the names of steps in a folder, oldest first, without links to other steps.

    Raises:
        FastshardError: ``FS514`` for a name that is not UTF-8.
    """
    release = _RELEASE in (trackers or {}).values()
    every = folders_in(folder)
    names = [name for name in every if is_step(name) or (release and name == _RELEASE)]
    real = {os.path.realpath(folder / name) for name in names if not (folder / name).is_symlink()}
    names = [n for n in names if not (folder / n).is_symlink() or os.path.realpath(folder / n) not in real]
    for name in names:
        refuse_unprintable(name)
    if len({alike(names[0], name) for name in names} if names else ()) < 2:
        return sorted(names, key=lambda name: (numbers_of(name), name))
    return sorted(names, key=lambda name: (number(name), name))


def read_trackers(folder: Path) -> dict[str, str]:
    """Read the tracker files in a folder: the steps that they name, by the files' names.

    Raises:
        FastshardError: if one cannot be read.
    """
    # A folder or a link to one may have the name too: some trainers link their last step.
    return {
        name: safe_files.read_text(folder / name, _MAX_TRACKER, label=name).strip()
        for name in TRACKERS
        if (folder / name).is_file()
    }


def match_trackers(names: Iterable[str], trackers: dict[str, str]) -> dict[str, str]:
    """Return the step that each tracker file names; omit files that name no step or several."""
    names = list(names)
    matched = {file: matching(names, step) for file, step in trackers.items()}
    return {file: steps[0] for file, steps in matched.items() if len(steps) == 1}


def _check_trackers(
    steps: Iterable[RunStep], trackers: dict[str, str], named: dict[str, str], can_fix: bool
) -> Iterable[Finding]:
    """Warn of tracker files that name no step or an incomplete one.

    With ``can_fix``, the warning proposes the option that writes them.
    """
    by_name = {step.name: step for step in steps}
    newest = next((step.name for step in reversed(list(steps)) if step.complete), None)
    for file, text in trackers.items():
        step = by_name.get(named.get(file, ""))
        if step is not None and step.complete:
            continue
        yield Finding.of(
            codes.TRACKER_POINTS_NOWHERE,
            "the tracker file names a missing step"
            if step is None
            else f"the tracker file names a step that is {step.verdict}",
            severity="warning",
            file=file,
            got=shown(text),
            expected="a complete step" if newest is None else f"{newest}, the newest complete step",
            help="restore the step that it names"
            if newest is None
            else "point the tracker file at the complete step",
            run=["--fix-tracker"] if newest is not None and can_fix else [],
        )


def list_newest_findings(steps: RunSteps) -> list[Finding]:
    """List the errors of the newest step, with files relative to the run, and the warnings about trackers."""
    newest = steps.newest
    prefix = f"{newest.name}/"
    findings = []
    for finding in newest.findings:
        if finding.severity != "error":
            continue
        files = [
            f if os.path.isabs(f) or is_address(f) or f == newest.name else prefix + f  # noqa: PTH117
            for f in finding.files
        ]
        if len(files) == 1:
            finding = finding.replace(file=files[0])
        findings.append(finding.replace(files=files) if len(files) > 1 else finding)
    return [*findings, *steps.findings]


def describe(steps: RunSteps) -> str:
    """Describe in one line which steps are complete."""
    complete = sum(step.complete for step in steps.steps)
    newest = steps.newest_complete
    which = "" if newest is None or newest is steps.newest else f", the newest is {newest.name}"
    return f"{complete} of {counted(len(steps.steps), 'step')} complete{which}"
