"""The contents of ``metadata.pkl``: the parts of each item's tensors by rank, and the rank files.

The pickle contains plain dicts, lists, numbers and strings. fastshard's own pickle reader reads it without
calling anything. Objects in it are refused.
source: torch_checkpointing 0.1.1, distributed_metadata.py, dtensor_metadata.py, default_metadata.py,
    checkpoint_layout.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import _core
from ...common import codes
from ...common.errors import FastshardError, error_for, from_core
from ...common.listing import File, Listing
from ...common.options import MAX_DEGREE
from ...common.records import dataclass
from ..fsdp.placements import Unreadable, box
from ..index_files import safe_relative

#: source: metadata_serialization.py
METADATA = "metadata.pkl"
#: Formats whose files contain tensors. source: checkpoint_layout.py
_TENSOR_FORMATS = ("TorchSerialization", "SafetensorsSerialization")
_PLACEMENTS = {"Shard": "shard", "StridedShard": "strided", "Replicate": "replicate"}

#: First index and extent of a box.
Bounds = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Division:
    """The boxes of a tensor on ranks that divide it jointly. Each division covers the full tensor."""

    #: Box by rank; None for a rank that stores no part.
    boxes: Mapping[int, Bounds | None]
    #: True for a plain tensor: each rank that has it stores it in full, but not every rank needs to have it.
    is_plain: bool


@dataclass(frozen=True)
class Entry:
    """The metadata of one tensor."""

    name: str
    shape: Sequence[int]
    #: Name of the torch dtype, without ``torch.``.
    dtype: str
    divisions: Sequence[Division]


@dataclass(frozen=True)
class Item:
    """An item of a checkpoint, such as ``model``."""

    name: str
    entries: Sequence[Entry]
    #: By rank: the path relative to the checkpoint's folder.
    files: Mapping[int, str]


@dataclass(frozen=True)
class Metadata:
    """The contents of a metadata file."""

    #: Plain data: names of items, with the metadata of each item.
    items: Mapping[str, Any]
    ranks: int
    version: str
    path: str

    def refuse(self, what: str, tensor: str | None = None, **more: str) -> FastshardError:
        """Build the error for metadata that torch_checkpointing does not write."""
        help = f"copy {METADATA} again from the node that ran rank 0: it is damaged"
        return FastshardError.of(codes.UNSAFE_HEADER, what, file=self.path, tensor=tensor, help=help, **more)

    def item(self, name: str) -> Item:
        """Parse the metadata of one item.

        Raises:
            FastshardError: ``FS601`` for metadata that torch_checkpointing does not write, ``FS603`` for a
                file
                outside the folder, ``FS514`` for an unsupported form.
        """
        content = _as_dict(self, self.items[name], f"item {name!r}")
        entries: list[Entry] = []
        by_name: dict[str, str] = {}
        for key, groups in _as_dict(self, content.get("nested_path_to_metadata"), f"item {name!r}").items():
            tensor = ".".join(_keys(self, key))
            if by_name.setdefault(tensor, key) != key:
                raise FastshardError.of(
                    codes.AMBIGUOUS,
                    f"two tensors of {METADATA} have the same name",
                    file=self.path,
                    tensor=tensor,
                    got=f"{by_name[tensor]}, {key}",
                    help="save it again with keys that do not contain dots",
                )
            entries.append(_entry(self, tensor, groups))
        holders = {rank for entry in entries for division in entry.divisions for rank in division.boxes}
        return Item(name, entries, _files(self, name, content.get("rank_to_layout_info"), holders))


def read(listing: Listing, file: File, *, among_rank_files: bool) -> Metadata | None:
    """Read a metadata file; None for a pickle that is not torch_checkpointing metadata.

    Args:
        listing: contents of the root directories.
        file: the metadata file.
        among_rank_files: True if files with the names of rank files are next to it. In this case, an
            unreadable pickle is an error.

    Raises:
        FastshardError: ``FS602`` for a pickle that is damaged or contains objects.
    """
    try:
        content = _read_pickle(listing.roots[file.root] / file.path, file.path)
    except FastshardError:
        if among_rank_files:
            raise
        return None
    is_own = isinstance(content, dict) and {"metadata", "world_size"} <= content.keys()
    if not is_own:
        return None
    version = content.get("version", "1.0")
    metadata = Metadata({}, 0, str(version), file.path)
    ranks = content["world_size"]
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 0 < ranks <= MAX_DEGREE:
        raise metadata.refuse("the number of ranks is not a number", got=str(ranks)[:40])
    if version not in ("1.0", "2.0"):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"unknown version of {METADATA}",
            file=file.path,
            expected="1.0 or 2.0",
            got=str(version)[:40],
            help="load it with the torch_checkpointing that wrote it, and save it with 0.1.1",
        )
    items = _as_dict(metadata, content["metadata"], "the items")
    if version == "1.0":
        items = _grouped(metadata, items, content.get("rank_to_layout_info_mappings"))
    return Metadata(items, ranks, version, file.path)


def _read_pickle(path: Path, label: str) -> Any:
    """Return the plain data of a pickle.

    Raises:
        FastshardError: ``FS602`` for a pickle that is damaged, too large, or contains objects.
    """
    try:
        return _core.plain_pickle(path)
    except _core.CoreError as error:
        findings = from_core(error).findings
    help = f"copy {METADATA} again from the node that ran rank 0, if it is damaged"
    raise error_for([finding.replace(file=label, help=finding.help or help) for finding in findings])


def _as_dict(metadata: Metadata, value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise metadata.refuse(f"{what} cannot be read", expected="a dict", got=type(value).__name__)
    return value


def _keys(metadata: Metadata, key: str) -> list[str]:
    """Return the keys that lead to a tensor, which are stored as JSON."""
    try:
        keys = json.loads(key)
    except ValueError:
        keys = None
    # True is an int to Python, and no key.
    if not isinstance(keys, list) or not all(type(k) in (str, int) for k in keys):
        raise metadata.refuse("a tensor's name is not a list of keys", got=key[:80])
    return [str(k) for k in keys]


def _grouped(metadata: Metadata, flat: dict[str, Any], layouts: Any) -> dict[str, Any]:
    """Return the items of version 1.0, in which the item's name is the first of each tensor's keys."""
    items: dict[str, Any] = {}
    ranks = _as_dict(metadata, layouts, "rank_to_layout_info_mappings")
    for key, groups in flat.items():
        if not (keys := _keys(metadata, key)):
            raise metadata.refuse("a tensor's name has no keys", got=key)
        item = items.setdefault(
            keys[0],
            {
                "nested_path_to_metadata": {},
                "rank_to_layout_info": {
                    rank: _as_dict(metadata, content, f"the layout of rank {rank}").get(keys[0])
                    for rank, content in ranks.items()
                },
            },
        )
        item["nested_path_to_metadata"][json.dumps(keys[1:])] = groups
    return items


def _numbers(metadata: Metadata, value: Any, tensor: str, what: str) -> list[int]:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        raise metadata.refuse(f"{what} of a tensor cannot be read", tensor, got=str(value)[:80])
    return value


def _entry(metadata: Metadata, name: str, groups: Any) -> Entry:
    """Parse the metadata of a tensor, by groups of ranks that divide it in the same way."""
    if not isinstance(groups, list) or not groups:
        raise metadata.refuse("a tensor has no ranks", name)
    shape: list[int] | None = None
    dtype = ""
    divisions: list[Division] = []
    boxes: dict[int, Bounds | None] = {}
    for group in groups:
        content = _as_dict(metadata, group, "a group of ranks")
        packed = _as_dict(metadata, content.get("sharding_metadata"), "sharding_metadata")
        data = _as_dict(metadata, packed.get("data"), "sharding_metadata")
        ranks = _numbers(metadata, content.get("ranks"), name, "the ranks")
        if beyond := [rank for rank in ranks if rank >= metadata.ranks]:
            raise metadata.refuse(
                "a tensor has a rank beyond the last one",
                name,
                expected=f"at most rank {metadata.ranks - 1}",
                got=f"rank {beyond[0]}",
            )
        here = _numbers(metadata, data.get("global_shape"), name, "the shape")
        its_dtype = str(data.get("dtype")).removeprefix("torch.")
        if shape not in (None, here) or dtype not in ("", its_dtype):
            raise metadata.refuse(
                "groups of ranks state different shapes or dtypes of a tensor",
                name,
                expected=f"{dtype} {shape}",
                got=f"{its_dtype} {here}",
            )
        shape, dtype = here, its_dtype
        if packed.get("type") == "DTensorShardingMetadata":
            divisions.append(_by_mesh(metadata, name, shape, data, ranks))
        elif packed.get("type") == "default_tensor_v1":
            for rank in ranks:
                boxes[rank] = _parse_shard(metadata, name, shape, data)
        else:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "a tensor is divided by a class that is not part of torch_checkpointing",
                file=metadata.path,
                tensor=name,
                expected="DTensorShardingMetadata or default_tensor_v1",
                got=str(packed.get("type"))[:80],
                help="load it where the class is available, and save DTensors",
            )
    if boxes:
        divisions.append(Division(boxes, is_plain=False))
    return Entry(name, shape or [], dtype, divisions)


def _by_mesh(
    metadata: Metadata, name: str, shape: list[int], data: dict[str, Any], ranks: list[int]
) -> Division:
    """Return the boxes of a DTensor, or of a plain tensor, which counts as a copy on each rank."""
    mesh = _as_dict(metadata, data.get("mesh_spec"), "mesh_spec")
    sizes = _numbers(metadata, mesh.get("mesh_shape"), name, "the mesh")
    members = _numbers(metadata, mesh.get("mesh_data"), name, "the mesh")
    placements = data.get("placements")
    if (
        math.prod(sizes) != len(members)
        or len(set(members)) != len(members)
        or set(members) != set(ranks)
        or not isinstance(placements, list)
        or len(placements) != len(sizes)
    ):
        raise metadata.refuse(
            "mesh, ranks and placements of a tensor do not match each other",
            name,
            got=f"mesh {sizes}, {len(ranks)} ranks, placements {str(placements)[:60]}",
        )
    parsed: list[_core.Placement] = []
    for one in placements:
        content = _as_dict(metadata, one, "a placement")
        kind = _PLACEMENTS.get(str(content.get("type")))
        if kind is None:
            raise metadata.refuse("a placement is not known", name, got=str(content)[:80])
        placement: _core.Placement = {"kind": kind}
        if kind != "replicate":
            placement["dim"] = _numbers(metadata, [content.get("dim")], name, "a placement")[0]
        if kind == "strided":
            placement["split"] = _numbers(metadata, [content.get("split_factor")], name, "a placement")[0]
        parsed.append(placement)
    part: _core.RankPart = {"path": [name], "shape": shape, "placements": parsed, "order": None}
    boxes: dict[int, Bounds | None] = {}
    for index, rank in enumerate(members):
        coordinate: list[int] = []
        left = index
        for size in reversed(sizes):
            coordinate.insert(0, left % size)
            left //= size
        place: _core.Mesh = {
            "shape": sizes,
            "names": None,
            "coordinate": coordinate,
            "rank": rank,
            "ranks": None,
        }
        try:
            boxes[rank] = box(shape, place, part)
        except Unreadable as why:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"a DTensor whose placement is not supported: {why}",
                file=metadata.path,
                tensor=name,
                help="redistribute it to Shard or Replicate before saving",
            ) from None
    # source: default_resharder.py, _replicated_tensor_metadata: a mesh of all ranks, without names
    is_plain = mesh.get("mesh_dim_names") is None and [p["kind"] for p in parsed] == ["replicate"]
    return Division(boxes, is_plain and len(members) == metadata.ranks)


def _parse_shard(metadata: Metadata, name: str, shape: list[int], data: dict[str, Any]) -> Bounds | None:
    """Return the box of a tensor of a custom class (``CheckpointableTensor``)."""
    begins, inside, sizes = (data.get(k) for k in ("global_offsets", "local_offsets", "local_sizes"))
    lists = [begins, inside, sizes]
    if not all(isinstance(one, list) and len(one) == len(begins or []) for one in lists):
        raise metadata.refuse("the shards of a tensor cannot be read", name, got=str(lists)[:80])
    if not begins:
        return None
    lo, at, size = (_numbers(metadata, one[0], name, "a shard") for one in lists if one)
    if len(begins) > 1 or any(at):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "a rank stores several shards of a tensor together, or a shard among other values",
            file=metadata.path,
            tensor=name,
            expected="one shard, which begins where the stored tensor begins",
            got=f"{len(begins)} shards, the first at {at}",
            help="save DTensors, or a separate tensor for each shard",
        )
    if len({len(lo), len(size), len(shape)}) != 1 or any(
        a + n > of for a, n, of in zip(lo, size, shape, strict=True)
    ):
        raise metadata.refuse(
            "a shard extends beyond the tensor", name, expected=f"within {shape}", got=f"{size} from {lo}"
        )
    return lo, size


def _files(metadata: Metadata, item: str, layouts: Any, holders: set[int]) -> dict[int, str]:
    """Return the file of each rank that wrote the item."""
    content = _as_dict(metadata, layouts, f"the files of item {item!r}")
    if content.keys() != set(range(metadata.ranks)):
        raise metadata.refuse(
            f"item {item!r} does not have a file for each rank",
            expected=f"ranks 0 to {metadata.ranks - 1}",
            got=f"{len(content)} ranks",
        )
    files: dict[int, str] = {}
    by_path: dict[str, int] = {}
    is_stated = any(layout is not None for layout in content.values())
    for rank in range(metadata.ranks):
        layout = content[rank]
        if layout is None:
            # Beside stated files None is a rank that did not save the item.
            if is_stated or rank not in holders:
                continue
            path: Any = f"{item}_{rank}.pt"
        else:
            layout = _as_dict(metadata, layout, "a layout")
            form = _as_dict(metadata, layout.get("serialization_format"), "a layout").get("type")
            path = layout.get("file_path")
            if form not in _TENSOR_FORMATS:
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    f"item {item!r} is saved in a form that holds no tensors, or in an unknown form",
                    file=metadata.path,
                    expected=" or ".join(_TENSOR_FORMATS),
                    got=str(form)[:80],
                )
        if not safe_relative(path):
            raise FastshardError.of(
                codes.UNSAFE_PATH,
                f"a file name in {METADATA} points outside the directory",
                file=metadata.path,
                got=repr(path)[:200],
                help="do not use this checkpoint: the metadata may be an attempt to read other files",
            )
        path = "/".join(part for part in path.split("/") if part not in ("", "."))
        if by_path.setdefault(path, rank) != rank:
            raise metadata.refuse(
                "two ranks have the same file", got=f"{path} of ranks {by_path[path]} and {rank}"
            )
        files[rank] = path
    return files
