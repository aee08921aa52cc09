"""The stores of an item: keys, metadata and chunks, in the directories of one or several hosts."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from ...common import codes, safe_files
from ...common.dtypes import item_size
from ...common.errors import FastshardError, Finding, error_for
from ...common.listing import Listing
from ...common.records import dataclass, field
from ...common.regex import compile_when_used
from ...zarr import array_reader
from ...zarr.remote_ranges import send
from .find_items import Place, Process
from .zarr_metadata import MAX_CHUNKS, MAX_METADATA, METADATA, Array, fill_bytes, parse

#: Keys of chunks, in either zarr version and with either separator.
_CHUNK = compile_when_used(r"(.+?)/(?:c(?:[./]\d+)*|\d+(?:[./]\d+)*)$")


@dataclass
class StorePart:
    """One key-value store: a place, or one process's part of it if it was not merged completely."""

    place: Place
    label: str
    store: array_reader.Store
    keys: set[str]
    #: Keys in its index whose values are missing, each with the reason.
    lost: dict[str, str] = field(default_factory=dict)


#: A block of an array: first element, extent, and number among all blocks.
Piece = tuple[list[int], list[int], int]


@dataclass
class Union:
    """All stores of an item, combined into one."""

    parts: list[StorePart]
    arrays: dict[str, Array] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    #: Number of keys that a merged store lacks, and that a process's store next to it contains.
    unmerged: int = 0
    #: Names of arrays that have chunks but no metadata.
    undescribed: list[str] = field(default_factory=list)
    #: Arrays that are not read, each with the reason.
    unread: dict[str, Finding] = field(default_factory=dict)
    #: Keys of each process's own store that was opened.
    of_process: dict[int | str, set[str]] = field(default_factory=dict)
    #: Process, label and manifest of each of these stores.
    manifests: list[tuple[int | str, str, Path]] = field(default_factory=list)

    def add(self, part: StorePart) -> None:
        """Add another store."""
        self.parts.append(part)
        self.keys |= part.keys

    def take(self, listing: Listing, place: Place, process: Process, part: StorePart) -> None:
        """Record the contents of a process's own store."""
        self.of_process.setdefault(process.id, set()).update(part.keys)
        manifest = place.path(listing) / process.folder / "manifest.ocdbt"
        if part.keys and not part.store.remote and safe_files.is_file(manifest):
            self.manifests.append((process.id, part.label, manifest))

    def wrote(self) -> set[int | str]:
        """Return the processes whose stores have metadata or a chunk of these arrays.

        The existence of a directory is not sufficient.
        """
        if not self.of_process:
            return set()
        known = {f"{a.name}/{a.key(i)}" for a in self.arrays.values() for i in a.chunks() if 0 not in a.shape}
        known |= {f"{name}/{last}" for name in self.arrays for last in METADATA}
        unread = tuple(f"{name}/" for name in self.unread)
        return {
            n
            for n, keys in self.of_process.items()
            if not known.isdisjoint(keys) or (unread and any(k.startswith(unread) for k in keys))
        }

    def copied(self) -> list[Finding]:
        """Report stores of different processes with the same manifest.

        A manifest contains random file names, so equal manifests mean that one store is a copy of the other.
        """
        return [
            Finding.of(
                codes.DUPLICATED_SHARD,
                f"the store of process {second} is the same as that of process {first}",
                file=label,
                rank=f"process {second}",
                expected=f"another manifest than that of {other}",
                got="the same manifest",
                help="copy both again from the hosts that ran these processes",
            )
            for (first, other, one), (second, label, two) in itertools.combinations(self.manifests, 2)
            if first != second and safe_files.same(one, two)
        ]

    def holders(self, key: str) -> list[StorePart]:
        """Return the stores that contain a key."""
        return [h for h in self.parts if key in h.keys]


def open_stores(listing: Listing, places: list[Place], names: Set[str] = frozenset()) -> Union:
    """Open the stores of all places and read the metadata of their arrays.

    Args:
        listing: contents of the root directories.
        places: the directories of one item.
        names: arrays that must exist.

    Raises:
        FastshardError: for stores that cannot be read, and arrays that two hosts describe differently.
    """
    union = Union([])
    context = array_reader.new_context()
    for place in places:
        if place.ocdbt and not place.merged:
            for process in sorted(place.processes, key=lambda p: p.key):
                part = _process(listing, place, process, context)
                union.take(listing, place, process, part)
                union.add(part)
        else:
            store = array_reader.Store(
                place.path(listing), ocdbt=place.ocdbt, label=place.label(listing), context=context
            )
            union.add(_describe_part(listing, place, store))
    _describe(union, union.keys)
    if names - set(union.arrays) - set(union.unread) or any(
        _lacks(a, union.keys) for a in union.arrays.values()
    ):
        # What a process wrote is not reached from the merged store if its directory came to stand there
        # later.
        before = set(union.keys)
        for place in places:
            for process in sorted(place.processes, key=lambda p: p.key) if place.merged else ():
                try:
                    part = _process(listing, place, process, context)
                except FastshardError as error:
                    # One that is damaged has nothing to add; what the merged store lacks is missing then.
                    if error.code == codes.UNSAFE_HEADER:
                        continue
                    raise
                union.take(listing, place, process, part)
                part.keys -= before
                union.add(part)
        union.unmerged = len(union.keys) - len(before)
        _describe(union, union.keys - before)
    _foreign(union)
    union.undescribed = _undescribed(union)
    return union


