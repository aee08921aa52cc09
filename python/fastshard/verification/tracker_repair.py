"""Repair of tracker files, so that they name the newest complete step."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from ..common import codes, safe_files
from ..common.addresses import is_address, make_write_command
from ..common.config_text import shown
from ..common.errors import FastshardError
from ..common.records import dataclass
from ..common.regex import compile_when_used
from ..sources.step_names import alike, number
from .run_steps import RunStep, RunSteps

__all__ = ["TrackerChange", "fix_trackers"]

#: Megatron-LM's tracker file, which contains the number in the folder's name.
#: source: Megatron-LM megatron/training/checkpointing.py get_checkpoint_name, get_checkpoint_tracker_filename
_MEGATRON = "latest_checkpointed_iteration.txt"
_ITERATION = compile_when_used(r"iter_[0-9]{7,}")
_NUMBER = compile_when_used(r"[0-9]{1,18}")


@dataclass(frozen=True)
class TrackerChange:
    """A tracker file, the step that it named before, and the step that it names now.

    Examples:
        >>> change = fastshard.fix_trackers(fastshard.steps("steps"))[0]
        >>> change.before, change.after, change.changed
        ('1000', '500', True)
    """

    #: Name of the file.
    file: str
    before: str
    after: str

    @property
    def changed(self) -> bool:
        """True if the file was written."""
        return self.before != self.after


def fix_trackers(steps: RunSteps) -> list[TrackerChange]:
    """Points the tracker files of a run at the newest complete step.

    The function checks all files before it writes the first. It replaces each file atomically, so that a
    reader sees either the old or the new content.

    Args:
        steps: the steps of the run, from :func:`fastshard.steps`.

    Raises:
        FastshardError: if there is no tracker file, if no step is complete, or if a tracker file has an
            unknown form; then nothing is written. ``FS514`` for a run in a store.

    Examples:
        >>> fastshard.fix_trackers(fastshard.steps("steps"))
        [TrackerChange(file='latest_checkpointed_iteration.txt', before='1000', after='500')]
    """
    folder = Path(steps.folder)
    if not steps.trackers:
        raise FastshardError.of(
            codes.NO_SUCH_PATH,
            "the directory of the steps holds no tracker file",
            file=steps.folder,
            expected="latest or latest_checkpointed_iteration.txt",
            help="pass the step to the trainer by name; this run has no tracker file",
        )
    if is_address(steps.folder):
        raise _refuse_store(steps)
    changes = []
    for file, before in steps.trackers.items():
        path = folder / file
        if path.is_symlink():
            raise _refuse(file, "a link, and fastshard does not write through links")
        changes.append(TrackerChange(file, before, _choose_text(file, before, steps.steps)))
    for change in changes:
        if change.changed:
            content = safe_files.read_text(folder / change.file, len(change.before.encode()) + 4096)
            # What stands around the name stays: the line break that some trainers write.
            mode = stat.S_IMODE((folder / change.file).stat().st_mode)
            safe_files.replace(folder / change.file, [content.replace(change.before, change.after, 1)])
            # Others of a group may have to write it: the trainer does at its next save.
            (folder / change.file).chmod(mode)
            safe_files.sync_folder(folder)
    return changes


def _choose_text(file: str, before: str, steps: Iterable[RunStep]) -> str:
    """Return the text by which a tracker file names the newest complete step that it can name.

    Raises:
        FastshardError: ``FS514`` if the text of the tracker file has an unknown form, ``FS105`` if no step is
            complete.
    """
    complete = [step.name for step in reversed(list(steps)) if step.complete]
    if file == _MEGATRON:
        if not _NUMBER.fullmatch(before):
            raise _refuse(file, shown(before))
        fitting = [name for name in complete if _ITERATION.fullmatch(name)]
        texts = [str(number(name)) for name in fitting]
    else:
        if not before or number(before) < 0 or "/" in before or not before.isprintable():
            raise _refuse(file, shown(before))
        texts = [name for name in complete if alike(name, before)]
    if texts:
        return texts[0]
    if complete:
        raise _refuse(file, shown(before), f"a name like {complete[0]}")
    raise FastshardError.of(
        codes.TRACKER_POINTS_NOWHERE,
        "no step is complete",
        file=file,
        got=shown(before),
        help="restore the missing files of a step; `fastshard find` searches for them",
    )


def _refuse_store(steps: RunSteps) -> FastshardError:
    """Make the error for a run in a store, with a command that writes each tracker file."""
    texts = {file: _choose_text(file, before, steps.steps) for file, before in steps.trackers.items()}
    return FastshardError.of(
        codes.UNSUPPORTED,
        "fastshard does not write tracker files in stores",
        file=steps.folder,
        help="write the tracker file with the store's own tool",
        run=[make_write_command(text, f"{steps.folder}/{file}") for file, text in texts.items()],
    )


def _refuse(
    file: str, got: str, expected: str = "the name of a step, or its number for Megatron-LM"
) -> FastshardError:
    return FastshardError.of(
        codes.UNSUPPORTED,
        "the format of the tracker file is unknown",
        file=file,
        expected=expected,
        got=got,
        help="write the file by hand, as its trainer writes it",
    )
