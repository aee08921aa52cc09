"""Adapters, targets and layout tables that other installed packages register with entry points."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from typing import Any

from . import codes
from .errors import FastshardError

__all__ = [
    "ADAPTERS",
    "LAYOUTS",
    "TARGETS",
    "VARIABLE",
    "explain_failure",
    "find_plugins",
    "list_layout_files",
    "load_plugin",
]

#: Groups of entry points.
ADAPTERS, TARGETS, LAYOUTS = "fastshard.adapters", "fastshard.targets", "fastshard.layouts"
#: Environment variable; ``off`` disables all plugins.
VARIABLE = "FASTSHARD_PLUGINS"
#: Only packages with ``fastshard`` in their names are read, because reading the entry points of all packages
#: takes longer than most commands.
_METADATA = re.compile(r"(?i)(?!fastshard-\d).*fastshard.*\.(?:dist|egg)-info$")


def find_plugins(group: str) -> dict[str, str]:
    """Find the entry points of a group: the place of each object (``module:name``), by its name.

    The function reads only packages on Python's import path, and never the current directory, which may
    contain a checkpoint. It imports nothing.

    Raises:
        FastshardError: ``FS515`` if the entry points of a package cannot be read.
    """
    return _read_entry_points().get(group, {})


@cache
def _read_entry_points() -> dict[str, dict[str, str]]:
    """Read the entry points of all packages, by group; the first of two with the same name counts."""
    if os.environ.get(VARIABLE, "").lower() == "off":
        return {}
    found: dict[str, dict[str, str]] = {}
    for path in _list_metadata():
        # Few commands need it.
        import configparser

        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError, configparser.Error) as error:
            message = " ".join(str(error).split())
            raise FastshardError.of(
                codes.USAGE, f"its entry points cannot be read: {message}", file=str(path), help=_REMEDY
            ) from None
        for group in parser.sections():
            found[group] = dict(parser.items(group)) | found.get(group, {})
    return found


_REMEDY = f"install the package again, uninstall it, or set {VARIABLE}=off"


def _list_metadata() -> Iterator[Path]:
    try:
        here = os.getcwd()  # noqa: PTH109 - a name to compare with
    except OSError:
        here = None
    for folder in dict.fromkeys(sys.path):
        if not os.path.isdir(folder) or (here is not None and os.path.samefile(folder, here)):  # noqa: PTH112, PTH121 - at every start
            continue
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
        except OSError:
            continue
        for name in names:
            path = Path(folder, name, "entry_points.txt")
            if _METADATA.match(name) and path.is_file():
                yield path


def load_plugin(group: str, name: str) -> Any:
    """Import the object that an entry point names.

    Raises:
        FastshardError: ``FS515`` if it cannot be imported.
    """
    # What is needed besides (`module:name [extra]`) is of no matter here.
    module, _, attribute = find_plugins(group)[name].partition("[")[0].partition(":")
    with explain_failure(group, name):
        loaded = import_module(module.strip())
        return reduce(getattr, filter(None, attribute.strip().split(".")), loaded)


@contextmanager
def explain_failure(group: str, name: str) -> Iterator[None]:
    """Convert an exception of an installed package into a finding that names the package.

    Raises:
        FastshardError: ``FS515``, or the exception that fastshard itself raised.
    """
    try:
        yield
    except FastshardError:
        raise
    # A package must not end a command without a word.
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise FastshardError.of(
            codes.USAGE,
            f"an installed package registers {name} as {find_plugins(group)[name]} ({group}), which fails: "
            f"{message}",
            help=_REMEDY,
        ) from error


def list_layout_files() -> list[Path]:
    """List the TOML files of the packages that are registered for layout tables.

    Raises:
        FastshardError: ``FS515`` if such a package cannot be found.
    """
    files: list[Path] = []
    for name, place in find_plugins(LAYOUTS).items():
        # Few commands need it.
        from importlib.util import find_spec

        with explain_failure(LAYOUTS, name):
            spec = find_spec(place.partition("[")[0].strip())
            folders = list(spec.submodule_search_locations or ()) if spec is not None else []
            if not folders:
                raise ImportError("no such package with files")
        files += sorted(file for folder in folders for file in Path(folder).glob("*.toml"))
    return files
