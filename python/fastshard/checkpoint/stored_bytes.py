"""Bytes of tensors as they are stored, by the model's own names: small ones that say what others are."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from .. import _core
from ..common import memory_budget
from ..common.dtypes import numpy_dtype
from ..common.errors import from_core
from ..common.thread_counts import default_threads
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
            source.names.get(name, name).removeprefix(source.weights_prefix): (
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
        """Bytes of a part of a tensor. What has no bound is read in pieces.

        Raises:
            FastshardError: ``FS512`` if that is more than the budget of memory.
        """
        import numpy as np

        memory_budget.ask(length, name)
        buffer = np.empty(length, dtype=np.uint8)
        if buffer.size:
            self._plan.read(self._outputs[name][0], start, buffer, default_threads())
        return buffer

    def read(self, name: str, start: int, length: int) -> bytes:
        """The same as bytes."""
        return self.raw(name, start, length).tobytes()

    def values(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as floats."""
        import numpy as np

        _, dtype, shape, size = self._outputs[name]
        raw = self.raw(name, 0, size)
        if dtype == "BF16":
            wide = raw.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(shape)
        if dtype == "F8_E4M3":
            return _f8(raw).reshape(shape)
        if dtype in ("F8_E8M0", "U8"):
            # Powers of two, whose last is no number.
            powers = np.ldexp(1.0, np.minimum(raw, 254).astype(np.int32) - 127).astype(np.float32)
            return np.where(raw == 255, np.float32("nan"), powers).reshape(shape)
        return raw.view(numpy_dtype(dtype)).reshape(shape)


def _f8(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values of E4M3: of what is all ones beside the sign none."""
    import numpy as np

    exponent, fraction = (raw >> 3 & 15).astype(np.int32), (raw & 7).astype(np.float32)
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    value = np.where((raw & 127) == 127, np.nan, value)
    return np.where(raw >> 7, -value, value).astype(np.float32)
