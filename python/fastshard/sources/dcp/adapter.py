"""torch.distributed.checkpoint: ``.metadata`` and ``.distcp`` files, as FSDP, torchtitan and Megatron write
them.

torch does not check coverage or checksums on loading; fastshard checks both.
source: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.formatting import some
from ...common.listing import File, Listing
from ...common.records import dataclass, field, replace
from ...common.regex import compile_when_used
from ...layouts.dcp_names import METADATA, chunk_name
from ...layouts.declaration import Assembled, Binding, Source, TensorIndex
from .. import hf_config, model_prefix
from ..base import Contents, Found, Options, missing, unexpected
from ..choose_step import folder_of, holds_state, within_this
from ..index_files import safe_relative
from ..step_names import is_step
from ..step_trackers import refuse_unfinished
from ..zero.flat_state import tensors_below
from . import metadata as dcp_metadata
from . import optim, state_alone
from .dcp_files import DcpFiles

#: Trackers. Megatron-LM's contains the iteration's number or ``release``.
_TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
#: torch's own record transform: its name and major version. source:
#: torch/distributed/checkpoint/_extension.py
_ZSTD, _ZSTD_VERSION = "stream.zstd", "1"


def _known(transforms: list[str]) -> bool:
    """Return True if the core can reverse the transforms of a record."""
    names = [(name, version.partition(".")[0]) for name, _, version in (t.partition("/") for t in transforms)]
    return names in ([], [(_ZSTD, _ZSTD_VERSION)])


#: Prefix of a record file's name, with the rank that wrote the file.
_RECORDS_OF_RANK = compile_when_used(r"^__(\d+)_")
_EXTRA_STATE = compile_when_used(r"(^|\.)_extra_state(\.|$)")
#: Maximum number of names in a finding.
_MOST_NAMED = 8
#: Maximum number of records to examine; the largest ones are those with tensors.
_MAX_LOOKED_INTO = 256


@dataclass
class _Records(Source):
    """A source whose modules may have their own extra state. Merges keep this state, but no model has a place
    for it.
    """

    def weights_only(self, names_of: Callable[[int], Iterable[str]], optimizer: bool = False) -> Source:
        """Return the source with its weights only, without the modules' extra state."""
        taken = super().weights_only(names_of, optimizer)
        own = [n for a in taken.files.assembled for n, *_ in a.tensors if _EXTRA_STATE.search(n)]
        if not own:
            return taken
        kept = [
            replace(a, tensors=[t for t in a.tensors if not _EXTRA_STATE.search(t[0])])
            for a in taken.files.assembled
        ]
        note = Finding.of(
            codes.IGNORED,
            f"{len(own)} tensors are modules' own state (_extra_state), such as FP8 scales of the run, and "
            "not weights",
            severity="note",
            tensor=own[0],
            got=some(own, _MOST_NAMED),
        )
        return replace(taken, findings=[*taken.findings, note], files=replace(taken.files, assembled=kept))


#: name, shape, pieces of a tensor
_Tensors = list[tuple[str, list[int], list[Any]]]


class Framework(Protocol):
    """A framework that saves with torch.distributed.checkpoint, under its own names and with additional
    files.
    """

    def take(
        self,
        source: Source,
        found: Found[DcpFiles],
        listing: Listing,
        contents: Contents,
        tensors: _Tensors,
        options: Options,
    ) -> _Tensors | None:
        """Declare the model from the framework's own files, and return the weights among the tensors.

        None if another framework wrote the save.
        """


