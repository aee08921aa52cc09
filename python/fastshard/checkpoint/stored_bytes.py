"""Bytes of stored tensors by the model's own names, for small tensors that describe other tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .. import _core
from ..common import memory_budget
from ..common.dtypes import item_size
from ..common.errors import from_core
from ..common.thread_counts import default_threads
from ..models.quantised.forms import WINDOW
from .drafting import UNPLACED, CoreRequest, Opened, draft_of

if TYPE_CHECKING:
    import numpy as np

__all__ = ["StoredBytes"]


class StoredBytes:
    """The stored values of tensors, by the model's own names."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    @cached_property
    def _plan(self) -> _core.Plan:
        """The plan of the stored tensors, drafted on first use, because most formats need none."""
        try:
            return draft_of(self._opened.catalog, CoreRequest(self._opened.source)).place(UNPLACED)
        except _core.CoreError as error:
            raise from_core(error) from None

    @cached_property
    def _outputs(self) -> dict[str, tuple[int, str, tuple[int, ...], int]]:
        source = self._opened.source
        return {
            source.names.own.get(name, name).removeprefix(source.names.prefix): (
                number,
                dtype,
                tuple(shape),
                size,
            )
            for number, (name, dtype, shape, size, _) in enumerate(self._plan.outputs())
        }

    def __contains__(self, name: str) -> bool:
        return name in self._outputs

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor."""
        return self._outputs[name][1]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._outputs[name][2]

    def size(self, name: str) -> int:
        """Return the size of a tensor in bytes."""
        return self._outputs[name][3]

    def raw(self, name: str, start: int, length: int) -> np.ndarray[Any, Any]:
        """Read a range of a tensor's bytes as an array.

        A tensor of unbounded size must be read in several ranges.

        Raises:
            FastshardError: ``FS512`` if the range exceeds the memory budget.
        """
        import numpy as np

        memory_budget.ask(length, tensor=name)
        buffer = np.empty(length, dtype=np.uint8)
        if buffer.size:
            self._plan.read(self._outputs[name][0], start, buffer, default_threads())
        return buffer

    def read(self, name: str, start: int, length: int) -> bytes:
        """Read a range of a tensor's bytes."""
        return self.raw(name, start, length).tobytes()

    def windows(self, name: str, multiple: int = 1) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Yield the bytes of a tensor in pieces, each with the number of its first element.

        Args:
            name: the tensor.
            multiple: number of elements that must not be split across pieces.
        """
        width, size = item_size(self.dtype(name)), self.size(name)
        step = max(1, WINDOW // (multiple * width)) * multiple * width
        for at in range(0, size, step):
            yield at // width, self.raw(name, at, min(step, size - at))
