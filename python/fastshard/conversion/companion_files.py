"""Files that accompany a result: config, tokenizer, code, documents."""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import partial
from pathlib import Path

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.manifests import MANIFEST_NAME
from ..checkpoint.plan import Plan
from ..common import codes, json_text, safe_files
from ..common.errors import Finding
from ..common.listing import Folder
from ..models import sidecar_files
from ..models.tokenizer import Tokenizer

__all__ = ["CopiedFile", "along", "find_damaged", "find_left_out", "from_above", "hash_copies"]

#: A file that is copied to a result: its name there, its path, and the BLAKE3 of its bytes when it was
#: chosen.
CopiedFile = tuple[str, str, str | None]


def along(plan: Plan, tokenizer: Tokenizer | None, *, given: bool) -> list[tuple[str, str]]:
    """List the files to copy along with the result: (name, path).

    Raises:
        FastshardError: ``FS601`` if one of them is not a regular file.
    """
    source, merged = plan.source, plan.target == "merge"
    if merged and not source.model.hf_names:
        return (
            sorted((name, str(path)) for name, path in tokenizer.files.items()) if tokenizer and given else []
        )
    config = source.model.config_file or sidecar_files.first(source.files.folders, "config.json")
    # Code of its own is for those who load the model under its own names.
    own = source.model.hf_names and (merged or plan.target == "hf")
    found: dict[str, Path] = sidecar_files.beside(source.files.folders, config if own else None)
    found |= tokenizer.files if tokenizer else {}
    if config is not None and source.model.hf_names and (merged or plan.keeps_names):
        found["config.json"] = config
    if source.model.hf_names and (merged or plan.target == "hf" or plan.keeps_names):
        found |= source.files.quantiser_files
    return sorted((name, str(path)) for name, path in found.items() if name not in plan.summary["texts"])


def find_damaged(copies: Iterable[tuple[str, str]]) -> list[Finding]:
    """Warn (``FS211``) of each file to copy whose name ends with ``.json`` and that holds no JSON.

    Loaders of the result fail at such a file; its tensors are right all the same. A file larger than 64 MiB
    is not read.
    """
    findings = []
    for name, path in copies:
        if not name.endswith(".json") or Path(path).stat().st_size > safe_files.MAX_TEXT:
            continue
        try:
            # Nothing of it is kept: a vocabulary has very many entries.
            json_text.load(safe_files.read_text(path, safe_files.MAX_TEXT), lambda pairs: None)
        except ValueError as error:
            findings.append(
                Finding.of(
                    codes.BAD_VALUE,
                    "the file is no valid JSON: it is truncated or damaged",
                    severity="warning",
                    file=name,
                    expected="JSON",
                    got=str(error),
                    help="copy the file again from the original checkpoint",
                )
            )
    return findings


def hash_copies(copies: Iterable[tuple[str, str]], folders: Iterable[Folder]) -> list[CopiedFile]:
    """Hash the files to copy, with the rule for links that applied when they were chosen.

    The copies are checked against these hashes.

    Args:
        copies: files by name.
        folders: folders that were searched for them. The user chose any file outside of them, so its links
            may lead anywhere.

    Raises:
        FastshardError: ``FS506`` if a file has changed since it was read, ``FS603`` for a link that now
            leaves its folder; other codes if a file cannot be opened.
    """
    nearest = sorted(folders, key=lambda folder: len(folder.path.parts), reverse=True)
    hashed: list[CopiedFile] = []
    for name, path in copies:
        folder = next((folder for folder in nearest if folder.has(path)), None)
        check = None if folder is None else partial(folder.check_opened, path)
        hashed.append((name, path, safe_files.digest(path, check)))
    return hashed


def find_left_out(checkpoint: Checkpoint, copies: Iterable[tuple[str, str]]) -> list[str]:
    """List files in the checkpoint's folders that the result does not use, relative to their root.

    Args:
        checkpoint: the source.
        copies: files that are copied, by name.
    """
    opened, listing = checkpoint.opened, checkpoint.listing
    if listing.single:
        return []
    read_files = {(file.root, file.path) for file in opened.behind}
    folders = {path.rpartition("/")[0] for _, path in read_files}
    used = {Path(path) for _, path in copies}
    config = opened.source.model.config_file
    used |= set() if config is None else {config}
    return sorted(
        {
            file.path
            for file in listing.files
            if (file.root, file.path) not in read_files
            and listing.roots[file.root] / file.path not in used
            and not file.name.startswith(".")
            and not file.name.endswith((".index.json", MANIFEST_NAME))
            and any(not folder or f"{file.path}/".startswith(f"{folder}/") for folder in folders)
        }
    )


def from_above(plan: Plan, copies: Iterable[tuple[str, str]], given: Container[str]) -> dict[str, str]:
    """Return files of the result from a folder above the checkpoint that the caller did not pass.

    This includes a config.json that is computed from one in such a folder.
    """
    paths = {name: Path(path) for name, path in copies if name not in given}
    config_file = plan.source.model.config_file
    if config_file is not None and "config.json" in plan.texts:
        paths["config.json"] = config_file
    return sidecar_files.from_above(plan.source.files.folders, paths)
