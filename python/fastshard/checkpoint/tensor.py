"""A full tensor of a checkpoint, which is read when its values are requested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core
from ..common.dtypes import NUMPY_NAMES, TORCH_NAMES, item_size, numpy_dtype
from ..common.errors import from_core
from ..common.thread_counts import thread_count

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

    from .mapped_files import Bytes
    from .plan import Plan

__all__ = ["ALIGNMENT", "Tensor"]

#: Alignment of torch's allocations in bytes.
ALIGNMENT = 64


def _misaligned(array: Bytes, item: int) -> bool:
    """Return True if the bytes start at an address where a view of larger items would be misaligned."""
    return array.size > 0 and array.ctypes.data % item != 0


def _allocate(length: int) -> Bytes:
    """Allocate bytes with torch's alignment, so that a CPU sums them in the same order."""
    import numpy as np

    raw = np.empty(length + ALIGNMENT - 1, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + length]


class Tensor:
    """A full tensor of a checkpoint; its values are read on demand.

    Examples:
        >>> tensor = fastshard.open("run")["2.attention.query_key_value.weight"]
        >>> tensor.shape, tensor.dtype
        ((96, 32), 'F32')
        >>> tensor.numpy().shape, tensor[0:10].shape  # only the requested rows are read
        ((96, 32), (10, 32))
    """

    def __init__(self, plan: Plan, index: int) -> None:
        self._plan = plan
        self._index = index
        self.name, self._dtype, shape, self.nbytes, self._pieces = plan.outputs[index]
        #: Shape of the full tensor.
        self.shape: tuple[int, ...] = tuple(shape)

    @property
    def dtype(self) -> str:
        """Dtype by its safetensors name, e.g. ``BF16``."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def pieces(self) -> list[tuple[str | None, str, tuple[int, ...]]]:
        """(rank, file, local shape) of each piece of the tensor."""
        return [(rank, file, tuple(shape)) for rank, file, shape in self._plan.core.pieces(self._index)]

    def get_shape(self) -> list[int]:
        """Returns the shape, as safetensors' slices do."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Returns the dtype, as safetensors' slices do."""
        return self._dtype

    def _bytes(self, start: int, length: int, *, private: bool = False) -> Bytes:
        """Return the tensor's bytes: a view of the mapped file if they are contiguous, else a gathered copy.

        The view is read-only, or ``private`` to the caller, who may write to it.
        """
        try:
            place = self._plan.core.contiguous(self._index) if length else None
            if place is not None:
                file, offset = place
                view = self._plan.maps.view(file, offset + start, length, private=private)
                if view is not None:
                    return view
            buffer = _allocate(length)
            self._plan.core.read(self._index, start, buffer, thread_count(None))
        except _core.CoreError as error:
            raise from_core(error) from None
        return buffer

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Reads the values as a numpy array of :attr:`shape`.

        The array is zero-copy and read-only if the bytes are one contiguous range of one file on a local
        filesystem; else it is gathered. bfloat16 and fp8 come as ml_dtypes types.

        A view stays valid when the checkpoint is closed, and when another file replaces the opened one. It
        shows later writes to the opened file. If that file is truncated below the part that is read, SIGBUS
        ends the process. ``numpy().copy()`` is not affected by later changes.

        Raises:
            FastshardError: ``FS506`` if the file changed since it was opened; other codes if it cannot be
                read completely.
        """
        dtype = numpy_dtype(self._dtype)
        array = self._bytes(0, self.nbytes)
        if _misaligned(array, dtype.itemsize):
            array = array.copy()
        return array.view(dtype).reshape(self.shape)

    def torch_rows(self, start: int, stop: int) -> torch.Tensor:
        """Reads some rows of the first dimension as a torch tensor, otherwise like :meth:`torch`."""
        import torch

        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        dtype = getattr(torch, TORCH_NAMES[self._dtype])
        raw = self._private(start * row, (stop - start) * row)
        values = torch.from_numpy(raw).view(dtype) if raw.size else torch.empty(0, dtype=dtype)
        return values.reshape((stop - start, *self.shape[1:]))

    def torch(self, device: Any = None) -> torch.Tensor:
        """Reads the values as a torch tensor of :attr:`shape`.

        On the CPU it is zero-copy like :meth:`numpy`, as long as the file does not change. Writing to the
        tensor changes neither the file nor other tensors.

        Args:
            device: the device to put it on; default the CPU.

        Raises:
            FastshardError: as :meth:`numpy`.
        """
        import torch

        raw = self._private(0, self.nbytes)
        dtype = getattr(torch, TORCH_NAMES[self._dtype])
        values = torch.from_numpy(raw).view(dtype) if self.nbytes else torch.empty(0, dtype=dtype)
        whole = values.reshape(self.shape)
        return whole if device is None else whole.to(device)

    def jax(self, device: Any = None) -> jax.Array:
        """Reads the values as a jax array of :attr:`shape`.

        Args:
            device: the device to put it on; default that of jax.

        Raises:
            ValueError: for 64-bit elements while ``jax_enable_x64`` is off, because jax would narrow them.
            FastshardError: as :meth:`numpy`.
        """
        import jax

        if not getattr(jax.config, "jax_enable_x64", False) and self._dtype in ("I64", "U64", "F64", "C128"):
            raise ValueError(f"{self.name} is {self._dtype}: jax would narrow it without jax_enable_x64")
        array: jax.Array = jax.device_put(self.numpy(), device)
        return array

    def __dlpack__(self, **how: Any) -> Any:
        """Export the values by DLPack; bfloat16 and fp8 need torch.

        Raises:
            BufferError: for bfloat16 and fp8 without torch.
            FastshardError: as :meth:`numpy`.
        """
        return self._for_dlpack().__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the DLPack device, which is the CPU."""
        return (1, 0)

    def _for_dlpack(self) -> Any:
        """Return the values as an object that exports them by DLPack."""
        if self._dtype in NUMPY_NAMES:
            # What is read-only is not lent.
            return self._private(0, self.nbytes).view(numpy_dtype(self._dtype)).reshape(self.shape)
        try:
            return self.torch()
        except ImportError:
            raise BufferError(f"{self._dtype} by DLPack needs torch") from None

    def _private(self, start: int, length: int) -> Bytes:
        """Return aligned bytes of the tensor that belong to the caller.

        torch has no read-only tensors, and writing to a read-only map would end the process.
        """
        raw = self._bytes(start, length, private=True)
        return raw.copy() if _misaligned(raw, item_size(self._dtype)) else raw

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        import numpy as np

        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __getitem__(self, key: Any) -> np.ndarray[Any, np.dtype[Any]]:
        """Read a slice as numpy, like :meth:`numpy`.

        A slice of rows along the first dimension reads only these rows.
        """
        if isinstance(key, slice) and self.shape and key.step in (None, 1):
            start, stop, _ = key.indices(self.shape[0])
            stop = max(start, stop)
            dtype = numpy_dtype(self._dtype)
            row = self.nbytes // self.shape[0] if self.shape[0] else 0
            array = self._bytes(start * row, (stop - start) * row)
            if _misaligned(array, dtype.itemsize):
                array = array.copy()
            return array.view(dtype).reshape((stop - start, *self.shape[1:]))
        import numpy as np

        return np.asarray(self.numpy()[key])

    def __repr__(self) -> str:
        return f"<fastshard.Tensor {self.name} {self._dtype} {list(self.shape)}>"
