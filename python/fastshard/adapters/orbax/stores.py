"""The stores of an item: keys, metadata and chunks, over the directories of one or more hosts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from ...discover import Listing
from ...errors import FastshardError
from ...external import tensorstore
from .places import Place
from .zarr import MAX_METADATA, Array, fill_bytes, parse

_METADATA = {".zarray": 2, "zarr.json": 3}


@dataclass
class Held:
    """One key-value store: a place, or one process' part of it that was never merged."""

    place: Place
    label: str
    store: tensorstore.Store
    keys: set[str]


@dataclass
class Union:
    """All stores of an item as one."""

    held: list[Held]
    arrays: dict[str, Array] = field(default_factory=dict)
    #: All keys, and the stores that hold each that several hold.
    keys: set[str] = field(default_factory=set)

    def holders(self, key: str) -> list[Held]:
        """Stores that hold a key."""
        return [h for h in self.held if key in h.keys]


def open_stores(listing: Listing, places: list[Place]) -> Union:
    """Opens the stores of all places and reads the metadata of their arrays.

    Raises:
        FastshardError: for stores that cannot be read, and arrays that two hosts describe differently.
    """
    held: list[Held] = []
    for place in places:
        label = place.label(listing)
        parts = (
            [""]
            if place.merged or not place.processes
            else [f"ocdbt.process_{n}" for n in sorted(place.processes)]
        )
        for part in parts:
            path = place.path(listing) / part if part else place.path(listing)
            store = tensorstore.Store(path, ocdbt=place.ocdbt, label=label)
            keys = set(store.keys()) if place.ocdbt else _plain_keys(listing, place)
            held.append(Held(place, label, store, keys))
    union = Union(held)
    for one in held:
        union.keys |= one.keys
    for key in sorted(union.keys):
        name, _, last = key.rpartition("/")
        zarr = _METADATA.get(last)
        if zarr is None:
            continue
        if ".." in name.split("/") or name.startswith("/") or not name:
            raise FastshardError.of("FS603", "name of an array", file=held[0].label, got=repr(key))
        found = [(h, h.store.read(key, MAX_METADATA)) for h in union.holders(key)]
        array = parse(name, found[0][1], zarr, found[0][0].label)
        for other, text in found[1:]:
            if text != found[0][1] and parse(name, text, zarr, other.label).metadata != array.metadata:
                raise FastshardError.of(
                    "FS107",
                    "two hosts describe this array differently: they are of different saves",
                    file=other.label,
                    tensor=name,
                    expected=f"{array.dtype} {list(array.shape)}, chunks {list(array.chunk)}, as in {found[0][0].label}",
                    help="give the directories of one save only",
                )
        union.arrays[name] = array
    return union


def _plain_keys(listing: Listing, place: Place) -> set[str]:
    """Keys of a store of plain files: paths below its folder."""
    prefix = place.inside("")
    return {
        f.path[len(prefix) :] for f in listing.files if f.root == place.root and f.path.startswith(prefix)
    }


class Reader:
    """Decodes blocks; a chunk that several stores hold must be the same in all of them."""

    def __init__(self, union: Union) -> None:
        self._union = union
        #: Block -> array, first element, extent, key of its chunk (None for one that holds the fill value).
        self.blocks: dict[str, tuple[Array, list[int], list[int], str | None]] = {}
        self._lock = threading.Lock()
        self._same: set[str] = set()

    def __call__(self, block: str, view: memoryview) -> None:
        """Fills ``view`` with the elements of a block."""
        array, lo, extent, key = self.blocks[block]
        if key is None:
            element = fill_bytes(array)
            if any(element):
                view[:] = element * (len(view) // len(element))
            return
        holders = self._union.holders(key)
        self._compare(array, key, lo, extent, holders)
        holders[0].store.decode(array.name, _driver(array), array.metadata, lo, extent, view)

    def _compare(self, array: Array, key: str, lo: list[int], extent: list[int], holders: list[Held]) -> None:
        with self._lock:
            if len(holders) == 1 or key in self._same:
                return
        first = holders[0]
        raw = first.store.read(key)
        for other in holders[1:]:
            if other.store.read(key) == raw:
                continue
            # Compressed anew the bytes may be others and the elements the same.
            one, two = (
                h.store.decoded(array.name, _driver(array), array.metadata, lo, extent)
                for h in (first, other)
            )
            if one != two:
                raise FastshardError.of(
                    "FS302",
                    f"two hosts hold different elements in chunk {key.rpartition('/')[0] and key[len(array.name) + 1 :]}",
                    file=other.label,
                    tensor=array.name,
                    expected=f"the same as in {first.label}",
                    help="give the directories of one save only; if the run let replicas drift, leave one host's directory out",
                )
        with self._lock:
            self._same.add(key)


def _driver(array: Array) -> str:
    return "zarr" if array.zarr == 2 else "zarr3"


def listed(
    union: Union, elided: dict[str, list[tuple[int, ...]]]
) -> tuple[Reader, list[tuple[str, str, list[int]]], dict[str, list[Any]]]:
    """The reader, its blocks (key, dtype, shape), and per array (first element, extent, number of block)."""
    reader = Reader(union)
    tensors: list[tuple[str, str, list[int]]] = []
    pieces: dict[str, list[Any]] = {}
    for name, array in sorted(union.arrays.items()):
        absent = set(elided.get(name, ()))
        pieces[name] = []
        if 0 in array.shape:
            continue
        for index in array.chunks():
            key = f"{name}/{array.key(index)}"
            if key not in union.keys and index not in absent:
                continue
            for number, (lo, extent) in enumerate(array.blocks(index)):
                block = key if array.block == array.chunk else f"{key}#{number}"
                reader.blocks[block] = (array, lo, extent, None if index in absent else key)
                pieces[name].append((lo, extent, len(tensors)))
                tensors.append((block, array.dtype, extent))
    return reader, tensors, pieces
