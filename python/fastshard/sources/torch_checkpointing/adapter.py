"""Checkpoints of Meta's torch_checkpointing: ``metadata.pkl``, and ``model_R.pt`` or ``.safetensors`` of each
rank R.

The metadata states the shape, dtype and mesh of each tensor, and therefore each rank's box. Files written by
torch.save contain DTensors, which state their boxes too. safetensors files contain local tensors, of which
only the shapes can be compared.
source: torch_checkpointing 0.1.1, checkpoint_writer.py, checkpoint_layout.py, default_resharder.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.formatting import some
from ...common.listing import File, Listing
from ...common.records import dataclass, field, replace
from ...common.regex import compile_when_used
from ...layouts.declaration import Assembled, Binding, Source, TensorIndex
from .. import hf_config, model_prefix
from ..base import Contents, Found, Options, missing, unexpected
from ..box_pieces import Boxes
from ..choose_step import folder_of, within_this
from ..dcp.metadata import one_of
from ..fsdp.placements import Unreadable, box
from ..step_names import is_step
from . import metadata as checkpoint_metadata
from .metadata import METADATA, Bounds, Entry, Item, Metadata

#: The default name of an item's file, and the usual name of its safetensors files.
_RANK_FILE = compile_when_used(r"^(.+)_(\d{1,9})\.(pt|safetensors|json)$")
_MODEL = "model"
#: Maximum number of findings of one kind.
_MOST_NAMED = 8


@dataclass(frozen=True)
class ItemFiles:
    """The files of the item that is read, by rank: their numbers in ``Found.files``."""

    item: Item
    files: Mapping[int, int]
    #: Paths of missing files, by rank.
    lacking: Mapping[int, str]
    ranks: int
    #: Names of the items that are not read.
    others: Sequence[str]
    version: str


@dataclass
class _Declaring:
    """The state of a declaration while it is built."""

    source: Source
    found: Found[ItemFiles]
    contents: Contents
    #: One set of boxes for each division of a tensor: the first divisions of all tensors, then the second
    #: ones, ...
    boxes: list[Boxes] = field(default_factory=lambda: [Boxes()])
    #: The tensor's number in the file, by rank and name.
    numbers: dict[int, dict[str, int]] = field(default_factory=dict)
    #: The box that a DTensor states itself, by rank and name.
    own_boxes: dict[int, dict[str, Bounds | None]] = field(default_factory=dict)
    paths: dict[str, list[str]] = field(default_factory=dict)
    #: True if a file belongs to another rank, or contradicts the metadata.
    is_broken: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def report(self, finding: Finding) -> None:
        """Add a finding, unless there are already many with its code."""
        self.is_broken = True
        self.counts[finding.code] = self.counts.get(finding.code, 0) + 1
        if self.counts[finding.code] <= _MOST_NAMED:
            self.source.findings.append(finding)

    def path(self, rank: int) -> str:
        """Return the path of a rank's file."""
        return self.found.files[self.found.seen.files[rank]].path


