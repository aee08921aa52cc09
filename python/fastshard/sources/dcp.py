"""torch.distributed.checkpoint: ``.metadata`` and ``.distcp`` files, as FSDP, torchtitan and Megatron write them.

torch checks neither coverage nor checksums when it loads; both are checked here.
source: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from .. import _core, regular
from ..declared import Assembled, Source
from ..discover import File, Listing
from ..dtypes import TORCH_NAMES, item_size
from ..errors import FastshardError, Finding, from_core
from ..naming.dcp import METADATA, chunk_name
from . import dcp_optim, hf_names, nests
from .base import Contents, Found, Options, lacking, missing
from .indices import safe_relative
from .steps import folder_of

#: Metadata of a rank that saved for itself.
_OF_RANK = re.compile(r"^__(\d{1,9})\.metadata$")
#: safetensors name by torch dtype.
_SAFETENSORS = {theirs: name for name, theirs in TORCH_NAMES.items()}
#: Megatron-LM's tracker holds the iteration's number or ``release``.
_TRACKERS = ("latest_checkpointed_iteration.txt", "latest")


def one_of(listing: Listing, copies: list[File]) -> File:
    """One of several directories' files of the same name: they must be copies of each other.

    Raises:
        FastshardError: ``FS106`` if they are not.
    """
    paths = [listing.roots[file.root] / file.path for file in copies]
    for path, file in zip(paths[1:], copies[1:], strict=True):
        if not regular.same(paths[0], path):
            raise FastshardError.of(
                "FS106",
                "the directories given have different files of this name: they are of different saves",
                file=file.path,
                expected="one, or copies of it",
                got=f"{paths[0]}, {path}",
                help="give the directories of one save only",
            )
    return copies[0]


def _apart(stored: list[dict[str, Any]], path: str) -> None:
    """Records must not share bytes: torch writes one after another."""
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for entry in filter(lambda e: safe_relative(e["file"]), stored):
        ranges.setdefault(entry["file"], []).append(
            (entry["offset"], entry["offset"] + entry["len"], entry["name"])
        )
    for file, found in ranges.items():
        found.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(found):
            if start < end:
                raise FastshardError.of(
                    "FS206",
                    f"two records share bytes of {file}",
                    file=path,
                    tensor=second,
                    expected=f"a place of its own after {first}",
                    got=f"offset {start}, before {end}",
                    help="the metadata is damaged: take another step",
                )


def _as_records(described: dict[str, Any], path: str) -> None:
    """A record is a whole file of torch.save, and larger than its data. ``FileSystemWriter`` may be told to write one
    safetensors file for all (``SerializationFormat.SAFETENSORS``), and then notes places that are none: torch cannot read
    that either.
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
                "FS514",
                "the files are of the safetensors form, beside a .metadata that does not say where in them tensors lie",
                file=path,
                tensor=entry["name"],
                expected="records as torch.save writes them",
                got=f"{entry['len']} bytes, which its data take alone",
                help="save it with HuggingFaceStorageWriter, whose files are read, or with SerializationFormat.TORCH_SAVE",
            )


#: torch's own extension, by name and major version. source: torch/distributed/checkpoint/_extension.py
_ZSTD, _ZSTD_VERSION = "stream.zstd", "1"


def _known(transforms: list[str]) -> bool:
    """True if the core undoes what a record went through."""
    names = [(name, version.partition(".")[0]) for name, _, version in (t.partition("/") for t in transforms)]
    return names in ([], [(_ZSTD, _ZSTD_VERSION)])


#: What a module keeps beside its parameters (``get_extra_state``): Transformer Engine's FP8 scales and the like.
_EXTRA_STATE = re.compile(r"(^|\.)_extra_state(\.|$)")
#: Names that a finding gives at most.
_TOLD = 8
#: Records that are looked into at most: those that hold tensors are the largest.
_MAX_LOOKED_INTO = 256


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_TOLD]) + (f" and {len(names) - _TOLD} more" if len(names) > _TOLD else "")


