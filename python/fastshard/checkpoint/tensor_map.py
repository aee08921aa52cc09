"""A mapping of full tensors that are read on demand, shared by an opened checkpoint and a conversion in
memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..common import codes
from ..common.errors import Finding, IncompleteError
from .tensor import Tensor

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from .plan import Plan

__all__ = ["Tensors", "TorchTensors"]


class Tensors(Mapping[str, Tensor]):
    """Full tensors by name; no values are read until they are requested from a tensor.

    It offers the methods of ``safetensors.safe_open``: ``keys()``, ``get_tensor()``, ``get_slice()``.
    """

    @property
    def _plan(self) -> Plan:
        """The plan that describes the tensors."""
        raise NotImplementedError

    @property
    def findings(self) -> list[Finding]:
        """The findings about the tensors so far."""
        raise NotImplementedError

    @property
    def incomplete(self) -> list[str]:
        """Sorted names of tensors that cannot be read, because they are missing, incomplete or inconsistent.

        The mapping includes these names, so that iterating over it does not skip them silently.
        """
        return list(self._plan.lost)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._plan.lost:
            raise _incomplete(name, self.findings)
        return Tensor(self._plan, self._plan.position(name))

    def __contains__(self, name: object) -> bool:
        # Without the search for the name that may be meant.
        return name in self._plan.index or name in self._plan.lost

    def __iter__(self) -> Iterator[str]:
        yield from self._plan.index
        yield from self._plan.lost

    def __len__(self) -> int:
        return len(self._plan.index) + len(self._plan.lost)

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names that a notebook and IPython complete between brackets."""
        return list(self)

    def get_tensor(self, name: str) -> Any:
        """Returns the values of a tensor as numpy, under the method name of ``safetensors.safe_open``."""
        return self[name].numpy()

    def get_slice(self, name: str) -> Tensor:
        """Returns the tensor for slicing, under the method name of ``safetensors.safe_open``."""
        return self[name]

    def torch(self, device: Any = None) -> TorchTensors:
        """Returns the tensors as torch tensors, each read when it is requested.

        Use the mapping with ``model.load_state_dict(..., assign=True)``, with functions that take pairs of
        name and tensor (``.items()``), or in loops: a released tensor is freed before the next one is read.

        Args:
            device: the device to put them on; default the CPU, zero-copy if the bytes are contiguous.
        """
        return TorchTensors(self, device)

    def _repr_html_(self) -> str:
        from ..common import notebook_html

        outputs = [(name, *self._plan.outputs[i][1:]) for name, i in self._plan.index.items()]
        total = sum(size for _, _, _, size, _ in outputs) or 1
        rows = (
            (name, dtype, notebook_html.shape(shape), size, notebook_html.Bar(size / total))
            for name, dtype, shape, size, _ in outputs
        )
        head = ("tensor", "dtype", "shape", "bytes", "")
        below = self._below()
        return notebook_html.table(repr(self), head, rows, len(outputs), findings=self.findings, below=below)

    def _below(self) -> str:
        """Return the line below the table in a notebook."""
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def _incomplete(name: str, findings: list[Finding]) -> IncompleteError:
    """Build the error for an incomplete tensor, with its own findings, or else with all errors."""
    errors = [finding for finding in findings if finding.severity == "error"]
    own = [finding for finding in errors if finding.tensor == name]
    incomplete = Finding.of(
        codes.HOLE,
        "the tensor is incomplete",
        tensor=name,
        help="repair the checkpoint: its findings state what is missing",
    )
    return IncompleteError([incomplete, *(own or errors)])


class TorchTensors(Mapping[str, "torch.Tensor"]):
    """torch tensors by name; each is read whenever it is requested."""

    def __init__(self, tensors: Tensors, device: Any = None) -> None:
        #: The tensors that are converted.
        self.tensors = tensors
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name].torch(self._device)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        where = "" if self._device is None else f" on {self._device}"
        return f"<fastshard.TorchTensors: {len(self)} of {self.tensors!r}{where}>"
