"""DeepSpeed's AutoTP: how ranks divide each parameter, according to the piece map in the model file.

A piece is a block of the full parameter (``source``: offset and strides), with its place on a rank
(``dest``). A parameter is supported if it is divided along one dimension, with each of its parts divided
evenly. Others are refused by name.
source: DeepSpeed module_inject/layers.py (collect_autotp_universal_checkpoint_info), checkpoint/affine.py,
    0.19
"""

from __future__ import annotations

import math
import re
from typing import Any

from ...common import codes
from ...common.errors import FastshardError
from ...layouts.declaration import Source
from ..base import Contents, Found, as_dict
from ..zero.flat_state import is_shape, tensor_index

_INFO = "universal_checkpoint_info"
#: source: checkpoint/affine.py (AFFINE_MAP_FORMAT_VERSION)
_VERSION = 1

#: The dimension that ranks divide, and the parts of a fused parameter along it.
Divided = tuple[int | None, list[int]]


def degree(states: list[dict[str, Any]]) -> int:
    """Return the number of ranks over which AutoTP divided the model; 1 without AutoTP."""
    config = as_dict(states[0].get("ds_config")) if states else {}
    size = as_dict(config.get("tensor_parallel")).get("autotp_size")
    return size if isinstance(size, int) and size > 1 else 1


def take(source: Source, found: Found[object], contents: Contents, states: list[dict[str, Any]]) -> None:
    """Add the rule of each parameter to a declaration.

    Raises:
        FastshardError: ``FS514`` if the files do not state how a parameter is divided, or the division is not
            supported.
    """
    tp = degree(states)
    path = found.files[0].path
    affine_map = as_dict(as_dict(states[0].get(_INFO)).get("affine_map"))
    pieces = as_dict(affine_map.get("params"))
    unsupported = as_dict(as_dict(states[0].get(_INFO)).get("autotp_unsupported_parameter_patterns"))
    if not pieces or affine_map.get("version") != _VERSION:
        raise _refused(
            f"DeepSpeed automatic tensor parallelism (autotp_size {tp}): the model file does not state how "
            "ranks divide"
            " the parameters",
            path,
            None,
            "universal_checkpoint_info with an affine_map, as since DeepSpeed 0.19",
            "none",
        )
    for pattern, reason in unsupported.items():
        raise _refused(f"DeepSpeed does not know how this is divided: {reason}", path, _name(pattern))
    rules: dict[str, Divided] = {}
    for pattern, entry in pieces.items():
        name = _name(pattern)
        rule = None if name is None else _rule(as_dict(entry), tp)
        if name is None or rule is None:
            raise _refused(
                f"DeepSpeed automatic tensor parallelism (autotp_size {tp}): a parameter that is not divided "
                "evenly along"
                " one dimension, or is scaled",
                path,
                name or pattern,
            )
        rules[name] = rule
    _aliases(rules, found, contents, states, path)
    source.binding.generic = [(name, *rule) for name, rule in rules.items()]


def _aliases(
    rules: dict[str, Divided],
    found: Found[object],
    contents: Contents,
    states: list[dict[str, Any]],
    path: str,
) -> None:
    """Copy a parameter's rule to its aliases, and refuse tensors that are neither aliases nor buffers."""
    module = as_dict(states[0].get("module"))
    shared = as_dict(states[0].get("shared_params"))
    names = states[0].get("buffer_names")
    buffers = set(names) if isinstance(names, list) else set()
    tensors = contents.tensors(0) if contents.readable(0) else []

    def place(name: str) -> tuple[Any, ...] | None:
        index = tensor_index(module.get(name))
        if index is None or not tensors[index]["storage_bytes"]:
            return None
        tensor = tensors[index]
        return tensor["storage"], tensor["offset"], tuple(tensor["shape"])

    owners = {place(name): rule for name, rule in rules.items()}
    for name in module:
        if name in rules or name in buffers:
            continue
        rule = rules.get(str(shared.get(name))) or (owners.get(place(name)) if place(name) else None)
        if rule is None:
            raise _refused(
                "DeepSpeed automatic tensor parallelism: the model file does not state how ranks divide this",
                path,
                name,
            )
        rules[name] = rule


def _refused(
    message: str, path: str, tensor: str | None, expected: str | None = None, got: str | None = None
) -> FastshardError:
    return FastshardError.of(
        codes.UNSUPPORTED,
        f"{message}; this is not supported",
        file=path,
        tensor=tensor,
        expected=expected,
        got=got,
        help="save it with DeepSpeed 0.19 or newer, or convert it to a universal checkpoint "
        "(ds_to_universal), or describe in your own layout how its tensors are divided (--layout "
        "FILE.toml)",
    )


def _name(pattern: Any) -> str | None:
    """Return the name that a pattern matches, if it matches exactly one."""
    if not isinstance(pattern, str) or not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
    return name if re.escape(name) == pattern[1:-1] else None


def _rule(entry: dict[str, Any], tp: int) -> Divided | None:
    """Return the dimension that ranks divide, according to all ranks' pieces; None for another division."""
    logical, ranks = entry.get("logical_shape"), as_dict(entry.get("ranks"))
    if not is_shape(logical) or set(ranks) != {str(r) for r in range(tp)} or not isinstance(logical, list):
        return None
    shards = [as_dict(ranks[str(r)]).get("shard_shape") for r in range(tp)]
    shape = shards[0]
    if not isinstance(shape, list) or len(shape) != len(logical) or any(s != shape for s in shards):
        return None
    differ = [d for d, (n, w) in enumerate(zip(shape, logical, strict=True)) if n != w]
    if not differ:
        whole = [_spans(as_dict(ranks[str(r)]), logical, shape, 0) for r in range(tp)]
        return (None, []) if all(s == [(0, 0, shape[0] if shape else 1)] for s in whole) else None
    d = differ[0]
    if len(differ) > 1 or shape[d] * tp != logical[d]:
        return None
    spans = [_spans(as_dict(ranks[str(r)]), logical, shape, d) for r in range(tp)]
    first = spans[0]
    if first is None:
        return None
    parts = [count * tp for *_, count in first]
    for r, own in enumerate(spans):
        at, start, expected = 0, 0, []
        for part in parts:
            expected.append((at, start + r * (part // tp), part // tp))
            at, start = at + part // tp, start + part
        if own != expected:
            return None
    return d, parts if len(parts) > 1 else []


def _spans(
    rank: dict[str, Any], logical: list[int], shape: list[int], d: int
) -> list[tuple[int, int, int]] | None:
    """Return the place and extent of each piece along a dimension, in the shard's order.

    A place is the first index in the shard and the first index in the full tensor. The result is None if a
    piece is not a slice along the dimension.
    """
    spans, pieces = [], rank.get("pieces")
    for piece in pieces if isinstance(pieces, list) else ():
        fields = as_dict(piece)
        extent = fields.get("shape")
        ends = [fields.get("source"), fields.get("dest")]
        if not isinstance(extent, list) or fields.get("scale", 1.0) != 1.0:
            return None
        if any(e != (shape[k] if k != d else e) for k, e in enumerate(extent)) or len(extent) != len(shape):
            return None
        starts = []
        for end, outer in zip(ends, (logical, shape), strict=True):
            if (
                not isinstance(end, list)
                or len(end) != 2
                or type(end[0]) is not int
                or end[1] != _strides(outer)
            ):
                return None
            step = _strides(outer)[d] if outer else 1
            if end[0] % step:
                return None
            starts.append(end[0] // step)
        spans.append((starts[1], starts[0], extent[d] if extent else 1))
    return sorted(spans)


def _strides(shape: list[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]