class TorchCheckpointing:
    """Directories with ``metadata.pkl``."""

    name = "torch_checkpointing"

    def detect(self, listing: Listing, options: Options) -> Found[ItemFiles] | None:
        """Look for a ``metadata.pkl`` that names rank files."""
        if listing.single:
            return None
        described: dict[str, list[tuple[File, Metadata]]] = {}
        for file in listing.files:
            if file.name != METADATA:
                continue
            among = any(
                match and match[3] != "json"
                for other in listing.within(file.folder)
                for match in [_RANK_FILE.match(other.name)]
            )
            metadata = checkpoint_metadata.read(listing, file, among_rank_files=among)
            if metadata is not None:
                described.setdefault(file.folder, []).append((file, metadata))
        if not described:
            return None
        places = [(file.root, folder) for folder, copies in described.items() for file, _ in copies]
        folder, chosen, within = folder_of(listing, places, options)
        # Copies of several nodes must be the same.
        one_of(listing, [file for file, _ in described[folder]])
        metadata = described[folder][0][1]
        item = metadata.item(_choose_item(metadata, options))
        if item.name != _MODEL and options.prefix is None:
            _refuse_undescribed_model(metadata, item, [file.name for file in listing.within(folder)])
        findings = [*chosen.findings, *within_this(within)]
        order: list[File] = []
        files: dict[int, int] = {}
        lost: dict[int, str] = {}
        for rank, name in item.files.items():
            path = f"{folder}/{name}" if folder else name
            if copies := [file for file in listing.files if file.path == path]:
                files[rank] = len(order)
                order.append(one_of(listing, copies))
                continue
            lost[rank] = path
            findings.append(
                missing(
                    path,
                    {"rank": rank},
                    f"{metadata.ranks} ranks and their files by {METADATA}",
                    f"copy {name} from the node that ran rank {rank}, or name that node's directory as "
                    "another CKPT",
                )
            )
        used, others = set(item.files.values()), set(metadata.items) - {item.name}
        for file in listing.within(folder):
            if (match := _RANK_FILE.match(file.name)) is None or file.name in used:
                continue
            if match[1] == item.name:
                findings.append(unexpected(file.path, f"{METADATA} does not name this file"))
            else:
                others.add(match[1])
        seen = ItemFiles(item, files, lost, metadata.ranks, sorted(others), metadata.version)
        step = chosen.name if is_step(chosen.name) else None
        return Found(self, "torch_checkpointing", order, seen, folder, findings, step=step, reads_parts=True)

    def declare(
        self, found: Found[ItemFiles], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Declare every tensor as the boxes that ranks store."""
        seen = found.seen
        source = Source(
            found.framework,
            step=found.step,
            binding=Binding(pass_unknown=True),
            index=TensorIndex(is_provable=True, is_listed=True),
        )
        source.files.ranks = {file: {"rank": rank} for rank, file in seen.files.items()}
        source.files.values = {"version": seen.version}
        source.binding.vocab_size = options.vocab_size
        if seen.others:
            source.findings.append(_not_read(found, seen.others))
        declaring = _Declaring(source, found, contents)
        for rank in seen.files:
            _look_into(declaring, rank)
        for entry in seen.item.entries:
            _place(declaring, entry)
        _place_unlisted(declaring)
        source.files.assembled += _assemble(declaring)
        names = {name: declaring.boxes[0].shape(name) for name in declaring.boxes[0].names()}
        prefix = options.prefix
        is_item = prefix is not None and prefix.partition(".")[0] == seen.item.name
        if prefix is not None and is_item:
            # The item's own name is no part of the tensors' names.
            prefix = prefix.partition(".")[2] or None
        config, path = hf_config.config_of(listing, found.folder, options)
        model_prefix.recognise(source, names, config, prefix, declaring.paths)
        source.names.is_chosen |= is_item
        if config is not None:
            hf_config.describe(source, listing, config, path, names, outer=source.names.prefix)
        return source


def _choose_item(metadata: Metadata, options: Options) -> str:
    """Choose the item with the model: the one that ``--prefix`` names, or ``model``, or the only one.

    Raises:
        FastshardError: ``FS106`` if several may be the model, ``FS514`` if none is described.
    """
    items = sorted(metadata.items)
    if options.prefix is not None and (asked := options.prefix.partition(".")[0]) in items:
        return asked
    if _MODEL in items:
        return _MODEL
    models = [name for name in items if not name.startswith("optim")]
    if len(models) == 1:
        return models[0]
    if models:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "several items could be the model",
            file=metadata.path,
            got=some(models, _MOST_NAMED),
            help="choose one of them",
            run=[f"--prefix {models[0]}"],
        )
    raise FastshardError.of(
        codes.UNSUPPORTED,
        f"{METADATA} describes no model",
        file=metadata.path,
        got=some(items, _MOST_NAMED) if items else "no items",
        help="save it with a resharder for the model's item (ItemSpec), which makes it write the shapes",
    )


def _refuse_undescribed_model(metadata: Metadata, item: Item, names: Iterable[str]) -> None:
    """Refuse to read another item instead of ``model`` if ``model`` has files but no description.

    Args:
        metadata: the content of ``metadata.pkl``.
        item: the item that would be read.
        names: names of the files in the folder.

    Raises:
        FastshardError: ``FS514``.
    """
    own = set(item.files.values())
    lone = next((n for n in names if n not in own and (m := _RANK_FILE.match(n)) and m[1] == _MODEL), None)
    if lone is None:
        return
    raise FastshardError.of(
        codes.UNSUPPORTED,
        f"{METADATA} does not describe item {_MODEL!r}, whose files exist",
        file=metadata.path,
        expected=f"an item {_MODEL!r}, for {lone}",
        got=some(sorted(metadata.items), _MOST_NAMED),
        help=f"save {_MODEL!r} with a resharder (ItemSpec), which makes it write the shapes, or read another "
        "item",
        run=[f"--prefix {item.name}"],
    )


def _look_into(declaring: _Declaring, rank: int) -> None:
    """Record the tensors of a rank's file, and the boxes that its DTensors state."""
    file = declaring.found.seen.files[rank]
    if not declaring.contents.readable(file):
        return
    listed = declaring.contents.tensors(file)
    declaring.numbers[rank] = {".".join(tensor["path"]): n for n, tensor in enumerate(listed)}
    declaring.paths |= {".".join(tensor["path"]): tensor["path"] for tensor in listed}
    record = declaring.contents.distributed(file)
    boxes = declaring.own_boxes.setdefault(rank, {})
    for part in record["parts"]:
        name = ".".join(part["path"])
        if "placements" not in part:
            # A ShardedTensor states its shards; torch_checkpointing does not describe one.
            shards = part.get("shards", [])
            boxes[name] = (shards[0]["lo"], shards[0]["size"]) if len(shards) == 1 else None
            continue
        try:
            boxes[name] = box(part["shape"], record["meshes"][part["mesh"]], part)
        except Unreadable as why:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"a DTensor whose placement is not supported: {why}",
                file=declaring.path(rank),
                rank=f"rank {rank}",
                tensor=name,
                help="redistribute it to Shard or Replicate before saving",
            ) from None
    own = {mesh["rank"] for mesh in record["meshes"]} - {None, rank}
    if own:
        # Nothing of it is placed: that its boxes are another rank's is said once.
        del declaring.numbers[rank]
        declaring.report(
            Finding.of(
                codes.RENAMED,
                "according to its tensors, the file was saved by another rank",
                file=declaring.path(rank),
                rank=f"rank {rank}",
                expected=f"rank {rank}",
                got=", ".join(f"rank {n}" for n in sorted(n for n in own if n is not None)),
                help="copy the file of this rank from the node that wrote it",
            )
        )


