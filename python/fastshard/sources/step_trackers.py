"""Steps of a run, and the tracker files in which trainers name the last step."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError, Finding, error_for
from ..common.listing import File, Listing
from ..common.records import dataclass, field
from ..common.regex import compile_when_used
from .step_names import alike, matching, numbers_of

#: Maximum number of steps in a message.
MOST_NAMED = 8
#: Megatron-LM's tracker file, which names a step by its number.
_MEGATRON = "latest_checkpointed_iteration.txt"
#: source: DeepSpeed engine.py and checkpoint/ds_to_universal.py; Megatron-LM training/checkpointing.py
_TRACKERS = ("latest", "latest_universal", _MEGATRON)
#: Trackers of runs whose steps may contain models that any framework can read.
OF_RUNS = ("latest", _MEGATRON)
#: Suffix of an empty file with which NeMo marks a checkpoint's folder until the save is complete.
#: source: NeMo nemo/lightning/pytorch/callbacks/model_checkpoint.py (`UNFINISHED_CHECKPOINT_SUFFIX`)
_UNFINISHED = "-unfinished"
#: Copies with averaged weights share the mark of the checkpoint next to them; NeMo stores a checkpoint's
#: tensors in this folder.
_AVERAGED, _WEIGHTS = "-EMA", "weights"
#: Links to the last saved step, which trainers create. source: NeMo Automodel
#: components/checkpoint/checkpointing.py, nemo_automodel/recipes/base_recipe.py
_LINKS = ("LATEST", "latest")
#: A name that needs no shell quoting.
_PLAIN = compile_when_used(r"[\w.-]+", re.ASCII)


@dataclass
class Step:
    """A step that exists, at least in part."""

    #: The folders with its name: root directory, and path in it; empty if the step itself was passed as CKPT.
    folders: list[tuple[int, str]] = field(default_factory=list)
    #: False if it was not finished.
    usable: bool = True
    #: True if its name shows that it is still being written.
    temporary: bool = False


def tracked(listing: Listing, trackers: tuple[str, ...]) -> tuple[File, str] | None:
    """Return the tracker file nearest to the given directories, and the step that it names."""
    files = [f for f in listing.files if f.name in trackers]
    if not files:
        return None
    depth = min(f.path.count("/") for f in files)
    named = {f: listing.read_text(f, limit=4096).strip() for f in files if f.path.count("/") == depth}
    first = next(iter(named))
    other = next((f for f, text in named.items() if text != named[first]), None)
    if other is not None:
        raise FastshardError.of(
            codes.MIXED_STEPS,
            "the tracker files of the directories name different steps",
            file=str(listing.roots[other.root] / other.path),
            expected=f"{shown(named[first])}, as in {listing.roots[first.root] / first.path}",
            got=shown(named[other]),
            help="pass only the directories of one save, or choose a step that all of them hold",
            run=["--step NAME"],
        )
    return first, named[first]


def find_linked_step(listing: Listing, steps: Mapping[str, Step]) -> tuple[File, str] | None:
    """Return the link next to the steps that points to one of them, and the step's name.

    None if the link points elsewhere, because it then names no step of this run.
    """
    for step in steps.values():
        for root, folder in step.folders:
            if not folder:
                continue
            above = folder.rpartition("/")[0]
            for name in _LINKS:
                path = f"{above}/{name}" if above else name
                with contextlib.suppress(OSError):
                    # The run may lie elsewhere than where it was made: the name counts.
                    target = (listing.roots[root] / path).readlink().name
                    if any(alike(target, known) for known in steps):
                        return File(root, path, 0), target
    return None


def find_unfinished_mark(listing: Listing, root: int, folder: str) -> str | None:
    """Return the path of the file that marks a checkpoint as unfinished; None if there is none.

    Args:
        listing: contents of the root directories.
        root: number of the root directory that contains the checkpoint.
        folder: folder of the checkpoint or of its tensors, relative to the root directory.
    """
    parts = folder.split("/") if folder else []
    if parts and parts[-1] == _WEIGHTS:
        parts.pop()
    if parts:
        path = "/".join([*parts[:-1], _mark_of(parts[-1])])
        return path if listing.has(root, path) else None
    at = listing.roots[root].absolute()
    at = at.parent if not folder and at.name == _WEIGHTS else at
    # Of a root the mark lies beside it.
    mark = at.with_name(_mark_of(at.name)) if at.name else at
    with contextlib.suppress(OSError):
        if mark != at and mark.is_file():
            return str(mark)
    return None


def _mark_of(name: str) -> str:
    return f"{name.removesuffix(_AVERAGED)}{_UNFINISHED}"


def refuse_unfinished(listing: Listing, places: Iterable[tuple[int, str]]) -> list[Finding]:
    """Report a checkpoint that a file next to it marks as unfinished.

    Args:
        listing: contents of the root directories.
        places: root directory and folder of each of its parts.
    """
    marks = dict.fromkeys(
        mark for root, folder in places if (mark := find_unfinished_mark(listing, root, folder))
    )
    return [
        Finding.of(
            codes.UNCOMMITTED,
            "the checkpoint is marked as unfinished: its save or removal has begun and has not ended",
            file=mark,
            expected="no such file, because the run deletes it at the end of a save",
            help="wait until the run has saved it, or use another step; if you know that the save is "
            "complete, move that file away",
        )
        for mark in marks
    ]


def have(steps: Iterable[str]) -> str:
    """Join names of steps for a message; if there are many, only the last ones."""
    names = sorted(steps, key=lambda n: (numbers_of(n), n))
    more = f"{len(names) - MOST_NAMED} more, " if len(names) > MOST_NAMED else ""
    return more + ", ".join(names[-MOST_NAMED:])


def folders_in(path: Path) -> list[str]:
    """Return the names of the subfolders of a folder, including empty ones, which file listings omit."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return sorted(e.name for e in entries if e.is_dir())
    return []


