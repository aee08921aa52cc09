"""Orbax's metadata files: the tree of an item, shardings, and the metadata of a step.

source: orbax/checkpoint/_src/metadata/{tree,sharding,checkpoint}.py
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Any

from ...common import codes
from ...common.config_text import parse_json
from ...common.errors import FastshardError
from ...common.records import dataclass, field

#: Minimum distance between device ids of two CPU processes. source: jax, measured: 2048 and 131072
_LEAST_STRIDE = 1024
#: value_types of entries with an array. source: orbax .../tree.py value types; scalars are arrays of rank 0
_ARRAYS = ("jax.Array", "np.ndarray", "scalar", "int", "float", "bool", "jax.random.key")
#: The value_types among these that one process holds; the first process writes them. source: orbax
#: type_handlers.py, NumpyHandler
BY_PRIMARY = ("np.ndarray", "scalar", "int", "float", "bool")


@dataclass
class Tree:
    """The contents of an item's ``_METADATA``."""

    #: key_metadata of every array, by name (keys joined by dots).
    arrays: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: value_type of each array.
    types: dict[str, str] = field(default_factory=dict)
    #: Entries without an array: (key_metadata, value_metadata).
    leaves: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    #: True if chunks that equal the fill value are stored too; None if this is not stated.
    stores_fill: bool | None = None
    #: Arrays under whose names other entries are stored too, because their joined keys are equal: the paths
    #: of these entries.
    shared: dict[str, list[str]] = field(default_factory=dict)


def parse_tree(text: str, where: str) -> Tree:
    """Parse the tree of ``_METADATA``.

    Raises:
        FastshardError: ``FS601`` if it is malformed.
    """

    def malformed(what: str) -> FastshardError:
        return FastshardError.of(
            codes.UNSAFE_HEADER,
            f"metadata of the tree: {what}",
            file=where,
            help="copy the file again: it is damaged",
        )

    try:
        described = parse_json(text)
    except ValueError as error:
        raise malformed(str(error)) from None
    entries = described.get("tree_metadata") if isinstance(described, dict) else None
    if not isinstance(entries, dict):
        raise malformed("no tree_metadata")
    tree = Tree()
    stored = described.get("store_array_data_equal_to_fill_value")
    tree.stores_fill = stored if isinstance(stored, bool) else None
    for path, entry in entries.items():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        value = entry.get("value_metadata") if isinstance(entry, dict) else None
        if not isinstance(keys, list) or not keys or not isinstance(value, dict):
            raise malformed(f"entry {path[:80]}")
        if any(not isinstance(k, dict) or not isinstance(k.get("key"), (str, int)) for k in keys):
            raise malformed(f"keys of {path[:80]}")
        name = ".".join(str(k["key"]) for k in keys)
        if not value.get("skip_deserialize") and value.get("value_type") in _ARRAYS:
            if name in tree.arrays:
                tree.shared.setdefault(name, []).append(path)
            tree.arrays[name] = keys
            tree.types[name] = str(value["value_type"])
        else:
            tree.leaves[path if name in tree.leaves else name] = (keys, value)
    return tree


@dataclass(frozen=True)
class Sharding:
    """The sharding of an array: the mesh's device ids in C order, and the mesh axes of each dimension."""

    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    ids: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]

    @property
    def alone(self) -> bool:
        """True for an array on one device without a mesh, which only a single-process run saves.

        source: orbax type_handlers.py, ``Cannot serialize host local arrays``
        """
        return not self.axes


def parse_shardings(text: str) -> dict[str, Sharding]:
    """Parse shardings by array and skip malformed entries, because shardings are only evidence."""
    try:
        described = parse_json(text)
    except ValueError:
        return {}
    found = {}
    for encoded, value in described.items() if isinstance(described, dict) else ():
        try:
            name = base64.b64decode(encoded, validate=True).decode("utf-8")
            sharding = _sharding(parse_json(value))
        except (binascii.Error, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            continue
        if sharding is not None:
            found[name] = sharding
    return found


def _sharding(value: Any) -> Sharding | None:
    if not isinstance(value, dict):
        return None
    if value.get("sharding_type") == "SingleDeviceSharding":
        # As jax prints a device: TFRT_CPU_0, cuda:0, TPU_0(process=0,(0,0,0,0)).
        number = re.search(r"\d+", value["device_str"])
        return None if number is None else Sharding((), (), (int(number[0]),), ())
    if value.get("sharding_type") != "NamedSharding":
        return None
    mesh = tuple(int(n) for n in value["shape"])
    ids: list[int] = []
    pending = [value["device_mesh"]["mesh"]]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            ids.append(int(part["id"]))
        elif isinstance(part, list):
            pending.extend(reversed(part))
        else:
            raise ValueError("a mesh of objects other than devices")
    axes = tuple(str(a) for a in value["axis_names"])
    spec = tuple(
        () if s is None else (s,) if isinstance(s, str) else tuple(map(str, s))
        for s in value["partition_spec"]
    )
    if len(axes) != len(mesh) or math.prod(mesh) != len(ids):
        raise ValueError("axes, shape and devices of a mesh that do not match")
    return Sharding(mesh, axes, tuple(ids), spec)


def processes_of(ids: set[int]) -> dict[int, int] | None:
    """Return the process of each device; None if the ids do not determine it.

    jax numbers the devices of a CPU process starting from a power of two. A single range of consecutive ids
    may be one process or many, because GPUs and TPUs are numbered without gaps.
    """
    ordered = sorted(ids)
    starts = [now for before, now in zip([None, *ordered], ordered, strict=False) if now - 1 != before]
    if len(starts) < 2 or starts[0] != 0:
        return None
    # The processes' first devices are 0, s, 2s, ...: other gaps are devices that took no part.
    stride = starts[1]
    if stride < _LEAST_STRIDE or stride & (stride - 1) or starts != [i * stride for i in range(len(starts))]:
        return None
    return {device: device // stride for device in ordered}
