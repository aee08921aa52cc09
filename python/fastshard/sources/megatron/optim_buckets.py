"""``dp_reshardable``: the distributed optimizer's flat buckets, with one set for each model-parallel rank.

The files do not name parameters. Their places follow from the model's order (:mod:`.optim_order`) and the
rules for buffers (:mod:`.optim_flat`). They are compared with the chunks: each parameter was saved in
separate chunks, so its bounds are chunk bounds. The core compares master weights with the parameters.
source: megatron/core/optimizer/distrib_optimizer.py (sharded_param_state_dp_reshardable)
"""

from __future__ import annotations

from typing import Any

from ...common.records import dataclass, field
from ...common.regex import compile_when_used
from ...layouts.declaration import Assembled
from .optim_flat import Part, Place, UnknownPlaces, in_buckets, pieces
from .optim_order import Kind, Ranks, Weights, kinds

KEY = compile_when_used(
    r"^(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<bucket>\d+)\.(?P<slot>\w+)$"
)

#: Name, shape, pieces: first index, extent, file, and tensor in the file.
Stored = tuple[str, list[int], list[Any]]


@dataclass
class _Buffer:
    dtype: str
    #: Tensors by bucket and slot.
    buckets: dict[int, dict[str, Stored]] = field(default_factory=dict)


#: (optimizer, group of ranks) -> buffers by number
_Buffers = dict[tuple[int, int], dict[int, _Buffer]]


class _Copies:
    """Boxes of full tensors.

    Several ranks have copies of some tensors (norms, a shared embedding). Each copy is declared as an
    additional tensor, for comparison.
    """

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        self._shapes = shapes
        self._copies: list[dict[str, list[Any]]] = []
        self._seen: dict[tuple[str, str], int] = {}

    def add(self, part: Part, boxes: list[Any]) -> None:
        """Add a rank's boxes of a tensor."""
        key = (part.name, repr(part.boxes))
        copy = self._seen[key] = self._seen.get(key, -1) + 1
        if copy == len(self._copies):
            self._copies.append({})
        self._copies[copy].setdefault(part.name, []).extend(boxes)

    def assembled(self, slot: str | None) -> list[Assembled]:
        """Return the tensors, and their copies."""
        return [
            Assembled(
                next((boxes[0][2] for boxes in tensors.values() if boxes), 0),
                {"replica": n} if len(self._copies) > 1 else {},
                f"copy {n}" if n else None,
                slot,
                [(name, self._shapes[name], boxes) for name, boxes in tensors.items()],
            )
            for n, tensors in enumerate(self._copies)
        ]


def read(weights: Weights, args: dict[str, Any], tensors: list[Stored]) -> list[Assembled]:
    """Return master weights and slots by parameter.

    Raises:
        UnknownPlaces: if the places of the parameters are not certain.
    """
    buffers: _Buffers = {}
    for name, shape, chunks in tensors:
        match = KEY.match(name)
        if match is None:
            raise UnknownPlaces(f"no bucket of a buffer: {name}")
        key = (int(match["chain"] or 0), int(match["group"]))
        buffer = buffers.setdefault(key, {}).setdefault(int(match["buffer"]), _Buffer(match["dtype"]))
        buffer.buckets.setdefault(int(match["bucket"]), {})[match["slot"]] = (name, shape, chunks)
    most = sum(len(chunks) for _, _, chunks in tensors)
    fitting: list[tuple[Kind, list[tuple[dict[str, Stored], list[Place]]]]] = []
    failed: UnknownPlaces | None = None
    for kind in kinds(args, any(".experts." in name for name in weights)):
        try:
            found = _placed(Ranks(weights, args, most), kind, buffers)
        except UnknownPlaces as error:
            failed = failed or error
            continue
        fitting.append((kind, found))
    if not fitting:
        raise failed or UnknownPlaces("the order of the parameters is unknown")
    places = [[(p.name, a, b) for _, bucket in found for p, a, b in bucket] for _, found in fitting]
    if any(other != places[0] for other in places[1:]):
        raise UnknownPlaces(
            "the parameters fit into the buffers in more than one order",
            "arguments that state which (transformer_impl, moe_grouped_gemm)",
            " or ".join(kind.called for kind, _ in fitting),
        )
    slots: dict[str, _Copies] = {}
    shapes = {name: shape for name, (shape, _, _) in weights.items()}
    for bucket, places_there in fitting[0][1]:
        for slot, (_, _, chunks) in bucket.items():
            copies = slots.setdefault(slot, _Copies(shapes))
            for part, boxes in _cut(places_there, chunks):
                copies.add(part, boxes)
    return [a for slot, copies in slots.items() for a in copies.assembled(None if slot == "param" else slot)]


