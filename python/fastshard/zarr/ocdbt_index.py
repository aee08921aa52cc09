"""The index of an OCDBT database, which states the file of each value, read without reading a value.

source: tensorstore/kvstore/ocdbt/index.rst (format), dump_util.cc (the JSON of its nodes)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

#: Limits far above the size of an index for a run of thousands of processes.
MAX_NODES = 1 << 18
MAX_KEYS = 1 << 22
#: Maximum size of a node in bytes. source: tensorstore ocdbt/config.h, kMaxMaxDecodedNodeBytes
_MAX_NODE = 256 << 20

#: Path of a file relative to the database, offset and length in bytes.
Place = tuple[str, int, int]


def walk(
    library: Any,
    base: dict[str, Any],
    sizes: Mapping[str, int],
    bring: Callable[[Place], None] = lambda place: None,
) -> Iterator[tuple[str, Place | None]]:
    """Yield the keys of the newest version, in order, with the places of their values.

    The place is None for a value in the index itself.

    Args:
        library: the module tensorstore.
        base: spec of the folder.
        sizes: files below it that may be read, with their sizes in bytes.
        bring: called with the place of each node before it is read.

    Raises:
        ValueError: for an index that is malformed, refers to files that may not be read, or is larger than
            that of any run.
    """
    store = library.KvStore.open(base).result()
    versions = library.ocdbt.dump(store).result().get("versions")
    if not versions:
        raise ValueError("its manifest names no version")
    root = versions[-1]["root"].get("location")
    waiting = [(root, b"")] if root is not None else []
    seen: set[str] = set()
    keys = 0
    while waiting:
        location, prefix = waiting.pop()
        # A node in two places would make the tree's size exponential in its nodes.
        if location in seen or len(seen) >= MAX_NODES:
            raise ValueError(f"its tree repeats a node, or has more than {MAX_NODES}")
        seen.add(location)
        kind, place = _location(location)
        if kind != "btreenode" or place[2] > _MAX_NODE:
            raise ValueError(f"no place of a node: {location[:200]}")
        if why := unreadable(place, sizes):
            raise ValueError(f"a node of its tree cannot be read: {why}")
        below = []
        bring(place)
        for entry in library.ocdbt.dump(store, location).result()["entries"]:
            if "location" in entry:
                below.append((entry["location"], prefix + entry["subtree_common_prefix"]))
                continue
            keys += 1
            if keys > MAX_KEYS:
                raise ValueError(f"more than {MAX_KEYS} keys")
            key = (prefix + entry["key"]).decode("utf-8", "backslashreplace")
            if "inline_value" in entry:
                yield key, None
                continue
            kind, place = _location(entry["indirect_value"])
            if kind != "value":
                raise ValueError(f"no place of a value: {entry['indirect_value'][:200]}")
            yield key, place
        waiting += reversed(below)


def unreadable(place: Place, sizes: Mapping[str, int]) -> str | None:
    """Return the reason why a range of a file cannot be read; None if it can."""
    path, offset, length = place
    size = sizes.get(path)
    if size is None:
        return f"{path} is missing"
    if offset + length > size:
        return f"{path} is truncated: {offset + length} bytes expected, {size} there"
    return None


def _location(text: str) -> tuple[str, Place]:
    """Parse kind and place from ``kind:base:relative:offset:length`` (names are percent-encoded)."""
    parts = text.split(":")
    if len(parts) != 5:
        raise ValueError(f"no place: {text[:200]}")
    return parts[0], (unquote(parts[1]) + unquote(parts[2]), int(parts[3]), int(parts[4]))