class Dcp:
    """Directories that contain ``.metadata``."""

    name = "dcp"

    def __init__(self, frameworks: Sequence[Framework] = ()) -> None:
        self._frameworks = frameworks

    def detect(self, listing: Listing, options: Options) -> Found[DcpFiles] | None:
        """Look for ``.metadata``. Without it, ``.distcp`` files are not committed."""
        if listing.single:
            return None
        metadata = [f for f in listing.files if f.name == METADATA]
        of_ranks = [(f, int(m[1])) for f in listing.files if (m := dcp_metadata.OF_RANK.match(f.name))]
        loose = [f for f in listing.files if f.name.endswith(".distcp")]
        if not metadata and not of_ranks:
            if loose:
                raise _uncommitted(loose[0].folder, loose)
            return None
        places = [(f.root, f.folder) for f in (*metadata, *(f for f, _ in of_ranks))]
        if all(holds_state(folder) for _, folder in places):
            # The model lies in files of another format, unless a folder is not what its name says.
            without = {f.folder for f in metadata if state_alone.holds_no_model(listing, f)}
            places = [place for place in places if place[1] not in without]
            if unfinished := next((f for f in loose if not holds_state(f.folder)), None):
                raise _uncommitted(unfinished.folder, loose)
            if not places:
                return None
        by_folder = {f.folder: f for f in metadata}
        folder, chosen, within = folder_of(
            listing,
            places,
            options,
            _TRACKERS,
            holds_model=lambda at: at in by_folder and state_alone.shows_model(listing, by_folder[at]),
        )
        ranks: dict[int, list[File]] = {}
        for file, rank in of_ranks:
            if file.folder == folder:
                ranks.setdefault(rank, []).append(file)
        trackers = [f for f in metadata if f.folder == folder]
        findings = refuse_unfinished(listing, [place for place in places if place[1] == folder])
        if trackers:
            described = dcp_metadata.read(listing, dcp_metadata.one_of(listing, trackers))
            if folder and state_alone.names_no_model(described):
                return None
            if ranks:
                dcp_metadata.same_save(described, dcp_metadata.of_ranks(listing, ranks, []), trackers[0])
        else:
            described = dcp_metadata.of_ranks(listing, ranks, findings)
            findings += dcp_metadata.ranks_without(listing, folder, ranks)
        # A folder of tensors in the one that was given is no step, unless a tracker file names it.
        is_named = is_step(chosen.name) or any(f.name in _TRACKERS for f in listing.files)
        step = chosen.name if is_named and chosen.name not in ("", "weights") else None
        found = self._found(listing, folder, step, described)
        return replace(found, findings=[*chosen.findings, *findings, *found.findings, *within_this(within)])

    def _found(
        self, listing: Listing, folder: str, step: str | None, described: dcp_metadata.Metadata
    ) -> Found[DcpFiles]:
        metadata = f"{folder}/{METADATA}" if folder else METADATA
        copies: dict[str, list[File]] = {}
        for one in listing.within(folder):
            copies.setdefault(one.name, []).append(one)
        named = {entry["file"] for entry in described["stored"]}
        read = named | {"common.pt"}
        inside = {
            name: dcp_metadata.one_of(listing, found) if name in read else found[0]
            for name, found in copies.items()
        }
        dcp_metadata.as_records(described, metadata)
        dcp_metadata.apart(described["stored"], metadata)
        outside = [entry for entry in described["stored"] if not safe_relative(entry["file"])]
        safe = [entry for entry in described["stored"] if safe_relative(entry["file"])]
        there = [entry for entry in safe if entry["file"] in inside]
        lacking: dict[str, list[str]] = {}
        for entry in safe:
            if entry["file"] not in inside:
                lacking.setdefault(entry["file"], []).append(entry["name"])
        objects = set(described["objects"])
        placed = _placed(described, [entry for entry in there if entry["name"] not in objects], inside)
        values = {
            entry["name"]: (listing.roots[file.root] / file.path, entry["offset"], entry["len"])
            for entry in there
            if entry["name"] in objects and _known(entry["transforms"])
            for file in [inside[entry["file"]]]
        }
        findings = [
            *(_leaves_directory(metadata, entry) for entry in outside),
            *(_file_missing(folder, file, names) for file, names in lacking.items()),
            *(
                unexpected(one.path, ".metadata does not name this file")
                for name, one in sorted(inside.items())
                if name.endswith(".distcp") and name not in named
            ),
        ]
        files = [*placed.files, *([inside["common.pt"]] if "common.pt" in inside else [])]
        lost = {
            name: f"{folder}/{file}" if folder else file for file, names in lacking.items() for name in names
        }
        dcp_files = DcpFiles(described, placed.places, values, lost)
        return Found(self, "torch DCP", files, dcp_files, folder, findings, step=step, records=placed.records)

    def declare(
        self, found: Found[DcpFiles], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Declare every tensor as boxes, with shapes from the metadata."""
        described = found.seen.metadata
        source: Source = _Records(
            found.framework,
            step=found.step,
            binding=Binding(pass_unknown=True),
            index=TensorIndex(is_provable=True),
        )
        for i, file in enumerate(found.files):
            if match := _RECORDS_OF_RANK.match(file.name):
                source.files.ranks[i] = {"rank": int(match[1])}
        # What .metadata of a rank that is missing would name, nothing tells.
        source.index.is_listed = not any(
            f.code == codes.MISSING_FILE and f.file and f.file.endswith(METADATA) for f in found.findings
        )
        source.binding.vocab_size = options.vocab_size
        source.files.values = {
            k: v
            for k, v in {"version": described["version"], "objects": described["objects"]}.items()
            if v not in (None, [])
        }
        tensors, copies = self._tensors(source, found, contents)
        lacking = (entry for entry in described["tensors"] if entry["name"] in source.index.lost)
        source.index.lost_elements = {entry["name"]: math.prod(entry["shape"]) for entry in lacking}
        if source.index.is_listed:
            source.findings += [
                f for e in described["tensors"] if e["name"] in source.index.lost for f in _hole(e)
            ]
        names = [entry["name"] for entry in described["tensors"]]
        for framework in self._frameworks:
            named = framework.take(source, found, listing, contents, tensors, options)
            if named is not None:
                tensors = named
                break
        else:
            paths = {entry["name"]: entry["path"] for entry in described["tensors"] if entry["path"]}
            self._model(source, found, listing, options, names, paths)
            optim.attach(source, contents, tensors, found.seen.objects)
            source.findings += _not_carried(described["objects"], found.seen.objects, alone=not tensors)
        if found.files:
            # Masters, which a framework may have declared, are held against these.
            sets = [tensors, *copies]
            source.files.assembled[:0] = [
                Assembled(0, {"replica": n} if copies else {}, None, None, one, frozen=True)
                for n, one in enumerate(sets)
            ]
        return source

    def _tensors(
        self, source: Source, found: Found[DcpFiles], contents: Contents
    ) -> tuple[_Tensors, list[_Tensors]]:
        """Return the tensors with their boxes, and copies in other ranks' files, for comparison."""
        by_record = {
            i: {t["path"][0]: n for n, t in enumerate(contents.tensors(i)) if len(t["path"]) == 1}
            for i in found.records
        }
        tensors: _Tensors = []
        copies: list[_Tensors] = []
        for entry in found.seen.metadata["tensors"]:
            name = entry["name"]
            chunks: list[list[Any]] = []
            for lo, size in entry["chunks"]:
                place = found.seen.places.get((name, tuple(lo)))
                unread = [file for file, _ in place or () if not contents.readable(file)]
                if unread:
                    source.index.lost.setdefault(name, found.files[unread[0]].path)
                if place is None:
                    if name not in found.seen.lacking and 0 not in size:
                        source.findings.append(_unstored(found, name, lo))
                    continue
                stored = []
                for file, record in place:
                    number = by_record[file].get(record)
                    if number is not None:
                        stored.append((lo, size, file, number))
                        self._same_dtype(source, found, contents, entry, file, number)
                if stored:
                    chunks.append(stored)
            if len(chunks) == len(entry["chunks"]) or name not in found.seen.lacking:
                tensors.append((name, entry["shape"], [stored[0] for stored in chunks]))
                for n in range(1, max(map(len, chunks), default=1)):
                    copies += [[]] if len(copies) < n else []
                    copies[n - 1].append((name, entry["shape"], [h[n if n < len(h) else 0] for h in chunks]))
            else:
                source.index.lost.setdefault(name, found.seen.lacking[name])
        return tensors, copies

    @staticmethod
    def _same_dtype(
        source: Source,
        found: Found[DcpFiles],
        contents: Contents,
        entry: dcp_metadata.TensorEntry,
        file: int,
        number: int,
    ) -> None:
        stored = contents.tensors(file)[number]["torch_dtype"]
        if entry["dtype"] and stored != entry["dtype"]:
            source.findings.append(
                Finding.of(
                    codes.DTYPE,
                    "a chunk has the wrong dtype",
                    file=found.files[file].path,
                    tensor=entry["name"],
                    expected=f"{entry['dtype']}, by .metadata",
                    got=stored,
                    help="copy the metadata and the files from one save; these are from different saves",
                )
            )

    @staticmethod
    def _model(
        source: Source,
        found: Found[DcpFiles],
        listing: Listing,
        options: Options,
        names: list[str],
        paths: dict[str, list[str]],
    ) -> None:
        """Declare a Hugging Face model, based on its config.json and its names, under any prefix."""
        config, path = hf_config.config_of(listing, found.folder, options)
        model_prefix.recognise(source, names, config, options.prefix, paths)
        if config is None:
            return
        hf_config.describe(source, listing, config, path, names, outer=source.names.prefix)


@dataclass(frozen=True)
class _Placed:
    """The places of tensor records."""

    #: The files that contain the records.
    files: list[File] = field(default_factory=list)
    #: For each file: offset, size in bytes, and name of the records, and whether they are compressed.
    records: dict[int, list[tuple[int, int, str, bool]]] = field(default_factory=dict)
    #: (name, first index of the chunk) -> (file, name of the record in it); several if ranks have copies.
    places: dict[tuple[str, tuple[int, ...]], list[tuple[int, str]]] = field(default_factory=dict)


def _placed(
    described: dcp_metadata.Metadata, entries: list[dcp_metadata.StoredAt], inside: Mapping[str, File]
) -> _Placed:
    """Find the tensor records in existing files, and number these files in order of occurrence.

    Raises:
        FastshardError: ``FS514`` for unsupported records, ``FS106`` for two records of the same name.
    """
    placed = _Placed()
    numbers: dict[str, int] = {}
    whole = {e["name"]: e["chunks"][0][0] for e in described["tensors"] if len(e["chunks"]) == 1}
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in entries:
        name, file = entry["name"], inside[entry["file"]]
        if not _known(entry["transforms"]):
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "the records use a storage extension other than torch's Zstandard, which is not supported",
                file=file.path,
                tensor=name,
                expected=f"{_ZSTD}/{_ZSTD_VERSION}, or none",
                got=", ".join(entry["transforms"]),
                help="load the checkpoint where the extension is available, and save it again without it",
            )
        number = numbers.setdefault(entry["file"], len(numbers))
        if number == len(placed.files):
            placed.files.append(file)
        at = entry["at"] or []
        record = name if whole.get(name) == at else chunk_name(name, at)
        if seen.setdefault(record, (name, tuple(at))) != (name, tuple(at)):
            raise FastshardError.of(
                codes.AMBIGUOUS,
                "two tensors of .metadata have the same name",
                file=file.path,
                tensor=record,
                help="save the checkpoint again with names that do not end in brackets",
            )
        placed.places.setdefault((name, tuple(at)), []).append((number, record))
        placed.records.setdefault(number, []).append(
            (entry["offset"], entry["len"], record, bool(entry["transforms"]))
        )
    return placed


