"""The origin of an output tensor as plain data: rules, ranks, files, offsets and operations on its values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from .. import _core
from ..common.dtypes import item_size
from ..layouts.declaration import Binding
from .box_text import Run, meets, of_flat, slices, strides
from .head_text import heads

__all__ = ["excerpt_of", "find_heads", "origin"]


def excerpt_of(plan: _core.Plan, position: int) -> dict[str, Any]:
    """Return the part of a plan's document that describes one output."""
    document: dict[str, Any] = json.loads(plan.excerpt(position))
    return document


def origin(excerpt: dict[str, Any]) -> dict[str, Any]:
    """Describe the sources of the single output in a plan's excerpt, as in ``fastshard trace --json``."""
    (output,) = excerpt["outputs"]
    file = excerpt["files"][output["file"]] if excerpt["files"] else None
    place = file and {
        "name": file["name"],
        "key": output.get("key", output["name"]),
        # A store of arrays has no offsets.
        **({} if "arrays" in file.get("form", ()) else {"offset": output["offset"]}),
    }
    return {
        "name": output["name"],
        "dtype": output["dtype"],
        "shape": output["shape"],
        "written_to": place,
        "padding": output["fill"] != "none",
        "parts": [_part(excerpt, output, part) for part in output["parts"]],
    }


