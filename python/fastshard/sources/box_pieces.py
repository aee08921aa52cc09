"""Tensors that ranks store as boxes; each rank's file describes the rank's own boxes."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ..common.records import dataclass, field
from ..layouts.declaration import Assembled

#: First index, extent, file, and index of the tensor in the file.
Piece = tuple[list[int], list[int], int, int]


@dataclass
class _Tensor:
    #: Shape of the full tensor; None if no file states it, so that the boxes determine it.
    shape: list[int] | None
    #: By place: the files with the box, in file order.
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = field(default_factory=dict)

    def whole(self) -> list[int]:
        if self.shape is not None:
            return self.shape
        return [
            max(lo[d] + size[d] for lo, size in self.boxes) for d in range(len(next(iter(self.boxes))[0]))
        ]

    def covered(self) -> bool:
        """Return True if the boxes have as many elements as the full tensor."""
        return sum(prod(size) for _, size in self.boxes) == prod(self.whole())


class Boxes:
    """The boxes of all tensors, by name. A box in several files is a copy, which is compared."""

    def __init__(self) -> None:
        self._tensors: dict[str, _Tensor] = {}

    def state(self, name: str, shape: list[int]) -> list[int]:
        """Declare a tensor and its shape; an earlier shape takes precedence."""
        tensor = self._tensors.setdefault(name, _Tensor(shape))
        if tensor.shape is None:
            tensor.shape = shape
        return tensor.shape

    def add(self, name: str, lo: list[int], size: list[int], file: int, number: int) -> None:
        """Add a box that a file stores as its tensor number `number`."""
        tensor = self._tensors.setdefault(name, _Tensor(None))
        tensor.boxes.setdefault((tuple(lo), tuple(size)), []).append((file, number))

    def names(self) -> list[str]:
        """Return all names in file order."""
        return list(self._tensors)

    def shape(self, name: str) -> list[int]:
        """Return the shape of the full tensor."""
        return self._tensors[name].whole()

    def divided(self, name: str) -> set[int]:
        """Return the dimensions along which the tensor is divided into boxes."""
        boxes = self._tensors[name].boxes
        return {d for lo, _ in boxes for d, at in enumerate(lo) if at}

    def first(self, name: str) -> list[int]:
        """Return the extent of the first box."""
        return list(min(self._tensors[name].boxes)[1])

    def shared(self) -> Iterator[tuple[str, list[int], list[int], list[int]]]:
        """Yield boxes that several files store: name, place, extent, and the files."""
        for name, tensor in self._tensors.items():
            for (lo, size), holders in tensor.boxes.items():
                if len(holders) > 1:
                    yield name, list(lo), list(size), [file for file, _ in holders]

    def overlapping(self) -> Iterator[tuple[str, list[int], list[int], int]]:
        """Yield boxes that overlap others: name, place, extent, and a file that stores the box."""
        for name, tensor in self._tensors.items():
            full = prod(tensor.whole())
            if sum(prod(size) for _, size in tensor.boxes) > full:
                (lo, size), holders = list(tensor.boxes.items())[-1]
                yield name, list(lo), list(size), holders[0][0]

    def assembled(self, *, holes: bool = True) -> list[Assembled]:
        """Return the tensors, and additional copies of boxes that several ranks store.

        Each copy is as complete as the first one.

        Args:
            holes: whether to declare incompletely covered tensors, which the core reports.
        """
        sets: list[list[tuple[str, list[int], list[Piece]]]] = []
        for name, tensor in self._tensors.items():
            if not holes and not tensor.covered():
                continue
            for n in range(max([1, *(len(holders) for holders in tensor.boxes.values())])):
                if n == len(sets):
                    sets.append([])
                # Where there is no further copy of a box, the first one stands for it.
                pieces = [
                    (list(lo), list(size), *holders[n if n < len(holders) else 0])
                    for (lo, size), holders in tensor.boxes.items()
                ]
                sets[n].append((name, tensor.whole(), pieces))
        return [
            Assembled(
                next((p[2] for _, _, pieces in tensors for p in pieces), 0),
                # Copies are those of different ranks: one rank holds nothing twice.
                {"replica": n} if len(sets) > 1 else {},
                None,
                None,
                tensors,
                frozen=True,
            )
            for n, tensors in enumerate(sets)
        ]
