"""Comparison of a folder's files with the manifest of the result that was published there."""

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

#: Names of files that some reader loads by name alone, regardless of what other files say.
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
#: Files that name the step to load; their content changes while the steps stay the same.
_TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
#: Files that readers leave behind in a folder that they load from.
_LEAVINGS = (".gitattributes", ".cache/huggingface/*", "__pycache__/*", "*/__pycache__/*", ".nfs*", "*/.nfs*")
#: Files about a finished result: statements and signatures.
_EVIDENCE = ("fastshard.manifest.json", "fastshard.intoto.json", "model.sig", "*.sigstore.json")


def root_of(path: Path, document: dict[str, Any], checkpoint: Checkpoint) -> int | None:
    """Return the index of the root that the manifest at ``path`` describes.

    The manifest is in this root, or names tensor files there. Return None for the manifest of another folder,
    of which only the tensors are compared. A result and its source often have files with the same names. So
    if the manifest of a result is elsewhere and the files have other sizes, its tensors are compared. An
    exception is a result whose tensor names denote parts: it can only be compared by file.
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
    """Return True if a plan's outputs include all tensors of a manifest, with equal dtypes and shapes."""
    forms = {name: (dtype, shape) for name, dtype, shape, _, _ in plan.outputs}
    return all(forms.get(t["name"]) == (t.get("dtype"), t.get("shape")) for t in document["tensors"])


def find_missing(path: Path, document: dict[str, Any], checkpoint: Checkpoint) -> list[Finding]:
    """Find tensor files and tensors that the manifest at ``path`` names but that are missing from the
    headers.

    There is one finding for each file. The list is empty if the manifest describes another folder, or if CKPT
    is a single file.
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
                codes.MISSING_FILE, "the manifest names this file, but it is missing", file=name
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
    """List files without tensors that differ from the manifest at ``path``, and files that are not in the
    manifest.

    The list is empty if the manifest describes another folder, or if CKPT is a single file.

    Args:
        path: the manifest.
        document: its content.
        checkpoint: an opened checkpoint.
        run: the options of an engine run.

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
                "the manifest does not name this file, which loaders read"
                if loaded
                else "the manifest does not name this file",
                severity="error" if loaded else "warning",
                file=file.path,
                help="move the file away if it is not part of the result" if loaded else None,
            )
        )
    return findings


def _is_loaded(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _LOADED)


def companions(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return manifest entries for the files without tensors that readers load from the first root.

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
    """List the files without tensors that readers load together with the tensor files."""
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
