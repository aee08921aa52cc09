"""Reading any checkpoint with the methods of ``safetensors.safe_open``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..checkpoint.tensor_slice import Slice
from ..common import codes
from ..common.errors import FastshardError, raise_errors
from .open import open as open_checkpoint

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..checkpoint.tensor_map import Tensors
    from ..common.options import StrPath
    from .in_memory import View

__all__ = ["Slice", "safe_open"]

#: Framework names that safetensors accepts, mapped to fastshard's.
_FRAMEWORKS = {
    "pt": "torch",
    "torch": "torch",
    "pytorch": "torch",
    "np": "numpy",
    "numpy": "numpy",
    "jax": "jax",
    "flax": "jax",
}


def _metadata(opened: Checkpoint | View) -> dict[str, str] | None:
    files = getattr(opened, "files", [])
    if not files or any(file["format"] != "safetensors" for file in files):
        return {"format": "pt"}
    found = opened.opened.catalog.values(0)[0]  # type: ignore[union-attr]
    return {key: value for key, value in found.items() if isinstance(value, str)} or None


class safe_open:
    """Opens a checkpoint as ``safetensors.safe_open`` opens a file.

    It has the same methods; an unknown name raises a KeyError.

    Args:
        filename: the checkpoint's directory or file.
        framework: ``pt``, ``np`` or ``jax``, or one of safetensors' other names for them.
        device: device of the tensors; default the CPU.
        options: as for :func:`fastshard.open`.

    Raises:
        FastshardError: as :func:`fastshard.open`; also for errors inside the checkpoint, so that a checkpoint
            with errors is not opened.

    Examples:
        >>> with fastshard.safe_open("run", framework="pt", to="hf", vocab_size=500) as file:
        ...     tensors = {name: file.get_tensor(name) for name in file.keys()}
        >>> tensors["embed_out.weight"].shape
        torch.Size([500, 32])
    """

    def __init__(self, filename: StrPath, framework: str = "pt", device: Any = "cpu", **options: Any) -> None:
        if framework not in _FRAMEWORKS:
            raise FastshardError.of(
                codes.USAGE, "framework", expected=", ".join(_FRAMEWORKS), got=repr(framework)
            )
        self._framework = _FRAMEWORKS[framework]
        self._device = None if device in ("cpu", -1) else device
        opened: Checkpoint | View = open_checkpoint(filename, **options)
        # A view has raised them.
        raise_errors(opened.findings)
        self._tensors: Tensors = opened
        self._metadata = _metadata(opened)

    def keys(self) -> list[str]:
        """Lists the names of the tensors."""
        return list(self._tensors)

    def offset_keys(self) -> list[str]:
        """Lists the names of the tensors in the order of a result's files."""
        return list(self._tensors)

    def metadata(self) -> dict[str, str] | None:
        """Returns the metadata of the first safetensors file; for other formats, the metadata of a result."""
        return self._metadata

    def get_tensor(self, name: str) -> Any:
        """Reads a full tensor.

        Raises:
            KeyError: if no tensor has this name.
        """
        tensor = self._tensors[name]
        if self._framework == "torch":
            return tensor.torch(self._device)
        return tensor.numpy() if self._framework == "numpy" else tensor.jax(self._device)

    def get_slice(self, name: str) -> Slice:
        """Returns a tensor whose parts are read on demand.

        Raises:
            KeyError: if no tensor has this name.
        """
        return Slice(self._tensors[name], self._framework, self._device)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *exc: object) -> None:
        return None