@dataclass
class _Records(Source):
    """A source whose modules may have state of their own: a merge keeps what of it is tensors, no model has a place for it."""

    def weights_only(self, names_of: Callable[[int], Iterable[str]], optimizer: bool = False) -> Source:
        """As for every source, without modules' own state."""
        taken = super().weights_only(names_of, optimizer)
        own = [n for a in taken.assembled for n, *_ in a.tensors if _EXTRA_STATE.search(n)]
        if not own:
            return taken
        kept = [
            replace(a, tensors=[t for t in a.tensors if not _EXTRA_STATE.search(t[0])])
            for a in taken.assembled
        ]
        note = Finding.of(
            "FS212",
            f"{len(own)} tensors are modules' own state (_extra_state), such as FP8 scales of the run, and no weights",
            severity="note",
            tensor=own[0],
            got=_listed(own),
        )
        return replace(taken, assembled=kept, findings=[*taken.findings, note])


def _read(listing: Listing, file: File) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(_core.dcp_metadata(os.fspath(listing.roots[file.root] / file.path)))
    except _core.CoreError as error:
        raise from_core(error) from None
    return told


#: Records of a rank.
_RECORDS = re.compile(r"^__(\d{1,9})_\d+\.distcp$")


def _of_ranks(listing: Listing, ranks: dict[int, list[File]], findings: list[Finding]) -> dict[str, Any]:
    """What ranks that saved each for itself (``use_collectives=False``) say together, as one .metadata would.

    Each states the whole of its tensors, and its own chunks; what all hold alike each of them has saved.

    Raises:
        FastshardError: ``FS201`` or ``FS202`` if they disagree on a tensor.
    """
    tensors: dict[str, dict[str, Any]] = {}
    objects: dict[str, None] = {}
    stored: list[dict[str, Any]] = []
    chunks: set[tuple[Any, ...]] = set()
    version = None
    for rank in sorted(ranks):
        file = one_of(listing, ranks[rank])
        told = _read(listing, file)
        version = version or told["version"]
        objects |= dict.fromkeys(told["objects"])
        stored += told["stored"]
        for entry in told["tensors"]:
            first = tensors.setdefault(entry["name"], {**entry, "chunks": []})
            for code, key in (("FS201", "shape"), ("FS202", "dtype")):
                if first[key] != entry[key]:
                    raise FastshardError.of(
                        code,
                        f"{key} of a tensor, by the metadata of ranks",
                        file=file.path,
                        tensor=entry["name"],
                        rank=f"rank {rank}",
                        expected=str(first[key]),
                        got=str(entry[key]),
                        help="the ranks' files are of different saves: take them all from one",
                    )
            for lo, size in entry["chunks"]:
                if (entry["name"], *lo, *size) not in chunks:
                    chunks.add((entry["name"], *lo, *size))
                    first["chunks"].append([lo, size])
    folder = next(iter(ranks.values()))[0].folder
    for first_rank, last in lacking(ranks, 0, max(ranks)):
        name, end = (f"__{rank}{METADATA}" for rank in (first_rank, last))
        findings.append(
            missing(
                f"{folder}/{name}" if folder else name,
                f"rank {first_rank}",
                "metadata of a rank between others",
                f"copy {name} and its .distcp files from the node that ran this rank",
                upto=end if end != name else None,
            )
        )
    return {"tensors": list(tensors.values()), "objects": list(objects), "stored": stored, "version": version}


def _ranks_without(listing: Listing, folder: str, ranks: Collection[int]) -> list[Finding]:
    """Ranks whose records are there and whose metadata, which alone names them, is not."""
    there = {int(m[1]) for file in listing.within(folder) if (m := _RECORDS.match(file.name))}
    return [
        missing(
            f"{folder}/__{rank}{METADATA}" if folder else f"__{rank}{METADATA}",
            f"rank {rank}",
            f"the metadata of this rank: __{rank}_*.distcp is there",
            "copy it from the node that ran this rank",
        )
        for rank in sorted(there - set(ranks))
    ]


