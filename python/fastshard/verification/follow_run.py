"""Following a run: each new step is checked when it is saved, and compared with the previous step."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint.manifests import run_options
from ..checkpoint.open_checkpoint import as_checkpoint
from ..checkpoint.planning import make_plan
from ..checkpoint.tensor_rows import rows_of
from ..common import codes
from ..common.addresses import check_local
from ..common.errors import FastshardError, Finding, from_core
from ..common.formatting import counted, printable, some
from ..common.options import OpenOptions, StrPath
from ..common.records import dataclass, field
from ..sources.step_names import plain
from .run_steps import (
    RunStep,
    find_step_names,
    find_steps_folder,
    is_other_folder,
    judge_step,
    match_trackers,
    read_trackers,
)
from .run_steps import steps as list_steps
from .verified_steps import FileStates, read_file_states

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FollowedStep", "RunFollower", "run_command"]

#: Seconds for which files must not change before a step counts as saved.
REST = 60.0
#: Factor by which the norm of a tensor may change between two steps without a note.
_MOST_FACTOR = 10.0
#: Maximum number of tensors in messages.
_MOST_NAMED = 3


@dataclass(frozen=True)
class FollowedStep:
    """A new step of a run, its verdict, and its differences from the previous complete step."""

    step: RunStep
    #: Name of the step with which it was compared; None if there is none.
    previous: str | None = None
    #: Errors from the comparison with that step: tensors that are missing or have another shape or dtype.
    findings: tuple[Finding, ...] = ()
    #: Descriptions of other differences.
    notes: tuple[str, ...] = ()

    @property
    def finding(self) -> Finding | None:
        """The first error; None for a step without errors."""
        return self.step.finding or next(iter(self.findings), None)

    def describe(self) -> str:
        """Describe the step in one line."""
        finding = self.finding
        notes = [f"{finding.code}: {finding.headline}"] if finding else []
        notes += self.notes
        if self.previous is not None:
            is_same = not self.notes and not self.findings
            notes.append(f"{'the same tensors as' if is_same else 'compared with'} {self.previous}")
        return "; ".join([f"{self.step.name}: {self.step.verdict}", *notes])

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, a line of ``fastshard steps --follow --json``."""
        return {
            **self.step.to_dict(),
            "previous": self.previous,
            "differences": [finding.to_dict() for finding in self.findings],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a step; with ``verify`` also its hash, norm, and number of values that are not finite."""

    dtype: str
    shape: tuple[int, ...]
    hash: str | None = None
    norm: float | None = None
    non_finite: int = 0


@dataclass
class _Pending:
    """A step that may still be changing: its files, and the time since which they are unchanged."""

    states: FileStates
    since: float


#: Inode and times of a folder.
_Mark = tuple[int, int, int]


@dataclass
class _Known:
    """Steps that were checked: their files, and the tensors of the last complete one."""

    complete: dict[str, FileStates] = field(default_factory=dict)
    #: Marks of the folders of complete steps; their files are listed again only if a mark has changed.
    marks: dict[str, _Mark] = field(default_factory=dict)
    failed: dict[str, FileStates] = field(default_factory=dict)
    tensors: dict[str, dict[str, _Tensor]] = field(default_factory=dict)


class RunFollower:
    """Follows a run in rounds: :meth:`follow_once` checks new steps whose save is complete.

    A save is complete when a tracker file names the step, or when its files did not change for ``rest``
    seconds. Steps that are complete when following begins are not checked; later steps are compared with
    them.
    """

    def __init__(
        self,
        run: StrPath,
        *,
        rest: float = REST,
        verify: bool = False,
        state: StrPath | None = None,
        clock: Callable[[], float] = time.monotonic,
        memory: str | int | None = None,
        **opening: Unpack[OpenOptions],
    ) -> None:
        """Read the steps that exist.

        Raises:
            FastshardError: if there is no such folder; ``FS514`` for the address of a store.
        """
        check_local(run)
        self._run, self._rest, self._clock, self._opening = Path(run), rest, clock, opening
        self._verify, self._state, self._memory = verify, state, memory
        self._pending: dict[str, _Pending] = {}
        self._known = _Known()
        if self._find_folder() is not None:
            steps = list_steps(run, memory=memory, **opening)
            for step in steps.steps:
                if step.complete:
                    self._known.marks[step.name] = _mark(Path(step.path))
                    self._known.complete[step.name] = read_file_states(Path(step.path))

    def follow_once(self) -> list[FollowedStep]:
        """Check the steps whose save was completed since the last round, oldest first.

        A step is checked again if its files change and then stop changing, because it was saved again. A
        change of a complete step is detected by its folder: a file or a folder in it was added, removed or
        replaced.
        """
        folder = self._find_folder()
        if folder is None:
            return []
        trackers = read_trackers(folder)
        names = find_step_names(folder, trackers)
        named = set(match_trackers(names, trackers).values())
        followed = []
        for name in names:
            if not self._is_complete(folder / name) and self._is_saved(folder / name, name in named):
                one = self._judge(folder, name, names)
                followed += [] if one is None else [one]
        return followed

    def _find_folder(self) -> Path | None:
        """Return the folder with the steps; None while there are no steps.

        Raises:
            FastshardError: as :func:`find_steps_folder`, for all other reasons.
        """
        try:
            return find_steps_folder(self._run)
        except FastshardError as error:
            if error.code == codes.NO_SUCH_PATH and self._run.is_dir():
                return None
            raise

    def _is_complete(self, path: Path) -> bool:
        """Return True for a step that was complete when it was checked and has not changed since."""
        known, name = self._known, path.name
        if name not in known.complete:
            return False
        mark = _mark(path)
        if mark == known.marks[name]:
            return True
        if read_file_states(path) == known.complete[name]:
            known.marks[name] = mark
            return True
        del known.complete[name], known.marks[name]
        known.tensors.pop(name, None)
        return False

    def _is_saved(self, path: Path, is_named: bool) -> bool:
        """Return True if the files of a step are not expected to change any more."""
        states = read_file_states(path)
        if not states or plain(path.name) != path.name or self._known.failed.get(path.name) == states:
            return False
        pending = self._pending.get(path.name)
        if pending is None or pending.states != states:
            pending = self._pending[path.name] = _Pending(states, self._clock())
        return is_named or self._clock() - pending.since >= self._rest

    def _judge(self, folder: Path, name: str, names: list[str]) -> FollowedStep | None:
        """Check a step; return None if its files change during reading, so that a later round checks it."""
        states, mark = self._pending[name].states, _mark(folder / name)
        step = judge_step(
            folder / name, verify=self._verify, state=self._state, memory=self._memory, **self._opening
        )
        before = next((n for n in reversed(names[: names.index(name)]) if n in self._known.complete), None)
        followed = FollowedStep(step)
        if step.complete and before is not None:
            try:
                followed = self._compare(folder, step, before)
            except FastshardError as error:
                # The step before may be deleted at any time.
                why = error.findings[0].headline
                followed = FollowedStep(step, notes=(f"not compared with {before}: {why}",))
        if read_file_states(folder / name) != states:
            return None
        del self._pending[name]
        if is_other_folder(step):
            self._known.failed[name] = states
            return None
        if followed.finding is None:
            self._known.complete[name], self._known.marks[name] = states, mark
            self._known.failed.pop(name, None)
        else:
            self._known.failed[name] = states
        return followed

    def _compare(self, folder: Path, step: RunStep, before: str) -> FollowedStep:
        earlier = self._known.tensors.get(before) or self._read_tensors(folder / before)
        tensors = self._read_tensors(folder / step.name)
        # The next step is compared with this one.
        self._known.tensors = {step.name: tensors}
        return FollowedStep(
            step,
            before,
            tuple(_find_errors(tensors, earlier, before)),
            tuple(_describe_differences(tensors, earlier)),
        )

    def _read_tensors(self, path: Path) -> dict[str, _Tensor]:
        """Read names, dtypes and shapes, and with ``verify`` also all values, each once.

        Raises:
            FastshardError: if the step cannot be read.
        """
        checkpoint = as_checkpoint(path, **self._opening)
        plan = make_plan(checkpoint.opened)
        tensors = {row.name: _Tensor(row.dtype, row.shape) for row in rows_of(plan)}
        if not self._verify:
            return tensors
        run = run_options(self._memory, self._opening.get("threads"), checkpoint.opened.catalog)
        try:
            _, hashes, stats = plan.core.check({**run, "stats": "full"}, None)
        except _core.CoreError as error:
            raise from_core(error) from None
        return {
            name: _with_values(tensor, hashes.get(name), stats[name]) if name in stats else tensor
            for name, tensor in tensors.items()
        }


def _mark(folder: Path) -> _Mark:
    """Return the inode and the times of a folder; zeros if it is gone."""
    try:
        status = folder.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _with_values(tensor: _Tensor, hash: str | None, stats: dict[str, Any]) -> _Tensor:
    mean, std = stats["mean"], stats["std"]
    finite = stats["count"] - stats["nan"] - stats["inf"]
    norm = None if mean is None or std is None else math.sqrt((mean * mean + std * std) * finite)
    return _Tensor(tensor.dtype, tensor.shape, hash, norm, stats["nan"] + stats["inf"])


def _find_errors(tensors: dict[str, _Tensor], earlier: dict[str, _Tensor], before: str) -> Iterator[Finding]:
    """Compare names, shapes and dtypes with the previous step."""
    help = "check what changed in the run; compare the steps with `fastshard diff`"
    missing = [name for name in earlier if name not in tensors]
    if missing:
        yield Finding.of(
            codes.MISSING_TENSOR,
            f"{counted(len(missing), 'tensor')} of step {before} are missing"
            if len(missing) > 1
            else f"the tensor is in step {before}, but missing here",
            tensor=missing[0],
            count=len(missing),
            help=help,
        )
    for name, tensor in tensors.items():
        other = earlier.get(name, tensor)
        if tensor.shape != other.shape:
            expected, got = str(list(other.shape)), str(list(tensor.shape))
            yield Finding.of(
                codes.SHAPE,
                f"the shape differs from that in step {before}",
                tensor=name,
                expected=expected,
                got=got,
                help=help,
            )
        elif tensor.dtype != other.dtype:
            yield Finding.of(
                codes.DTYPE,
                f"the dtype differs from that in step {before}",
                tensor=name,
                expected=other.dtype,
                got=tensor.dtype,
                help=help,
            )


def _describe_differences(tensors: dict[str, _Tensor], earlier: dict[str, _Tensor]) -> Iterator[str]:
    """Describe new tensors, and tensors whose values are not finite, did not change, or changed too much."""
    new = [name for name in tensors if name not in earlier]
    if new:
        yield f"new: {some(new, _MOST_NAMED)}"
    both = [(name, tensors[name], earlier[name]) for name in tensors if name in earlier]
    non_finite = [name for name, tensor, _ in both if tensor.non_finite]
    if non_finite:
        yield f"NaN or infinite values in {some(non_finite, _MOST_NAMED)}"
    equal = [name for name, tensor, other in both if tensor.hash is not None and tensor.hash == other.hash]
    if equal:
        yield f"unchanged: {len(equal)} of {counted(len(both), 'tensor')} ({some(equal, _MOST_NAMED)})"
    for name, tensor, other in both:
        if tensor.norm and other.norm and not 1 / _MOST_FACTOR <= tensor.norm / other.norm <= _MOST_FACTOR:
            yield f"norm of {name}: {other.norm:.3g} before, {tensor.norm:.3g} now"


def run_command(command: str, followed: FollowedStep) -> int:
    """Run a shell command for a step with errors, and return its exit code.

    Environment variables state the step and its first error. The command's output goes to stderr.
    """
    finding = followed.finding
    assert finding is not None, "only steps with errors have an error to report"
    values = {
        "FASTSHARD_STEP": followed.step.name,
        "FASTSHARD_CODE": finding.code,
        "FASTSHARD_MESSAGE": finding.headline,
        "FASTSHARD_FILE": finding.file or "",
    }
    environment = os.environ | {name: printable(value) for name, value in values.items()}
    done = subprocess.run(
        command, shell=True, env=environment, stdin=subprocess.DEVNULL, stdout=2, check=False
    )
    return done.returncode
