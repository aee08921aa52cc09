"""Steps that were verified before: a manifest of each, and the states of its files at that time."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.manifests import is_manifest
from ..common import codes, json_text, safe_files
from ..common.addresses import check_local
from ..common.errors import FastshardError
from ..common.options import StrPath
from ..common.stored_places import is_stored, show_text
from .inventory import manifest

if TYPE_CHECKING:
    from ..common.options import OpenOptions

__all__ = ["FileStates", "VerifiedSteps", "read_file_states"]

#: Size, mtime and ctime (in nanoseconds) of the files below a folder. The mtime can be set back; the ctime
#: cannot. A file of a store has no ctime; its mtime has digits of the identity that the store gives it.
FileStates = dict[str, tuple[int, int, int]]

_FORMAT = "fastshard.step-files"


def read_file_states(folder: Path) -> FileStates:
    """Read sizes and times of the regular files below a folder, without following links to folders."""
    states: FileStates = {}
    is_in_store = is_stored(folder)
    for top, subfolders, names in os.walk(folder):
        subfolders.sort()
        for name in sorted(names):
            path = Path(top, name)
            try:
                status = path.stat()
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                key = path.relative_to(folder).as_posix()
                changed = 0 if is_in_store else status.st_ctime_ns
                states[key] = (status.st_size, status.st_mtime_ns, changed)
    return states


class VerifiedSteps:
    """A folder with two files for each verified step: its manifest, and the states of its files."""

    def __init__(self, folder: StrPath, run: Path) -> None:
        """Make the folder if it is missing.

        Raises:
            FastshardError: ``FS515`` for a folder within the run, which is never written to; ``FS514`` for
                the address of a store.
        """
        check_local(folder)
        self._folder = Path(folder)
        if not os.fspath(folder) or Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(run)):
            raise FastshardError.of(
                codes.USAGE,
                "the --state directory is inside the run",
                file=os.fspath(folder),
                help="choose a directory elsewhere with --state DIR",
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FastshardError(
                [safe_files.system_finding(error, os.fspath(folder), "cannot make the directory")]
            ) from None

    def find_manifest(self, step: Path) -> Path | None:
        """Return the manifest of a previously verified step; None for another step.

        Raises:
            FastshardError: ``FS515`` if it belongs to a step with the same name in another run, or is
                damaged, which does not mean that the step is.
        """
        path = self._manifest(step)
        if safe_files.is_file(path) and path.stat().st_size and not is_manifest(path):
            raise _damaged(path, "no manifest")
        return path if safe_files.is_file(path) and self._read(step) is not None else None

    def is_unchanged(self, step: Path, states: FileStates) -> bool:
        """Return True if a step was verified, and the sizes and times of its files have not changed since.

        Raises:
            FastshardError: as :meth:`find_manifest`.
        """
        document = self._read(step)
        files = {name: list(state) for name, state in states.items()}
        return document is not None and document.get("files") == files

    def keep(self, step: Path, states: FileStates, memory: str | int | None, opening: OpenOptions) -> None:
        """Store the manifest of a verified step; ``states`` are its file states before it was read.

        Nothing is stored for a step that changed meanwhile.

        Raises:
            FastshardError: as :func:`fastshard.manifest`.
        """
        if self.find_manifest(step) is None:
            options: dict[str, Any] = {name: value for name, value in opening.items() if name != "like"}
            manifest(step, self._manifest(step), memory=memory, **options)
        if read_file_states(step) == states:
            document = {"format": _FORMAT, "version": 1, "step": _identify(step), "files": states}
            safe_files.replace(self._states(step), json_text.indented_pieces(document))

    def _read(self, step: Path) -> dict[str, Any] | None:
        path = self._states(step)
        if not safe_files.is_file(path):
            return None
        try:
            document = safe_files.read_object(path, safe_files.MAX_INDEX)
        except FastshardError as error:
            raise _damaged(path, error.findings[0].message) from None
        if document.get("format") != _FORMAT or document.get("step") != _identify(step):
            raise FastshardError.of(
                codes.USAGE,
                "the state is from another run",
                file=os.fspath(path),
                expected=_identify(step),
                got=str(document.get("step")),
                help="choose another directory for this run with --state DIR",
            )
        return document

    def _manifest(self, step: Path) -> Path:
        return self._folder / f"{step.name}.manifest.json"

    def _states(self, step: Path) -> Path:
        return self._folder / f"{step.name}.files.json"


def _identify(step: Path) -> str:
    """Return the address of a step in a store, or the real path of another one."""
    return show_text(os.fspath(step)) if is_stored(step) else os.path.realpath(step)


def _damaged(path: Path, why: str) -> FastshardError:
    return FastshardError.of(
        codes.USAGE,
        f"the saved state of a step is damaged: {why}",
        file=os.fspath(path),
        help="move this file away; the step is then read again",
    )
