"""Bytes of tensors as they are stored, by the model's own names: small ones that say what others are."""

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
    """Values of tensors as they are stored, by the model's own names."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    @cached_property
    def _plan(self) -> _core.Plan:
        """Drafted when the first is asked for: most forms ask for none."""
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
        """Its dtype."""
        return self._outputs[name][1]

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self._outputs[name][2]

    def size(self, name: str) -> int:
        """Its bytes."""
        return self._outputs[name][3]

    def raw(self, name: str, start: int, length: int) -> np.ndarray[Any, Any]:
        """Reads bytes of a part of a tensor. What has no bound is read in pieces.

        Raises:
            FastshardError: ``FS512`` if that is more than the budget of memory.
        """
        import numpy as np

        memory_budget.ask(length, tensor=name)
        buffer = np.empty(length, dtype=np.uint8)
        if buffer.size:
            self._plan.read(self._outputs[name][0], start, buffer, default_threads())
        return buffer

    def read(self, name: str, start: int, length: int) -> bytes:
        """Reads the same as bytes."""
        return self.raw(name, start, length).tobytes()

    def windows(self, name: str, multiple: int = 1) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Goes through the bytes of a tensor in pieces: the number of the first element of each, and its
        bytes.

        Args:
            name: the tensor.
            multiple: elements that stay together.
        """
        width, size = item_size(self.dtype(name)), self.size(name)
        step = max(1, WINDOW // (multiple * width)) * multiple * width
        for at in range(0, size, step):
            yield at // width, self.raw(name, at, min(step, size - at))