def _describe_part(listing: Listing, place: Place, store: array_reader.Store, below: str = "") -> StorePart:
    """Describe a store by its keys that have values."""
    if not place.ocdbt:
        return StorePart(place, store.label, store, {path for path, _ in place.files(listing)})
    # Files that the listing does not hold, links that leave the directory among them, are not read.
    keys, lost = store.placed({path: file.size for path, file in place.files(listing, below)})
    return StorePart(place, store.label, store, set(keys), lost)


def _process(listing: Listing, place: Place, process: Process, context: Any) -> StorePart:
    """Open the store of one process."""
    name = process.folder
    label = f"{place.label(listing)}/{name}"
    store = array_reader.Store(place.path(listing) / name, ocdbt=True, label=label, context=context)
    return _describe_part(listing, place, store, name)


def _lacks(array: Array, keys: Set[str]) -> bool:
    return 0 not in array.shape and any(f"{array.name}/{array.key(i)}" not in keys for i in array.chunks())


def _describe(union: Union, keys: Iterable[str]) -> None:
    """Read the metadata of arrays that have metadata among these keys."""
    where = union.parts[0].label
    chunks = sum(math.prod(a.grid) for a in union.arrays.values())
    for key in sorted(k for k in keys if k.endswith(tuple(METADATA))):
        name, _, last = key.rpartition("/")
        if last not in METADATA or not name:
            continue
        if ".." in name.split("/") or name.startswith("/"):
            raise FastshardError.of(codes.UNSAFE_PATH, "name of an array", file=where, got=repr(key))
        holders = union.holders(key)
        text = holders[0].store.read(key, MAX_METADATA)
        try:
            array = parse(name, text, METADATA[last], holders[0].label)
        except FastshardError as error:
            if error.code != codes.UNSUPPORTED:
                raise
            union.unread[name] = error.findings[0]
            continue
        if array is None:
            continue
        if name in union.arrays:
            raise FastshardError.of(
                codes.AMBIGUOUS,
                "an array has metadata of zarr v2 and of v3",
                file=holders[0].label,
                tensor=name,
                expected=".zarray or zarr.json",
                help="move the leftover of the other save away",
            )
        for other in holders[1:]:
            again = other.store.read(key, MAX_METADATA)
            if again == text:
                continue
            described = parse(name, again, METADATA[last], other.label)
            if described is None or described.metadata != array.metadata:
                raise FastshardError.of(
                    codes.MIXED_STEPS,
                    "two hosts describe this array differently: they are from different saves",
                    file=other.label,
                    tensor=name,
                    expected=f"{array.dtype} {list(array.shape)}, chunks {list(array.chunk)}, as in "
                    f"{holders[0].label}",
                    help="pass only the directories of one save",
                )
        union.arrays[name] = array
        chunks += math.prod(array.grid)
        if chunks > MAX_CHUNKS:
            raise FastshardError.of(
                codes.UNSAFE_HEADER,
                f"more than {MAX_CHUNKS} chunks in total",
                file=where,
                tensor=name,
                help="copy the metadata of the array again from the host that wrote it: it is damaged",
            )


def _foreign(union: Union) -> None:
    """Refuse chunks that an array does not have; they are from another save with another grid or format."""
    for part in union.parts:
        for key in part.keys:
            found = _CHUNK.match(key)
            array = union.arrays.get(found[1]) if found else None
            if array is None:
                continue
            name, last = array.name, key[len(array.name) + 1 :]
            if not array.has(last):
                raise FastshardError.of(
                    codes.MIXED_STEPS,
                    f"chunk {last} is outside the array: it is from another save",
                    file=part.label,
                    tensor=name,
                    expected=f"chunks {list(array.chunk)} of {list(array.shape)}, keys as "
                    f"{array.key((0,) * len(array.shape))}",
                    help="pass only the directories of one save",
                )


def _undescribed(union: Union) -> list[str]:
    """Return folders with files that are named like chunks and do not belong to an array."""
    found: set[str] = set()
    for folder in {k.rpartition("/")[0] for k in union.keys}:
        parts = folder.split("/")
        above = ("/".join(parts[:n]) for n in range(1, len(parts) + 1))
        if any(name in union.arrays or name in union.unread for name in above):
            continue
        found.add(folder)
    named = (_CHUNK.match(k) for k in union.keys if k.rpartition("/")[0] in found)
    return sorted({match[1] for match in named if match})


