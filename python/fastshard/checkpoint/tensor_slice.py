"""A tensor whose parts are read on demand, as values of a framework."""

from __future__ import annotations

from typing import Any

from .tensor import Tensor

__all__ = ["Slice"]


class Slice:
    """A tensor that is read in parts: ``s[0:10]``; ``s[...]`` or ``s[:]`` reads all of it."""

    def __init__(self, tensor: Tensor, framework: str = "torch", device: Any = None) -> None:
        self._tensor = tensor
        self._framework = framework
        self._device = device

    def get_shape(self) -> list[int]:
        """Return the shape of the full tensor."""
        return self._tensor.get_shape()

    def get_dtype(self) -> str:
        """Return the dtype by its safetensors name."""
        return self._tensor.get_dtype()

    def __getitem__(self, key: Any) -> Any:
        """Read a part of the tensor as a tensor of the framework.

        Rows along the first dimension are read without the others.
        """
        if self._framework == "numpy":
            return self._tensor[key]
        if self._framework == "jax":
            import jax

            return jax.device_put(self._tensor[key], self._device)
        part = self._of_torch(key)
        return part if self._device is None else part.to(self._device)

    def _of_torch(self, key: Any) -> Any:
        whole = self._tensor
        first = key[0] if isinstance(key, tuple) and key else key
        if isinstance(first, slice) and whole.shape and first.step in (None, 1):
            start, stop, _ = first.indices(whole.shape[0])
            rows = whole.torch_rows(start, max(start, stop))
            return rows[(slice(None), *key[1:])] if isinstance(key, tuple) else rows
        return whole.torch()[key]
