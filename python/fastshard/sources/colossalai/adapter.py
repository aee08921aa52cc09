"""ColossalAI's sharded saves (``model-stage-0000S-shard-0000N.*`` or ``model-0000N.*``), and numbered
optimizer shards.

Saves always gather tensor-parallel shards, and pipeline stages write separate files. The merged index
includes only those stages' indexes that are on rank 0's disk, so a stage on another disk is missing without
notice. The adapter therefore counts stages by file names, and layers by the config.

An MoE model has files ``model-stage-0000S-0000E-shard-0000N.*`` for each expert-parallel rank E. They contain
the rank's experts, numbered among all experts, and a copy of all other tensors. The index names one of the
copies.
source: colossalai/checkpoint_io/{hybrid_parallel_checkpoint_io,moe_checkpoint,index_file,utils}.py (0.4.5 to
    0.5.0)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

from ... import _core
from ...common import codes
from ...common.errors import Finding
from ...common.listing import File, Listing
from ...common.ranks import format_rank
from ...common.regex import compile_when_used
from ...layouts import tables
from ...layouts.declaration import Assembled, Binding, Description, Source, Unit
from ...models import huggingface
from .. import hf_config
from ..base import Contents, Found, Options, view_of
from ..choose_step import Chosen, folder_of
from ..index_files import read_json
from ..step_names import is_step
from . import optim as colossalai_optim
from .index import PARTIAL, coords_of, join, read_indexes
from .missing_shards import (
    SHARD,
    not_named,
    shard_missing,
    stage_missing,
    stage_not_merged,
    unfinished,
    writer,
    writers_missing,
)
from .save_files import ColossalFiles

_INDEX = compile_when_used(
    r"^(?:model\.(safetensors)|pytorch_model\.(bin))\.index(?:\.[^.]+?)?(-stage-\d{5}(?:-\d{5})?)?\.json$"
)
_LAYER = compile_when_used(r"\.(?:layers|h)\.(\d+)\.")
_EXPERT = compile_when_used(r"\.experts\.(\d+)\.")
#: Config keys for the number of experts. source: transformers models/mixtral, deepseek_v3, qwen3_moe
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
#: By name: file, number of the tensor in it, and shape, for each directory that has the tensor.
_Stored = dict[str, list[tuple[int, int, list[int]]]]


class ColossalAI:
    """Directories written by ``booster.save_model(shard=True)``, with or without optimizer files."""

    name = "colossalai"

    def detect(self, listing: Listing, options: Options) -> Found[ColossalFiles] | None:
        """Look for numbered shards whose names do not state the number of shards."""
        choice = None if listing.single else _folder(listing, options)
        if choice is None:
            return None
        folder, chosen = choice
        findings: list[Finding] = [] if chosen is None else list(chosen.findings)
        copies: dict[str, list[File]] = {}
        for file in listing.within(folder):
            copies.setdefault(file.name, []).append(file)
        merged = [f for f in listing.within(folder) if (m := _INDEX.match(f.name)) and not m[3]]
        partial = [f for f in listing.within(join(folder, PARTIAL)) if _INDEX.match(f.name)]
        kind = _kind([*merged, *partial], copies)
        indexes = [f for f in [*merged, *partial] if (m := _INDEX.match(f.name)) and kind in m.groups()]
        weight_map = read_indexes(listing, indexes, findings)
        if not any(f in merged for f in indexes):
            findings.append(unfinished(folder, partial, options))
        named = list(dict.fromkeys(weight_map.values()))
        others = [n for n in sorted(copies) if (m := SHARD.match(n)) and m["kind"] == kind and n not in named]
        indexed = {writer(name) for name in named} - {None}
        whole = [n for n in others if not weight_map or (writer(n) is not None and writer(n) not in indexed)]
        apart = set(whole)
        unnamed = [copies[name] for name in others if name not in apart]
        findings += [not_named(shard_copies[0]) for shard_copies in unnamed]
        findings += [stage_not_merged(folder, whole)] if weight_map and whole else []
        stem = next((n.split("-stage-")[0] for n in [*named, *whole] if "-stage-" in n), "model")
        written = {by for name in [*named, *whole] if (by := writer(name)) is not None}
        findings += writers_missing(folder, stem, kind, written)
        have = {name: copies.get(name) or _found_apart(listing, folder, name) for name in [*named, *whole]}
        findings += [shard_missing(folder, name) for name, shard_copies in have.items() if not shard_copies]
        files = [file for shard_copies in have.values() for file in shard_copies]
        numbers = iter(range(len(files)))
        shards = [
            (name, tuple(islice(numbers, len(shard_copies))))
            for name, shard_copies in have.items()
            if shard_copies
        ]
        optim = colossalai_optim.detect(listing, folder, len(files))
        files += [] if optim is None else optim[1]
        seen = ColossalFiles(
            shards=tuple(shards),
            weight_map=weight_map,
            # An index that was not merged of several has the names in the model's own order.
            order=tuple(weight_map) if len(indexes) == 1 and not written else (),
            whole=frozenset(whole),
            stages=frozenset(stage for stage, _ in written),
            experts=max((ep for _, ep in written), default=0),
            stem=stem,
            kind=kind,
            index=indexes[0] if len(indexes) == 1 else None,
            unnamed=tuple(file for shard_copies in unnamed for file in shard_copies),
            optim=None if optim is None else optim[0],
        )
        step = chosen.name if chosen is not None and is_step(chosen.name) else None
        return Found(self, "ColossalAI", files, seen, folder, findings, step=step)

    def declare(
        self, found: Found[ColossalFiles], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Declare full tensors under Hugging Face names, and combine slices from several directories."""
        saved = found.seen
        source = Source(found.framework, step=found.step, binding=Binding(pass_unknown=True))
        source.model = Description(dialect=huggingface.DIALECT)
        source.binding.vocab_size = options.vocab_size
        config, path = hf_config.config_of(listing, found.folder, options)
        hf_config.describe(source, listing, config, path, contents.names())
        stored: _Stored = {}
        seen: set[tuple[str, int]] = set()
        expected: dict[str, int] = {}
        for name, copies in saved.shards:
            expected |= {t: copies[0] for t, file in saved.weight_map.items() if file == name}
            for i in copies:
                for number, tensor in enumerate(contents.tensors(i) if contents.readable(i) else []):
                    key = ".".join(tensor["path"])
                    # What all expert-parallel ranks have is one tensor of their directory.
                    if (key, found.files[i].root) not in seen or not saved.experts:
                        stored.setdefault(key, []).append((i, number, tensor["shape"]))
                    seen.add((key, found.files[i].root))
                    if name in saved.whole:
                        expected.setdefault(key, copies[0])
        source.index.names = set(expected)
        source.index.weight_map = expected
        source.index.path = None if saved.index is None else saved.index.path
        source.index.unnamed = saved.unnamed
        # An index tells of names, not of shapes: a rank's slice of the vocabulary may have been saved as the
        # whole.
        source.index.is_provable = source.binding.layout is not None
        source.findings += self._missing_layers(found, config, stored)
        source.findings += self._missing_experts(found, config, stored)
        # Where files are called for by their names alone, nothing tells what they held.
        here = {name for name, _ in saved.shards}
        absent = {file for file in saved.weight_map.values() if file not in here}
        source.index.lost = {
            name: join(found.folder, file) for name, file in saved.weight_map.items() if file in absent
        }
        called_for = sum(f.code == codes.MISSING_FILE for f in (*found.findings, *source.findings))
        unread = any(not contents.readable(i) for name, of in saved.shards if name in saved.whole for i in of)
        source.index.is_listed = bool(saved.weight_map) and called_for == len(absent) and not unread
        source.findings += _total_size(listing, saved.index)
        whole = _Whole(source)
        together = self._slices(source, found, stored, whole)
        padded = _padded(source, stored, whole)
        source.findings += _copied(
            listing, found, contents, {name: stored[name] for name in sorted(together)}
        )
        for name, i in ((name, i) for name, copies in saved.shards for i in copies):
            only = [".".join(t["path"]) for t in contents.tensors(i)] if contents.readable(i) else []
            only = [name for name in only if name not in together | padded]
            match = SHARD.match(name)
            ep = int(match["ep"]) - 1 if match and match["ep"] else None
            rank = (
                f"tp {found.files[i].root}"
                if together
                else None
                if ep is None
                else format_rank(coords_of(match))
            )
            source.files.units.append(
                Unit(file=i, only=only, rank=rank, coords={} if ep is None else {"ep": ep})
            )
        shapes = {name: whole(name) or places[0][2] for name, places in stored.items()}
        names = enumerate(
            SHARD.match(file.name) or colossalai_optim.SHARD.match(file.name) for file in found.files
        )
        source.files.ranks = {i: coords for i, match in names if (coords := coords_of(match))}
        colossalai_optim.declare(source, found, contents, shapes)
        # The optimizer's index has numbers, not the names of what its files hold.
        for i in range(sum(len(copies) for _, copies in saved.shards), len(found.files)):
            for name in contents.listed(i) if contents.readable(i) else ():
                expected.setdefault(name, i)
        return source

    @staticmethod
    def _missing_layers(
        found: Found[ColossalFiles], config: dict[str, Any] | None, stored: _Stored
    ) -> list[Finding]:
        """Report missing stages after the last existing one, based on the number of layers."""
        saved = found.seen
        count = (config or {}).get("num_hidden_layers")
        layers = {int(m[1]) for name in [*stored, *saved.weight_map] if (m := _LAYER.search(name))}
        if not saved.stages or not isinstance(count, int) or not layers or max(layers) + 1 >= count:
            return []
        why = f"layers {max(layers) + 1} to {count - 1}, by num_hidden_layers {count}"
        stage, ep = max(saved.stages) + 1, 1 if saved.experts else 0
        return [stage_missing(found.folder, saved.stem, stage, saved.kind, why, ep)]

    @staticmethod
    def _missing_experts(
        found: Found[ColossalFiles], config: dict[str, Any] | None, stored: _Stored
    ) -> list[Finding]:
        """Report missing expert-parallel ranks after the last one, based on the number of experts."""
        saved = found.seen
        counts = [n for key in _EXPERTS if isinstance(n := (config or {}).get(key), int)]
        experts = {int(m[1]) for name in [*stored, *saved.weight_map] if (m := _EXPERT.search(name))}
        if not saved.experts or not counts or not experts or max(experts) + 1 >= counts[0]:
            return []
        why = f"experts {max(experts) + 1} to {counts[0] - 1} of {counts[0]}, by the config"
        ep = saved.experts + 1
        return [
            stage_missing(found.folder, saved.stem, stage, saved.kind, why, ep)
            for stage in sorted(saved.stages)
        ]

    @staticmethod
    def _slices(source: Source, found: Found[ColossalFiles], stored: _Stored, whole: _Whole) -> set[str]:
        """Combine tensors from each directory's slice, in the order of the directories."""
        slices: dict[str, int] = {}
        shards: dict[str, int] = {}
        rows: dict[str, int] = {}
        for name, places in stored.items():
            shape, want = places[0][2], whole(name)
            if want is None or len(shape) != len(want):
                continue
            differ = [d for d, (n, w) in enumerate(zip(shape, want, strict=True)) if n != w]
            if len(differ) != 1 or not 0 < shape[differ[0]] < want[differ[0]]:
                continue
            rows[name] = want[0]
            shards[name] = -(-want[differ[0]] // shape[differ[0]])
            if len(places) == shards[name] and all(p[2] == shape for p in places):
                slices[name] = differ[0]
        if not slices:
            given = max((len(stored[name]) for name in shards), default=1)
            if shards and given > 1:
                name = next(iter(shards))
                source.findings.append(
                    Finding.of(
                        codes.MISSING_FILE,
                        "slices of only some tensor-parallel ranks",
                        tensor=name,
                        expected=f"the directories of {shards[name]} ranks, in order",
                        got=f"{given} directories",
                        help="name the directory that each tensor-parallel rank saved, rank 0 first",
                    )
                )
            return set()
        padded = [n for n in slices if whole.vocabulary(n) and len(stored[n]) * stored[n][0][2][0] != rows[n]]
        # Of tensors that are whole elsewhere (or whose moments are) the padding is cut here, else by the
        # plan.
        vocabulary = [name for name in stored if whole.vocabulary(name)]
        trimmed = set(vocabulary) != set(padded) or bool(found.seen.optim)
        if padded and not trimmed:
            source.binding.vocab_size = source.binding.vocab_size or source.binding.axes.get("V")
            source.binding.axes.pop("P", None)
        boxes: list[Any] = []
        for name, d in slices.items():
            places, size = stored[name], stored[name][0][2]
            if name in padded and trimmed:
                row = math.prod(size[1:])
                left, ranges = rows[name] * row, []
                for file, number, _ in places:
                    ranges.append((min(left, size[0] * row), file, number, 0))
                    left -= ranges[-1][0]
                boxes.append((name, [rows[name], *size[1:]], ranges))
                continue
            shape = [n * len(places) if i == d else n for i, n in enumerate(size)]
            at = [[k * size[d] if i == d else 0 for i in range(len(size))] for k in range(len(places))]
            boxes.append((name, shape, [(lo, size, f, n) for lo, (f, n, _) in zip(at, places, strict=True)]))
        source.files.assembled.append(Assembled(0, {}, None, None, boxes, frozen=True))
        source.findings.append(
            Finding.of(
                codes.NOT_PROVABLE,
                f"{len(slices)} tensors were saved as slices and are merged in the order of the "
                "directories: nothing in the files states the ranks",
                severity="warning",
                tensor=next(iter(slices)),
                file=found.files[stored[next(iter(slices))][0][0]].path,
                help="name the directories in rank order, from tensor-parallel rank 0",
            )
        )
        return set(slices)


def _folder(listing: Listing, options: Options) -> tuple[str, Chosen | None] | None:
    """Find the folder of the model's shards."""
    folders = []
    for folder in listing.folders():
        parent = folder.removesuffix(PARTIAL).rstrip("/")
        partial = folder != parent and any(_INDEX.match(f.name) for f in listing.within(folder))
        if partial or any(SHARD.match(f.name) for f in listing.within(folder)):
            folders.append(parent if partial else folder)
    folders = list(dict.fromkeys(folders))
    if not folders:
        return None
    if folders == [""] and options.step is None:
        return "", None
    places = [(f.root, folder) for folder in folders for f in listing.files if _in(f.folder, folder)]
    folder, chosen, _ = folder_of(listing, places, options)
    return folder, chosen


def _in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _kind(indexes: list[File], names: Iterable[str]) -> str:
    """Return the format to read: if a save has both, the one that transformers prefers."""
    kinds = {m[1] or m[2] for f in indexes if (m := _INDEX.match(f.name))}
    kinds = kinds or {m["kind"] for name in names if (m := SHARD.match(name))}
    return "safetensors" if "safetensors" in kinds else "bin"


def _found_apart(listing: Listing, folder: str, name: str) -> list[File]:
    """Find a shard by the path that the index states."""
    file = listing.find(join(folder, name))
    return [] if file is None else [file]


def _total_size(listing: Listing, index: File | None) -> list[Finding]:
    """Report a total_size in MB, as ColossalAI states it, instead of bytes."""
    metadata = read_json(listing, index).get("metadata") if index else None
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if index is None or not isinstance(total_size, float):
        return []
    message = "total_size of the index is in MB, as ColossalAI counts it, not in bytes"
    return [Finding.of(codes.UNEXPECTED_FILE, message, severity="note", file=index.path, got=str(total_size))]


def _padded(source: Source, stored: _Stored, whole: _Whole) -> set[str]:
    """Declare only the first rows of tensors that have more rows than the config's vocabulary.

    MoE models are saved with a padded embedding.

    source: checkpoint_io/moe_checkpoint.py (_model_sharder gathers and does not unpad),
        shardformer/layer/embedding.py
    (VocabParallelEmbedding1D: padded to a multiple of 64 by default)
    """
    rows = source.binding.axes.get("V", 0)
    tensors: list[Any] = []
    for name, places in stored.items():
        file, number, shape = places[0]
        if len(places) == 1 and whole.vocabulary(name) and shape and shape[0] > rows > 0 == shape[0] % 64:
            taken = [rows, *shape[1:]]
            tensors.append((name, taken, [(math.prod(taken), file, number, 0)]))
            source.findings.append(
                Finding.of(
                    codes.IGNORED,
                    f"{shape[0] - rows} rows beyond vocab_size {rows} are padding, and are left out",
                    severity="note",
                    tensor=name,
                )
            )
    if tensors:
        source.files.assembled.append(Assembled(tensors[0][2][0][1], {}, None, None, tensors, frozen=True))
    return {name for name, *_ in tensors}


def _copied(
    listing: Listing,
    found: Found[ColossalFiles],
    contents: Contents,
    slices: _Stored,
) -> list[Finding]:
    """Report two ranks whose directories are the same, or have the same slice by torch's checksums."""
    findings: list[Finding] = []
    roots = [root.resolve() for root in listing.roots]
    twice = [i for i, root in enumerate(roots) if root in roots[:i]]
    if slices and twice:
        findings.append(
            Finding.of(
                codes.DUPLICATED_SHARD,
                f"directories {roots.index(roots[twice[0]])} and {twice[0]} are the same",
                file=str(listing.roots[twice[0]]),
                expected="one directory per tensor-parallel rank",
                got="the same directory twice",
                help="name the directory that each tensor-parallel rank saved, rank 0 first",
            )
        )
    for name, places in slices.items():
        seen: dict[tuple[Any, ...], int] = {}
        for rank, (file, number, _) in enumerate(places):
            tensor = contents.tensors(file)[number]
            crc, size = tensor.get("storage_crc32"), tensor["storage_bytes"]
            if crc is None or crc == _core.crc32_of_constant(b"\0", size):
                continue
            if (first := seen.setdefault(view_of(tensor), rank)) != rank:
                findings.append(
                    Finding.of(
                        codes.DUPLICATED_SHARD,
                        f"the same slice as in directory {first}: one was copied over the other",
                        file=found.files[file].path,
                        rank=f"tp {rank}",
                        tensor=name,
                        expected="another part of the tensor",
                        got="a copy, by the checksum and the position of its storage",
                        help="name the directory that each tensor-parallel rank saved, rank 0 first",
                    )
                )
    return findings


class _Whole:
    """Shapes of full tensors, according to the layout table and the config."""

    def __init__(self, source: Source) -> None:
        # Where query heads are not grouped the table fixes r.
        self._axes = {"r": 1, **source.binding.axes}
        self._table = tables.table(source.binding.layout) if source.binding.layout else None

    def __call__(self, name: str) -> list[int] | None:
        shape = self._table.shape(name, self._axes) if self._table else None
        return None if shape is None or None in shape else [n for n in shape if n is not None]

    def vocabulary(self, name: str) -> bool:
        """Return True for tensors with one row per token."""
        rule = self._table.rule_of(name) if self._table else None
        dimensions = rule.dimensions if rule else None
        return dimensions is not None and dimensions[:1] == ["V~P"]