def _placed(ranks: Ranks, kind: Kind, buffers: _Buffers) -> list[tuple[dict[str, Stored], list[Place]]]:
    """Return each bucket with the parameters in it."""
    lists: dict[tuple[int, int], list[list[Part]]] = {}
    # Not every stage has experts.
    if max(ranks.tp * ranks.pp, ranks.etp * ranks.ep if ranks.ep > 1 else 0) > len(buffers):
        raise _other_ranks(ranks.tp * ranks.pp + ranks.etp * ranks.ep * ranks.pp * (ranks.ep > 1), buffers)
    for stage in range(ranks.pp):
        for tp in range(ranks.tp):
            of_chunks = [ranks.parts(kind, tp, stage, chunk) for chunk in range(ranks.vp)]
            lists[0, stage * ranks.tp + tp] = of_chunks
        for ep in range(ranks.ep if ranks.ep > 1 else 0):
            for tp in range(ranks.etp):
                of_chunks = [ranks.experts(kind, tp, ep, stage, chunk) for chunk in range(ranks.vp)]
                if any(of_chunks):
                    lists[1, (stage * ranks.ep + ep) * ranks.etp + tp] = of_chunks
    if left := ranks.unused():
        raise UnknownPlaces(f"the position of {min(left)} among the parameters is unknown")
    if lists.keys() != buffers.keys():
        raise _other_ranks(len(lists), buffers)
    found: list[tuple[dict[str, Stored], list[Place]]] = []
    for key, chunks in lists.items():
        wanted = [(dtype, parts) for parts in chunks for dtype, parts in _by_dtype(parts)]
        numbered = [buffers[key].get(n) for n in range(len(wanted))]
        if len(buffers[key]) != len(wanted):
            raise UnknownPlaces("buffers of a rank", str(len(wanted)), str(len(buffers[key])))
        for (dtype, parts), buffer in zip(wanted, numbered, strict=True):
            found += _filled(dtype, parts, buffer)
    return found


def _other_ranks(expected: int, buffers: _Buffers) -> UnknownPlaces:
    return UnknownPlaces(
        "the buffers are for other model-parallel ranks than the arguments state",
        f"buffers of {expected} ranks",
        f"buffers of {len(buffers)} ranks",
    )


def _by_dtype(parts: list[Part]) -> list[tuple[str, list[Part]]]:
    """Group parameters into the buffers of a model chunk: one per dtype, in order of occurrence."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.dtype, []).append(part)
    return list(found.items())


def _filled(
    dtype: str, parts: list[Part], buffer: _Buffer | None
) -> list[tuple[dict[str, Stored], list[Place]]]:
    if buffer is None or buffer.dtype != dtype or sorted(buffer.buckets) != list(range(len(buffer.buckets))):
        raise UnknownPlaces("a buffer", f"of {dtype}, all its buckets", buffer.dtype if buffer else "none")
    ordered = [buffer.buckets[k] for k in range(len(buffer.buckets))]
    lengths = [{shape[0] for _, shape, _ in slots.values() if len(shape) == 1} for slots in ordered]
    every = set().union(*(set(slots) for slots in ordered))
    if "param" not in every:
        raise UnknownPlaces("no master weights show the positions of the parameters")
    if any(len(n) != 1 for n in lengths) or any(set(slots) != every for slots in ordered):
        raise UnknownPlaces("the states in a bucket differ in size")
    buckets = in_buckets(parts, [n.pop() for n in lengths])
    if buckets is None:
        raise UnknownPlaces(
            f"the buckets do not fit the model: {next(iter(ordered[0].values()))[0]}",
            f"{sum(p.numel for p in parts)} elements of {len(parts)} parameters, and alignment padding",
            f"{sum(next(iter(slots.values()))[1][0] for slots in ordered)} elements "
            f"in {len(ordered)} buckets",
        )
    for slots, bucket in zip(ordered, buckets, strict=True):
        for name, _, chunks in slots.values():
            _bounded(name, bucket, chunks)
    return list(zip(ordered, buckets, strict=True))


def _bounded(name: str, bucket: list[Place], chunks: list[Any]) -> None:
    """Check that parameters begin and end at chunk bounds.

    No chunk contains parts of two parameters, or part of a parameter and elements that were never written.
    """
    bounds = sorted((lo[0], lo[0] + size[0]) for lo, size, _, _ in chunks)
    begins, ends = {a for a, _ in bounds}, {b for _, b in bounds}
    at = 0
    for part, start, end in bucket:
        if start not in begins or end not in ends:
            raise UnknownPlaces(
                f"{part.name} is not at its expected place in {name}",
                f"chunks from {start} to {end}",
                "chunks with other bounds",
            )
        while at < len(bounds) and bounds[at][0] < end:
            a, b = bounds[at]
            if (a < start < b) or (a < end < b):
                raise UnknownPlaces(
                    f"a chunk of {name} extends beyond {part.name}",
                    f"from {start} to {end}",
                    f"from {a} to {b}",
                )
            at += 1


def _cut(bucket: list[Place], chunks: list[Any]) -> list[tuple[Part, list[Any]]]:
    """Return the boxes of each parameter in a bucket, with chunks sorted by place."""
    ordered = sorted(chunks, key=lambda chunk: chunk[0][0])
    found: list[tuple[Part, list[Any]]] = []
    at = 0
    for part, start, end in bucket:
        boxes: list[Any] = []
        while at < len(ordered) and ordered[at][0][0] + ordered[at][1][0] <= start:
            at += 1
        n = at
        while n < len(ordered) and ordered[n][0][0] < end:
            lo, size, file, number = ordered[n]
            first = max(lo[0], start)
            count = min(lo[0] + size[0], end) - first
            boxes += pieces(part, first - start, count, file, number, first - lo[0])
            n += 1
        found.append((part, boxes))
    return found