def _leaves_directory(metadata: str, entry: dcp_metadata.StoredAt) -> Finding:
    return Finding.of(
        codes.UNSAFE_PATH,
        "a file name in .metadata points outside the directory",
        file=metadata,
        tensor=entry["name"],
        got=repr(entry["file"]),
        help="do not use this checkpoint: the metadata may be an attempt to read other files",
    )


def _file_missing(folder: str, file: str, names: list[str]) -> Finding:
    rank = _RECORDS_OF_RANK.match(file)
    return missing(
        f"{folder}/{file}" if folder else file,
        {"rank": int(rank[1])} if rank else {},
        f"named in .metadata, e.g. for {names[0]}",
        f"copy {file} from the node that ran this rank, or name that node's directory as another CKPT",
    )


def _hole(entry: dcp_metadata.TensorEntry) -> Iterator[Finding]:
    """Yield a finding if the chunks of a tensor cannot cover it completely, whatever the files contain.

    A lost file does not explain these elements.
    """
    whole = math.prod(entry["shape"])
    lacking = whole - sum(math.prod(size) for _, size in entry["chunks"])
    if lacking > 0:
        yield Finding.of(
            codes.HOLE,
            f"{lacking} of {whole} elements are missing: no chunk covers them",
            tensor=entry["name"],
            expected=f"chunks that tile {entry['shape']}",
            got=f"chunks at {', '.join(str(lo) for lo, _ in entry['chunks'][:8])}",
        )