class Reader:
    """A decoder of blocks. If several stores contain a chunk, it must be the same in all of them."""

    def __init__(self, union: Union, stores_fill: bool) -> None:
        self._union = union
        self._stores_fill = stores_fill
        #: Block -> array, first element, extent, key of its chunk (None for a block of fill values).
        self.blocks: dict[str, tuple[Array, list[int], list[int], str | None]] = {}
        self._lock = threading.Lock()
        self._same: set[str] = set()

    def __call__(self, block: str, view: memoryview) -> None:
        """Fill ``view`` with the elements of a block.

        Raises:
            FastshardError: ``FS601`` for a chunk that cannot be decoded, ``FS302`` if two stores
                contradict each other.
        """
        array, lo, extent, key = self.blocks[block]
        if key is None:
            element = fill_bytes(array)
            view[:] = element * (len(view) // len(element))
            return
        holders = self._union.holders(key)
        chunk = key[len(array.name) + 1 :]
        try:
            box = self._box(array, key, lo, extent)
            self._compare(box, holders)
            holders[0].store.decode(box, view)
        except FastshardError as error:
            findings = (f.replace(message=f"chunk {chunk}: {f.message}") for f in error.findings)
            raise error_for(list(findings)) from None
        if array.partial and not holders[0].store.has(key):
            raise FastshardError.of(
                codes.SOURCE_CHANGED,
                f"chunk {chunk} disappeared",
                file=holders[0].label,
                tensor=array.name,
                help="wait until nothing changes the checkpoint, then run the command again",
            )

    def _box(self, array: Array, key: str, lo: list[int], extent: list[int]) -> array_reader.Box:
        driver = "zarr" if array.zarr == 2 else "zarr3"
        # Parts of a shard may be absent.
        fills_missing = array.partial and not self._stores_fill
        return array_reader.Box(
            array.name, key, driver, array.metadata, array.dtype, fills_missing, lo, extent
        )

    def _compare(self, box: array_reader.Box, holders: list[StorePart]) -> None:
        with self._lock:
            if len(holders) == 1 or box.key in self._same:
                return
        first = holders[0]
        raw = first.store.read(box.key)
        alike = True
        for other in holders[1:]:
            if other.store.read(box.key) == raw:
                continue
            # What was compared is this block; a chunk may have others.
            alike = False
            # Compressed anew the bytes may be others and the elements the same.
            one, two = (h.store.decoded(box) for h in (first, other))
            if one != two:
                raise FastshardError.of(
                    codes.REPLICAS_DIFFER,
                    "two hosts hold different values",
                    file=other.label,
                    tensor=box.name,
                    expected=f"the same as in {first.label}",
                    help="pass only the directories of one save; if the run let replicas drift, leave out "
                    "one host's directory",
                )
        if alike:
            with self._lock:
                self._same.add(box.key)

    def root(self, block: str) -> int:
        """Return the root directory that contains a block; the first one for a block of fill values."""
        _, _, _, key = self.blocks[block]
        return 0 if key is None else self._union.holders(key)[0].place.root

    def send(self, blocks: Iterable[str]) -> None:
        """Announce that blocks on other hosts will be read.

        Raises:
            FastshardError: if the announcement fails.
        """
        keys = dict.fromkeys(self.blocks[block][3] for block in blocks)
        send(
            (part.store.remote, key)
            for key in keys
            if key is not None
            for part in self._union.holders(key)
            if part.store.remote
        )

    @property
    def lies_apart(self) -> bool:
        """True if some stores are on other hosts' disks."""
        return any(part.store.remote for part in self._union.parts)


def listed(
    union: Union, elided: dict[str, list[tuple[int, ...]]], stores_fill: bool
) -> tuple[Reader, list[tuple[str, str, list[int], int]], dict[str, list[Piece]]]:
    """Return the reader, its blocks, and the pieces of each array.

    A block is (key, dtype, shape, bytes to decode); a piece is (first element, extent, number of the block).
    """
    reader = Reader(union, stores_fill)
    tensors: list[tuple[str, str, list[int], int]] = []
    pieces: dict[str, list[Piece]] = {}
    for name, array in sorted(union.arrays.items()):
        absent = set(elided.get(name, ()))
        if absent:
            fill_bytes(array)
        pieces[name] = []
        if 0 in array.shape:
            # A block of no elements states the dtype; there is nothing to read.
            block = f"{name}/"
            reader.blocks[block] = (array, [0] * len(array.shape), list(array.shape), None)
            pieces[name].append(([0] * len(array.shape), list(array.shape), len(tensors)))
            tensors.append((block, array.dtype, list(array.shape), 0))
            continue
        whole = math.prod(array.block) * item_size(array.dtype)
        for index in array.chunks():
            key = f"{name}/{array.key(index)}"
            if key not in union.keys and index not in absent:
                continue
            for number, (lo, extent) in enumerate(array.blocks(index)):
                block = key if array.block == array.chunk else f"{key}#{number}"
                reader.blocks[block] = (array, lo, extent, None if index in absent else key)
                pieces[name].append((lo, extent, len(tensors)))
                tensors.append((block, array.dtype, extent, 0 if index in absent else whole))
    return reader, tensors, pieces
