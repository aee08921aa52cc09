"""FSDP rank files: ``model_world_size_N_rank_R.pt`` of verl and SkyRL, those of accelerate, other
``*rank_R.pt`` files, and ``model_R.pt`` of torch_checkpointing without ``metadata.pkl``.

Each rank saves its own state dict. A DTensor states the mesh, the rank's place in it, and the placements. A
ShardedTensor states its shards and their offsets. Both state the shape of the full tensor, so the adapter can
check that the boxes tile it, and can detect a file under another rank's name. Plain tensors are the same on
every rank, and are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from math import prod

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...layouts.declaration import Assembled, Binding, Source
from .. import hf_config, model_prefix
from ..base import Contents, Found, Options
from ..box_pieces import Boxes
from ..index_files import read_json
from . import find_files, flat_params, optim
from .find_files import FsdpFiles
from .rank_files import Ranks

#: Maximum number of tensors named in findings of one kind.
_MOST_NAMED = 8


class FsdpRanks:
    """Directories with a separate file for each FSDP rank."""

    def __init__(self, name: str = "fsdp_ranks", *, any_name: bool = False) -> None:
        self.name = name
        self._any_name = any_name

    def detect(self, listing: Listing, options: Options) -> Found[FsdpFiles] | None:
        """Look for files that are numbered by rank."""
        save = find_files.saved(listing, options, any_name=self._any_name)
        if save is None:
            return None
        order: list[File] = [*save.model.values(), *save.optim.values(), *save.extra.values()]
        numbers = itertools.count()
        seen = FsdpFiles(
            model={rank: next(numbers) for rank in save.model},
            optim={rank: next(numbers) for rank in save.optim},
            extra={rank: next(numbers) for rank in save.extra},
            world=save.world,
        )
        return Found(
            self,
            "FSDP rank files",
            order,
            seen,
            save.folder,
            save.findings,
            step=save.step,
            reads_parts=True,
        )

    def declare(
        self, found: Found[FsdpFiles], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Declare every tensor as the boxes that ranks store."""
        source = Source(found.framework, step=found.step, binding=Binding(pass_unknown=True))
        kinds = (found.seen.model, found.seen.optim, found.seen.extra)
        source.files.ranks = {file: {"rank": rank} for files in kinds for rank, file in files.items()}
        source.binding.vocab_size = options.vocab_size
        ranks = Ranks(found, contents, dict(found.seen.model))
        if not ranks.parameters() and any(find_files.is_item(file) for file in found.files):
            raise _no_ranks(ranks)
        source.findings += ranks.findings
        folder = found.folder
        source.findings += _check_world_size(listing, folder, found.seen.world or len(ranks.files))
        config, path = hf_config.config_of(listing, folder, options)
        is_flat = flat_params.is_flat(ranks.distributed)
        shapes = _flat(source, ranks) if is_flat else _boxes(source, ranks, self._any_name)
        model_prefix.recognise(source, shapes, config, options.prefix, None if is_flat else ranks.paths())
        if config is not None:
            hf_config.describe(source, listing, config, path, shapes, outer=source.names.prefix)
        if is_flat:
            shapes = _shaped(source, shapes)
        if found.seen.optim:
            optim.attach(source, contents, ranks, Ranks(found, contents, dict(found.seen.optim)), shapes)
        if found.seen.extra:
            optim.trainer(source, contents, ranks, Ranks(found, contents, dict(found.seen.extra)))
        return source


def _boxes(source: Source, ranks: Ranks, any_name: bool) -> dict[str, list[int]]:
    """Declare the tensors that ranks store as boxes, and return their shapes in their order."""
    if any_name and not ranks.parameters() and len(ranks.files) > 1:
        source.findings.append(_no_parts(ranks))
    boxes = Boxes()
    for rank in ranks.files:
        _collect(source, ranks, rank, boxes)
    overlaps = [_overlap(ranks, *one) for one in boxes.overlapping()]
    # What a file takes with it that is missing, or another's, is said once, by its name.
    source.findings += [] if ranks.broken else overlaps[:_MOST_NAMED]
    if not overlaps:
        source.files.assembled += boxes.assembled(holes=not ranks.broken)
    return {name: boxes.shape(name) for name in boxes.names()}


def _flat(source: Source, ranks: Ranks) -> dict[str, list[int]]:
    """Declare the pieces of flat parameters in order. They are vectors until a config gives their shapes."""
    ranges_by_name, whole = flat_params.pieces(
        ranks.files, {rank: ranks.contents.tensors(file) for rank, file in ranks.files.items()}
    )
    tensors = [(name, [sum(n for n, *_ in ranges)], ranges) for name, ranges in ranges_by_name.items()]
    if not ranks.broken:
        source.files.assembled.append(Assembled(0, {}, None, None, tensors, frozen=True))
    boxes = Boxes()
    for rank in ranks.files:
        _collect(source, ranks, rank, boxes, only=whole)
    source.files.assembled += boxes.assembled()
    return {name: shape for name, shape, _ in tensors} | {name: boxes.shape(name) for name in boxes.names()}


