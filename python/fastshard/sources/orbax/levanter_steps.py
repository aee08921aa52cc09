"""Steps of Levanter: the folder that holds a train state, in which each module may be a folder of its own.

source: Levanter checkpoint.py (save_checkpoint, _save_metadata), tensorstore_serialization.py
    (tree_serialize_leaves_tensorstore, _create_ocdbt_spec)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...common import codes, json_text, safe_files
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.regex import compile_when_used

#: Written when all arrays are: a folder without it is no checkpoint for Levanter.
METADATA = "metadata.json"
_MAX = 1 << 20
#: Folders above a given one in which its step is sought.
_DEPTH = 3
_KEYS = frozenset({"step", "timestamp", "is_temporary"})
#: What a train state holds the model as.
_MODEL = "model"
#: Below a step's folder, in the models that share Llama's modules.
_LAYERS = compile_when_used(r"^(?:(.*?)/)?model/transformer/layers/(?:stacked|blocks)/")


class Steps:
    """The folders of Levanter's steps in a listing."""

    def __init__(self, listing: Listing) -> None:
        #: Root and folder of the steps that were saved to the end.
        self._ended = {
            (file.root, file.folder)
            for file in listing.files
            if file.name == METADATA and read_metadata(listing.roots[file.root] / file.path) is not None
        }
        #: Roots that are the model's folder of a step.
        self._models = {
            number
            for number, root in enumerate(listing.roots)
            if root.resolve().name == _MODEL and read_metadata(root.resolve().parent / METADATA) is not None
        }
        #: Those of saves that did not end, as far as the names of a model show them.
        self._begun = {
            (file.root, match[1] or "")
            for file in listing.files
            if file.root not in self._models and (match := _LAYERS.match(file.path))
        } - self._ended

    def holder(self, file: File) -> str | None:
        """Return the folder of the step that has an array, by its metadata file; None outside of steps."""
        if file.root in self._models:
            return ""
        folder = file.folder
        while folder:
            folder = folder.rpartition("/")[0]
            if (file.root, folder) in self._ended or (file.root, folder) in self._begun:
                return folder
        return None

    def is_step(self, root: int, folder: str) -> bool:
        """Return True for the folder of a step that was saved to the end."""
        return (root, folder) in self._ended

    def is_unfinished(self, root: int, folder: str, is_levanter: bool) -> bool:
        """Return True for the folder of a step that lacks the metadata, which is written last.

        A store in it does not show by its files whose it is; the steps beside it do.
        """
        if (root, folder) in self._ended or root in self._models:
            return False
        above = folder.rpartition("/")[0]
        beside = bool(folder) and any(
            at == root and name and name.rpartition("/")[0] == above for at, name in self._ended
        )
        return is_levanter or beside


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Return the contents of a step's ``metadata.json``; None if it is not Levanter's, or not to be read."""
    try:
        content = json_text.object_in(safe_files.read_text(path, _MAX, label=METADATA)) or {}
    except (FastshardError, OSError):
        return None
    return content if content.keys() >= _KEYS else None


def refuse_part(listing: Listing) -> None:
    """Raise an error if a part of a step other than the model is given by itself."""
    for root in listing.roots:
        path = root.resolve()
        for above in path.parents[:_DEPTH]:
            part = path.relative_to(above).as_posix()
            if part != _MODEL and read_metadata(above / METADATA) is not None:
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    f"{part} is a part of a step of Levanter, and not its model",
                    file=str(root),
                    expected="the folder of the step",
                    got=part,
                    help=f"pass the step's folder as CKPT: {above}",
                )


def find_temporary(path: Path, where: str) -> list[Finding]:
    """Report a step that the run deletes once it has saved the next one."""
    if not (read_metadata(path / METADATA) or {}).get("is_temporary"):
        return []
    return [
        Finding.of(
            codes.NOT_PROVABLE,
            "is_temporary: the run deletes this step once it has saved another one",
            severity="note",
            file=where,
            help="copy it first if the run goes on",
        )
    ]
