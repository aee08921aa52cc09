"""The files of a folder against the manifest of what was published there."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..common import codes
from ..common.errors import Finding, from_core
from ..common.formatting import counted
from ..common.listing import File, refuse_unprintable

if TYPE_CHECKING:
    from .._core import RunOptions
    from .checkpoint import Checkpoint
    from .plan import Plan

#: Names of files that one reader or another loads by name alone, whatever other files say.
#: source: transformers (utils/hub.py, tokenization_utils_base.py), vllm (model_loader/weight_utils.py),
#: deepspeed (runtime/engine.py), megatron-core (dist_checkpointing), torch.distributed.checkpoint, orbax,
#: zarr
_LOADED = (
    "*.safetensors",
    "pytorch_model*.bin",
    "*.index.json",
    "adapter_model.*",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "layout.json",
    "latest",
    "latest_checkpointed_iteration.txt",
    "layer_*.pt",
    "mp_rank_*.pt",
    "*zero_pp_rank_*.pt",
    "model_optim_rng.pt",
    "common.pt",
    "metadata.json",
    ".metadata",
    "*.distcp",
    "_METADATA",
    "manifest.ocdbt",
    "zarr.json",
    ".zarray",
)
#: Names of the step to be loaded, which move on while the steps stay.
_TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
#: What readers leave behind in a folder that they load from.
_LEAVINGS = (".gitattributes", ".cache/huggingface/*", "__pycache__/*", "*/__pycache__/*", ".nfs*", "*/.nfs*")
#: What is made of a result when it is there: statements about it, and signatures.
_EVIDENCE = ("fastshard.manifest.json", "fastshard.intoto.json", "model.sig", "*.sigstore.json")


def root_of(path: Path, document: dict[str, Any], checkpoint: Checkpoint) -> int | None:
    """Index of the root that the manifest at ``path`` is about: it lies in it, or tells of files of tensors
    there.

    None for the manifest of another folder, whose tensors alone are compared. A result and the source that it
    was made of often have files of the same names: of a result's manifest from elsewhere the tensors are
    compared where the files have other sizes, unless their names tell of parts, which only files can be held
    against.
    """
    listing = checkpoint.listing
    for index, root in enumerate(listing.roots):
        if root.resolve() == path.parent.resolve():
            return index
    have = {file["path"]: file["size"] for file in checkpoint.files}
    named = [file for file in document["files"] if file.get("identity")]
    shared = [file for file in named if file["name"] in have]
    if document.get("kind") == "inventory":
        return 0 if shared else None
    # A result's own manifest is best kept elsewhere: what it says of configs and headers must be held against
    # the result too.
    itself = len(shared) == len(named) and all(have[file["name"]] == file.get("size") for file in shared)
    return 0 if shared and (itself or not fits(document, checkpoint._plan)) else None


def fits(document: dict[str, Any], plan: Plan) -> bool:
    """True if a plan's outputs have all tensors of a manifest, of the same dtypes and shapes."""
    forms = {name: (dtype, shape) for name, dtype, shape, _, _ in plan.outputs}
    return all(forms.get(t["name"]) == (t.get("dtype"), t.get("shape")) for t in document["tensors"])


def find_missing(path: Path, document: dict[str, Any], checkpoint: Checkpoint) -> list[Finding]:
    """Finds files of tensors, and tensors, that the manifest at ``path`` names and the headers lack: one
    finding for each file.

    Nothing where the manifest is about another folder, or CKPT names one file alone.
    """
    root = root_of(path, document, checkpoint)
    if root is None or checkpoint.listing.single:
        return []
    opened = checkpoint.opened
    there = {file.path for file in checkpoint.listing.files if file.root == root}
    stored = {
        file.path: set(opened.catalog.names(i)) for i, file in enumerate(opened.files) if file.root == root
    }
    named: dict[str, list[str]] = {file["name"]: [] for file in document["files"] if file.get("identity")}
    for tensor in document["tensors"]:
        if tensor.get("file") in named:
            named[tensor["file"]].append(tensor["name"])
    findings = []
    for name, tensors in named.items():
        missing = [tensor for tensor in tensors if tensor not in stored.get(name, ())]
        if name not in there:
            finding = Finding.of(
                codes.MISSING_FILE, "the manifest names this file, and it is missing", file=name
            )
        elif name in stored and missing:
            finding = Finding.of(
                codes.MISSING_TENSOR,
                f"the file lacks {counted(len(missing), 'tensor')} that the manifest names",
                file=name,
                tensor=missing[0],
                count=len(missing),
                help="restore the file from a good copy",
            )
        else:
            continue
        findings.append(finding)
    return findings


def compare(path: Path, document: dict[str, Any], checkpoint: Checkpoint, run: RunOptions) -> list[Finding]:
    """What differs from the manifest at ``path`` in files that hold no tensors, and what it does not name;
    ``run`` are the options of an engine run.

    Nothing where the manifest is about another folder, or CKPT names one file alone.

    Raises:
        FastshardError: if a file cannot be read.
    """
    listing = checkpoint.listing
    index = root_of(path, document, checkpoint)
    if index is None or listing.single:
        return []
    have = {file["path"] for file in checkpoint.files}
    # Parts of one result may lie in several folders.
    roots = [os.fspath(root) for root in [listing.roots[index], *listing.roots]]
    try:
        findings = _core.manifest_files(os.fspath(path), roots, run)
    except _core.CoreError as error:
        raise from_core(error) from None
    # An inventory is of the files that were read, and the manifests of older versions list no others.
    if document.get("kind") == "inventory" or not all(
        "blake3" in f or "mtime_ns" in f for f in document["files"]
    ):
        return findings
    named = {file["name"] for file in document["files"]}
    folders = {"", *(name.rpartition("/")[0] for name in named)}
    for file in listing.files:
        if file.root != index or file.path in named or file.path in have or file.path == path.name:
            continue
        if any(fnmatch.fnmatchcase(file.path, known) for known in (*_LEAVINGS, *_EVIDENCE)):
            continue
        loaded = _is_loaded(file.name) and file.folder in folders
        findings.append(
            Finding.of(
                codes.UNEXPECTED_FILE,
                "the manifest does not name this file, which readers load"
                if loaded
                else "the manifest does not name this file",
                severity="error" if loaded else "warning",
                file=file.path,
                help="move it away if it does not belong to the result" if loaded else None,
            )
        )
    return findings


def _is_loaded(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _LOADED)


def companions(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Entries, for an inventory, of the files without tensors that readers load with the first root's.

    Raises:
        FastshardError: if one cannot be read.
    """
    listing = checkpoint.listing
    entries = []
    for file in loaded_beside(checkpoint):
        if file.root == 0:
            refuse_unprintable(file.path)
            try:
                entries.append(_core.manifest_entry(os.fspath(listing.roots[0]), file.path))
            except _core.CoreError as error:
                raise from_core(error) from None
    return entries


def loaded_beside(checkpoint: Checkpoint) -> list[File]:
    """The files without tensors that readers load with those that hold the checkpoint's."""
    read = {(file.root, file.path) for file in checkpoint.opened.behind}
    have = {file["path"] for file in checkpoint.files}
    folders = {(root, "") for root in range(len(checkpoint.listing.roots))}
    folders |= {(file.root, file.folder) for file in checkpoint.opened.files}
    return [
        file
        for file in checkpoint.listing.files
        if (file.root, file.folder) in folders
        and (file.root, file.path) not in read
        and file.path not in have
        and _is_loaded(file.name)
        and file.name not in _TRACKERS
    ]
