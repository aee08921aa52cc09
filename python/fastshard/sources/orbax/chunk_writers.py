"""The writer of a chunk, according to the shardings that a save states, and whether other chunks of that
writer exist.

A process writes its part of an OCDBT store at once, and the chunks of its devices are together. Therefore, if
one of them exists, a missing chunk of the same writer was omitted, not lost. source:
orbax/checkpoint/type_handlers.py (0.6.4): one atomic transaction for all arrays; the first replica's shards
are written, or (``primary_host=None``) each process' own
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Set

from ...common.formatting import some
from ...common.records import dataclass, field
from .metadata import Sharding
from .zarr_metadata import Array

#: One part of a mesh: the number of a sharding, and the position along each axis by which an array is
#: divided.
_Part = tuple[int, tuple[tuple[str, int], ...]]


@dataclass
class _Seen:
    """The devices and processes whose chunks exist."""

    #: Devices that wrote a chunk, or may have written one.
    devices: set[int] = field(default_factory=set)
    #: Sets of devices that had a chunk, if it is known which of them wrote it; and the same sets by their
    #: lowest device.
    holders: set[frozenset[int]] = field(default_factory=set)
    lowest: dict[int, list[frozenset[int]]] = field(default_factory=dict)
    #: Devices of first replicas.
    first: set[int] = field(default_factory=set)


class Writers:
    """The writers of chunks, determined on demand."""

    def __init__(
        self,
        arrays: Mapping[str, Array],
        keys: Set[str],
        shardings: Mapping[str, Sharding],
        by_primary: Set[str] = frozenset(),
    ) -> None:
        """Prepare the search for writers.

        Args:
            arrays: arrays by name.
            keys: all keys of the store.
            shardings: shardings by name of array.
            by_primary: arrays that the process which writes the metadata also writes.
        """
        self._arrays = arrays
        self._keys = keys
        self._by_primary = by_primary
        numbers: dict[Sharding, int] = {}
        self._shardings = {n: (numbers.setdefault(s, len(numbers)), s) for n, s in shardings.items()}
        self._parts: dict[_Part, tuple[int, ...]] = {}
        self._seen: _Seen | None = None

    def devices(self, array: Array, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return the devices that had a chunk, starting with the first replica's; none if unknown."""
        return self._find_holders(array, index)[0]

    def first(self, array: Array, index: tuple[int, ...]) -> int | None:
        """Return the device whose process wrote a chunk, if exactly one process did."""
        devices, exact = self._find_holders(array, index)
        return devices[0] if exact and devices else None

    def here(self, array: Array, index: tuple[int, ...]) -> bool | None:
        """Return True if other chunks of a chunk's writer exist, False if its devices wrote none.

        None if neither is certain.
        """
        if array.name in self._by_primary:
            return True
        devices, exact = self._find_holders(array, index)
        if not devices:
            return None
        seen = self._present()
        if exact:
            # Were each process' own replicas written, one of these alone need not have written the first
            # ones.
            own = frozenset(devices)
            within = own in seen.holders or any(s < own for d in devices for s in seen.lowest.get(d, ()))
            if within and devices[0] in seen.first:
                return True
        elif all(frozenset((d,)) in seen.holders for d in devices):
            return True
        return False if seen.devices.isdisjoint(devices[:1] if exact else devices) else None

    def _present(self) -> _Seen:
        if self._seen is None:
            seen = self._seen = _Seen()
            known: set[tuple[int, ...]] = set()
            for name in self._shardings:
                array = self._arrays.get(name)
                if array is None or name in self._by_primary or 0 in array.shape:
                    continue
                for index in array.chunks():
                    if f"{name}/{array.key(index)}" not in self._keys:
                        continue
                    devices, exact = self._find_holders(array, index)
                    if devices in known:
                        continue
                    known.add(devices)
                    seen.devices.update(devices[:1] if exact else devices)
                    if exact:
                        seen.holders.add(frozenset(devices))
                        seen.first.add(devices[0])
            for group in seen.holders:
                seen.lowest.setdefault(min(group), []).append(group)
        return self._seen

    def _find_holders(self, array: Array, index: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Find the devices that had a chunk, and whether it is known which of them wrote it."""
        if array.name not in self._shardings:
            return (), False
        number, sharding = self._shardings[array.name]
        extents = dict(zip(sharding.axes, sharding.mesh, strict=False))
        odd = math.prod(sharding.mesh) != len(sharding.ids) or any(n < 1 for n in sharding.mesh)
        if odd or len(sharding.spec) > len(array.shape):
            return (), False
        spec = (*sharding.spec, *((),) * (len(array.shape) - len(sharding.spec)))
        place: dict[str, int] = {}
        lo, extent = array.extent(index)
        whole = True
        for at, length, n, grid, axes in zip(lo, extent, array.shape, array.grid, spec, strict=True):
            parts = math.prod(extents.get(a, 1) for a in axes)
            share = -(-n // parts)
            part = at // share
            # A chunk of what several devices held: the partition is not that of what was written.
            if (at + length - 1) // share != part or not all(a in extents and a not in place for a in axes):
                return (), False
            whole = whole and parts == grid
            for axis in reversed(axes):
                place[axis] = part % extents[axis]
                part //= extents[axis]
        key = number, tuple(sorted(place.items()))
        if key not in self._parts:
            ways = [[place[a]] if a in place else range(n) for a, n in extents.items()]
            flat = itertools.product(*ways)
            self._parts[key] = tuple(sharding.ids[_flat(at, sharding.mesh)] for at in flat)
        devices = self._parts[key]
        # Replicas that share the writing cut what they hold: then any of them may have written a part.
        return devices, whole or len(devices) == 1


def _flat(at: Iterable[int], mesh: tuple[int, ...]) -> int:
    flat = 0
    for i, n in zip(at, mesh, strict=True):
        flat = flat * n + i
    return flat


def named(devices: Iterable[int], processes: Mapping[int, int] | None) -> str:
    """Format the writers: as processes if device ids show them, otherwise as devices."""
    if processes is not None:
        return _runs("process", "processes", {processes[d] for d in devices if d in processes})
    return _runs("device", "devices", set(devices))


def _runs(one: str, many: str, numbers: set[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    texts = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs]
    return f"{one if len(numbers) == 1 else many} {some(texts, 8)}"
