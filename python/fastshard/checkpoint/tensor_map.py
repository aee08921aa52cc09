"""A mapping of whole tensors that are made when they are read: what an opened checkpoint and a conversion in
memory share."""

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
    """Whole tensors by name; nothing is read until a tensor is asked for its values.

    ``safetensors.safe_open``'s habits carry over: ``keys()``, ``get_tensor()``, ``get_slice()``.
    """

    @property
    def _plan(self) -> Plan:
        """What the tensors are made of."""
        raise NotImplementedError

    @property
    def findings(self) -> list[Finding]:
        """What was found of them so far."""
        raise NotImplementedError

    @property
    def incomplete(self) -> list[str]:
        """Names of the tensors that cannot be read: a part of each, or all of it, is missing or does not fit;
        sorted.

        They are among the names of the mapping, so that nothing which goes through it passes over them in
        silence.
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
        """Names that a notebook and IPython complete between brackets."""
        return list(self)

    def get_tensor(self, name: str) -> Any:
        """The tensor's values as numpy, by the name that ``safetensors.safe_open`` gives this."""
        return self[name].numpy()

    def get_slice(self, name: str) -> Tensor:
        """The tensor, to be sliced; by the name that ``safetensors.safe_open`` gives this."""
        return self[name]

    def torch(self, device: Any = None) -> TorchTensors:
        """The tensors as torch knows them, each made when it is asked for.

        For ``model.load_state_dict(..., assign=True)``, for what takes pairs of name and tensor
        (``.items()``), and for loops of your own: what is let go of is gone before the next is read.

        Args:
            device: where they go; default the CPU, zero-copy where the bytes are one run.
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
        """The line below them in a notebook."""
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def _incomplete(name: str, findings: list[Finding]) -> IncompleteError:
    """The error of a tensor that is not whole: what was found of itself, else all errors."""
    errors = [finding for finding in findings if finding.severity == "error"]
    own = [finding for finding in errors if finding.tensor == name]
    incomplete = Finding.of(
        codes.HOLE,
        "the tensor is incomplete",
        tensor=name,
        help="repair the checkpoint: its findings say what is missing",
    )
    return IncompleteError([incomplete, *(own or errors)])


class TorchTensors(Mapping[str, "torch.Tensor"]):
    """Tensors of torch by name; each is read when it is asked for, and again when it is asked for again."""

    def __init__(self, tensors: Tensors, device: Any = None) -> None:
        #: What they are made of.
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
