"""The target Orbax: one committed step with one item of arrays, and the metadata that Orbax restores from."""

from __future__ import annotations

import json
import math
from typing import Any

from .. import _core
from ..common import codes
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass, field
from ..common.target_options import ZARR2
from ..layouts.declaration import Source
from ..zarr.dtypes import ARRAY_DTYPES
from .base import Bound, Completed, Target
from .form import Form
from .request import Request

#: Maximum size of a chunk in bytes: small enough for memory, and for many hosts to read one array in
#: parallel.
BLOCK_BYTES = 8 << 20
#: Orbax's code for a dict key. source: orbax/checkpoint/_src/metadata/tree.py, KeyType.DICT
DICT_KEY = 2
#: Arrays are restored as numpy arrays unless the caller asks for jax arrays; `jax.Array` would require the
#: devices that wrote it.
_VALUE = "np.ndarray"
#: value_types that are restored as Python numbers. source: orbax type_handlers.py
_SCALARS = ("scalar", "int", "float", "bool")
#: The handler that restores a tree of arrays.
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


@dataclass
class OrbaxTarget(Target):
    """A store under ``<step>/<item>``. Tensor names are paths in the tree, joined by dots."""

    step: str
    item: str = "items"
    #: True for OCDBT, MaxText's default. Pathways reads plain zarr v2 (``--zarr2``).
    ocdbt: bool = True
    zarr: int = 3
    #: key_metadata by name, if the source states it. By default, every part of a name is a dict key.
    keys: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: Tree entries that are not arrays: name -> (key_metadata, value_metadata).
    leaves: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    #: value_type by name, if the source states it.
    types: dict[str, str] = field(default_factory=dict)
    #: Strings among the leaves, as the source stores them.
    strings: str | None = None
    #: Custom metadata for ``_CHECKPOINT_METADATA``; MaxText reads its ``scan_layers``.
    custom: dict[str, Any] = field(default_factory=dict)
    #: Scalars that the source does not contain: name -> (dtype, integer).
    counters: dict[str, tuple[str, int]] = field(default_factory=dict)
    name: str = "orbax"
    names = ("orbax",)
    options = (ZARR2,)
    is_whole = is_container = takes_any_head = writes_arrays = True

    @classmethod
    def of(cls, source: Source, request: Request) -> OrbaxTarget:
        """Make the target with the source's tensors and names."""
        tree, zarr2 = source.tree, request[ZARR2]
        return cls(
            step=_step(source.step),
            item=tree.item if tree else "items",
            ocdbt=not zarr2,
            zarr=2 if zarr2 else 3,
            keys=dict(tree.keys) if tree else {},
            leaves=dict(tree.leaves) if tree else {},
            types=dict(tree.types) if tree else {},
            strings=tree.strings if tree else None,
            custom=dict(tree.custom) if tree else {},
        )

    def form(self) -> Form:
        """Return the form of the result."""
        return Form(self.name)

    def complete(self, bound: Bound) -> Completed:
        """Return the store with its chunks, and its text files."""
        arrays = []
        for name, tensor in bound.tensors.items():
            items = math.prod(tensor.shape)
            item = tensor.bytes // items if items else 1
            arrays.append((name, name, block_of(tensor.shape, item)))
        arrays += [(name, name, []) for name in self.counters]
        shapes = {name: tensor.shape for name, tensor in bound.tensors.items()} | {
            name: [] for name in self.counters
        }
        self._distinct([name for name, *_ in arrays])
        self._writable({name: tensor.dtype for name, tensor in bound.tensors.items()})
        folder = f"{self.step}/{self.item}"
        how = {"ocdbt": self.ocdbt, "zarr": self.zarr}
        store: _core.PlacedFile = {"name": folder, "content": {"arrays": {"how": how, "arrays": arrays}}}
        return Completed(self.texts(shapes, arrays), self._changed(shapes), [store], constants=self.counters)

    def _distinct(self, names: list[str]) -> None:
        """Refuse a name that is also the parent of another name, because the tree cannot contain both."""
        places = {name: tuple(str(k["key"]) for k in self._keys(name)) for name in names}
        taken = set(places.values())
        for name, place in places.items():
            if any(place[:n] in taken for n in range(1, len(place))) or "" in place:
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    "these names cannot form a tree: one is the parent of another, or has an empty part",
                    tensor=name,
                    help="merge the checkpoint first, with --exclude for this tensor",
                )
            if "/" in name and not self.ocdbt:
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    "the name has a slash, which is not possible when each array is a directory",
                    tensor=name,
                    help="write one OCDBT store, without the option for zarr v2",
                )

    def _keys(self, name: str) -> list[dict[str, Any]]:
        return self.keys.get(name) or [{"key": k, "key_type": DICT_KEY} for k in name.split(".")]

    def _writable(self, dtypes: dict[str, str]) -> None:
        """Refuse dtypes that the store does not support, and incomplete lists."""
        for name, dtype in dtypes.items():
            if dtype not in ARRAY_DTYPES:
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    "arrays of this dtype cannot be written",
                    tensor=name,
                    expected=" | ".join(ARRAY_DTYPES),
                    got=dtype,
                    help="pass --dtype bf16 to dequantise them if their scales are present",
                )
        left = sorted(set(self.keys) - set(dtypes))
        listed = next(
            (n for n in dtypes if any(k.get("key_type") != DICT_KEY for k in self.keys.get(n, ()))), None
        )
        if left and listed is not None:
            raise FastshardError.of(
                codes.USAGE,
                "a tree with lists must be complete: without one entry the others would move",
                tensor=listed,
                got=f"{left[0]} left out",
                help="leave out --include and --exclude, or merge to safetensors",
            )

    def _changed(self, shapes: dict[str, list[int]]) -> list[Finding]:
        """Report entries that Orbax will restore as another type."""
        keys = [n for n in shapes if self.types.get(n) == "jax.random.key"]
        return (
            [
                Finding.of(
                    codes.IGNORED,
                    f"{len(keys)} random keys are written as plain numbers",
                    severity="warning",
                    tensor=keys[0],
                    help="wrap them with jax.random.wrap_key_data after restoring",
                )
            ]
            if keys
            else []
        )

    def texts(self, shapes: dict[str, list[int]], arrays: list[tuple[str, str, list[int]]]) -> dict[str, str]:
        """Return the small text files, by path.

        source: orbax/checkpoint/_src/metadata/{checkpoint,tree,array_metadata_store}.py; measured with 0.12.8
        """
        tree = {}
        for name, shape in shapes.items():
            keys = self._keys(name)
            kind = self.types.get(name)
            kind = kind if kind in _SCALARS and not shape else _VALUE
            value = {"value_type": kind, "skip_deserialize": False, "write_shape": shape}
            tree[_path(keys)] = {"key_metadata": keys, "value_metadata": value}
        for keys, value in self.leaves.values():
            tree.setdefault(_path(keys), {"key_metadata": keys, "value_metadata": value})
        metadata = {
            "tree_metadata": tree,
            "use_ocdbt": self.ocdbt,
            "use_zarr3": self.zarr == 3,
            # No chunk is left out, so one that is missing is lost.
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        described = [
            {
                "array_metadata": {
                    "param_name": name,
                    "write_shape": shapes[name],
                    "chunk_shape": block,
                    "ext_metadata": None,
                }
            }
            for name, _, block in arrays
        ]
        checkpoint = {
            "item_handlers": {self.item: _HANDLER},
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": None,
            "commit_timestamp_nsecs": None,
            "custom_metadata": self.custom,
        }
        # What it says is the writer's path elsewhere, and never read.
        done = "Checkpoint commit was successful\n"
        folder = f"{self.step}/{self.item}"
        strings = {} if self.strings is None else {f"{folder}/_strings.json": self.strings}
        documents = {
            f"{folder}/_METADATA": metadata,
            f"{folder}/array_metadatas/process_0": {"array_metadatas": described},
            f"{self.step}/_CHECKPOINT_METADATA": checkpoint,
        }
        texts = strings | {path: json.dumps(document) for path, document in documents.items()}
        return texts | dict.fromkeys((f"{at}/commit_success.txt" for at in (folder, self.step)), done)


def block_of(shape: list[int], item: int, limit: int = BLOCK_BYTES) -> list[int]:
    """Return the extents of a chunk: a run of C-ordered elements of at most ``limit`` bytes.

    All chunks have the same size if a divisor of the extent is close to the limit.
    """
    block = [max(1, n) for n in shape]
    for dim, n in enumerate(block):
        row = math.prod(block[dim + 1 :]) * item
        rows = limit // row if row else n
        if rows >= n:
            break
        if rows == 0:
            block[dim] = 1
            continue
        # A divisor makes all chunks alike, so that hosts can share them evenly.
        even = next((r for r in range(rows, max(1, rows // 2), -1) if n % r == 0), rows)
        block[dim] = even
        break
    return block


def _path(keys: list[dict[str, Any]]) -> str:
    """Return Orbax's key of a tree entry: the tuple of its keys, in Python's notation."""
    return str(tuple(str(k["key"]) for k in keys))


def _step(name: str | None) -> str:
    """Return the step's number, which Orbax's CheckpointManager uses as folder name."""
    digits = "".join(c for c in (name or "").rpartition("_")[2] if c.isdigit())
    return str(int(digits)) if digits else "0"