def refuse_lone_trackers(listing: Listing) -> None:
    """Refuse a directory with a tracker file that names a checkpoint, if no adapter finds one.

    Raises:
        FastshardError: ``FS105`` for a step that is missing, ``FS104`` for one whose folder has no
            checkpoint.
    """
    for _, finding in _find_lone_trackers(listing):
        raise error_for([finding])


def warn_of_lone_trackers(listing: Listing, folder: str) -> list[Finding]:
    """Find tracker files in the folder of a checkpoint without steps.

    Args:
        listing: the files of the root directories.
        folder: the folder of the checkpoint.

    Returns:
        A warning for each one next to the model: the steps are missing, but the model does not depend on
        them.

    Raises:
        FastshardError: ``FS105`` or ``FS104`` for one above the model's folder, which belongs to the run and
            names something else.
    """
    warnings = []
    for file, finding in _find_lone_trackers(listing):
        if file.folder != folder:
            finding = finding.replace(
                help=f"copy the step that it names, or pass {shown(folder)} as CKPT to read the model there",
                run=[],
            )
            raise error_for([finding])
        warning = finding.replace(
            severity="warning",
            help="copy the step if it is the one you want; else delete the tracker file",
            run=[],
        )
        if finding.code == codes.UNCOMMITTED:
            # The step's folder is there, and nothing says that it cannot be used.
            warning = warning.replace(
                message="the tracker file names a step, but the model in the directory itself is used",
                expected=None,
                help="pass the step's directory as CKPT if it is the one you want; else move the tracker "
                "file away",
            )
        warnings.append(warning)
    return warnings


def _find_lone_trackers(listing: Listing) -> list[tuple[File, Finding]]:
    """List the tracker files in a listing without steps, each with its finding."""
    found = [tracker for name in _TRACKERS if (tracker := tracked(listing, (name,))) is not None]
    return [(file, pointing_nowhere(listing, {}, file, named)) for file, named in found]


def pointing_nowhere(listing: Listing, steps: Mapping[str, Step], file: File, named: str) -> Finding:
    """Build the finding for a tracker file that names no usable step."""
    beside = listing.roots[file.root] / file.folder
    there = any(matching([entry], named) for entry in folders_in(beside))
    there = there or bool(matching(steps, named))
    usable = have(n for n, step in steps.items() if step.usable) or "none"
    return Finding.of(
        codes.UNCOMMITTED if there else codes.TRACKER_POINTS_NOWHERE,
        "the tracker file names a step that cannot be used"
        if there
        else "the tracker file names a missing step",
        file=file.path,
        expected=f"one of {usable}",
        got=shown(named),
        help=f"copy {_folder_of(named, steps, file)} from the original checkpoint, or choose another step",
        run=["--accept older-step" if steps else "--step NAME"],
    )


def _folder_of(named: str, steps: Mapping[str, Step], tracker: File) -> str:
    """Return the folder of a step that a tracker file names only by number.

    It is derived from the folder names of other steps, if there are any.
    """
    if not named.isdecimal() or not named.isascii():
        return named if _PLAIN.fullmatch(named) else shown(named)
    like = next((name for name in steps if len(re.findall(r"\d+", name)) == 1), None)
    if like is None:
        # source: Megatron-LM megatron/training/checkpointing.py get_checkpoint_name
        return f"iter_{int(named):07d}" if tracker.name == _MEGATRON else named
    return re.sub(r"\d+", lambda number: named.zfill(len(number[0])), like)