def _same_save(described: dict[str, Any], of_ranks: dict[str, Any], tracker: File) -> None:
    """Metadata of ranks beside one of all must say the same: else one of the two is of a save that was written over."""

    def places(told: dict[str, Any]) -> set[tuple[Any, ...]]:
        return {(e["name"], str(e["at"]), e["file"], e["offset"], e["len"]) for e in told["stored"]}

    if odd := places(of_ranks) - places(described):
        name, _, file, *_ = min(odd)
        raise FastshardError.of(
            "FS106",
            "a .metadata of all ranks, and those of single ranks, say different things of their files",
            file=tracker.path,
            tensor=name,
            expected="one save in a folder",
            got=f"{file}, by the metadata of its rank",
            help=f"remove {METADATA}, or __*{METADATA}: whichever is of the older save",
        )


#: name, shape, pieces of a tensor
_Tensors = list[tuple[str, list[int], list[Any]]]


class Framework(Protocol):
    """One that saves by way of torch.distributed.checkpoint, under names and with files of its own."""

    def take(
        self, source: Source, found: Found, listing: Listing, contents: Contents, tensors: _Tensors
    ) -> _Tensors | None:
        """Declares what its own files say of the model, and returns the weights among the tensors; None if it is not its save."""


class Dcp:
    """Directories with ``.metadata``."""

    name = "dcp"

    def __init__(self, frameworks: Sequence[Framework] = ()) -> None:
        self._frameworks = frameworks

    def detect(self, listing: Listing, options: Options) -> Found | None:
        """Looks for ``.metadata``; ``.distcp`` files without it were not committed."""
        if listing.single:
            return None
        metadata = [f for f in listing.files if f.name == METADATA]
        of_ranks = [(f, int(m[1])) for f in listing.files if (m := _OF_RANK.match(f.name))]
        loose = [f for f in listing.files if f.name.endswith(".distcp")]
        if not metadata and not of_ranks:
            if loose:
                raise FastshardError.of(
                    "FS104",
                    "there is no .metadata: the save was not finished, or was finished on another node",
                    file=f"{loose[0].folder}/{METADATA}" if loose[0].folder else METADATA,
                    expected="the file that the coordinator writes last",
                    got=f"{len(loose)} .distcp files",
                    help="copy .metadata from the node that ran rank 0, or name that node's directory as a further CKPT",
                )
            return None
        places = [(f.root, f.folder) for f in (*metadata, *(f for f, _ in of_ranks))]
        folder, chosen, within = folder_of(listing, places, options, _TRACKERS)
        ranks: dict[int, list[File]] = {}
        for file, rank in of_ranks:
            if file.folder == folder:
                ranks.setdefault(rank, []).append(file)
        trackers = [f for f in metadata if f.folder == folder]
        findings: list[Finding] = []
        if trackers:
            described = _read(listing, one_of(listing, trackers))
            if ranks:
                _same_save(described, _of_ranks(listing, ranks, []), trackers[0])
        else:
            described = _of_ranks(listing, ranks, findings)
            findings += _ranks_without(listing, folder, ranks)
        found = self._found(listing, folder, chosen.name or None, described)
        found.findings[:0] = [*chosen.findings, *findings]
        for other in within:
            found.findings.append(
                Finding.of("FS108", "a checkpoint within this one", file=f"{other}/{METADATA}")
            )
        return found

    def _found(self, listing: Listing, folder: str, step: str | None, described: dict[str, Any]) -> Found:
        findings: list[Finding] = []
        copies: dict[str, list[File]] = {}
        for one in listing.within(folder):
            copies.setdefault(one.name, []).append(one)
        stored = {entry["file"] for entry in described["stored"]} | {"common.pt"}
        inside = {
            name: one_of(listing, found) if name in stored else found[0] for name, found in copies.items()
        }
        files: list[File] = []
        index: dict[str, int] = {}
        records: dict[int, list[tuple[int, int, str, bool]]] = {}
        #: (name, first index of the chunk) -> (file, name of the record in it), several where ranks hold copies
        places: dict[tuple[str, tuple[int, ...]], list[tuple[int, str]]] = {}
        whole = {e["name"]: e["chunks"][0][0] for e in described["tensors"] if len(e["chunks"]) == 1}
        objects = set(described["objects"])
        values: dcp_optim.Objects = {}
        lacking: dict[str, list[str]] = {}
        _as_records(described, f"{folder}/{METADATA}" if folder else METADATA)
        _apart(described["stored"], f"{folder}/{METADATA}" if folder else METADATA)
        seen: dict[str, tuple[str, tuple[int, ...]]] = {}
        for entry in described["stored"]:
            name, file = entry["name"], entry["file"]
            if not safe_relative(file):
                findings.append(
                    Finding.of(
                        "FS603",
                        "a file name in .metadata leaves the directory",
                        file=f"{folder}/{METADATA}" if folder else METADATA,
                        tensor=name,
                        got=repr(file),
                        help="do not use this checkpoint: such metadata is made to read other files",
                    )
                )
                continue
            if file not in inside:
                lacking.setdefault(file, []).append(name)
                continue
            if name in objects:
                if _known(entry["transforms"]):
                    path = listing.roots[inside[file].root] / inside[file].path
                    values[name] = (path, entry["offset"], entry["len"])
                continue
            if not _known(entry["transforms"]):
                raise FastshardError.of(
                    "FS514",
                    "records that went through a storage extension other than torch's Zstandard: not read",
                    file=inside[file].path,
                    tensor=name,
                    expected=f"{_ZSTD}/{_ZSTD_VERSION}, or none",
                    got=", ".join(entry["transforms"]),
                    help="load it where the extension is known, and save it again without",
                )
            if file not in index:
                index[file] = len(files)
                files.append(inside[file])
            at = entry["at"] or []
            record = name if whole.get(name) == at or name in objects else chunk_name(name, at)
            if seen.setdefault(record, (name, tuple(at))) != (name, tuple(at)):
                raise FastshardError.of(
                    "FS106",
                    "two tensors of .metadata cannot be told apart by their names",
                    file=inside[file].path,
                    tensor=record,
                    help="save it again with names that do not end in brackets",
                )
            places.setdefault((name, tuple(at)), []).append((index[file], record))
            records.setdefault(index[file], []).append(
                (entry["offset"], entry["len"], record, bool(entry["transforms"]))
            )
        for file, names in lacking.items():
            place = f"{folder}/{file}" if folder else file
            rank = re.match(r"^__(\d+)_", file)
            findings.append(
                missing(
                    place,
                    f"rank {rank[1]}" if rank else None,
                    f"{len(names)} records by .metadata, e.g. of {names[0]}",
                    f"copy {file} from the node that ran this rank, or name that node's directory as a further CKPT",
                )
            )
        if "common.pt" in inside:
            files.append(inside["common.pt"])
        named = {entry["file"] for entry in described["stored"]}
        for name, file in sorted(inside.items()):
            if name.endswith(".distcp") and name not in named:
                findings.append(Finding.of("FS108", ".metadata does not name this file", file=file.path))
        notes = {
            "folder": folder,
            "described": described,
            "places": places,
            "objects": values,
            "lacking": set().union(*lacking.values(), ()),
        }
        return Found(self, "torch DCP", files, findings, step=step, notes=notes, records=records)

    def declare(self, found: Found, listing: Listing, contents: Contents, options: Options) -> Source:
        """Every tensor as boxes; the metadata states all shapes."""
        described, places = found.notes["described"], found.notes["places"]
        source: Source = _Records(
            found.framework, units=[], step=found.step, pass_unknown=True, provable=True
        )
        source.vocab_size = options.vocab_size
        source.values = {
            k: v
            for k, v in {"version": described["version"], "objects": described["objects"]}.items()
            if v not in (None, [])
        }
        by_record = {
            i: {t["path"][0]: n for n, t in enumerate(contents.tensors(i)) if len(t["path"]) == 1}
            for i in found.records
        }
        tensors: list[Any] = []
        #: Further copies of tensors that several ranks hold, to be compared.
        copies: list[list[Any]] = []
        for entry in described["tensors"]:
            name = entry["name"]
            chunks: list[list[Any]] = []
            for lo, size in entry["chunks"]:
                place = places.get((name, tuple(lo)))
                if place is None:
                    if name not in found.notes["lacking"] and 0 not in size:
                        source.findings.append(_unstored(found, name, lo))
                    continue
                held = []
                for file, record in place:
                    number = by_record[file].get(record)
                    if number is not None:
                        held.append((lo, size, file, number))
                        self._same_dtype(source, found, contents, entry, file, number)
                if held:
                    chunks.append(held)
            if len(chunks) == len(entry["chunks"]) or name not in found.notes["lacking"]:
                tensors.append((name, entry["shape"], [held[0] for held in chunks]))
                for n in range(1, max(map(len, chunks), default=1)):
                    copies += [[]] if len(copies) < n else []
                    copies[n - 1].append((name, entry["shape"], [h[n if n < len(h) else 0] for h in chunks]))
        names = {entry["name"] for entry in described["tensors"]}
        for framework in self._frameworks:
            named = framework.take(source, found, listing, contents, tensors)
            if named is not None:
                tensors = named
                break
        else:
            self._model(source, found, listing, options, names)
            dcp_optim.attach(source, contents, tensors, found.notes["objects"])
            source.findings += _not_carried(described["objects"], found.notes["objects"], alone=not tensors)
        if found.files:
            # Masters, which a framework may have declared, are held against these.
            sets = [tensors, *copies]
            source.assembled[:0] = [
                Assembled(0, {"replica": n} if copies else {}, None, None, one, frozen=True)
                for n, one in enumerate(sets)
            ]
        return source

    @staticmethod
    def _same_dtype(
        source: Source, found: Found, contents: Contents, entry: dict[str, Any], file: int, number: int
    ) -> None:
        stored = contents.tensors(file)[number]["torch_dtype"]
        if entry["dtype"] and stored != entry["dtype"]:
            source.findings.append(
                Finding.of(
                    "FS202",
                    "dtype of a chunk",
                    file=found.files[file].path,
                    tensor=entry["name"],
                    expected=f"{entry['dtype']} by .metadata",
                    got=stored,
                    help="the metadata and the files are of different saves: copy both from one",
                )
            )

    @staticmethod
    def _model(source: Source, found: Found, listing: Listing, options: Options, names: set[str]) -> None:
        """A Hugging Face model by its config.json and its names, whatever they are below."""
        config, path = hf_names.config_of(listing, found.notes["folder"], options)
        nests.recognise(source, names, config, options.under)
        if config is None:
            return
        hf_names.describe(source, listing, config, path, names, outer=source.weights_prefix)


