"""Values for torch files, in the form that the core pickles."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..common.records import dataclass


class TensorOf(str):
    """A placeholder for the tensor of this name in the target's layout."""

    __slots__ = ()


class Size(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


@dataclass(frozen=True)
class Global:
    """A dtype or a class, by module and name."""

    module: str
    name: str


@dataclass(frozen=True)
class Object:
    """An object with a class, by module and name, and a state."""

    module: str
    name: str
    state: Any


def tree(value: Any) -> Any:
    """Convert a plain value with :class:`TensorOf` leaves into the core's form.

    Raises:
        TypeError: for a value that fastshard cannot write into a torch file.
    """
    if value is None:
        return "none"
    if isinstance(value, TensorOf):
        return {"tensor": str(value)}
    if isinstance(value, Global):
        return {"global": [value.module, value.name]}
    if isinstance(value, Object):
        return {"object": [value.module, value.name, tree(value.state)]}
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, str):
        return {"str": value}
    if isinstance(value, bytes):
        return {"bytes": list(value)}
    if isinstance(value, dict):
        kind = "ordered" if isinstance(value, OrderedDict) else "dict"
        return {kind: [[tree(k), tree(v)] for k, v in value.items()]}
    if isinstance(value, Size):
        return {"size": list(value)}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [tree(v) for v in value]}
    raise TypeError(f"cannot write a {type(value).__name__} in a torch file")