def _not_carried(names: list[str], objects: optim.Objects, alone: bool) -> list[Finding]:
    """Report the non-tensor records that results do not include.

    Args:
        names: names of all such records.
        objects: the readable records.
        alone: True if there are no other records.
    """
    findings = []
    if own := [name for name in names if _EXTRA_STATE.search(name)]:
        findings.append(
            Finding.of(
                codes.IGNORED,
                f"{len(own)} records are modules' own state (_extra_state) and not tensors: they are left "
                "out",
                severity="note",
                tensor=own[0],
                got=some(own, _MOST_NAMED),
            )
        )
    others = [name for name in objects if not _EXTRA_STATE.search(name)]
    others.sort(key=lambda name: -objects[name][2])
    if holding := sorted(n for n in others[:_MAX_LOOKED_INTO] if _holds_tensors(objects[n])):
        findings.append(
            Finding.of(
                codes.UNSUPPORTED if alone else codes.IGNORED,
                f"{len(holding)} records are objects that hold tensors (in tuples, or saved with "
                "flatten_state_dict=False): they are left out",
                severity="error" if alone else "warning",
                tensor=holding[0],
                got=some(holding, _MOST_NAMED),
                help="load the checkpoint with torch, and save it again with every tensor under a separate "
                "name",
            )
        )
    return findings


def _holds_tensors(place: tuple[Path, int, int]) -> bool:
    try:
        return bool(tensors_below(optim.read_object(place)))
    except FastshardError:
        # What cannot be looked into is not carried either way, and manifests name it.
        return False


def _uncommitted(folder: str, loose: Sequence[File]) -> FastshardError:
    """Build the error for files of records without the ``.metadata`` file that describes them."""
    return FastshardError.of(
        codes.UNCOMMITTED,
        "the file is missing: the save did not finish, or finished on another node",
        file=f"{folder}/{METADATA}" if folder else METADATA,
        expected="the file that the coordinator writes last",
        got=f"{sum(file.folder == folder for file in loose)} .distcp files",
        help="copy .metadata from the node that ran rank 0, or name that node's directory as another CKPT",
    )


def _unstored(found: Found[DcpFiles], name: str, lo: list[int]) -> Finding:
    folder = found.folder
    return Finding.of(
        codes.HOLE,
        f"the chunk at {lo} is missing: no file stores it",
        file=f"{folder}/{METADATA}" if folder else METADATA,
        tensor=name,
        help="use another step: the metadata was written before all ranks had saved",
    )
