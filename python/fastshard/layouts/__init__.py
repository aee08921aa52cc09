"""Layout tables: the built-in TOML files and those that a user registers.

A table declares how one framework stores the tensors of one model family; see ``docs/layouts.md``
for the rule language.
"""

from __future__ import annotations

import os
from importlib import resources

from .. import _core, regular
from ..errors import from_core

__all__ = ["family", "get", "names", "register"]

_registered: dict[str, str] = {}


def register(source: str | os.PathLike[str]) -> str:
    """Adds a user's layout table.

    Args:
        source: TOML text, or the path of a TOML file.

    Returns:
        The table's name, as ``layout = "..."`` gives it. It replaces a built-in one of that name.

    Raises:
        FastshardError: ``FS210`` if the table is not valid; what keeps the file from being read.
    """
    given = isinstance(source, str) and "\n" in source
    text = str(source) if given else regular.read_text(source, regular.MAX_CONFIG, code="FS211")
    try:
        name, _family = _core.check_layout(text)
    except _core.CoreError as error:
        raise from_core(error) from None
    _registered[name] = text
    return name


def get(name: str) -> str:
    """The TOML text of a table.

    Raises:
        KeyError: if there is none of that name.
    """
    if name in _registered:
        return _registered[name]
    file = resources.files(__name__).joinpath(f"{name}.toml")
    if not file.is_file():
        raise KeyError(name)
    return file.read_text(encoding="utf-8")


def family(name: str) -> str:
    """The model family that a table belongs to.

    Raises:
        KeyError: if there is none of that name.
    """
    return _core.check_layout(get(name))[1]


def names() -> list[str]:
    """Names of all tables."""
    built_in = {
        file.name.removesuffix(".toml")
        for file in resources.files(__name__).iterdir()
        if file.name.endswith(".toml")
    }
    return sorted(built_in | set(_registered))
