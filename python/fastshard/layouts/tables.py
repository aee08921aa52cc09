"""Layout tables: the built-in TOML files and those that a user registers.

A table declares how one framework stores the tensors of one model family; see ``docs/layouts.md``
for the rule language.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from .. import _core
from ..common import codes, safe_files
from ..common.errors import FastshardError, error_for, from_core
from ..common.plugins import VARIABLE, list_layout_files
from . import model_classes

__all__ = ["family", "get", "is_registered", "names", "of_config", "parse", "register", "table"]

_FOLDER = Path(__file__).parent
_registered: dict[str, str] = {}
#: Parsed tables, by name.
_parsed: dict[str, _core.Table] = {}


def register(source: str | os.PathLike[str]) -> str:
    """Add a user's layout table.

    Args:
        source: TOML text, or the path of a TOML file.

    Returns:
        The table's name, as in ``layout = "..."``. The table replaces a built-in one of that name.

    Raises:
        FastshardError: ``FS210`` if the table is not valid; other codes if the file cannot be read.

    Examples:
        >>> fastshard.layouts.register("mylab.toml")
        'mylab.llama'
    """
    text = _text(source)
    name = _read(text, (), _file(source)).name
    before = dict(_registered)
    _registered[name] = text
    # Tables that extend the one of that name are made anew of this one.
    _parsed.clear()
    try:
        table(name)
    except FastshardError:
        _registered.clear()
        _registered.update(before)
        raise
    return name


def parse(source: str | os.PathLike[str]) -> _core.Table:
    """Parse a caller's table for one use; it is not registered.

    Args:
        source: TOML text, or the path of a TOML file.

    Raises:
        FastshardError: as :func:`register`.

    Examples:
        >>> fastshard.layouts.parse("mylab.toml").name
        'mylab.llama'
    """
    return _read(_text(source), (), _file(source))


def _file(source: str | os.PathLike[str]) -> str | None:
    """Return the path of a table; None for a text."""
    return None if isinstance(source, str) and "\n" in source else os.fspath(source)


def _text(source: str | os.PathLike[str]) -> str:
    file = _file(source)
    return (
        str(source)
        if file is None
        else safe_files.read_text(file, safe_files.MAX_CONFIG, code=codes.BAD_VALUE)
    )


def get(name: str) -> str:
    """Return the TOML text of a table.

    Raises:
        KeyError: if no table has that name.

    Examples:
        >>> print(fastshard.layouts.get("gpt_neox.neox"))
        # EleutherAI GPT-NeoX, ...
        layout = "gpt_neox.neox"
        ...
    """
    if name in _registered:
        return _registered[name]
    if name in _installed():
        return _installed()[name]
    file = _FOLDER / f"{name}.toml"
    if not file.is_file():
        raise KeyError(name)
    return file.read_text(encoding="utf-8")


def is_registered(name: str) -> bool:
    """Return True for a table that the user, or an installed package, registered.

    Examples:
        >>> fastshard.layouts.is_registered("gpt_neox.neox")  # it is a built-in table
        False
    """
    return name in _registered or name in _installed()


@cache
def _installed() -> dict[str, str]:
    """Return the tables of installed packages, by name (the file name)."""
    files = list_layout_files()
    return {
        file.name.removesuffix(".toml"): safe_files.read_text(
            file, safe_files.MAX_CONFIG, code=codes.BAD_VALUE
        )
        for file in files
    }


def family(name: str) -> str:
    """Return the model family of a table.

    Raises:
        KeyError: if no table has that name.

    Examples:
        >>> fastshard.layouts.family("gpt_neox.neox")
        'gpt_neox'
    """
    return table(name).family


def table(name: str) -> _core.Table:
    """Return a parsed table.

    Callers can look up names in its rules, or derive other tables from them, without parsing its text.

    Raises:
        KeyError: if no table has that name.
        FastshardError: ``FS210`` if it extends a table that has changed so that it no longer fits.

    Examples:
        >>> fastshard.layouts.table("gpt_neox.neox").family
        'gpt_neox'
    """
    return _table(name, ())


def _table(name: str, above: tuple[str, ...]) -> _core.Table:
    """Return a parsed table; ``above`` lists the tables that extend it."""
    if name not in _parsed:
        try:
            _parsed[name] = _read(get(name), (*above, name))
        except FastshardError as error:
            if name in _registered or name not in _installed():
                raise
            found = [finding.replace(file=finding.file or f"{name}.toml") for finding in error.findings]
            found[0] = found[0].replace(
                help=f"install another version of the package that provides this table, or set {VARIABLE}=off"
            )
            raise error_for(found) from None
    return _parsed[name]


def _read(text: str, above: tuple[str, ...], file: str | None = None) -> _core.Table:
    """Parse a table from its text, and the tables that it extends.

    Raises:
        FastshardError: ``FS210`` if it is not valid, or extends itself or a table that is not registered.
    """
    try:
        extended = _core.Table.extends_of(text)
        if extended in above:
            raise FastshardError.of(codes.BAD_LAYOUT, f"layout {extended} extends itself through {above[-1]}")
        base = None if extended is None or extended not in names() else _table(extended, above)
        table = _core.Table(text, base)
    except _core.CoreError as error:
        raise from_core(error) from None
    model_classes.of_table(table, file)
    return table


def classes() -> dict[str, model_classes.ModelClass]:
    """Return the classes that tables describe, by ``model_type``.

    A user's classes replace built-in ones. Classes are sorted by their ``order``; those without one come
    last.
    """
    own_last = sorted(names(), key=is_registered)
    found = {kind: of for name in own_last for kind, of in model_classes.of_table(table(name)).items()}
    return dict(sorted(found.items(), key=lambda item: (item[1].order is None, item[1].order, item[0])))


def of_config(config: str, file: str | None = None) -> str | None:
    """Return the name of the table whose ``[config]`` fits a model, a user's table before a built-in one.

    Args:
        config: content of ``config.json``, as JSON.
        file: its path, for messages.

    Raises:
        FastshardError: ``FS210`` if two tables fit, ``FS211`` for a value that does not fit.

    Examples:
        >>> with open("model/config.json", encoding="utf-8") as file:
        ...     fastshard.layouts.of_config(file.read())
        'hf.gpt_neox'
    """
    try:
        found = [name for name in sorted({**_installed(), **_registered}) if table(name).is_for(config, file)]
        # Parsing all of them would take longer than most of what reads a small checkpoint.
        found = found or [n for n in names() if _may_be_for(n, config) and table(n).is_for(config, file)]
    except _core.CoreError as error:
        raise from_core(error) from None
    if len(found) > 1:
        raise FastshardError.of(
            codes.BAD_LAYOUT, f"layouts {' and '.join(found)} are for the same model_type", file=file
        )
    return found[0] if found else None


def _may_be_for(name: str, config: str) -> bool:
    """Return True if a config contains a word that identifies a table's models.

    Tables do not inherit these words.
    """
    is_escaped = "\\u00" in config
    return is_registered(name) or is_escaped or any(f'"{kind}"' in config for kind in _model_types(name))


@cache
def _model_types(name: str) -> tuple[str, ...]:
    """Return the ``model_type`` values that a built-in table supports, from the table's text."""
    lists = re.findall(r"^model_type = \[(.*)\]$", get(name), re.MULTILINE)
    return tuple(kind for each in lists for kind in re.findall(r'"([^"]*)"', each))


@cache
def _built_in() -> frozenset[str]:
    return frozenset(
        file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml")
    )


def names() -> list[str]:
    """List the names of all tables.

    Examples:
        >>> [name for name in fastshard.layouts.names() if name.startswith("gpt_neox.")]
        ['gpt_neox.llama', 'gpt_neox.neox']
    """
    return sorted(_built_in() | set(_registered) | set(_installed()))
