"""The contents of torch.distributed.checkpoint's ``.metadata``: from one file, or combined from several
ranks' files.

source: torch/distributed/checkpoint/{metadata,filesystem}.py
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Iterable
from typing import Any, TypedDict

from ... import _core
from ...common import codes, safe_files
from ...common.dtypes import TORCH_NAMES, item_size
from ...common.errors import FastshardError, Finding, from_core
from ...common.listing import File, Listing
from ...common.ranks import rank_range
from ...common.regex import compile_when_used
from ...layouts.dcp_names import METADATA
from ..base import lacking, missing
from ..index_files import safe_relative

#: Metadata of a rank that saved independently.
OF_RANK = compile_when_used(r"^__(\d{1,9})\.metadata$")
#: Record files of a rank.
_RECORDS = compile_when_used(r"^__(\d{1,9})_\d+\.distcp$")
#: safetensors name by torch dtype.
_SAFETENSORS = {theirs: name for name, theirs in TORCH_NAMES.items()}


class Metadata(TypedDict):
    """The contents of ``.metadata``, as the core returns them (``format/dcp.rs``)."""

    tensors: list[TensorEntry]
    #: Names of records that are not tensors.
    objects: list[str]
    stored: list[StoredAt]
    #: Version of torch's format, if stated.
    version: str | None


class TensorEntry(TypedDict):
    """A tensor and its chunks."""

    name: str
    dtype: str | None
    #: Keys of nested dicts that lead to the tensor, if the planner recorded them.
    path: list[str] | None
    shape: list[int]
    #: (first index, extent) of each chunk.
    chunks: list[tuple[list[int], list[int]]]


class StoredAt(TypedDict):
    """A record in a file."""

    name: str
    #: First index of the chunk; None for a record that is not a tensor.
    at: list[int] | None
    file: str
    offset: int
    len: int
    #: The transforms that were applied to the bytes on writing, last one first.
    transforms: list[str]


def one_of(listing: Listing, copies: list[File]) -> File:
    """Return one of several directories' files of the same name, which must be copies of each other.

    Raises:
        FastshardError: ``FS106`` if they are not.
    """
    paths = [listing.roots[file.root] / file.path for file in copies]
    for path, file in zip(paths[1:], copies[1:], strict=True):
        if not safe_files.same(paths[0], path):
            raise FastshardError.of(
                codes.AMBIGUOUS,
                "the directories have different files of this name: they are from different saves",
                file=file.path,
                expected="one file, or copies of it",
                got=f"{paths[0]}, {path}",
                help="pass only the directories of one save",
            )
    return copies[0]


def read(listing: Listing, file: File) -> Metadata:
    """Read a metadata file.

    Raises:
        FastshardError: if it cannot be read.
    """
    try:
        metadata: Metadata = _core.dcp_metadata(os.fspath(listing.roots[file.root] / file.path))
    except _core.CoreError as error:
        raise from_core(error) from None
    return metadata


def apart(stored: Iterable[StoredAt], path: str) -> None:
    """Check that records do not overlap; torch writes them one after another.

    Raises:
        FastshardError: ``FS206`` if two records overlap.
    """
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for entry in (e for e in stored if safe_relative(e["file"])):
        ranges.setdefault(entry["file"], []).append(
            (entry["offset"], entry["offset"] + entry["len"], entry["name"])
        )
    for file, found in ranges.items():
        found.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(found):
            if start < end:
                raise FastshardError.of(
                    codes.OVERLAP,
                    f"two records share bytes of {file}",
                    file=path,
                    tensor=second,
                    expected=f"a separate range after {first}",
                    got=f"offset {start}, before {end}",
                    help="use another step: the metadata is damaged",
                )


def as_records(described: Metadata, path: str) -> None:
    """Check that every record is a complete torch.save file, which is larger than its data.

    ``FileSystemWriter`` can write one safetensors file for all records (``SerializationFormat.SAFETENSORS``).
    It then records wrong places, so that torch cannot read that checkpoint either.

    Raises:
        FastshardError: ``FS514`` for such a checkpoint.
    """
    extents = {
        (e["name"], tuple(lo)): (e["dtype"], math.prod(size))
        for e in described["tensors"]
        for lo, size in e["chunks"]
    }
    for entry in described["stored"]:
        dtype, count = extents.get((entry["name"], tuple(entry["at"] or ())), (None, 0))
        item = item_size(_SAFETENSORS[dtype]) if dtype in _SAFETENSORS else 0
        if not entry["transforms"] and 0 < count * item == entry["len"]:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "the files are in safetensors format, but .metadata does not state where their tensors are",
                file=path,
                tensor=entry["name"],
                expected="records as torch.save writes them",
                got=f"{entry['len']} bytes, which is only the size of its data",
                help="save the checkpoint with HuggingFaceStorageWriter, whose files fastshard reads, or "
                "with SerializationFormat.TORCH_SAVE",
            )


def of_ranks(listing: Listing, ranks: dict[int, list[File]], findings: list[Finding]) -> Metadata:
    """Combine the metadata of ranks that saved independently into what one .metadata would state.

    Such ranks save with ``use_collectives=False``. Each one states the full shapes of its tensors and its own
    chunks. Every rank saves the tensors that all ranks share.

    Raises:
        FastshardError: ``FS201`` or ``FS202`` if they disagree on a tensor.
    """
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, None] = {}
    stored: list[StoredAt] = []
    chunks: set[tuple[Any, ...]] = set()
    version = None
    for rank in sorted(ranks):
        file = one_of(listing, ranks[rank])
        metadata = read(listing, file)
        version = version or metadata["version"]
        objects |= dict.fromkeys(metadata["objects"])
        stored += metadata["stored"]
        for entry in metadata["tensors"]:
            first = tensors.setdefault(entry["name"], {**entry, "chunks": []})
            for code, key, known, here in (
                (codes.SHAPE, "shape", first["shape"], entry["shape"]),
                (codes.DTYPE, "dtype", first["dtype"], entry["dtype"]),
            ):
                if known != here:
                    raise FastshardError.of(
                        code,
                        f"{key} of a tensor differs in the ranks' metadata",
                        file=file.path,
                        tensor=entry["name"],
                        rank=f"rank {rank}",
                        expected=str(known),
                        got=str(here),
                        help="copy all ranks' files from one save; these are from different saves",
                    )
            for lo, size in entry["chunks"]:
                if (entry["name"], *lo, *size) not in chunks:
                    chunks.add((entry["name"], *lo, *size))
                    first["chunks"].append((lo, size))
    folder = next(iter(ranks.values()))[0].folder
    for first_rank, last in lacking(ranks, 0, max(ranks)):
        name, end = (f"__{rank}{METADATA}" for rank in (first_rank, last))
        findings.append(
            missing(
                f"{folder}/{name}" if folder else name,
                {"rank": rank_range(first_rank, last)},
                "metadata of a rank between other ranks",
                f"copy {name} and its .distcp files from the node that ran this rank",
                upto=end if end != name else None,
            )
        )
    return {"tensors": list(tensors.values()), "objects": list(objects), "stored": stored, "version": version}


def ranks_without(listing: Listing, folder: str, ranks: Collection[int]) -> list[Finding]:
    """Report ranks that have records but no metadata, without which the records have no names."""
    there = {int(m[1]) for file in listing.within(folder) if (m := _RECORDS.match(file.name))}
    return [
        missing(
            f"{folder}/__{rank}{METADATA}" if folder else f"__{rank}{METADATA}",
            {"rank": rank},
            f"the metadata of this rank, which has files __{rank}_*.distcp",
            "copy it from the node that ran this rank",
        )
        for rank in sorted(there - set(ranks))
    ]


def same_save(described: Metadata, of_ranks: Metadata, tracker: File) -> None:
    """Check that the metadata of single ranks agrees with that of all ranks in the same folder.

    If they differ, one of them remains from an overwritten save.

    Raises:
        FastshardError: ``FS106`` if they differ.
    """

    def places(metadata: Metadata) -> set[tuple[Any, ...]]:
        return {(e["name"], str(e["at"]), e["file"], e["offset"], e["len"]) for e in metadata["stored"]}

    if odd := places(of_ranks) - places(described):
        name, _, file, *_ = min(odd)
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "the .metadata of all ranks and the .metadata of single ranks contradict each other",
            file=tracker.path,
            tensor=name,
            expected="one save in a directory",
            got=f"{file}, by the metadata of its rank",
            help=f"move {METADATA} or __*{METADATA} away, whichever is from the older save",
        )
