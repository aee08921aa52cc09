"""Missing pieces of a checkpoint, and commands that copy them from the hosts that have them."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ..common import codes
from ..common.errors import Finding
from ..common.formatting import natural
from ..common.options import StrPath
from ..common.records import dataclass, field
from ..common.stored_places import is_stored, show_text
from ..sources.step_names import is_step

__all__ = ["Absent", "absent"]


@dataclass(frozen=True)
class Absent:
    """The missing pieces of a checkpoint, which may be on other hosts."""

    #: Files that are in none of the roots, by the rank that wrote them.
    files: dict[str, list[str]]
    #: Arrays of stores that lack chunks, by the process that wrote the chunks.
    chunks: dict[str, list[str]]
    #: Commands that copy the pieces from another host (``HOST``) to this one, and that merge all of them.
    commands: list[str]
    #: Descriptions of layers whose files are all missing.
    layers: list[str] = field(default_factory=list)
    #: Folders next to the checkpoint that hold missing files, with the number of files in each.
    siblings: dict[str, int] = field(default_factory=dict)

    @property
    def may_be_elsewhere(self) -> bool:
        """True for pieces that a process of the job wrote. A downloaded model is not more complete on another
        host."""
        return bool(self.chunks or self.layers or any(self.files))

    def describe(self) -> str:
        """Describe where the pieces may be, and how to get them."""
        if self.siblings:
            missing = len({file for files in self.files.values() for file in files})
            held = [
                f"{folder} holds {count:,} of the {missing:,} missing files"
                for folder, count in self.siblings.items()
            ]
            return "\n".join([*held, "name all directories of one checkpoint:", f"  {self.commands[0]}"])
        *here, there = self.commands
        if not here:
            return f"if another directory (FOLDER) holds the missing files, name it too:\n  {there}"
        return "\n".join(
            [
                "if other hosts hold the missing files, copy them from each (HOST):",
                *(f"  {command}" for command in here),
                "or, if all N hosts share OUT, run this on each (I = 0 to N-1):",
                f"  {there}",
            ]
        )


def _layers(finding: Finding) -> str:
    """Describe the layers that a finding reports as missing."""
    if not finding.layers:
        return finding.tensor or "layers not stated"
    first, last = finding.layers[0], finding.layers[-1]
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def absent(findings: Iterable[Finding], roots: Sequence[StrPath]) -> Absent | None:
    """Return the pieces that findings report as missing, and the commands that copy them; None if there are
    none.

    These are findings with the codes ``FS101``, ``FS103`` and ``FS111``.
    """
    files: dict[str, list[str]] = {}
    chunks: dict[str, list[str]] = {}
    layers: list[str] = []
    for finding in findings:
        if finding.severity != "error":
            continue
        if finding.code == codes.MISSING_CHUNKS:
            of_arrays = (
                [finding.tensor] if finding.tensor else finding.effect.tensors if finding.effect else ()
            )
            if of_arrays:
                chunks.setdefault(finding.rank or "", []).extend(of_arrays)
        elif finding.code == codes.MISSING_LAYER:
            layers += [_layers(part) for part in finding.parts or (finding,)]
        # Links that lead nowhere are there, and to be mended here.
        elif finding.code == codes.MISSING_FILE:
            names = [
                file
                for file in finding.files
                if not any(os.path.lexists(Path(root) / file) for root in roots)
            ]
            if names:
                files.setdefault(finding.rank or "", []).extend(names)
    if not files and not chunks and not layers:
        return None
    siblings = _find_siblings(
        {name for names in files.values() for name in names}, [Path(root) for root in roots]
    )
    if siblings:
        words = ["fastshard", "verify", *(os.fspath(root) for root in roots), *siblings]
        return Absent(files, chunks, [shlex.join(words)], layers, siblings)
    path = Path(roots[0]).absolute()
    path = path if path.is_dir() else path.parent
    folder = shlex.quote(str(path))
    if is_stored(path):
        # No command of this host copies to a store's placeholders.
        named = shlex.join(show_text(os.fspath(Path(root).absolute())) for root in roots)
        return Absent(files, chunks, [f"fastshard merge {named} FOLDER OUT"], layers)
    spread = f"fastshard merge {folder} OUT --node-local --rank I --world N"
    if files or layers:
        # What is here already stays as it is.
        commands = [f"rsync -a --ignore-existing HOST:{folder}/ {folder}/", spread]
        return Absent(files, chunks, commands, layers)
    # Files of two processes may have one name, and each directory says which of them it is of.
    other = shlex.quote(f"{path}-of-HOST")
    bring = [f"rsync -a HOST:{folder}/ {other}/", f"fastshard merge {folder} {other} OUT"]
    return Absent(files, chunks, [*bring, spread])


#: Maximum numbers of neighbouring folders to search, and of missing files to search for.
_MOST_SIBLINGS, _MOST_FILES = 100, 256


def _find_siblings(files: Collection[str], roots: Sequence[Path]) -> dict[str, int]:
    """Find folders next to the roots that hold missing files, by name, with the number of files in each.

    A folder that also has all files next to the missing ones is not a part of this checkpoint: it is a copy
    of it, or another checkpoint.
    """
    found: dict[str, int] = {}
    wanted = sorted(files)[:_MOST_FILES]
    known = {os.path.realpath(root) for root in roots}
    for root in roots if wanted else ():
        parent = root.absolute().parent
        try:
            with os.scandir(parent) as entries:
                names = [entry.name for entry in itertools.islice(entries, _MOST_SIBLINGS) if entry.is_dir()]
            for name in sorted(names, key=natural):
                sibling = parent / name
                count = sum(os.path.lexists(sibling / file) for file in wanted)
                is_other_step = is_step(name) and is_step(root.absolute().name)
                if not count or is_other_step or os.path.realpath(sibling) in known:
                    continue
                if not _holds_all(sibling, root, wanted):
                    found[os.fspath(sibling) if root.is_absolute() else os.path.relpath(sibling)] = count
        except OSError:
            # A hint is not worth an error.
            continue
    return found


def _holds_all(sibling: Path, root: Path, files: Sequence[str]) -> bool:
    """Return True if a folder has, by name, every file that is next to the missing files in the root."""
    for file in files:
        folder = next((path for path in Path(file).parents if (root / path).is_dir()), None)
        if folder is None:
            return True
        with os.scandir(root / folder) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_FILES)]
        if not all(os.path.lexists(sibling / folder / name) for name in names):
            return False
    return True
