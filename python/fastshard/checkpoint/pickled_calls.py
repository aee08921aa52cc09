"""Files whose pickle calls a function where other ranks' files have tensors, so that no rank can have written
them."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _core
from ..common import codes
from ..common.errors import Finding
from ..common.formatting import without_numbers

__all__ = ["calls_for_tensors"]

#: Packages whose objects training code saves next to tensors.
_HARMLESS = ("argparse", "collections", "datetime", "enum", "megatron", "numpy", "pathlib", "torch", "types")
#: Maximum nesting of objects to search.
_DEPTH = 6


def calls_for_tensors(
    catalog: _core.Catalog, readable: Sequence[_core.OpenedFile | None]
) -> dict[int, Finding]:
    """Find files that contain calls but no tensors, although files with similar names contain tensors.

    Return a finding for each such file, by its number.

    Args:
        catalog: the files.
        readable: the header of each file; None for one that cannot be read.
    """
    without = [
        (at, file)
        for at, file in enumerate(readable)
        if file is not None and not file["tensors"] and file["format"].startswith("torch")
    ]
    if not without:
        return {}
    kinds = {without_numbers(file["path"]) for file in readable if file is not None and file["tensors"]}
    found: dict[int, Finding] = {}
    for at, file in without:
        if without_numbers(file["path"]) not in kinds:
            continue
        if (name := _called(catalog.values(at)[0], _DEPTH)) is not None:
            found[at] = Finding.of(
                codes.UNSAFE_PICKLE,
                f"the file holds no tensors, and calls {name} when it is loaded; nothing was executed",
                file=file["path"],
                expected="tensors, as in the files of other ranks",
                got=f"a call of {name}",
                help="copy the file again from the node that wrote it, and never open this one with "
                "torch.load",
            )
    return found


def _called(value: object, depth: int) -> str | None:
    """Return the first callable in an object that training code does not save; None if there is none."""
    if depth and isinstance(value, dict):
        name = value.get("__class__")
        if isinstance(name, str) and value.get("args") and name.partition(".")[0] not in _HARMLESS:
            return name
        return next(filter(None, (_called(inner, depth - 1) for inner in value.values())), None)
    if depth and isinstance(value, list):
        return next(filter(None, (_called(inner, depth - 1) for inner in value)), None)
    return None