def _shaped(source: Source, shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Set the shapes of vectors according to the model's table.

    Raises:
        FastshardError: ``FS209`` if a shape is unknown.
    """
    table = source.binding.usual_table if source.binding.table is None else source.binding.table
    known = dict(shapes)
    for group in source.files.assembled[:1]:
        for n, (name, shape, ranges) in enumerate(group.tensors):
            table_shape = table.shape(name, source.binding.axes) if table is not None else None
            if table_shape is None or None in table_shape:
                raise FastshardError.of(
                    codes.FACT_UNKNOWN,
                    "the shape of a parameter that is saved flat (LOCAL_STATE_DICT) is not stated",
                    tensor=name,
                    got=f"{shape[0]} elements",
                    help="pass the config.json of the model, whose family must have a layout table",
                    run=["--config FILE"],
                )
            whole = [d for d in table_shape if d is not None]
            if prod(whole) != shape[0]:
                raise FastshardError.of(
                    codes.SHAPE,
                    "a flat parameter has the wrong number of elements",
                    tensor=name,
                    expected=f"{prod(whole)}, as {whole} by the config",
                    got=str(shape[0]),
                    help="copy the missing rank's file, or pass this model's config",
                    run=["--config FILE"],
                )
            group.tensors[n] = (name, whole, ranges)
            known[name] = whole
    return known


def _check_world_size(listing: Listing, folder: str, ranks: int) -> list[Finding]:
    """Check the number of ranks against ``fsdp_config.json`` next to the files. source: verl, SkyRL"""
    file = listing.find(f"{folder}/fsdp_config.json" if folder else "fsdp_config.json")
    config = read_json(listing, file) if file is not None else None
    world = config.get("world_size") if isinstance(config, dict) else None
    if file is None or not isinstance(world, int) or world == ranks:
        return []
    return [
        Finding.of(
            codes.RANKS_DISAGREE,
            "fsdp_config.json and the files disagree on the number of ranks",
            file=file.path,
            expected=f"{world} files, one for each rank",
            got=str(ranks),
            help="copy all files of this step again: some are from another run, or missing",
        )
    ]


def _collect(
    source: Source, ranks: Ranks, rank: int, boxes: Boxes, only: Collection[str] | None = None
) -> None:
    """Collect the contents of one rank's file, or only those of its tensors that have the given names."""
    file = ranks.files[rank]
    if not ranks.contents.readable(file):
        return
    record = ranks.distributed[rank]
    listed = ranks.contents.tensors(file)
    parts = {".".join(part["path"]): part for part in record["parts"]}
    parts = {name: part for name, part in parts.items() if only is None or name in only}
    count = 0
    for name, part in parts.items():
        if (before := boxes.state(name, part["shape"])) != part["shape"]:
            ranks.broken, count = True, count + 1
            if count <= _MOST_NAMED:
                source.findings.append(_other_shape(ranks, rank, name, before, part["shape"]))
            continue
        for lo, size, number in ranks.boxes_of(rank, part):
            if listed[number]["shape"] != size:
                ranks.broken, count = True, count + 1
                if count <= _MOST_NAMED:
                    source.findings.append(_other_part(ranks, rank, name, lo, size, listed[number]["shape"]))
            elif 0 not in size or 0 in part["shape"]:
                boxes.add(name, lo, size, file, number)
    for number, tensor in enumerate(listed):
        name = ".".join(tensor["path"])
        if name not in parts and (only is None or name in only):
            shape = tensor["shape"]
            if (before := boxes.state(name, shape)) != shape:
                ranks.broken, count = True, count + 1
                if count <= _MOST_NAMED:
                    source.findings.append(_other_shape(ranks, rank, name, before, shape))
                continue
            boxes.add(name, [0] * len(shape), shape, file, number)


def _other_shape(ranks: Ranks, rank: int, name: str, expected: list[int], got: list[int]) -> Finding:
    return Finding.of(
        codes.SHAPE,
        "this rank states another shape of the full tensor",
        file=ranks.path(rank),
        rank=ranks.label(rank),
        tensor=name,
        expected=f"{expected}, as on other ranks",
        got=str(got),
        help="copy the file of this rank from the node that ran it: this one is from another run or model",
    )


def _other_part(
    ranks: Ranks, rank: int, name: str, lo: list[int], size: list[int], got: list[int]
) -> Finding:
    return Finding.of(
        codes.SHAPE,
        "this rank's shard has the wrong shape",
        file=ranks.path(rank),
        rank=ranks.label(rank),
        tensor=name,
        expected=f"{size}, from {lo}, by its mesh and placements",
        got=str(got),
        help="report this, unless the file was changed after it was saved: fastshard does not know this way "
        "to divide tensors",
    )


def _overlap(ranks: Ranks, name: str, lo: list[int], size: list[int], file: int) -> Finding:
    return Finding.of(
        codes.OVERLAP,
        "two ranks hold overlapping parts of the tensor",
        file=ranks.found.files[file].path,
        tensor=name,
        expected="parts that are equal or do not overlap",
        got=f"{size} from {lo}, which overlaps other ranks",
        help="copy all files from one step of one run; these are from different runs",
    )


def _no_ranks(ranks: Ranks) -> FastshardError:
    """Build the error for a trainer's numbered files that contain no parts; their numbers may be epochs."""
    return FastshardError.of(
        codes.NOT_A_CHECKPOINT,
        "unknown checkpoint format: numbered files that hold no parts of tensors",
        file=ranks.path(next(iter(ranks.files))),
        got=f"{len(ranks.files)} files",
        help="name the file itself: fastshard reads the tensors under its keys",
    )


def _no_parts(ranks: Ranks) -> Finding:
    return Finding.of(
        codes.NOT_PROVABLE,
        "no rank's file states whether its tensors are parts: they are read as copies of the full tensor, "
        "and compared",
        severity="warning",
        file=ranks.path(next(iter(ranks.files))),
        help="describe in your own layout how they are divided, if they are slices",
        run=["--layout FILE.toml"],
    )