def _place(declaring: _Declaring, entry: Entry) -> None:
    """Place the ranks' parts of a tensor, after comparing them with the statements in each file."""
    seen = declaring.found.seen
    for number, division in enumerate(entry.divisions):
        while len(declaring.boxes) <= number:
            declaring.boxes.append(Boxes())
        boxes = declaring.boxes[number]
        boxes.state(entry.name, list(entry.shape))
        unread = False
        holders = 0
        for rank, bounds in division.boxes.items():
            if rank not in seen.files or rank not in declaring.numbers:
                unread = True
                continue
            tensor = declaring.numbers[rank].get(entry.name)
            if tensor is None:
                if bounds is not None and not division.is_plain:
                    declaring.report(_absent(declaring, rank, entry, bounds))
                continue
            if bounds is not None and _agrees(declaring, rank, entry, bounds, tensor):
                holders += 1
                if 0 not in bounds[1] or 0 in entry.shape:
                    boxes.add(entry.name, *bounds, seen.files[rank], tensor)
        if division.is_plain and not holders and not unread and not declaring.is_broken:
            declaring.report(_absent(declaring, next(iter(division.boxes)), entry, ([], list(entry.shape))))


def _agrees(declaring: _Declaring, rank: int, entry: Entry, bounds: Bounds, tensor: int) -> bool:
    """Compare a stored tensor with its box in the metadata, and report differences."""
    stored = declaring.contents.tensors(declaring.found.seen.files[rank])[tensor]
    lo, size = bounds
    own = declaring.own_boxes[rank].get(entry.name, bounds)
    where = {"file": declaring.path(rank), "rank": f"rank {rank}", "tensor": entry.name}
    help = f"copy {METADATA} and the files of all ranks from one save; these are from different saves"
    if stored["shape"] != size:
        declaring.report(
            Finding.of(
                codes.SHAPE,
                "this rank's shard has the wrong shape",
                **where,
                expected=f"{size}, from {lo}, by {METADATA}",
                got=str(stored["shape"]),
                help=help,
            )
        )
        return False
    if own is None or (list(own[0]), list(own[1])) != (list(lo), list(size)):
        declaring.report(
            Finding.of(
                codes.SHAPE,
                f"the file and {METADATA} place this rank's shard differently",
                **where,
                expected=f"{size}, from {lo}, by {METADATA}",
                got="none" if own is None else f"{own[1]}, from {own[0]}",
                help=help,
            )
        )
        return False
    if entry.dtype and stored["torch_dtype"] != entry.dtype:
        declaring.report(
            Finding.of(
                codes.DTYPE,
                "this rank's shard has the wrong dtype",
                **where,
                expected=f"{entry.dtype} by {METADATA}",
                got=stored["torch_dtype"],
                help=help,
            )
        )
        return False
    return True


