"""The first indices of a file's slices in the full tensors, as torch's ``HuggingFaceStorageWriter`` records
them.

source: torch/distributed/checkpoint/{_hf_utils,filesystem,_consolidate_hf_safetensors}.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...common import codes, json_text
from ...common.errors import Finding
from ...common.listing import File, Listing
from ...common.regex import compile_when_used
from ..base import Contents

#: Key in a safetensors file's metadata.
INFO = "DCP_SHARDING_INFO"
#: Where the writer puts the shards that it consolidates.
_SHARDED = compile_when_used(r"(^|/)sharded/shard-\d+-[^/]+\.safetensors$")
#: Maximum size of an element in bytes.
_ELEMENT = 16


def offsets(metadata: Any) -> dict[str, list[int]] | None:
    """Return the first index of each tensor in the full tensor; None for a file without readable offsets."""
    text = metadata.get(INFO) if isinstance(metadata, dict) else None
    try:
        info = json_text.load(text) if isinstance(text, str) else None
    except ValueError:
        return None
    good = isinstance(info, dict) and all(
        isinstance(v, dict)
        and isinstance(v.get("saved_offsets"), list)
        and all(isinstance(n, int) and 0 <= n < 1 << 40 for n in v["saved_offsets"])
        for v in info.values()
    )
    return {name: v["saved_offsets"] for name, v in info.items()} if good and info is not None else None


def not_whole(files: Sequence[File], contents: Contents, index: str | None, counted: Any) -> list[Finding]:
    """Report model files that contain a rank's slices instead of full tensors.

    Without ``save_distributed=True``, every rank of torch's writer writes the same files, and those of the
    last writer remain. If that was the first rank, the index shows it by the byte count over all ranks.

    Args:
        files: the model's files.
        contents: contents of the files.
        index: path of the index that names them, if there is one.
        counted: tensor bytes according to the index, if stated.
    """
    places_by_file = {i: offsets(contents(i)) for i in range(len(files)) if contents.readable(i)}
    written = {i: places for i, places in places_by_file.items() if places is not None}
    help_ = (
        "save it again with save_distributed=True, or choose another step; the other slices were overwritten"
    )
    for i, places in written.items():
        for tensor in contents.tensors(i):
            name = ".".join(tensor["path"])
            if any(places.get(name, ())):
                return [
                    Finding.of(
                        codes.SLICE_AS_WHOLE,
                        "according to its metadata, the file holds a rank's slices",
                        file=files[i].path,
                        tensor=name,
                        expected="the full tensor, from its first element",
                        got=f"{tensor['shape']} from {places[name]} on",
                        help=help_,
                    )
                ]
    if index is None or not files or len(written) < len(files):
        return []
    stored_bytes = sum(tensor["storage_bytes"] for i in written for tensor in contents.tensors(i))
    if not isinstance(counted, int) or counted <= stored_bytes:
        return []
    return [
        Finding.of(
            codes.SLICE_AS_WHOLE,
            "the index counts more than its files hold, as if it counted a rank's slices as full tensors",
            file=index,
            expected=f"{counted} bytes of tensors",
            got=f"{stored_bytes} bytes",
            help=help_,
        )
    ]


def zeroed(listing: Listing, folder: str, files: Sequence[File], contents: Contents) -> list[Finding]:
    """Warn of 0-d tensors that are zero: torch's consolidation sets them to zero, whatever their values were.

    Args:
        listing: contents of the root directories.
        folder: the model's folder.
        files: the model's files.
        contents: contents of the files.
    """
    below = [
        f
        for f in listing.files
        if _SHARDED.search(f.path) and f.folder.rpartition("sharded")[0].rstrip("/") == folder
    ]
    if not below:
        return []
    zero = [
        (".".join(tensor["path"]), files[i].path)
        for i in range(len(files))
        if contents.readable(i)
        for number, tensor in enumerate(contents.tensors(i))
        if not tensor["shape"] and not any(contents.bytes(i, number, _ELEMENT))
    ]
    if not zero:
        return []
    return [
        Finding.of(
            codes.ZERO_SLAB,
            f"{len(zero)} scalar tensors are zero: torch's consolidation sets every scalar to zero",
            severity="warning",
            file=zero[0][1],
            tensor=zero[0][0],
            got=", ".join(name for name, _ in zero[:8]),
            help=f"name the directory of the shards that it was made from: {below[0].folder}",
        )
    ]