def _not_carried(names: list[str], objects: dcp_optim.Objects, alone: bool) -> list[Finding]:
    """What records that are no tensors hold, and results do not.

    Args:
        names: of all such records.
        objects: those that can be read.
        alone: True if there are no others.
    """
    findings = []
    if own := [name for name in names if _EXTRA_STATE.search(name)]:
        findings.append(
            Finding.of(
                "FS212",
                f"{len(own)} records are modules' own state (_extra_state) and no tensors: they are not carried",
                severity="note",
                tensor=own[0],
                got=_listed(own),
            )
        )
    others = [name for name in objects if not _EXTRA_STATE.search(name)]
    others.sort(key=lambda name: -objects[name][2])
    if holding := sorted(n for n in others[:_MAX_LOOKED_INTO] if _holds_tensors(*objects[n])):
        findings.append(
            Finding.of(
                "FS514" if alone else "FS212",
                f"{len(holding)} records are objects that hold tensors (in tuples, or saved with flatten_state_dict=False): "
                "they are not carried",
                severity="error" if alone else "warning",
                tensor=holding[0],
                got=_listed(holding),
                help="load it with torch, and save it again with every tensor under a name of its own",
            )
        )
    return findings


def _holds_tensors(path: Path, offset: int, length: int) -> bool:
    try:
        value = json.loads(_core.dcp_object(path, offset, length))
    except _core.CoreError:
        # What cannot be looked into is not carried either way, and manifests name it.
        return False
    left = [value]
    while left:
        match left.pop():
            case {"__tensor__": _}:
                return True
            case dict() as items:
                left += items.values()
            case list() as items:
                left += items
    return False


def _unstored(found: Found, name: str, lo: list[int]) -> Finding:
    folder = found.notes["folder"]
    return Finding.of(
        "FS205",
        f"the chunk at {lo} is stored nowhere",
        file=f"{folder}/{METADATA}" if folder else METADATA,
        tensor=name,
        help="the metadata was written before all ranks were done: take another step",
    )