def _part(excerpt: dict[str, Any], output: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    sources = [excerpt["stored"][number] for number in part["sources"]]
    return {
        "region": of_flat(output["shape"], part["dst_base"], [(a["n"], a["dst"]) for a in part["axes"]]),
        "elements": math.prod(axis["n"] for axis in part["axes"]),
        "made_by": _combined(part["combine"], len(sources)),
        "ops": [_op(op) for op in part.get("ops", [])],
        "sources": [_source(excerpt, tensor, part, output["dtype"]) for tensor in sources],
    }


def _combined(combine: Any, sources: int) -> str:
    if isinstance(combine, dict):
        return f"zeros, as all must be: {combine['zero']} is not known"
    if sources == 1:
        return "copy"
    words = {"equal": "copy, bit-equal on all ranks", "mean": "mean in float32", "sum": "sum in float32"}
    return words[combine]


def _op(op: dict[str, float]) -> str:
    ((kind, value),) = op.items()
    return f"{'times' if kind == 'scale' else 'plus'} {value:g}"


def _source(
    excerpt: dict[str, Any], tensor: dict[str, Any], part: dict[str, Any], dtype: str
) -> dict[str, Any]:
    """Describe the region that a part takes from a stored tensor, and the place of its bytes."""
    runs = _runs(tensor, part)
    base = part["src_base"]
    taken: dict[str, Any] = {
        "name": tensor["name"],
        "rank": tensor.get("rank"),
        "rule": excerpt["rules"][tensor["rule"]],
        "dtype": tensor["dtype"],
        "shape": tensor["shape"],
        "region": slices(tensor["shape"], base, runs),
    }
    if coded := tensor["pieces"].get("coded"):
        codes, *others = _made_of(excerpt, coded)
        taken["values_of"] = {key: codes[key] for key in ("name", "dtype", "shape")}
        taken["made_with"] = list(dict.fromkeys(one["name"] for one in others))
        whole = [place for one in (codes, *others) for place in _places(one, [], [])]
        taken["places"] = [_place(excerpt, *found) for found in dict.fromkeys(whole)]
        return taken
    taken["places"] = [_place(excerpt, *found) for found in _places(tensor, base, runs)]
    if tensor["dtype"] != dtype:
        taken["cast_to"] = dtype
    if twins := tensor.get("twins"):
        taken["compared_with"] = [excerpt["stored"][twin]["name"] for twin in twins]
    return taken


def _runs(tensor: dict[str, Any], part: dict[str, Any]) -> list[list[Run]]:
    """List the runs that a part takes of each dimension of a stored tensor."""
    runs: list[list[Run]] = [[] for _ in tensor["shape"]]
    for axis in part["axes"]:
        runs[axis["dim"]].append((axis["n"], axis["step"]))
    return runs


def find_heads(excerpt: dict[str, Any], binding: Binding) -> dict[tuple[str, str], str]:
    """Find which heads an output takes from tensors that fuse queries, keys and values.

    Args:
        excerpt: as for :func:`origin`.
        binding: the table with which the stored tensors are read.

    Returns:
        Descriptions of the heads, by the stored tensor's name and the region.
    """
    table = binding.effective_table
    (output,) = excerpt["outputs"]
    found: dict[tuple[str, str], str] = {}
    for part in output["parts"]:
        for tensor in (excerpt["stored"][number] for number in part["sources"]):
            rule, shape = table and table.rule_of(tensor["name"]), tensor["shape"]
            if rule is None or len(rule.dimensions or ()) != len(shape):
                continue
            base, runs = part["src_base"], _runs(tensor, part)
            region = slices(shape, base, runs)
            rows = zip(rule.dimensions or (), shape, base, runs, region[1:-1].split(", "), strict=True)
            for dimension, extent, first, run, text in rows:
                words = None if text == ":" else heads(dimension, extent, first, run, binding.axes)
                if words is not None:
                    found[tensor["name"], region] = words
    return found


def _made_of(excerpt: dict[str, Any], coded: dict[str, Any]) -> list[dict[str, Any]]:
    """List the stored tensors from which values are computed, starting with the codes."""
    numbers, groups = coded["numbers"], coded.get("groups")
    grids = [scale["grid"] for scale in coded.get("scales", ())] + (
        [coded["zero"]] if "zero" in coded else []
    )
    needs = [coded["codes"], *(grid["of"] for grid in grids)]
    needs += [numbers["table"]] if isinstance(numbers, dict) and "table" in numbers else []
    needs += [groups["of"]] if groups else []
    found: list[dict[str, Any]] = []
    for number in needs:
        tensor = excerpt["stored"][number]
        inner = tensor["pieces"].get("coded")
        found += [tensor] if inner is None else _made_of(excerpt, inner)
    return found


def _places(
    tensor: dict[str, Any], base: Sequence[int], runs: Sequence[Sequence[Run]]
) -> Iterator[tuple[int, int, int]]:
    """Yield (blob, first byte in it, bytes) for the pieces of a stored tensor that overlap a box of it."""
    ((form, pieces),) = tensor["pieces"].items()
    item = item_size(tensor["dtype"])
    if form == "view":
        yield pieces["blob"], pieces["offset"], _spanned(tensor["shape"], pieces["strides"]) * item
        return
    if form == "boxes":
        for box in pieces:
            if all(
                meets(first, run, lo, lo + n)
                for first, run, lo, n in zip(base, runs, box["lo"], box["len"], strict=True)
            ):
                steps = box.get("strides") or strides(box["len"])
                yield box["blob"], box["offset"], _spanned(box["len"], steps) * item
        return
    steps = strides(tensor["shape"])
    start = sum(at * step for at, step in zip(base, steps, strict=True))
    axes = [(n, step * whole) for run, whole in zip(runs, steps, strict=True) for n, step in run]
    for piece in pieces:
        if meets(start, axes, piece["start"], piece["start"] + piece["len"]):
            yield piece["blob"], piece["offset"], piece["len"] * item


def _spanned(shape: Sequence[int], steps: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one of a strided view."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))


def _place(excerpt: dict[str, Any], number: int, offset: int, nbytes: int) -> dict[str, Any]:
    """Describe a range of a file.

    For compressed data it is the complete member, with the range in the decompressed data.
    """
    blob = excerpt["blobs"][number]
    file = excerpt["sources"][blob["file"]]
    packed = bool(blob.get("deflated") or blob.get("encoded"))
    place = {"file": file["path"], "root": file["root"]}
    if "member" in blob:
        place["member"] = blob["member"]
    if not blob.get("encoded"):
        # Where a chunk of a store lies is its store's affair.
        place["offset"] = blob["offset"] + (0 if packed else offset)
        place["bytes"] = blob["stored_len"] if packed else nbytes
    if packed:
        place["decoded"] = {"offset": offset, "bytes": nbytes}
    if "crc32" in blob:
        place["crc32"] = f"{blob['crc32']:08x}"
    if file["header"]:
        place["header_blake3"] = file["header"]
    return place
