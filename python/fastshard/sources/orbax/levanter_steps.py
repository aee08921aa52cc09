"""Levanter's steps: the folder with a train state, in which each module may be a separate folder.

Several hosts write the same files as one host. All processes open one store at the step's address, and each
writes the first replicas on its devices. Process 0 writes the metadata after all processes have passed a
barrier. Processes do not have separate stores.

source: Levanter checkpoint.py (save_checkpoint, _save_metadata: ``if jax.process_index() == 0``),
    tensorstore_serialization.py (tree_serialize_leaves_tensorstore; _create_ocdbt_spec: ``"kvstore":
    {"driver": "ocdbt", "base": build_kvstore_spec(checkpoint_root)}``, for any process); jax
    array_serialization/serialization.py (AsyncManager._thread_func: ``wait_at_barrier``),
    tensorstore_impl.py (async_serialize: ``replica_id == 0``)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...common import codes, json_text, safe_files
from ...common.config_text import shown
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.regex import compile_when_used

#: Written after all arrays; Levanter does not accept a folder without it as a checkpoint.
METADATA = "metadata.json"
_MAX = 1 << 20
#: Number of folders above a given one in which its step is searched.
_DEPTH = 3
_KEYS = frozenset({"step", "timestamp", "is_temporary"})
#: The file of a store that leads to all other files, and the folder of these files.
_MANIFEST, _DATA = "manifest.ocdbt", "d"
#: Levanter's name for a step. source: Levanter checkpoint.py (Checkpointer.on_step)
_STEP = compile_when_used(r"^step-(\d{1,18})$")
#: The key of the model in a train state.
_MODEL = "model"
#: Paths below a step's folder, in models that use Llama's modules; and paths below the model's folder alone.
_LAYERS = compile_when_used(r"^(?:(.*?)/)?model/transformer/layers/(?:stacked|blocks)/")
_LAYERS_ALONE = compile_when_used(r"^transformer/layers/(?:stacked|blocks)/")


class Steps:
    """The folders of Levanter's steps in a listing."""

    def __init__(self, listing: Listing) -> None:
        #: Root directory and folder of the steps that were saved completely.
        self._ended = {
            (file.root, file.folder)
            for file in listing.files
            if file.name == METADATA and read_metadata(listing.roots[file.root] / file.path) is not None
        }
        #: Root directories that are the model's folder in a step.
        self._models = {
            number
            for number, root in enumerate(listing.roots)
            if root.resolve().name == _MODEL and read_metadata(root.resolve().parent / METADATA) is not None
        }
        #: Root directories that are the model's folder without its step: a copy, or an address.
        self._copied = {file.root for file in listing.files if _LAYERS_ALONE.match(file.path)} - self._models
        #: Root directory and folder of unfinished saves, as far as the names of a model show them.
        self._begun = {
            (file.root, match[1] or "")
            for file in listing.files
            if file.root not in self._models and (match := _LAYERS.match(file.path))
        } - self._ended

    def holder(self, file: File) -> str | None:
        """Return the folder of the step that contains an array, given the array's metadata file; None outside
        of steps.
        """
        if file.root in self._models or file.root in self._copied:
            return ""
        folder = file.folder
        while folder:
            folder = folder.rpartition("/")[0]
            if (file.root, folder) in self._ended or (file.root, folder) in self._begun:
                return folder
        return None

    def is_step(self, root: int, folder: str) -> bool:
        """Return True for the folder of a step that was saved completely."""
        return (root, folder) in self._ended

    def is_unfinished(self, root: int, folder: str, is_levanter: bool) -> bool:
        """Return True for the folder of a step without the metadata, which is written last.

        The files of a store do not show which framework wrote it; other steps in the same folder do.
        """
        if (root, folder) in self._ended or root in self._models:
            return False
        above = folder.rpartition("/")[0]
        beside = bool(folder) and any(
            at == root and name and name.rpartition("/")[0] == above for at, name in self._ended
        )
        return is_levanter or beside


def read_metadata(path: Path) -> dict[str, Any] | None:
    """Return the contents of a step's ``metadata.json``; None if it is unreadable or not Levanter's."""
    try:
        content = json_text.object_in(safe_files.read_text(path, _MAX, label=METADATA)) or {}
    except (FastshardError, OSError):
        return None
    return content if content.keys() >= _KEYS else None


def refuse_part(listing: Listing) -> None:
    """Raise an error if a part of a step other than the model is passed alone."""
    for root in listing.roots:
        path = root.resolve()
        for above in path.parents[:_DEPTH]:
            part = path.relative_to(above).as_posix()
            if part != _MODEL and read_metadata(above / METADATA) is not None:
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    f"{part} is a part of a Levanter step, but not its model",
                    file=str(root),
                    expected="the directory of the step",
                    got=part,
                    help=f"pass the step's directory as CKPT: {above}",
                )


def refuse_without_manifest(listing: Listing) -> None:
    """Raise an error for a step whose store lacks the file that leads to its data."""
    data = {(file.root, file.folder.rpartition("/")[0]) for file in listing.files if _is_data(file)}
    for root, folder in sorted(data):
        path = listing.roots[root] / folder
        if read_metadata(path / METADATA) is not None and not (path / _MANIFEST).exists():
            raise FastshardError.of(
                codes.MISSING_FILE,
                f"{_MANIFEST} is missing: without it, the data of this Levanter step cannot be found",
                file=f"{folder}/{_MANIFEST}".lstrip("/"),
                help="copy the file from the node that saved the step, or choose another step with --step",
            )


def _is_data(file: File) -> bool:
    return file.folder.rpartition("/")[2] == _DATA


def find_in_metadata(path: Path, where: str) -> list[Finding]:
    """Report a step that the run will delete, and metadata of another step."""
    about = read_metadata(path / METADATA) or {}
    findings = []
    if about.get("is_temporary"):
        finding = Finding.of(
            codes.NOT_PROVABLE,
            "is_temporary is set: the run deletes this step after it has saved another one",
            severity="note",
            file=where,
            help="copy the step first if the run continues",
        )
        findings.append(finding)
    named = _STEP.match(path.name)
    if about and named and about["step"] != int(named[1]):
        finding = Finding.of(
            codes.MIXED_STEPS,
            f"{METADATA} and the directory's name state different steps: the directory was renamed, or the "
            "file is from another save and this one may be unfinished",
            severity="warning",
            file=where,
            expected=f"step {int(named[1])}",
            got=shown(about["step"]),
            help="compare it with the step on the node that saved it",
        )
        findings.append(finding)
    return findings


def find_folders_beside_store(arrays: Sequence[File], where: str) -> list[Finding]:
    """Report folders of arrays next to a store, which Levanter does not read.

    source: Levanter tensorstore_serialization.py (is_ocdbt_checkpoint)
    """
    if not arrays:
        return []
    return [
        Finding.of(
            codes.UNEXPECTED_FILE,
            "directories of arrays are next to the store; fastshard reads the store, as Levanter does",
            file=where,
            got=f"{len(arrays)} arrays, including {arrays[0].folder}",
            help="move them away: they are from another save",
        )
    ]