def _place_unlisted(declaring: _Declaring) -> None:
    """Declare full tensors that the metadata does not name, and report parts of tensors.

    The metadata lists plain tensors only for the first rank of the run, so it omits those that only other
    ranks have. source: metadata_manager.py, ``_compact``
    """
    listed = {entry.name for entry in declaring.found.seen.item.entries}
    for rank, numbers in declaring.numbers.items():
        file = declaring.found.seen.files[rank]
        for name, number in numbers.items():
            if name in listed:
                continue
            shape = declaring.contents.tensors(file)[number]["shape"]
            may_be_part = declaring.found.files[file].name.endswith(".safetensors")
            if may_be_part or name in declaring.own_boxes[rank]:
                declaring.report(
                    Finding.of(
                        codes.UNKNOWN_TENSOR,
                        f"{METADATA} does not state which part of a tensor this is",
                        severity="error",
                        file=declaring.path(rank),
                        rank=f"rank {rank}",
                        tensor=name,
                        got=str(shape),
                        help=f"copy {METADATA} again from the node that ran rank 0: it is from another save",
                    )
                )
                continue
            if (before := declaring.boxes[0].state(name, shape)) != shape:
                declaring.report(
                    Finding.of(
                        codes.SHAPE,
                        "ranks hold the tensor in different shapes",
                        file=declaring.path(rank),
                        rank=f"rank {rank}",
                        tensor=name,
                        expected=f"{before}, as on other ranks",
                        got=str(shape),
                        help="copy the files of all ranks from one save; these are from different saves",
                    )
                )
                continue
            declaring.boxes[0].add(name, [0] * len(shape), shape, file, number)


def _assemble(declaring: _Declaring) -> list[Assembled]:
    """Return the tensors, and other ranks' copies for comparison; report overlapping parts."""
    source, seen = declaring.source, declaring.found.seen
    found: list[Assembled] = []
    unread = {*seen.lacking, *(seen.files.keys() - declaring.numbers.keys())}
    for boxes in declaring.boxes:
        overlaps = list(boxes.overlapping())
        for name, lo, size, file in overlaps if not declaring.is_broken else ():
            declaring.report(
                Finding.of(
                    codes.OVERLAP,
                    "two ranks hold overlapping parts of the tensor",
                    file=declaring.found.files[file].path,
                    tensor=name,
                    expected="parts that are equal or do not overlap",
                    got=f"{size} from {lo}, which overlaps other ranks",
                    help=f"copy {METADATA} and all files from one save; these are from different saves",
                )
            )
        if not overlaps:
            found += boxes.assembled(holes=not (declaring.is_broken or unread))
    whole = {name for group in found for name, *_ in group.tensors}
    for entry in seen.item.entries:
        ranks = {rank for division in entry.divisions for rank in division.boxes} & unread
        if entry.name not in whole and ranks:
            rank = min(ranks)
            source.index.lost[entry.name] = seen.lacking.get(rank) or declaring.path(rank)
            source.index.lost_elements[entry.name] = math.prod(entry.shape)
    if len(found) == 1:
        return found
    return [replace(group, coords={"replica": n}) for n, group in enumerate(found)]


def _absent(declaring: _Declaring, rank: int, entry: Entry, bounds: Bounds) -> Finding:
    return Finding.of(
        codes.MISSING_TENSOR,
        f"named in {METADATA}, but missing in its file",
        file=declaring.path(rank),
        rank=f"rank {rank}",
        tensor=entry.name,
        expected=f"{bounds[1]} of {list(entry.shape)}",
        help="copy the file of this rank again: it is from another save",
    )


def _not_read(found: Found[ItemFiles], others: Sequence[str]) -> Finding:
    return Finding.of(
        codes.IGNORED,
        f"item {found.seen.item.name!r} is read; the other items ({some(others, _MOST_NAMED)}) are left out",
        severity="note",
        file=f"{found.folder}/{METADATA}" if found.folder else METADATA,
        count=len(others),
    )
